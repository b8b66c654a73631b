"""Verifying one location of a store, up to a level that includes those below it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from ckptsync.catalogue.fresh import fresh_location
from ckptsync.catalogue.summary import Fault
from ckptsync.errors import Incomplete
from ckptsync.records.names import consolidated_prefix
from ckptsync.records.report import Finding, Level, Reading, Report
from ckptsync.records.state import Snapshot
from ckptsync.stores.contract import Store
from ckptsync.stores.pieces import fetched
from ckptsync.stores.tree import StoreFiles
from ckptsync.verify import structure
from ckptsync.verify.checksums import checksums
from ckptsync.verify.contents import contents, narrowed
from ckptsync.verify.expected import Expected, expected, missing_parts, sealless, stat, unnamed
from ckptsync.verify.findings import verdict, worst_first
from ckptsync.verify.loads import Part, loads
from ckptsync.verify.modelling import climb, models
from ckptsync.verify.reading import Counted, Told, Watched
from ckptsync.verify.reporting import write_report
from ckptsync.verify.sampling import Sample, said
from ckptsync.verify.sweep import suspects
from ckptsync.verify.units import coverage, sampled


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """``report`` is what was found, unless there is no such location, and ``written`` its record's name.  ``faults``: records that cannot be read."""

    report: Report | None = None
    written: str = ""
    faults: tuple[Fault, ...] = ()


def verify_and_report(
    store: Store, run: str, location: str, level: Level, now: float, *, told: Told = lambda _: None
) -> VerifyResult:
    """Verify a location as it is now, and write the report last; nothing of one that has gone.  Raises StoreError, and then nothing is reported.

    ``told`` hears of bytes as they are read, and of 0 of them while a child process is at work.
    """
    found = fresh_location(store, run, location)
    seen = found.of(run, location)
    if newer := found.newer(run, location):
        raise newer
    if seen is None:
        return VerifyResult(faults=found.faults)
    try:
        report = verify_location(store, seen, level, found.faults_of(run, location), now, told=told)
    except Incomplete:  # it changed meanwhile: the next time it is due, it is seen as what it has become
        return VerifyResult(faults=found.faults)
    return VerifyResult(report, write_report(store, report), found.faults)


def verify_location(
    store: Store,
    seen: Snapshot,
    level: Level,
    faults: Sequence[Fault] = (),
    when: float = 0.0,
    *,
    sample: Sample | None = None,
    told: Told = lambda _: None,
    wait: Callable[[float], object] = time.sleep,
) -> Report:
    """Check what ``seen`` says is there; ``faults`` are its records that cannot be read.  Not numbered: see `write_report`.

    Nothing is called missing, or short, before this machine must see what others have written: where the store is `late`, that is waited out.
    With a ``sample`` no more is claimed than level stat, unless there is damage.  ``told`` hears of bytes as they are read.
    Raises StoreError where the store does not answer, which is not damage, and Incomplete if the location changed meanwhile.
    """
    looking = _Looking(store, seen, told)
    with closing(looking):
        looking.look(level, sample)
    gone = {f.name for f in looking.found if f.kind in ("missing", "size")}
    if gone and not seen.conditions.retired:
        if store.late:
            wait(store.late)
        _check_unchanged(store, seen, gone)
    every = (*(f.finding for f in faults), *looking.found, *_standing(seen))
    found = worst_first(map(_let_go, every) if gone and seen.conditions.retired else every)
    judged = verdict(
        found, is_arriving=bool(seen.conditions.ambiguous) or not (seen.conditions.model.holds or seen.conditions.retired)
    )
    reached = "stat" if sample and judged != "damaged" else structure.reached(level, found)
    manifests, read, readings = tuple(k.name for k in seen.manifests), looking.read, tuple(looking.readings)
    return Report(
        seen.run, seen.checkpoint, seen.location, 0, reached, judged, manifests, seen.model_record_name, read, found, when, readings
    )


def _standing(seen: Snapshot) -> Iterator[Finding]:
    if seen.conditions.ambiguous:
        yield Finding("note", seen.location, f"ambiguous, and so not verified: {seen.conditions.ambiguous}")
    else:
        yield from missing_parts(seen)


class _Looking:
    """What one location is found to be, level by level."""

    def __init__(self, store: Store, seen: Snapshot, told: Told) -> None:
        self._seen, self._told = seen, told
        self._files = expected(seen)
        self._there = [f for f in self._files if seen.sizes.get(f.name) == f.size]
        self._source = Counted(store, told)
        self._own, self._consolidated = _trees(store, self._there)
        self._loaded = 0
        self.found: list[Finding] = []
        self.readings: list[Reading] = []

    @property
    def read(self) -> int:
        """Bytes that were really read."""
        return self._source.read + self._own.read + self._consolidated.read + self._loaded

    def close(self) -> None:
        """Let go of what reads ahead."""
        self._own.close()
        self._consolidated.close()

    def look(self, level: Level, sample: Sample | None) -> None:
        """At all of it, level by level."""
        climb(level, (self._stat, lambda: self._digest(sample), self._parse, self._load, self._model))

    def _stat(self) -> None:
        self.found += [*stat(self._files, self._seen.sizes), *sealless(self._seen), *unnamed(self._seen, self._files)]
        self._note("stat", len(self._there), sum(f.size for f in self._there))

    def _digest(self, sample: Sample | None) -> None:
        if sample is None:
            self.found += contents(self._source, self._there, self._own)
            self._note("digest", len(self._there), sum(f.size for f in self._there))
            return
        chosen = sampled(self._there, sample.share, sample.seed)
        self.found += narrowed(self._source, self._there, suspects(self._source, chosen), self._own)
        self._note("digest", *coverage(chosen))
        self.found.append(Finding("note", self._seen.location, said(self.readings[-1])))

    def _parse(self) -> None:
        seen, location = self._seen, self._seen.location
        prefix = consolidated_prefix(seen.run, location).removeprefix(f"{seen.run}/")
        if not (seen.conditions.ambiguous or seen.conditions.shards):
            self.found += structure.checkpoint(self._own, lambda path: f"{location}/{path}".rstrip("/"))
        if seen.model_record:
            self.found += structure.consolidated(
                self._consolidated, seen.model_record.tensors, lambda path: f"{prefix}{path}".rstrip("/")
            )
        trees = (self._own, self._consolidated)
        self._note("parse", sum(len(t.seen) for t in trees), sum(t.read for t in trees), sum(t.tensors for t in trees))

    def _load(self) -> None:
        parts = [Part(f.name, f.shown, f.size, "" if f.is_consolidated else f.path) for f in self._there if not f.is_copy]
        results, reading = loads(self._source.source, parts, self._seen.location, self._own, self._told)
        self._loaded += reading.size
        # torch compares no CRC32 when it loads: what was damaged before a worker read it shows by these alone
        wrong, _ = checksums(self._own, self._told)
        shown = {f.path: f.shown for f in self._there if not f.is_consolidated and not f.is_copy}
        self.found += [*results, *(replace(f, kind="load", name=shown[f.name]) for f in wrong)]
        self.readings.append(reading)

    def _model(self) -> None:
        seen = self._seen
        is_consolidated = seen.model_record is not None
        where = {f.path: (f.name, f.size) for f in self._there if f.is_consolidated == is_consolidated and not f.is_copy}
        prefix = (
            consolidated_prefix(seen.run, seen.location).removeprefix(f"{seen.run}/") if is_consolidated else f"{seen.location}/"
        )
        results, reading = models(self._source, where, lambda path: f"{prefix}{path}".rstrip("/"), self._told)
        self.found += results
        self.readings.append(reading)

    def _note(self, level: Level, files: int, size: int, tensors: int = 0) -> None:
        of_size = sum(f.size for f in self._files)
        self.readings.append(Reading(level, files, size, len(self._files), of_size, tensors))


def _trees(store: Store, there: Sequence[Expected]) -> tuple[Watched, Watched]:
    """The checkpoint's own files and the consolidated model's, as far as they are there."""
    own = {f.path: (f.name, f.size) for f in there if not f.is_consolidated and not f.is_copy}
    consolidated = {f.path: (f.name, f.size) for f in there if f.is_consolidated}
    return Watched(fetched(StoreFiles(store, own), store)), Watched(fetched(StoreFiles(store, consolidated), store))


def _let_go(finding: Finding) -> Finding:
    """A tombstone says that these files go."""
    return finding if finding.kind not in ("missing", "size") else Finding("note", finding.name, f"let go: {finding.detail}")


def _check_unchanged(store: Store, seen: Snapshot, gone: Collection[str]) -> None:
    """Before a file is called missing, look again: it may have been let go, moved with its save, or written since the listing."""
    again = fresh_location(store, seen.run, seen.location).of(seen.run, seen.location)
    still: set[str] = set()
    if again and not again.conditions.retired:
        still = {f.shown for f in expected(again) if again.sizes.get(f.name) != f.size} | {f.name for f in sealless(again)}
    if not still.issuperset(gone):
        raise Incomplete(f"{seen.run}/{seen.location}: changed while it was verified", hint="verify it again")
