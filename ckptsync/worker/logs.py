"""Carries a training's logs to the store: small files beside the checkpoints that grow.

Users who compare checkpoints want the loss curves, also after the node is gone.  But a growing file
is no part of a save, whose files are written once.  So logs go to ``<run>/logs/<node>/`` under
their own names, each whole and only when it has changed.  No record names them, and no checkpoint
depends on them.  They are never deleted; if a log that only grows was begun anew, the stored one is
kept under its name and date.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from ckptsync.digest import digest
from ckptsync.errors import CkptsyncError, Corrupt, Exists, Incomplete, NotFound, StoreError
from ckptsync.quantities import show_size
from ckptsync.records.store_paths import logs_prefix
from ckptsync.safe_names import LOGS, RECORDS
from ckptsync.safe_open import close_quietly, is_plain_path, read_at
from ckptsync.stores.contract import About, Store, read_all
from ckptsync.walk import Stat, open_checkpoint_file, walk
from ckptsync.worker.options import RunDir

LIMIT = 64 << 20  # bytes of a run's logs on a node


@dataclass(frozen=True, slots=True)
class LogKind:
    """Files that are logs, by a pattern of their paths below the output directory.

    ``grows``: their writer only appends, so that other bytes at the beginning are another training.
    """

    pattern: str
    grows: bool = False


KINDS = (
    # transformers, LLaMA-Factory, ms-swift, TRL
    LogKind(r"(trainer_log|logging|metrics)\.jsonl", grows=True),
    LogKind(r"(all|train|eval|test|predict|generate)_results\.json"),
    LogKind(r"trainer_state\.json|((train|training)_)?args\.json"),
    # what a training was started with: its own YAML, Hydra's
    LogKind(r"(\.hydra/)?[^/]+\.ya?ml"),
    # Lightning's loggers
    LogKind(r"lightning_logs/version_[0-9]+/hparams\.yaml"),
    LogKind(r"lightning_logs/version_[0-9]+/metrics\.csv", grows=True),
    # TensorBoard
    LogKind(
        r"((runs|tb|tensorboard|tensorboard_log|logs|lightning_logs)/(.+/)?)?"
        r"events\.out\.tfevents\.[^/]+",
        grows=True,
    ),
)
_FOLDERS = frozenset(
    {".hydra", "runs", "tb", "tensorboard", "tensorboard_log", "logs", "lightning_logs"}
)
_SECRET = re.compile(
    r"secret|credential|passw|token(?!iz)|(?<![a-z])(api)?keys?(?![a-z])",
    re.IGNORECASE,
)


def log_kind(path: str) -> LogKind | None:
    """Return the kind of a file below an output directory.

    None if it is no log, or may be a secret.
    """
    if _SECRET.search(path.rpartition("/")[2]) or not is_plain_path(path):
        return None
    return next((kind for kind in KINDS if re.fullmatch(kind.pattern, path)), None)


def fit_limit(files: Collection[Stat], limit: int = LIMIT) -> tuple[list[Stat], list[Stat]]:
    """Return the files that fit in ``limit`` bytes together, smallest first, and the others."""
    ordered = sorted(files, key=lambda f: (f.size, f.path))
    total = 0
    for n, file in enumerate(ordered):
        total += file.size
        if total > limit:
            return ordered[:n], ordered[n:]
    return ordered, []


@dataclass(frozen=True, slots=True)
class _Stored:
    """What the store has of a file; ``at``: when it was stored (seconds since the epoch)."""

    size: int
    digest: str
    at: float


class RunLogs:
    """Sends the logs of one output directory.  For one thread.

    A stored file is read once and compared, so that a file from before this process began is not
    sent again.
    """

    def __init__(self, run: RunDir, node: str, store: Store) -> None:
        """Remember the arguments; read neither the directory nor the store."""
        self._run, self._store = run, store
        self._prefix = logs_prefix(run.name, node)
        self._sent: dict[str, Stat] = {}  # the state in which each file was last looked at
        self._stored: dict[str, _Stored] | None = None
        self._times: dict[str, float] = {}
        self._is_taken = False

    def carry(self) -> tuple[str, ...]:
        """Send each log that has changed; return notes for an operator.

        Where nothing has changed, the store is not asked.  If the store has a checkpoint with the
        name of the logs' directory, nothing is sent, and that is the only note.  Logs beyond
        `LIMIT` bytes, largest first, are left out with a note.  A file that changes while it is
        read is sent by the next call.  Raises StoreError.
        """
        notes: list[str] = []
        files, too_large = fit_limit([*self._list(notes)])
        if too_large:
            size = show_size(sum(file.size for file in too_large))
            notes.append(
                f"{self._run.path}: logs of more than {show_size(LIMIT)}: {len(too_large)} files"
                f" ({size}) are not carried, such as {too_large[-1].path}"
            )
        for file in files:
            if self._sent.get(file.path) == file:
                continue
            if self._list_stored():
                name = f"{self._run.name}/{LOGS}"
                return (f"{name}: is a checkpoint, so no logs of this run are carried",)
            try:
                self._send(file)
            except StoreError:
                raise
            except Incomplete:
                continue  # it shrank or went while it was read
            except CkptsyncError as e:
                notes.append(f"logs: {e}")
                continue
            self._sent[file.path] = file
        return tuple(notes)

    def _list(self, notes: list[str]) -> Iterator[Stat]:
        """Yield the logs, none without a readable run; add unreadable folders to ``notes``."""
        names: list[str] = []
        # the scan says what is wrong with the directory
        with contextlib.suppress(OSError), os.scandir(self._run.path) as entries:
            names += [e.name for e in entries if e.name in _FOLDERS or log_kind(e.name)]
        for name in sorted(names):
            try:
                files = walk(self._run.path, (name,)).files
                yield from (file for file in files if log_kind(file.path))
            except CkptsyncError as e:  # noqa: PERF203 - the others are still listed
                notes.append(f"logs: {e}")

    def _list_stored(self) -> bool:
        """List the stored logs at the first call; return whether a checkpoint has their name.

        That is the name of their directory, and then none may be carried.  Later calls return the
        same and do not ask the store.  Raises StoreError.
        """
        if self._stored is None:
            run = self._run.name
            self._is_taken = LOGS in self._store.dirs(f"{run}/{RECORDS}/", LOGS)
            listed = self._store.names(self._prefix)
            self._times = {e.name.removeprefix(self._prefix): e.mtime for e in listed}
            self._stored = {}
        return self._is_taken

    def _send(self, file: Stat) -> None:
        """Replace a file in the store, if it has other bytes there.

        If the file should only grow and does not begin as the stored one, that one is kept under
        another name first.  Raises as `_read`, and StoreError.
        """
        data = self._read(file.path)
        before = self._read_stored(file.path)
        if before and (before.size, before.digest) == (len(data), digest(data)):
            return
        kind = log_kind(file.path)
        if before and kind and kind.grows:
            start = memoryview(data)[: before.size]
            if len(start) < before.size or digest(start) != before.digest:
                self._keep(file.path, before)
        self._store.write(self._prefix + file.path, [data], About(len(data)))
        self._remember(file.path, data, time.time())

    def _read(self, path: str) -> bytes:
        """Return a file's bytes.

        Raise Incomplete if it is gone, shorter, or larger than `LIMIT`, Corrupt if unreadable.
        """
        fd = open_checkpoint_file(self._run.path, path)
        try:
            out = bytearray(os.fstat(fd).st_size)
            if len(out) > LIMIT or read_at(fd, 0, memoryview(out)) < len(out):
                raise Incomplete(f"{self._run.path}/{path}: changed while it was read")
        except OSError as e:
            raise Corrupt(f"{self._run.path}/{path}: cannot be read: {e.strerror}") from e
        finally:
            close_quietly(fd)
        return bytes(out)

    def _read_stored(self, path: str) -> _Stored | None:
        """Return what the store has of a file; None if it has none.

        The first call for a file of an earlier process reads it and remembers the result.
        """
        if path in self._times:
            with contextlib.suppress(NotFound):
                self._remember(path, read_all(self._store, self._prefix + path), self._times[path])
            self._times.pop(path)
        return (self._stored or {}).get(path)

    def _keep(self, path: str, stored: _Stored) -> None:
        """Copy a stored file, in the store, to its name with the date at which it was stored.

        Writes nothing if that copy exists.
        """
        name = f"{path}.{time.strftime('%Y-%m-%dT%H%M%SZ', time.gmtime(stored.at))}"
        data = read_all(self._store, self._prefix + path)
        with contextlib.suppress(Exists):  # of a process that ended before the next step
            self._store.create(self._prefix + name, [data], About(len(data)))

    def _remember(self, path: str, data: bytes, stored_at: float) -> None:
        """Remember size, digest and time of what the store now has of a file."""
        if self._stored is not None:
            self._stored[path] = _Stored(len(data), digest(data), stored_at)
