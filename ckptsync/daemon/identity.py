"""Which process this is, so that a heartbeat of this machine can be asked whether its process lives."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path

from ckptsync import __version__
from ckptsync.fleet.heartbeat import Heartbeat


def heartbeat(node: str, roles: tuple[str, ...]) -> Heartbeat:
    """Of this process, before its first beat."""
    pid = os.getpid()
    return Heartbeat(node, secrets.token_hex(8), machine(), pid, began(pid), time.time(), roles, __version__)


def machine() -> str:
    """One boot of one machine (and this container's processes), or the empty string where the system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def began(pid: int) -> str:
    """When a process began, in the system's own unit; empty if there is no such process (or no way to know).

    One that is dead and only waits for its parent to notice (first processes of containers may never do) is no process any more.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return ""
    fields = stat.rpartition(")")[2].split()
    return "" if fields[0] in ("Z", "X") else fields[19]


def is_running(other: Heartbeat) -> bool | None:
    """Whether the process of a heartbeat lives; ``None`` if it is of another machine.  This very process is no other."""
    if not machine() or other.machine != machine():
        return None
    return other.pid != os.getpid() and began(other.pid) == other.began != ""
