"""Download the logs of a run's nodes.

They grow in the store, and so do the copies here: a file that is the beginning of the stored one is
replaced, a file with other bytes is left alone.
"""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path

from ckptsync.catalogue.uncached import not_found
from ckptsync.downloader.download import Result
from ckptsync.errors import CkptsyncError, ConfigError, Corrupt, NotFound, without_frames
from ckptsync.records.store_paths import logs_prefix
from ckptsync.safe_names import LOGS, RECORDS, checked_path
from ckptsync.stores.contract import About, Entry, Store, read_all
from ckptsync.stores.posix.store import PosixStore
from ckptsync.threads import ThreadPool


def pull_logs(
    store: Store, run: str, destination: Path, threads: int, *, dry: bool = False
) -> Result:
    """Download the logs of a run to ``destination / "logs" / node``.

    ``dry``: only say what would be done.  Raises ConfigError where the run has none, StoreError.
    """
    prefix = logs_prefix(checked_path(run))
    entries = [*store.names(prefix)]
    if LOGS in store.dirs(f"{run}/{RECORDS}/", LOGS):
        why = f"{run}/{LOGS}: is a checkpoint, so this run has no logs"
        raise ConfigError(why, hint="pull it without --logs")
    if not entries:
        if run not in store.dirs("", run):
            raise not_found(store, run)
        raise ConfigError(
            f"run {run!r} has no logs in {store.url}",
            hint="workers carry them, but for those with `worker.logs: false`",
        )
    directory = destination / LOGS
    if not dry:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise ConfigError(f"{directory}: {e.strerror}", hint="name another directory") from e
    target = PosixStore(str(directory))
    with ThreadPool(threads, "pull-logs") as pool:
        states = list(pool.map(partial(_pull, store, target, prefix, dry=dry), entries))
    there = [e for e, state in zip(entries, states, strict=True) if state is True]
    failed = {
        e.name.removeprefix(prefix): state
        for e, state in zip(entries, states, strict=True)
        if isinstance(state, CkptsyncError)
    }
    sizes = sum(e.size for e in entries), sum(e.size for e in there)
    return Result(directory, len(entries), sizes[0], len(there), sizes[1], failed)


def _pull(
    store: Store, target: PosixStore, prefix: str, entry: Entry, *, dry: bool
) -> bool | CkptsyncError:
    """Download one file; return whether it was there already, or why it is not given."""
    path = entry.name.removeprefix(prefix)
    here = None
    try:
        with contextlib.suppress(NotFound):
            here = read_all(target, checked_path(path))
        if dry:
            return here is not None and len(here) == entry.size
        data = read_all(store, entry.name)
        if here == data:
            return True
        if here is not None and not data.startswith(here):
            return ConfigError(
                f"{path}: exists, and has other bytes than the store's",
                hint="move it away, or name another directory",
            )
        target.write(path, [data], About(len(data)))
    except (Corrupt, NotFound) as e:
        return without_frames(e)
    return False
