"""All tasks of a process together: for its heartbeat, its metrics and the main loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ckptsync.service.tasks import HUNG, Outcome, Task, Watchdog
from ckptsync.spool.markers import began
from ckptsync.status.heartbeat import Disk

if TYPE_CHECKING:
    from ckptsync.service.head_and_verifier import HeadRoles
    from ckptsync.service.worker import WorkerRole

FINISHES_WITHIN = 900.0  # seconds that what waits may wait unchanged, once the trainer is gone


class Roles:
    """Tasks, in the order of their beginning: ``local`` ones at once, the others with the store.

    ``periodic`` ones are those that APScheduler repeats.
    """

    def __init__(self, local: Iterable[Task] = (), tasks: Iterable[Task] = ()) -> None:
        self.local, self.tasks = list(local), list(tasks)
        self.periodic: list[Task] = []
        self.worker: WorkerRole | None = None
        self.head: HeadRoles | None = None
        self.verifies = 0.0
        """Seconds between verifications, for heartbeats; 0: this process verifies nothing."""
        self.spool_budget = 0
        self.disks: tuple[Disk, ...] = ()
        """Of the last heartbeat."""
        self.watchdog = Watchdog(HUNG)
        self.sent_bytes: Callable[[], int] = lambda: 0

    @property
    def all(self) -> tuple[Task, ...]:
        """All tasks."""
        return (*self.local, *self.tasks, *self.periodic)

    def outcome(self) -> Outcome:
        """Return what the last runs of all tasks have seen and done, as one."""
        tasks = self.all
        seen = [task.outcome for task in tasks]
        return Outcome(
            queue=tuple(dict.fromkeys(item for o in seen for item in o.queue)),
            errors=tuple(dict.fromkeys(error for task in tasks for error in task.errors())),
            notes=tuple(dict.fromkeys(note for o in seen for note in o.notes)),
            oldest=min((o.oldest for o in seen if o.oldest is not None), default=None),
            watch={path: mode for o in seen for path, mode in o.watch.items()},
            lacks={record: names for o in seen for record, names in o.lacks.items()},
        )

    def status(self) -> str:
        """Return the present state, on one line."""
        states = [
            f"{task.name} {'at work' if task.is_running else 'waits'}"
            for task in (*self.tasks, *self.periodic)
        ]
        jobs = self.head.jobs.running() if self.head else ()
        states += [f"{job.kind} {job.subject}" for job in jobs]
        now = self.outcome()
        return "; ".join([*states, f"{len(now.queue)} to upload", f"{len(now.errors)} errors"])


class UntilGone:
    """`ckptsync run --until-gone PID`: stop once PID has ended and every checkpoint is stored.

    What never finishes is waited for no longer than `FINISHES_WITHIN`.  Without a process it never
    ends by itself.
    """

    def __init__(self, pid: int | None) -> None:
        self._pid, self._began = pid, began(pid) if pid is not None else ""
        self._runs: dict[str, int] | None = None
        self._left: object = None
        self._since = 0.0

    def is_due(self, roles: Roles) -> bool:
        """Return whether the service is to end now.

        Every task must have begun and ended a run after the process: the last checkpoint may be
        younger than the last scan.
        """
        if self._pid is None or began(self._pid) == self._began != "":
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
