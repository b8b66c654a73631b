"""The order in which the saves of a run were written, although any single evidence may be wrong.

File times, arrivals in a store, and steps in names each tell an order. File times are wrong where a
clock was; saves can arrive in another order than they were written; a training that is started
again counts its steps from 0. So within one training the steps decide, and a new training begins
only where no single wrong clock can explain what is seen (`_Training.is_over`). Pure.
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
    """When a save was written, in seconds of one clock.

    ``written``: the time of its newest file, at most that of its arrival. ``arrived``: when its
    first part was in the store, or seen by a worker. ``is_ahead``: its files are dated later than
    its arrival, so ``written`` is not the time at which anything was written. ``again``: counts
    saves of one name, if that is known.
    """

    checkpoint: str
    written: float
    arrived: float
    is_ahead: bool = False
    again: int = 0


@dataclass(frozen=True, slots=True)
class _Save:
    """A save with its place in the caller's sequence and the step of its name."""

    number: int
    step: int
    dates: SaveDates


@dataclass(slots=True)
class _Training:
    """The saves of one training, in the order in which they arrived.

    ``_top``: of the saves that are not ahead, the one with the greatest step; ``_is_sure``: the
    save before it agrees with it in step, date and arrival. ``_latest``: the latest date.
    """

    saves: list[_Save] = field(default_factory=list)
    _arrivals: list[float] = field(default_factory=list)
    _steps: list[int] = field(default_factory=list)
    _last: _Save | None = None
    _top: _Save | None = None
    _is_sure: bool = False
    _latest: float = 0.0

    def add(self, save: _Save) -> None:
        """Append a save, which arrived after all others, and update what `is_over` compares."""
        self.saves.append(save)
        self._arrivals.append(save.dates.arrived)
        self._steps.append(max(save.step, *self._steps[-1:]) if self._steps else save.step)
        if save.dates.is_ahead:
            return
        if self._top is None or save.step >= self._top.step:
            self._top, self._is_sure = save, self._last is not None and _agree(self._last, save)
        self._last, self._latest = save, max(self._latest, save.dates.written)

    def is_over(self, save: _Save, then: _Save | None) -> bool:
        """Return whether ``save``, which arrived after this training, belongs to a later training.

        It does if its step is not greater than some step of this training, and it was written after
        that one had arrived. Or if its step is not greater than that of ``_top``, its dates are
        later than all of this training, and two saves that agree in step, date and arrival show
        that it is not one date that is wrong: the two before it, or it and ``then``, which arrived
        next. A save that is ahead never begins a training.
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
    """Return the saves of a run, the oldest first; ``dates`` is called once for each.

    Saves whose names have no step, or differ in more than their steps, are ordered by their dates.
    Within one training the steps decide: where they show that a date is too early, the date of the
    save before it counts.
    """
    all_saves = list(saves)
    all_dates = [dates(save) for save in all_saves]
    keys: dict[int, tuple[float, str, float]] = {
        index: (save_dates.written, save_dates.checkpoint, save_dates.arrived)
        for index, save_dates in enumerate(all_dates)
    }
    for name, trainings in _series(all_dates):
        latest = -inf
        for index, training_save in enumerate(chain.from_iterable(trainings)):
            latest = max(latest, training_save.dates.written)
            keys[training_save.number] = (latest, name, index)
    return tuple(all_saves[number] for number in sorted(keys, key=keys.__getitem__))


def contradictions(
    saves: Iterable[T], dates: Callable[[T], SaveDates], tolerance: float
) -> Iterator[tuple[T, T, float]]:
    """Yield each save whose date contradicts its step, with a save that shows it, and the seconds.

    The seconds are negative if its date is too early (the other save has a smaller step and a later
    date), positive if it is too late. As few saves as possible are yielded, each at most twice;
    those that are ``is_ahead`` or have no step are left out. Differences up to ``tolerance``
    seconds are ignored.
    """
    all_saves = list(saves)
    for _, trainings in _series([dates(each) for each in all_saves]):
        for training in trainings:
            dated = [save for save in training if not save.dates.is_ahead]
            in_order = _most_in_order(dated)
            for index, save in enumerate(dated):
                if index in in_order:
                    continue
                before = max((n for n in in_order if n < index), default=None)
                after = min((n for n in in_order if n > index), default=None)
                for neighbour, sign in ((before, 1), (after, -1)):
                    if neighbour is not None:
                        seconds = save.dates.written - dated[neighbour].dates.written
                        if seconds * sign < -tolerance:
                            yield (
                                all_saves[save.number],
                                all_saves[dated[neighbour].number],
                                seconds,
                            )


def _most_in_order(saves: Sequence[_Save]) -> set[int]:
    """Return the indexes of a longest subsequence whose dates do not fall; ``saves`` are by step.

    Of two saves that contradict each other, the smaller step's stays.
    """
    ends: list[float] = []  # from the end on: of sequences by length, the best first date, negated
    places: list[int] = []
    follows: dict[int, int] = {}
    for place in reversed(range(len(saves))):
        date = -saves[place].dates.written
        length = bisect_right(ends, date)
        ends[length : length + 1] = [date]
        places[length : length + 1] = [place]
        follows[place] = places[length - 1] if length else -1
    in_order: set[int] = set()
    place = places[-1] if places else -1
    while place >= 0:
        in_order.add(place)
        place = follows[place]
    return in_order


def _series(all_dates: Sequence[SaveDates]) -> Iterator[tuple[str, list[list[_Save]]]]:
    """Yield each series of names with its trainings, the oldest first; each is sorted by step.

    Names without a step are left out. Saves are given to trainings by arrival
    (`_Training.is_over`).
    """
    series: dict[str, list[_Save]] = {}
    for number, dates in enumerate(all_dates):
        name, step = series_and_step(dates.checkpoint)
        if step is not None:
            series.setdefault(name, []).append(_Save(number, step, dates))
    for name, saves in series.items():
        saves.sort(key=lambda s: (s.dates.arrived, s.step, s.dates.again, s.dates.written))
        trainings = [_Training()]
        for index, save in enumerate(saves):
            if trainings[-1].is_over(save, next(iter(saves[index + 1 : index + 2]), None)):
                trainings.append(_Training())
            trainings[-1].add(save)
        yield name, [sorted(training.saves, key=_age) for training in trainings]


def _agree(first: _Save, second: _Save) -> bool:
    """Return whether two saves, neither ahead, have rising steps and dates in this order."""
    is_known = not (first.dates.is_ahead or second.dates.is_ahead)
    is_later = first.dates.written < second.dates.written
    return is_known and is_later and first.step < second.step


def _age(save: _Save) -> tuple[int, int, float, float]:
    """Return a key that sorts the saves of one training by step, then by date."""
    return save.step, save.dates.again, save.dates.written, save.dates.arrived
