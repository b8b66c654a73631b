"""Errands of one role, in child processes: so many at once, each tried again when it is time, and what became of them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ckptsync.config.schema import Config
from ckptsync.daemon import waits
from ckptsync.daemon.children import Bounds, Children
from ckptsync.daemon.orders import Done, End, Failed, Order
from ckptsync.daemon.phases import Line, pairs
from ckptsync.daemon.waits import Wait

MORE_STALL = 60.0  # seconds beyond limits.stall: a wait before the next try is no hang
BASE, FLOOR = 900.0, 1_000_000  # seconds of an errand of no bytes, and bytes a second beyond which nothing is called slow


@dataclass(frozen=True, slots=True)
class Task:
    """An order, and what changes when it may come to another end; ``lasts`` as in `waits.after`."""

    order: Order
    key: str
    lasts: bool = False


class Errands:
    """``hint`` is called when one has ended: there may be more to do."""

    def __init__(self, children: Children, config: Config, most: int) -> None:
        self._children, self._config, self._most = children, config, most
        self._lock = threading.Lock()
        self._begun: dict[Order, Task] = {}
        self._waits: dict[str, Wait] = {}
        self._said: dict[str, tuple[str, ...]] = {}
        self.hint: Callable[[], None] = lambda: None

    def begin(self, tasks: Iterable[Task]) -> tuple[str, ...]:
        """Begin as many as there is room for, in their order; the subjects of all that are due, those that are being done among them."""
        tasks = tuple(tasks)
        now = time.monotonic()
        with self._lock:
            self._forget({task.order.subject for task in tasks})
            due = [t for t in tasks if waits.may_begin(self._waits.get(t.order.subject), t.key, now)]
            at_work = {order.subject for order in self._begun}
            fresh = [t for t in due if t.order.subject not in at_work][: max(0, self._most - len(at_work))]
            self._begun |= {t.order: t for t in fresh}
        for task in fresh:
            if not self._children.begin(task.order, bounds(self._config, task.order), self._ended):
                with self._lock:
                    del self._begun[task.order]
        return tuple(dict.fromkeys((*sorted(at_work), *(t.order.subject for t in due))))

    def errors(self) -> tuple[str, ...]:
        """Of those that failed and are not due again, what they failed with; what those that were done found."""
        with self._lock:
            failed = [f"{subject}: {wait.failed}" for subject, wait in self._waits.items() if wait.failed]
            return (*failed, *(error for errors in self._said.values() for error in errors))

    def lines(self) -> tuple[Line, ...]:
        """The failures, for the log: each once for as long as it stays the same."""
        with self._lock:
            return tuple(
                Line(f"failed {subject}", pairs(phase="failed", subject=subject, error=w.failed, hint=w.failed.hint), is_error=True)
                for subject, w in self._waits.items()
                if w.failed
            )

    def _forget(self, subjects: set[str]) -> None:
        """What is no errand any more is well."""
        self._waits = {subject: wait for subject, wait in self._waits.items() if subject in subjects}

    def _ended(self, order: Order, end: End) -> None:
        """In the child's own thread."""
        now = time.monotonic()
        with self._lock:
            task = self._begun.pop(order)
            before = self._waits.pop(order.subject, None)
            wait = waits.after(before, task.key, end, now, lasts=task.lasts)
            if wait:
                self._waits[order.subject] = wait
            self._said.pop(order.subject, None)
            if isinstance(end, Done) and end.errors:
                self._said[order.subject] = end.errors
        _log(order, end)
        self.hint()


def bounds(config: Config, order: Order) -> Bounds:
    """Far more than it needs: only what hangs, or never ends, meets them."""
    table = config.limits.bandwidth
    slowest = min((rate for rate in table.rates if rate), default=FLOOR) / config.head.jobs if table else FLOOR
    return Bounds(config.limits.stall + MORE_STALL, BASE + 4 * order.size / min(FLOOR, slowest))


def _log(order: Order, end: End) -> None:
    """What was done, at once; failures are told by `Errands.lines`, where they are new."""
    if isinstance(end, Failed):
        return
    logger = logging.getLogger("ckptsync.verifier" if order.kind == "verify" else "ckptsync.head")
    for line in end.lines:
        logger.log(logging.ERROR if line.is_error else logging.INFO, "%s", line.text)
