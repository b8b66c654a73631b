"""Walk a directory that a trainer is writing to, and open its spool safely.

No link is followed, and a file that vanishes during the walk counts as absent. Other users may be
able to write near a spool (`SPOOL`), and the worker deletes and links in it: so each directory of
it is opened in the one before it, and must be a directory that belongs to this user and that nobody
else can write to.

`walk` lists; `open_directory` and `open_checkpoint_file` open below a checkpoint or a spool.
`ckptsync.safe_open` has what needs no such rules.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ckptsync import safe_open
from ckptsync.errors import ConfigError, Corrupt, Incomplete, StoreError
from ckptsync.safe_names import RECORDS

SPOOL = "_ckptsync"
"""The directory of pins and markers in an output directory."""
# a spool, and the records of a store that somebody copied by hand
_NO_CONTENT = (SPOOL, RECORDS)
DEEPEST = 32  # real checkpoints nest three deep
# seconds: the clocks of nodes that share a directory may differ by as much, and the files of one
# moment may be as far apart
SAME_MOMENT = 5.0
SLOW = 25 << 20  # bytes a second of the slowest copying that is not taken for another save
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
# safetensors 0.8's temporary name, torch DCP's, a download's, and the sentinel of Trainer's
# just-in-time save
_PARTIAL = re.compile(
    r"\.tmp.{6}|\.metadata\.tmp|.+\.part|checkpoint-is-incomplete\.txt", re.DOTALL
)


_WRITE = stat.S_IWGRP | stat.S_IWOTH
_NOBODY = 65534
# by device and user: the owner that a new file of that user gets there
_made_as: dict[tuple[int, int], int] = {}


class UnsafeSpool(ConfigError, PermissionError):
    """A directory of a spool is no directory, belongs to another user, or others may write to it.

    Nothing in it is read, written or removed. It is also an `OSError`, since opening a path raises
    those.
    """

    def __init__(self, path: Path, why: str, *, hint: str) -> None:
        super().__init__(f"{path}: {why}", hint=hint)
        self.errno, self.strerror = errno.EACCES, why

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True, slots=True, order=True)
class Stat:
    """A regular file: its path below the root, size, mtime in ns, and its inode.

    ``ctime`` (ns) and ``links`` are not compared, since every pin changes them; see `was_touched`.
    """

    path: str
    size: int
    mtime: int
    inode: int
    device: int
    ctime: int = field(default=0, compare=False)
    links: int = field(default=0, compare=False)

    def is_file_of(self, file: Stat) -> bool:
        """Return whether both have one inode, or as a reflink the same size and mtime."""
        return (self.inode, self.device) == (file.inode, file.device) or (
            self.size,
            self.mtime,
        ) == (file.size, file.mtime)

    def was_touched(self, later: Stat) -> bool:
        """Return whether somebody changed the file between this state and ``later``.

        Path, size, mtime or inode differ, or ctime, which shows it even if the mtime was set back.
        A name that was linked or removed (a pin, rotation) changes ctime, too: so ctime counts only
        if the number of links is the same.
        """
        return self != later or (self.ctime != later.ctime and self.links == later.links)


@dataclass(frozen=True, slots=True)
class Listing:
    """The content of a directory.

    ``partial``: files that a writer has not finished. ``others``: links, sockets and the like, and
    names that ckptsync reserves.
    """

    files: tuple[Stat, ...] = ()
    partial: tuple[Stat, ...] = ()
    others: tuple[str, ...] = ()


def walk(root: Path, only: Collection[str] | None = None, above: int | None = None) -> Listing:
    """Return everything below ``root``, sorted by name; nothing if ``root`` is gone or a link.

    ``only``: the names directly in ``root`` that are listed, if others there belong to no or
    another checkpoint. ``above``: if ``root`` lies in a spool, the open directory of it that
    ``root`` is in. A spool or `RECORDS` is not entered. Raises ConfigError if something may not be
    read, StoreError if the disk fails, Corrupt if directories are nested deeper than `DEEPEST`,
    UnsafeSpool.
    """
    files: list[Stat] = []
    partial: list[Stat] = []
    non_files: list[str] = []

    def skips(prefix: str, name: str) -> bool:
        """Return whether a name is left out.

        Note it as one of ``non_files`` if ckptsync reserves it.
        """
        if name in _NO_CONTENT and (prefix or only is None or name in only):
            non_files.append(prefix + name)
        return name in _NO_CONTENT or not (prefix or only is None or name in only)

    def failed(error: OSError, path: str) -> None:
        """Return if the path has vanished; raise one of our errors otherwise."""
        _vanished_or_raise(error, f"{root}/{path}".rstrip("/"))

    def enter(above: int, path: str) -> int:
        """Return a descriptor of a directory, examined in a spool.

        Raise Corrupt if it is too deep.
        """
        if path.count("/") >= DEEPEST:
            raise Corrupt(f"{root}/{path}: {DEEPEST + 1} directories deep, {DEEPEST} at most")
        if not is_in_spool:
            return safe_open.open_directory_in(above, path)
        return open_step(above, path.rpartition("/")[2], root / path)

    is_in_spool = bool(split(root)[1])
    try:
        fd = open_directory(root) if above is None else open_step(above, root.name, root)
    except OSError as e:
        _vanished_or_raise(e, root)
        return Listing()
    try:
        for path, info in safe_open.tree(fd, "", skips, failed, enter):
            if stat.S_ISREG(info.st_mode):
                name = path.rpartition("/")[2]
                (partial if _PARTIAL.fullmatch(name) else files).append(_stat(path, info))
            else:
                non_files.append(path)
    finally:
        os.close(fd)
    return Listing(tuple(files), tuple(partial), tuple(sorted(non_files)))


def open_directory(path: Path, parts: Sequence[str] = ()) -> int:
    """Return a descriptor of a directory that is no link, or of the directory ``parts`` below it.

    The caller closes it, and trusts the path up to its last part. In a spool only the output
    directory is trusted: from ``_ckptsync`` on, each step is opened in the one before it and
    examined, and loses write permission for others. Raises OSError; `UnsafeSpool` if a step is not
    this user's alone.
    """
    home, steps = split(path)
    if not steps:
        return safe_open.open_below(str(home), parts, _DIRECTORY)
    above = os.open(home, safe_open.PASS)
    try:
        fd = open_spool(above, home)
    finally:
        os.close(above)
    step_path = home / SPOOL
    for step in (*steps[1:], *parts):
        step_path /= step
        try:
            below = open_step(fd, step, step_path)
        finally:
            os.close(fd)
        fd = below
    return fd


@contextlib.contextmanager
def opened_directory(path: Path) -> Iterator[int]:
    """Open a directory as `open_directory` does; yield the descriptor; close it after the block."""
    fd = open_directory(path)
    try:
        yield fd
    finally:
        os.close(fd)


def split(path: Path) -> tuple[Path, tuple[str, ...]]:
    """Return the output directory, and the steps from there into its spool, ``_ckptsync`` first.

    The last ``_ckptsync`` in the path counts. For a path in no spool, return the path itself and no
    steps.
    """
    parts = path.parts
    if SPOOL not in parts:
        return path, ()
    spool_index = len(parts) - 1 - parts[::-1].index(SPOOL)
    return Path(*parts[:spool_index]), parts[spool_index:]


def open_step(above: int, name: str, path: Path) -> int:
    """Return a descriptor of the directory ``name`` in an open directory of a spool.

    The caller closes it. It is examined as by `_check_alone`. ``path`` is for the error. Raises as
    `open_directory`; UnsafeSpool for ``..``, a link, or what is no directory.
    """
    if name == "..":
        raise UnsafeSpool(
            path,
            "'..' is not allowed in a spool path",
            hint=f"delete the file in {SPOOL} that contains this name, such as a marker",
        )
    try:
        fd = os.open(name, _DIRECTORY, dir_fd=above)
    except OSError as e:
        if e.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        raise UnsafeSpool(
            path,
            "expected a directory, found a symlink or a file",
            hint=f"`ls -ld {path}` shows its owner; then remove it",
        ) from None
    return _examined(fd, path)


def open_spool(above: int, home: Path) -> int:
    """Return a descriptor of the spool in an open output directory.

    It may be a link to a directory elsewhere, if only this user or root can have made it. ``home``
    is for the error. Raises as `open_directory`.
    """
    path, info = home / SPOOL, os.stat(SPOOL, dir_fd=above, follow_symlinks=False)
    if not stat.S_ISLNK(info.st_mode):
        return open_step(above, SPOOL, path)
    around = os.fstat(above)
    # also if it is sticky: others could move a link of ours from elsewhere to here
    if {info.st_uid, around.st_uid} - {os.geteuid(), 0} or around.st_mode & _WRITE:
        raise UnsafeSpool(
            path,
            "a link that somebody else may have made",
            hint=f"remove it, or let nobody else write to {home}",
        )
    return _examined(os.open(SPOOL, os.O_RDONLY | os.O_DIRECTORY, dir_fd=above), path)


def _examined(fd: int, path: Path) -> int:
    """Return ``fd`` itself if the directory is this user's alone.

    Otherwise close it and raise UnsafeSpool.
    """
    try:
        _check_alone(fd, path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_alone(fd: int, path: Path) -> None:
    """Raise UnsafeSpool if the directory is another user's, or others may write there.

    If only its mode lets them, remove that permission instead; on a read-only file system leave it.
    """
    info = os.fstat(fd)
    if not _probe_ownership(fd, info):
        hint = "run the worker as the user who trains; remove the directory if it is nobody's"
        raise UnsafeSpool(
            path, f"belongs to uid {info.st_uid}, and this is uid {os.geteuid()}", hint=hint
        )
    if info.st_mode & _WRITE and not os.fstatvfs(fd).f_flag & os.ST_RDONLY:
        # a service may not set S_ISGID, which directories inherit
        os.fchmod(fd, info.st_mode & 0o777 & ~_WRITE)
        if os.fstat(fd).st_mode & _WRITE:
            raise UnsafeSpool(
                path,
                "others may write there, and its mode cannot be changed",
                hint="mount it with dir_mode=0755",
            )


def is_private_directory(info: os.stat_result, fd: int | None = None) -> bool:
    """Return whether only this user and root can remove or replace names in a directory.

    It belongs to this user or root, and is not open to all. Its group may write, since some systems
    give each user a group and a umask for it. With ``fd`` of the open directory, the file system
    may decide whose files are this user's (NFS's ``all_squash``, mounts with ``uid=``); to find
    out, a file may be created and removed in it.
    """
    is_ours = info.st_uid == 0 or (
        _probe_ownership(fd, info) if fd is not None else info.st_uid == os.geteuid()
    )
    return is_ours and not is_open_to_all(info)


def is_open_to_all(info: os.stat_result) -> bool:
    """Return whether a directory's mode lets every user replace names: o+w, not sticky."""
    return bool(info.st_mode & stat.S_IWOTH) and not info.st_mode & stat.S_ISVTX


def _probe_ownership(fd: int, info: os.stat_result) -> bool:
    """Return whether an open directory is this user's, or of the owner that new files get there.

    Servers and mounts may give files to another owner. To find out, a file is created and removed,
    once for each device and user of this process; False if it cannot be created. Root tries this
    only in a directory of nobody's, as NFS's ``root_squash`` makes them, and creates nothing in
    another user's directory.
    """
    user = os.geteuid()
    if info.st_uid == user or (user == 0 and info.st_uid != _NOBODY):
        return info.st_uid == user
    if (info.st_dev, user) not in _made_as:
        name = f".owner-{secrets.token_hex(8)}"
        try:
            probe = os.open(
                name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=fd
            )
        except OSError:
            return False  # this user cannot write there in any case
        try:
            _made_as[info.st_dev, user] = os.fstat(probe).st_uid
        finally:
            os.close(probe)
            # the owner of the directory may have removed it
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=fd)
    return info.st_uid == _made_as[info.st_dev, user]


def stat_open(fd: int, path: str) -> Stat:
    """Return the state of an open file, with ``path`` as its path. Raises OSError."""
    return _stat(path, os.fstat(fd))


def open_checkpoint_file(root: Path, path: str) -> int:
    """Return a descriptor, for reading, of a regular file below ``root``, with no link followed.

    The caller closes it. Raise Incomplete if it is gone or no regular file, ConfigError if it may
    not be read, StoreError if the disk fails, UnsafeSpool.
    """
    with opened_parent(root, path) as (parent, name):
        return open_in(parent, name, root, path)


def open_in(parent: int, name: str, root: Path, path: str) -> int:
    """Return a descriptor of the regular file ``name`` in an open directory.

    ``root`` and ``path`` are for the error. Raises as `open_checkpoint_file`.
    """
    try:
        return safe_open.open_regular(parent, name)
    except OSError as e:
        _vanished_or_raise(e, f"{root}/{path}")
        raise Incomplete(f"{root}/{path}: gone, or no longer a regular file") from e


@contextlib.contextmanager
def opened_parent(root: Path, path: str) -> Iterator[tuple[int, str]]:
    """Open the directory that holds ``path`` below ``root``, with no link followed.

    Yield its descriptor and the last part of ``path``; close it after the block. Raises as
    `open_checkpoint_file`.
    """
    *folders, name = path.split("/")
    try:
        fd = open_directory(root, folders)
    except OSError as e:
        _vanished_or_raise(e, f"{root}/{path}")
        raise Incomplete(f"{root}/{path}: gone") from e
    try:
        yield fd, name
    finally:
        os.close(fd)


def _stat(path: str, info: os.stat_result) -> Stat:
    """Return the state of a file from what the system says of it."""
    identity = (info.st_size, info.st_mtime_ns, info.st_ino, info.st_dev)
    return Stat(path, *identity, info.st_ctime_ns, info.st_nlink)


def _vanished_or_raise(error: OSError, path: object) -> None:
    """Return if the error says that the path is gone, is a link, or is stale on NFS.

    Raise an UnsafeSpool as it is, a PermissionError as ConfigError, any other as StoreError.
    Trainers delete files (rotation) while ckptsync reads.
    """
    if isinstance(error, UnsafeSpool):
        raise error
    if safe_open.is_absence(error) or error.errno == errno.ESTALE:
        return
    if isinstance(error, PermissionError):
        raise ConfigError(
            f"{path}: may not be read by uid {os.geteuid()}",
            hint="run the worker as the user who trains",
        ) from error
    raise StoreError(
        f"{path}: {error.strerror}", hint="look at the disk that the trainer writes to"
    ) from error
