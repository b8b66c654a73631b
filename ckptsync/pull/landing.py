"""Where a checkpoint lands: a hidden directory beside its own, which becomes it in one step when every file is there.

Killed at any moment there is the hidden directory, with which the next pull of the same files goes on, or the whole checkpoint.  Nothing that was
there before is written to.  Rotation goes by the times of a trainer's directories, so those are set too, and before the one step.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from blake3 import blake3

from ckptsync.errors import ConfigError, StoreError
from ckptsync.pull.wanted import Order
from ckptsync.stores import beneath
from ckptsync.stores.arrival import Wanted
from ckptsync.stores.contract import About
from ckptsync.stores.posix.draft import is_unfinished
from ckptsync.stores.posix.store import PosixStore
from ckptsync.units import show_size

PIECE = 1 << 20
_WHOLE = "a pull overwrites nothing, and completes only what a pull has begun: move it away, or name another directory"
_NEVER = "nothing is ever overwritten: name another directory, or take it away yourself"


class Landing:
    """One order in an output directory.  Raises ConfigError, StoreError."""

    def __init__(self, destination: Path, order: Order) -> None:
        self.destination, self.order = destination, order
        self.final = destination / order.name
        self.work = destination / f".{order.name}.pull-{order.key}"
        self._open = str(self.work)  # while it is `begun`: the open directory

    def is_there(self) -> bool:
        """Whether all of it lies there, by names and sizes; raises ConfigError if anything else does."""
        if not os.path.lexists(self.final):
            return False
        if self.final.is_symlink() or not self.final.is_dir():
            raise ConfigError(f"{self.final}: there is something that is no directory", hint=_NEVER)
        sizes = self._sizes(self.final)
        if not sizes and not any(self.final.iterdir()):
            if self.final.is_mount():  # nothing is ever renamed onto one
                raise ConfigError(f"{self.final}: a mount point, which no directory can become", hint="name a directory below it")
            return False
        wrong = [f for f in self.order.files if sizes.get(f.under) != f.size]
        if wrong:
            raise self._partial(wrong, sizes.get(wrong[0].under))
        return True

    def _partial(self, wrong: Sequence[Wanted], have: int | None) -> ConfigError:
        """Left by a trainer that was killed, another tool's copy, or a pull of less; ``have``: bytes of the first that is wrong."""
        first = wrong[0]
        found = f"{first.under} has {have} bytes, {first.size} wanted" if have is not None else f"{first.under} is missing"
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        count = f"{len(wrong)} of {len(self.order.files)} files"
        return ConfigError(f"{self.final}: there already, but {count} are not as wanted: {found}{more}", hint=_WHOLE)

    def differs(self, wanted: Wanted) -> ConfigError:
        """What lies there has other bytes."""
        return ConfigError(f"{self.final}: there already, {wanted.under} with other bytes", hint=_NEVER)

    def left(self) -> dict[str, int]:
        """What an earlier try has left whole, by names and sizes."""
        if not self.work.is_dir() or self.work.is_symlink():
            return {}
        sizes = self._sizes(self.work)
        return {f.under: f.size for f in self.order.files if sizes.get(f.under) == f.size}

    @contextlib.contextmanager
    def begun(self) -> Iterator[PosixStore]:
        """The directory to bring the files to, which nobody else brings any to meanwhile."""
        with _told(self.destination):
            self.destination.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                self.work.mkdir()
            at = os.open(self.work, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            _lock(at, self.work)
            self._open = beneath.held(at, str(self.work))
            yield PosixStore(str(self.work), at=at)  # who owns the directory above may put another in its place
        finally:
            self._open = str(self.work)
            beneath.let_go(at)

    def check_room(self) -> None:
        """Raises StoreError if the rest does not fit; what an earlier try has left takes no more room."""
        with _told(self.destination):
            held = sum(found.st_blocks * 512 for _, found in beneath.walk(self._open, "", _nothing))
            disk = os.statvfs(self._open)
        wanted, free = self.order.size - held, disk.f_bavail * disk.f_frsize
        if wanted > free:
            raise StoreError(
                f"{self.destination}: {show_size(free)} are free, {show_size(wanted)} wanted",
                hint="make room, or name a directory elsewhere",
            )

    def become(self) -> None:
        """Every file is there: let it have its times and its name."""
        with _told(self.final):
            self._clear()
            _date(Path(self._open), self.order.times)
            self.work.rename(self.final)

    def point(self) -> tuple[str, ...]:
        """Let its name be durable, also one that a pull which was killed has given; then write what names the newest checkpoint, where that says something else.

        The names of what was written.
        """
        with _told(self.final):
            _sync(self.destination)
        store, written = PosixStore(str(self.destination)), []
        for name, content in self.order.pointers.items():
            path = self.destination / name
            if path.is_symlink() or not path.is_file() or path.read_bytes() != content:
                store.write(
                    name, [content], About(len(content), f"pull {name} {content!r}")
                )  # so that a killed one is gone on with
                written.append(name)
        return tuple(written)

    def others(self) -> tuple[str, ...]:
        """Other hidden directories of this checkpoint: tries of other bytes, or of other files."""
        with _told(self.destination):
            found = self.destination.glob(f".{glob.escape(self.order.name)}.pull-*") if self.destination.is_dir() else ()
            return tuple(sorted(str(path) for path in found if path != self.work))

    def _clear(self) -> None:
        """Away with what a killed write has left; raises ConfigError if there is anything that was not brought here."""
        wanted = {f.under for f in self.order.files}
        for name, _ in list(beneath.walk(self._open, "", _nothing)):
            if name not in wanted and not is_unfinished(name.rpartition("/")[2]):
                raise ConfigError(
                    f"{self.work}/{name}: was not brought here by a pull", hint="take the directory away, then try again"
                )
            if name not in wanted:
                beneath.unlink(self._open, name)

    def _sizes(self, directory: Path) -> Mapping[str, int]:
        with _told(directory):
            return {name: found.st_size for name, found in beneath.walk(str(directory), "", is_unfinished)}


def is_whole(directory: Path, wanted: Wanted) -> bool:
    """Whether the file is there with the bytes of its digest; raises StoreError where it cannot be read."""
    assert wanted.digest
    found, buffer = blake3(), memoryview(bytearray(min(PIECE, max(1, wanted.size))))
    with _told(directory):
        try:
            fd = beneath.open_file(str(directory), wanted.under)
        except OSError as e:
            if beneath.is_absence(e):
                return False
            raise
        try:
            if os.fstat(fd).st_size != wanted.size:
                return False
            for at in range(0, wanted.size, PIECE):
                found.update(buffer[: beneath.read_at(fd, at, buffer[: min(PIECE, wanted.size - at)])])
        finally:
            beneath.let_go(fd)
    return found.hexdigest() == wanted.digest.digest


def _date(root: Path, times: Mapping[str, int]) -> None:
    """Files' own times; a directory's is that of its newest file.  Raises OSError."""
    newest: dict[str, int] = {}
    for path, time in times.items():
        os.utime(root / path, ns=(time, time), follow_symlinks=False)
        for above in _above(path):
            newest[above] = max(time, newest.get(above, time))
    for directory in sorted(newest, key=lambda d: -d.count("/") - bool(d)):
        os.utime(root / directory, ns=(newest[directory], newest[directory]))
        _sync(root / directory)


def _above(path: str) -> Collection[str]:
    parts = path.split("/")[:-1]
    return ["/".join(parts[:n]) for n in range(len(parts) + 1)]


def _lock(at: int, work: Path) -> None:
    try:
        fcntl.flock(at, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"{work}: another pull is at work there", hint="wait for it, or end it") from None
    except OSError:
        return  # a file system without locks: two pulls at once both bring what is missing, and the second one's last step fails
    found = os.fstat(at)
    try:
        is_same = os.path.samestat(found, work.lstat())
    except FileNotFoundError:
        is_same = False
    if not is_same or (found.st_uid != os.geteuid() and found.st_uid != _owner(work.parent)):
        raise ConfigError(f"{work}: another pull has just ended, or another user's directory", hint="try again")


def _owner(directory: Path) -> int:
    """Whose a directory is that we make there: a server that squashes users, or a mount for one user, gives it to another."""
    with _told(directory), tempfile.TemporaryDirectory(prefix=".ckptsync-", dir=directory) as made:
        return Path(made).stat().st_uid


def _nothing(_part: str) -> bool:
    return False


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # EINVAL of file systems that have no such thing to do
            os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _told(place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        why = f"{e.filename or place}: {(e.strerror or str(e)).lower()}"
        if e.errno in (errno.ENOTDIR, errno.ELOOP, errno.EEXIST, errno.ENOTEMPTY):
            raise ConfigError(why, hint="is the path right?  Nothing is ever overwritten, and no link followed below it") from e
        raise StoreError(why, hint="is there room, and permission to write?") from e
