"""A store in a directory: a local disk, or NFS.

Writing: a new file under a temporary name in the same directory (`posix.draft`), its bytes, fsync, close, then one step that gives it its
name (`posix.publish`: rename replaces, link refuses), then fsync of the directory; those above are durable before.  Killed anywhere,
there is the old file or the new one, and at most a temporary one, which is never listed.  Recommended reading: sqlite.org/atomiccommit.html;
tests/campaigns/crash_states.py takes each fsync away and sees what is lost.

NFS (nfs(5), "Data and metadata coherence"): errors of earlier writes come with fsync and close, so both count.  What other machines have
written is seen late, but opening asks the server: a directory is opened before a name is said not to be in it, and a file before it is said to end.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from ckptsync.errors import Corrupt, Exists, NotFound, StoreError, Transient
from ckptsync.mounts import Mount, mount_of
from ckptsync.paths import checked_path
from ckptsync.stores import beneath
from ckptsync.stores.beneath import OpenFile, OpenFiles
from ckptsync.stores.contract import UNKNOWN, About, Chunk, Entry, announced, checked_prefix
from ckptsync.stores.limits import RateLimiter, Unlimited, limit
from ckptsync.stores.oserrors import HINTS, Telling
from ckptsync.stores.posix.draft import Draft, Filled, Placing, begun, clear, discard, is_unfinished
from ckptsync.stores.posix.publish import Ways, claim, replace, sync_directory

T = TypeVar("T")
TRUSTED_S = 30.0  # after so long an open file is opened by its name again: somebody may have replaced it
SHARED = 256 << 10  # bytes of a file below which asking costs more than writing
_TRIES = 8  # each lost to another process that deleted the same empty directory in between
_Commit = Callable[[int, str, str, os.stat_result], None]


class PosixStore:
    """Files beneath ``root``, which must exist: a file system that is not mounted is not an empty store.

    The directory that a file system was mounted on does exist, so a ``witness`` may be named: a file that is in the store for ever.
    Without the one that was there at the beginning nothing is listed, written or said to be missing.  ``mount``: what the root is on,
    where the caller knows better than the system says.

    ``pace``: asked before bytes are read for others, or written.  What an earlier writer has left is compared without: else a writer that is
    restarted again and again would be late for ever with what it has long written.

    ``at``: the root, open, for the caller to close after the last use: where others may give another directory the root's name meanwhile.
    """

    is_exclusive = True

    def __init__(
        self, root: str, witness: str = "", mount: Mount | None = None, pace: RateLimiter | None = None, *, at: int | None = None
    ) -> None:
        self.root = str(Path(root).absolute())
        self._root = self.root if at is None else beneath.held(at, self.root)
        self._pace = None if isinstance(pace, Unlimited) else pace
        self.url = self.root
        mount = mount or mount_of(self.root)
        self.late, self._is_remote = mount.late, mount.is_remote
        self._told = Telling(self.root, mount.is_remote)
        self._files = OpenFiles(lambda name: beneath.open_file(self._root, name))
        self._ways = Ways(self._root)
        self._witness, self._time = witness, 0
        if witness:
            self._look()

    def names(self, prefix: str) -> Iterator[Entry]:
        """As the contract says."""
        self._files.forget_older(TRUSTED_S)
        self._ways.forget_older(TRUSTED_S)
        self._look()
        try:
            for name, found in beneath.walk(self._root, checked_prefix(prefix), is_unfinished):
                yield Entry(name, found.st_size, found.st_mtime)
        except OSError as e:
            raise self._told.error(str(e.filename or self.root), e) from e

    def dirs(self, prefix: str, start: str = "") -> list[str]:
        """As the contract says."""
        self._ways.forget_older(TRUSTED_S)
        self._look()
        try:
            found = beneath.directories(self._root, checked_prefix(prefix), is_unfinished)
        except OSError as e:
            raise self._told.error(str(e.filename or self.root), e) from e
        return sorted(name for name in found if name.startswith(start))

    def size(self, name: str) -> int:
        """As the contract says."""
        with self._reading(_checked(name)):
            look = beneath.stat_opened if self._is_remote else beneath.stat_file
            return self._surely(name, lambda: look(self._root, name).st_size)

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """As the contract says."""
        if self._pace is None or not out.nbytes:
            self._read_into(name, start, out)
            return
        for piece in limit([out], self._pace):
            self._read_into(name, start, piece)
            start += len(piece)

    def _read_into(self, name: str, start: int, out: memoryview) -> None:
        with self._reading(_checked(name)):
            count = self._surely(name, lambda: self._opened(name).read_at(start, out))
            if count < out.nbytes:  # what is remembered of a file's length may be older than what was written elsewhere
                count = self._files.reopen(name).read_at(start, out)
        if count < out.nbytes:
            raise Corrupt(f"{name}: ends at byte {start + count}, {out.nbytes} bytes from {start} wanted")

    def write(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        """As the contract says."""
        self._publish(_checked(name), chunks, about, replace)

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        """As the contract says."""
        with contextlib.suppress(NotFound), self._reading(_checked(name)):
            beneath.stat_file(self._root, name)  # no more than a look, as nothing is believed of an absence here
            self._ways.settle(name.split("/")[:-1])  # its writer may be dead: else a power cut could take what we say is there
            if about.origin:
                with beneath.parent_of(self._root, name) as (at, last):
                    clear(at, last, about.origin)
            raise Exists(f"{name}: already there")
        self._publish(name, chunks, about, claim)

    def place(self, name: str, size: int, origin: str = "") -> Placing:
        """As `write`, for who has the bytes in another order; ``origin`` as `About` has it."""
        *way, last = _checked(name).split("/")
        with self._told.about(name):
            draft = self._begin(way, last, origin)

        def commit(draft: Draft) -> None:
            replace(draft.at, draft.part, last, draft.close())
            self._files.forget(name)
            sync_directory(draft.at)

        try:
            return Placing(name, size, draft, self._told, commit)
        except BaseException:
            draft.remove()
            draft.release()
            raise

    def delete(self, name: str) -> None:
        """As the contract says.  Directories that this, or somebody who died over it, leaves empty go too: trainers take a directory for a checkpoint."""
        try:
            with self._reading(_checked(name)):
                self._surely(name, lambda: beneath.unlink(self._root, name))
        except NotFound:
            self._ways.drop_empty(name.split("/")[:-1])
            return
        self._files.forget(name)
        with self._told.about(name):
            self._ways.after_delete(name.split("/")[:-1])

    def drafts(self) -> Iterator[Entry]:
        """As `stores.capabilities` says."""
        with self._told.about(self.root):
            for name, found in beneath.walk(self._root, "", lambda _: False):
                if is_unfinished(name.rpartition("/")[2]):
                    yield Entry(name, found.st_size, found.st_mtime)

    def drop(self, name: str) -> bool:
        """As `stores.capabilities` says."""
        with self._told.about(name):
            return is_unfinished(checked_path(name).rpartition("/")[2]) and discard(self._root, name)

    def _publish(self, name: str, chunks: Iterable[Chunk], about: About, commit: _Commit) -> None:
        *way, last = name.split("/")
        with self._told.about(name):
            draft = self._begin(way, last, about.origin)
        try:
            try:
                if about.share and not draft.left and (about.size or 0) >= SHARED:
                    draft.share(about.share)
                self._write_out(name, draft, announced(chunks, about))
                with self._told.about(name):
                    commit(draft.at, draft.part, last, draft.close())
            except BaseException as e:
                if not (draft.may_stay and isinstance(e, Transient)):  # else the next try goes on with it
                    draft.remove()
                raise
            finally:
                self._files.forget(name)
            with self._told.about(name):
                sync_directory(draft.at)
        finally:
            draft.release()

    def _begin(self, way: list[str], last: str, origin: str) -> Draft:
        self._look()
        for _ in range(_TRIES):
            with contextlib.suppress(FileNotFoundError), self._ways.made(way) as made:  # until nobody deletes what is still empty
                draft = begun(made[-1], last, origin)
                try:
                    self._ways.secure(way, made)
                except BaseException:
                    draft.remove()
                    draft.release()
                    raise
                return draft
        raise Transient(f"{'/'.join(way)}: deleted by somebody else {_TRIES} times while it was made, in the store {self.root}")

    def _write_out(self, name: str, draft: Draft, chunks: Iterable[Chunk]) -> None:
        """All chunks, durable.  An OSError of ``chunks`` itself is not the store's."""
        with self._told.about(name):
            output = Filled(draft, self._pace)
        for chunk in chunks:
            with self._told.about(name):
                output.add(chunk)
        with self._told.about(name):
            output.sync()

    def _look(self) -> None:
        """Raises StoreError if there is no root: a missing root must never read as an empty store."""
        try:
            beneath.let_go(os.open(self._root, beneath.PASS))
            time_ = beneath.stat_file(self._root, self._witness).st_mtime_ns if self._witness else 0
        except OSError as e:
            if not beneath.is_absence(e):
                raise self._told.error(self.root, e) from e
            hint = HINTS.get(e.errno or 0, "is the file system mounted?  A store is made by the first worker or push")
            raise StoreError(f"{self.root}: {(e.strerror or str(e)).lower()}, a store's directory wanted", hint=hint) from e
        self._time = self._time or time_
        if time_ != self._time:
            raise StoreError(f"{self.root}: not the store that was opened", hint="is the file system mounted?  Then start again")

    def _surely(self, name: str, call: Callable[[], T]) -> T:
        """``call`` again, once, where it found a handle that the server forgot, or an absence that may be only remembered here."""
        try:
            return call()
        except OSError as e:
            if e.errno != errno.ESTALE and not (self._is_remote and beneath.is_absence(e)):
                raise
        self._files.forget(name)
        beneath.refresh(self._root, name)
        return call()

    def _opened(self, name: str) -> OpenFile:
        file = self._files.get(name)
        return self._files.reopen(name) if _is_stale(file) else file

    @contextlib.contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            if not beneath.is_absence(e):
                raise self._told.error(name, e) from e
            self._look()
            raise NotFound(f"{name}: not in {self.root}") from e


def _checked(name: str) -> str:
    if is_unfinished(checked_path(name).rpartition("/")[2]):
        raise Corrupt(f"{name}: the name of an unfinished write")
    return name


def _is_stale(file: OpenFile) -> bool:
    """Whether the name may mean another file by now: this one was replaced or deleted, or has been open for long."""
    return time.monotonic() - file.since > TRUSTED_S or file.links() == 0
