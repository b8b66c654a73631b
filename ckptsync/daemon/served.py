"""Which store an output directory was served to: one that has gone (its file system is not mounted) is waited for, not made again.

So is one that cannot be reached: it is asked again every few seconds by whoever calls, and no longer here.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

from ckptsync.config.reach import limits, options_for
from ckptsync.config.runs import output_directories
from ckptsync.config.values import Config
from ckptsync.errors import StoreError
from ckptsync.stores.contract import Store
from ckptsync.stores.opening import create_store, is_store
from ckptsync.stores.urls import Remote, located
from ckptsync.walk import OURS

MARK = "store"


class Absent(StoreError):
    """No store where one should be: it will come, once it is mounted or made."""


def opened(config: Config) -> Store:
    """The store; the first worker makes it.

    Raises Absent if it is not there and was before, or if no worker works here; Transient, after one try, if it cannot be reached.
    """
    url = config.store.url
    if not _is_there(config):
        if "worker" not in config.roles:
            raise Absent(f"{url}: not a store", hint=f"{_where(url)}  A store is made by the first worker or push")
        for run in output_directories(config.worker.runs, url).runs:
            if remembers(Path(run.path) / OURS, url):
                raise Absent(
                    f"{url}: was a store when {run.path} was last served, and is none now",
                    hint=f"{_where(url)}  If that store was given up, delete {run.path}/{OURS}/{MARK}",
                )
    return create_store(url, options_for(url, config.store.options), limits(config.limits))


def remember(spool: Path, url: str) -> None:
    """Say in a spool directory which store it is served to; raises StoreError."""
    if remembers(spool, url):
        return
    fresh = spool / f".{MARK}"
    try:
        fresh.write_text(_written(url))
        fresh.replace(spool / MARK)
    except OSError as e:
        raise StoreError(f"{spool}: {e.strerror}", hint="the worker must run as the user who trains") from e


def remembers(spool: Path, url: str) -> bool:
    """Whether it was served to this very store last.  What cannot be read says nothing."""
    with contextlib.suppress(OSError, ValueError):
        return (spool / MARK).read_text() == _written(url)
    return False


def _written(url: str) -> str:
    """The place, however its URL is spelt."""
    place = located(url)
    return f"{place.url if isinstance(place, Remote) else place}\n"


def _where(url: str) -> str:
    return "is the URL right?" if isinstance(located(url), Remote) else "is the file system mounted?"


def _is_there(config: Config) -> bool:
    url = config.store.url
    try:
        return is_store(url, options_for(url, config.store.options), replace(limits(config.limits), patience=0.0))
    except OSError as e:
        raise StoreError(f"{url}: {e.strerror}", hint="is the file system mounted, and may this user read it?") from e
