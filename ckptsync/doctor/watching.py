"""Inotify's limits, which are of the user, or the container, and not of a process."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from ckptsync.doctor.findings import Finding

_WHY = "the worker looks every few seconds instead of at once: a checkpoint that rotates sooner is lost without the hook"
_LIMITS = Path("/proc/sys/fs/inotify")
_IN_CREATE = 0x100


def short(node: str, paths: Iterable[Path]) -> Iterator[Finding]:
    """Whether one more instance, and a watch for each directory below ``paths``, can be had now."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "inotify_init1"):
        return  # no Linux
    fd = libc.inotify_init1(os.O_CLOEXEC)
    if fd < 0:
        if ctypes.get_errno() in (errno.EMFILE, errno.ENFILE):
            yield _warn(node, "max_user_instances", "all are in use")
        return
    try:
        for directory in _directories(paths):
            if libc.inotify_add_watch(fd, os.fsencode(directory), _IN_CREATE) < 0 and ctypes.get_errno() == errno.ENOSPC:
                yield _warn(node, "max_user_watches", f"all are in use at {directory}")
                return
    finally:
        os.close(fd)


def _directories(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        for folder, inner, _ in os.walk(path):
            inner[:] = [name for name in inner if not name.startswith(".")]
            yield Path(folder)


def _warn(node: str, name: str, what: str) -> Finding:
    limit = _limit(name)
    hint = f"sysctl fs.inotify.{name}={max(2 * limit, 1024)}, in /etc/sysctl.d to stay"
    return Finding("warn", "inotify", (node,), f"fs.inotify.{name}", f"{what} (the limit is {limit})", _WHY, hint)


def _limit(name: str) -> int:
    try:
        return int((_LIMITS / name).read_text("ascii"))
    except (OSError, ValueError):
        return 0  # the system does not tell
