"""Kill a command with SIGKILL, run it again, and compare: the driver of `make kill`.

A `Victim` is a command with a world that is made anew for each death.  The driver kills it at its
n-th system call that changes something outside of the process (strace injects the signal), for
every n or for some, or at random moments.  After each death the victim says what must not be true
of what is left; then it finishes the work, and says what is not as if nobody had died.
"""

from __future__ import annotations

import contextlib
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tests.campaigns.campaign import CLEAN, kill_session, started

_WORDS = """
write pwrite64 writev pwritev pwritev2 sendto sendmsg sendmmsg copy_file_range sendfile fsync
fdatasync sync_file_range ftruncate fallocate ioctl flock fchmod utimensat link linkat rename
renameat renameat2 unlink unlinkat rmdir mkdir mkdirat openat connect shutdown
"""
CHANGING = frozenset(_WORDS.split())
PATIENCE = 300.0  # seconds for one command on a busy machine
_STRACE = ("strace", "-f", "-b", "execve", "-qq")
_NAMING = ("access", "faccessat", "faccessat2")  # calls that only name a mark
_CALL = re.compile(r"(\d+)\s+(\w+)\((.*)")


@dataclass(frozen=True, slots=True)
class Trap:
    """The n-th call of this name by any thread is the one that the process dies before."""

    call: str
    nth: int

    def __str__(self) -> str:
        return f"{self.call} {self.nth}"

    def before(self) -> list[str]:
        """Return the words to put before a command."""
        injected = f"inject={self.call}:signal=SIGKILL:when={self.nth}"
        return [*_STRACE, "-o", "/dev/null", "-e", f"trace={self.call}", "-e", injected]


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended: its exit code or -SIGKILL, and what it printed."""

    code: int
    out: str
    err: str

    @property
    def is_killed(self) -> bool:
        """Whether SIGKILL ended it."""
        return self.code == -signal.SIGKILL


class Victim(ABC):
    """A command to be killed.

    ``name`` stands before each violation.  ``mark`` is a text that a system call contains just
    before the first change.
    """

    name: str
    mark: str
    environment: Mapping[str, str] = CLEAN

    @abstractmethod
    def prepare(self) -> Sequence[str]:
        """Make a new world, and return the command that works in it."""

    @abstractmethod
    def violations(self, ended: Ended) -> Iterable[str]:
        """Yield what must not be true after a death, and where the command was not killed."""

    @abstractmethod
    def finish(self) -> Iterable[str]:
        """Do the work again to its end; yield what is not as if nobody had died."""


class Driver:
    """The deaths of one victim: ``tally`` counts them, ``wrong`` has each violation."""

    def __init__(self, victim: Victim, dice: random.Random) -> None:
        self._victim, self._dice = victim, dice
        self.tally: Counter[str] = Counter()
        self.wrong: list[str] = []

    def __str__(self) -> str:
        return f"{self._victim.name}: " + ", ".join(f"{n} {what}" for what, n in self.tally.items())

    def kill_at_calls(self, most: int) -> None:
        """Kill once at each changing call, or at ``most`` that are drawn from all of the run."""
        self._run(())  # once without strace, so that all is compiled
        with tempfile.NamedTemporaryFile() as log:
            ended = self._run(traced(Path(log.name)))
            lines = Path(log.name).read_text(errors="replace").splitlines()
        assert ended.code == 0, f"{self._victim.name}: {ended}"
        every = traps(lines, self._victim.mark)
        self.tally["system calls"] = len(every)
        for trap in _drawn(every, most, self._dice):
            self._judge(str(trap), self._run(trap.before()))

    def kill_at_moments(self, count: int) -> None:
        """Kill so many times at a random moment of a life that is as long as an undisturbed one."""
        begun = time.monotonic()
        if count:
            self._run(())
        life = time.monotonic() - begun
        for _ in range(count):
            pause = self._dice.uniform(0.3, 1.1) * life
            with self._started(self._victim.prepare()) as process:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(pause)
                kill_session(process)
                self._judge(f"{pause:.3f} s of {life:.3f}", _ended(process))

    def _run(self, before: Sequence[str]) -> Ended:
        with self._started([*before, *self._victim.prepare()]) as process:
            return _ended(process)

    def _started(self, command: Sequence[str]) -> AbstractContextManager[subprocess.Popen[str]]:
        null, pipe = subprocess.DEVNULL, subprocess.PIPE
        environment = dict(self._victim.environment)
        return started(command, stdin=null, stdout=pipe, stderr=pipe, text=True, env=environment)

    def _judge(self, moment: str, ended: Ended) -> None:
        self.tally["deaths" if ended.is_killed else "survivals"] += 1
        wrong = [*self._victim.violations(ended), *self._victim.finish()]
        self.wrong += [f"{self._victim.name}, killed at {moment}: {line}" for line in wrong]


def _ended(process: subprocess.Popen[str]) -> Ended:
    out, err = process.communicate(timeout=PATIENCE)
    return Ended(process.returncode, out, err)


def unexpected(ended: Ended) -> Iterable[str]:
    """Yield that a command which nobody killed has failed."""
    if ended.code not in (0, -signal.SIGKILL):
        yield f"ended by itself with {ended.code}: {ended.err[-500:]}"


def can_trap() -> bool:
    """Return whether strace is installed, and may trace."""
    if not shutil.which("strace"):
        return False
    trial = ["strace", "-f", "-o", "/dev/null", "true"]
    return subprocess.run(trial, capture_output=True, check=False).returncode == 0


def traced(log: Path) -> list[str]:
    """Return the words to put before a command, so that strace writes its changing calls."""
    calls = ",".join(sorted({*CHANGING, *_NAMING}))
    return [*_STRACE, "-s", "4096", "-o", str(log), "-e", f"trace={calls}"]


def traps(lines: Sequence[str], mark: str) -> list[Trap]:
    """Return the traps that a trace (of strace -f) holds from the mark on, each once."""
    counts: Counter[tuple[str, str]] = Counter()
    result: dict[Trap, None] = {}
    is_begun = False
    for line in lines:
        match = _CALL.match(line)
        if not match:
            continue  # the end of a call that another thread's has interrupted
        thread, call, arguments = match.groups()
        is_begun = is_begun or mark in arguments
        counts[thread, call] += 1
        is_reading = call == "openat" and "O_CREAT" not in arguments
        if is_begun and call in CHANGING and not is_reading:
            result[Trap(call, counts[thread, call])] = None
    assert result, "nothing was changed after the mark"
    return list(result)


def _drawn(every: Sequence[Trap], most: int, dice: random.Random) -> list[Trap]:
    """Return all traps, or one of each of ``most`` parts of the run that are equally long."""
    if most >= len(every):
        return list(every)
    bounds = [len(every) * n // most for n in range(most + 1)]
    return [dice.choice(every[a:b]) for a, b in pairwise(bounds)]
