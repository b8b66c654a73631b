"""Level load: torch and safetensors load every tensor, in a child that is limited and sandboxed.

Only the library that a user will load with can prove that a file loads, and it may hang, blow up or
die of what it reads. So it runs in a child process (`load_child`), which is limited from here and
cannot raise its limits; its death over a file is a finding. The child sandboxes itself (`sandbox`)
and gets no secrets: of this process's environment only what programs and libraries need to be
found.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import IO, Any

from ckptsync import safe_open
from ckptsync.child import TO_DIE, Child, describe_end
from ckptsync.errors import CkptsyncError, Corrupt, Incomplete, StoreError, Unsupported
from ckptsync.install_commands import install_extra
from ckptsync.layouts.file_names import DCP_SHARD, SAFETENSORS, TORCH
from ckptsync.plain_json import parse
from ckptsync.records.report import Level, Reading, VerifyFinding
from ckptsync.stores.stream import RangeSource
from ckptsync.tensors import Extent
from ckptsync.verifier.expected_files import ExpectedFile
from ckptsync.verifier.level_digest import Item, find_archives
from ckptsync.verifier.level_parse import UNLOADED
from ckptsync.verifier.sandbox import MISSING
from ckptsync.verifier.tracked_files import (
    CountedSource,
    ReadProgress,
    TrackedFiles,
    copy_to,
    local_place,
    no_progress,
)

Answer = Mapping[str, Any]
"""What `load_child` answers."""
LIBRARIES = ("safetensors", "torch")
LOAD_CHILD = "ckptsync.verifier.load_child"
STARTING = 120.0  # seconds to import Python and torch; a request's own time counts from there
_SLICE = 1.0  # seconds between two calls of `progress`
_GRACE = 5.0  # seconds beyond a request's time: the child's alarm comes first, and says more
_INHERITED = frozenset(
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


def load_files(
    source: CountedSource, files: Sequence[ExpectedFile], checkpoint: TrackedFiles
) -> tuple[list[VerifyFinding], Reading]:
    """Load every file with tensors in one child; return findings, and what was loaded.

    A last note says how much was loaded with which libraries. A file that is refused, or a shard
    that is compressed or without readable metadata, has a note. ``checkpoint`` is read for where in
    its shards the tensors lie. Raise Unsupported if no loader is installed, Incomplete if a file
    was deleted, StoreError, CkptsyncError if the child cannot start or was killed by SIGKILL.
    """
    loadable = [f for f in files if f.name.endswith((SAFETENSORS, *TORCH, DCP_SHARD))]
    has_items = any(file.name.endswith(DCP_SHARD) for file in loadable)
    archives = find_archives(checkpoint) if has_items else {}
    findings, answers = list[VerifyFinding](), list[Answer]()
    with LoaderProcess(source.progress) as child:
        for file in loadable:
            answer: Answer
            if not file.name.endswith(DCP_SHARD):
                kind = "safetensors" if file.name.endswith(SAFETENSORS) else "torch"
                answer = load_file(child, source.source, file, kind)
            elif file.path not in archives:
                answer = {"refused": "no readable .metadata says where in it tensors lie"}
            elif items := archives[file.path]:
                answer = load_file(child, source.source, file, "items", items)
            else:
                answer = {"refused": "it is compressed"}
            answers.append(answer)
            findings += _answer_findings(file.shown, answer)
        loader = child.loader
    loaded = [a for a in answers if "tensors" in a]
    tensors = sum(a["tensors"] for a in loaded)
    loaded_text = f"{tensors} tensors of {len(loaded)} files loaded with {loader}" if loader else ""
    no_files = "nothing to load: no file with tensors"
    findings.append(VerifyFinding("note", checkpoint.title, loaded_text or no_files))
    size_read, loadable_size = sum(a["read"] for a in loaded), sum(file.size for file in loadable)
    return findings, Reading("load", len(loaded), size_read, len(loadable), loadable_size, tensors)


def load_file(
    child: LoaderProcess,
    source: RangeSource,
    file: ExpectedFile,
    kind: str,
    items: Sequence[Item] = (),
) -> Answer:
    """Load one file in the child; return the child's answer, or a fault if it died.

    ``kind``: safetensors, torch, or items (``items``: archives in a shard). A file that is not on
    this machine is copied to a temporary file. Limits of memory, CPU seconds and seconds grow with
    its size. Raise Incomplete if it is missing, StoreError, and as `LoaderProcess.ask` does, but
    Died.
    """
    request = {
        "kind": kind,
        "items": items,
        "memory": 1 << 30,
        "cpu": 60 + file.size // (20 << 20),
        "wall": 300 + file.size // (2 << 20),
    }
    with open_file(source, file.name, file.size) as fd:
        try:
            return child.ask(request, [fd])
        except Died as e:
            return {"fault": str(e)}


def _answer_findings(shown: str, answer: Answer) -> Iterator[VerifyFinding]:
    """Yield an answer's findings: a fault is damage, a refusal a note; values not finite.

    Each of the first tensors with such values has a finding, the others have one together.
    """
    if fault := answer.get("fault"):
        yield VerifyFinding("load", shown, fault)
    if refused := answer.get("refused"):
        yield VerifyFinding("note", shown, f"{UNLOADED}{refused}")
    for name, count in answer.get("nonfinite", {}).items():
        detail = f"{name}: {count} values are not finite"
        yield VerifyFinding("nonfinite", shown, detail, tensors=(name,))
    if more := answer.get("more"):
        yield VerifyFinding(
            "nonfinite", shown, f"{more} more tensors have values that are not finite"
        )


@contextlib.contextmanager
def open_file(source: RangeSource, name: str, size: int) -> Iterator[int]:
    """Yield the descriptor of a file, or of a temporary copy if it is not on this machine.

    It is closed, and the copy deleted, afterwards. Raise Incomplete if it is missing, StoreError.
    """
    place = local_place(source, name)
    if place is None:
        with tempfile.TemporaryFile() as copy:
            copy_to(copy, source, Extent(name, 0, size))
            yield copy.fileno()
        return
    try:
        fd = safe_open.open_file(*place)
    except OSError as e:
        if safe_open.is_absence(e):
            raise Incomplete(f"{name}: not found") from e
        raise StoreError(f"{name}: {(e.strerror or str(e)).lower()}") from e
    try:
        yield fd
    finally:
        os.close(fd)


def require(level: Level) -> None:
    """Raise Unsupported, before anything is read, if level load's libraries are missing."""
    for library in LIBRARIES if level == "load" else ():
        if find_spec(library) is None:
            raise Unsupported(
                f"level load: {library} is not installed here", hint=install_extra("load")
            )


class Died(Exception):
    """The child ended, or was ended, over a request; the text says how."""


class LoaderProcess:
    """A child process that runs `LOAD_CHILD`, started by the first request and after a death.

    ``loader`` names its libraries, and which parts of the sandbox it could not have.
    """

    def __init__(self, progress: ReadProgress = no_progress, python: str = sys.executable) -> None:
        """Start nothing yet. ``python``: the interpreter that runs the child."""
        self._progress, self._python = progress, python
        self._child: Child | None = None
        self._errors: IO[bytes] | None = None
        self.loader = ""

    def __enter__(self) -> LoaderProcess:  # noqa: PYI034 - `Self` is younger than Python 3.10
        """Return itself; the first request starts the process."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the process."""
        self.end()

    def start(self) -> Child:
        """Return the running process; if none runs, start it and set ``loader``.

        Waits up to `STARTING` seconds until it is ready. Logs a warning if it is not sandboxed.
        Raise Unsupported if its libraries are not installed, CkptsyncError if it cannot start.
        """
        if self._child is not None:
            return self._child
        environment = {
            k: v for k, v in os.environ.items() if k in _INHERITED or k.startswith("LC_")
        }
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
        code, last_line = self._bury(child, TO_DIE if line is not None else 0.0)
        if code == MISSING:
            raise Unsupported(last_line, hint=install_extra("load"))
        how_it_ended = (
            f"was not ready in {STARTING:.0f} s" if line is None else f"ended with status {code}"
        )
        why = f"{LOAD_CHILD}: the child process {how_it_ended}: {last_line}"
        raise CkptsyncError(why, hint="check the installation of torch")

    def ask(self, request: dict[str, Any], fds: Sequence[int] = ()) -> dict[str, Any]:
        """Send a request with open files; return its answer. Start the process if none runs.

        Limits in it: ``wall`` and ``cpu`` in seconds; ``memory`` in bytes beyond what the child has
        now and twice the files. Raise Died if the child ended, took too long or answered no JSON,
        what `start` raises, and CkptsyncError for SIGKILL; after Died and SIGKILL it is ended.
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
        """Kill the process, if one runs; the next request starts another."""
        if self._child and self._errors:
            self._child.end()
            self._errors.close()
        self._child = self._errors = None

    def _line(self, child: Child, seconds: float) -> bytes | None:
        """Wait for the next line; return it, empty at the end of output, None after ``seconds``.

        Progress is called with 0 each second until then.
        """
        until = time.monotonic() + seconds
        while (line := child.line(_SLICE)) is None and time.monotonic() < until:
            self._progress(0)
        return line

    def _death(self, child: Child, request: dict[str, Any]) -> Died | CkptsyncError:
        """Return the error for a child that ended over a request; its end is awaited.

        Its limits end it by SIGALRM, SIGXCPU or a MemoryError: Died. SIGKILL comes from the system
        or from somebody, and says nothing about the file: CkptsyncError.
        """
        code, last_line = self._bury(child, TO_DIE)
        if code == -signal.SIGALRM:
            return Died(f"not done in {request['wall']} s")
        if code == -signal.SIGXCPU:
            return Died(f"not done in {request['cpu']} s of CPU time")
        if code == -signal.SIGKILL:
            text = f"{LOAD_CHILD}: the child process was killed by SIGKILL: {last_line}"
            hint = "give this machine, or the service's MemoryMax, more memory, and verify again"
            return CkptsyncError(text, hint=hint)
        return Died(f"the child process {describe_end(code)}: {last_line}")

    def _bury(self, child: Child, patience: float) -> tuple[int | None, str]:
        """End the child after up to ``patience`` seconds; return its status and last error line.

        The status is None if it could not be killed. The line has at most 300 characters.
        """
        code = child.end(patience)
        assert self._errors
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - 4096))
        last_line = self._errors.read().decode("utf-8", "replace").strip().rpartition("\n")[2]
        self.end()
        return code, last_line[:300] or "no error message"
