"""When the head's and the verifier's ticks run: APScheduler, one thread a tick, never two of one at a time, none dropped for being late.

It counts wall time.  Whoever sees that clock jump calls what `scheduled` gives: set back by an hour, no tick would run for an hour.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING

from ckptsync.daemon.tick import Soon, Tick

if TYPE_CHECKING:
    from apscheduler.schedulers.background import BackgroundScheduler

DEFAULTS = {"misfire_grace_time": None, "coalesce": True, "max_instances": 1}


@contextmanager
def scheduled(ticks: Iterable[Tick]) -> Iterator[Callable[[], None]]:
    """Every tick runs at once and then every ``tick.every`` seconds, until the block ends; running ones are not waited for.

    Gives what runs every tick now, and counts its period from now.
    """
    ticks = tuple(ticks)
    scheduler = _scheduler(ticks) if ticks else None

    def again() -> None:
        for tick in ticks:
            tick.soon(0)

    try:
        yield again
    finally:
        for tick in ticks:
            tick.soon = lambda _: None
        if scheduler:
            scheduler.shutdown(wait=False)


def _scheduler(ticks: tuple[Tick, ...]) -> BackgroundScheduler:
    from apscheduler.executors.pool import ThreadPoolExecutor  # noqa: PLC0415 - a worker alone does without, and without its memory
    from apscheduler.schedulers.background import BackgroundScheduler  # noqa: PLC0415

    scheduler = BackgroundScheduler(
        executors={"default": ThreadPoolExecutor(len(ticks))}, job_defaults=DEFAULTS, timezone=timezone.utc, daemon=True
    )
    for tick in ticks:
        scheduler.add_job(tick, "interval", seconds=tick.every, id=tick.name, next_run_time=_in(0))
        tick.soon = _soon(scheduler, tick.name)
    scheduler.start()
    return scheduler


def _soon(scheduler: BackgroundScheduler, name: str) -> Soon:
    def soon(seconds: float, /) -> None:
        scheduler.modify_job(name, next_run_time=_in(seconds))

    return soon


def _in(seconds: float) -> datetime:
    return datetime.now(timezone.utc) + timedelta(seconds=seconds)
