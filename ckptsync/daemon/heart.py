"""The heartbeat as a tick: what this process is doing, for `ckptsync status`; and the watch for a second worker."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Protocol

from ckptsync.daemon.stopping import Stopping
from ckptsync.errors import ConfigError
from ckptsync.fleet import heartbeat
from ckptsync.fleet.heartbeat import Heartbeat
from ckptsync.stores.contract import Store

MOST = 1000  # entries of the queue that a heartbeat tells

log = logging.getLogger(__name__)


class Working(Protocol):
    """What a heartbeat tells of the roles."""

    def queue(self) -> tuple[str, ...]:
        """What is on its way."""
        ...

    def errors(self) -> tuple[str, ...]:
        """What the last ticks said."""
        ...


class Heart:
    """Beats until it finds that it is the second one."""

    def __init__(self, store: Store, mine: Heartbeat, working: Working, stop: Stopping) -> None:
        self._store, self._mine, self._working, self._stop = store, mine, working, stop

    def beat(self) -> None:
        """Write one; asks for a stop with exit code 2 if another live worker of this id was there first."""
        telling = replace(self._mine, told=time.time(), queue=self._working.queue()[:MOST], errors=self._working.errors())
        try:
            self._mine = heartbeat.beat(self._store, telling)
        except ConfigError as e:
            log.critical("phase=refused error=%s hint=%s", e, e.hint)
            self._stop.ask(e.exit_code)

    def farewell(self) -> None:
        """Say that this process has stopped, unless the name is another's."""
        if self._stop.code == ConfigError.exit_code:
            return
        failed = heartbeat.farewell(self._store, self._mine)
        if failed:
            log.warning("phase=stopped error=%s", failed)
