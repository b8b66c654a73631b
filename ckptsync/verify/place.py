"""Verifying one place of a store, up to a level that includes those below it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from ckptsync.catalogue.fresh import fresh_place
from ckptsync.catalogue.summary import Fault
from ckptsync.errors import Incomplete
from ckptsync.records.names import consolidated_prefix
from ckptsync.records.report import LEVELS, Finding, Level, Report
from ckptsync.records.state import Snapshot
from ckptsync.stores.contract import Store
from ckptsync.stores.pieces import fetched
from ckptsync.stores.tree import StoreFiles
from ckptsync.verify import structure
from ckptsync.verify.contents import contents
from ckptsync.verify.expected import Expected, expected, missing_parts, stat
from ckptsync.verify.findings import verdict, worst_first
from ckptsync.verify.loads import Part, loads
from ckptsync.verify.reading import Counted, Watched


@dataclass(frozen=True, slots=True)
class Checked:
    """What was found, and how many bytes were really read for it."""

    findings: tuple[Finding, ...]
    read: int


def verify_place(
    store: Store,
    seen: Snapshot,
    level: Level,
    faults: Sequence[Fault] = (),
    when: float = 0.0,
    *,
    wait: Callable[[float], object] = time.sleep,
) -> Report:
    """Check what ``seen`` says is there; ``faults`` are its records that cannot be read.  Not numbered: see `write_report`.

    Nothing is called missing, or short, before this machine must see what others have written: where the store is `late`, that is waited out.
    Raises StoreError where the store does not answer, which is not damage, and Incomplete if the place changed meanwhile.
    """
    files = expected(seen)
    checked = _checked(store, seen, files, LEVELS.index(level))
    found = worst_first((*(f.finding for f in faults), *checked.findings, *_standing(seen)))
    gone = {f.name for f in found if f.kind in ("missing", "size")}
    if gone and seen.facets.retired:
        found = worst_first(_let_go(f) for f in found)
    elif gone:
        if store.late:
            wait(store.late)
        _check_unchanged(store, seen, gone)
    is_arriving = bool(seen.facets.ambiguous) or not (seen.facets.model.holds or seen.facets.retired)
    manifests = tuple(k.name for k in seen.manifests)
    verdict_ = verdict(found, is_arriving=is_arriving)
    reached = structure.reached(level, found)
    return Report(seen.run, seen.checkpoint, seen.place, 0, reached, verdict_, manifests, seen.seal_name, checked.read, found, when)


def _standing(seen: Snapshot) -> Iterator[Finding]:
    if seen.facets.ambiguous:
        yield Finding("note", seen.place, f"ambiguous, and so not verified: {seen.facets.ambiguous}")
    else:
        yield from missing_parts(seen)


def _checked(store: Store, seen: Snapshot, files: Sequence[Expected], level: int) -> Checked:
    found = list(stat(files, seen.sizes))
    there = [f for f in files if seen.sizes.get(f.name) == f.size]
    source = Counted(store)
    trees = _trees(store, there)
    if level >= LEVELS.index("digest"):
        found += contents(source, there, trees[0])
    if level >= LEVELS.index("parse") and not (seen.facets.ambiguous or seen.facets.shards):
        found += structure.checkpoint(trees[0], lambda path: f"{seen.place}/{path}".rstrip("/"))
    if level >= LEVELS.index("parse") and seen.seal:
        prefix = consolidated_prefix(seen.run, seen.place).removeprefix(f"{seen.run}/")
        found += structure.consolidated(trees[1], seen.seal.tensors, lambda path: f"{prefix}{path}".rstrip("/"))
    loaded = 0
    if level >= LEVELS.index("load"):
        results, loaded = loads(store, [Part(f.name, f.shown, f.size) for f in there if not f.is_copy], seen.place)
        found += results
    return Checked(tuple(found), source.read + sum(tree.read for tree in trees) + loaded)


def _trees(store: Store, there: Sequence[Expected]) -> tuple[Watched, Watched]:
    """The checkpoint's own files and the consolidated model's, as far as they are there."""
    own = {f.path: (f.name, f.size) for f in there if not f.is_sealed and not f.is_copy}
    sealed = {f.path: (f.name, f.size) for f in there if f.is_sealed}
    return Watched(fetched(StoreFiles(store, own), store)), Watched(fetched(StoreFiles(store, sealed), store))


def _let_go(finding: Finding) -> Finding:
    """A tombstone says that these files go."""
    return finding if finding.kind not in ("missing", "size") else Finding("note", finding.name, f"let go: {finding.detail}")


def _check_unchanged(store: Store, seen: Snapshot, gone: Collection[str]) -> None:
    """Before a file is called missing, look again: it may have been let go, moved with its save, or written since the listing."""
    again = fresh_place(store, seen.run, seen.place).of(seen.run, seen.place)
    still = {f.shown for f in expected(again) if again.sizes.get(f.name) != f.size} if again and not again.facets.retired else set()
    if not still.issuperset(gone):
        raise Incomplete(f"{seen.run}/{seen.place}: changed while it was verified", hint="verify it again")
