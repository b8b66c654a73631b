"""Download the files of a plan into a directory that appears whole, or not at all.

A trainer that finds half a checkpoint would load it. So the files arrive in a hidden directory
beside the final one, each with its checksum verified on the way. When all are complete, the hidden
directory gets the files' times (trainers rotate by them) and is renamed. After a kill at any moment
there is either the hidden directory, with which the next download of the same files continues, or
the whole checkpoint. Nothing that existed before is overwritten.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptsync import safe_open
from ckptsync.downloader.download_plan import PullPlan
from ckptsync.errors import CkptsyncError, ConfigError, StoreError
from ckptsync.quantities import show_size
from ckptsync.stores.contract import About, Store
from ckptsync.stores.parallel_download import THREADS, StoredFile, download
from ckptsync.stores.posix.draft import is_unfinished
from ckptsync.stores.posix.publish import sync_path
from ckptsync.stores.posix.store import PosixStore
from ckptsync.stores.stream import has_same_bytes
from ckptsync.threads import ThreadPool
from ckptsync.walk import walk

Progress = Callable[[int, int], None]
_OTHER_FILES = (
    "a pull overwrites nothing, and completes only what a pull has begun: move it away, or name"
    " another directory"
)
_NO_OVERWRITE = "a pull overwrites nothing: name another directory, or remove this one yourself"


@dataclass(frozen=True, slots=True)
class Result:
    """What a download did, or would do.

    ``directory``: the checkpoint, or the hidden directory if a file ``failed`` (path → error).
    ``files`` and ``size`` (bytes) count the plan; ``there`` and ``there_size`` what was on this
    machine already. ``pointers``: names of the pointer files that were written.
    """

    directory: Path
    files: int
    size: int
    there: int
    there_size: int
    failed: dict[str, CkptsyncError]
    pointers: tuple[str, ...] = ()


class Busy(ConfigError):
    """Raised if another process downloads the same files into the same directory."""


class Download:
    """The download of one plan into the directory ``destination / plan.name``.

    ``near``: a directory that may hold some of the files, which are linked instead of downloaded.
    Methods raise ConfigError and StoreError.
    """

    def __init__(self, destination: Path, plan: PullPlan, near: Path | None = None) -> None:
        """Compute the paths; read and write nothing."""
        self.plan = plan
        self._parent = destination
        self._near = near
        self._final = destination / plan.name
        self._hidden = destination / f".{plan.name}.pull-{plan.key}"
        self._open = str(self._hidden)  # while `_open_hidden`: the open directory

    @property
    def directory(self) -> Path:
        """Return the directory that appears at the end."""
        return self._final

    def preview(self) -> Result:
        """Return what `run` would do, and write nothing; judge existing files by names and sizes.

        ``pointers`` are all of the plan's. Raise ConfigError as `_is_complete`, StoreError.
        """
        present = self.plan.files if self._is_complete() else self._list_downloaded()
        return self._result(present, {}, tuple(self.plan.pointers))

    def run(self, store: Store, progress: Progress | None = None, threads: int = THREADS) -> Result:
        """Download what is missing, with ``threads`` threads, and rename; return what was done.

        Existing and nearby files are read and verified; damaged ones in the hidden directory are
        deleted and downloaded again. If the final directory is complete, only the pointer files are
        written. If a file is missing in the store, or damaged there, it is in `Result.failed`, and
        nothing is renamed.

        ``progress`` gets bytes verified or downloaded, and in all, from any thread. Raise
        ConfigError if other files have that place, Busy if another pull runs, StoreError, also if
        the disk lacks room.
        """
        count = _counter(self.plan.size, progress)
        if self._is_complete():
            if damaged := _find_damaged(PosixStore(str(self._final)), self.plan.files, count):
                raise ConfigError(
                    f"{self._final}: exists, and {damaged[0].under} has other bytes",
                    hint=_NO_OVERWRITE,
                )
            return self._result(self.plan.files, {}, self._finish())
        with self._open_hidden() as target:
            self._link_near()
            self._check_room()
            if self.plan.alike:
                self._check_alike()
            downloaded = self._list_downloaded()
            damaged = _find_damaged(target, downloaded, count)
            for file in damaged:
                target.delete(file.under)
            intact_names = {file.under for file in downloaded} - {file.under for file in damaged}
            present = [f for f in self.plan.files if f.under in intact_names]
            missing = [f for f in self.plan.files if f.under not in intact_names]
            if failed := download(store, target, missing, threads, count):
                return self._result(present, failed, ())
            self._publish()
        return self._result(present, {}, self._finish())

    def leftovers(self) -> tuple[str, ...]:
        """Return the paths of this checkpoint's other hidden directories, sorted.

        They are unfinished downloads of other files, or of other bytes. None are deleted here.
        """
        with _raising_ours(self._parent):
            if not self._parent.is_dir():
                return ()
            paths = self._parent.glob(f".{glob.escape(self.plan.name)}.pull-*")
            return tuple(sorted(str(path) for path in paths if path != self._hidden))

    def _is_complete(self) -> bool:
        """Return whether the final directory holds all files, by names and sizes.

        False if it does not exist, or is empty. Raise ConfigError if it lacks a file or has one of
        another size, is no directory, or is an empty mount point.
        """
        if not os.path.lexists(self._final):
            return False
        if self._final.is_symlink() or not self._final.is_dir():
            raise ConfigError(f"{self._final}: exists, and is not a directory", hint=_NO_OVERWRITE)
        sizes = _sizes(self._final)
        if not sizes and not any(self._final.iterdir()):
            if self._final.is_mount():  # rename(2) onto a mount point fails
                raise ConfigError(
                    f"{self._final}: is a mount point, which a rename cannot replace",
                    hint="name a directory below it",
                )
            return False
        differing = [f for f in self.plan.files if sizes.get(f.under) != f.size]
        if not differing:
            return True
        # of a trainer that was killed, of another tool, or of a pull of fewer files
        first, first_size = differing[0], sizes.get(differing[0].under)
        size_text = f"has {first_size} bytes, not {first.size}"
        first_difference = f"{first.under} {'is missing' if first_size is None else size_text}"
        more_text = f", and {len(differing) - 1} more" if len(differing) > 1 else ""
        count = f"{len(differing)} of {len(self.plan.files)} files"
        raise ConfigError(
            f"{self._final}: exists, but {count} differ from the store's:"
            f" {first_difference}{more_text}",
            hint=_OTHER_FILES,
        )

    def downloaded_bytes(self) -> int:
        """Return how many bytes of this download are on disk, with those of unfinished files.

        0 without a hidden directory, also after the rename. Another process may be downloading
        them. Raise as `walk`.
        """
        walked = walk(self._hidden)
        return sum(file.size for file in (*walked.files, *walked.partial))

    def _list_downloaded(self) -> list[StoredFile]:
        """Return the plan's files that the hidden directory has in full size; [] without it."""
        if not self._hidden.is_dir() or self._hidden.is_symlink():
            return []
        sizes = _sizes(self._hidden)
        return [f for f in self.plan.files if sizes.get(f.under) == f.size]

    @contextlib.contextmanager
    def _open_hidden(self) -> Iterator[PosixStore]:
        """Make, open and lock the hidden directory; yield a store in it; unlock it after the block.

        In the block `_open` is its path by descriptor. Raise Busy as `_lock`, ConfigError if a file
        or link has the name, StoreError.
        """
        with _raising_ours(self._parent):
            self._parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                self._hidden.mkdir()
            descriptor = os.open(self._hidden, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            _lock(descriptor, self._hidden)
            self._open = safe_open.path_of_open(descriptor, str(self._hidden))
            # who owns the directory above may put another in its place
            yield PosixStore(str(self._hidden), root_fd=descriptor)
        finally:
            self._open = str(self._hidden)
            safe_open.close_quietly(descriptor)

    def _link_near(self) -> None:
        """Hard-link nearby files with the right names, sizes and times; `run` verifies them.

        A file that cannot be linked is passed over, and downloaded. So is one with another time: a
        download sets times, and pins are recognised by the times of their files.
        """
        sizes = _sizes(self._near) if self._near and not self._near.is_symlink() else {}
        for file in self.plan.files:
            if self._near and sizes.get(file.under) == file.size:
                source, target = self._near / file.under, Path(self._open, file.under)
                # what cannot be linked is downloaded
                with contextlib.suppress(OSError):
                    mtime = source.lstat().st_mtime_ns
                    if mtime == self.plan.times.get(file.under, mtime):
                        target.parent.mkdir(parents=True, exist_ok=True)
                        os.link(source, target, follow_symlinks=False)

    def _check_room(self) -> None:
        """Raise StoreError if the plan's bytes, less those on disk, exceed the free space."""
        with _raising_ours(self._parent):
            downloaded = sum(
                stat.st_blocks * 512
                for _, stat in safe_open.files_below(self._open, "", lambda _: False)
            )
            disk = os.statvfs(self._open)
        needed, free = self.plan.size - downloaded, disk.f_bavail * disk.f_frsize
        if needed > free:
            raise StoreError(
                f"{self._parent}: {show_size(needed)} are needed, {show_size(free)} are free",
                hint="make room, or name another directory",
            )

    def _check_alike(self) -> None:
        """Raise ConfigError if the destination's file system takes a pair of `plan.alike` for one.

        It creates both names of each pair in a temporary directory there, which it deletes again.
        Raise StoreError if it cannot be written.
        """
        pair = ("", "")
        with (
            _raising_ours(self._parent),
            tempfile.TemporaryDirectory(prefix=".ckptsync-", dir=self._parent) as directory,
        ):
            try:
                for number, pair in enumerate(self.plan.alike):
                    for path in (Path(directory, str(number), name) for name in pair):
                        path.parent.mkdir(parents=True, exist_ok=True)
                        path.touch(exist_ok=False)
            except (FileExistsError, NotADirectoryError, IsADirectoryError):
                raise ConfigError(
                    f"{self._parent}: its file system takes {pair[0]} and {pair[1]} for one file",
                    hint="pull to a file system that tells them apart, such as ext4 or XFS",
                ) from None

    def _publish(self) -> None:
        """Set all times, then rename the hidden directory to the final one, absent or empty.

        Before that, drafts of killed writes are deleted. Raise ConfigError, with nothing renamed,
        if the hidden directory holds a file that is neither a draft nor in the plan, or the final
        one is not empty; else StoreError.
        """
        names = {f.under for f in self.plan.files}
        with _raising_ours(self._final):
            for name, _ in list(safe_open.files_below(self._open, "", lambda _: False)):
                if name in names:
                    continue
                if not is_unfinished(name.rpartition("/")[2]):
                    raise ConfigError(
                        f"{self._hidden}/{name}: not downloaded by a pull",
                        hint="remove the directory, then try again",
                    )
                safe_open.unlink(self._open, name)
            _set_times(Path(self._open), self.plan.times)
            self._hidden.rename(self._final)

    def _finish(self) -> tuple[str, ...]:
        """Make the rename durable, also that of a killed call; then write the pointer files.

        Return the names of the pointer files that changed.
        """
        with _raising_ours(self._final):
            sync_path(self._parent)
        return write_pointers(self._parent, self.plan.pointers)

    def _result(
        self,
        present: Collection[StoredFile],
        failed: dict[str, CkptsyncError],
        pointers: tuple[str, ...],
    ) -> Result:
        """Return what was done, as counts; its directory is the hidden one if a file failed."""
        directory = self._hidden if failed else self._final
        size = sum(f.size for f in present)
        return Result(
            directory, len(self.plan.files), self.plan.size, len(present), size, failed, pointers
        )


def write_pointers(directory: Path, pointers: Mapping[str, bytes]) -> tuple[str, ...]:
    """Write each file of ``pointers`` into ``directory`` whose content differs, or which is a link.

    Return the names that were written. Existing files are replaced. Raise StoreError; OSError if
    one cannot be read.
    """
    store, written = PosixStore(str(directory)), []
    for name, content in pointers.items():
        path = directory / name
        if path.is_symlink() or not path.is_file() or path.read_bytes() != content:
            origin = f"pull {name} {content!r}"  # by which a write that was killed is continued
            store.write(name, [content], About(len(content), origin))
            written.append(name)
    return tuple(written)


def _counter(total: int, progress: Progress | None) -> Callable[[int], None]:
    """Return a thread-safe function that adds bytes, and calls ``progress`` with the sum.

    The sum that it reports is at most ``total``. ``progress`` is called with a lock held, so never
    by two threads at once; None reports nothing.
    """
    counted, lock = 0, threading.Lock()

    def count(size: int) -> None:
        """Add bytes, and report at most the total."""
        nonlocal counted
        with lock:
            counted += size
            if progress:
                progress(min(counted, total), total)

    return count


def _find_damaged(
    directory: PosixStore, files: Sequence[StoredFile], count: Callable[[int], None]
) -> list[StoredFile]:
    """Read all files with `THREADS` threads; return those that are missing, or have other bytes.

    ``count`` gets the sizes of the others. Every file must have a digest. Raise StoreError if one
    cannot be read.
    """

    def has_bytes(file: StoredFile) -> bool:
        """Return whether a file has its recorded bytes; if so, count them."""
        assert file.digest
        if not has_same_bytes(directory, file.under, file.size, file.digest.digest):
            return False
        count(file.size)
        return True

    with ThreadPool(THREADS) as pool:
        judged = zip(files, pool.map(has_bytes, files), strict=True)
        return [file for file, is_intact in judged if not is_intact]


def _sizes(directory: Path) -> Mapping[str, int]:
    """Return the sizes of all files below a directory, without drafts.

    Raise as `_raising_ours` does.
    """
    with _raising_ours(directory):
        return {
            name: stat.st_size
            for name, stat in safe_open.files_below(str(directory), "", is_unfinished)
        }


def _set_times(root: Path, times: Mapping[str, int]) -> None:
    """Set mtime and atime (ns) of files below ``root``, and sync their directories to disk.

    A directory that holds such files, at any depth, gets the time of its newest one. Raise OSError.
    """
    newest: dict[str, int] = {}
    for path, time in times.items():
        os.utime(root / path, ns=(time, time), follow_symlinks=False)
        parts = path.split("/")[:-1]
        for above in ("/".join(parts[:n]) for n in range(len(parts) + 1)):
            newest[above] = max(time, newest.get(above, time))
    for directory, time in newest.items():
        os.utime(root / directory, ns=(time, time))
        sync_path(root / directory)


def _lock(descriptor: int, hidden: Path) -> None:
    """Lock the open hidden directory, without waiting; closing ``descriptor`` unlocks it.

    Raise Busy if another pull holds the lock or has renamed the directory, or another user made it.
    If its owner seems to be another user, a temporary directory beside it shows which owner the
    file system gives; an error is raised as in `_raising_ours`. On a file system without locks
    return at once: two pulls at once both download, and the second one's rename fails.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Busy(
            f"{hidden}: another pull is downloading into it", hint="wait for it, or stop it"
        ) from None
    except OSError:
        # a file system without locks: two pulls at once both download, and the second one's rename
        # fails
        return
    stat = os.fstat(descriptor)
    try:
        is_same = os.path.samestat(stat, hidden.lstat())
    except FileNotFoundError:
        is_same = False
    if is_same and stat.st_uid == os.geteuid():
        return
    # servers that squash users, and mounts for one user, give what this user makes to another one
    if is_same:
        parent = hidden.parent
        with (
            _raising_ours(parent),
            tempfile.TemporaryDirectory(prefix=".ckptsync-", dir=parent) as probe,
        ):
            is_same = stat.st_uid == Path(probe).stat().st_uid
    if not is_same:
        raise Busy(
            f"{hidden}: another pull has just finished, or it belongs to another user",
            hint="try again",
        )


@contextlib.contextmanager
def _raising_ours(location: Path) -> Iterator[None]:
    """In the block, raise an OSError as ConfigError if the path is at fault, else as StoreError.

    The path is at fault if a part is a link or no directory, or the name is taken. ``location``:
    named in the message if the OSError names no file.
    """
    try:
        yield
    except OSError as e:
        why = f"{e.filename or location}: {(e.strerror or str(e)).lower()}"
        if e.errno in (errno.ENOTDIR, errno.ELOOP, errno.EEXIST, errno.ENOTEMPTY):
            raise ConfigError(
                why, hint="check the path; a pull overwrites nothing, and follows no link below it"
            ) from e
        raise StoreError(why, hint="check free space and permissions") from e
