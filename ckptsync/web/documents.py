"""What each URL of the page says, as plain values, from one overview of a store.

Only what the overview does not have is read: the newest ``trainer_state.json`` of a run, and the
records of a location that somebody looks at. Each is read again only when its records change.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

from ckptsync.catalogue.location_summary import Summary, by_age
from ckptsync.errors import NotFound
from ckptsync.status.location_details import commands, describe_progress, read_details
from ckptsync.status.locations import describe_locations
from ckptsync.status.overview import Overview, document
from ckptsync.status.training_curves import Curve, read_newest, states_of, thinned, with_metrics
from ckptsync.stores.contract import Store

T = TypeVar("T")
STRIP = 36  # cells of a run's strip: as many as a screen has room for
KEPT = 32  # runs, and locations, that are remembered


class Documents:
    """Documents of a store, by URL. Any thread may ask."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._grouped: tuple[Overview | None, dict[str, list[Summary]]] = (None, {})
        self._strips: dict[str, tuple[list[Summary], list[dict[str, Any]]]] = {}
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
        last = self._strips
        # what a run's listing did not change are the same summaries: its strip is kept
        self._strips = strips = {
            run: last[run] if run in last and last[run][0] == its else (its, _strip(its))
            for run, its in self._by_run(seen).items()
        }
        return {**document(seen), "strips": {run: strip for run, (_, strip) in strips.items()}}

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
                {**plain, **describe_progress(s, curves)}
                for plain, s in zip(described, summaries, strict=True)
            ],
            "curves": {
                metric: thinned(points)
                for metric, points in with_metrics(curves, summaries).items()
            },
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
        is_alone = sum(s.checkpoint == summary.checkpoint for s in summaries) == 1
        # only of several saves of one name do the run's others say which is newer
        which = [summary] if is_alone else summaries
        described = describe_locations(seen.store, which, seen.running)
        plain = next(d for d in described if d["location"] == location)
        details = self._read_once(
            self._locations, (run, location), summary, lambda: read_details(self._store, summary)
        )
        return {
            "store": seen.store,
            "at": seen.at,
            **plain,
            **describe_progress(summary, curves),
            **details,
            "commands": commands(seen.store, summary),
        }

    def _curves_of(self, run: str, summaries: Sequence[Summary]) -> Mapping[str, Curve]:
        """Return the whole curves of a run; none where its trainer logged none that can be read."""
        its = states_of(summaries)
        key = [(s.location, s.state, s.status) for s in its]
        return self._read_once(self._curves, run, key, lambda: read_newest(self._store, its))

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


def _strip(its: Sequence[Summary]) -> list[dict[str, Any]]:
    """Return the cells of a run's newest checkpoints, the oldest first."""
    newest = by_age(its)[-STRIP:]
    return [{"location": s.location, "step": s.step, "status": s.status} for s in newest]


def _running(seen: Overview, run: str) -> list[dict[str, Any]]:
    return [entry.document() for entry in seen.running if entry.run == run]
