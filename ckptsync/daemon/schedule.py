"""When ticks run: APScheduler, one thread a tick, never two of one at a time, none dropped for being late."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone

from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.schedulers.background import BackgroundScheduler

from ckptsync.daemon.tick import Tick

DEBOUNCE = 0.5  # seconds that a hint waits for others: a trainer writes many files at once
DEFAULTS = {"misfire_grace_time": None, "coalesce": True, "max_instances": 1}


@contextmanager
def scheduled(ticks: Iterable[Tick]) -> Iterator[None]:
    """Every tick runs at once and then every ``tick.every`` seconds, until the block ends; running ones are not waited for."""
    ticks = tuple(ticks)
    scheduler = BackgroundScheduler(
        executors={"default": ThreadPoolExecutor(len(ticks))}, job_defaults=DEFAULTS, timezone=timezone.utc, daemon=True
    )
    for tick in ticks:
        scheduler.add_job(tick, "interval", seconds=tick.every, id=tick.name, next_run_time=_in(0))
        tick.soon = _Soon(scheduler, tick.name)
    scheduler.start()
    try:
        yield
    finally:
        for tick in ticks:
            tick.soon = lambda: None
        scheduler.shutdown(wait=False)


class _Soon:
    def __init__(self, scheduler: BackgroundScheduler, name: str) -> None:
        self._scheduler, self._name = scheduler, name

    def __call__(self) -> None:
        self._scheduler.modify_job(self._name, next_run_time=_in(DEBOUNCE))


def _in(seconds: float) -> datetime:
    return datetime.now(timezone.utc) + timedelta(seconds=seconds)
