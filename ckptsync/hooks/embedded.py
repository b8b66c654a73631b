"""A worker that the training starts, where nobody can install one: a process of its own, which runs until all is stored.

    python -m ckptsync.hooks.embedded CONFIG SPOOL PID

waits until no other worker is at work in SPOOL (one of a training that died may still have much to send), and then becomes
``ckptsync run`` until process PID is gone and all is stored.  It is no child of the training: Ray, for one, kills the
children of its workers.  It logs to ``_ckptsync/embedded.log``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import json
import math
import os
import shlex
import site
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import ckptsync
from ckptsync.errors import ConfigError
from ckptsync.hooks import ending
from ckptsync.spool import folders, marks
from ckptsync.units import parse_duration
from ckptsync.walk import OURS

LOG = "embedded.log"
PATIENCE = 60.0  # seconds; twice `worker.scan_every`, within which a worker sees new checkpoints
_RESTART_AFTER = 60.0  # seconds: a worker that ran for so long could do its work, and was killed
_POLL = 0.5  # seconds
_ERROR, _HINT = "ckptsync: error: ", "ckptsync: hint: "
_TAIL = 16384  # bytes
_LAUNCH = """import os, subprocess, sys
os.nice(10)
print(subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True).pid)"""
_CONFIGURED = ("CKPTSYNC_STORE", "CKPTSYNC_ROLES")


@dataclass(frozen=True, slots=True)
class Options:
    """``store`` and ``run`` of the embedded worker; ``wait``: seconds that the process may stay at its end.

    ``error``: why the environment's wait is not valid; the other options hold all the same.
    """

    store: str = ""
    wait: float = 0.0
    run: str = ""
    error: ConfigError | None = None


def from_environment(environment: Mapping[str, str]) -> Options:
    """Return what CKPTSYNC_STORE, CKPTSYNC_RUN and CKPTSYNC_WAIT say."""
    store, wait, run = (environment.get(f"CKPTSYNC_{name}", "").strip() for name in ("STORE", "WAIT", "RUN"))
    try:
        return Options(store, parse_wait("CKPTSYNC_WAIT", wait), run)
    except ConfigError as e:
        return Options(store, 0.0, run, e)


def parse_wait(name: str, wait: float | str) -> float:
    """Return the seconds of the option ``name``: a number, or a text such as `10m`.  Raises ConfigError."""
    hint = "say for how long the training may stay at its end: 600, or 10m"
    text = str(wait).strip() or "0"
    try:
        is_number = isinstance(wait, float) or text.replace(".", "", 1).isdigit()
        found = float(text) if is_number else parse_duration(text)
    except ValueError as e:
        raise ConfigError(f"{name}: {e}", hint=hint) from e
    if not (math.isfinite(found) and found >= 0):
        raise ConfigError(f"{name}: {text[:40]} is not a time to wait", hint=hint)
    return found


# --- in the training process


@dataclass(frozen=True, slots=True)
class Worker:
    """A process that is no child of this one.  ``began``: when the system says that it began; ``since``: `time.monotonic`."""

    pid: int
    began: str
    since: float

    def is_running(self) -> bool:
        """Return whether it still runs."""
        return marks.began(self.pid) == self.began


_workers: dict[tuple[int, Path], Worker] = {}  # of this process and output directory
_covered: set[Path] = set()
_ends: dict[Path, str] = {}


def keep_running(output_dir: Path, store: str, run: str) -> None:
    """Start the worker of an output directory (as ``run``; default: its name) unless this process has.  Raises OSError."""
    key = (os.getpid(), output_dir)
    if key in _workers or is_covered(output_dir):
        return
    spool = output_dir / OURS
    pattern = {"path": glob.escape(str(output_dir)), **({"name": run} if run else {})}
    _workers[key] = start(spool, spool / f"embedded-{os.getpid()}.yaml", store, [pattern], os.getpid())
    _ends.pop(output_dir, None)


def start(spool: Path, config: Path, store: str, runs: Sequence[Mapping[str, str]], pid: int) -> Worker:
    """Start a worker that sends ``runs`` to ``store`` until process ``pid`` is gone and all is stored.  Raises OSError.

    It has a session of its own, so that a signal to the training's group does not end it.
    """
    settings = {"roles": ["worker"], "store": {"url": _absolute(store)}, "worker": {"runs": [*runs]}}
    folders.written(config.parent, config.name, settings)  # JSON is YAML
    return start_apart([sys.executable, "-m", "ckptsync.hooks.embedded", str(config), str(spool), str(pid)], spool / LOG)


def start_apart(command: Sequence[str], log: Path) -> Worker:
    """Start a process that outlives this one, whatever kills this one and its children.  Raises OSError."""
    launch = [sys.executable, "-I", "-S", "-c", _LAUNCH, *command]
    with folders.append(log) as out:
        answer = subprocess.run(  # noqa: S603  # our own program
            launch,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=out,
            env=child_environment(),
            cwd="/",  # ``-m`` imports from where it stands, and beside a model there may be a queue.py
            check=False,
        ).stdout
    if not answer.strip().isdigit():
        raise OSError(f"{command[0]}: could not be started; see {log}")
    pid = int(answer)
    return Worker(pid, marks.began(pid), time.monotonic())


def problem(output_dir: Path) -> str:
    """Return why the worker of an output directory sends nothing: how it ended, or what it waits for.  Raises OSError."""
    key, spool = (os.getpid(), output_dir), output_dir / OURS
    worker = _workers.get(key)
    if worker is not None and worker.is_running():
        why = waits_for(spool)
        return f"the embedded worker has no store yet: {why}" if why else ""
    if worker is not None and output_dir not in _ends:
        note_end({output_dir}, f"the embedded worker ended: {last_error(spool) or f'see {LOG} in {spool}'}")
        if time.monotonic() - worker.since >= _RESTART_AFTER:
            del _workers[key]  # it could do its work, and was killed: `keep_running` starts another
    return _ends.get(output_dir) or _ends.get(output_dir.parent, "")


def is_started(output_dir: Path) -> bool:
    """Return whether this process has started a worker for it."""
    return (os.getpid(), output_dir) in _workers


def is_running(output_dir: Path) -> bool:
    """Return whether the worker that this process started for it runs."""
    worker = _workers.get((os.getpid(), output_dir))
    return worker is not None and worker.is_running()


def cover(output_dirs: Collection[Path]) -> None:
    """Note that a worker of this node sends what is in these directories, and in directories in them."""
    _covered.update(output_dirs)


def is_covered(output_dir: Path) -> bool:
    """Return whether `cover` named it, or the directory that it is in."""
    return not _covered.isdisjoint((output_dir, output_dir.parent))


def note_end(output_dirs: Collection[Path], why: str) -> None:
    """Note why the worker of these directories, and of directories in them, has ended."""
    _ends.update(dict.fromkeys(output_dirs, why))


def push_command(output_dir: Path, store: str, run: str) -> str:
    """Return the command that uploads an output directory and its spool; ``STORE`` stands for a store that is not known."""
    where = _absolute(store) if store else "STORE"
    return shlex.join(["ckptsync", "push", str(output_dir), where, *(("--run", run) if run else ())])


def last_error(spool: Path) -> str:
    """Return the error and the hints with which a worker ended; empty if it logged none.  Raises OSError."""
    lines = _last_lines(spool)
    at, last = next(((n, line) for n, line in reversed([*enumerate(lines)]) if not line.startswith((" ", _HINT))), (0, ""))
    if last.startswith("{"):
        return ""  # it was killed in the middle of its work
    hints = [line.removeprefix(_HINT) for line in lines[at + 1 :] if line.startswith(_HINT)]
    if last.startswith("ModuleNotFoundError: "):
        hints.append(f"{sys.executable} -m pip install ckptsync brings what it needs")
    return "; ".join([last.removeprefix(_ERROR), *(f"hint: {hint}" for hint in hints)])


def waits_for(spool: Path) -> str:
    """Return why a worker waits for its store, with a hint; empty if it has its store.  Raises OSError."""
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


def child_environment() -> dict[str, str]:
    """Return the training's environment without the variables that override the configuration, and with ckptsync's directory.

    Not if ckptsync is installed: a packages directory in PYTHONPATH would come before the standard library, and
    hold old backports of its modules.
    """
    kept = {name: value for name, value in os.environ.items() if name not in _CONFIGURED}
    above = str(Path(ckptsync.__file__).parent.parent)
    if above in (*site.getsitepackages(), site.getusersitepackages()):
        return kept
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, (above, kept.get("PYTHONPATH", ""))))}


def _absolute(store: str) -> str:
    """Return a path as another working directory needs it; a URL as it is."""
    return store if "://" in store else str(Path(store).absolute())


# --- in the embedded worker's own process


def main(arguments: list[str]) -> None:
    """Become the worker, unless nothing is left to do."""
    from ckptsync.worker.node import node_id  # noqa: PLC0415  # a trainer's environment may lack what it needs

    config, spool, pid = arguments
    began = marks.began(int(pid))
    if await_turn(Path(spool), int(pid)):
        store = json.loads(folders.read(Path(config)) or b"")["store"]["url"]
        node = claim_node(os.environ.get("CKPTSYNC_NODE") or node_id(), store, Path(spool))
        is_alive = marks.began(int(pid)) == began != ""  # another process may have its number by now
        command = [sys.executable, "-m", "ckptsync", "run", "-c", config, "--until-gone", pid if is_alive else "0"]
        os.execve(sys.executable, command, {**os.environ, "CKPTSYNC_NODE": node})  # noqa: S606  # no shell is wanted


def await_turn(spool: Path, pid: int, patience: float = PATIENCE) -> bool:
    """Wait until no worker is at work in ``spool``.

    Return False if one still is ``patience`` seconds after process ``pid`` is gone: it sends what that process left.
    """
    began, until = marks.began(pid), time.monotonic() + patience
    if ending.is_served(spool):
        sys.stderr.write(f"ckptsync: waiting: another worker is at work in {spool}\n")
    while ending.is_served(spool) or not _is_next(spool):
        if began and marks.began(pid) == began:
            until = time.monotonic() + patience
        elif time.monotonic() >= until:
            return False
        time.sleep(_POLL)
    return True


def _is_next(spool: Path) -> bool:
    """Return whether this process is the one, of several that begin at once, that works next.  It holds the lock until it ends."""
    descriptor = folders.lock_file(spool / "turn.lock")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False
    os.set_inheritable(descriptor, True)  # noqa: FBT003  # the standard library's own
    return True


def claim_node(node: str, store: str, spool: Path) -> str:
    """Return ``node``, or, if another training here has that id in this store, an id of this output directory's.

    Two trainings of one machine may send to one store at the same time, and a node's id is one worker's there.
    The id is held until this process ends, whatever program it becomes.
    """
    with socket.socket(
        socket.AF_UNIX
    ) as holder:  # without a file: it goes with its process, and all containers of a network see it
        try:
            holder.bind(f"\0ckptsync {_short(f'{node} {store}')}")
        except OSError as e:
            if e.errno == errno.EADDRINUSE:
                return f"{node[:90]}-{_short(str(spool))[:8]}"
            return node  # no such sockets here; the store tells two workers of one id apart, and the second one ends
        os.set_inheritable(holder.detach(), True)  # noqa: FBT003  # the standard library's own
    return node


def _short(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


if __name__ == "__main__":
    main(sys.argv[1:])
