"""One order carried out: what is missing is brought, proven on its way, and all of it appears at once; or nothing does, and the next try goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ckptsync.errors import CkptsyncError
from ckptsync.pull.landing import Landing, is_whole
from ckptsync.stores.arrival import Wanted
from ckptsync.stores.bringing import THREADS, bring
from ckptsync.stores.contract import Store
from ckptsync.stores.posix.store import PosixStore

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Pulled:
    """``where`` it lies: the checkpoint, or, if anything ``failed``, what of it could be had.

    ``files`` and ``size`` (bytes) are all of it, ``there`` and ``there_size`` what an earlier pull had brought.  ``failed``: path → why it is not
    given.  ``pointers``: the names of those that were written.
    """

    where: Path
    files: int
    size: int
    there: int
    there_size: int
    failed: dict[str, CkptsyncError]
    pointers: tuple[str, ...] = ()


def foreseen(landing: Landing) -> Pulled:
    """What a pull would do; what lies there is believed by names and sizes.  Raises ConfigError, StoreError."""
    order = landing.order
    have = {f.under: f.size for f in order.files} if landing.is_there() else landing.left()
    return Pulled(landing.final, len(order.files), order.size, len(have), sum(have.values()), {}, tuple(order.pointers))


def carry_out(store: Store, landing: Landing, progress: Progress | None = None, threads: int = THREADS) -> Pulled:
    """Raises ConfigError where something else lies in the way, StoreError; bytes that are wrong or not there are ``failed``."""
    order = landing.order
    told = _Told(order.size, progress)
    if landing.is_there():
        wrong = _checked(landing.final, order.files, told)
        if not wrong:
            return _pulled(landing, order.files, {}, landing.point())
        raise landing.differs(wrong[0])
    failed: dict[str, CkptsyncError] = {}
    with landing.begun() as target:
        landing.check_room()
        missing = _left(landing, target, told)
        bring(store, target, missing, threads, told.add, failed=lambda one, error: failed.setdefault(one.under, error))
        there = tuple(f for f in order.files if f not in missing)
        if failed:
            return _pulled(landing, there, failed, ())
        landing.become()
    return _pulled(landing, there, {}, landing.point())


def _left(landing: Landing, target: PosixStore, told: _Told) -> list[Wanted]:
    """Without those that an earlier try has left, and whose bytes are still right."""
    names = landing.left()
    wrong = _checked(landing.work, [f for f in landing.order.files if f.under in names], told)
    for file in wrong:
        target.delete(file.under)
    return [f for f in landing.order.files if f.under not in names or f in wrong]


def _checked(directory: Path, files: Iterable[Wanted], told: _Told) -> list[Wanted]:
    """Those that are not what they should be."""

    def look(file: Wanted) -> bool:
        good = is_whole(directory, file)
        told.add(file.size if good else 0)
        return good

    listed = list(files)
    with ThreadPoolExecutor(THREADS) as pool:
        return [file for file, good in zip(listed, pool.map(look, listed), strict=True) if not good]


def _pulled(landing: Landing, there: Iterable[Wanted], failed: dict[str, CkptsyncError], pointers: tuple[str, ...]) -> Pulled:
    order, had = landing.order, list(there)
    where = landing.work if failed else landing.final
    return Pulled(where, len(order.files), order.size, len(had), sum(f.size for f in had), failed, pointers)


class _Told:
    """Bytes that are there, for whoever shows progress; any thread adds."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._done, self._total, self._progress = 0, total, progress
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self._done += count
            if self._progress:
                self._progress(min(self._done, self._total), self._total)
