"""The JSON document of each URL of the page, as plain values, from one overview of a store.

The overview has nearly everything. Only the newest ``trainer_state.json`` of a run, and the records
of a location that a viewer opens, are read from the store, and again only when they have changed.
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
    """Makes the documents of a store. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._grouped: tuple[Overview | None, dict[str, list[Summary]]] = (None, {})
        self._strips: dict[str, tuple[list[Summary], list[dict[str, Any]]]] = {}
        self._curves: dict[Hashable, tuple[object, Mapping[str, Curve]]] = {}
        self._locations: dict[Hashable, tuple[object, dict[str, Any]]] = {}

    def _by_run(self, overview: Overview) -> Mapping[str, list[Summary]]:
        """Return the locations of each run, in the catalogue's order; kept for one overview."""
        last, runs = self._grouped
        if last is not overview:
            runs = {}
            for s in overview.catalogue.shown:
                runs.setdefault(s.run, []).append(s)
            self._grouped = overview, runs
        return runs

    def overview(self, overview: Overview) -> dict[str, Any]:
        """Return the document of ``/``: that of ``status --json``, and a strip for each run."""
        last = self._strips
        # what a run's listing did not change are the same summaries: its strip is kept
        self._strips = strips = {
            run: last[run]
            if run in last and last[run][0] == summaries
            else (summaries, _strip(summaries))
            for run, summaries in self._by_run(overview).items()
        }
        return {**document(overview), "strips": {run: strip for run, (_, strip) in strips.items()}}

    def nodes(self, overview: Overview) -> dict[str, Any]:
        """Return the document of ``/nodes``."""
        whole = document(overview)
        return {name: whole[name] for name in ("store", "at", "nodes", "running")}

    def run(self, overview: Overview, run: str, most: int = 0) -> dict[str, Any]:
        """Return the document of ``/runs/RUN``, with its ``most`` newest checkpoints (0: all).

        It may read the store for the curves. Raises NotFound if the overview has no such run.
        """
        summaries = self._by_run(overview).get(run)
        if not summaries:
            raise NotFound(f"run {run!r} not found in {overview.store}")
        summaries = summaries[-most:]
        curves = self._curves_of(run, summaries)
        described = describe_locations(overview.store, summaries, overview.running)
        return {
            "store": overview.store,
            "at": overview.at,
            "run": run,
            "checkpoints": [
                {**plain, **describe_progress(s, curves)}
                for plain, s in zip(described, summaries, strict=True)
            ],
            "curves": {
                metric: thinned(points)
                for metric, points in with_metrics(curves, summaries).items()
            },
            "running": _running(overview, run),
        }

    def location(self, overview: Overview, run: str, location: str) -> dict[str, Any]:
        """Return the document of ``/runs/RUN/LOCATION``; read its records if they have changed.

        Raises NotFound if the overview has no such location, StoreError if its records cannot be
        read.
        """
        summaries = self._by_run(overview).get(run, [])
        summary = next((s for s in summaries if s.location == location), None)
        if summary is None:
            raise NotFound(f"checkpoint {location!r} of run {run!r} not found in {overview.store}")
        curves = self._curves_of(run, summaries)
        is_alone = sum(s.checkpoint == summary.checkpoint for s in summaries) == 1
        # only of several saves of one name do the run's others say which is newer
        described_summaries = [summary] if is_alone else summaries
        described = describe_locations(overview.store, described_summaries, overview.running)
        plain = next(d for d in described if d["location"] == location)
        details = self._read_once(
            self._locations, (run, location), summary, lambda: read_details(self._store, summary)
        )
        return {
            "store": overview.store,
            "at": overview.at,
            **plain,
            **describe_progress(summary, curves),
            **details,
            "commands": commands(overview.store, summary),
        }

    def _curves_of(self, run: str, summaries: Sequence[Summary]) -> Mapping[str, Curve]:
        """Return the whole curves of a run; none if no trainer's state can be read.

        Reads the store once for each set of trainer's states, and caches the result.
        """
        state_locations = states_of(summaries)
        key = [(s.location, s.state, s.status) for s in state_locations]
        return self._read_once(
            self._curves, run, key, lambda: read_newest(self._store, state_locations)
        )

    def _read_once(
        self,
        cache: dict[Hashable, tuple[object, T]],
        name: Hashable,
        key: object,
        load: Callable[[], T],
    ) -> T:
        """Return the cached value of a name if it has this key; else load and cache it.

        Other threads, of any name, wait while one loads.  Drops the entries that were used least
        recently, beyond `KEPT`.  Raises what ``load`` raises, and then drops the old entry.
        """
        with self._lock:
            last = cache.pop(name, None)
            if last is None or last[0] != key:
                last = key, load()
            cache[name] = last
            while len(cache) > KEPT:
                del cache[next(iter(cache))]
            return last[1]


def _strip(summaries: Sequence[Summary]) -> list[dict[str, Any]]:
    """Return the cells of a run's newest checkpoints, at most `STRIP`, the oldest first."""
    newest = by_age(summaries)[-STRIP:]
    return [{"location": s.location, "step": s.step, "status": s.status} for s in newest]


def _running(overview: Overview, run: str) -> list[dict[str, Any]]:
    """Return the progress of nodes on a run."""
    return [entry.document() for entry in overview.running if entry.run == run]
