"""Killing a program at every system call with which it changes something outside of itself: what
strace can do, and how to ask it.
"""

from __future__ import annotations

import random
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_CHANGING = (
    "write pwrite64 writev pwritev pwritev2 sendto sendmsg sendmmsg copy_file_range sendfile"
    " fsync fdatasync sync_file_range ftruncate fallocate ioctl flock fchmod utimensat"
    " link linkat rename renameat renameat2 unlink unlinkat rmdir mkdir mkdirat"
    " openat close connect shutdown"
)
CHANGING = tuple(_CHANGING.split())
STRACE = ("strace", "-f", "-b", "execve", "-qq")
_NAMING = ("access", "faccessat", "faccessat2", "openat")  # in which a mark may be seen
_CALL = re.compile(r"(\d+)\s+(\w+)\((.*)")


@dataclass(frozen=True, slots=True)
class Trap:
    """Some thread's nth call of this name is the last thing that its process does not do."""

    call: str
    nth: int

    def __str__(self) -> str:
        return f"{self.call} {self.nth}"

    def before(self) -> list[str]:
        """Words to put before a command."""
        injected = f"inject={self.call}:signal=SIGKILL:when={self.nth}"
        return [*STRACE, "-o", "/dev/null", "-e", f"trace={self.call}", "-e", injected]


def can_trap() -> bool:
    """Whether strace is here, and allowed to trace."""
    if not shutil.which("strace"):
        return False
    trial = ["strace", "-f", "-o", "/dev/null", "true"]
    return subprocess.run(trial, capture_output=True, check=False).returncode == 0


def traps(command: Sequence[str], mark: str, log: Path, env: Mapping[str, str]) -> list[Trap]:
    """Run the command to its end.

    A trap for each changing call that a thread does after one has named ``mark``.
    """
    words = traced(log, CHANGING + _NAMING)
    done = subprocess.run([*words, *command], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return after(log.read_text(errors="replace").splitlines(), mark)


def traced(log: Path, calls: Sequence[str] = CHANGING) -> list[str]:
    """Words to put before a command, so that strace writes these calls to a file."""
    return [*STRACE, "-s", "4096", "-o", str(log), "-e", f"trace={','.join(calls)}"]


def drawn(log: Path, mark: str, most: int, dice: random.Random) -> tuple[int, list[Trap]]:
    """Return how many traps a trace holds behind the mark, and ``most`` of them (0: all)."""
    seen = after(log.read_text(errors="replace").splitlines(), mark)
    # which changes nothing that the call before has not
    found = [trap for trap in seen if trap.call != "close"]
    return len(found), dice.sample(found, min(most, len(found))) if most else found


def after(lines: Sequence[str], mark: str) -> list[Trap]:
    """The traps that a trace (strace's, with -f) holds behind the mark."""
    seen: Counter[tuple[str, str]] = Counter()
    found: dict[Trap, None] = {}
    touched: set[str] = set()  # descriptors with which something was changed
    is_begun = False
    for line in lines:
        match = _CALL.match(line)
        if not match:
            continue  # the rest of a call that was interrupted by another thread's
        thread, call, rest = match.groups()
        is_begun = is_begun or mark in rest
        seen[thread, call] += 1
        if is_begun and _changes(call, rest, touched):
            found[Trap(call, seen[thread, call])] = None
    assert found, "nothing was changed after the mark"
    return list(found)


def _changes(call: str, rest: str, touched: set[str]) -> bool:
    descriptor = re.split("[,)]", rest)[0]
    if call == "close":
        is_touched = descriptor in touched
        touched.discard(descriptor)
        return is_touched
    if call not in CHANGING or (call == "openat" and "O_CREAT" not in rest):
        return False
    touched.add(descriptor)
    return True
