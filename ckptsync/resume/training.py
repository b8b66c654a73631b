"""Run a training as a child process that behaves as if no `resume` stood before it.

The training has this process's streams, terminal and process group, so that Ctrl-C reaches it once
and directly; other signals that this process gets are passed on, and its exit code is returned.  If
`resume` is killed, the training gets SIGTERM (on Linux): the next `resume` that a scheduler starts
must find no process that still writes into the output directory.
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
"""For each signal, the number of the one that the training gets; 0 for none."""


def read_signal_map(texts: Sequence[str]) -> dict[int, int]:
    """Return, by number, which signal the training gets for each of `FORWARDED`; 0 for none.

    Each is passed on as it is, unless a text changes that.  ``texts``: changes such as
    ``USR1=TERM`` or ``HUP=NONE``.  Raises ConfigError for any other.
    """
    signals = {_number(name): _number(name) for name in FORWARDED}
    for text in texts:
        before, _, after = text.upper().replace("SIG", "").partition("=")
        names = {name.removeprefix("SIG") for name in signal.Signals.__members__}
        if before not in FORWARDED or after not in {*names, NONE}:
            hint = f"such as USR1=TERM, or HUP=NONE; signals that are passed on: {_listed()}"
            raise ConfigError(f"--signal-map: {text!r} maps no signal to another", hint=hint)
        signals[_number(before)] = 0 if after == NONE else _number(after)
    return signals


def _number(name: str) -> int:
    """Return the number of a signal from its name without SIG."""
    return int(signal.Signals[f"SIG{name}"])


def _listed() -> str:
    """Return the names of the signals that can be passed on, with commas."""
    return ", ".join(FORWARDED)


def find_program(name: str) -> str:
    """Return the absolute path of a program in PATH.  Raises ConfigError if it cannot be run."""
    path = shutil.which(name)
    if path is None:
        is_file = Path(name).is_file()
        why = "is not executable" if is_file else "no such program"
        hint = f"`python {name}`?" if is_file else "is its environment activated?"
        raise ConfigError(f"{name}: {why}", hint=hint)
    return os.path.abspath(path)  # noqa: PTH100 - links stay


class Signals:
    """Passes the signals of this process on to its training.

    ``count``: how many signals were, or were passed on as, one of `ENDING`.
    """

    def __init__(self, signals: SignalMap) -> None:
        """Keep the map; handle no signal before `handled`."""
        self._signals = signals
        self._pid = 0
        self._early: list[int] = []  # to send once the training has a process id
        self.count = 0

    @property
    def is_ending(self) -> bool:
        """Return whether a signal has asked for the end of the training."""
        return self.count > 0

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle the signals within the block, in the main thread; an ignored one stays ignored.

        SIGCHLD gets its default.  The former handlers are set again after the block.
        """
        self._early.clear()
        numbers = [n for n in self._signals if signal.getsignal(n) != signal.SIG_IGN]
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        # if SIGCHLD is ignored, the kernel forgets a child's exit code
        before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: object) -> None:
        """Pass a signal on, or keep it until the training starts; count it if it is ending.

        A second one before the start ends all retries.  SIGINT of the terminal reaches the training
        without us.
        """
        mapped = self._signals[number]
        if number in ENDING or mapped in ENDING:
            self.count += 1
            if self.count > 1 and not self._pid:
                progress_signs.announce_shutdown()  # nothing is tried again
        # the terminal has sent it to the whole group already
        has_arrived = number == signal.SIGINT == mapped and is_in_foreground()
        if not mapped or has_arrived:
            return
        if self._pid:
            os.kill(self._pid, mapped)
        else:
            self._early.append(mapped)

    def run(
        self, command: Sequence[str], environment: Mapping[str, str], on_poll: Callable[[int], None]
    ) -> int:
        """Run a training to its end; return its exit code, or minus the signal that killed it.

        Signals that came before it has begun are sent to it first.  ``on_poll`` is called with the
        training's process id every 0.1 s, and once at its end.  Raises ConfigError if the program
        cannot be run, OSError if no process can be made.
        """
        # a scheduler may send a mapped signal to the training, too, which must not die of it
        mapped = (n for n, passed in self._signals.items() if passed not in (0, n))
        ignored = ",".join(map(str, mapped))
        words = [str(os.getpid()), ignored, find_program(command[0]), *command]
        process = subprocess.Popen(  # noqa: S603 - the user's own command, without a shell
            [sys.executable, "-I", "-S", "-c", _BEGIN, *words], env=dict(environment)
        )
        self._pid = process.pid
        for number in self._early:
            os.kill(process.pid, number)
        # WNOWAIT: no other process gets its id before `_pid` is cleared
        while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            on_poll(process.pid)
            time.sleep(_POLL)
        on_poll(process.pid)  # the first time for a training that ended at once
        self._pid = 0
        return process.wait()


def is_in_foreground() -> bool:
    """Return whether the terminal's keys signal this process's group; False without a terminal."""
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
    """Return ``status`` as a shell has it: for minus a signal's number, 128 plus that number."""
    return status if status >= 0 else 128 - status
