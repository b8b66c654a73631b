"""A store in a directory: a local disk, or NFS.

Writing: a new file under a temporary name in the same directory (`posix.draft`), its bytes,
fsync, close, then one step that gives it its name (`posix.publish`: rename replaces, link refuses),
then fsync of the directory; those above are durable before.  Killed anywhere, there is the old file
or the new one, and at most a temporary one, which is never listed.  Recommended reading:
sqlite.org/atomiccommit.html; tests/campaigns/crash_states.py takes each fsync away and sees what is
lost.

NFS (nfs(5), "Data and metadata coherence"): errors of earlier writes come with fsync and close, so
both count.  What other machines have written is seen late, but opening asks the server: a directory
is opened before a name is said not to be in it, and a file before it is said to end.
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
from ckptsync.stores.posix.draft import Draft, checked_name, clear, discard, is_unfinished
from ckptsync.stores.posix.publish import DurableDirectories, GiveName, claim, replace

T = TypeVar("T")
# s after which an open file is opened by its name again: somebody may have replaced it
TRUSTED_S = 30.0
SHARED = 256 << 10  # bytes of a file below which asking costs more than writing
_TRIES = 8  # each lost to another process that deleted the same empty directory in between


class PosixStore:
    """A store of the files beneath ``root``, which must exist.

    A file system that is not mounted is not an empty store.

    The directory that a file system was mounted on does exist, so a ``witness`` may be named: a
    file that is in the store for ever. Without the one that was there at the beginning nothing is
    listed, written or said to be missing.  ``mount``: what the root is on, where the caller knows
    better than the system says.

    ``pace``: asked before bytes are read for others, or written.  What an earlier writer has left
    is compared without: else a writer that is restarted again and again would be late for ever with
    what it has long written.

    ``at``: the root, open, for the caller to close after the last use: where others may give
    another directory the root's name meanwhile.
    """

    is_exclusive = True

    def __init__(
        self,
        root: str,
        witness: str = "",
        mount: Mount | None = None,
        pace: RateLimiter | None = None,
        *,
        at: int | None = None,
    ) -> None:
        self.root = str(Path(root).absolute())
        self._root = self.root if at is None else safe_open.path_of_open(at, self.root)
        self._pace = None if isinstance(pace, Unlimited) else pace
        self.url = self.root
        mount = mount or mount_of(self.root)
        self.late, self._is_remote = mount.late, mount.is_remote
        self._errors = StoreErrors(self.root, mount.is_remote)
        self._files = OpenFiles()
        self._directories = DurableDirectories(self._root)
        self._witness, self._time = witness, 0
        if witness:
            self._check_root()

    def names(self, prefix: str) -> Iterator[Entry]:
        self._files.forget_older(TRUSTED_S)
        with self._listing():
            for name, status in safe_open.files_below(
                self._root, checked_prefix(prefix), is_unfinished
            ):
                yield Entry(name, status.st_size, status.st_mtime)

    def dirs(self, prefix: str, start: str = "") -> list[str]:
        with self._listing():
            directories = safe_open.directories_below(
                self._root, checked_prefix(prefix), is_unfinished
            )
        return sorted(name for name in directories if name.startswith(start))

    def size(self, name: str) -> int:
        with self._reading(checked_name(name)):
            look = safe_open.stat_opened if self._is_remote else safe_open.stat_file
            return self._retry_stale(name, lambda: look(self._root, name).st_size)

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        if self._pace is None or not out.nbytes:
            self._read_into(name, start, out)
            return
        for piece in limit([out], self._pace):
            self._read_into(name, start, piece)
            start += len(piece)

    def _read_into(self, name: str, start: int, out: memoryview) -> None:
        with self._reading(checked_name(name)):
            count = self._retry_stale(name, lambda: self._opened(name).read_at(start, out))
            # what is remembered of a file's length may be older than what was written elsewhere
            if count < out.nbytes:
                count = self._reopened(name).read_at(start, out)
        if count < out.nbytes:
            raise too_short(name, start + count, start, out.nbytes)

    def write(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        self._publish(checked_name(name), chunks, about, replace)

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        with contextlib.suppress(NotFound), self._reading(checked_name(name)):
            # no more than a look, as nothing is believed of an absence here
            safe_open.stat_file(self._root, name)
            # its writer may be dead: else a power cut could take what we say is there
            self._directories.sync(name.split("/")[:-1])
            if about.origin:
                with safe_open.parent_of(self._root, name) as (at, last):
                    clear(at, last, about.origin)
            raise Exists(f"{name}: already there")
        self._publish(name, chunks, about, claim)

    def open_draft(self, name: str, size: int, origin: str = "") -> Draft:
        """Return a new file to be written in any order; ``origin`` as `About` has it."""
        draft = self._begin(checked_name(name), origin, replace)
        try:
            draft.resize(size)
        except BaseException:
            draft.end(keep=False)
            raise
        return draft

    def delete(self, name: str) -> None:
        """Delete a file, and the directories that become empty.

        Directories that a killed process left empty go too: trainers take a directory for a
        checkpoint.
        """
        way = name.split("/")[:-1]
        try:
            with self._reading(checked_name(name)):
                self._retry_stale(name, lambda: safe_open.unlink(self._root, name))
        except NotFound:
            self._directories.remove_empty(way)
            return
        self._files.forget(name)
        with self._errors.about(name):
            with contextlib.suppress(FileNotFoundError):  # gone, with everything in it
                self._directories.sync(way)
            self._directories.remove_empty(way)

    def drafts(self) -> Iterator[Entry]:
        with self._errors.about(self.root):
            for name, status in safe_open.files_below(self._root, "", lambda _: False):
                if is_unfinished(name.rpartition("/")[2]):
                    yield Entry(name, status.st_size, status.st_mtime)

    def remove_draft(self, name: str) -> bool:
        with self._errors.about(name):
            return is_unfinished(checked_path(name).rpartition("/")[2]) and discard(
                self._root, name
            )

    def _publish(
        self, name: str, chunks: Iterable[Chunk], about: About, give_name: GiveName
    ) -> None:
        draft = self._begin(name, about.origin, give_name)
        try:
            if about.share and not draft.left and (about.size or 0) >= SHARED:
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
        self._check_root()
        way, forget = name.split("/")[:-1], partial(self._files.forget, name)
        for _ in range(_TRIES):
            # until nobody deletes what is still empty
            with (
                self._errors.about(name),
                contextlib.suppress(FileNotFoundError),
                self._directories.opened(way) as made,
            ):
                draft = Draft(
                    made[-1], name, origin, self._errors, give_name=give_name, on_named=forget
                )
                try:
                    self._directories.make_durable(way, made)
                except BaseException:
                    draft.end(keep=False)
                    raise
                return draft
        raise Transient(
            f"{'/'.join(way)}: deleted by somebody else {_TRIES} times while it was made, in the"
            f" store {self.root}"
        )

    def _check_root(self) -> None:
        """Raise StoreError if the root is missing, or is not the one that was opened.

        A missing root must never read as an empty store.
        """
        try:
            safe_open.close_quietly(os.open(self._root, safe_open.PASS))
            time_ = (
                safe_open.stat_file(self._root, self._witness).st_mtime_ns if self._witness else 0
            )
        except OSError as e:
            if not safe_open.is_absence(e):
                raise self._errors.error(self.root, e) from e
            hint = HINTS.get(
                e.errno or 0,
                "mount the file system; the first worker or push makes a store",
            )
            raise StoreError(
                f"{self.root}: {(e.strerror or str(e)).lower()}, a store's directory expected",
                hint=hint,
            ) from e
        self._time = self._time or time_
        if time_ != self._time:
            raise StoreError(
                f"{self.root}: not the store that was opened",
                hint="mount the file system, then start again",
            )

    def _retry_stale(self, name: str, call: Callable[[], T]) -> T:
        """Return what ``call`` returns; call it again, once, if it may have seen stale data.

        Stale are a handle that the server forgot, and an absence that is only remembered here.
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
        """Return the file under this name.

        An open one may have been replaced or deleted, or has been open for long.
        """
        file = self._files.get(name)
        if file and time.monotonic() - file.since <= TRUSTED_S and file.links() > 0:
            return file
        return self._reopened(name)

    def _reopened(self, name: str) -> OpenFile:
        self._files.forget(name)
        return self._files.put(name, safe_open.open_file(self._root, name))

    @contextlib.contextmanager
    def _listing(self) -> Iterator[None]:
        self._directories.forget_older(TRUSTED_S)
        self._check_root()
        try:
            yield
        except OSError as e:
            raise self._errors.error(str(e.filename or self.root), e) from e

    @contextlib.contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            if not safe_open.is_absence(e):
                raise self._errors.error(name, e) from e
            self._check_root()
            raise NotFound(f"{name}: not in {self.root}") from e
