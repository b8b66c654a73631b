"""Measure one process from start to exit: wall and CPU seconds, peak memory, bytes read."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Run:
    """What a process and its children took.

    ``read`` is what they asked the kernel for by read(2) and its kin, their own programs included
    (a mapped file is not), ``disk`` what the kernel had to fetch from the disk for them, mapped
    files included.  ``peak`` is in bytes, and at least what this process itself has.  ``tree`` is
    the sum of what each process of the tree had at its own peak, ``server`` what a server took in
    seconds of CPU meanwhile.
    """

    wall: float
    cpu: float
    peak: int
    read: int
    disk: int
    tree: int = 0
    server: float = 0.0


class Failed(Exception):
    """A program exited with an error, or ran too long."""


def measure(
    command: Sequence[str],
    log: Path,
    most_seconds: float,
    environment: Mapping[str, str] | None = None,
) -> Run:
    """Run a command to its end; raise Failed with the end of its output."""
    start = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=environment
        )
        tree = _Tree(process.pid)
        alarm = threading.Timer(most_seconds, os.killpg, (process.pid, signal.SIGKILL))
        alarm.start()
        # it has ended, and its counters can still be read
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        wall = time.monotonic() - start
        alarm.cancel()
        peak = tree.stop()
        counters = _counters(process.pid)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        ended = (
            f"ended after {most_seconds:.0f} s"
            if wall >= most_seconds
            else f"exit code {process.returncode}"
        )
        raise Failed(f"{ended}: {_last_words(log)}")
    largest = usage.ru_maxrss * 1024
    return Run(
        wall,
        usage.ru_utime + usage.ru_stime,
        largest,
        counters["rchar"],
        counters["read_bytes"],
        peak or largest,
    )


def descendants(pid: int) -> Iterator[int]:
    """Yield the ids of a process and of all below it that still exist."""
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            for child in task.read_text().split():
                yield from descendants(int(child))


def seconds_of(pid: int) -> float:
    """Return CPU seconds of a process and all below it, with those that it waited for."""
    ticks = 0
    for each in descendants(pid):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


class _Tree:
    """Reads twenty times a second the peak memory of each process below one."""

    def __init__(self, pid: int) -> None:
        self._pid, self._peaks, self._over = pid, dict[int, int](), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def stop(self) -> int:
        """Return the sum of all peaks, in bytes."""
        self._over.set()
        self._thread.join()
        return sum(self._peaks.values())

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            for pid in descendants(self._pid):
                with contextlib.suppress(OSError):  # it has ended meanwhile
                    match = re.search(r"VmHWM:\s*(\d+)", Path(f"/proc/{pid}/status").read_text())
                    self._peaks[pid] = int(match[1]) * 1024 if match else self._peaks.get(pid, 0)


def _counters(pid: int) -> dict[str, int]:
    """Return the counters of proc(5)'s ``io``, of all threads and of children waited for."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return {key: int(value) for key, value in (line.split(": ") for line in lines)}


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " ".join(lines[-2:])[:300] if lines else "it said nothing"
