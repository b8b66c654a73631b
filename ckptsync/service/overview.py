"""One look at a whole store, for whoever shows it: what has not changed since the last one is not read again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ckptsync.catalogue.summary import Catalogue
from ckptsync.config.schema import Config
from ckptsync.fleet.alarms import Patience, Room
from ckptsync.fleet.nodes import Told, told
from ckptsync.fleet.overview import Overview, Seen, overview
from ckptsync.spool.marks import boot
from ckptsync.stores.contract import Store
from ckptsync.stores.urls import Remote, located

AT_ONCE = 8  # requests


def patience(config: Config) -> Patience:
    """As a configuration has it."""
    return Patience(node=config.head.patience_node, period=config.verify.period)


class Overseer:
    """``catalogue`` gives the store's, and may remember what it likes."""

    def __init__(self, store: Store, catalogue: Callable[[], Catalogue], patience: Patience) -> None:
        self._store, self._catalogue, self._patience = store, catalogue, patience
        self._told = Told()

    def look(self) -> Overview:
        """Now; raises StoreError."""
        found = self._catalogue()
        with ThreadPoolExecutor(AT_ONCE, "nodes") as pool:
            self._told = told(self._store, self._told, pool.map)
        now = self._told.now(boot(), time.time()) if self._told.hearts else max(time.time(), found.clock)
        return overview(Seen(self._store.url, found, self._told, now, room(self._store.url)), self._patience)


def room(url: str) -> Room | None:
    """How full a store is; ``None`` where it is no path of this machine, or does not answer."""
    location = located(url)
    if isinstance(location, Remote):
        return None
    try:
        there = os.statvfs(location)
    except OSError:
        return None  # whoever reads the store next says what is wrong with it
    return Room(there.f_bavail * there.f_frsize, there.f_blocks * there.f_frsize)
