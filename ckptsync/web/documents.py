"""What each URL of the page says, as plain values, from one overview of a store.

Only what the overview does not have is read: the newest ``trainer_state.json`` of a run, and the
records of a location that somebody looks at. Each is read again only when its records change.
"""

from __future__ import annotations

import shlex
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from ckptsync.catalogue.location_summary import Summary, by_age
from ckptsync.catalogue.uncached import read_location
from ckptsync.errors import CkptsyncError, Corrupt, NotFound
from ckptsync.layouts.file_names import rank
from ckptsync.records.location_status import LocationState, unanswered_findings
from ckptsync.records.report import DAMAGE
from ckptsync.records.store_paths import file_name
from ckptsync.status.locations import describe_locations
from ckptsync.status.overview import Overview, document
from ckptsync.stores.contract import Store, read_all
from ckptsync.web.curves import LIMIT, Curve, read_curves, thinned, value_at

T = TypeVar("T")
STATE = "trainer_state.json"
STRIP = 60  # cells of a run's strip
FILES = 1000  # of a location that are shown
DAMAGED = 100  # files of a location, ranges and tensors of a file
TRIES = 3  # locations in which a trainer's state is looked for, the newest first
KEPT = 32  # runs, and locations, that are remembered


class Documents:
    """Documents of a store, by URL. Any thread may ask."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._grouped: tuple[Overview | None, dict[str, list[Summary]]] = (None, {})
        self._curves: dict[Hashable, tuple[object, Mapping[str, Curve]]] = {}
        self._locations: dict[Hashable, tuple[object, dict[str, Any]]] = {}

    def _by_run(self, seen: Overview) -> Mapping[str, list[Summary]]:
        """Return the locations of each run, in reading order."""
        last, runs = self._grouped
        if last is not seen:
            runs = {}
            for s in seen.catalogue.shown:
                runs.setdefault(s.run, []).append(s)
            self._grouped = seen, runs
        return runs

    def overview(self, seen: Overview) -> dict[str, Any]:
        """Return what ``/`` says: the document of ``status --json``, and a strip for each run."""
        strips = {
            run: [
                {"location": s.location, "step": s.step, "status": s.status}
                for s in by_age(its)[-STRIP:]
            ]
            for run, its in self._by_run(seen).items()
        }
        return {**document(seen), "strips": strips}

    def nodes(self, seen: Overview) -> dict[str, Any]:
        """Return what ``/nodes`` says."""
        whole = document(seen)
        return {name: whole[name] for name in ("store", "at", "nodes", "running")}

    def run(self, seen: Overview, run: str, most: int = 0) -> dict[str, Any]:
        """Return what ``/runs/RUN`` says, of its ``most`` newest checkpoints (0: of all).

        Raises NotFound.
        """
        summaries = self._by_run(seen).get(run)
        if not summaries:
            raise NotFound(f"run {run!r} not found in {seen.store}")
        summaries = summaries[-most:]
        curves = self._curves_of(run, summaries)
        described = describe_locations(seen.store, summaries, seen.running)
        return {
            "store": seen.store,
            "at": seen.at,
            "run": run,
            "checkpoints": [
                {**plain, **_times(s), **_losses(curves, s)}
                for plain, s in zip(described, summaries, strict=True)
            ],
            "curves": {metric: thinned(points) for metric, points in curves.items()},
            "running": _running(seen, run),
        }

    def location(self, seen: Overview, run: str, location: str) -> dict[str, Any]:
        """Return what ``/runs/RUN/LOCATION`` says.

        Raises NotFound, and StoreError if its records cannot be read.
        """
        summaries = self._by_run(seen).get(run, [])
        summary = next((s for s in summaries if s.location == location), None)
        if summary is None:
            raise NotFound(f"checkpoint {location!r} of run {run!r} not found in {seen.store}")
        curves = self._curves_of(run, summaries)
        plain = next(
            d
            for d in describe_locations(seen.store, summaries, seen.running)
            if d["location"] == location
        )
        details = self._read_once(
            self._locations, (run, location), summary, lambda: self._details(summary)
        )
        return {
            "store": seen.store,
            "at": seen.at,
            **plain,
            **_times(summary),
            **_losses(curves, summary),
            "ranks": dict(summary.ranks),
            "reason_kept": summary.kept or None,
            "retired": summary.retired or summary.shards_retired or None,
            **details,
            "commands": _commands(seen.store, summary),
        }

    def _details(self, summary: Summary) -> dict[str, Any]:
        """Return what only the records of a location tell."""
        state = read_location(self._store, summary.run, summary.location)
        here = state.of(summary.run, summary.location)
        files = [*_files(here)] if here else []
        return {
            "files": files[:FILES],
            "files_total": len(files),
            "damage": [*_damage(here)][:DAMAGED] if here else [],
            "reports": [*_reports(here)] if here else [],
            "unreadable": [fault.text for fault in state.faults],
        }

    def _curves_of(self, run: str, summaries: Sequence[Summary]) -> Mapping[str, Curve]:
        """Return the whole curves of a run; none where its trainer logged none that can be read."""
        newest = [s for s in reversed(by_age(summaries)) if s.manifests and not s.retired][:TRIES]
        key = [(s.location, s.state, s.status) for s in newest]
        return self._read_once(self._curves, run, key, lambda: self._read_curves(newest))

    def _read_curves(self, newest: Sequence[Summary]) -> Mapping[str, Curve]:
        for s in newest:
            name = file_name(s.run, s.location, STATE)
            try:
                return read_curves(read_all(self._store, name, LIMIT), name)
            except (NotFound, Corrupt):
                continue
            except CkptsyncError:
                break  # curves are no reason to show nothing
        return {}

    def _read_once(
        self,
        cache: dict[Hashable, tuple[object, T]],
        name: Hashable,
        key: object,
        read: Callable[[], T],
    ) -> T:
        """Return what was read for this key, or read it."""
        with self._lock:
            last = cache.pop(name, None)
            if last is None or last[0] != key:
                last = key, read()
            cache[name] = last
            while len(cache) > KEPT:
                del cache[next(iter(cache))]
            return last[1]


def _running(seen: Overview, run: str) -> list[dict[str, Any]]:
    return [entry.document() for entry in seen.running if entry.run == run]


def _times(s: Summary) -> dict[str, Any]:
    return {
        "step": s.step,
        "saved": s.ended or None,
        "uploaded": s.arrived or None,
        "merged": s.merged or None,
        "verified": (s.proof.when or None) if s.status == "VERIFIED" else None,
        "kept": bool(s.kept),
    }


def _losses(curves: Mapping[str, Curve], s: Summary) -> dict[str, float | None]:
    return {metric: value_at(curves, metric, s.step) for metric in ("loss", "eval_loss")}


def _files(here: LocationState) -> Iterator[dict[str, Any]]:
    for path, where in sorted(here.files.items()):
        nodes = sorted({node for at in where for node in at.nodes})
        yield {
            "name": path,
            "bytes": where[0].entry.size,
            "node": ", ".join(nodes),
            "rank": rank(path),
            "stored": any(here.sizes.get(at.name) == at.entry.size for at in where),
        }


def _damage(here: LocationState) -> Iterator[dict[str, Any]]:
    for finding in unanswered_findings(here):
        if finding.kind in DAMAGE:
            yield {
                "file": finding.name,
                "kind": finding.kind,
                "detail": finding.detail,
                "ranges": [list(pair) for pair in finding.ranges[:DAMAGED]],
                "tensors": list(finding.tensors[:DAMAGED]),
            }


def _reports(here: LocationState) -> Iterator[dict[str, Any]]:
    """Yield the reports of a location, the newest first."""
    for report in sorted(here.records.reports.values(), key=lambda r: -r.n)[:DAMAGED]:
        yield {
            "n": report.n,
            "level": report.level,
            "verdict": report.verdict,
            "when": report.when or None,
            "read": report.read,
            "findings": len(report.findings),
        }


def _commands(url: str, s: Summary) -> dict[str, str]:
    where = f"{s.run}/{s.location}"
    words = {
        "pull": ["pull", where, "DIR"],
        "verify": ["verify", where],
        "repair": ["repair", where],
        "keep": ["keep", where],
        "ls": ["ls", where],
    }
    if s.consolidated:
        words["pull_model"] = ["pull", where, "DIR", "--consolidated"]
    return {name: shlex.join(["ckptsync", *its, "--store", url]) for name, its in words.items()}
