"""A cached overview of a store, shared by all viewers of the page.

A refresh lists the store, so it must not depend on the number of viewers. A viewer's request starts
one if the last is old enough, at most one at a time; without viewers there is none. The time
between two grows with the time that one takes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ckptsync.errors import CkptsyncError
from ckptsync.status.alarms import Alarm
from ckptsync.status.overview import Overview
from ckptsync.web.server import in_thread

EVERY = 5.0  # seconds between two refreshes, at least
SHARE = 10.0  # times its own duration, before the next one: a large store costs a tenth of a core
OLD = 60.0  # seconds after a refresh was due in which viewers get the last overview
SHORT = 0.5  # seconds that a viewer waits for a refresh
LONG = 15.0  # the same where there is no overview, or an old one


@dataclass(frozen=True)
class CachedOverview:
    """An overview; ``number`` changes with its content, but not with times and ages alone.

    ``documents``: those made of this very overview, by their URLs.
    """

    overview: Overview
    number: int
    documents: dict[Any, Any] = field(default_factory=dict, compare=False)


class OverviewCache:
    """The newest overview of a store. ``load`` reads one, in a thread. For one event loop."""

    def __init__(self, load: Callable[[], Overview]) -> None:
        self._load = load
        self._cached: CachedOverview | None = None
        self._error: CkptsyncError | None = None
        self._next_refresh = 0.0
        self._refresh: asyncio.Task[None] | None = None

    async def get(self) -> CachedOverview:
        """Return the newest overview, and begin a refresh if that is due.

        Waits for a refresh for `SHORT` seconds; for `LONG` without an overview, or if the refresh
        was due more than `OLD` seconds ago. Without any, raises the CkptsyncError of the last
        refresh, or one that says that the first goes on.
        """
        now = time.monotonic()
        if self._refresh is None and now >= self._next_refresh:
            self._refresh = asyncio.get_running_loop().create_task(self._renew())
        if self._refresh is not None:
            is_old = self._cached is None or now - self._next_refresh > OLD
            await asyncio.wait({self._refresh}, timeout=LONG if is_old else SHORT)
        if self._cached is None:
            text, hint = (
                "the store is being read for the first time",
                "this page changes when it is",
            )
            raise self._error or CkptsyncError(text, hint=hint)
        return self._cached

    async def _renew(self) -> None:
        """Refresh the overview, or store the error; set when the next refresh is due.

        That is `EVERY` seconds after it began, or `SHARE` times its duration after it ended.
        """
        began = time.monotonic()
        try:
            self._cached, self._error = await in_thread(self._next, "web-store"), None
        except CkptsyncError as e:
            self._error = e
        finally:
            took = time.monotonic() - began
            self._next_refresh = began + max(EVERY, (1 + SHARE) * took)
            self._refresh = None

    def _next(self) -> CachedOverview:
        """Load the next overview; if that fails, return the last one with an alarm.

        Its number grows if more than times and ages differ. Raises CkptsyncError if there is no
        last one.
        """
        before = self._cached
        try:
            overview = self._load()
        except CkptsyncError as e:
            if before is None:
                raise
            overview = _unreachable(before.overview, e)
        if before is None:
            return CachedOverview(overview, 0)
        return CachedOverview(
            overview, before.number + (_ageless(overview) != _ageless(before.overview))
        )


def _unreachable(last: Overview, error: CkptsyncError) -> Overview:
    """Return the last overview of a store that cannot be read now, with an alarm that says so."""
    text = f"the store could not be read: {error}"
    todo = error.hint or "check that this machine can reach the store"
    alarm = Alarm("store-away", "store", "critical", last.at, text, todo)
    return replace(last, alarms=(alarm, *(a for a in last.alarms if a.code != alarm.code)))


def _ageless(overview: Overview) -> Overview:
    """Return an overview without the times and ages that change while nothing happens."""
    nodes = tuple(replace(node, age=0.0, beat=0.0) for node in overview.nodes)
    running = tuple(replace(entry, at=0.0, left=None) for entry in overview.running)
    return replace(overview, at=0.0, room=None, nodes=nodes, running=running)
