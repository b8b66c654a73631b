"""From what an operator names to what is verified: a store, a run, a location, or a plain directory.

What is found in a store is to be recorded there, as a head's verifier does, so that `ls`, `status`, `repair` and the workers act on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ckptsync.catalogue.fresh import Fresh, fresh
from ckptsync.errors import ConfigError, Incomplete
from ckptsync.records.names import CONSOLIDATED, OURS
from ckptsync.records.report import Finding, Level, Report
from ckptsync.records.state import standing
from ckptsync.stores import trees
from ckptsync.stores.contract import Store
from ckptsync.stores.opening import is_store, open_store
from ckptsync.stores.trees import Access, Place
from ckptsync.stores.urls import Remote, located
from ckptsync.verify.expected import Expected
from ckptsync.verify.findings import worst_first
from ckptsync.verify.location import verify_location
from ckptsync.verify.plain import verify_path
from ckptsync.verify.reporting import is_news
from ckptsync.verify.sampling import Sample


@dataclass(frozen=True, slots=True)
class InStore:
    """A store, and what of it was named: everything, a run, or a location of a run."""

    store: Store
    run: str = ""
    location: str = ""


@dataclass(frozen=True, slots=True)
class Plain:
    """A location outside every store."""

    location: Place
    access: Access = field(default_factory=Access, compare=False)


def target(url: str, access: Access | None = None) -> InStore | Plain:
    """What ``url`` means: a store, a directory inside one (a consolidated model finds its location), or any other directory."""
    location, access = located(url), access or Access()
    if isinstance(location, Remote):
        above = trees.store_above(location, access)
        if above is None:
            return Plain(location, access)
        return _inside(
            open_store(above.url, access.options_of(above), access.limits),
            trees.path(location).relative_to(trees.path(above)).parts,
        )
    for root in (location, *location.parents):
        if is_store(str(root)):
            return _inside(open_store(str(root), limits=access.limits), location.relative_to(root).parts)
    return Plain(location, access)


@dataclass(frozen=True, slots=True)
class Asked:
    """How to verify: ``baseline`` is a plain directory's; of a ``sample`` no more is claimed than level stat."""

    level: Level
    now: float = 0.0
    sample: Sample | None = None
    baseline: tuple[Expected, ...] | None = None


@dataclass(frozen=True, slots=True)
class Verified:
    """What was found of one location, and what its store has to be told: nothing (``None``) if it says so already, or if it is a plain directory."""

    report: Report
    news: Report | None = None


def verify(where: InStore | Plain, asked: Asked) -> Iterator[Verified]:
    """Verify each location; yield each as it is done.  The caller writes the news (`write_report`).

    Raises ConfigError if nothing is there, and Unsupported, after all the others, for a location with records newer than this program.
    """
    if isinstance(where, Plain):
        files, name = trees.tree(where.location, where.access), trees.path(where.location).name
        yield Verified(verify_path(files, asked.level, name, baseline=asked.baseline, sample=asked.sample))
        return
    found = fresh(where.store, where.run)
    locations = sorted(_locations(found, where))
    if where.run and not locations:
        raise ConfigError(
            f"{where.run}/{where.location}".rstrip("/") + ": no node has told this store of it",
            hint="`ckptsync ls` shows what is there",
        )
    for location in locations:
        if found.newer(*location) is None:
            yield _verified(where.store, found, location, asked)
    for newer in filter(None, (found.newer(*location) for location in locations)):
        raise newer


def _inside(store: Store, parts: tuple[str, ...]) -> InStore:
    if len(parts) > 1 and parts[1] in (CONSOLIDATED, OURS):
        parts = (parts[0], *parts[2:])
    return InStore(store, *parts[:2])


def _locations(found: Fresh, where: InStore) -> set[tuple[str, str]]:
    everything = {(s.run, s.location) for s in found.locations} | {(f.record.run, f.record.location) for f in found.faults}
    return {(run, location) for run, location in everything if where.location in ("", location) and where.run in ("", run)}


def _verified(store: Store, found: Fresh, where: tuple[str, str], asked: Asked) -> Verified:
    run, location = where
    seen = found.of(run, location)
    faults = found.faults_of(run, location)
    if seen is None:  # no manifest can be read: every reader of the store sees that, and a report has nothing to speak of
        findings = tuple(fault.finding for fault in faults)
        return Verified(Report(run, location.partition("~")[0], location, 0, "stat", "damaged", (), "", 0, findings, asked.now))
    try:
        report = verify_location(store, seen, asked.level, faults, asked.now, sample=asked.sample)
    except Incomplete as e:  # it is being let go, or moves: said, and not judged
        note = Finding("note", location, str(e))
        return Verified(Report(run, seen.checkpoint, location, 0, asked.level, "arriving", (), "", 0, (note,), asked.now))
    told = report
    if (
        asked.sample and report.verdict == "damaged"
    ):  # it knows nothing of the files that it left out: what stands against them stays
        told = replace(report, findings=worst_first((*report.findings, *standing(seen))))
    return Verified(report, told if is_news(told, seen, found.mtimes) else None)
