"""A vector that can be damaged and mended, and what ckptsync makes of it."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import shutil
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

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
from tests.campaigns.damaging import Damage, Strata, joined
from tests.support.files_in_memory import contents, write_files
from tests.support.merge_in_memory import consolidate
from tests.support.merge_on_disk import merge_local
from tests.support.vector import Vector

REFUSALS = (3, 5, 10)
SLOW = 5.0  # seconds of CPU that no answer about a vector may take
_BEGIN = 1_700_000_000  # when the save was


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
