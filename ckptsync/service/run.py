"""`run`: from a configuration to an exit code.

    looks begin → open the store → no other live worker of this id → work, until a signal or a fault → let running work end, or abandon it

Work that is abandoned loses nothing: what it was writing appears whole or not at all, and the next start finishes it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TypeVar

from ckptsync.config.loading import shown_url
from ckptsync.config.runs import output_directories, unmatched
from ckptsync.config.schema import Config
from ckptsync.errors import CkptsyncError, Transient
from ckptsync.fleet.heartbeat import Heartbeat, claim, farewell
from ckptsync.service import process
from ckptsync.service.heartbeat import Heart
from ckptsync.service.log import configure, pairs
from ckptsync.service.periodic import Periodic, in_background, looping, scheduled
from ckptsync.service.process import Notifier, Stopping, stopping
from ckptsync.service.roles import Roles, UntilGone
from ckptsync.service.store import Absent, ServiceStore, check, opened
from ckptsync.service.watchdog import HUNG, Silences, advanced, mark
from ckptsync.stores import signs
from ckptsync.stores.contract import Store
from ckptsync.worker.node import node_id

GRACE = 4.0  # seconds that running work has to end after a signal, and then the store to hear of it
STATUS_EVERY = 5.0
LISTEN_EVERY = 0.25  # seconds between looks for a stop while a store is asked

T = TypeVar("T")
Begin = Callable[[Config, str, Store, Callable[[BaseException], None]], AbstractContextManager[Roles]]

log = logging.getLogger(__name__)


@contextmanager
def begun(config: Config, node: str, store: Store, fatal: Callable[[BaseException], None]) -> Iterator[Roles]:
    """Give the roles that a configuration names; raises ConfigError where one cannot begin.  What no role needs is not imported."""
    with ExitStack() as stack:
        roles = Roles()
        if "worker" in config.roles:
            from ckptsync.service.worker import WorkerRole  # noqa: PLC0415

            roles.worker = worker = WorkerRole(config, node, store, fatal)
            stack.callback(worker.close)
            worker.begin()
            roles.looks.append(worker.looking)
            roles.loops += [worker.sending, *worker.carrying]
            roles.spool_budget = config.worker.spool_budget
        if {"head", "verifier"} & set(config.roles):
            from ckptsync.service.head import HeadRoles  # noqa: PLC0415

            roles.head = head = HeadRoles(config, node, store, fatal)
            stack.callback(head.children.end)
            roles.jobs += head.works
            roles.verifies = config.verify.period if "verifier" in config.roles else 0.0
        if config.metrics.listen:
            from ckptsync.service.metrics import AGAIN, Metrics  # noqa: PLC0415

            metrics = Metrics(config, node, roles)
            stack.callback(metrics.close)
            roles.looks.append(Periodic("metrics", AGAIN, metrics.look, fatal))
        yield roles


def run(load: Callable[[], Config], until_gone: int | None = None, begin: Begin = begun) -> int:
    """Until SIGTERM or SIGINT (0), a second live worker of this id (2) or a fault of ours (1).  Raises ConfigError or StoreError at the start.

    ``load`` is asked again at SIGHUP: with a configuration that is well, the run ends (0), for whoever started it to start it again with that one.
    ``until_gone``: a process; it ends after that one, too.
    """
    config = load()
    configure(config.log)
    _say_start(config)
    with stopping() as stop:
        _Service(config, stop, load, UntilGone(until_gone)).serve(begin)
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


class _Service:
    def __init__(self, config: Config, stop: Stopping, load: Callable[[], Config], until_gone: UntilGone) -> None:
        self._config, self._stop, self._load, self._until_gone = config, stop, load, until_gone
        self._node = config.node or node_id()
        self._store = ServiceStore(config.store.url, lambda: stop.asked)
        self._notifier = Notifier()

    def serve(self, begin: Begin) -> None:
        """Looks begin at once: what the trainer writes is pinned while the store is waited for."""
        with begin(self._config, self._node, self._store, self._fatal) as roles, looping(roles.looks):
            self._notifier.send("READY=1", "STATUS=opening the store")
            there = self._waited_for(lambda: opened(self._config), roles)
            if there is not None:
                self._claim(there, roles)
            self._end(roles.works, roles)
        log.info("%s", pairs(phase="stopped", node=self._node, exit_code=self._stop.code))

    def _waited_for(self, ask: Callable[[], T], roles: Roles) -> T | None:
        """What a store answers once it is there and can be reached; ``None`` if a stop was asked for meanwhile."""
        said = ""
        while not self._stop.asked:
            try:
                return self._answer(ask, roles)
            except (Absent, Transient) as e:
                if str(e) != said and not self._stop.asked:
                    log.error("%s", pairs(phase="waiting", error=e, hint=e.hint))  # noqa: TRY400 - the operator's error needs no traceback
                said = str(e)
                self._notifier.send("READY=1", "WATCHDOG=1", f"STATUS=waits for the store: {e}")
            roles.advance()
            self._stop.rest(STATUS_EVERY)
            self._heed(roles)
        return None

    def _answer(self, ask: Callable[[], T], roles: Roles) -> T:
        """Asked aside: a store that does not answer keeps nobody from stopping, and one that is asked again and again is no hang."""
        asking, told = in_background(ask), signs.given()
        while not _is_over(asking, LISTEN_EVERY):
            if self._stop.asked and not _is_over(asking, GRACE):
                self._abandon(["store"])
            if signs.given() != told:
                told = signs.given()
                roles.advance()
                self._notifier.send("WATCHDOG=1")
        return asking.result()

    def _pause(self, seconds: float, roles: Roles) -> None:
        """Nothing hangs meanwhile.  Raises Transient if a stop is asked for."""
        until = time.monotonic() + seconds
        while not self._stop.asked and (left := until - time.monotonic()) > 0:
            self._stop.wait(min(left, STATUS_EVERY))
            roles.advance()
            self._notifier.send("WATCHDOG=1")
        if self._stop.asked:
            raise Transient("the service is stopping")

    def _claim(self, there: Store, roles: Roles) -> None:
        """Take the node's name, and work under it."""
        own = process.heartbeat(self._node, self._config.roles)
        mine = self._waited_for(lambda: claim(there, own, process.is_running, lambda s: self._pause(s, roles)), roles)
        if mine is None:
            return
        if self._stop.asked:  # it had the name by then
            self._end((), roles, lambda: farewell(there, mine))
            return
        try:
            self._store.came(there)
            self._work(mine, there, roles)
        except CkptsyncError:
            farewell(there, mine)  # the name is taken by then, and must not look alive
            raise

    def _work(self, mine: Heartbeat, store: Store, roles: Roles) -> None:
        heart = Heart(store, mine, roles, self._stop)
        beat = Periodic("heartbeat", mine.period, heart.beat, self._fatal)
        roles.beat, roles.handed = beat, lambda: self._store.handed
        log.info("%s", pairs(phase="started", node=mine.node, roles=",".join(self._config.roles), store=store.url))
        with looping((beat, *roles.loops)), scheduled(roles.jobs) as again:
            self._attend((beat, *roles.works), roles, again)
        self._notifier.send("STOPPING=1", "STATUS=stopping")
        roles.end_children()
        self._end((beat, *roles.loops, *roles.jobs), roles, heart.farewell)

    def _attend(self, works: Sequence[Periodic], roles: Roles, again: Callable[[], None]) -> None:
        """Tell systemd how it goes, until a stop is asked for; ``again`` runs what APScheduler has after a jump of the clock."""
        names = [work.name for work in works]
        period = min(STATUS_EVERY, (self._notifier.watchdog or 2 * STATUS_EVERY) / 2)
        before, silences, said = mark(works), Silences(), ""
        while not self._stop.rest(period):
            if by := roles.clocks.jumped():
                log.warning("%s", pairs(phase="clock-jumped", by=f"{by:+.0f}s"))
                again()
            self._heed(roles)
            now, hung = mark(works), ",".join(silences.hung(works))
            is_well = advanced(before, now, names) and roles.are_children_watched() and not hung
            if hung and hung != said:
                log.critical("%s", pairs(phase="hung", ticks=hung, detail=f"nothing of it has moved for {HUNG:.0f} s"))
            said = hung
            if is_well:
                roles.advance()
            self._notifier.send(*(["WATCHDOG=1"] if is_well else []), f"STATUS={roles.status()}")
            before = now

    def _heed(self, roles: Roles) -> None:
        """Ask for a stop where SIGHUP brought a new configuration, or where the time to end has come."""
        if self._stop.take_reload() and self._is_configuration_well():
            log.info("%s", pairs(phase="reloading", detail="ends, so that the next start reads the configuration as it is now"))
            self._stop.ask()
        if self._until_gone.is_due(roles):
            self._stop.ask()

    def _is_configuration_well(self) -> bool:
        """Return whether a process could begin with the configuration as it is now; log why not."""
        try:
            check(self._load())
        except CkptsyncError as e:
            log.error("%s", pairs(phase="not-reloaded", error=e, hint=e.hint))  # noqa: TRY400 - the operator's error needs no traceback
            return False
        return True

    def _fatal(self, e: BaseException) -> None:
        log.critical("%s", pairs(phase="failed", error=f"{type(e).__name__}: {e}"), exc_info=e)
        self._stop.ask(1)

    def _end(self, works: Sequence[Periodic], roles: Roles, say: Callable[[], object] = lambda: None) -> None:
        """Wait for running work and child processes, then ``say`` in the store that all has ended.

        What needs longer is abandoned, and with it the process: a thread cannot be killed.
        """
        until = time.monotonic() + GRACE
        while (any(work.is_running for work in works) or roles.jobs_of_children()) and time.monotonic() < until:
            time.sleep(0.05)
        last = in_background(say)
        is_said = _is_over(last, GRACE)
        running = [work.name for work in works if work.is_running]
        if running or not is_said:
            self._abandon([*running, *([] if is_said else ["farewell"])])
        last.result()

    def _abandon(self, names: Sequence[str]) -> None:
        log.warning("%s", pairs(phase="abandoned", ticks=",".join(names), detail="what they were writing will not appear"))
        self._stop.leave()


def _is_over(asked: Future[T], seconds: float) -> bool:
    """Whether there is an answer, or an error, in so many seconds."""
    return bool(wait([asked], seconds).done)
