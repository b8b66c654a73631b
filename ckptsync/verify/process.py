"""The child process of levels `load` and `model`, which may hang, blow up or be killed by what it reads: it is limited, and its death is an answer too.

It gets no secrets: of this process's environment what programs and libraries need to be found, and nothing else.  It shuts itself in (`sandbox`), and
cannot raise the limits that it is given from here.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

from ckptsync.child import TO_DIE, Child
from ckptsync.errors import CkptsyncError, Corrupt, Unsupported
from ckptsync.parsing import parse
from ckptsync.verify.reading import Told

MISSING = 3  # exit status: its libraries are not installed
STARTING = 120.0  # seconds in which Python and torch are imported; a request's own time counts from there
_SLICE = 1.0  # seconds between two signs of life
_GRACE = 5.0  # seconds beyond a request's own time: the child's alarm comes first, and says more

log = logging.getLogger(__name__)


class Died(Exception):
    """It ended, or was ended, over a request; the text says how."""


class Loader:
    """``python -m module``, started when it is first asked; after a death, started again."""

    def __init__(self, module: str, hint: str, told: Told = lambda _: None, python: str = sys.executable) -> None:
        self._module, self._hint, self._told, self._python = module, hint, told, python
        self._child: Child | None = None
        self._said: IO[bytes] | None = None
        self.loader = ""

    def __enter__(self) -> Loader:  # noqa: PYI034 - `Self` is younger than Python 3.10
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def ask(self, request: dict[str, Any], fds: Sequence[int] = ()) -> dict[str, Any]:
        """One request, its answer.  Limits in it: ``wall`` and ``cpu`` seconds, ``memory``: bytes beyond what the child has now and ``fds`` have.

        Raises Died; Unsupported where its libraries are not installed, CkptsyncError if it cannot start, or was killed by somebody else.
        """
        child = self.start()
        self._told(0)
        if used := child.usage():
            child.limit(resource.RLIMIT_AS, used.memory + 2 * sum(os.fstat(fd).st_size for fd in fds) + request["memory"])
            child.limit(resource.RLIMIT_CPU, used.cpu + request["cpu"])
        try:
            child.send(json.dumps(request).encode() + b"\n", fds)
        except OSError:
            raise self._death(child, request) from None
        line = self._line(child, request["wall"] + _GRACE)
        if line is None:
            self.end()
            raise Died(f"not done in {request['wall']} s")
        if not line:
            raise self._death(child, request)
        try:
            answer: dict[str, Any] = parse(line, self._module)
        except Corrupt:
            self.end()
            raise Died(f"what it says is no answer: {line[:80]!r}") from None
        return answer

    def end(self) -> None:
        """End the process, if it runs."""
        if self._child and self._said:
            self._child.end()
            self._said.close()
        self._child = self._said = None

    def start(self) -> Child:
        """The process, which runs from now on: raises Unsupported where its libraries are not installed, CkptsyncError if it cannot start."""
        if self._child is not None:
            return self._child
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        self._child = child = Child([self._python, "-m", self._module], _environment(os.environ), self._said)
        line = self._line(child, STARTING)
        if line and line.startswith(b"ready "):
            self.loader, _, lacks = line.decode("utf-8", "replace").removeprefix("ready ").strip().partition("\t")
            if lacks:
                log.warning("%s: %s", self._module, lacks)
                self.loader += f" ({lacks})"
            return child
        code = child.end(TO_DIE if line is not None else 0.0)
        said = self._last()
        self.end()
        if code == MISSING:
            raise Unsupported(said, hint=self._hint)
        how = f"ended with status {code}" if line is not None else f"was not ready in {STARTING:.0f} s"
        raise CkptsyncError(f"{self._module}: the child process {how}: {said}", hint="is torch's installation whole?")

    def _line(self, child: Child, seconds: float) -> bytes | None:
        """What it says within so many seconds, with a sign of life each second until then."""
        until = time.monotonic() + seconds
        while (line := child.line(_SLICE)) is None and time.monotonic() < until:
            self._told(0)
        return line

    def _death(self, child: Child, request: dict[str, Any]) -> Died | CkptsyncError:
        """Its limits end it by SIGALRM, SIGXCPU or a MemoryError; SIGKILL is the system's, or somebody's, and says nothing of the file."""
        code = child.end(TO_DIE)
        said = self._last()
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
        """The end of what it wrote to its standard error."""
        assert self._said
        size = self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, size - 4096))
        text = self._said.read().decode("utf-8", "replace").strip().rpartition("\n")[2]
        return text[:300] or "it said nothing"


def _environment(own: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in own.items() if name in _KEPT or name.startswith("LC_")} | _QUIET


_KEPT = frozenset(  # where programs, libraries, temporary files and homes are, and how text is written
    "PATH HOME PYTHONPATH USER LOGNAME LANG LANGUAGE TZ TMPDIR TEMP TMP LD_LIBRARY_PATH PYTHONHOME PYTHONFAULTHANDLER XDG_CACHE_HOME HF_HOME".split()  # noqa: SIM905
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
