"""A catalogue's cache in a file of this user, for commands that end: it may be deleted at any time, and is believed only if it is whole and of this version.

What it saves is reading; what there is in the store is listed every time (`reading.read`).
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import msgspec

from ckptsync import __version__
from ckptsync.catalogue.reading import Cache
from ckptsync.catalogue.summary import Gap, Proven, Summary
from ckptsync.catalogue.units import Name, Unit
from ckptsync.digest import digest
from ckptsync.records.saves import Sibling

_SHAPE = repr([(kind.__name__, f.name, str(f.type)) for kind in (Unit, Summary, Proven, Gap, Sibling) for f in fields(kind)])
_HEAD = f"ckptsync catalogue {__version__} {digest(_SHAPE.encode())[:16]}\n".encode()


@dataclass(frozen=True, slots=True)
class _Kept:
    url: str
    cuts: dict[str, tuple[str, ...]]
    units: msgspec.Raw


_DECODER = msgspec.msgpack.Decoder(_Kept)
_UNITS = msgspec.msgpack.Decoder(tuple[tuple[str, str, Unit], ...])


def load(url: str) -> Cache:
    """What was kept of the store at ``url``; an empty cache where nothing is, or what cannot be believed."""
    try:
        data = path(url).read_bytes()
    except (OSError, RuntimeError):
        return Cache()  # it is only read again
    head, body = data[: len(_HEAD)], data[len(_HEAD) + 64 :]
    if head != _HEAD or data[len(_HEAD) : len(_HEAD) + 64] != digest(body).encode():
        return Cache()
    try:
        kept = _DECODER.decode(body)
    except (ValueError, RecursionError, MemoryError):
        return Cache()  # of a program that called itself by the same version
    return Cache(cuts=kept.cuts, packed=partial(_unpacked, kept.units)) if kept.url == url else Cache()


def _unpacked(units: msgspec.Raw) -> dict[Name, Unit]:
    try:
        return {(run, base): unit for run, base, unit in _UNITS.decode(units)}
    except (ValueError, RecursionError, MemoryError):
        return {}  # as above


def save(url: str, cache: Cache) -> None:
    """Keep it, if it holds anything new.  A disk that is full, or a home that cannot be written, costs only time later: no error."""
    if not cache.is_new:
        return
    try:
        target = path(url)
    except RuntimeError:
        return  # nobody's home: there is nowhere to keep it
    cache.unpack()
    units = msgspec.msgpack.encode(tuple((*name, unit) for name, unit in cache.units.items()))
    body = msgspec.msgpack.encode(_Kept(url, cache.cuts, msgspec.Raw(units)))
    draft = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
            file.write(_HEAD + digest(body).encode() + body)
        draft.replace(target)
        cache.is_new = False
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()


def path(url: str) -> Path:
    """Where it is: below ``CACHE_DIRECTORY``, as systemd sets it for a service, ``XDG_CACHE_HOME``, or ``~/.cache``.

    Raises RuntimeError for a user whom the system does not know, and who has no ``HOME``, as in a container.
    """
    given = os.environ.get("CACHE_DIRECTORY", "").partition(":")[0]
    base = Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "ckptsync"
    return base / f"catalogue-{digest(url.encode())[:16]}"
