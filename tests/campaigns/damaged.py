"""A vector that can be damaged and mended, what is done to it, and what ckptsync makes of it.

One damage at a time, each with its name, its file and where it lies in it.  Positions are drawn
from three strata of a file, by what an undamaged merge reads of it: ``plan`` (headers, pickles,
directories), ``data`` (what is read as tensors are copied) and ``unread``.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import random
import re
import shutil
import struct
import time
import traceback
import zipfile
import zlib
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

from ckptsync.cli.main import main
from ckptsync.errors import CkptsyncError
from ckptsync.layouts import registry
from ckptsync.merger.engine import MergeResult
from ckptsync.merger.plan import DType, MergeOptions
from ckptsync.merger.prepare import prepare
from ckptsync.records.model_record import ModelTensor
from ckptsync.stores.checkpoint_files import DirectoryFiles, Overlay
from ckptsync.stores.contract import Chunk
from ckptsync.tensors import Files
from tests.support.files_in_memory import contents, write_files
from tests.support.merge_in_memory import consolidate
from tests.support.merge_on_disk import merge_local
from tests.support.vector import Vector

Kind = Literal["delete", "cut", "grow", "flip", "older", "newer", "swap"]
Stratum = Literal["plan", "data", "unread", ""]
Spans = Sequence[tuple[int, int]]  # (start, end), in their order, not overlapping

SMALL = 2 << 10  # bytes of a file of which every byte is damaged in the long form
HOUR = 3600
REFUSALS = (3, 5, 10)
SLOW = 5.0  # seconds of CPU that no answer about a vector may take
_BEGIN = 1_700_000_000  # when the save was


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


@dataclass(frozen=True, slots=True)
class Way:
    """One way to merge a vector, what comes of it undamaged, and which files it looks at."""

    dtype: DType
    source: str | None
    reference: MergeResult
    strata: Mapping[str, Strata]

    def __str__(self) -> str:
        return f"--dtype {self.dtype}" + (f" --source {self.source}" if self.source else "")


@dataclass(frozen=True, slots=True)
class Outcome:
    """``refused``, ``harmless``, ``beside`` (only files beside the weights differ), ``SILENT``,
    ``TRACEBACK`` or ``SLOW``.
    """

    word: str
    said: str = ""


class Patient:
    """A copy of a vector's files with the times that a save would give them."""

    def __init__(self, of: Vector, home: Path) -> None:
        self.name, self._home = of.name, home
        folder = of.keep.parent.parent
        self.sources = tuple(home / source.relative_to(folder) for source in of.sources)
        for source, here in zip(of.sources, self.sources, strict=True):
            shutil.copytree(source, here)
        self.files = contents(home)
        for name in self.files:
            self._date(name)
        self._out = home / "merged"
        self.ways = tuple(self._ways())

    def moved(self, home: Path) -> Patient:
        """The same, undamaged, in another directory that is empty."""
        other = copy.copy(self)
        other._home, other._out = home, home / "merged"
        other.sources = tuple(home / source.relative_to(self._home) for source in self.sources)
        write_files(home, self.files)
        for name in self.files:
            other._date(name)
        return other

    def read(self) -> dict[str, Strata]:
        """Every file that some way reads or demands, and what of it."""
        plan: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        data: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        for way in self.ways:
            for name, strata in way.strata.items():
                plan[name] += strata.plan
                data[name] += strata.data
        return {name: Strata(joined(plan[name]), joined(data[name])) for name in sorted(plan)}

    @contextlib.contextmanager
    def damaged(self, by: Damage) -> Iterator[None]:
        """With the damage done, and undone at the end."""
        try:
            for name, content in by.content.items():
                (self._home / name).unlink() if content is None else (
                    self._home / name
                ).write_bytes(content)
                if content is not None:
                    self._date(name, by.age if name == by.file else 0)
            yield
        finally:
            for name in by.content:
                (self._home / name).write_bytes(self.files[name])
                self._date(name)

    def merge(self, way: Way) -> Outcome:
        """What comes of it, against the undamaged."""
        begun = time.process_time()
        try:
            merged = merge_local(
                self.sources, self._out, MergeOptions(way.dtype, source=way.source)
            )
        except CkptsyncError as e:
            outcome = Outcome(
                "refused" if e.exit_code in REFUSALS else "TRACEBACK", f"{type(e).__name__}: {e}"
            )
        except Exception:  # noqa: BLE001 - what is no CkptsyncError is what this looks for
            outcome = Outcome("TRACEBACK", traceback.format_exc())
        else:
            outcome = _compared(merged, way.reference)
        finally:
            shutil.rmtree(self._out, ignore_errors=True)
        return Outcome("SLOW", outcome.said) if time.process_time() - begun > SLOW else outcome

    def look(self) -> Outcome:
        """What inspect and verify say; only that they do."""
        for command in (["inspect"], ["verify", "--level", "parse"]):
            told = io.StringIO()
            try:
                with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
                    code = main([*command, *map(str, self.sources)])
            except BaseException:  # noqa: BLE001 - as above
                return Outcome("TRACEBACK", f"{' '.join(command)}\n{traceback.format_exc()}")
            if code not in (0, *REFUSALS):
                return Outcome(
                    "TRACEBACK", f"{' '.join(command)}: exit code {code}: {told.getvalue()}"
                )
        return Outcome("looked")

    def _date(self, name: str, older: int = 0) -> None:
        """Shards first, then what is written when they are there."""
        last = name.rpartition("/")[2]
        at = _BEGIN + (
            2
            if last == "trainer_state.json"
            else 1
            if last.endswith(".metadata") or last == "latest"
            else 0
        )
        os.utime(self._home / name, (at - older, at - older))

    def _ways(self) -> Iterator[Way]:
        """Unasked first, which may choose another source when one is damaged.

        Then every source in every way that reads or writes other bytes.
        """
        seen: list[tuple[Mapping[str, Strata], tuple[ModelTensor, ...]]] = []
        files = Overlay([DirectoryFiles(str(source)) for source in self.sources])
        dtypes: tuple[DType, ...] = ("keep", "auto")
        asked: list[tuple[DType, str | None]] = [
            ("auto", None),
            *((d, str(s)) for s in registry.sources(files) for d in dtypes),
        ]
        for dtype, source in asked:
            way = self._way(files, dtype, source)
            if way and (source is None or (way.strata, way.reference.tensors) not in seen):
                seen += [(way.strata, way.reference.tensors)] if source else []
                yield way

    def _way(self, files: Overlay, dtype: DType, source: str | None) -> Way | None:
        options, recorded = MergeOptions(dtype, source=source), _Recorded(files)
        try:
            prepare(recorded, options)
            planned = recorded.spans
            recorded.spans = defaultdict(list)
            consolidate(recorded, _nowhere, options)
            reference = merge_local(self.sources, self._out, options)
        except CkptsyncError:
            # a source that is refused undamaged (an optimizer, a placeholder) is no patient
            return None
        shutil.rmtree(self._out)
        demanded = {self._path(name) for name in registry.demands(files).model}
        names = {self._path(name): name for name in files.sizes()}
        strata = {
            path: Strata(joined(planned[name]), joined(recorded.spans[name]))
            for path, name in names.items()
            if name in planned or name in recorded.spans or path in demanded
        }
        return Way(dtype, source, reference, strata)

    def _path(self, name: str) -> str:
        """From a name in the overlay to the one below the vector: the first source has it."""
        found = next(
            (source / name for source in self.sources if (source / name).is_file()),
            self.sources[0] / name,
        )
        return found.relative_to(self._home).as_posix()


class _Recorded:
    """`Files` that remember what was read."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self.spans: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)

    def sizes(self) -> Mapping[str, int]:
        return self._files.sizes()

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        self.spans[name].append((start, start + len(out)))
        self._files.read_into(name, start, out)


def _compared(merged: MergeResult, reference: MergeResult) -> Outcome:
    odd = _tensors(merged) ^ _tensors(reference)
    if odd:
        return Outcome(
            "SILENT",
            json.dumps({"tensors": sorted({name for name, *_ in odd})[:4], "notes": merged.notes}),
        )
    if {f for f in merged.files if _is_beside(f.path)} != {
        f for f in reference.files if _is_beside(f.path)
    }:
        return Outcome(
            "beside", ", ".join(sorted({f.path for f in {*merged.files} ^ {*reference.files}}))
        )
    return Outcome("harmless")


def _tensors(merged: MergeResult) -> set[tuple[str, str, tuple[int, ...], str]]:
    return {(t.name, t.dtype, t.shape, t.digest) for t in merged.tensors}


def _is_beside(path: str) -> bool:
    return not path.endswith((".safetensors", ".safetensors.index.json"))


def _nowhere(_: str, chunks: Iterable[Chunk]) -> None:
    deque(chunks, maxlen=0)


# --- what is done to it


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
