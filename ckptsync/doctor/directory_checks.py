"""Checks of directories on this node: rights to pin and read, free space, mounts.

Modes and ACLs do not say what a user may do, so doctor does what the worker does: it makes, links
and opens small files, and removes them again.  Root tries nothing in another user's directory,
since root has rights that the worker does not have.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ckptsync.checkpoint_dirs import ListedCheckpoint, find_checkpoint_dirs, list_checkpoint
from ckptsync.doctor.findings import STORAGE, Finding, fail, warn
from ckptsync.errors import CkptsyncError, StoreError
from ckptsync.mounts import is_blind, mount_of, unmounted_on_way
from ckptsync.quantities import show_duration, show_size
from ckptsync.spool.safe_files import link
from ckptsync.walk import SPOOL, UnsafeSpool, open_spool, opened_parent

PATIENCE = 20.0  # seconds: a healthy file server answers within one
_LATEST = 60.0  # seconds for which NFS may hide new files by its own defaults
_LEAST, _NOTHING = 256 << 20, 1 << 20  # bytes: less than any checkpoint takes; as good as none
_MOST_FILES = 2000  # of a checkpoint are opened
# a checkpoint beside its weights in 16 bits: master weights and Adam's two moments in float32
# (ZeRO, arXiv 1910.02054, 3.1)
_STATES = 7
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_TRIAL = ".ckptsync-doctor-"
_STATVFS = "import os, sys\ntry:\n    os.statvfs(sys.argv[1])\nexcept OSError:\n    pass"
_PINS = "a pin is a hard link: without it rotation removes the checkpoint before it is uploaded"
_NO_SPOOL = "the worker cannot keep pins and markers"
_UNSEEN = "the worker sees nothing of this run"
_AS_TRAINER = "run the worker as the user who trains (`ckptsync help service`)"


def check_answers(*paths: object) -> None:
    """Raise StoreError if a file system does not answer; wait up to `PATIENCE` s for all together.

    A hard NFS mount never answers once its server is dead, and a process that calls it cannot
    always be killed; so a child process calls statvfs(2) for each path.  A path counts up to its
    first wildcard; an error of statvfs(2) is an answer; arguments that are no paths are ignored.
    """
    fixed_paths = [fixed_part(Path(p).absolute()) for p in paths if isinstance(p, (str, Path))]
    until, null = time.monotonic() + PATIENCE, subprocess.DEVNULL
    children = {
        path: subprocess.Popen(  # noqa: S603
            [sys.executable, "-I", "-S", "-c", _STATVFS, str(path)],
            stdin=null,
            stdout=null,
            stderr=null,
        )
        for path in dict.fromkeys(fixed_paths)
    }
    silent = []
    for path, child in children.items():
        try:
            child.wait(max(until - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:  # noqa: PERF203 - each by itself
            silent.append(str(path))
            child.kill()
            # it is left behind, and ends with the mount
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(0.2)
    if silent:
        what = f"no answer of the file system within {PATIENCE:g} s"
        hint = "check its server; `umount -f -l` removes a mount whose server has gone"
        raise StoreError(f"{', '.join(silent)}: {what}", hint=hint)


def fixed_part(path: Path) -> Path:
    """Return a path's components before the first with a wildcard (``*?[``); all without any."""
    end = next((n for n, part in enumerate(path.parts) if set("*?[") & set(part)), len(path.parts))
    return Path(*path.parts[:end])


def is_directory(path: Path) -> bool:
    """Return whether a path is a directory that this user can reach; never raises OSError."""
    try:
        return path.is_dir()
    except OSError:
        return False


def check_root(path: Path) -> Iterator[Finding]:
    """Yield a warning if this is root and a directory is another user's; then it must not be tried.

    If the directory does not exist, the nearest one above it counts.
    """
    nearest = next((each for each in (path, *path.parents) if is_directory(each)), None)
    owner = nearest.stat().st_uid if nearest and os.geteuid() == 0 else 0
    if owner:
        what = f"is {user_name(owner)}'s, and this is root"
        why = "doctor skipped it: root has rights that the worker does not have"
        hint = f"sudo -u {user_name(owner)} ckptsync doctor …"
        yield warn("asked-as-root", path, what, why=why, hint=hint)


def user_name(uid: int) -> str:
    """Return a user's name, or ``uid N`` if there is none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def reason(e: OSError) -> str:
    """Return the system's text for an error, in lower case."""
    return (e.strerror or str(e)).lower()


def check_output_dirs(paths: Sequence[Path], expected: int = 0) -> Iterator[Finding]:
    """Yield the findings on output directories; of a missing one, on its mount and free space.

    ``expected``: bytes of a checkpoint, used while none is saved; 0 if unknown.
    """
    for path in paths:
        try:
            exists = path.is_dir()
        except OSError:
            exists = True  # the check says why it cannot be reached
        if exists:
            yield from check_output_dir(path, expected)
        elif above := next((p for p in path.parents if is_directory(p)), None):
            yield from _check_mounted(path)
            yield from check_space(above, None, expected)


def check_output_dir(path: Path, expected: int = 0) -> Iterator[Finding]:
    """Yield the findings on an output directory that exists; if `check_root` warns, only that.

    Checks the mount, events, rights to pin and read, and space; makes and removes small files.
    Ends if the path cannot be reached.
    """
    try:
        path.stat()
    except OSError as e:
        hint = "check the directories above it"
        yield fail("output-unreadable", path, reason(e), why=_UNSEEN, hint=hint, code=STORAGE)
        return
    if refused := list(check_root(path)):
        yield from refused
        return
    newest = newest_checkpoint(path)
    yield from check_mount(path)
    if is_blind(kind := mount_of(str(path)).kind):
        what = f"on {kind}, which sends no events"
        why = "the worker only polls: a checkpoint that rotates sooner is lost without the hook"
        hint = "use the hook (`ckptsync help hook`), or a local disk"
        yield warn("no-events", path, what, why=why, hint=hint, code=STORAGE)
    refused = [*_check_pins(path, newest), *_check_readable(path, newest)]
    yield from refused
    if newest and not refused:
        yield from _check_linkable(path, newest)
    yield from check_space(path, newest, expected)


def newest_checkpoint(path: Path) -> ListedCheckpoint | None:
    """Return the checkpoint with the newest file; None if there is none or it cannot be listed."""
    try:
        listed = [list_checkpoint(directory) for directory in find_checkpoint_dirs(path)]
    except CkptsyncError:
        return None  # `_check_readable` says what cannot be read
    having = [checkpoint for checkpoint in listed if checkpoint.files]
    return max(having, key=lambda checkpoint: max(f.mtime for f in checkpoint.files), default=None)


def size_of(checkpoint: ListedCheckpoint) -> int:
    """Return the bytes of all files of a checkpoint."""
    return sum(file.size for file in checkpoint.files)


def expected_size(model: str, training: Mapping[str, str]) -> int:
    """Return the bytes of a checkpoint of the whole model with its optimizer; 0 if unknown.

    That is `_STATES` times the safetensors directly in ``model``.  Unknown if they cannot be found,
    or ``finetuning_type`` in ``training`` is not full; LLaMA-Factory's default is lora.
    """
    # LLaMA-Factory's default is lora
    default = "full" if "model_name_or_path" not in training else "lora"
    if not model or training.get("finetuning_type", default) != "full":
        return 0
    try:
        return _STATES * sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))
    except OSError:
        return 0


@contextlib.contextmanager
def _opened_spool(path: Path) -> Iterator[tuple[int, int]]:
    """Open an output directory and its spool, and close both at the end of the block.

    A spool that did not exist is made, and removed again.  Raises OSError or UnsafeSpool.
    """
    home = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    is_made = False
    try:
        if os.geteuid() == 0 and os.fstat(home).st_uid:
            raise PermissionError(errno.EACCES, "became another user's meanwhile", str(path))
        with contextlib.suppress(FileExistsError):
            os.mkdir(SPOOL, 0o700, dir_fd=home)
            is_made = True
        spool = open_spool(home, path)
        try:
            yield home, spool
        finally:
            os.close(spool)
    finally:
        if is_made:
            with contextlib.suppress(OSError):  # a worker has begun to use it
                os.rmdir(SPOOL, dir_fd=home)
        os.close(home)


def _check_pins(path: Path, newest: ListedCheckpoint | None) -> Iterator[Finding]:
    """Yield a failure if a new file of the output directory cannot be linked into its spool.

    Makes and removes the file, its link, and the spool if it is missing; an OSError of these is the
    failure.  Then yields what `_check_owner` yields.
    """
    trial, made_by = f"{_TRIAL}{secrets.token_hex(8)}", None
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with _opened_spool(path) as (home, spool):
            file = os.open(trial, flags, 0o600, dir_fd=home)
            try:
                made_by = os.fstat(file).st_uid
                os.link(trial, trial, src_dir_fd=home, dst_dir_fd=spool, follow_symlinks=False)
                os.unlink(trial, dir_fd=spool)
            finally:
                os.close(file)
                with contextlib.suppress(OSError):  # another user who may write there removed it
                    os.unlink(trial, dir_fd=home)
    except UnsafeSpool as e:
        yield fail("output-not-writable", path, str(e), why=_NO_SPOOL, hint=e.hint)
    except OSError as e:
        yield _pin_refused(path, e, is_linked=made_by is not None)
    yield from _check_owner(path, newest, made_by)


def _pin_refused(path: Path, e: OSError, *, is_linked: bool) -> Finding:
    """Return the failure for an error of the trial: links-cross, no-links, disk-full or the rest.

    ``is_linked``: the file was made, so the link failed.
    """
    if is_linked and e.errno == errno.EXDEV:
        what = f"{SPOOL} is another file system, or another mount of it"
        hint = (
            f"remove the mount or link {path / SPOOL}; in a unit, set ReadWritePaths= to a"
            " directory that contains both the checkpoints and the spool"
        )
        return fail("links-cross", path, what, why=_PINS, hint=hint, code=STORAGE)
    if is_linked and e.errno in _NO_LINKS:
        what = f"hard links are refused: {reason(e)}"
        hint = "use a file system that has them (ext4, xfs, btrfs, NFS)"
        return fail("no-links", path, what, why=_PINS, hint=hint, code=STORAGE)
    if e.errno in (errno.ENOSPC, errno.EDQUOT):
        return _full(path, reason(e))
    hint = "mount it for writing" if e.errno == errno.EROFS else _AS_TRAINER
    what = f"nothing can be written: {reason(e)}"
    return fail("output-not-writable", path, what, why=_NO_SPOOL, hint=hint)


def _check_owner(
    path: Path, newest: ListedCheckpoint | None, made_by: int | None
) -> Iterator[Finding]:
    """Yield a failure if the output directory is another user's; nothing after the first save.

    Root's counts as ours if a file could be made there.  ``made_by``: the owner of the trial file,
    which a server or a mount may decide; None if none could be made.  Raises OSError.
    """
    owner, uid = path.stat().st_uid, os.geteuid()
    # root's, where all may write, is anybody's
    if newest or owner in (uid, made_by) or (not owner and made_by is not None):
        return
    what = f"is {user_name(owner)}'s, the worker is {user_name(uid)}"
    why = "safetensors 0.8 writes mode 0600: another user can neither read nor link such files"
    yield fail("other-user", path, what, why=why, hint=_AS_TRAINER)


def _check_readable(path: Path, newest: ListedCheckpoint | None) -> Iterator[Finding]:
    """Yield a failure if a file of the newest checkpoint cannot be opened; one that is gone passes.

    Tries `_MOST_FILES`, up to the first failure. Without a checkpoint, yields one for a path
    without read permission.
    """
    if newest is None and not os.access(path, os.R_OK):
        yield fail("output-unreadable", path, "cannot be listed", why=_UNSEEN, hint=_AS_TRAINER)
    checkpoint, files = (newest.path, newest.files) if newest else (path, ())
    for file in files[:_MOST_FILES]:
        full_path = checkpoint / file.path
        try:
            os.close(os.open(full_path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK))
        except FileNotFoundError:
            continue  # rotated meanwhile
        except OSError as e:
            info = full_path.lstat()
            what = f"{reason(e)}: mode {info.st_mode & 0o777:04o}, of {user_name(info.st_uid)}"
            yield fail("unreadable", full_path, what, why="it cannot be uploaded", hint=_AS_TRAINER)
            return


def _check_linkable(path: Path, newest: ListedCheckpoint) -> Iterator[Finding]:
    """Yield a failure if this user may not link the newest checkpoint's first file into the spool.

    The link is removed again.  Other errors are those of `_check_pins`, and yield nothing.
    """
    file, trial = newest.files[0].path, f"{_TRIAL}{secrets.token_hex(8)}"
    try:
        with _opened_spool(path) as (_, spool), opened_parent(newest.path, file) as (above, name):
            link(above, name, spool, trial)
            os.unlink(trial, dir_fd=spool)
    except PermissionError as e:
        what = f"may not be linked: {reason(e)} (fs.protected_hardlinks: not this user's file)"
        yield fail("unlinkable", newest.path / file, what, why=_PINS, hint=_AS_TRAINER)
    except (OSError, CkptsyncError):
        return  # `_check_pins` said what is wrong, or it was rotated meanwhile


def check_mount(path: Path) -> Iterator[Finding]:
    """Yield a warning if a directory's file system is mounted soft, or caches attributes for long.

    Also yields what `_check_mounted` yields.
    """
    yield from _check_mounted(path)
    mount = mount_of(str(path))
    for option in {"soft", "softerr"} & set(mount.options):
        what = f"{mount.kind}, mounted {option}"
        why = "a file closed without an error may lack bytes if the server is late (nfs(5))"
        yield warn("nfs-soft", path, what, why=why, hint="mount it hard", code=STORAGE)
    if mount.late > _LATEST:
        what = f"{mount.kind} may show other machines' files {show_duration(mount.late)} later"
        why = "ckptsync waits that long before it reports a file as missing"
        hint = "mount it with actimeo=60 or less"
        yield warn("late-names", path, what, why=why, hint=hint, code=STORAGE)


def _check_mounted(path: Path) -> Iterator[Finding]:
    """Yield a failure if a mount point of fstab(5) or a unit on the way to a path is not mounted.

    It is only a warning if the mount has the option noauto.
    """
    for mount in unmounted_on_way(path):
        why = "files go to this machine's own disk, and the mount will hide them"
        level = warn if "noauto" in mount.options else fail
        hint = f"mount {mount.point}"
        yield level("not-mounted", path, str(mount), why=why, hint=hint, code=STORAGE)


def check_space(
    path: Path, newest: ListedCheckpoint | None, expected: int = 0
) -> Iterator[Finding]:
    """Yield a finding if two checkpoints as large as the newest, or as ``expected``, do not fit.

    A failure for the newest's size, a warning for ``expected``.  If neither is known, a warning
    below `_LEAST` bytes, a failure below `_NOTHING`.  Then a failure if there are too few inodes.
    Nothing if statvfs(2) fails or gives no size; on a dead mount it waits (see `check_answers`).
    """
    try:
        room = os.statvfs(path)
    except OSError:
        return  # another check says so
    if not room.f_blocks:
        return  # programs behind FUSE may not tell
    free, size = room.f_bavail * room.f_frsize, size_of(newest) if newest else expected
    if not size and free < _LEAST:
        yield _full(path, f"{show_size(free)} free", is_certain=free < _NOTHING)
    elif free < 2 * size:
        origin = (
            f"as {newest.name}" if newest else "7 times the model's weights, if all are trained"
        )
        what = f"{show_size(free)} free, less than two checkpoints of {show_size(size)} ({origin})"
        yield _full(path, what, is_certain=newest is not None)
    needed = 2 * len(newest.files if newest else ()) + 100
    if room.f_files and room.f_favail < needed:
        what = f"{room.f_favail} inodes free, {needed} needed"
        why = "the trainer fails in a save with `No space left on device`, with bytes left"
        hint = "remove small files, or make a file system with more"
        yield fail("inodes", path, what, why=why, hint=hint, code=STORAGE)


def _full(path: Path, what: str, *, is_certain: bool = True) -> Finding:
    """Return the finding of a full disk: a failure, or a warning if it is not certain."""
    why = "a save that does not fit is torn, and the trainer ends; rotation makes room only later"
    hint = "make room, lower save_total_limit, or save elsewhere"
    level = fail if is_certain else warn
    return level("disk-full", path, what, why=why, hint=hint, code=STORAGE)
