"""A baseline: the digests of all files of a directory as they once were, in a file of its own.  Pure.

JSON: ``format``, ``files`` (path, size, digest, block_size, blocks, as a manifest has them), and ``digest``, the BLAKE3 of the files' canonical JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from ckptsync.decoding import Count, Decoder, FormatNumber, format_number
from ckptsync.digest import FileDigest, digest
from ckptsync.errors import Corrupt, Unsupported
from ckptsync.records.coding import check_files
from ckptsync.records.manifest import FileEntry
from ckptsync.verify.expected import Expected

FORMAT = 1


@dataclass(frozen=True, slots=True)
class _Entry:
    path: str
    size: Count
    digest: str
    block_size: Count
    blocks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Baseline:
    format: FormatNumber
    digest: str
    files: tuple[_Entry, ...]


LIMIT = 1 << 30
_DECODER = Decoder(_Baseline, "a baseline", LIMIT)


def encode(files: Iterable[Expected]) -> bytes:
    """As it is written."""
    entries = [
        _Entry(f.path, f.size, f.wanted.digest, f.wanted.block_size, f.wanted.blocks) for f in sorted(files, key=lambda f: f.path)
    ]
    told = [asdict(entry) for entry in entries]
    return json.dumps({"format": FORMAT, "digest": _sum(told), "files": told}, sort_keys=True, indent=1).encode() + b"\n"


def decode(data: bytes, name: str) -> tuple[Expected, ...]:
    """What it says should be there.  Raises Corrupt, or Unsupported if it is newer than this program; ``name`` is for messages."""
    number = format_number(data, name, "a baseline")
    if number > FORMAT:
        raise Unsupported(
            f"{name}: baseline format {number}, at most {FORMAT} is known here", hint="upgrade ckptsync on this machine"
        )
    found = _DECODER.decode(data, name)
    if _sum([asdict(entry) for entry in found.files]) != found.digest:
        raise Corrupt(
            f"{name}: its files are not those that it was made of", hint="record it again, of files that are known to be good"
        )
    try:
        check_files(FileEntry(e.path, e.size, e.digest, e.block_size, e.blocks, 0) for e in found.files)
    except Corrupt as e:
        raise Corrupt(f"{name}: {e}") from e
    return tuple(expected(e.path, FileDigest(e.size, e.digest, e.block_size, e.blocks)) for e in found.files)


def expected(path: str, wanted: FileDigest) -> Expected:
    """A file of a plain directory."""
    return Expected(path, path, path, wanted)


def _sum(told: list[dict[str, object]]) -> str:
    return digest(json.dumps(told, sort_keys=True, separators=(",", ":")).encode())
