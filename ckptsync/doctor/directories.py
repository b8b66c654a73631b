"""Checks of directories on this node: whether the worker can pin and read what the trainer writes there, room, mounts.

Rights are tried with small files, which are removed again.  Root tries nothing in another user's directory: `ckptsync.doctor.report` becomes the user who
trains before it calls these checks.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptsync.doctor.facts import STORAGE, Finding, fail, warn
from ckptsync.errors import CkptsyncError
from ckptsync.mounts import is_mounted, mount_of
from ckptsync.scan import Found, found, spots
from ckptsync.spool.folders import link
from ckptsync.units import show_duration, show_size
from ckptsync.walk import OURS, UnsafeSpool, open_spool, opened_parent
from ckptsync.watch import is_blind

FSTAB = Path("/etc/fstab")
PATIENCE = 20.0  # seconds: a healthy file server answers within one
_LATEST = 60.0  # seconds for which NFS may hide new files by its own defaults
_LEAST, _NOTHING = 256 << 20, 1 << 20  # bytes: less than any checkpoint takes; as good as none
_MOST_FILES = 2000  # of a checkpoint are opened
_WEIGHT, _STATES = (
    2,
    12,
)  # bytes a parameter: weights in bfloat16; master weights and Adam's two moments in float32 (ZeRO, arXiv 1910.02054, 3.1)
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_TRIAL = ".ckptsync-doctor-"
_STATVFS = "import os, sys\ntry:\n    os.statvfs(sys.argv[1])\nexcept OSError:\n    pass"
_PINS = "a pin is a hard link: without it rotation removes the checkpoint before it is uploaded"
_AS_TRAINER = "run the worker as the user who trains (`ckptsync help service`)"


def silent(paths: Iterable[Path]) -> list[Path]:
    """Return the paths whose file system does not answer within `PATIENCE`, as a hard NFS mount does whose server is dead.

    A child process asks for each: a process that asks waits for ever, and cannot always be killed.
    """
    until, null = time.monotonic() + PATIENCE, subprocess.DEVNULL
    children = {
        path: subprocess.Popen([sys.executable, "-I", "-S", "-c", _STATVFS, str(path)], stdin=null, stdout=null, stderr=null)  # noqa: S603 - ourselves
        for path in dict.fromkeys(paths)
    }
    return [path for path, child in children.items() if not _ended(child, until)]


def _ended(child: subprocess.Popen[bytes], until: float) -> bool:
    try:
        child.wait(max(until - time.monotonic(), 0.0))
    except subprocess.TimeoutExpired:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it is left behind, and ends with the mount
            child.wait(0.2)
        return False
    return True


def fixed(path: Path) -> Path:
    """Return the part of a path before its first wildcard."""
    end = next((n for n, part in enumerate(path.parts) if set("*?[") & set(part)), len(path.parts))
    return Path(*path.parts[:end])


def is_directory(path: Path) -> bool:
    """Return whether a path is a directory that this user can reach (``Path.is_dir`` raises where nobody can tell)."""
    try:
        return path.is_dir()
    except OSError:
        return False


def foreign_owner(path: Path) -> int:
    """Return the owner of a directory, or of the nearest one above it, where root asks and it is another user's; else 0."""
    there = next((each for each in (path, *path.parents) if is_directory(each)), None)
    return 0 if os.geteuid() or there is None else there.stat().st_uid


def not_tried(path: Path, owner: int, node: str) -> Finding:
    """Return the warning that root tries nothing in another user's directory."""
    what, why = f"is {user_name(owner)}'s, asked by root", "nothing was tried there"
    return warn("asked-as-root", node, path, what, why=why, hint=f"sudo -u {user_name(owner)} ckptsync doctor …")


def user_name(uid: int) -> str:
    """Return a user's name, or the number where there is none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def reason(e: OSError) -> str:
    """Return the system's own words for an error."""
    return (e.strerror or str(e)).lower()


def check_output_dirs(paths: Sequence[Path], node: str, expected: int = 0) -> Iterator[Finding]:
    """Check output directories, there or not.  ``expected``: bytes of a checkpoint, where none is there yet."""
    for path in paths:
        try:
            is_there = path.is_dir()
        except OSError:
            is_there = True  # the check says why it cannot be reached
        if is_there:
            yield from check_output_dir(path, node, expected)
        elif above := next((p for p in path.parents if is_directory(p)), None):
            yield from _check_mounted(path, node)
            yield from check_space(above, None, node, expected)


def check_output_dir(path: Path, node: str, expected: int = 0) -> Iterator[Finding]:
    """Check an output directory that is there."""
    try:
        owner = path.stat().st_uid
    except OSError as e:
        hint = "look at the directories above it"
        yield fail("output-unreadable", node, path, reason(e), why="the worker sees nothing of this run", hint=hint, code=STORAGE)
        return
    if os.geteuid() == 0 and owner:
        yield not_tried(path, owner, node)
        return
    newest = newest_checkpoint(path)
    yield from check_mount(path, node)
    if is_blind(kind := mount_of(str(path)).kind):
        why = "the worker scans every few seconds instead of at once: a checkpoint that rotates sooner is lost without the hook"
        hint = "use the hook (`ckptsync help hook`), or a local disk"
        yield warn("no-events", node, path, f"on {kind}, which tells no events", why=why, hint=hint, code=STORAGE)
    refused = [*_check_pins(path, newest, node), *_check_readable(path, newest, node)]
    yield from refused
    if newest and not refused:
        yield from _check_linkable(path, newest, node)
    yield from check_space(path, newest, node, expected)


def newest_checkpoint(path: Path) -> Found | None:
    """Return the newest checkpoint that has files."""
    try:
        scanned = [found(spot) for spot in spots(path)]
    except CkptsyncError:
        return None  # `_check_readable` says what cannot be read
    return max((one for one in scanned if one.files), key=lambda one: max(file.mtime for file in one.files), default=None)


def size_of(checkpoint: Found) -> int:
    """Return the bytes of all files of a checkpoint."""
    return sum(file.size for file in checkpoint.files)


@contextlib.contextmanager
def _opened_spool(path: Path) -> Iterator[tuple[int, int]]:
    """Open an output directory and its spool; a spool that was not there is removed again.  Raises OSError."""
    home = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    is_made = False
    try:
        if os.geteuid() == 0 and os.fstat(home).st_uid:
            raise PermissionError(errno.EACCES, "became another user's meanwhile", str(path))
        with contextlib.suppress(FileExistsError):
            os.mkdir(OURS, 0o700, dir_fd=home)
            is_made = True
        spool = open_spool(home, path)
        try:
            yield home, spool
        finally:
            os.close(spool)
    finally:
        if is_made:
            with contextlib.suppress(OSError):  # a worker has begun to use it
                os.rmdir(OURS, dir_fd=home)
        os.close(home)


def _check_pins(path: Path, newest: Found | None, node: str) -> Iterator[Finding]:
    """Link a new file of the output directory into its spool, as a pin is made."""
    trial, made_by = f"{_TRIAL}{secrets.token_hex(8)}", None
    try:
        with _opened_spool(path) as (home, spool):
            made = os.open(trial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=home)
            try:
                made_by = os.fstat(made).st_uid
                os.link(trial, trial, src_dir_fd=home, dst_dir_fd=spool, follow_symlinks=False)
                os.unlink(trial, dir_fd=spool)
            finally:
                os.close(made)
                with contextlib.suppress(OSError):  # another user who may write there removed it
                    os.unlink(trial, dir_fd=home)
    except UnsafeSpool as e:
        yield fail("output-not-writable", node, path, str(e), why="there is no place for pins and markers", hint=e.hint)
    except OSError as e:
        yield _pin_refused(path, e, node, is_linked=made_by is not None)
    yield from _check_owner(path, newest, made_by, node)


def _pin_refused(path: Path, e: OSError, node: str, *, is_linked: bool) -> Finding:
    if is_linked and e.errno == errno.EXDEV:
        what = f"{OURS} is another file system, or another mount of it"
        hint = f"remove the mount or link {path / OURS}; of a service's view: ReadWritePaths above both"
        return fail("links-cross", node, path, what, why=_PINS, hint=hint, code=STORAGE)
    if is_linked and e.errno in _NO_LINKS:
        hint = "use a file system that has them (ext4, xfs, btrfs, NFS)"
        return fail("no-links", node, path, f"hard links are refused: {reason(e)}", why=_PINS, hint=hint, code=STORAGE)
    if e.errno in (errno.ENOSPC, errno.EDQUOT):
        return _full(path, reason(e), node)
    hint = "mount it for writing" if e.errno == errno.EROFS else _AS_TRAINER
    what, why = f"nothing can be written: {reason(e)}", "there is no place for pins and markers"
    return fail("output-not-writable", node, path, what, why=why, hint=hint)


def _check_owner(path: Path, newest: Found | None, made_by: int | None, node: str) -> Iterator[Finding]:
    """Check, before the first save, that this user trains there.  ``made_by``: the owner of a file made there, which servers and mounts may decide."""
    owner, uid = path.stat().st_uid, os.geteuid()
    if newest or owner in (uid, made_by) or (not owner and made_by is not None):  # root's, where all may write, is anybody's
        return
    why = (
        "safetensors 0.8 and newer write files that only their owner reads (0600), and fs.protected_hardlinks refuses links to them"
    )
    yield fail("other-user", node, path, f"is {user_name(owner)}'s, the worker is {user_name(uid)}", why=why, hint=_AS_TRAINER)


def _check_readable(path: Path, newest: Found | None, node: str) -> Iterator[Finding]:
    """Open the files of the newest checkpoint; without one, list the directory."""
    if newest is None:
        if not os.access(path, os.R_OK):
            yield fail(
                "output-unreadable", node, path, "cannot be listed", why="the worker sees nothing of this run", hint=_AS_TRAINER
            )
        return
    for file in newest.files[:_MOST_FILES]:
        one = newest.path / file.path
        try:
            os.close(os.open(one, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK))
        except FileNotFoundError:
            continue  # rotated meanwhile
        except OSError as e:
            info = one.lstat()
            what = f"{reason(e)}: mode {info.st_mode & 0o777:04o}, of {user_name(info.st_uid)}"
            yield fail("unreadable", node, one, what, why="it cannot be uploaded", hint=_AS_TRAINER)
            return


def _check_linkable(path: Path, newest: Found, node: str) -> Iterator[Finding]:
    """Link a file of the newest checkpoint into the spool."""
    file, trial = newest.files[0].path, f"{_TRIAL}{secrets.token_hex(8)}"
    try:
        with _opened_spool(path) as (_, spool), opened_parent(newest.path, file) as (above, name):
            link(above, name, spool, trial)
            os.unlink(trial, dir_fd=spool)
    except PermissionError as e:
        why = f"{_PINS}; fs.protected_hardlinks refuses links to files of others that one may not write"
        yield fail("unlinkable", node, newest.path / file, f"may not be linked: {reason(e)}", why=why, hint=_AS_TRAINER)
    except (OSError, CkptsyncError):
        return  # `_check_pins` said what is wrong, or it was rotated meanwhile


def check_mount(path: Path, node: str) -> Iterator[Finding]:
    """Check that a directory's file system is mounted, and how; also for a store's directory."""
    yield from _check_mounted(path, node)
    mount = mount_of(str(path))
    for option in ("soft", "softerr"):
        if option in mount.options:
            why = "when the server does not answer in time, writes are given up: a file closed without an error may lack bytes (nfs(5))"
            yield warn("nfs-soft", node, path, f"{mount.kind}, mounted {option}", why=why, hint="mount it hard", code=STORAGE)
    if mount.late > _LATEST:
        what = f"{mount.kind}: files that other machines write may appear {show_duration(mount.late)} later"
        why = "for so long ckptsync waits before it calls a file missing"
        yield warn("late-names", node, path, what, why=why, hint="mount it with actimeo=60 or less", code=STORAGE)


def _check_mounted(path: Path, node: str) -> Iterator[Finding]:
    """Check that every mount point of fstab(5) on the way to a path is mounted."""
    real = Path(os.path.realpath(path))
    for point, options in sorted(_fstab()):
        if point in {path, *path.parents, real, *real.parents} and not is_mounted(str(point)):
            why = "what is written goes to this machine's own disk: no other node sees it, and the mount will hide it"
            what = f"{point} is in {FSTAB}, and nothing is mounted there"
            yield (warn if "noauto" in options else fail)(
                "not-mounted", node, path, what, why=why, hint=f"mount {point}", code=STORAGE
            )


def _fstab() -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yield mount points below the root, and their options."""
    try:
        lines = FSTAB.read_text("utf-8", "replace").splitlines()
    except OSError:
        return
    for field in (line.split() for line in lines if line.strip() and not line.lstrip().startswith("#")):
        if len(field) > 2 and field[1].startswith("/") and field[1] != "/":
            point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), field[1])
            yield Path(point), tuple("".join(field[3:4]).split(","))


def check_space(path: Path, newest: Found | None, node: str, expected: int = 0) -> Iterator[Finding]:
    """Check that there is room for two checkpoints as large as the newest, or as ``expected``."""
    try:
        there = os.statvfs(path)
    except OSError:
        return  # another check says so
    if not there.f_blocks:
        return  # programs behind FUSE may not tell
    free, size = there.f_bavail * there.f_frsize, size_of(newest) if newest else expected
    if not size and free < _LEAST:
        finding = _full(path, f"{show_size(free)} free", node)
        yield finding if free < _NOTHING else replace(finding, level="warn")
    elif free < 2 * size:
        of = f"as {newest.name}" if newest else "by the model's configuration, if all of it is trained"
        finding = _full(path, f"{show_size(free)} free, less than two checkpoints of {show_size(size)} ({of})", node)
        yield finding if newest else replace(finding, level="warn")
    needed = 2 * len(newest.files if newest else ()) + 100
    if there.f_files and there.f_favail < needed:
        why = "the trainer fails in the middle of a save with `No space left on device`, while there are bytes left"
        what, hint = f"{there.f_favail} inodes free, {needed} needed", "remove small files, or make a file system with more"
        yield fail("inodes", node, path, what, why=why, hint=hint, code=STORAGE)


def _full(path: Path, what: str, node: str) -> Finding:
    why = "a save that does not fit is torn, and the trainer ends with it; rotation removes the old one only afterwards"
    return fail("disk-full", node, path, what, why=why, hint="make room, lower save_total_limit, or save elsewhere", code=STORAGE)


def checkpoint_size(config: Mapping[str, Any]) -> int:
    """Return the bytes of a checkpoint with all optimizer states, by a model's config.json; 0 where it does not say enough."""
    return parameters(config) * (_WEIGHT + _STATES)


def parameters(config: Mapping[str, Any]) -> int:
    """Return how many parameters a common decoder (grouped attention, gated MLP, experts) has, without norms and biases; 0 for other models."""
    config = config["text_config"] if isinstance(config.get("text_config"), Mapping) else config
    hidden, layers, vocabulary = (_number(config, key) for key in ("hidden_size", "num_hidden_layers", "vocab_size"))
    heads, inner = _number(config, "num_attention_heads"), _number(config, "intermediate_size")
    if not (hidden and layers and vocabulary and heads and inner):
        return 0
    width = _number(config, "head_dim") or hidden // heads
    groups = _number(config, "num_key_value_heads") or heads
    attention = 2 * hidden * heads * width + 2 * hidden * groups * width
    experts = _number(config, "num_local_experts") or _number(config, "num_experts") or _number(config, "n_routed_experts") or 1
    each = _number(config, "moe_intermediate_size") or inner
    embeddings = vocabulary * hidden * (1 if config.get("tie_word_embeddings") is True else 2)
    return embeddings + layers * (attention + 3 * hidden * each * experts)


def _number(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 40 else 0
