"""Which store an output directory was served to: one that has gone (its file system is not mounted) is waited for, not made again."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ckptsync.config.reach import limits
from ckptsync.config.runs import output_directories
from ckptsync.config.values import Config
from ckptsync.errors import StoreError
from ckptsync.stores.contract import Store
from ckptsync.stores.opening import create_store, is_store
from ckptsync.stores.urls import path_of
from ckptsync.walk import OURS

MARK = "store"


class Absent(StoreError):
    """No store where one should be: it will come, once it is mounted or made."""


def opened(config: Config) -> Store:
    """The store; the first worker makes it.  Raises Absent if it is not there and was before, or if no worker works here."""
    url = config.store.url
    if not _is_there(url):
        if "worker" not in config.roles:
            raise Absent(f"{url}: not a store", hint="is the file system mounted?  A store is made by the first worker or push")
        for run in output_directories(config.worker.runs, url).runs:
            if remembers(Path(run.path) / OURS, url):
                raise Absent(
                    f"{url}: was a store when {run.path} was last served, and is none now",
                    hint=f"is the file system mounted?  If that store was given up, delete {run.path}/{OURS}/{MARK}",
                )
    return create_store(url, config.store.options, limits(config.limits))


def remember(spool: Path, url: str) -> None:
    """Say in a spool directory which store it is served to; raises StoreError."""
    if remembers(spool, url):
        return
    fresh = spool / f".{MARK}"
    try:
        fresh.write_text(path_of(url) + "\n")
        fresh.replace(spool / MARK)
    except OSError as e:
        raise StoreError(f"{spool}: {e.strerror}", hint="the worker must run as the user who trains") from e


def remembers(spool: Path, url: str) -> bool:
    """Whether it was served to this very store last.  What cannot be read says nothing."""
    with contextlib.suppress(OSError, ValueError):
        return (spool / MARK).read_text() == path_of(url) + "\n"
    return False


def _is_there(url: str) -> bool:
    try:
        return is_store(url)
    except OSError as e:
        raise StoreError(f"{url}: {e.strerror}", hint="is the file system mounted, and may this user read it?") from e
