"""A program in a process of its own, which can be killed as a thread cannot: a merge, a verification, the loading of somebody's files.

`Child` starts it, talks with it in lines, limits it and ends it with all that it has started.  Whoever starts it decides how long it may take, and what
counts as progress.  Two kinds of work use it: the head's (`ckptsync.service.children`) and level `load` (`ckptsync.verify.process`).
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

PACKAGES = str(Path(__file__).parents[1])
TO_END = 2.0  # seconds between SIGTERM and SIGKILL
TO_DIE = 5.0  # seconds after SIGKILL: what hangs in a dead file server may not die, and is left behind
LONGEST = 64 << 20  # bytes of a line; what is longer comes in pieces


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process has taken so far: seconds of CPU, bytes of address space."""

    cpu: int
    memory: int


class Child:
    """A running ``command``, whose standard input and output are one socket; ``log`` takes its standard error (ours if ``None``).

    It runs in `/`, so that nothing where the caller is can be imported, and in a session of its own: a group to kill, and no Ctrl-C of ours.
    ``environment`` is all that it inherits, but for where ckptsync is.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: IO[bytes] | None = None) -> None:
        path = os.pathsep.join(filter(None, (PACKAGES, environment.get("PYTHONPATH"))))
        self._socket, theirs = socket.socketpair()
        self._heard, self._searched = bytearray(), 0
        try:
            with theirs:
                self._process = subprocess.Popen(  # noqa: S603 - no shell, our own modules
                    command,
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=log,
                    cwd="/",
                    env={**environment, "PYTHONPATH": path},
                    start_new_session=True,
                )
        except OSError:
            self._socket.close()
            raise
        self.pid = self._process.pid

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Write to its standard input; with ``fds``, one byte goes before, which carries these descriptors.  Raises OSError if it is dead."""
        if fds:
            socket.send_fds(self._socket, [b"F"], list(fds))
        self._socket.sendall(data)

    def line(self, seconds: float) -> bytes | None:
        """Return the next line that it says; an empty one if it has ended, ``None`` if nothing came for so long."""
        until = time.monotonic() + seconds
        ready = select.poll()
        ready.register(self._socket, select.POLLIN)
        while (end := self._heard.find(b"\n", self._searched)) < 0 and len(self._heard) < LONGEST:
            self._searched = len(self._heard)
            if not ready.poll(max(0.0, until - time.monotonic()) * 1000):
                return None
            try:
                got = self._socket.recv(1 << 16)
            except OSError:  # it died before it had read all that was sent
                got = b""
            if not got:
                return b""
            self._heard += got
        size = end + 1 if end >= 0 else len(self._heard)
        line = bytes(self._heard[:size])
        del self._heard[:size]
        self._searched = 0
        return line

    def limit(self, which: int, most: int) -> None:
        """Set a limit of it (`resource.RLIMIT_…`) from here, where it cannot raise it."""
        with contextlib.suppress(ProcessLookupError, AttributeError):  # dead: its next answer says so; or no Linux
            resource.prlimit(self.pid, which, (most, resource.prlimit(self.pid, which)[1]))

    def usage(self) -> Usage | None:
        """Return what it has taken, or ``None`` if it is dead."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text("utf-8", "replace")
        except OSError:
            return None
        fields = stat.rpartition(")")[2].split()  # proc(5): from the state on, the third
        return Usage((int(fields[11]) + int(fields[12])) // os.sysconf("SC_CLK_TCK") + 1, int(fields[20]))

    def end(self, patience: float = 0.0) -> int | None:
        """Wait so many seconds for it to end by itself, then kill it and its group; its exit status, ``None`` if it cannot be killed.

        It is waited for last: until then its group's number is nobody else's.
        """
        if self._process.returncode is None:
            if not self._is_over(patience):
                self._kill(signal.SIGTERM)
                self._is_over(TO_END)
            self._kill(signal.SIGKILL)  # and what it may have started
            if not self._is_over(TO_DIE):
                self._process.returncode = -signal.SIGKILL  # it is left behind: nobody waits for it any more
                self._socket.close()
                return None
        self._socket.close()
        return self._process.wait()

    def _kill(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left of its group
            os.killpg(self.pid, number)

    def _is_over(self, patience: float) -> bool:
        until = time.monotonic() + patience
        while os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            if time.monotonic() > until:
                return False
            time.sleep(0.02)
        return True
