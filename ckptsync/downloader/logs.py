"""Download the logs of a run's nodes.

Logs grow in the store, and so do the copies here: a file that is the beginning of the stored one is
replaced, and a file with other bytes is left as it is and reported.
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
    """Download the logs of a run to ``destination / "logs" / NODE``, with ``threads`` threads.

    In the result, ``there`` counts the files that were unchanged. A file that differs locally,
    vanished or has an unsafe name is in ``failed`` (path below "logs" → error); the others are
    downloaded. ``dry``: nothing is written, and local files count by size alone.

    Raise ConfigError if the run does not exist, has no logs, or has a checkpoint named "logs", or
    the directory cannot be made; StoreError.
    """
    prefix = logs_prefix(checked_path(run))
    entries = [*store.names(prefix)]
    if LOGS in store.dirs(f"{run}/{RECORDS}/", LOGS):
        text = f"{run}/{LOGS}: is a checkpoint, so this run has no logs"
        raise ConfigError(text, hint="pull it without --logs")
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
    unchanged = [e for e, state in zip(entries, states, strict=True) if state is True]
    failed = {
        e.name.removeprefix(prefix): state
        for e, state in zip(entries, states, strict=True)
        if isinstance(state, CkptsyncError)
    }
    sizes = sum(e.size for e in entries), sum(e.size for e in unchanged)
    return Result(directory, len(entries), sizes[0], len(unchanged), sizes[1], failed)


def _pull(
    store: Store, target: PosixStore, prefix: str, entry: Entry, *, dry: bool
) -> bool | CkptsyncError:
    """Download one file; return whether it was unchanged, or the error why it is not given.

    A local file that is the beginning of the store's is replaced; one with other bytes is left, and
    is an error. So is a file that vanished or is too large, or an unsafe name. With ``dry`` nothing
    is downloaded, and files are compared by size alone. Raise StoreError.
    """
    path = entry.name.removeprefix(prefix)
    local_data = None
    try:
        with contextlib.suppress(NotFound):
            local_data = read_all(target, checked_path(path))
        if dry:
            return local_data is not None and len(local_data) == entry.size
        data = read_all(store, entry.name)
        if local_data == data:
            return True
        if local_data is not None and not data.startswith(local_data):
            return ConfigError(
                f"{path}: exists, and has other bytes than the store's",
                hint="move it away, or name another directory",
            )
        target.write(path, [data], About(len(data)))
    except (Corrupt, NotFound) as e:
        return without_frames(e)
    return False
