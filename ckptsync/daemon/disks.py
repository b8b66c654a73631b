"""How full the file systems of the output directories are, and what of it only our pins still hold; and how full a store that is a path."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from ckptsync.daemon.surveying import shown
from ckptsync.fleet.alarms import Room
from ckptsync.fleet.heartbeat import Disk
from ckptsync.stores.urls import Remote, located


def disks(held: Iterable[tuple[str, int]], budget: int) -> tuple[Disk, ...]:
    """One for each output directory that can be asked, with the bytes that only our pins hold there."""
    return tuple(found for path, spool in held for found in _disk(path, spool, budget))


def room(url: str) -> Room | None:
    """Of a store; ``None`` where it is no path of this machine, or does not answer."""
    location = located(url)
    if isinstance(location, Remote):
        return None
    try:
        there = os.statvfs(location)
    except OSError:
        return None  # whoever reads the store next says what is wrong with it
    return Room(there.f_bavail * there.f_frsize, there.f_blocks * there.f_frsize)


def _disk(path: str, spool: int, budget: int) -> Iterator[Disk]:
    try:
        there = os.statvfs(path)
    except OSError:
        return  # the look says what is wrong with it
    yield Disk(shown(path), there.f_bavail * there.f_frsize, there.f_blocks * there.f_frsize, spool, budget)
