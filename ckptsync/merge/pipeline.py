"""Threads: items made in parallel, looked at in order, and given out in order, with a bounded number of bytes in between.

The only module of the merge that knows of threads.  What comes out is the same for every number of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")

BUDGET = 12 << 20  # bytes in flight for each thread


class Abandoned(Exception):
    """A task has given up because of another one's error, which is the one that is raised."""


@dataclass(frozen=True, slots=True)
class Steps(Generic[T, R]):
    """What is done with an item.

    ``make`` something of it (several at once), look at that in each of ``lanes`` (in order, one at a time), and ``release`` it when the
    caller and the lanes are done with it.  ``weigh`` says how many bytes it is.
    """

    make: Callable[[T], R]
    lanes: Sequence[Callable[[R], None]]
    release: Callable[[R], None]
    weigh: Callable[[T], int]


def pipelined(items: Iterator[T], steps: Steps[T, R], jobs: int, budget: int = BUDGET) -> Generator[R, None, None]:
    """What is made of every item, in order.

    With one job everything happens in the caller's thread, and an item is made when it is asked for.  With more, so many threads work
    beside the caller.  What is in flight weighs ``jobs`` times ``budget`` bytes, or is a single item.  The end comes after the last lane.  An
    error of any step is raised here, as it is, once; whatever ends the generator, no thread is left behind.
    """
    line = _Line(items, steps, jobs * budget)
    threads = [threading.Thread(target=line.work, name=f"ckptsync-merge-{n}") for n in range(jobs if jobs > 1 else 0)]
    try:
        for thread in threads:
            thread.start()
        yield from line.results(helps=not threads)
    finally:
        line.stop()
        for thread in threads:
            if thread.ident is not None:
                thread.join()


def side_by_side(tasks: Sequence[Callable[[Callable[[], bool]], R]], most: int) -> list[R]:
    """The result of every task, in order, of which at most ``most`` run at once, each in a thread (none if one is to run at a time).

    A task is given a function that says whether to give up, because another one failed or this thread was interrupted: it then raises
    `Abandoned`, or anything.  The first error is raised, when all have ended.
    """
    if most < 2 or len(tasks) < 2:
        return [task(lambda: False) for task in tasks]
    crew = _Crew(tasks)
    threads = [threading.Thread(target=crew.work, name=f"ckptsync-file-{n}") for n in range(min(most, len(tasks)))]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        crew.stop()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    return crew.results()


def one_at_a_time() -> AbstractContextManager[object]:
    """For a thing that several threads use, and that is not made for it."""
    return threading.Lock()


@dataclass(slots=True)
class _Slot(Generic[R]):
    """An item in flight: ``waits_for`` the lanes and the caller, once it is made."""

    weight: int
    waits_for: int
    made: list[R]


class _Line(Generic[T, R]):
    """The state of one pipeline.  Everything but the work itself happens under the lock."""

    def __init__(self, items: Iterator[T], steps: Steps[T, R], budget: int) -> None:
        self._items, self._steps, self._budget = items, steps, budget
        self._changed = threading.Condition()
        self._slots: dict[int, _Slot[R]] = {}
        self._next: T | None = None
        self._begun = self._held = 0
        self._is_drained = self._is_stopped = False
        self._at = [0] * len(steps.lanes)
        self._is_busy = [False] * len(steps.lanes)
        self._error: BaseException | None = None

    def work(self) -> None:
        """What a thread does."""
        try:
            while (task := self._wait_for_task()) is not None:
                task()
        except BaseException as e:  # noqa: BLE001  whatever it is, it is raised in the caller's thread
            with self._changed:
                self._error = self._error or e
                self._is_stopped = True
                self._changed.notify_all()

    def results(self, *, helps: bool) -> Iterator[R]:
        """In the caller's thread."""
        number = 0
        while (slot := self._wait_for(number, helps=helps)) is not None:
            yield slot.made[0]
            self._done_with(number)
            number += 1

    def stop(self) -> None:
        """Threads end after what they are doing."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def _wait_for(self, number: int, *, helps: bool) -> _Slot[R] | None:
        """The made item of this number; None after the last, when no lane has anything left to do."""
        while True:
            with self._changed:
                if self._error:
                    raise self._error
                if (slot := self._slots.get(number)) and slot.made:
                    return slot
                task = self._take() if helps else None  # which may also find that there is nothing left
                if self._is_over():
                    return None
                if task is None:
                    self._changed.wait()
            if task is not None:
                task()

    def _wait_for_task(self) -> Callable[[], None] | None:
        with self._changed:
            while not self._is_stopped:
                task = self._take()
                if task is not None:
                    return task
                if self._is_over():
                    self._changed.notify_all()
                    return None
                self._changed.wait()
        return None

    def _is_over(self) -> bool:
        return self._is_drained and not self._slots

    def _take(self) -> Callable[[], None] | None:
        """What to do next: what lets something go, else something new."""
        for lane, number in enumerate(self._at):
            if not self._is_busy[lane] and (slot := self._slots.get(number)) and slot.made:
                self._is_busy[lane] = True
                return lambda lane=lane, number=number, made=slot.made[0]: self._run(lane, number, made)  # type: ignore[misc]
        return self._take_new()

    def _take_new(self) -> Callable[[], None] | None:
        if self._next is None and not self._is_drained:
            self._next = next(self._items, None)
            self._is_drained = self._next is None
        if (item := self._next) is None:
            return None
        weight = self._steps.weigh(item)
        if self._held and self._held + weight > self._budget:
            return None
        number, self._next = self._begun, None
        self._slots[number] = _Slot(weight, len(self._steps.lanes) + 1, [])
        self._begun += 1
        self._held += weight
        return lambda: self._produce(number, item)

    def _produce(self, number: int, item: T) -> None:
        made = self._steps.make(item)
        with self._changed:
            self._slots[number].made.append(made)
            self._changed.notify_all()

    def _run(self, lane: int, number: int, made: R) -> None:
        self._steps.lanes[lane](made)
        with self._changed:
            self._at[lane] += 1
            self._is_busy[lane] = False
        self._done_with(number)

    def _done_with(self, number: int) -> None:
        with self._changed:
            slot = self._slots[number]
            slot.waits_for -= 1
            if not slot.waits_for:
                self._steps.release(slot.made[0])
                del self._slots[number]
                self._held -= slot.weight
            self._changed.notify_all()


class _Crew(Generic[R]):
    """Tasks, taken in order by whoever is free."""

    def __init__(self, tasks: Sequence[Callable[[Callable[[], bool]], R]]) -> None:
        self._tasks, self._lock = tasks, threading.Lock()
        self._begun = 0
        self._results: dict[int, R] = {}
        self._error: BaseException | None = None
        self._is_stopped = False

    def work(self) -> None:
        try:
            while (number := self._take()) is not None:
                self._results[number] = self._tasks[number](lambda: self._is_stopped)
        except BaseException as e:  # noqa: BLE001  whatever it is, it is raised in the thread that asked for it
            with self._lock:
                self._error = self._error or e
                self._is_stopped = True

    def stop(self) -> None:
        self._is_stopped = True

    def results(self) -> list[R]:
        if self._error:
            raise self._error
        return [self._results[n] for n in range(len(self._tasks))]

    def _take(self) -> int | None:
        with self._lock:
            if self._is_stopped or self._begun == len(self._tasks):
                return None
            self._begun += 1
            return self._begun - 1
