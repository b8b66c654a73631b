"""Run a training as its own child: its streams, its terminal, its signals, its exit code.

The training is in this process's group, so that a terminal's Ctrl-C reaches it once and by itself;
other signals that this process gets are passed on.  Where the kernel can do that (Linux), a
training whose `resume` was killed gets SIGTERM: another `resume` that a scheduler starts must find
nobody who still writes into the output directory.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from ckptsync.errors import ConfigError
from ckptsync.stores import progress_signs

FORWARDED = ("TERM", "INT", "HUP", "USR1", "USR2")
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals, sent or passed on, after which a training is not started again."""
NONE = "NONE"
_POLL = 0.1  # seconds
_BEGIN = """import ctypes, os, signal, sys
parent, ignored, program, *words = sys.argv[1:]
signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores them, and programs inherit that
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
for number in map(int, filter(None, ignored.split(","))):
    signal.signal(number, signal.SIG_IGN)
try:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG
except (OSError, AttributeError):
    pass
if str(os.getppid()) != parent:
    os._exit(143)
try:
    os.execv(program, words)
except OSError as e:
    sys.stderr.write(f"ckptsync: error: {words[0]}: {e.strerror}\\n")
    os._exit(126)
"""

SignalMap = Mapping[int, int]
"""From each signal to the one that the training gets; 0: none."""


def read_signal_map(texts: Sequence[str]) -> dict[int, int]:
    """Return what the training gets for each signal; ``USR1=TERM``, ``HUP=NONE``.

    Raises ConfigError.
    """
    signals = {_number(name): _number(name) for name in FORWARDED}
    for text in texts:
        before, _, after = text.upper().replace("SIG", "").partition("=")
        known = {name.removeprefix("SIG") for name in signal.Signals.__members__}
        if before not in FORWARDED or after not in {*known, NONE}:
            hint = f"such as USR1=TERM, or HUP=NONE; signals that are passed on: {_listed()}"
            raise ConfigError(f"--signal-map: {text!r} maps no signal to another", hint=hint)
        signals[_number(before)] = 0 if after == NONE else _number(after)
    return signals


def _number(name: str) -> int:
    return int(signal.Signals[f"SIG{name}"])


def _listed() -> str:
    return ", ".join(FORWARDED)


def find_program(name: str) -> str:
    """Return the path of a program.  Raises ConfigError, before anything is downloaded for it."""
    path = shutil.which(name)
    if path is None:
        is_file = Path(name).is_file()
        why = "is not executable" if is_file else "no such program"
        hint = f"`python {name}`?" if is_file else "is its environment activated?"
        raise ConfigError(f"{name}: {why}", hint=hint)
    return os.path.abspath(path)  # noqa: PTH100 - links stay


class Signals:
    """The signals of this process while it stands in front of a training.

    ``count``: of those that ask for an end (`ENDING`); ``is_ending``: whether one did.
    """

    def __init__(self, signals: SignalMap) -> None:
        self._signals = signals
        self._pid = 0
        self._early: list[int] = []  # that came before the training had a number
        self.count = 0

    @property
    def is_ending(self) -> bool:
        """Return whether somebody has asked for an end."""
        return self.count > 0

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle them within the block, in the main thread; one that is ignored stays so."""
        self._early.clear()
        numbers = [n for n in self._signals if signal.getsignal(n) != signal.SIG_IGN]
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        # where it is ignored, the kernel forgets a child's exit code
        before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: object) -> None:
        passed = self._signals[number]
        if number in ENDING or passed in ENDING:
            self.count += 1
            if self.count > 1 and not self._pid:
                progress_signs.announce_shutdown()  # nothing is tried again
        # the terminal has sent it to the whole group already
        is_there = number == signal.SIGINT == passed and is_in_foreground()
        if not passed or is_there:
            return
        if self._pid:
            os.kill(self._pid, passed)
        else:
            self._early.append(passed)

    def run(
        self, command: Sequence[str], environment: Mapping[str, str], look: Callable[[int], None]
    ) -> int:
        """Run a training to its end; return its exit code, negative of a signal that killed it.

        ``look`` is called every now and then meanwhile, and at its end, with its process id.
        Raises OSError if no process can be made.
        """
        # a scheduler may send it to every process: what gets another one instead must not die of it
        mapped = (n for n, passed in self._signals.items() if passed not in (0, n))
        ignored = ",".join(map(str, mapped))
        words = [str(os.getpid()), ignored, find_program(command[0]), *command]
        process = subprocess.Popen(  # noqa: S603 - the user's own command, without a shell
            [sys.executable, "-I", "-S", "-c", _BEGIN, *words], env=dict(environment)
        )
        self._pid = process.pid
        for number in self._early:
            os.kill(process.pid, number)
        # it is not waited for before its number is forgotten: until then it is nobody else's
        while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            look(process.pid)
            time.sleep(_POLL)
        look(process.pid)  # of a short one, for the first time
        self._pid = 0
        return process.wait()


def is_in_foreground() -> bool:
    """Return whether this process's group is the one that a terminal's keys go to."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def exit_code_of(status: int) -> int:
    """Return the exit code of a shell for a child's status: 128 and the number of a signal."""
    return status if status >= 0 else 128 - status
