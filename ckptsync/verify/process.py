"""A child process that does what may hang, blow up or kill it: asked over a socket, limited, and its death is an answer too.

It gets no secrets: of this process's environment what programs and libraries need to be found, and nothing else.  It shuts itself in (`sandbox`), and
cannot raise the limits that it is given from here.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from ckptsync.errors import CkptsyncError, Corrupt, Unsupported
from ckptsync.parsing import parse
from ckptsync.verify.reading import Told

PACKAGES = str(Path(__file__).parents[2])
MISSING = 3  # exit status: its libraries are not installed
STARTING = 120.0  # seconds in which Python and torch are imported; a request's own time counts from there
_SLICE = 1.0  # seconds between two signs of life
_GRACE = 5.0  # seconds beyond a request's own time: the child's alarm comes first, and says more
_MOST = 64 << 20  # bytes of an answer

log = logging.getLogger(__name__)


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
        """One request, its answer.  Limits in it: ``wall`` and ``cpu`` seconds, ``memory``: bytes beyond what the child has now and ``fds`` have.

        Raises Died; Unsupported where its libraries are not installed, CkptsyncError if it cannot start, or was killed by somebody else.
        """
        self.start()
        assert self._socket
        self._told(0)
        self._limit(request, sum(os.fstat(fd).st_size for fd in fds))
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
            answer: dict[str, Any] = parse(line, self._module)
        except Corrupt:
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
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - no shell, our own module
                [self._python, "-m", self._module],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=self._said,
                cwd="/",  # not where the caller is: a torch.py in a checkpoint must not be imported
                env=_environment(os.environ),
                start_new_session=True,
            )
        line = self._line(STARTING)
        if line and line.startswith(b"ready "):
            self.loader, _, lacks = line.decode("utf-8", "replace").removeprefix("ready ").strip().partition("\t")
            if lacks:
                log.warning("%s: %s", self._module, lacks)
                self.loader += f" ({lacks})"
            return
        code = None if line is None else self._process.wait()
        said = self._last()
        self.end()
        if code == MISSING:
            raise Unsupported(said, hint=self._hint)
        how = f"ended with status {code}" if line is not None else f"was not ready in {STARTING:.0f} s"
        raise CkptsyncError(f"{self._module}: the child process {how}: {said}", hint="is torch's installation whole?")

    def _limit(self, request: dict[str, Any], size: int) -> None:
        """By this process: the child may not change its limits."""
        assert self._process
        pid = self._process.pid
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it is dead: what it is asked next says so
            own = (
                Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
            )  # proc(5): from the state on, the third
            used = (int(own[11]) + int(own[12])) // os.sysconf("SC_CLK_TCK") + 1
            most = int(own[20]) + 2 * size + request["memory"]
            for what, limit in ((resource.RLIMIT_AS, most), (resource.RLIMIT_CPU, used + request["cpu"])):
                resource.prlimit(pid, what, (limit, resource.prlimit(pid, what)[1]))

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


def _environment(own: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in own.items() if name in _KEPT or name.startswith("LC_")}
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, (PACKAGES, own.get("PYTHONPATH")))), **_QUIET}


_KEPT = frozenset(  # where programs, libraries, temporary files and homes are, and how text is written
    "PATH HOME USER LOGNAME LANG LANGUAGE TZ TMPDIR TEMP TMP LD_LIBRARY_PATH PYTHONHOME PYTHONFAULTHANDLER XDG_CACHE_HOME HF_HOME".split()  # noqa: SIM905
)
_QUIET = {  # nothing is asked of the network, nothing is written beside the libraries
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
