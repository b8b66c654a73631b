"""A child process that does what may hang, blow up or kill it: asked over a socket, limited, and its death is an answer too."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from ckptsync.errors import CkptsyncError, Unsupported
from ckptsync.verify.reading import Told

PACKAGES = str(Path(__file__).parents[2])
MISSING = 3  # exit status: its libraries are not installed
STARTING = 120.0  # seconds in which Python and torch are imported; a request's own time counts from there
_SLICE = 1.0  # seconds between two signs of life
_GRACE = 5.0  # seconds beyond a request's own time: the child's alarm comes first, and says more
_MOST = 64 << 20  # bytes of an answer


class Died(Exception):
    """It ended, or was ended, over a request; the text says how."""


class Child:
    """``python -m module``, started when it is first asked; after a death, started again."""

    def __init__(self, module: str, hint: str, told: Told = lambda _: None, python: str = sys.executable) -> None:
        self._module, self._hint, self._told, self._python = module, hint, told, python
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._said: IO[bytes] | None = None
        self.loader = ""

    def __enter__(self) -> Child:  # noqa: PYI034 - `Self` is younger than Python 3.10
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def ask(self, request: dict[str, Any], fds: Sequence[int] = ()) -> dict[str, Any]:
        """One request, its answer; ``wall`` and ``cpu`` in it are its limits in seconds.

        Raises Died; Unsupported where its libraries are not installed, CkptsyncError if it cannot start, or was killed by somebody else.
        """
        self.start()
        assert self._socket
        self._told(0)
        try:
            if fds:
                socket.send_fds(self._socket, [b"F"], list(fds))
            self._socket.sendall(json.dumps(request).encode() + b"\n")
        except OSError:
            raise self._death(request) from None
        line = self._line(request["wall"] + _GRACE)
        if line is None:
            self.end()
            raise Died(f"not done in {request['wall']} s")
        if not line:
            raise self._death(request)
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            self.end()
            raise Died(f"what it says is no answer: {line[:80]!r}") from None
        return answer

    def end(self) -> None:
        """Not waited for long: a process that hangs in a dead file server cannot be killed, and need not be."""
        if (child := self._process) is None:
            return
        if child.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ended by itself meanwhile
                os.killpg(child.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(5)
        if self._socket:
            self._socket.close()
        if self._said:
            self._said.close()
        self._process = self._socket = self._said = None

    def start(self) -> None:
        """If it does not run: raises Unsupported where its libraries are not installed, CkptsyncError if it cannot start."""
        if self._process is not None:
            return
        ours, theirs = socket.socketpair()
        self._socket, self._said = ours, tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (PACKAGES, os.environ.get("PYTHONPATH"))))}
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - no shell, our own module
                [self._python, "-m", self._module],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=self._said,
                cwd="/",  # not where the caller is: a torch.py in a checkpoint must not be imported
                env=environment | _QUIET,
                start_new_session=True,
            )
        line = self._line(STARTING)
        if line and line.startswith(b"ready "):
            self.loader = line.decode("utf-8", "replace").removeprefix("ready ").strip()
            return
        code = None if line is None else self._process.wait()
        said = self._last()
        self.end()
        if code == MISSING:
            raise Unsupported(said, hint=self._hint)
        how = f"ended with status {code}" if line is not None else f"was not ready in {STARTING:.0f} s"
        raise CkptsyncError(f"{self._module}: the child process {how}: {said}", hint="is torch's installation whole?")

    def _line(self, seconds: float) -> bytes | None:
        """What it says next; empty if it has ended, ``None`` if it says nothing for so long."""
        assert self._socket
        line, until = bytearray(), time.monotonic() + seconds
        self._socket.settimeout(_SLICE)
        while not line.endswith(b"\n") and len(line) < _MOST:
            if time.monotonic() > until:
                return None
            try:
                got = self._socket.recv(1 << 16)
            except TimeoutError:
                self._told(0)
                continue
            except OSError:
                got = b""
            if not got:
                return b""
            line += got
        self._socket.settimeout(None)
        return bytes(line)

    def _death(self, request: dict[str, Any]) -> Died | CkptsyncError:
        """Its limits end it by SIGALRM, SIGXCPU or a MemoryError; SIGKILL is the system's, or somebody's, and says nothing of the file."""
        assert self._process
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        code, said = self._process.returncode, self._last()
        self.end()
        if code == -signal.SIGALRM:
            return Died(f"not done in {request['wall']} s")
        if code == -signal.SIGXCPU:
            return Died(f"not done in {request['cpu']} s of CPU time")
        if code == -signal.SIGKILL:
            why = f"{self._module}: the child process was killed by SIGKILL: {said}"
            return CkptsyncError(why, hint="had this machine, or the service's MemoryMax, too little memory?  Then verify it again")
        if code is not None and code < 0:
            return Died(f"the child process was killed by {signal.Signals(-code).name}: {said}")
        return Died(f"the child process ended with status {code}: {said}")

    def _last(self) -> str:
        assert self._said
        size = self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, size - 4096))
        text = self._said.read().decode("utf-8", "replace").strip().rpartition("\n")[2]
        return text[:300] or "it said nothing"


_QUIET = {  # nothing is asked of the network, nothing is written beside the libraries
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
