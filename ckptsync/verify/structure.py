"""Level parse: files open, metadata agrees with them, tensors tile, and a consolidated model is what its model record says."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

from ckptsync.errors import Corrupt, Incomplete, Unsupported
from ckptsync.formats import safetensors
from ckptsync.layouts import table
from ckptsync.layouts.table import Source
from ckptsync.merge import tile
from ckptsync.model import Files, Tensor
from ckptsync.records.model_record import ModelTensor
from ckptsync.records.report import LEVELS, Finding, Level
from ckptsync.verify.reading import Watched

UNPARSED, UNLOADED, UNMODELLED, LACKING = "not parsed: ", "not loaded: ", "no model: ", "not all of it is here: "
"""How notes begin without which a level would be claimed that was not reached."""
_BELOW: tuple[tuple[str, Level], ...] = ((UNPARSED, "digest"), (UNLOADED, "parse"), (UNMODELLED, "load"))
Name = Callable[[str], str]
"""From a path in the checkpoint to the name that a finding has; of the empty path, the checkpoint's own."""


def checkpoint(files: Watched, name: Name) -> Iterator[Finding]:
    """What is wrong with the structure of a checkpoint; notes for what this program cannot judge.  Raises StoreError."""
    yield from _closed(files, name)
    found: list[Source] = []
    yield from _guarded(files, name, lambda: found.extend(table.sources(files)))
    if not found:
        yield Finding("note", name(""), f"{UNPARSED}no layout that this program knows")
    for source in found:
        yield from _guarded(files, name, partial(_check, files, source))
    if found:
        yield from _guarded(files, name, partial(_check_demands, files))


def consolidated(files: Watched, tensors: Iterable[ModelTensor], name: Name) -> Iterator[Finding]:
    """What of a consolidated model is not as its model record says."""
    yield from _closed(files, name)
    told: defaultdict[str, list[ModelTensor]] = defaultdict(list)
    for tensor in tensors:
        told[tensor.file].append(tensor)
    for file in sorted(told.keys() & files.sizes().keys()):  # level stat has told of what is missing
        yield from _guarded(files, name, partial(_check_consolidated, files, file, told[file]))
    found: list[Source] = []
    yield from _guarded(files, name, lambda: found.extend(table.sources(files)))
    for source in found:
        yield from _guarded(files, name, partial(_check, files, source))


def reached(level: Level, findings: Iterable[Finding]) -> Level:
    """``level``, or the one below what could not be done for some file: a report never claims what was not done."""
    details = [f.detail for f in findings if f.kind == "note"]
    most = [below for sign, below in _BELOW if any(detail.startswith(sign) for detail in details)]
    return min((level, *most), key=LEVELS.index)


def _guarded(files: Watched, name: Name, check: Callable[[], None]) -> Iterator[Finding]:
    try:
        check()
    except Corrupt as e:
        yield Finding("parse", name(files.last), str(e))
    except Incomplete as e:
        yield Finding("note", name(""), f"{LACKING}{e}")
    except Unsupported as e:
        yield Finding("note", name(files.last), f"{UNPARSED}{e}")


def _closed(files: Watched, name: Name) -> Iterator[Finding]:
    for path in files.sizes():
        for found in _guarded(files, name, partial(_check_closed, files, path)):
            yield replace(found, name=name(path))  # of an empty file nothing was read, and another was the last


def _check_closed(files: Files, path: str) -> None:
    if not table.closed(path, files):
        raise Corrupt(f"{path}: does not have the end, or the header, that its format gives it")


def _check(files: Watched, source: Source) -> None:
    """Every stored copy tiles its tensor; that it lies inside its file, the formats have seen."""
    for tensor in table.tensors(files, source):
        files.tensors += 1
        for copy in tensor.copies:
            if not copy.absent:
                tile.check(tensor, copy)


def _check_demands(files: Files) -> None:
    """What metadata demands of the files that are here; which are not is the manifests' to say."""
    demands = table.demands(files)
    for path, size in (demands.model | demands.resume).items():
        here = files.sizes().get(path)
        if here is not None and size is not None and here != size:
            raise Corrupt(f"{path}: {here} bytes, {size} demanded by the checkpoint's own metadata")


def _check_consolidated(files: Files, file: str, told: Iterable[ModelTensor]) -> None:
    wanted = sorted((t.start, t.size, t.name, t.dtype, t.shape) for t in told)
    found = sorted(map(_row, safetensors.tensors(files, file)))
    if wanted != found:
        odd = min(set(wanted) ^ set(found))
        raise Corrupt(f"{file}: {odd[2]} is not where, or not what, the model record says")


def _row(tensor: Tensor) -> tuple[int, int, str, str, tuple[int, ...]]:
    extent = tensor.copies[0].parts[0].extent
    return extent.start, extent.size, tensor.name, tensor.dtype, tensor.shape
