"""Run a program in a process that can be killed, as a thread cannot.

`Child` starts it, exchanges lines with it, limits it, and ends it with all that it has started. The
caller decides how long it may take, and what counts as progress. The head's jobs
(`ckptsync.service.jobs`), which are commands, level `load` (`ckptsync.verifier.level_load`) and the
commands of events (`ckptsync.events.programs`) use it.

Run as a program, this file becomes the program of its arguments, which dies with its parent too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

PARENT = "CKPTSYNC_PARENT"
"""The variable that names the process which a child must not outlive."""
PACKAGES = str(Path(__file__).parents[1])
ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "USER", "LOGNAME", "TMPDIR", "HTTP_PROXY",
    "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy", "SSL_CERT_FILE",
    "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE")  # fmt: skip
"""What programs of the operator's inherit: no store's keys are among them."""
TO_END = 2.0  # seconds between SIGTERM and SIGKILL
TO_DIE = 5.0  # seconds after SIGKILL; a process that hangs in a dead file server is left behind
LONGEST = 64 << 20  # bytes of a line; what is longer comes in pieces
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends, where it can.

    Without `PARENT` nobody has asked for that.
    """
    if not (parent := os.environ.pop(PARENT, "")):
        return
    with contextlib.suppress(OSError, AttributeError):  # no Linux: children outlive a killed head
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if str(os.getppid()) != parent:
        os._exit(1)


def describe_end(code: int | None) -> str:
    """Return how a process ended, from its exit status: ``was killed by SIGSEGV``."""
    if code is None or code >= 0:
        return f"ended with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # most real-time signals have no name
        return f"was killed by signal {-code}"


class Child:
    """A running ``command``, whose standard input and output are one socket.

    With ``data`` it is a program of the operator's: ``data`` is its input, which it need not read,
    and ``environment`` is all of its environment.

    It runs in `/`, so that it can import nothing from the caller's directory, and in a session of
    its own: a group to kill, and no Ctrl-C of ours. ``environment`` is all that it inherits, with
    the path to ckptsync, and this process's number for `die_with_parent`. Its standard error goes
    to ``log`` (ours if ``None``).
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: IO[bytes] | None = None,
        data: IO[bytes] | None = None,
    ) -> None:
        path = os.pathsep.join(filter(None, (PACKAGES, environment.get("PYTHONPATH"))))
        packages = {"PYTHONPATH": path}
        if data is not None:
            command, packages = [sys.executable, "-I", "-S", __file__, *command], {}
        self._socket, theirs = socket.socketpair()
        self._received, self._searched = bytearray(), 0
        try:
            with theirs:
                self._process = subprocess.Popen(  # noqa: S603 - no shell, our own modules
                    command,
                    stdin=theirs.fileno() if data is None else data.fileno(),
                    stdout=theirs.fileno(),
                    stderr=log,
                    cwd="/",
                    env={**environment, **packages, PARENT: str(os.getpid())},
                    start_new_session=True,
                )
        except OSError:
            self._socket.close()
            raise
        self.pid = self._process.pid

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Write to its standard input.

        With ``fds``, a byte before the data carries these descriptors. Raises OSError if it is
        dead.
        """
        if fds:
            socket.send_fds(self._socket, [b"F"], list(fds))
        self._socket.sendall(data)

    def line(self, seconds: float, longest: int = LONGEST) -> bytes | None:
        """Return the next line of its output, or ``longest`` bytes of one.

        An empty one if it has ended, ``None`` if nothing came for so long.
        """
        until = time.monotonic() + seconds
        ready = select.poll()
        ready.register(self._socket, select.POLLIN)
        while (end := self._received.find(b"\n", self._searched)) < 0 and len(
            self._received
        ) < longest:
            self._searched = len(self._received)
            if not ready.poll(max(0.0, until - time.monotonic()) * 1000):
                return None
            try:
                got = self._socket.recv(1 << 16)
            except OSError:  # it died before it had read all that was sent
                got = b""
            if not got:
                return b""
            self._received += got
        size = end + 1 if end >= 0 else len(self._received)
        line = bytes(self._received[:size])
        del self._received[:size]
        self._searched = 0
        return line

    def rest(self) -> bytes:
        """Return what it has written after its last line."""
        return bytes(self._received)

    def limit(self, which: int, most: int) -> None:
        """Set one of its limits (`resource.RLIMIT_…`) to ``most``, or to a lower hard limit."""
        # dead: its next answer says so; or no Linux
        with contextlib.suppress(ProcessLookupError, AttributeError):
            hard = resource.prlimit(self.pid, which)[1]
            soft = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.prlimit(self.pid, which, (soft, hard))

    def go_behind(self, nicer: int, oom_first: int) -> None:
        """Have it wait for this process, and die before it where memory runs out."""
        with contextlib.suppress(OSError):  # dead
            nice = os.getpriority(os.PRIO_PROCESS, 0) + nicer
            os.setpriority(os.PRIO_PROCESS, self.pid, nice)
        with contextlib.suppress(OSError, ValueError):  # no Linux, or nobody may raise it
            score = Path(f"/proc/{self.pid}/oom_score_adj")
            score.write_text(str(min(1000, int(score.read_text()) + oom_first)))
        self.limit(resource.RLIMIT_CORE, 0)  # its memory holds the store's keys

    def allow(self, memory: int, cpu: int) -> None:
        """Limit it to so many bytes of addresses, and seconds of CPU, beyond what it has used."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text("utf-8", "replace")
        except OSError:  # dead: its next answer says so; or no Linux
            return
        fields = stat.rpartition(")")[2].split()  # proc(5): from the state on, the third
        seconds = (int(fields[11]) + int(fields[12])) // os.sysconf("SC_CLK_TCK") + 1
        self.limit(resource.RLIMIT_AS, int(fields[20]) + memory)
        self.limit(resource.RLIMIT_CPU, seconds + cpu)

    def end(self, patience: float = 0.0) -> int | None:
        """Wait so many seconds for it to end by itself, then kill it and its group.

        Return its exit status; ``None`` if it cannot be killed. It is waited for last: until then
        its group's number is nobody else's.
        """
        if self._process.returncode is None:
            if not self._is_over(patience):
                self._kill(signal.SIGTERM)
                self._is_over(TO_END)
            self._kill(signal.SIGKILL)  # and what it may have started
            if not self._is_over(TO_DIE):
                # it is left behind: nobody waits for it any more
                self._process.returncode = -signal.SIGKILL
                self._socket.close()
                return None
        self._socket.close()
        return self._process.wait()

    def has_ended(self) -> bool:
        """Return whether its process has ended; what it has started may still run."""
        return self._is_over(0.0)

    def _kill(self, number: int) -> None:
        # nobody is left of its group
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def _is_over(self, patience: float) -> bool:
        until = time.monotonic() + patience
        while os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            if time.monotonic() > until:
                return False
            time.sleep(0.02)
        return True


if __name__ == "__main__":
    die_with_parent()
    try:
        os.execvpe(sys.argv[1], sys.argv[1:], os.environ)  # noqa: S606 - no shell
    except OSError as e:
        sys.exit(f"{sys.argv[1]}: {e.strerror}")
