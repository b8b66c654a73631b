"""A worker that the training brings along, where nobody can install one: a process of its own, which stays until all is sent."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shlex
import site
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import ckptsync
from ckptsync.hooks.here import Here
from ckptsync.spool import folders, marks

LOG = "embedded.log"
_ERROR, _HINT = "ckptsync: error: ", "ckptsync: hint: "
_TAIL = 16384  # bytes
_NICE = 10
_NOWHERE = Path("/")  # ``-m`` takes modules from where it stands: beside a model there may be code, and names such as ``queue.py``
_LAUNCH = """import os, subprocess, sys
os.nice(int(sys.argv[1]))
print(subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True).pid)"""
_CONFIGURED = ("CKPTSYNC_STORE", "CKPTSYNC_ROLES")
_COVERED: set[Path] = set()
_ENDED: dict[Path, str] = {}


class Worker(Protocol):
    """What the hook asks of it."""

    returncode: int | None

    def poll(self) -> int | None:
        """``None`` while it is at work."""
        ...


@dataclass(slots=True)
class Apart:
    """A process that is no child of this one.  How it ended nobody is told: ``returncode`` is then 1, since it stays until the training has gone."""

    pid: int
    began: str
    returncode: int | None = None

    def poll(self) -> int | None:
        """``None`` while it is at work."""
        if self.returncode is None and marks.began(self.pid) != self.began:
            self.returncode = 1
        return self.returncode


_BEGUN: dict[tuple[Path, str, str, int], Worker] = {}


def begin(here: Here, store: str, run: str, pid: int) -> Worker:
    """`start`, and apart from this process where that is one of Ray's, which kill their children as they end; a training before this one may have begun it.

    ray.io, "Lifetimes of a User-Spawn Process": RAY_kill_child_processes_on_worker_exit is true by default, and not recursive.  Raises OSError.
    """
    begun = _BEGUN.get((here.output_dir, store, run, pid))
    if begun is not None and begun.poll() is None:
        return begun
    if "ray" in sys.modules:
        worker: Worker = start_apart(_command(here, store, run, pid), here.spool / LOG, _NOWHERE)
    else:
        worker = start(here, store, run, pid)
    _BEGUN[here.output_dir, store, run, pid] = worker
    return worker


def start(here: Here, store: str, run: str, pid: int) -> subprocess.Popen[bytes]:
    """Begin to send this output directory to ``store``, as ``run`` (default: its own name); it ends when process ``pid`` is gone and all is stored.

    It has a session of its own, so that a signal to the training's group does not end it, and none of the training's open files.
    What it has to say is in ``_ckptsync/embedded.log``.  Raises OSError.
    """
    command = _command(here, store, run, pid)
    with folders.append(here.spool / LOG) as log:
        child = subprocess.Popen(  # noqa: S603  # our own program
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=_environment(),
            cwd=_NOWHERE,
            start_new_session=True,
        )
    os.setpriority(os.PRIO_PROCESS, child.pid, _NICE)
    return child


def start_apart(command: Sequence[str], log: Path, folder: Path) -> Apart:
    """A process that outlives this one whatever kills that, and its children.  Raises OSError."""
    launch = [sys.executable, "-I", "-S", "-c", _LAUNCH, str(_NICE), *command]
    with folders.append(log) as out:
        said = subprocess.run(  # noqa: S603  # our own program
            launch, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=out, env=_environment(), cwd=folder, check=False
        ).stdout
    if not said.strip().isdigit():
        raise OSError(f"{command[0]}: could not be started; see {log}")
    pid = int(said)
    return Apart(pid, marks.began(pid))


def last_error(spool: Path) -> str:
    """Return the reason that a worker gave when it ended, and what to do about it; empty if it gave none.  Raises OSError."""
    said = _last_lines(spool)
    at, last = next(((n, line) for n, line in reversed([*enumerate(said)]) if not line.startswith((" ", _HINT))), (0, ""))
    if last.startswith("{"):
        return ""  # it was killed in the middle of its work
    hints = [line.removeprefix(_HINT) for line in said[at + 1 :] if line.startswith(_HINT)]
    if last.startswith("ModuleNotFoundError: "):
        hints.append(f"{sys.executable} -m pip install ckptsync brings what it needs")
    return "; ".join([last.removeprefix(_ERROR), *(f"hint: {hint}" for hint in hints)])


def waits_for(spool: Path) -> str:
    """Return why a worker at work waits for its store, and what to do about it; empty if it has one.  Raises OSError."""
    for line in reversed(_last_lines(spool)):
        if not line.startswith("{"):
            continue
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if event.get("phase") in ("starting", "started", "stopped"):
                return ""
            if event.get("phase") == "waiting" and "error" in event:
                return "; hint: ".join(filter(None, [event["error"], event.get("hint", "")]))
    return ""


def _last_lines(spool: Path) -> list[str]:
    return (folders.read(spool / LOG, last=_TAIL) or b"").decode("utf-8", "replace").splitlines()


def cover(folders: set[Path]) -> None:
    """Say that a worker of this node sends what is in these output directories."""
    _COVERED.update(folders)


def say_ended(folders: set[Path], why: str) -> None:
    """Say that the worker that covers these output directories has ended with an error."""
    _ENDED.update(dict.fromkeys(folders, why))


def why_ended(output_dir: Path) -> str:
    """Return what `say_ended` said of it, or of the directory that it is in; else nothing."""
    return _ENDED.get(output_dir) or _ENDED.get(output_dir.parent, "")


def push_command(output_dir: Path, store: str, run: str) -> str:
    """Return the command that uploads what an output directory and its spool hold; ``STORE`` stands for a store that is not known."""
    where = _absolute(store) if store else "STORE"
    return shlex.join(["ckptsync", "push", str(output_dir), where, *(("--run", run) if run else ())])


def is_covered(output_dir: Path) -> bool:
    """Whether somebody else sends it: it, or the directory that it is in, was said to be covered."""
    return not _COVERED.isdisjoint((output_dir, output_dir.parent))


def write_config(path: Path, store: str, runs: Sequence[Mapping[str, str]]) -> None:
    """What a worker is told; JSON is YAML.  Raises OSError."""
    folders.written(path.parent, path.name, {"roles": ["worker"], "store": {"url": _absolute(store)}, "worker": {"runs": [*runs]}})


def _command(here: Here, store: str, run: str, pid: int) -> list[str]:
    config = here.spool / f"embedded-{here.rank}.yaml"
    write_config(config, store, [{"path": glob.escape(str(here.output_dir)), **({"name": run} if run else {})}])
    return [sys.executable, "-m", "ckptsync.hooks.turn", str(config), str(here.spool), str(pid)]


def _environment() -> dict[str, str]:
    """The training's own, but for what the configuration says, which it would override, and with the directory that ckptsync is in.

    Not if that is the Python's own for packages: in PYTHONPATH they would come before the standard library, whose old backports are still installed.
    """
    kept = {name: value for name, value in os.environ.items() if name not in _CONFIGURED}
    above = str(Path(ckptsync.__file__).parent.parent)
    if above in (*site.getsitepackages(), site.getusersitepackages()):
        return kept
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, (above, kept.get("PYTHONPATH", ""))))}


def _absolute(store: str) -> str:
    """A path as the child will find it, whatever its working directory; a URL as it is."""
    return store if "://" in store else str(Path(store).absolute())
