"""A store in a directory: a local disk, or NFS.

Writing must survive a kill and a power cut: a new file under a temporary name in the same directory
(`draft`), its bytes, fsync, close, then one step that gives it its name (`publish`: rename
replaces, link refuses), then fsync of the directory; those above are durable before. Killed
anywhere, there is the old file or the new one, and at most a temporary one, which is never listed.
Recommended reading: sqlite.org/atomiccommit.html; tests/campaigns/crash_states.py takes each fsync
away and sees what is lost.

NFS (nfs(5), "Data and metadata coherence"): errors of earlier writes come with fsync and close, so
both are checked. Names and sizes that other machines wrote are seen late, but opening asks the
server: a directory is opened before a name is reported as missing, and a file before its end is.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

from ckptsync import safe_open
from ckptsync.errors import Exists, NotFound, StoreError, Transient
from ckptsync.mounts import Mount, mount_of
from ckptsync.safe_names import checked_path
from ckptsync.safe_open import OpenFile, OpenFiles
from ckptsync.stores.contract import (
    UNKNOWN,
    About,
    Chunk,
    Entry,
    check_size,
    checked_prefix,
    too_short,
)
from ckptsync.stores.limits import RateLimiter, Unlimited, limit
from ckptsync.stores.oserrors import HINTS, StoreErrors
from ckptsync.stores.posix.draft import (
    Draft,
    checked_name,
    is_unfinished,
    remove_leftover_name,
    remove_unlocked,
)
from ckptsync.stores.posix.publish import DurableDirectories, GiveName, claim, replace

T = TypeVar("T")
# s after which an open file is opened by its name again: somebody may have replaced it
TRUSTED_S = 30.0
SHARED = 256 << 10  # bytes of a file below which asking costs more than writing
_TRIES = 8  # each lost to another process that deleted the same empty directory in between


class PosixStore:
    """A store of the files beneath ``root``, which must exist.

    A file system that is not mounted is not an empty store, and the directory that it is mounted on
    does exist. So a ``witness`` may be named: a file that is in the store for ever. If the one that
    was there at the beginning is missing, listings, writes and reads of absent files raise
    StoreError.

    Args:
        root: the directory.
        witness: the file that proves that the same file system is mounted; "" for none.
        mount: what the root is on, if the caller knows better than the mount table.
        pace: limits bytes that are read or written. Bytes that are compared with those of a killed
            writer are not limited: else a writer that is restarted again and again would never
            finish.
        root_fd: the open root, which the caller closes after the last use: where others may give
            another directory the root's name.

    """

    is_exclusive = True

    def __init__(
        self,
        root: str,
        witness: str = "",
        mount: Mount | None = None,
        pace: RateLimiter | None = None,
        *,
        root_fd: int | None = None,
    ) -> None:
        """Raise StoreError if the witness is missing."""
        self.root = str(Path(root).absolute())
        self._root = self.root if root_fd is None else safe_open.path_of_open(root_fd, self.root)
        self._pace = None if isinstance(pace, Unlimited) else pace
        self.url = self.root
        mount = mount or mount_of(self.root)
        self.late, self._is_remote = mount.late, mount.is_remote
        self._errors = StoreErrors(self.root, mount.is_remote)
        self._files = OpenFiles()
        self._directories = DurableDirectories(self._root)
        self._witness, self._witness_mtime = witness, 0
        if witness:
            self._check_root()

    def names(self, prefix: str) -> Iterator[Entry]:
        """Yield the stored files below ``prefix``; close files open for `TRUSTED_S` seconds."""
        self._files.forget_older(TRUSTED_S)
        with self._listing():
            for name, status in safe_open.files_below(
                self._root, checked_prefix(prefix), is_unfinished
            ):
                yield Entry(name, status.st_size, status.st_mtime)

    def dirs(self, prefix: str, start: str = "") -> list[str]:
        """Return the directories directly below ``prefix`` (see `Store.dirs`)."""
        with self._listing():
            directories = safe_open.directories_below(
                self._root, checked_prefix(prefix), is_unfinished
            )
        return sorted(name for name in directories if name.startswith(start))

    def size(self, name: str) -> int:
        """Return the size of a file in bytes; raise NotFound."""
        with self._reading(checked_name(name)):
            stat = safe_open.stat_opened if self._is_remote else safe_open.stat_file
            return self._retry_stale(name, lambda: stat(self._root, name).st_size)

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill ``out`` from byte ``start``, within the rate limit; the file stays open.

        Raise NotFound, Corrupt if the file ends before, Transient on shutdown.
        """
        if self._pace is None or not out.nbytes:
            self._read_into(name, start, out)
            return
        for piece in limit([out], self._pace):
            self._read_into(name, start, piece)
            start += len(piece)

    def _read_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill ``out`` without the rate limit; raise as `read_into`.

        If the file ends before, it is opened again first: on NFS a cached length may be old.
        """
        with self._reading(checked_name(name)):
            count = self._retry_stale(name, lambda: self._opened(name).read_at(start, out))
            if count < out.nbytes:
                count = self._reopened(name).read_at(start, out)
        if count < out.nbytes:
            raise too_short(name, start + count, start, out.nbytes)

    def write(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        """Store all of the content, or nothing; replace what has the name (see `Store.write`)."""
        self._publish(checked_name(name), chunks, about, replace)

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        """Store a new file; raise Exists, once the taken name is durable (see `Store.create`)."""
        with contextlib.suppress(NotFound), self._reading(checked_name(name)):
            # no refresh of NFS's cache: if the name is taken after all, `claim` finds out
            safe_open.stat_file(self._root, name)
            # its writer may have been killed before: a name that is reported has to be durable
            self._directories.sync(name.split("/")[:-1])
            if about.origin:
                with safe_open.parent_of(self._root, name) as (parent_fd, last):
                    remove_leftover_name(parent_fd, last, about.origin)
            raise Exists(f"{name}: already there")
        self._publish(name, chunks, about, claim)

    def open_draft(self, name: str, size: int, origin: str = "") -> Draft:
        """Return a new file of ``size`` bytes to be written in any order, then committed.

        It replaces what has the name. ``origin``: as `About` has it; the draft of a killed writer
        of the same origin is continued. Raise StoreError.
        """
        draft = self._begin(checked_name(name), origin, replace)
        try:
            draft.resize(size)
        except BaseException:
            draft.end(keep=False)
            raise
        return draft

    def delete(self, name: str) -> None:
        """Delete a file, durably, if it is there, and the directories that become empty.

        Directories that a killed process left empty go too: trainers take a directory for a
        checkpoint.
        """
        directories = name.split("/")[:-1]
        try:
            with self._reading(checked_name(name)):
                self._retry_stale(name, lambda: safe_open.unlink(self._root, name))
        except NotFound:
            self._directories.remove_empty(directories)
            return
        self._files.forget(name)
        with self._errors.about(name):
            with contextlib.suppress(FileNotFoundError):  # gone, with everything in it
                self._directories.sync(directories)
            self._directories.remove_empty(directories)

    def drafts(self) -> Iterator[Entry]:
        """Yield the unfinished files of live and killed writers."""
        with self._errors.about(self.root):
            for name, status in safe_open.files_below(self._root, "", lambda _: False):
                if is_unfinished(name.rpartition("/")[2]):
                    yield Entry(name, status.st_size, status.st_mtime)

    def remove_draft(self, name: str) -> bool:
        """Remove a draft that no writer has locked; return whether it is gone.

        False for a name that is no draft's.
        """
        with self._errors.about(name):
            return is_unfinished(checked_path(name).rpartition("/")[2]) and remove_unlocked(
                self._root, name
            )

    def _publish(
        self, name: str, chunks: Iterable[Chunk], about: About, give_name: GiveName
    ) -> None:
        """Write ``chunks`` to a draft, and give it the name by ``give_name``.

        After Transient the draft stays for the next try, if it has an origin; else it is removed.
        """
        draft = self._begin(name, about.origin, give_name)
        try:
            if about.share and not draft.initial_size and (about.size or 0) >= SHARED:
                # where the file system lets files share bytes (XFS, btrfs, NFS 4.2)
                draft.share(about.share)
            for chunk in check_size(chunks, about):
                draft.append(chunk, self._pace)
            draft.commit()
        except BaseException as e:
            # after what may pass, the next try goes on with it
            draft.end(keep=isinstance(e, Transient))
            raise

    def _begin(self, name: str, origin: str, give_name: GiveName) -> Draft:
        """Return a draft in the file's directory, which is made, durably, if it is missing.

        Raise Transient if other processes delete the directory each time while it is empty;
        StoreError.
        """
        self._check_root()
        directories, forget = name.split("/")[:-1], partial(self._files.forget, name)
        for _ in range(_TRIES):
            # another process may delete a directory that is still empty
            with (
                self._errors.about(name),
                contextlib.suppress(FileNotFoundError),
                self._directories.opened(directories) as descriptors,
            ):
                draft = Draft(
                    descriptors[-1],
                    name,
                    origin,
                    self._errors,
                    give_name=give_name,
                    on_named=forget,
                )
                try:
                    self._directories.make_durable(directories, descriptors)
                except BaseException:
                    draft.end(keep=False)
                    raise
                return draft
        raise Transient(
            f"{'/'.join(directories)}: deleted by somebody else {_TRIES} times while it was"
            f" made, in the store {self.root}"
        )

    def _check_root(self) -> None:
        """Raise StoreError if the root is missing, or is not the one that was opened.

        The first call records the time of the witness file, if there is one; later calls compare
        it. A missing root must never read as an empty store.
        """
        try:
            safe_open.close_quietly(os.open(self._root, safe_open.PASS))
            mtime = (
                safe_open.stat_file(self._root, self._witness).st_mtime_ns if self._witness else 0
            )
        except OSError as e:
            if not safe_open.is_absence(e):
                raise self._errors.error(self.root, e) from e
            hint = HINTS.get(
                e.errno or 0, "mount the file system; the first worker or push makes a store"
            )
            raise StoreError(
                f"{self.root}: {(e.strerror or str(e)).lower()}, a store's directory expected",
                hint=hint,
            ) from e
        self._witness_mtime = self._witness_mtime or mtime
        if mtime != self._witness_mtime:
            raise StoreError(
                f"{self.root}: not the store that was opened",
                hint="mount the file system, then start again",
            )

    def _retry_stale(self, name: str, call: Callable[[], T]) -> T:
        """Return what ``call`` returns; call it again, once, if it may have seen stale data.

        Stale are a file handle that the NFS server has forgotten, and on a remote file system an
        absence that is only cached. Other errors are raised.
        """
        try:
            return call()
        except OSError as e:
            if e.errno != errno.ESTALE and not (self._is_remote and safe_open.is_absence(e)):
                raise
        self._files.forget(name)
        safe_open.refresh(self._root, name)
        return call()

    def _opened(self, name: str) -> OpenFile:
        """Return the open file of a name; open it again if it was replaced, or after `TRUSTED_S`.

        Raise OSError.
        """
        file = self._files.get(name)
        if file and time.monotonic() - file.since <= TRUSTED_S and file.links() > 0:
            return file
        return self._reopened(name)

    def _reopened(self, name: str) -> OpenFile:
        """Open a file by its name, and keep it open for later reads. Raise OSError."""
        self._files.forget(name)
        return self._files.put(name, safe_open.open_file(self._root, name))

    @contextlib.contextmanager
    def _listing(self) -> Iterator[None]:
        """Check the root before a listing; raise each OSError of the block as StoreError."""
        self._directories.forget_older(TRUSTED_S)
        self._check_root()
        try:
            yield
        except OSError as e:
            raise self._errors.error(str(e.filename or self.root), e) from e

    @contextlib.contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        """Raise each OSError of the block as StoreError: NotFound for an absent file.

        An absent root is a StoreError.
        """
        try:
            yield
        except OSError as e:
            if not safe_open.is_absence(e):
                raise self._errors.error(name, e) from e
            self._check_root()
            raise NotFound(f"{name}: not in {self.root}") from e
