"""`ckptsync run`: the main loop of the service, from a configuration to an exit code.

One loop in the main thread starts every task when it is due, handles signals, and reports to
systemd.  The first task opens the store; scans do not wait for it.  A reload and a task that hangs
both end the process, and its supervisor (systemd, or the container) starts it again.  Unfinished
work loses nothing: its files appear whole or not at all, and the next start finishes it.
"""

from __future__ import annotations

import faulthandler
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from ckptsync.config.output_dirs import list_unmatched, output_directories
from ckptsync.config.schema import Config
from ckptsync.errors import CkptsyncError, Transient
from ckptsync.service import process_control
from ckptsync.service.log import configure, pairs
from ckptsync.service.process_control import Notifier, Stopping, stopping
from ckptsync.service.process_status import Heart, Roles
from ckptsync.service.store_connection import Absent, ServiceStore, check, open_configured
from ckptsync.service.tasks import HUNG, NEVER, Fatal, Task
from ckptsync.spool.markers import start_time
from ckptsync.status.heartbeat import claim
from ckptsync.stores import progress_signs
from ckptsync.stores.contract import Store
from ckptsync.stores.urls import shown_url
from ckptsync.worker.node_identity import clock_jump, node_id, wall_minus_monotonic

GRACE = 4.0  # seconds that running tasks have to end after a signal, and then the store to answer
CHECK_EVERY = 5.0  # seconds, at most, between two turns of the loop, and two tries of the store

FINISHES_WITHIN = 900.0  # seconds that what waits may wait unchanged, once the trainer is gone

Begin = Callable[[Config, str, Store, Fatal], AbstractContextManager[Roles]]

log = logging.getLogger(__name__)


@contextmanager
def roles_of(config: Config, node: str, store: Store, fatal: Fatal) -> Iterator[Roles]:
    """Yield the roles of a configuration and their tasks, not started; close them at the end.

    The worker takes its locks and begins its watches.  Modules that no configured role needs are
    not imported.  Raises ConfigError, or StoreError of Apprise, if a role cannot begin.
    """
    with ExitStack() as stack:
        roles = Roles()
        roles.watchdog.limit = HUNG + config.limits.stall + config.limits.patience
        if "worker" in config.roles:
            from ckptsync.service.worker_role import WorkerRole  # noqa: PLC0415

            roles.worker = worker = WorkerRole(config, node, store, fatal)
            stack.callback(worker.close)
            worker.begin()
            roles.local.append(worker.scanning)
            roles.tasks += [worker.planning, *worker.uploading, *worker.carrying]
            roles.spool_budget = config.worker.spool_budget
        if {"head", "verifier"} & set(config.roles):
            from ckptsync.service.head_roles import HeadRoles  # noqa: PLC0415

            roles.head = head = HeadRoles(config, node, store, fatal)
            stack.callback(head.jobs.end)
            roles.periodic += head.tasks
            roles.verifies = config.verify.period if "verifier" in config.roles else 0.0
        if config.metrics.listen or config.web.listen:
            from ckptsync.service.listeners import AGAIN, Listeners  # noqa: PLC0415

            listeners = Listeners(config, node, store, roles)
            stack.callback(listeners.close)
            roles.local.append(Task("listen", AGAIN, listeners.listen, fatal))
        yield roles


def run(load: Callable[[], Config], until_gone: int | None = None, begin: Begin = roles_of) -> int:
    """Run the service until it is stopped, and return its exit code; for the main thread.

    That is 0 after SIGTERM, SIGINT, a reload or ``until_gone``; 1 after a bug or a hang; 2 if an
    earlier worker has this id, too.  A task that does not end in time ends the process here.
    Replaces the log's handlers.

    Args:
        load: reads the configuration; called again at SIGHUP.  If that succeeds, the run ends (0),
            so that its supervisor starts it with the new configuration.
        until_gone: the id of a process; the run also ends after it, see `UntilGone`.
        begin: makes the roles; tests replace it.

    Raises:
        ConfigError: the configuration is wrong, a role cannot begin, or another worker has this id.
        CkptsyncError: the store refuses to be opened (not: it is unreachable).

    """
    config = load()
    configure(config.log)
    url, runs = config.store.url, config.worker.runs if "worker" in config.roles else ()
    outputs = ", ".join(run.path for run in output_directories(runs, url).runs)
    values = {"roles": ",".join(config.roles), "store": shown_url(url), "outputs": outputs}
    level = logging.WARNING if config.overridden else logging.INFO
    log.log(level, "%s", pairs(phase="starting", **values, overridden="; ".join(config.overridden)))
    for line in config.switched_off:
        log.info("%s", pairs(phase="off", detail=line))
    for line in list_unmatched(runs):
        log.warning("%s", pairs(phase="no-directory", detail=line))
    with stopping() as stop:
        _Service(config, stop, load, UntilGone(until_gone)).run(begin)
        logging.shutdown()
        return stop.code


class UntilGone:
    """`ckptsync run --until-gone PID`: stop once PID has ended and every checkpoint is stored.

    Checkpoints and queues that do not change any more delay the end by `FINISHES_WITHIN` at most.
    Without a PID the service never ends by itself.
    """

    def __init__(self, pid: int | None) -> None:
        """Note when the process with this PID began, since a PID can be used again."""
        self._pid, self._began = pid, start_time(pid) if pid is not None else ""
        self._runs: dict[str, int] | None = None
        self._left: object = None
        self._since = 0.0

    def notice_end(self, roles: Roles) -> bool:
        """Return True if the service must end now; False while the process lives, or without a PID.

        It must end once each task has begun and ended a run after the process, and nothing is
        queued; or after `FINISHES_WITHIN` without a change of that, and without uploads that work.
        Call it at each check, to note changes. The first call after that end hints every task.
        """
        if self._pid is None or start_time(self._pid) == self._began != "":
            return False
        tasks, now, queue = roles.all, time.monotonic(), roles.outcome().queue
        if self._runs is None:
            self._runs = {task.name: task.finished + task.is_running for task in tasks}
            for task in tasks:
                task.hint()
        late = [task for task in tasks if task.finished <= self._runs.get(task.name, 0)]
        is_sending = any(task.is_running for task in roles.tasks) and not roles.outcome().errors
        if (late, queue) != self._left or is_sending or any(task.is_running for task in late):
            self._left, self._since = (late, queue), now
        return not (late or queue) or now - self._since > FINISHES_WITHIN


class _Service:
    """One run of the service: its tasks, its store once that is open, and its stop request."""

    def __init__(
        self, config: Config, stop: Stopping, load: Callable[[], Config], until_gone: UntilGone
    ) -> None:
        """Prepare the task that opens the store; open and start nothing."""
        self._config, self._stop, self._load, self._until_gone = config, stop, load, until_gone
        self._node = config.node or node_id()
        self._store = ServiceStore(config.store.url, lambda: stop.is_stopping)
        self._notifier = Notifier()
        self._opening = Task("store", CHECK_EVERY, self._open, self._fatal)
        self._tasks: tuple[Task, ...] = ()
        self._heart: Heart | None = None
        self._beating: Task | None = None
        self._refusal: CkptsyncError | None = None
        self._status = "opening the store"
        self._clock = wall_minus_monotonic()

    def run(self, begin: Begin) -> None:
        """Run the main loop until a stop is requested, then end all tasks, as `_end` does.

        It starts due tasks, writes a heartbeat soon after a state has changed, and calls `_check`
        every `CHECK_EVERY` seconds or more often.  Raises what `begin` raises, or, at the end, the
        CkptsyncError by which the store refused to be opened.
        """
        role_context = begin(self._config, self._node, self._store, self._fatal)
        with role_context as roles, ExitStack() as stack:
            self._roles, self._stack = roles, stack
            self._adopt([self._opening, *roles.local])
            self._notifier.send("READY=1", f"STATUS={self._status}")
            period = min(CHECK_EVERY, (self._notifier.watchdog or NEVER) / 2)
            next_check = 0.0
            while not self._stop.is_stopping:
                now = time.monotonic()
                if self._beating is not None and self._heart and self._heart.compare_states():
                    self._beating.at(0.0)
                for task in self._tasks:
                    task.start_if_due(now)
                if now >= next_check or self._stop.must_reload:
                    self._check()
                    next_check = now + period
                next_due = min(
                    (task.due for task in self._tasks if not task.is_running), default=NEVER
                )
                self._stop.wait(min(next_check, next_due) - time.monotonic())
            self._end()
        if self._refusal is not None:
            raise self._refusal
        log.info("%s", pairs(phase="stopped", node=self._node, exit_code=self._stop.code))

    def _adopt(self, tasks: Iterable[Task]) -> None:
        """Add tasks to those that the loop starts, and wake the loop."""
        tasks = tuple(tasks)
        for task in tasks:
            task.wake = self._stop.wake
        self._tasks += tasks
        self._stop.wake()

    def _open(self) -> None:
        """Open the store, claim the node's id in it, and begin all tasks that need the store.

        The work of the task "store", done once.  May create the store, and wait for a rival's
        heartbeat.  An unreachable store is logged once a cause, and tried again every `CHECK_EVERY`
        seconds; any other error is kept in ``_refusal`` and stops the service.
        """
        try:
            store = open_configured(self._config)
            draft = process_control.heartbeat(self._node, self._config.roles)
            first_beat = claim(store, draft, process_control.is_running, self._pause)
        except (Absent, Transient) as e:
            status = f"waiting for the store: {e}"
            if status != self._status and not self._stop.is_stopping:
                log.error("%s", pairs(phase="waiting", error=e, hint=e.hint))  # noqa: TRY400 - the operator's error needs no traceback
            self._status = status
            return
        except CkptsyncError as e:
            self._refusal = e
            self._stop.ask()
            return
        self._opening.every = NEVER
        self._heart = heart = Heart(store, first_beat, self._roles, self._stop)
        self._store.connect(store)
        if self._stop.is_stopping:
            return
        values = {"node": first_beat.node, "roles": ",".join(first_beat.roles), "store": store.url}
        log.info("%s", pairs(phase="started", **values))
        roles = self._roles
        self._beating = Task("heartbeat", first_beat.period, heart.beat, self._fatal)
        roles.local.append(self._beating)
        if roles.periodic:
            from ckptsync.service.head_roles import repeated  # noqa: PLC0415

            self._stack.enter_context(repeated(roles.periodic))
        self._status = ""
        self._adopt([roles.local[-1], *roles.tasks, *roles.periodic])

    def _pause(self, seconds: float) -> None:
        """Wait that many seconds, for another process's next heartbeat; the watchdog sees progress.

        Raises Transient if the service is stopped meanwhile.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._stop.is_stopping:
                raise Transient("the service is stopping")
            progress_signs.sign()
            time.sleep(0.25)

    def _check(self) -> None:
        """Report to systemd; request a stop after a hang (1), a reload or ``until_gone`` (0).

        After a hang it prints all stacks, and reports nothing.  A new configuration with an error
        is logged and not used.  After a jump of the wall clock it makes all periodic tasks due.
        """
        before, self._clock = self._clock, wall_minus_monotonic()
        if jump := clock_jump(before, self._clock):
            log.warning("%s", pairs(phase="clock-jumped", by=f"{jump:+.0f}s"))
            for task in self._roles.periodic:
                task.at(0.0)  # APScheduler counts wall time
        if hung := self._roles.watchdog.check(self._tasks):
            detail = f"no progress for {self._roles.watchdog.limit:.0f} s"
            log.critical("%s", pairs(phase="hung", tasks=",".join(hung), detail=detail))
            faulthandler.dump_traceback()
            self._stop.ask(1)
            return
        self._notifier.send("WATCHDOG=1", f"STATUS={self._status or self._roles.status()}")
        if self._stop.take_reload():
            try:
                check(self._load())
            except CkptsyncError as e:
                log.error("%s", pairs(phase="not-reloaded", error=e, hint=e.hint))  # noqa: TRY400 - the operator's error needs no traceback
            else:
                detail = "stopping: the next start reads the new configuration"
                log.info("%s", pairs(phase="reloading", detail=detail))
                self._stop.ask()
        if self._until_gone.notice_end(self._roles):
            self._stop.ask()

    def _fatal(self, e: BaseException) -> None:
        """Log a bug, and stop the service with exit code 1."""
        log.critical("%s", pairs(phase="failed", error=f"{type(e).__name__}: {e}"), exc_info=e)
        self._stop.ask(1)

    def _end(self) -> None:
        """Wait for running tasks and jobs, then write in the store that this process has stopped.

        Jobs are killed.  Each of the two waits takes `GRACE` at most.  If a task still runs after
        that, this ends the process at once, since a thread cannot be killed.
        """
        self._notifier.send("STOPPING=1", "STATUS=stopping")
        head = self._roles.head
        if head:
            head.jobs.end()
        farewells = (
            [Task("farewell", NEVER, self._heart.farewell, self._fatal)] if self._heart else []
        )
        for tasks in (list(self._tasks), farewells):
            deadline = time.monotonic() + GRACE
            for task in farewells if tasks is farewells else ():
                task.start_if_due(time.monotonic())
            while time.monotonic() < deadline and (
                any(t.is_running for t in tasks) or (head and head.jobs.running())
            ):
                time.sleep(0.02)
        if names := [task.name for task in (*self._tasks, *farewells) if task.is_running]:
            detail = "their unfinished files are discarded"
            log.warning("%s", pairs(phase="abandoned", tasks=",".join(names), detail=detail))
            self._stop.leave()
