"""The heartbeat as a tick: what this process is doing, for `ckptsync status`; and the watch for a second worker."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from ckptsync.daemon.clocks import Clocks
from ckptsync.daemon.phases import pairs
from ckptsync.daemon.rate import Rate
from ckptsync.daemon.stopping import Stopping
from ckptsync.daemon.surveying import shown, survey
from ckptsync.daemon.working import Working
from ckptsync.errors import ConfigError, StoreError
from ckptsync.fleet import facts, heartbeat
from ckptsync.fleet.facts import Facts
from ckptsync.fleet.heartbeat import Heartbeat
from ckptsync.stores.contract import Store
from ckptsync.worker.clock import Clock

MOST = 1000  # entries of the queue that a heartbeat tells

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Gauges:
    """What the service reads beside its roles: the clocks, and how many bytes were handed to the store."""

    clocks: Clocks
    handed: Callable[[], int]


class Heart:
    """Beats until it finds that it is the second one."""

    def __init__(self, store: Store, mine: Heartbeat, working: Working, stop: Stopping, gauges: Gauges) -> None:
        self._store, self._mine, self._working, self._stop, self._gauges = store, mine, working, stop, gauges
        self._rate = Rate()
        self._facts: Facts | None = None
        self._clock = Clock(store, mine.node)
        self._offset: int | None = None

    def beat(self) -> None:
        """Write one; asks for a stop with exit code 2 if another live worker of this id was there first."""
        try:
            self._mine = heartbeat.beat(self._store, self._telling(time.monotonic()))
        except heartbeat.Rival as e:
            log.critical("%s", pairs(phase="refused", error=e, hint=e.hint))
            self._stop.ask(e.exit_code)
        else:
            self._tell_facts()

    def _tell_facts(self) -> None:
        """Where something has changed since they were told last."""
        found = survey(self._mine.node, self._working.ground.runs(), self._measured(time.monotonic()))
        if found != self._facts:
            facts.write(self._store, replace(found, at=time.time()), self._mine.roles)
            self._facts = found

    def _measured(self, now: float) -> int | None:
        """How far the node's clock is from the store's; as it was last known where the store does not say now."""
        self._clock.notice(now)
        with contextlib.suppress(StoreError):  # the facts that follow tell that the store is away
            self._offset = self._clock.offset(now)
        return self._offset

    def _telling(self, now: float) -> Heartbeat:
        working, handed, oldest = self._working, self._gauges.handed(), self._working.oldest()
        working.vitals.disks = working.ground.disks()
        return replace(
            self._mine,
            told=time.time(),
            queue=working.queue()[:MOST],
            errors=tuple(map(shown, working.errors())),
            oldest=0.0 if oldest is None else max(0.0, now - oldest),
            sent_bytes=handed,
            rate=self._rate.read(now, handed),
            disk=working.vitals.disks,
            watch=working.watch(),
            lacks=dict(list(working.lacks().items())[:MOST]),
            jobs=working.ground.children(),
            verifies=working.ground.verifies,
            notes=tuple(map(shown, (*self._gauges.clocks.notes, *working.notes())[:MOST])),
        )

    def farewell(self) -> None:
        """Say that this process has stopped, unless the name is another's."""
        if self._stop.code == ConfigError.exit_code:
            return
        failed = heartbeat.farewell(self._store, self._mine)
        if failed:
            log.warning("%s", pairs(phase="stopped", error=failed))
