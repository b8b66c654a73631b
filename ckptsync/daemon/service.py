"""`run`: from a configuration to an exit code.

    open the store → no other live worker of this id → ticks, until a signal or a fault → let running ticks end, or abandon them

A tick that is abandoned loses nothing: what it was writing appears whole or not at all, and the next start finishes it.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from ckptsync.config.values import Config
from ckptsync.daemon import identity
from ckptsync.daemon.heart import Heart
from ckptsync.daemon.log import configure
from ckptsync.daemon.progress import advanced, mark
from ckptsync.daemon.schedule import scheduled
from ckptsync.daemon.sdnotify import Notifier
from ckptsync.daemon.served import Absent, opened
from ckptsync.daemon.stoppable import Stoppable
from ckptsync.daemon.stopping import Stopping, stopping
from ckptsync.daemon.tick import Tick
from ckptsync.daemon.working import Roles, Working
from ckptsync.errors import CkptsyncError, Transient
from ckptsync.fleet.heartbeat import Heartbeat, claim, farewell
from ckptsync.stores.contract import Store
from ckptsync.worker.node import node_id

GRACE = 4.0  # seconds that running ticks have to end after a signal
STATUS_EVERY = 5.0

T = TypeVar("T")

log = logging.getLogger(__name__)


def run(config: Config, roles: Roles) -> int:
    """Until SIGTERM or SIGINT (0), a second live worker of this id (2) or a fault of ours (1).  Raises ConfigError or StoreError at the start."""
    configure(config.log)
    node = config.node or node_id()
    with stopping() as stop:
        store = _opened(config, stop)
        code = _serve(config, node, store, stop, roles) if store else stop.code
    logging.shutdown()
    return code


def _opened(config: Config, stop: Stopping) -> Store | None:
    """The store, waited for while it is not there; ``None`` if a stop was asked for meanwhile."""
    return _waited_for(lambda: opened(config), stop)


def _waited_for(ask: Callable[[], T], stop: Stopping) -> T | None:
    """What a store answers once it is there and can be reached; ``None`` if a stop was asked for meanwhile."""
    said = ""
    while not stop.asked:
        try:
            return ask()
        except (Absent, Transient) as e:
            if str(e) != said:
                log.error("phase=waiting error=%s hint=%s", e, e.hint)  # noqa: TRY400 - the operator's error needs no traceback
            said = str(e)
            Notifier().send("READY=1", "WATCHDOG=1", f"STATUS=waits for the store: {e}")
        stop.wait(STATUS_EVERY)
    return None


def _serve(config: Config, node: str, store: Store, stop: Stopping, roles: Roles) -> int:
    Notifier().send("READY=1", "STATUS=looking for another worker of this node")
    own = identity.heartbeat(node, config.roles)
    mine = _waited_for(lambda: claim(store, own, identity.is_running, stop.wait), stop)
    if mine is None:
        return stop.code
    try:
        return stop.code if stop.asked else _work(config, mine, store, stop, roles)
    except CkptsyncError:
        farewell(store, mine)  # the name is taken by then, and must not look alive
        raise


def _work(config: Config, mine: Heartbeat, store: Store, stop: Stopping, roles: Roles) -> int:
    node, fatal, notifier = mine.node, _fatal(stop), Notifier()
    with roles(config, node, Stoppable(store, lambda: stop.asked), fatal) as working:
        heart = Heart(store, mine, working, stop)
        ticks = (Tick("heartbeat", mine.period, heart.beat, fatal), *working.ticks)
        log.info("phase=started node=%s roles=%s store=%s", node, ",".join(config.roles), store.url)
        with scheduled(ticks):
            _attend(ticks, working, notifier, stop)
        notifier.send("STOPPING=1", "STATUS=stopping")
        _end(ticks, stop.code)
        heart.farewell()
    log.info("phase=stopped node=%s exit_code=%d", node, stop.code)
    return stop.code


def _fatal(stop: Stopping) -> Callable[[BaseException], None]:
    def fatal(e: BaseException) -> None:
        log.critical("phase=failed error=%s", f"{type(e).__name__}: {e}", exc_info=e)
        stop.ask(1)

    return fatal


def _attend(ticks: Sequence[Tick], working: Working, notifier: Notifier, stop: Stopping) -> None:
    """Tell systemd how it goes, until a stop is asked for."""
    names = [tick.name for tick in ticks]
    period = min(STATUS_EVERY, (notifier.watchdog or 2 * STATUS_EVERY) / 2)
    before = mark(ticks)
    while not stop.wait(period):
        now = mark(ticks)
        notifier.send(*(["WATCHDOG=1"] if advanced(before, now, names) else []), f"STATUS={working.status()}")
        before = now


def _end(ticks: Sequence[Tick], code: int) -> None:
    """Wait for running ticks; those that need longer are abandoned, and with them the process: a thread cannot be killed."""
    until = time.monotonic() + GRACE
    while any(tick.is_running for tick in ticks) and time.monotonic() < until:
        time.sleep(0.05)
    running = [tick.name for tick in ticks if tick.is_running]
    if running:
        log.warning("phase=abandoned ticks=%s: what they were writing will not appear", ",".join(running))
        logging.shutdown()
        sys.stderr.flush()
        os._exit(code)
