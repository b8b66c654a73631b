"""How full the file systems of the output directories are, and what of it only our pins still hold; and how full a store that is a path."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from ckptsync.daemon.surveying import shown
from ckptsync.fleet.alarms import Room
from ckptsync.fleet.heartbeat import Disk
from ckptsync.stores.urls import Remote, located
from ckptsync.walk import OURS


def disks(paths: Iterable[str], budget: int) -> tuple[Disk, ...]:
    """One for each output directory that can be asked."""
    return tuple(found for path in paths for found in _disk(path, budget))


def room(url: str) -> Room | None:
    """Of a store; ``None`` where it is no path of this machine, or does not answer."""
    place = located(url)
    if isinstance(place, Remote):
        return None
    try:
        there = os.statvfs(place)
    except OSError:
        return None  # whoever reads the store next says what is wrong with it
    return Room(there.f_bavail * there.f_frsize, there.f_blocks * there.f_frsize)


def _disk(path: str, budget: int) -> Iterator[Disk]:
    try:
        there = os.statvfs(path)
    except OSError:
        return  # the look says what is wrong with it
    yield Disk(
        shown(path), there.f_bavail * there.f_frsize, there.f_blocks * there.f_frsize, _alone(Path(path) / OURS / "pins"), budget
    )


def _alone(pins: Path) -> int:
    """Bytes on the disk of files that have no name but ours: the trainer has removed them, or they are copies."""
    total = 0
    for folder, _, names in os.walk(pins):
        for name in names:
            try:
                found = os.lstat(f"{folder}/{name}")
            except OSError:
                continue
            total += found.st_blocks * 512 if found.st_nlink == 1 else 0
    return total
