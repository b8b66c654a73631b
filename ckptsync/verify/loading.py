"""Really loading a safetensors file, in a limited child process: its death is an answer too."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ckptsync.errors import CkptsyncError, Incomplete, NotFound, StoreError, Unsupported
from ckptsync.model import Extent
from ckptsync.stores import beneath
from ckptsync.stores.opening import directory_of
from ckptsync.stores.tree import LocalFiles
from ckptsync.verify.reading import Reads, pieces

PACKAGES = str(Path(__file__).parents[2])
HINT = "pip install 'ckptsync[load]'"
_MISSING = 3
_STARTING = 60  # seconds in which Python and torch are imported; the child counts its own time from there


@dataclass(frozen=True, slots=True)
class Limits:
    """What a child may take: ``memory`` bytes beyond its libraries and the mapped file, ``cpu`` and ``wall`` in seconds."""

    memory: int
    cpu: int
    wall: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """``fault`` is empty if every tensor was loaded.  ``read`` counts bytes; ``nonfinite`` is ``(name, count)``, ``more`` names left out."""

    loader: str
    tensors: int = 0
    read: int = 0
    nonfinite: tuple[tuple[str, int], ...] = ()
    more: int = 0
    fault: str = ""


def limits(size: int) -> Limits:
    """For a file of ``size`` bytes: far more than loading needs, so that only what hangs or blows up meets them."""
    return Limits(memory=1 << 30, cpu=60 + size // (20 << 20), wall=300 + size // (2 << 20))


def load(fd: int, most: Limits, python: str = sys.executable) -> Loaded:
    """Load the file that ``fd`` has open.  Raises Unsupported where safetensors is not installed, CkptsyncError if the child cannot start."""
    command = [python, "-m", "ckptsync.verify.child", f"/dev/fd/{fd}", str(most.memory), str(most.cpu), str(most.wall)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (PACKAGES, os.environ.get("PYTHONPATH"))))}
    child = subprocess.Popen(  # noqa: S603 - no shell, our own module
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=(fd,),
        cwd="/",  # not where the caller is: a torch.py in a checkpoint must not be imported
        env=environment,
        start_new_session=True,
    )
    try:
        out, err = child.communicate(timeout=most.wall + _STARTING)
    except subprocess.TimeoutExpired:
        return Loaded("", fault=f"not loaded in {most.wall} s")
    finally:
        _end(child)
    return _answer(child.returncode, out.decode("utf-8", "replace"), err.decode("utf-8", "replace"), most)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Not waited for long: a process that hangs in a dead file server cannot be killed, and need not be."""
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):  # it ended by itself meanwhile
            os.killpg(child.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(5)
    for pipe in filter(None, (child.stdout, child.stderr)):
        pipe.close()


def _answer(code: int, out: str, err: str, most: Limits) -> Loaded:
    first, _, rest = out.partition("\n")
    if code == _MISSING:
        raise Unsupported("level load: neither torch with safetensors nor safetensors alone is installed here", hint=HINT)
    if not first.startswith("ready "):
        raise CkptsyncError(
            f"level load: the loading process ended with status {code}: {_last(err)}", hint="is torch's installation whole?"
        )
    loader = first.removeprefix("ready ")
    if code or not rest:
        return Loaded(loader, fault=_death(code, err, most))
    told = json.loads(rest)
    if "fault" in told:
        return Loaded(loader, fault=told["fault"])
    return Loaded(loader, told["tensors"], told["read"], tuple(told["nonfinite"].items()), told["more"])


def _death(code: int, err: str, most: Limits) -> str:
    if code == -signal.SIGALRM:
        return f"not loaded in {most.wall} s"
    if code == -signal.SIGXCPU:
        return f"not loaded in {most.cpu} s of CPU time"
    if code < 0:
        return f"the loading process was killed by {signal.Signals(-code).name}: {_last(err)}"
    return f"the loading process ended with status {code}: {_last(err)}"


def _last(err: str) -> str:
    return err.strip().rpartition("\n")[2][:300] or "it said nothing"


@contextlib.contextmanager
def descriptor(source: Reads, name: str, size: int) -> Iterator[int]:
    """``name`` as an open file of this machine: itself, or a copy that goes away with it.  Raises Incomplete if it is not there."""
    root = source.root if isinstance(source, LocalFiles) else directory_of(source)
    if root is None:
        with _copy(source, name, size) as fd:
            yield fd
        return
    try:
        fd = beneath.open_file(root, name)
    except OSError as e:
        if beneath.is_absence(e):
            raise Incomplete(f"{name}: not there") from e
        raise StoreError(f"{name}: {(e.strerror or str(e)).lower()}") from e
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _copy(source: Reads, name: str, size: int) -> Iterator[int]:
    """In the directory for temporary files, one at a time."""
    room = shutil.disk_usage(tempfile.gettempdir()).free
    if size > room:
        raise StoreError(
            f"{name}: no room for a copy of {size} bytes to load, {room} are free", hint=f"set TMPDIR, now {tempfile.gettempdir()}"
        )
    with tempfile.TemporaryFile() as file:
        try:
            for piece in pieces(source, Extent(name, 0, size)):
                file.write(piece)
            file.flush()
        except NotFound as e:
            raise Incomplete(f"{name}: not there") from e
        except OSError as e:
            raise StoreError(f"{name}: no room for a copy to load: {(e.strerror or str(e)).lower()}", hint="set TMPDIR") from e
        yield file.fileno()
