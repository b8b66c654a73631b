"""What is done to a checkpoint: one damage at a time, each with its name, its file and where it
lies in it.

Positions are drawn from three strata of a file, by what an undamaged merge reads of it: ``plan``
(headers, pickles, directories), ``data`` (what is read as tensors are copied) and ``unread``.
"""

from __future__ import annotations

import io
import json
import random
import re
import struct
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

Kind = Literal["delete", "cut", "grow", "flip", "older", "newer", "swap"]
Stratum = Literal["plan", "data", "unread", ""]
Spans = Sequence[tuple[int, int]]  # (start, end), in their order, not overlapping

SMALL = 2 << 10  # bytes of a file of which every byte is damaged in the long form
HOUR = 3600


@dataclass(frozen=True, slots=True)
class Damage:
    """``content`` is what each file has instead (``None``: it is gone), ``age`` how many seconds
    older the first one is.
    """

    kind: Kind
    file: str
    where: str
    content: Mapping[str, bytes | None]
    stratum: Stratum = ""
    at: int = -1
    age: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.file} {self.where}".rstrip()


@dataclass(frozen=True, slots=True)
class Strata:
    """What of a file an undamaged merge reads to plan, and what more it reads to copy."""

    plan: Spans
    data: Spans

    def of(self, at: int) -> Stratum:
        """The stratum of one byte; what is read for both is ``plan``."""
        if _holds(self.plan, at):
            return "plan"
        return "data" if _holds(self.data, at) else "unread"


def joined(spans: Iterable[tuple[int, int]]) -> Spans:
    """Sorted, and those that touch made one."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        elif end > start:
            found.append((start, end))
    return found


def damages(
    files: Mapping[str, bytes], strata: Mapping[str, Strata], flips: int, dice: random.Random
) -> Iterator[Damage]:
    """Every damage to ``files``; ``flips`` is how many bits are flipped in each stratum of a file
    that a merge reads.
    """
    for name, data in files.items():
        yield Damage("delete", name, "", {name: None})
        if name not in strata:
            continue
        yield from _lengths(name, data, dice)
        for at in _positions(data, strata[name], flips, dice):
            bit = dice.randrange(8)
            changed = data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
            yield Damage(
                "flip", name, f"byte {at} bit {bit}", {name: changed}, strata[name].of(at), at
            )
        other = resaved(name, data, files)
        if other is not None:
            yield Damage("older", name, "from a save an hour before", {name: other}, age=HOUR)
            yield Damage("newer", name, "from a save an hour later", {name: other}, age=-HOUR)
    for one, two in _pairs(strata):
        if files[one] != files[two]:
            yield Damage("swap", one, f"with {two}", {one: files[two], two: files[one]})


def _lengths(name: str, data: bytes, dice: random.Random) -> Iterator[Damage]:
    for size in sorted({0, len(data) // 2, len(data) - 1} - {-1, len(data)}):
        yield Damage("cut", name, f"to {size} of {len(data)} bytes", {name: data[:size]}, at=size)
    for more in (b"\0", bytes(dice.randbytes(100)), data[:4096]):
        yield Damage("grow", name, f"by {len(more)} bytes", {name: data + more}, at=len(data))


def _positions(data: bytes, strata: Strata, flips: int, dice: random.Random) -> Sequence[int]:
    """In small files, and among headers where ``flips`` is large enough, every byte."""
    if len(data) <= min(SMALL, flips * 8):
        return range(len(data))
    read = joined([*strata.plan, *strata.data])
    gaps = list(
        zip([0, *(end for _, end in read)], [*(start for start, _ in read), len(data)], strict=True)
    )
    chosen = {
        at
        for spans in (strata.plan, strata.data, joined(gaps))
        for at in _drawn(spans, flips, dice)
    }
    return sorted(chosen)


def _drawn(spans: Spans, count: int, dice: random.Random) -> list[int]:
    """Bytes of ``spans``, every one as likely as the others, and the first and last of all."""
    total = sum(end - start for start, end in spans)
    wanted = dice.sample(range(total), min(count, total))
    return [_nth(spans, n) for n in {*wanted, *((0, total - 1) if total else ())}]


def _nth(spans: Spans, n: int) -> int:
    for start, end in spans:
        if n < end - start:
            return start + n
        n -= end - start
    raise IndexError(n)


def _holds(spans: Spans, at: int) -> bool:
    return any(start <= at < end for start, end in spans)


def _pairs(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Files that only differ in a number, two that follow each other at a time."""
    alike: defaultdict[str, list[str]] = defaultdict(list)
    for name in sorted(names):
        alike[re.sub(r"\d+", "#", name)].append(name)
    for found in alike.values():
        yield from pairwise(found)


# --- a shard as another save of the same training would have written it: other values, the same
# sizes, and checksums that are right

_ENTRY_CRC = 16  # bytes before the CRC32 in an entry of a zip's directory
_ENTRY = struct.Struct("<4s6H3L5H2L")
_DESCRIPTOR = b"PK\x07\x08"


def resaved(name: str, data: bytes, files: Mapping[str, bytes]) -> bytes | None:
    """The file with other values.

    ``None`` where it holds no tensors, or nothing here knows how to change them.
    """
    if name.endswith(".safetensors"):
        return _safetensors(data)
    out = bytearray(data)
    changed = [_archive(out, start, size) for start, size in _archives(name, data, files)]
    return bytes(out) if any(changed) else None


def _other(values: bytes) -> bytes:
    """Another lowest bit in every second byte: what a step of training does to a float32 or
    bfloat16.
    """
    return bytes(b ^ 1 if n % 2 == 0 else b for n, b in enumerate(values))


def _safetensors(data: bytes) -> bytes | None:
    base = 8 + int.from_bytes(data[:8], "little")
    return data[:base] + _other(data[base:]) if json.loads(data[8:base]) and data[base:] else None


def _archives(name: str, data: bytes, files: Mapping[str, bytes]) -> Iterator[tuple[int, int]]:
    """Where the ``torch.save`` archives lie: the whole file, or one item after another."""
    if not name.endswith(".distcp"):
        if zipfile.is_zipfile(io.BytesIO(data)):
            yield 0, len(data)
        return
    start = 0
    while (
        end := data.find(b"PK\x05\x06", start)
    ) >= 0:  # torch writes no comment behind an end record
        yield start, end + 22 - start
        start = end + 22


def _archive(out: bytearray, start: int, size: int) -> bool:
    """Change the storages of one archive in place, and what its directory says of them."""
    try:
        with zipfile.ZipFile(io.BytesIO(out[start : start + size])) as archive:
            entries, at = archive.infolist(), start + archive.start_dir
    except zipfile.BadZipFile:
        return False
    changed = False
    for entry in entries:
        fields = _ENTRY.unpack_from(out, at)
        if entry.filename.rpartition("/")[0].endswith("/data") and entry.file_size > 16:
            changed = True
            _record(out, start + entry.header_offset, entry.file_size, at)
        at += _ENTRY.size + fields[10] + fields[11] + fields[12]
    return changed


def _record(out: bytearray, header: int, size: int, entry: int) -> None:
    names, extras = struct.unpack_from("<2H", out, header + 26)
    begin = header + 30 + names + extras
    values = _other(bytes(out[begin : begin + size]))
    out[begin : begin + size] = values
    crc = zlib.crc32(values)
    struct.pack_into("<L", out, entry + _ENTRY_CRC, crc)
    if out[begin + size : begin + size + 4] == _DESCRIPTOR:
        struct.pack_into("<L", out, begin + size + 4, crc)
