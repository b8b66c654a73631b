"""The child process of level load, which may hang, blow up or die of what it reads.

It is limited from here and cannot raise its limits; its death over a file is an answer, too.  It
sandboxes itself (`sandbox`) and gets no secrets: of this process's environment only what programs
and libraries need to be found.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import IO, Any

from ckptsync.child import TO_DIE, Child, describe_end
from ckptsync.errors import CkptsyncError, Corrupt, Unsupported
from ckptsync.plain_json import parse
from ckptsync.verify.sandbox import MISSING
from ckptsync.verify.tracked_files import ReadProgress, no_progress

LOAD_CHILD = "ckptsync.verify.load_child"
LOAD_HINT = "pip install 'ckptsync[load]'"
STARTING = 120.0  # seconds to import Python and torch; a request's own time counts from there
_SLICE = 1.0  # seconds between two calls of `progress`
_GRACE = 5.0  # seconds beyond a request's time: the child's alarm comes first, and says more
_KEPT = frozenset(
    {
        *("PATH", "HOME", "PYTHONPATH", "PYTHONHOME", "PYTHONFAULTHANDLER", "LD_LIBRARY_PATH"),
        *("USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TEMP", "TMP"),
    }
)
QUIET = {  # one thread; nothing is written beside the libraries
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}

log = logging.getLogger(__name__)


class Died(Exception):
    """The child ended, or was ended, over a request; the text says how."""


class LoaderProcess:
    """`LOAD_CHILD`, started by the first request; after a death, started again.

    ``loader`` names its libraries, and what it could not sandbox itself against.
    """

    def __init__(self, progress: ReadProgress = no_progress, python: str = sys.executable) -> None:
        self._progress, self._python = progress, python
        self._child: Child | None = None
        self._errors: IO[bytes] | None = None
        self.loader = ""

    def __enter__(self) -> LoaderProcess:  # noqa: PYI034 - `Self` is younger than Python 3.10
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def start(self) -> Child:
        """Return the running process.

        Raises Unsupported where its libraries are not installed, CkptsyncError if it cannot start.
        """
        if self._child is not None:
            return self._child
        environment = {k: v for k, v in os.environ.items() if k in _KEPT or k.startswith("LC_")}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        command = [self._python, "-m", LOAD_CHILD]
        self._child = child = Child(command, environment | QUIET, self._errors)
        line = self._line(child, STARTING)
        if line and line.startswith(b"ready "):
            text = line.decode("utf-8", "replace").removeprefix("ready ").strip()
            self.loader, _, lacks = text.partition("\t")
            if lacks:
                log.warning("%s: %s", LOAD_CHILD, lacks)
                self.loader += f" ({lacks})"
            return child
        code, last = self._bury(child, TO_DIE if line is not None else 0.0)
        if code == MISSING:
            raise Unsupported(last, hint=LOAD_HINT)
        how = f"was not ready in {STARTING:.0f} s" if line is None else f"ended with status {code}"
        why = f"{LOAD_CHILD}: the child process {how}: {last}"
        raise CkptsyncError(why, hint="check the installation of torch")

    def ask(self, request: dict[str, Any], fds: Sequence[int] = ()) -> dict[str, Any]:
        """Send a request with open files; return its answer.

        Limits in it: ``wall`` and ``cpu`` in seconds; ``memory`` in bytes beyond what the child has
        now and the files have.  Raises Died, what `start` raises, and CkptsyncError for SIGKILL.
        """
        child = self.start()
        self._progress(0)
        mapped = 2 * sum(os.fstat(fd).st_size for fd in fds)
        child.allow(mapped + request["memory"], request["cpu"])
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
            answer: dict[str, Any] = parse(line, LOAD_CHILD)
        except Corrupt:
            self.end()
            raise Died(f"its answer is not JSON: {line[:80]!r}") from None
        return answer

    def end(self) -> None:
        """End the process, if it runs."""
        if self._child and self._errors:
            self._child.end()
            self._errors.close()
        self._child = self._errors = None

    def _line(self, child: Child, seconds: float) -> bytes | None:
        """Return the next line within so many seconds; call `progress` each second until then."""
        until = time.monotonic() + seconds
        while (line := child.line(_SLICE)) is None and time.monotonic() < until:
            self._progress(0)
        return line

    def _death(self, child: Child, request: dict[str, Any]) -> Died | CkptsyncError:
        """Return the error for a child that ended over a request.

        Its limits end it by SIGALRM, SIGXCPU or a MemoryError.  SIGKILL comes from the system or
        from somebody, and says nothing about the file.
        """
        code, last = self._bury(child, TO_DIE)
        if code == -signal.SIGALRM:
            return Died(f"not done in {request['wall']} s")
        if code == -signal.SIGXCPU:
            return Died(f"not done in {request['cpu']} s of CPU time")
        if code == -signal.SIGKILL:
            why = f"{LOAD_CHILD}: the child process was killed by SIGKILL: {last}"
            hint = "give this machine, or the service's MemoryMax, more memory, and verify again"
            return CkptsyncError(why, hint=hint)
        return Died(f"the child process {describe_end(code)}: {last}")

    def _bury(self, child: Child, patience: float) -> tuple[int | None, str]:
        """End the child; return its exit status and the last line of its standard error."""
        code = child.end(patience)
        assert self._errors
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - 4096))
        text = self._errors.read().decode("utf-8", "replace").strip().rpartition("\n")[2]
        self.end()
        return code, text[:300] or "no error message"
