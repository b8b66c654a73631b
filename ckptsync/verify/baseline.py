"""A baseline: the digests of all files of a directory as they once were, in a file of its own.  Pure.

JSON: ``format``, ``files`` (path, size, digest, block_size, blocks, as a manifest has them), and ``digest``, the BLAKE3 of the files' canonical JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import msgspec

from ckptsync.digest import FileDigest, digest
from ckptsync.errors import Corrupt, Unsupported
from ckptsync.paths import checked_path
from ckptsync.verify.expected import Expected

FORMAT = 1


@dataclass(frozen=True, slots=True)
class _Entry:
    path: str
    size: int
    digest: str
    block_size: int
    blocks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Baseline:
    format: int
    digest: str
    files: tuple[_Entry, ...]


def encode(files: Iterable[Expected]) -> bytes:
    """As it is written."""
    entries = [
        _Entry(f.path, f.size, f.wanted.digest, f.wanted.block_size, f.wanted.blocks) for f in sorted(files, key=lambda f: f.path)
    ]
    told = [asdict(entry) for entry in entries]
    return json.dumps({"format": FORMAT, "digest": _sum(told), "files": told}, sort_keys=True, indent=1).encode() + b"\n"


def decode(data: bytes, name: str) -> tuple[Expected, ...]:
    """What it says should be there.  Raises Corrupt, or Unsupported if it is newer than this program; ``name`` is for messages."""
    try:
        value = msgspec.json.decode(data)
        number = value["format"]
        if type(number) is int and number > FORMAT:
            raise Unsupported(
                f"{name}: baseline format {number}, at most {FORMAT} is known here", hint="upgrade ckptsync on this machine"
            )
        found = msgspec.convert(value, _Baseline, strict=True)
    except (msgspec.MsgspecError, KeyError, TypeError, RecursionError) as e:
        raise Corrupt(f"{name}: not a baseline: {e}") from e
    if _sum([asdict(entry) for entry in found.files]) != found.digest:
        raise Corrupt(
            f"{name}: its files are not those that it was made of", hint="record it again, of files that are known to be good"
        )
    return tuple(expected(checked_path(e.path), FileDigest(e.size, e.digest, e.block_size, e.blocks)) for e in found.files)


def expected(path: str, wanted: FileDigest) -> Expected:
    """A file of a plain directory."""
    return Expected(path, path, path, wanted)


def _sum(told: list[dict[str, object]]) -> str:
    return digest(json.dumps(told, sort_keys=True, separators=(",", ":")).encode())
