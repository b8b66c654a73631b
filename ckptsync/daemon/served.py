"""Which store an output directory was served to: one that has gone (its file system is not mounted) is waited for, not made again.

So is one that cannot be reached, or that refuses this machine now and let it in before (its key was changed, and comes here a little later): it is
asked again every few seconds by whoever calls, and no longer here.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

from ckptsync.config.loading import limits_of, options_for
from ckptsync.config.runs import output_directories
from ckptsync.config.schema import Config
from ckptsync.daemon.rehearsing import rehearsed
from ckptsync.errors import ConfigError, StoreError
from ckptsync.spool import folders
from ckptsync.stores.contract import Store
from ckptsync.stores.opening import NoParent, create_store, is_store
from ckptsync.stores.urls import Remote, located
from ckptsync.walk import OURS, UnsafeSpool

MARK = "store"
_LONGEST = 64 * 1024  # bytes


class Absent(StoreError):
    """No store where one should be: it will come, once it is mounted or made."""


def opened(config: Config) -> Store:
    """The store; the first worker makes it.

    Raises Absent if it is not there, or refuses this machine, and was before, or if no worker works here, or if the directory above it is not there either;
    Transient, after one try, if it cannot be reached; ConfigError if it refuses a machine that never worked with it.
    """
    try:
        return _opened(config)
    except NoParent as e:
        raise Absent(str(e), hint=e.hint) from e
    except ConfigError as e:
        if not _has_worked(config):
            raise
        rehearsed(config)  # what is wrong in the configuration itself stays wrong
        raise Absent(str(e), hint=f"{e.hint}.  It worked before, so it is tried again") from e


def _opened(config: Config) -> Store:
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
    return create_store(url, options_for(url, config.store.options), limits_of(config.limits))


def remember(spool: Path, url: str) -> None:
    """Say in a spool directory which store it is served to; raises StoreError, UnsafeSpool."""
    if remembers(spool, url):
        return
    try:
        folders.write(spool / MARK, _written(url).encode())
    except UnsafeSpool:
        raise
    except OSError as e:
        raise StoreError(f"{spool}: {e.strerror}", hint="the worker must run as the user who trains") from e


def remembers(spool: Path, url: str) -> bool:
    """Whether it was served to this very store last.  What cannot be read says nothing."""
    with contextlib.suppress(OSError):
        return folders.read(spool / MARK, _LONGEST) == _written(url).encode()
    return False


def _has_worked(config: Config) -> bool:
    """Whether this machine has worked with the store before, as far as is remembered: by a spool, or by what a head keeps of the store's catalogue."""
    url = config.store.url
    if "worker" in config.roles:
        return any(remembers(Path(run.path) / OURS, url) for run in output_directories(config.worker.runs, url).runs)
    from ckptsync.catalogue import kept  # noqa: PLC0415 - a worker alone does without

    with contextlib.suppress(OSError, RuntimeError):
        return kept.path(url).is_file()
    return False


def _written(url: str) -> str:
    """The location, however its URL is spelt."""
    location = located(url)
    return f"{location.url if isinstance(location, Remote) else location}\n"


def _where(url: str) -> str:
    return "is the URL right?" if isinstance(located(url), Remote) else "is the file system mounted?"


def _is_there(config: Config) -> bool:
    url = config.store.url
    try:
        return is_store(url, options_for(url, config.store.options), replace(limits_of(config.limits), patience=0.0))
    except OSError as e:
        raise StoreError(f"{url}: {e.strerror}", hint="is the file system mounted, and may this user read it?") from e
