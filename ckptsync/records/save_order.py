"""The order in which the saves of a run were written, where any one of the evidences may be wrong.

File times, arrivals in a store, and steps in names each tell an order.  File times are wrong where
a clock was; saves can arrive in another order than they were written; a training that is started
again counts its steps from 0.  So within one training the steps decide, and what tells two
trainings apart is what no single wrong clock can feign (`_Training.is_over`).  Pure.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import inf
from typing import TypeVar

from ckptsync.checkpoint_dirs import series_and_step

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SaveDates:
    """What tells when a save was written, in seconds of one clock.

    ``written``: the time of its newest file, at most that of its arrival.  ``arrived``: when the
    first of it was in the store, or seen by a worker.  ``is_ahead``: its files are dated later than
    that, so that ``written`` is no time at which anything was written.  ``again``: counts saves of
    one name where that is known.
    """

    checkpoint: str
    written: float
    arrived: float
    is_ahead: bool = False
    again: int = 0


@dataclass(frozen=True, slots=True)
class _Save:
    number: int
    step: int
    dates: SaveDates


@dataclass(slots=True)
class _Training:
    """The saves of one training, in the order in which they arrived.

    ``top``: of those whose dates may be right, the one with the greatest step; ``is_sure``: the one
    before it agrees with it in step, date and arrival.  ``latest``: the latest date.
    """

    saves: list[_Save] = field(default_factory=list)
    _arrivals: list[float] = field(default_factory=list)
    _steps: list[int] = field(default_factory=list)
    _last: _Save | None = None
    _top: _Save | None = None
    _is_sure: bool = False
    _latest: float = 0.0

    def add(self, save: _Save) -> None:
        self.saves.append(save)
        self._arrivals.append(save.dates.arrived)
        self._steps.append(max(save.step, *self._steps[-1:]) if self._steps else save.step)
        if save.dates.is_ahead:
            return
        if self._top is None or save.step >= self._top.step:
            self._top, self._is_sure = save, self._last is not None and _agree(self._last, save)
        self._last, self._latest = save, max(self._latest, save.dates.written)

    def is_over(self, save: _Save, then: _Save | None) -> bool:
        """Return whether ``save``, which arrived after all of it, is of a training begun later.

        It has no greater step than some of this training, and it was written after that had
        arrived; or its dates are later than all here, and two saves that agree in step, date and
        arrival show that it is not one date that is wrong: the two before it, or it and ``then``,
        which arrived next.
        """
        dates, top = save.dates, self._top
        if dates.is_ahead or not self.saves:
            return False
        before = bisect_left(self._arrivals, dates.written)
        if before and self._steps[before - 1] >= save.step:
            return True
        if top is None or top.step < save.step or dates.written <= self._latest:
            return False
        is_growing = then is not None and then.step <= top.step and _agree(save, then)
        return self._is_sure or is_growing


def oldest_first(saves: Iterable[T], dates: Callable[[T], SaveDates]) -> tuple[T, ...]:
    """Return the saves of a run, the newest last.

    Saves whose names have no step, or differ in more than their steps, are ordered by their dates;
    where steps show that a date is too early, by that of the save before it.
    """
    every = list(saves)
    all_dates = [dates(one) for one in every]
    keys: dict[int, tuple[float, str, float]] = {
        at: (its.written, its.checkpoint, its.arrived) for at, its in enumerate(all_dates)
    }
    for name, trainings in _series(all_dates):
        latest = -inf
        for at, save in enumerate(chain.from_iterable(trainings)):
            latest = max(latest, save.dates.written)
            keys[save.number] = (latest, name, at)
    return tuple(every[number] for number in sorted(keys, key=keys.__getitem__))


def contradictions(
    saves: Iterable[T], dates: Callable[[T], SaveDates], tolerance: float
) -> Iterator[tuple[T, T, float]]:
    """Yield saves whose dates contradict their steps: the save, another one, and the seconds.

    Negative where its date is too early: the other one has a smaller step, and was not written
    later.  As few as possible are yielded.  Saves that are ``is_ahead`` are left out.
    """
    every = list(saves)
    for _, trainings in _series([dates(one) for one in every]):
        for training in trainings:
            its = [save for save in training if not save.dates.is_ahead]
            right = _most_in_order(its)
            for at, save in enumerate(its):
                if at in right:
                    continue
                before = max((n for n in right if n < at), default=None)
                after = min((n for n in right if n > at), default=None)
                for other, sign in ((before, 1), (after, -1)):
                    if other is not None:
                        apart = save.dates.written - its[other].dates.written
                        if apart * sign < -tolerance:
                            yield every[save.number], every[its[other].number], apart


def _most_in_order(saves: Sequence[_Save]) -> set[int]:
    """Return most places whose dates do not fall: of two that contradict, the smaller step's."""
    ends: list[float] = []  # from the end on: of sequences by length, the best first date, negated
    places: list[int] = []
    follows: dict[int, int] = {}
    for place in reversed(range(len(saves))):
        date = -saves[place].dates.written
        length = bisect_right(ends, date)
        ends[length : length + 1] = [date]
        places[length : length + 1] = [place]
        follows[place] = places[length - 1] if length else -1
    found: set[int] = set()
    place = places[-1] if places else -1
    while place >= 0:
        found.add(place)
        place = follows[place]
    return found


def _series(known: Sequence[SaveDates]) -> Iterator[tuple[str, list[list[_Save]]]]:
    """Yield each series of names, and its trainings: the oldest training, and its step 0, first."""
    series: dict[str, list[_Save]] = {}
    for number, dates in enumerate(known):
        name, step = series_and_step(dates.checkpoint)
        if step is not None:
            series.setdefault(name, []).append(_Save(number, step, dates))
    for name, saves in series.items():
        saves.sort(key=lambda s: (s.dates.arrived, s.step, s.dates.again, s.dates.written))
        trainings = [_Training()]
        for at, save in enumerate(saves):
            if trainings[-1].is_over(save, next(iter(saves[at + 1 : at + 2]), None)):
                trainings.append(_Training())
            trainings[-1].add(save)
        yield name, [sorted(training.saves, key=_age) for training in trainings]


def _agree(first: _Save, second: _Save) -> bool:
    """Return whether two that arrived in this order are also by step and date in this order."""
    is_known = not (first.dates.is_ahead or second.dates.is_ahead)
    is_later = first.dates.written < second.dates.written
    return is_known and is_later and first.step < second.step


def _age(save: _Save) -> tuple[int, int, float, float]:
    return save.step, save.dates.again, save.dates.written, save.dates.arrived
