"""Level parse: files open, metadata agrees with them, tensors tile, models match their record.

A file with the right digest can still have been wrong when it was stored. So each layout reads its
metadata as for a merge, and what a merge would refuse is a finding, named by the file that was read
last. What cannot be judged becomes a note.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

from ckptsync.errors import Corrupt, Incomplete, Unsupported
from ckptsync.formats import safetensors
from ckptsync.layouts import registry
from ckptsync.layouts.registry import WeightsSource
from ckptsync.merger.plan import check_tiling
from ckptsync.merger.prepare import check_complete
from ckptsync.records.model_record import ModelTensor
from ckptsync.records.report import LEVELS, Level, VerifyFinding
from ckptsync.verifier.tracked_files import TrackedFiles

# How notes begin without which a level would be claimed that was not reached.
UNPARSED, UNLOADED = "not parsed: ", "not loaded: "
INCOMPLETE = "incomplete: "
_BELOW: dict[str, Level] = {UNPARSED: "digest", UNLOADED: "parse"}


def reached_level(level: Level, findings: Iterable[VerifyFinding]) -> Level:
    """Return the lowest of ``level``, "digest" if a note is `UNPARSED`, "parse" if `UNLOADED`."""
    details = [f.detail for f in findings if f.kind == "note"]
    lower_levels = [
        below for sign, below in _BELOW.items() if any(d.startswith(sign) for d in details)
    ]
    return min((level, *lower_levels), key=LEVELS.index)


def check_checkpoint(files: TrackedFiles) -> Iterator[VerifyFinding]:
    """Yield damage to the structure of a checkpoint, and notes for what cannot be judged.

    Without damage also notes on tensors that are, or may be, missing. Raise StoreError.
    """
    yield from _check_closed(files)
    sources: list[WeightsSource] = []
    yield from _guard(files, lambda: sources.extend(registry.sources(files)))
    if not sources:
        detail = f"{UNPARSED}no layout that this program knows"
        yield VerifyFinding("note", files.show(""), detail)
    damage = [
        f for source in sources for f in _guard(files, partial(_check_tensors, files, source))
    ]
    yield from damage
    if sources:
        yield from _guard(files, partial(_check_demands, files))
    if sources and not damage:
        yield from _check_complete(files)


def check_model(files: TrackedFiles, tensors: Iterable[ModelTensor]) -> Iterator[VerifyFinding]:
    """Yield what of a consolidated model differs from its model record, and notes.

    Damage to the structure of a file is found, too; a file that is missing is not. Raise
    StoreError.
    """
    yield from _check_closed(files)
    recorded: defaultdict[str, list[ModelTensor]] = defaultdict(list)
    for tensor in tensors:
        recorded[tensor.file].append(tensor)
    for file in sorted(recorded.keys() & files.sizes().keys()):  # level stat names those missing
        yield from _guard(files, partial(_check_recorded, files, file, recorded[file]))
    sources: list[WeightsSource] = []
    yield from _guard(files, lambda: sources.extend(registry.sources(files)))
    damage = [
        f for source in sources for f in _guard(files, partial(_check_tensors, files, source))
    ]
    yield from damage
    if sources and not damage:
        yield from _check_complete(files)


def _guard(files: TrackedFiles, check: Callable[[], None]) -> Iterator[VerifyFinding]:
    """Run a check; yield a finding if it raises, named by the file that was read last.

    Corrupt is damage ("parse"); Unsupported is a note, and so is Incomplete, about the whole.
    """
    try:
        check()
    except Corrupt as e:
        yield VerifyFinding("parse", files.show(files.last), str(e))
    except Incomplete as e:
        yield VerifyFinding("note", files.show(""), f"{INCOMPLETE}{e}")
    except Unsupported as e:
        yield VerifyFinding("note", files.show(files.last), f"{UNPARSED}{e}")


def _check_closed(files: TrackedFiles) -> Iterator[VerifyFinding]:
    """Yield damage for each file without the end or the header that its format has."""

    def check(path: str) -> None:
        """Raise Corrupt if the file is cut off."""
        if not registry.closed(path, files):
            raise Corrupt(f"{path}: lacks the end or the header that its format has")

    for path in files.sizes():
        for finding in _guard(files, partial(check, path)):
            # Of an empty file nothing was read, so another one was the last.
            yield replace(finding, name=files.show(path))


def _check_tensors(files: TrackedFiles, source: WeightsSource) -> None:
    """Raise Corrupt if a stored copy does not tile its tensor; add to ``files.tensors``.

    Formats check that copies lie inside their files. Raise Incomplete, Unsupported, StoreError.
    """
    for tensor in registry.tensors(files, source):
        files.tensors += 1
        for copy in tensor.copies:
            if not copy.absent:
                check_tiling(tensor, copy)


def _check_demands(files: TrackedFiles) -> None:
    """Raise Corrupt if a file has another size than the checkpoint's own metadata demands.

    Manifests say which files are missing.
    """
    demands, sizes = registry.demands(files), files.sizes()
    for path, size in (demands.model | demands.resume).items():
        if path in sizes and size is not None and sizes[path] != size:
            text = f"{sizes[path]} bytes, expected {size} by the checkpoint's own metadata"
            raise Corrupt(f"{path}: {text}")


def _check_complete(files: TrackedFiles) -> Iterator[VerifyFinding]:
    """Yield notes: why tensors are missing, or may be; none if Corrupt or Unsupported is raised."""
    doubts: list[str] = []
    with contextlib.suppress(Corrupt, Unsupported):
        try:
            doubts = [*check_complete(files)]
        except Incomplete as e:
            doubts = [f"{INCOMPLETE}{e}"]
    yield from (VerifyFinding("note", files.show(""), doubt) for doubt in doubts)


def _check_recorded(files: TrackedFiles, file: str, tensors: Iterable[ModelTensor]) -> None:
    """Raise Corrupt if names, places, types or shapes in a file are not those of its record."""
    recorded = {(t.start, t.size, t.name, t.dtype, t.shape) for t in tensors}
    stored = set()
    for tensor in safetensors.tensors(files, file):
        extent = tensor.copies[0].parts[0].extent
        stored.add((extent.start, extent.size, tensor.name, tensor.dtype, tensor.shape))
    if differing := recorded ^ stored:
        raise Corrupt(f"{file}: {min(differing)[2]} differs from its model record in place or type")
