"""One refresh of a store's overview, shared by all viewers, and none while nobody looks."""

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
OLD = 60.0  # seconds after a refresh was due in which a viewer is shown the last picture
SHORT = 0.5  # seconds that a viewer waits for a refresh
LONG = 15.0  # the same where there is no picture, or an old one


@dataclass(frozen=True)
class CachedOverview:
    """An overview; ``number`` changes with what it says, except for ages.

    ``made``: documents that were made of this very overview, by what they are of.
    """

    overview: Overview
    number: int
    made: dict[Any, Any] = field(default_factory=dict, compare=False)


class OverviewCache:
    """The newest picture of a store. ``read``: reads one, raises StoreError. For one event loop."""

    def __init__(self, read: Callable[[], Overview]) -> None:
        self._read = read
        self._picture: CachedOverview | None = None
        self._error: CkptsyncError | None = None
        self._due = 0.0
        self._refresh: asyncio.Task[None] | None = None

    async def get(self) -> CachedOverview:
        """Return a picture, and begin a refresh where that is due.

        A viewer waits for the refresh for a moment, and longer where nobody looked for `OLD`
        seconds. Raises CkptsyncError if there is no picture at all.
        """
        now = time.monotonic()
        if self._refresh is None and now >= self._due:
            self._refresh = asyncio.get_running_loop().create_task(self._renew())
        if self._refresh is not None:
            is_old = self._picture is None or now - self._due > OLD
            await asyncio.wait({self._refresh}, timeout=LONG if is_old else SHORT)
        if self._picture is None:
            text, hint = (
                "the store is being read for the first time",
                "this page changes when it is",
            )
            raise self._error or CkptsyncError(text, hint=hint)
        return self._picture

    async def _renew(self) -> None:
        began = time.monotonic()
        try:
            self._picture, self._error = await in_thread(self._next, "web-store"), None
        except CkptsyncError as e:
            self._error = e
        finally:
            took = time.monotonic() - began
            self._due = began + max(EVERY, (1 + SHARE) * took)
            self._refresh = None

    def _next(self) -> CachedOverview:
        before = self._picture
        try:
            overview = self._read()
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
    """Return an overview without what changes while nothing happens."""
    nodes = tuple(replace(node, age=0.0, beat=0.0) for node in overview.nodes)
    running = tuple(replace(entry, at=0.0, left=None) for entry in overview.running)
    return replace(overview, at=0.0, room=None, nodes=nodes, running=running)
