"""Run a program in a process that can be killed, as a thread cannot.

`Child` starts the program, exchanges lines with it, limits it, and ends it with all processes that
it has started. The caller decides how long it may take, and what counts as progress. The head's
jobs (`ckptsync.service.jobs`), level `load` (`ckptsync.verifier.level_load`) and the commands of
events (`ckptsync.events.programs`) use it.

Run as a program, this file replaces itself by the program of its arguments, so that it dies with
its parent, too.
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
    """Have the kernel send SIGKILL to this process when the thread that started it ends.

    Do nothing without `PARENT`, which is removed from the environment. Exit at once with status 1
    if the parent has ended already. Without Linux only that check is made.
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

    It runs in `/`, so that it can import nothing from the caller's directory, and in a session of
    its own: a group to kill, and no Ctrl-C of ours. ``environment`` is all that it inherits, with
    the path to ckptsync and this process's number for `die_with_parent`. Its standard error goes to
    ``log`` (ours if ``None``).

    With ``data`` the command is a program of the operator's: ``data`` is its standard input, which
    it need not read, and it does not get ckptsync's path. Raises OSError if it cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: IO[bytes] | None = None,
        data: IO[bytes] | None = None,
    ) -> None:
        """Start the process; return before it has run. Raise OSError if it cannot be started."""
        path = os.pathsep.join(filter(None, (PACKAGES, environment.get("PYTHONPATH"))))
        packages = {"PYTHONPATH": path}
        if data is not None:
            command, packages = [sys.executable, "-I", "-S", __file__, *command], {}
        self._socket, child_socket = socket.socketpair()
        self._received, self._searched = bytearray(), 0
        try:
            with child_socket:
                self._process = subprocess.Popen(  # noqa: S603 - no shell, our own modules
                    command,
                    stdin=child_socket.fileno() if data is None else data.fileno(),
                    stdout=child_socket.fileno(),
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
        """Write to its standard input, and wait until it is written; raise OSError if it is dead.

        With ``fds``, a byte ``F`` before the data carries these descriptors.
        """
        if fds:
            socket.send_fds(self._socket, [b"F"], list(fds))
        self._socket.sendall(data)

    def line(self, seconds: float, longest: int = LONGEST) -> bytes | None:
        """Wait for the next line of its output, and return it with its newline.

        Of a line without an end, return what was read once that is ``longest`` bytes or more.
        Return b"" if the output has ended (`rest` has what follows the last line); None if no whole
        line came within ``seconds``: what came stays for the next call.
        """
        deadline = time.monotonic() + seconds
        ready = select.poll()
        ready.register(self._socket, select.POLLIN)
        while (end := self._received.find(b"\n", self._searched)) < 0 and len(
            self._received
        ) < longest:
            self._searched = len(self._received)
            if not ready.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return None
            try:
                received = self._socket.recv(1 << 16)
            except OSError:  # it died before it had read all that was sent
                received = b""
            if not received:
                return b""
            self._received += received
        size = end + 1 if end >= 0 else len(self._received)
        line = bytes(self._received[:size])
        del self._received[:size]
        self._searched = 0
        return line

    def rest(self) -> bytes:
        """Return what was read after the last line that `line` returned; read no more."""
        return bytes(self._received)

    def limit(self, kind: int, most: int) -> None:
        """Set one of its limits (`resource.RLIMIT_…`) to ``most``, but not above its hard limit.

        Do nothing if the process has ended, or if this is not Linux.
        """
        # it is dead, as its next answer says, or this is not Linux
        with contextlib.suppress(ProcessLookupError, AttributeError):
            hard = resource.prlimit(self.pid, kind)[1]
            soft = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.prlimit(self.pid, kind, (soft, hard))

    def go_behind(self, nicer: int, oom_first: int) -> None:
        """Lower its priority by ``nicer``, and let the kernel kill it first when memory runs out.

        ``nicer`` is added to this process's nice value, ``oom_first`` to the child's oom_score_adj
        (at most 1000). It writes no core dumps, since its memory holds the store's keys. What the
        system refuses, or a process that has ended, is passed over.
        """
        with contextlib.suppress(OSError):  # it is dead
            nice = os.getpriority(os.PRIO_PROCESS, 0) + nicer
            os.setpriority(os.PRIO_PROCESS, self.pid, nice)
        with contextlib.suppress(OSError, ValueError):  # this is not Linux, or it may not be raised
            score = Path(f"/proc/{self.pid}/oom_score_adj")
            score.write_text(str(min(1000, int(score.read_text()) + oom_first)))
        self.limit(resource.RLIMIT_CORE, 0)  # its memory holds the store's keys

    def allow(self, memory: int, cpu: int) -> None:
        """Limit the memory and CPU time that it may use beyond what it uses now.

        ``memory``: bytes of addresses; ``cpu``: seconds. Does nothing if it has ended, or if this
        is not Linux.
        """
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text("utf-8", "replace")
        except OSError:  # it is dead, as its next answer says, or this is not Linux
            return
        fields = stat.rpartition(")")[2].split()  # proc(5): from the state on, the third
        seconds = (int(fields[11]) + int(fields[12])) // os.sysconf("SC_CLK_TCK") + 1
        self.limit(resource.RLIMIT_AS, int(fields[20]) + memory)
        self.limit(resource.RLIMIT_CPU, seconds + cpu)

    def end(self, patience: float = 0.0) -> int | None:
        """Wait at most ``patience`` seconds for its end; kill its group; return its exit status.

        If it still runs it gets SIGTERM, and `TO_END` seconds later SIGKILL; its group always gets
        SIGKILL. Return None if it does not die within `TO_DIE` seconds: it is left behind, and a
        later call returns -SIGKILL. The process is reaped last: until then no other process gets
        the number of its group.
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
        """Send a signal to its whole group; do nothing if no process of it is left."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def _is_over(self, patience: float) -> bool:
        """Wait until the process ends, at most ``patience`` seconds; return whether it has ended.

        It polls every 20 ms on the monotonic clock, and does not reap the process.
        """
        deadline = time.monotonic() + patience
        while os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True


if __name__ == "__main__":
    die_with_parent()
    try:
        os.execvpe(sys.argv[1], sys.argv[1:], os.environ)  # noqa: S606 - no shell
    except OSError as e:
        sys.exit(f"{sys.argv[1]}: {e.strerror}")
