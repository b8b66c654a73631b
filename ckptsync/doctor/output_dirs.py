"""Output directories: whether the worker can pin and upload what the trainer writes there, in time, and whether there is room for more."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ckptsync.doctor import mounting, probe
from ckptsync.doctor.asking import Asked, fail, user, warn, words
from ckptsync.doctor.findings import STORAGE, Finding
from ckptsync.errors import CkptsyncError
from ckptsync.scan import Found, found, spots
from ckptsync.spool.folders import link
from ckptsync.stores.timetable import DAY, Timetable
from ckptsync.units import show_duration, show_size
from ckptsync.walk import OURS, UnsafeSpool, open_spool, opened_parent

_PINS = "a pin is a hard link: without it rotation takes the checkpoint before it is sent"
_AS_TRAINER = "run the worker as the user who trains (`ckptsync help service`)"
_LEAST = 256 << 20  # bytes that any checkpoint takes, where nothing is known
_NOTHING = 1 << 20  # bytes that are as good as none
_LOOKED_AT = 2000  # files of a checkpoint
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_WEEK = 7 * DAY
# Bytes of a training state for each parameter: weights in bfloat16; in float32 the master weights and Adam's two moments (ZeRO, arXiv 1910.02054, 3.1)
WEIGHT, STATES = 2, 12
_INOTIFY = Path("/proc/sys/fs/inotify")
_IN_CREATE = 0x100
_POLLS = "the worker polls every few seconds instead: a checkpoint that rotates sooner is lost without the hook"
_TRIAL = ".ckptsync-doctor-"  # begins the name of a file that is tried


def check_output_dir(path: Path, asked: Asked) -> Iterator[Finding]:
    """Check an output directory that is there.  Root lets its owner check it: a child process that has become that user."""
    try:
        trained = path.stat().st_uid or _writer(last_two(path)[0])
    except OSError as e:
        why = "the worker sees nothing of this run"
        yield fail("output-unreadable", asked, path, words(e), why, "look at the directories above it", code=STORAGE)
        return
    if asked.uid or not trained:
        yield from _examined(path, asked)
        return
    what, hint = f"is {user(trained)}'s, asked by root", f"sudo -u {user(trained)} ckptsync doctor …"
    why = "what the worker itself may was tried by a process that had become that user; the rest was asked by root"
    try:
        found = as_user(trained, lambda: _examined(path, replace(asked, uid=trained)))
    except OSError as e:
        found, why = [], f"nothing was tried there: {words(e)}"
    yield warn("asked-as-root", asked, path, what, why, hint)
    yield from found


def as_user(owner: int, work: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """What is found, by the ``owner`` of what is asked about where root asks.  Raises OSError where that user cannot be had."""
    told = probe.as_user(owner, lambda: [asdict(finding) for finding in work()])
    return [Finding(**{**one, "nodes": tuple(one["nodes"])}) for one in told]


def _writer(newest: Found | None) -> int:
    """Who wrote a checkpoint; 0 where nobody did, or it has gone."""
    with contextlib.suppress(OSError):
        return (newest.path / newest.files[0].path).lstat().st_uid if newest else 0
    return 0


def _examined(path: Path, asked: Asked) -> Iterator[Finding]:
    newest, before = last_two(path)
    yield from _of_another(path, newest, asked)
    yield from mounting.unmounted(path, asked)
    yield from mounting.mounted(path, asked)
    yield from mounting.unheard(path, asked)
    refused = [*_links(path, asked), *_files(path, newest, asked)]
    yield from refused
    if newest and not refused:
        yield from _linkable(path, newest, asked)
    yield from check_space(path, newest, asked)
    if newest and before:
        yield from check_rate(newest, before, asked.rate, (asked.node,), str(path))


def _of_another(path: Path, newest: Found | None, asked: Asked) -> Iterator[Finding]:
    """Whose training it is: who wrote the newest checkpoint, whose files are tried then; before the first, whose the directory is, unless it is root's and for all."""
    made = _made(path)
    try:
        owner = (newest.path / newest.files[0].path if newest else path).lstat().st_uid
    except OSError:
        return  # rotated meanwhile
    if owner not in (asked.uid, made) and not newest and (owner or made is None):
        why = "safetensors 0.8 and newer write files that only their owner reads (0600), and fs.protected_hardlinks refuses links to them"
        yield fail("other-user", asked, path, f"is {user(owner)}'s, the worker is {user(asked.uid)}", why, _AS_TRAINER)


def _made(path: Path) -> int | None:
    """Whose a file is that is made there, which servers and mounts may decide; ``None`` where none can be made."""
    with contextlib.suppress(OSError), _home(path) as home, _trial(home) as (_, made):
        return made
    return None


@contextlib.contextmanager
def _home(path: Path) -> Iterator[int]:
    """The output directory, open; root goes into no other user's.  Raises OSError."""
    fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if os.geteuid() == 0 and os.fstat(fd).st_uid:
            raise PermissionError(errno.EACCES, "became another user's meanwhile", str(path))
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _trial(home: int) -> Iterator[tuple[str, int]]:
    """A new file's name, and its owner; it goes again."""
    name = f"{_TRIAL}{secrets.token_hex(8)}"
    made = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=home)
    try:
        yield name, os.fstat(made).st_uid
    finally:
        os.close(made)
        with contextlib.suppress(OSError):  # somebody else who may write there took it away
            os.unlink(name, dir_fd=home)


@contextlib.contextmanager
def _spool(home: int, path: Path) -> Iterator[int]:
    """Where pins would be made, open; a spool that is not there yet goes again.  Raises OSError."""
    is_made = False
    with contextlib.suppress(FileExistsError):
        os.mkdir(OURS, 0o700, dir_fd=home)
        is_made = True
    try:
        fd = open_spool(home, path)
        try:
            yield fd
        finally:
            os.close(fd)
    finally:
        if is_made:
            with contextlib.suppress(OSError):  # a worker has begun to use it
                os.rmdir(OURS, dir_fd=home)


def is_there(path: Path) -> bool:
    """Whether it is a directory, or may be one: what cannot be reached is looked at, which says why."""
    try:
        return path.is_dir()
    except OSError:
        return True


def _links(path: Path, asked: Asked) -> Iterator[Finding]:
    """From the directory itself into its spool, as a pin would be made."""
    try:
        with _home(path) as home, _spool(home, path) as spool, _trial(home) as (name, _):
            yield from _linked((home, name), spool, path, asked)
    except UnsafeSpool as e:
        yield fail("output-not-writable", asked, path, str(e), "there is no place for pins and marks", e.hint)
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            yield _full(asked, path, words(e))
            return
        what, why = f"nothing can be written: {words(e)}", "there is no place for pins and marks"
        yield fail("output-not-writable", asked, path, what, why, "mount it for writing" if e.errno == errno.EROFS else _AS_TRAINER)


def _linked(source: tuple[int, str], spool: int, path: Path, asked: Asked) -> Iterator[Finding]:
    above, name = source
    try:
        os.link(name, name, src_dir_fd=above, dst_dir_fd=spool, follow_symlinks=False)
        os.unlink(name, dir_fd=spool)
    except OSError as e:
        if e.errno == errno.EXDEV:
            what = f"{OURS} is another file system, or another mount of it"
            hint = f"remove the mount or link {path / OURS}; of a service's view: ReadWritePaths above both"
            yield fail("links-cross", asked, path, what, _PINS, hint, code=STORAGE)
        elif e.errno in _NO_LINKS:
            hint = "use a file system that has them (ext4, xfs, btrfs, NFS)"
            yield fail("no-links", asked, path, f"hard links are refused: {words(e)}", _PINS, hint, code=STORAGE)
        else:
            raise


def last_two(path: Path) -> tuple[Found | None, Found | None]:
    """The newest checkpoint that has files, and the one before it."""
    try:
        looked = [found(spot) for spot in spots(path)]
    except CkptsyncError:
        return None, None  # `_files` says what cannot be read
    dated = sorted((one for one in looked if one.files), key=lambda one: max(file.mtime for file in one.files))
    return (dated[-1] if dated else None, dated[-2] if len(dated) > 1 else None)


def _files(path: Path, newest: Found | None, asked: Asked) -> Iterator[Finding]:
    """Whether what the trainer wrote last can be read."""
    if newest is None:
        with contextlib.suppress(OSError):
            list(path.iterdir())
            return
        yield fail("output-unreadable", asked, path, "cannot be listed", "the worker sees nothing of this run", _AS_TRAINER)
        return
    for file in newest.files[:_LOOKED_AT]:
        one = newest.path / file.path
        try:
            os.close(os.open(one, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK))
        except FileNotFoundError:
            continue  # rotated meanwhile
        except OSError as e:
            yield fail(
                "unreadable",
                asked,
                one,
                f"{words(e)}: mode {one.lstat().st_mode & 0o777:04o}, of {user(one.lstat().st_uid)}",
                "it cannot be sent",
                _AS_TRAINER,
            )
            return


def _linkable(path: Path, newest: Found, asked: Asked) -> Iterator[Finding]:
    file = newest.files[0].path
    trial = f"{_TRIAL}{secrets.token_hex(8)}"
    try:
        with _home(path) as home, _spool(home, path) as spool, opened_parent(newest.path, file) as (above, name):
            link(above, name, spool, trial)
            os.unlink(trial, dir_fd=spool)
    except PermissionError as e:
        why = "fs.protected_hardlinks refuses links to files of others that one may not write"
        yield fail("unlinkable", asked, newest.path / file, f"may not be linked: {words(e)}", f"{_PINS}; {why}", _AS_TRAINER)
    except (OSError, CkptsyncError):
        return  # `_links` has said what is wrong, or it was rotated meanwhile


def size(checkpoint: Found) -> int:
    """Bytes of all that is there of it."""
    return sum(file.size for file in checkpoint.files)


def check_space(path: Path, newest: Found | None, asked: Asked) -> Iterator[Finding]:
    """Whether there is room for two checkpoints as large as the newest, or as is expected."""
    try:
        there = os.statvfs(path)
    except OSError:
        return  # said by who reads it
    wanted = size(newest) if newest else asked.expected
    free, inodes = there.f_bavail * there.f_frsize, there.f_favail
    if not there.f_blocks:
        return  # programs behind FUSE may not tell
    if not wanted and free < _LEAST:
        finding = _full(asked, path, f"{show_size(free)} free")
        yield finding if free < _NOTHING else replace(finding, level="warn")
    elif free < 2 * wanted:
        of = f"as {newest.name}" if newest else "as its configuration lets expect, if all of the model is trained"
        what = f"{show_size(free)} free, a checkpoint takes {show_size(wanted)} ({of}), room for two is wanted"
        finding = _full(asked, path, what)
        yield finding if newest else replace(finding, level="warn")
    files = len(newest.files) if newest else 0
    if there.f_files and inodes < 2 * files + 100:
        why = "the trainer fails in the middle of a save with `No space left on device`, while there are bytes left"
        yield fail(
            "inodes",
            asked,
            path,
            f"{inodes} inodes free, {2 * files + 100} wanted",
            why,
            "remove small files, or make a file system with more",
            code=STORAGE,
        )


def _full(asked: Asked, path: Path, what: str) -> Finding:
    why = "a save that does not fit is torn, and the trainer ends with it; rotation removes the old one only afterwards"
    return fail("disk-full", asked, path, what, why, "make room, lower save_total_limit, or save elsewhere", code=STORAGE)


def mean_rate(bandwidth: Timetable | None) -> float | None:
    """Return the bytes a second that may be sent, as the mean of a week; ``None`` where some hour has no limit."""
    if bandwidth is None or any(rate is None for rate in bandwidth.rates):
        return None
    ends = (*bandwidth.starts[1:], bandwidth.starts[0] + _WEEK)
    spans = zip(bandwidth.starts, ends, bandwidth.rates, strict=True)
    return sum((end - start) * (rate or 0.0) for start, end, rate in spans) / _WEEK


def check_rate(newest: Found, before: Found, rate: float | None, nodes: tuple[str, ...], path: str) -> Iterator[Finding]:
    """Whether checkpoints can be uploaded as fast as they are saved, by the last two saves and the bandwidth limit."""
    size = sum(file.size for file in newest.files)
    apart = (_saved_at(newest) - _saved_at(before)) / 1e9
    if rate and apart > 0 and size / rate > apart:
        what = f"{show_size(size)} are saved every {show_duration(apart)}, and take {show_duration(size / rate)} at {show_size(int(rate))}/s"
        why = "pins fill the disk; where it is full, the worker drops the oldest ones that are not uploaded"
        hint = "raise limits.bandwidth, save less often, or upload less (worker.send: no-optimizer)"
        yield Finding("warn", "too-slow", nodes, path, what, why, hint, STORAGE)


def _saved_at(one: Found) -> int:
    return max(file.mtime for file in one.files)


def full_checkpoint_size(config: Mapping[str, Any]) -> int:
    """Return the bytes of a checkpoint with all optimizer states, by a model's config.json; 0 where it does not say enough."""
    return parameters(config) * (WEIGHT + STATES)


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


def check_inotify(node: str, paths: Iterable[Path]) -> Iterator[Finding]:
    """Whether the kernel grants one more inotify instance, and a watch for each directory below ``paths``."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "inotify_init1"):
        return  # no Linux
    fd = libc.inotify_init1(os.O_CLOEXEC)
    if fd < 0:
        if ctypes.get_errno() in (errno.EMFILE, errno.ENFILE):
            yield _exhausted(node, "max_user_instances", "all are in use")
        return
    try:
        for directory in _directories(paths):
            if libc.inotify_add_watch(fd, os.fsencode(directory), _IN_CREATE) < 0 and ctypes.get_errno() == errno.ENOSPC:
                yield _exhausted(node, "max_user_watches", f"all are in use at {directory}")
                return
    finally:
        os.close(fd)


def _directories(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        for folder, inner, _ in os.walk(path):
            inner[:] = [name for name in inner if not name.startswith(".")]
            yield Path(folder)


def _exhausted(node: str, name: str, what: str) -> Finding:
    limit = _inotify_limit(name)
    hint = f"sysctl fs.inotify.{name}={max(2 * limit, 1024)}, in /etc/sysctl.d to stay"
    return Finding("warn", "inotify", (node,), f"fs.inotify.{name}", f"{what} (the limit is {limit})", _POLLS, hint)


def _inotify_limit(name: str) -> int:
    try:
        return int((_INOTIFY / name).read_text("ascii"))
    except (OSError, ValueError):
        return 0  # the system does not tell
