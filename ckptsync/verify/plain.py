"""Verifying a checkpoint or a model in a plain directory, of which nothing was recorded."""

from __future__ import annotations

from collections.abc import Iterator

from ckptsync.errors import Corrupt, Incomplete, Unsupported
from ckptsync.layouts import table
from ckptsync.records.report import LEVELS, Finding, Level, Report
from ckptsync.stores.pieces import fetched
from ckptsync.stores.tree import Tree
from ckptsync.verify import structure
from ckptsync.verify.findings import verdict, worst_first
from ckptsync.verify.loads import Part, loads
from ckptsync.verify.reading import Watched

NO_DIGESTS = "nothing recorded what these bytes should be: no digest was compared, so damage to values would not be seen"


def verify_path(files: Tree, level: Level, name: str = "") -> Report:
    """What can be said of a directory by itself: its own metadata against its files, and at level load every tensor.

    Nothing recorded digests here, so level digest proves no more than stat, and the report says that it was stat.  The report has no
    run, manifests or number; ``arriving`` means that its metadata demands files that are not there.

    Raises Unsupported if no layout knows it, Incomplete if it changed meanwhile, StoreError.
    """
    watched, asked = Watched(fetched(files, files)), LEVELS.index(level)
    findings = [Finding("note", name, NO_DIGESTS), *_lacking(watched)]
    loaded = 0
    if asked >= LEVELS.index("parse"):
        findings += structure.checkpoint(watched, lambda path: path or name)
    if asked >= LEVELS.index("load"):
        results, loaded = loads(files, [Part(path, path, size) for path, size in files.sizes().items()], name)
        findings += results
    changed = files.changed()
    if changed:
        raise Incomplete(f"{changed[0]}: changed while it was verified", hint="verify again when nothing writes to it")
    found = worst_first(findings)
    unparsed = next((f.detail for f in found if f.detail.startswith(structure.UNPARSED)), None)
    is_arriving = any(f.kind == "missing" or f.detail.startswith(structure.LACKING) for f in found)
    judged = verdict((f for f in found if f.kind != "missing"), is_arriving=is_arriving)
    if unparsed and judged == "ok":
        raise Unsupported(unparsed)
    return Report("", name, name, 0, level if level != "digest" else "stat", judged, (), "", watched.read + loaded, found)


def _lacking(files: Watched) -> Iterator[Finding]:
    """What the metadata demands and is not there, or not with its size."""
    sources = _asked(files)
    if isinstance(sources, Finding):
        yield sources
        return
    for path, size in sources.items():
        here = files.sizes().get(path)
        if here is None:
            yield Finding("missing", path, "the checkpoint's own metadata demands it")
        elif size is not None and here != size:
            yield Finding("size", path, f"{here} bytes, {size} demanded by the checkpoint's own metadata")


def _asked(files: Watched) -> dict[str, int | None] | Finding:
    try:
        sources = table.sources(files)
        demands = table.demands(files)
    except Corrupt as e:
        return Finding("parse", files.last, str(e))
    if not sources:
        raise table.no_weights(files)
    if not demands.model:
        return Finding("note", "", f"{structure.LACKING}nothing here says what a whole model is")
    return demands.model | demands.resume
