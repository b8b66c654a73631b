"""One process from start to exit: seconds, seconds of CPU, memory at the peak, bytes read."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Run:
    """What a process and its children took.

    ``read`` is what they asked the kernel for by read(2) and its kin, their own programs included (a mapped file is not), ``disk`` what the kernel
    had to fetch from the disk for them, mapped files included.  ``peak`` is in bytes, and at least what this process itself has.
    """

    wall: float
    cpu: float
    peak: int
    read: int
    disk: int


class Failed(Exception):
    """It exited with an error, or had to be ended."""


def measure(command: Sequence[str], log: Path, most_seconds: float) -> Run:
    """Run to the end; raises Failed with the end of its output."""
    start = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        alarm = threading.Timer(most_seconds, os.killpg, (process.pid, signal.SIGKILL))
        alarm.start()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it is dead and not yet buried: its counters can be read
        wall = time.monotonic() - start
        alarm.cancel()
        counted = _counted(process.pid)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        ended = f"ended after {most_seconds:.0f} s" if wall >= most_seconds else f"exit code {process.returncode}"
        raise Failed(f"{ended}: {_last_words(log)}")
    return Run(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, counted["rchar"], counted["read_bytes"])


def _counted(pid: int) -> dict[str, int]:
    """Of all threads, and of children that were waited for."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return {key: int(value) for key, value in (line.split(": ") for line in lines)}


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " ".join(lines[-2:])[:300] if lines else "it said nothing"
