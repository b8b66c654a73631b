"""`run`: from a configuration to an exit code.

    looks begin → open the store → no other live worker of this id → ticks, until a signal or a fault → let running ticks end, or abandon them

A tick that is abandoned loses nothing: what it was writing appears whole or not at all, and the next start finishes it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ckptsync.config.loading import shown_url
from ckptsync.config.runs import output_directories, unmatched
from ckptsync.config.schema import Config
from ckptsync.daemon import identity
from ckptsync.daemon.asking import Asking
from ckptsync.daemon.awaited import Awaited
from ckptsync.daemon.clocks import Clocks
from ckptsync.daemon.heart import Gauges, Heart
from ckptsync.daemon.leaving import Never, Parting
from ckptsync.daemon.log import configure
from ckptsync.daemon.loops import looping
from ckptsync.daemon.phases import pairs
from ckptsync.daemon.progress import HUNG, Silences, advanced, mark
from ckptsync.daemon.rehearsing import rehearsed
from ckptsync.daemon.schedule import scheduled
from ckptsync.daemon.sdnotify import Notifier
from ckptsync.daemon.served import Absent, opened
from ckptsync.daemon.stoppable import Stoppable
from ckptsync.daemon.stopping import Stopping, stopping
from ckptsync.daemon.tick import Tick
from ckptsync.daemon.working import Roles, Working
from ckptsync.errors import CkptsyncError, Transient
from ckptsync.fleet.heartbeat import Heartbeat, claim, farewell
from ckptsync.stores import signs
from ckptsync.stores.contract import Store
from ckptsync.worker.node import node_id

GRACE = 4.0  # seconds that running ticks have to end after a signal, and then the store to hear of it
STATUS_EVERY = 5.0
LISTEN_EVERY = 0.25  # seconds between looks for a stop while a store is asked

T = TypeVar("T")

log = logging.getLogger(__name__)


def run(load: Callable[[], Config], roles: Roles, parting: Parting = Never()) -> int:  # noqa: B008 - it never changes
    """Until SIGTERM or SIGINT (0), a second live worker of this id (2) or a fault of ours (1).  Raises ConfigError or StoreError at the start.

    ``load`` is asked again at SIGHUP: with a configuration that is well, the run ends (0), for whoever started it to start it again with that one.
    ``parting`` says when to end unasked.
    """
    config = load()
    configure(config.log)
    _say_start(config)
    with stopping() as stop:
        _Service(config, stop, load, parting).serve(roles)
        logging.shutdown()
        return stop.code


def _say_start(config: Config) -> None:
    """The first line: what this service works on, and which keys of its file a variable overrides."""
    url = config.store.url
    outputs = [run.path for run in output_directories(config.worker.runs, url).runs] if "worker" in config.roles else []
    level = logging.WARNING if config.overridden else logging.INFO
    what = pairs(phase="starting", roles=",".join(config.roles), store=shown_url(url), outputs=", ".join(outputs))
    log.log(level, "%s", f"{what} {pairs(overridden='; '.join(config.overridden))}".rstrip())
    for line in unmatched(config.worker.runs) if "worker" in config.roles else ():
        log.warning("%s", pairs(phase="no-match", detail=line))


@dataclass(frozen=True, slots=True)
class _Service:
    config: Config
    stop: Stopping
    load: Callable[[], Config]
    parting: Parting

    def serve(self, roles: Roles) -> None:
        """Looks begin at once: what the trainer writes is pinned while the store is waited for."""
        store = Awaited(self.config.store.url)
        node = self.config.node or node_id()
        with roles(self.config, node, store, self._fatal) as working, looping(working.looks):
            Notifier().send("READY=1", "STATUS=opening the store")
            there = self._waited_for(lambda: opened(self.config), working)
            if there is not None:
                self._claimed(node, there, store, working)
            self._end(working.ticks, working)
        log.info("%s", pairs(phase="stopped", node=node, exit_code=self.stop.code))

    def _waited_for(self, ask: Callable[[], T], working: Working) -> T | None:
        """What a store answers once it is there and can be reached; ``None`` if a stop was asked for meanwhile."""
        said = ""
        while not self.stop.asked:
            try:
                return self._answer(ask, working)
            except (Absent, Transient) as e:
                if str(e) != said and not self.stop.asked:
                    log.error("%s", pairs(phase="waiting", error=e, hint=e.hint))  # noqa: TRY400 - the operator's error needs no traceback
                said = str(e)
                Notifier().send("READY=1", "WATCHDOG=1", f"STATUS=waits for the store: {e}")
            working.vitals.advance()
            self.stop.rest(STATUS_EVERY)
            self._heed(working)
        return None

    def _answer(self, ask: Callable[[], T], working: Working) -> T:
        """Asked aside: a store that does not answer keeps nobody from stopping, and one that is asked again and again is no hang."""
        asking, told = Asking(ask), signs.given()
        while not asking.is_over(LISTEN_EVERY):
            if self.stop.asked and not asking.is_over(GRACE):
                self._abandon(["store"])
            if signs.given() != told:
                told = signs.given()
                working.vitals.advance()
                Notifier().send("WATCHDOG=1")
        return asking.answer()

    def _pause(self, seconds: float, working: Working) -> None:
        """Nothing hangs meanwhile.  Raises Transient if a stop is asked for."""
        until = time.monotonic() + seconds
        while not self.stop.asked and (left := until - time.monotonic()) > 0:
            self.stop.wait(min(left, STATUS_EVERY))
            working.vitals.advance()
            Notifier().send("WATCHDOG=1")
        if self.stop.asked:
            raise Transient("the service is stopping")

    def _claimed(self, node: str, there: Store, store: Awaited, working: Working) -> None:
        own = identity.heartbeat(node, self.config.roles)
        mine = self._waited_for(lambda: claim(there, own, identity.is_running, lambda s: self._pause(s, working)), working)
        if mine is None:
            return
        if self.stop.asked:  # it had the name by then
            self._end((), working, lambda: farewell(there, mine))
            return
        try:
            stoppable = Stoppable(there, lambda: self.stop.asked)
            store.came(stoppable)
            self._work(mine, there, working, lambda: stoppable.handed)
        except CkptsyncError:
            farewell(there, mine)  # the name is taken by then, and must not look alive
            raise

    def _work(self, mine: Heartbeat, store: Store, working: Working, handed: Callable[[], int]) -> None:
        clocks, notifier = Clocks(), Notifier()
        heart = Heart(store, mine, working, self.stop, Gauges(clocks, handed))
        beat = Tick("heartbeat", mine.period, heart.beat, self._fatal)
        working.vitals.beat, working.vitals.handed = beat, handed
        log.info("%s", pairs(phase="started", node=mine.node, roles=",".join(self.config.roles), store=store.url))
        with looping((beat, *working.loops)), scheduled(working.jobs) as again:
            self._attend((beat, *working.ticks), working, notifier, lambda: _mind(clocks, again))
        notifier.send("STOPPING=1", "STATUS=stopping")
        working.ground.end_children()
        self._end((beat, *working.loops, *working.jobs), working, heart.farewell)

    def _attend(self, ticks: Sequence[Tick], working: Working, notifier: Notifier, mind: Callable[[], None]) -> None:
        """Tell systemd how it goes, until a stop is asked for."""
        names = [tick.name for tick in ticks]
        period = min(STATUS_EVERY, (notifier.watchdog or 2 * STATUS_EVERY) / 2)
        before, silences, said = mark(ticks), Silences(), ""
        while not self.stop.rest(period):
            mind()
            self._heed(working)
            now, hung = mark(ticks), ",".join(silences.hung(ticks))
            is_well = advanced(before, now, names) and working.ground.are_watched() and not hung
            if hung and hung != said:
                log.critical("%s", pairs(phase="hung", ticks=hung, detail=f"nothing of it has moved for {HUNG:.0f} s"))
            said = hung
            if is_well:
                working.vitals.advance()
            notifier.send(*(["WATCHDOG=1"] if is_well else []), f"STATUS={working.status()}")
            before = now

    def _heed(self, working: Working) -> None:
        """Ask for a stop where SIGHUP brought a new configuration, or where the time to end has come."""
        if self.stop.taken() and self._is_configuration_well():
            log.info("%s", pairs(phase="reloading", detail="ends, so that the next start reads the configuration as it is now"))
            self.stop.ask()
        if self.parting.is_due(working):
            self.stop.ask()

    def _is_configuration_well(self) -> bool:
        """Return whether a process could begin with the configuration as it is now; log why not."""
        try:
            rehearsed(self.load())
        except CkptsyncError as e:
            log.error("%s", pairs(phase="not-reloaded", error=e, hint=e.hint))  # noqa: TRY400 - the operator's error needs no traceback
            return False
        return True

    def _fatal(self, e: BaseException) -> None:
        log.critical("%s", pairs(phase="failed", error=f"{type(e).__name__}: {e}"), exc_info=e)
        self.stop.ask(1)

    def _end(self, ticks: Sequence[Tick], working: Working, say: Callable[[], object] = lambda: None) -> None:
        """Wait for running ticks and child processes, then ``say`` in the store that all has ended.

        What needs longer is abandoned, and with it the process: a thread cannot be killed.
        """
        until = time.monotonic() + GRACE
        while (any(tick.is_running for tick in ticks) or working.ground.children()) and time.monotonic() < until:
            time.sleep(0.05)
        last = Asking(say)
        is_said = last.is_over(GRACE)
        running = [tick.name for tick in ticks if tick.is_running]
        if running or not is_said:
            self._abandon([*running, *([] if is_said else ["farewell"])])
        last.answer()

    def _abandon(self, names: Sequence[str]) -> None:
        log.warning("%s", pairs(phase="abandoned", ticks=",".join(names), detail="what they were writing will not appear"))
        self.stop.leave()


def _mind(clocks: Clocks, again: Callable[[], None]) -> None:
    """A clock that was set back an hour would keep the scheduler from running anything for an hour."""
    by = clocks.jumped()
    if by:
        log.warning("%s", pairs(phase="clock-jumped", by=f"{by:+.0f}s"))
        again()
