"""Which tensors of a sharded checkpoint lie in damaged bytes; no name where the metadata that gives it is damaged itself."""

from __future__ import annotations

from collections.abc import Mapping

from ckptsync.errors import CkptsyncError, StoreError
from ckptsync.formats import zstd_items
from ckptsync.layouts import table
from ckptsync.layouts.table import Source
from ckptsync.model import Extent, Files
from ckptsync.verify.ranges import Ranges, Spans
from ckptsync.verify.reading import Watched

Damage = Mapping[str, Ranges]
"""Path in the checkpoint → the ranges that differ."""


def named(files: Files, damage: Damage) -> dict[str, tuple[str, ...]]:
    """The tensors in each damaged file, for those files of which it can be said.  Raises StoreError."""
    found: dict[str, set[str]] = {}
    for source in _sources(files):
        spans = _spans(files, source, damage)
        for path, ranges in damage.items():
            found.setdefault(path, set()).update(spans.overlapping(path, ranges))
    return {path: tuple(sorted(names)) for path, names in found.items() if names}


def _sources(files: Files) -> tuple[Source, ...]:
    try:
        return table.sources(files)
    except StoreError:
        raise
    except CkptsyncError:
        return ()  # damaged metadata names nothing: the file is named all the same


def _spans(files: Files, source: Source, damage: Damage) -> Spans:
    watched = Watched(files)
    try:
        tensors = table.tensors(watched, source)
    except StoreError:
        raise
    except CkptsyncError:
        return Spans(())  # as above, or incomplete, or a layout we do not know
    doubtful = {extent.file for extent in watched.reads if _gives_names(source, extent.file) and _is_hit(extent, damage)}
    if doubtful and source.layout not in ("whole", "peft"):
        return Spans(())
    everywhere = ((t.name, zstd_items.real_extent(part.extent)) for t in tensors for copy in t.copies for part in copy.stored())
    return Spans((name, extent) for name, extent in everywhere if extent.file not in doubtful)


def _gives_names(source: Source, file: str) -> bool:
    """Other files' headers say where a tensor lies in them, not which it is; and they must agree with those that do."""
    if source.layout == "dcp":
        return file.endswith(".metadata")
    return source.layout != "zero" or file.endswith("_model_states.pt")


def _is_hit(extent: Extent, damage: Damage) -> bool:
    return any(start < extent.start + extent.size and extent.start < end for start, end in damage.get(extent.file, ()))
