"""The catalogue's cache in a file of this user.

It may be deleted at any time, and counts only if it is whole and of this version.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, fields
from pathlib import Path

import msgspec

from ckptsync import __version__
from ckptsync.catalogue.cached import Cache, Checkpoint, Name
from ckptsync.catalogue.location_summary import Gap, Proven, Summary
from ckptsync.digest import digest
from ckptsync.records.save_groups import Sibling

_SHAPE = repr(
    [
        (kind.__name__, f.name, str(f.type))
        for kind in (Checkpoint, Summary, Proven, Gap, Sibling)
        for f in fields(kind)
    ]
)
_HEAD = f"ckptsync catalogue {__version__} {digest(_SHAPE.encode())[:16]}\n".encode()
_UNDECODABLE = (ValueError, RecursionError, MemoryError)  # of another program of the same version


@dataclass(frozen=True, slots=True)
class _Content:
    url: str
    cuts: dict[str, tuple[str, ...]]
    checkpoints: msgspec.Raw


_CONTENT = msgspec.msgpack.Decoder(_Content)
_CHECKPOINTS = msgspec.msgpack.Decoder(tuple[tuple[str, str, Checkpoint], ...])


def load(url: str) -> Cache:
    """Return the saved cache of a store; an empty one where there is none that counts."""
    try:
        data = path(url).read_bytes()
    except (OSError, RuntimeError):
        return Cache()
    body = data[len(_HEAD) + 64 :]
    if data[: len(_HEAD) + 64] != _HEAD + digest(body).encode():
        return Cache()
    try:
        content = _CONTENT.decode(body)
    except _UNDECODABLE:
        return Cache()

    def unpack() -> dict[Name, Checkpoint]:
        try:
            return {
                (run, name): found for run, name, found in _CHECKPOINTS.decode(content.checkpoints)
            }
        except _UNDECODABLE:
            return {}

    return Cache(cuts=content.cuts, packed=unpack) if content.url == url else Cache()


def save(url: str, cache: Cache) -> None:
    """Write the cache, if it holds anything new.

    A disk that is full, or a home that cannot be written, is no error.
    """
    if not cache.is_new:
        return
    try:
        target = path(url)
    except RuntimeError:
        return  # a user without a home
    cache.unpack()
    checkpoints = msgspec.msgpack.encode(
        tuple((*name, found) for name, found in cache.checkpoints.items())
    )
    body = msgspec.msgpack.encode(_Content(url, cache.cuts, msgspec.Raw(checkpoints)))
    draft = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with os.fdopen(
            os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb"
        ) as file:
            file.write(_HEAD + digest(body).encode() + body)
        draft.replace(target)
        cache.is_new = False
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()


def path(url: str) -> Path:
    """Return where the cache of a store is.

    That is below ``CACHE_DIRECTORY`` (as systemd sets it), ``XDG_CACHE_HOME``, or ``~/.cache``.

    Raises RuntimeError for a user whom the system does not know, and who has no ``HOME``, as in a
    container.
    """
    own = os.environ.get("CACHE_DIRECTORY", "").partition(":")[0]
    base = (
        Path(own)
        if own
        else Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "ckptsync"
    )
    return base / f"catalogue-{digest(url.encode())[:16]}"
