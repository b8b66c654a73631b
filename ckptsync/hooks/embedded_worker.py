"""Starts a worker from the training, where nobody can install one; waits for a store at its end.

On machines that belong to one job there is no service.  So the hook starts ``ckptsync run`` itself,
as a process that outlives the training until all is stored:

    python -m ckptsync.hooks.embedded_worker CONFIG SPOOL PID

waits until no other worker uses SPOOL (one of a training that died may still have much to send),
and then becomes ``ckptsync run`` until process PID is gone and all is stored.  It is no child of
the training: Ray, for one, kills the children of its workers.  It logs to
``_ckptsync/embedded.log``.
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
import signal
import site
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import ckptsync
from ckptsync.errors import CkptsyncError, ConfigError
from ckptsync.install_commands import install_extra
from ckptsync.quantities import parse_duration
from ckptsync.spool import markers, pins, safe_files
from ckptsync.walk import SPOOL

LOG = "embedded.log"
PATIENCE = 60.0  # seconds; twice `worker.scan_every`, within which a worker sees new checkpoints
RESTART = 15.0  # seconds: longer than a service needs to restart
RESTART_EVERY = 60.0  # seconds from one start of the worker of a directory to the next
_POLL = 0.5  # seconds
_ERROR, _HINT = "ckptsync: error: ", "ckptsync: hint: "
_TAIL = 16384  # bytes
_LAUNCH = """import os, subprocess, sys
os.nice(10)
print(subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, stdout=sys.stderr, \
start_new_session=True).pid)"""
_CONFIGURED = ("CKPTSYNC_STORE", "CKPTSYNC_ROLES")
_OF_WORKERS = ("node", "limits", "log")  # a head of this machine may listen, and send alerts


def parse_wait(wait: float | str) -> float:
    """Return a waiting time in seconds, of a number or of a text such as `10m`; 0 for an empty one.

    Raises ConfigError for anything else, a negative number, infinity or NaN.
    """
    text = str(wait).strip() or "0"
    try:
        is_number = isinstance(wait, float) or text.replace(".", "", 1).isdigit()
        seconds = float(text) if is_number else parse_duration(text)
        error = (
            "" if math.isfinite(seconds) and seconds >= 0 else f"{text[:40]} is not a time to wait"
        )
    except ValueError as e:
        seconds, error = 0.0, str(e)
    if error:
        hint = "give the seconds that the training may wait at its end: 600, or 10m"
        raise ConfigError(f"wait (CKPTSYNC_WAIT): {error}", hint=hint)
    return seconds


# --- in the training process


@dataclass(frozen=True, slots=True)
class EmbeddedWorker:
    """A worker process that this process has started, and that is no child of it.

    ``began``: when it began, as the system says; ``since``: the same by `time.monotonic`.
    """

    pid: int
    began: str
    since: float

    def is_running(self) -> bool:
        """Return whether the worker still runs: its PID has the start time that was recorded."""
        return markers.start_time(self.pid) == self.began


_workers: dict[tuple[int, Path], EmbeddedWorker] = {}  # of this process and output directory


def keep_running(
    output_dir: Path, store: str, run: str = "", configured: Mapping[str, object] | None = None
) -> None:
    """Start the worker of an output directory, unless this process has one that runs.

    A worker that has ended is replaced a minute after its start, or later.  Writes its
    configuration into the spool, which is made if it is missing.  The worker outlives this process,
    whatever kills this one and its children, and has a session of its own, so a signal to the
    training's group does not end it.  Raises OSError, also if it could not be started.

    Args:
        output_dir: the directory.
        store: the store's URL or path.
        run: the run's name in the store; `{dir}` stands for the directory's own, the default.
        configured: further sections of a configuration file.

    """
    key = (os.getpid(), output_dir)
    before = _workers.get(key)
    if before and (before.is_running() or time.monotonic() - before.since < RESTART_EVERY):
        return
    spool = output_dir / SPOOL
    config = spool / f"embedded-{os.getpid()}.yaml"
    name = {"name": run.replace("{dir}", output_dir.name)} if run else {}
    settings = {
        **{key: section for key, section in (configured or {}).items() if key in _OF_WORKERS},
        "log": {**_section(configured, "log"), "format": "json"},  # `read_log_problem` reads it
        "roles": ["worker"],
        "store": {**_section(configured, "store"), "url": _absolute(store)},
        "worker": {
            **_section(configured, "worker"),
            "runs": [{"path": glob.escape(str(output_dir)), **name}],
        },
    }
    safe_files.make_folders(spool)
    safe_files.write_json(spool, config.name, settings)  # JSON is YAML
    module = "ckptsync.hooks.embedded_worker"
    worker = [sys.executable, "-m", module, str(config), str(spool), str(os.getpid())]
    with safe_files.append(spool / LOG) as out:
        answer = subprocess.run(  # noqa: S603  # our own program
            [sys.executable, "-I", "-S", "-c", _LAUNCH, *worker],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=out,
            env=child_environment(),
            # ``-m`` imports from where it stands, and beside a model there may be a queue.py
            cwd="/",
            check=False,
        ).stdout
    if not answer.strip().isdigit():
        raise OSError(f"{sys.executable}: could not be started; see {spool / LOG}")
    pid = int(answer)
    _workers[key] = EmbeddedWorker(pid, markers.start_time(pid), time.monotonic())


def child_environment() -> dict[str, str]:
    """Return the training's environment without variables that override the configuration.

    ckptsync's directory is added to PYTHONPATH unless it is installed: a packages directory there
    would come before the standard library, and hold old backports of its modules.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _CONFIGURED}
    above = str(Path(ckptsync.__file__).parent.parent)
    if above not in (*site.getsitepackages(), site.getusersitepackages()):
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, (above, environment.get("PYTHONPATH", "")))
        )
    return environment


def _absolute(store: str) -> str:
    """Return a path as an absolute one; a URL as it is."""
    return store if "://" in store else str(Path(store).absolute())


def _section(configured: Mapping[str, object] | None, name: str) -> Mapping[str, object]:
    """Return a section of a configuration; empty if there is none."""
    section = (configured or {}).get(name)
    return section if isinstance(section, dict) else {}


def stop(output_dir: Path) -> None:
    """Send SIGTERM to the worker that this process started for a directory, and forget it."""
    worker = _workers.pop((os.getpid(), output_dir), None)
    if worker is not None and worker.is_running():
        with contextlib.suppress(OSError):  # it has just ended
            os.kill(worker.pid, signal.SIGTERM)


def expect_end(output_dir: Path) -> None:
    """Let `keep_running` replace this process's worker as soon as it has ended, without the minute.

    A scheduler's signal may have gone to every process of a job, and so to the worker.
    """
    key = (os.getpid(), output_dir)
    if (before := _workers.get(key)) is not None:
        _workers[key] = replace(before, since=-math.inf)


def is_worker_running(output_dir: Path) -> bool:
    """Return whether the worker that this process started for a directory runs."""
    worker = _workers.get((os.getpid(), output_dir))
    return worker is not None and worker.is_running()


def find_problem(output_dir: Path) -> str:
    """Return why the worker that this process started has ended, or waits for its store.

    Empty if it runs and does not wait, or if this process started none.  Raises OSError.
    """
    worker, spool = _workers.get((os.getpid(), output_dir)), output_dir / SPOOL
    if worker is None:
        return ""
    is_at_work, why = worker.is_running(), read_log_problem(spool)
    if is_at_work:
        return f"the embedded worker cannot use its store yet: {why}" if why else ""
    return f"the embedded worker ended: {why or f'see {LOG} in {spool}'}"


def read_log_problem(spool: Path) -> str:
    """Return the last error in a worker's log, with its hints; empty if there is none.

    It is the error with which the worker ended, or why it waits for its store.  Errors before it
    last started or stopped do not count, nor what lies before the last 16 KiB.  Raises OSError.
    """
    data = safe_files.read(spool / LOG, last=_TAIL) or b""
    lines = data.decode("utf-8", "replace").splitlines()
    is_log = bool(lines) and lines[-1].startswith("{")  # of JSON; what ends it is text
    hints: list[str] = []
    for line in reversed(lines):
        if is_log:
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if event.get("phase") in ("starting", "started", "stopped"):
                    return ""
                if event.get("phase") == "waiting" and "error" in event:
                    return "; hint: ".join(filter(None, [event["error"], event.get("hint", "")]))
        elif line.startswith(_HINT):
            hints.insert(0, f"; hint: {line.removeprefix(_HINT)}")
        elif not line.startswith(" "):
            if line.startswith("ModuleNotFoundError: "):
                hints.append(f"; hint: {install_extra('')}")
            return line.removeprefix(_ERROR) + "".join(hints)
    return ""


def who_uploads(output_dir: Path) -> str:
    """Return, in words, which worker uploads a directory's saves after this process.

    Empty if none runs.
    """
    if is_worker_running(output_dir):
        return "the embedded worker goes on with them after this process"
    if is_served(output_dir / SPOOL):
        return "this node's worker goes on with them"
    return ""


def push_command(output_dir: Path, store: str, run: str) -> str:
    """Return the command that uploads a directory and its spool; ``STORE`` for an unknown store."""
    name = ("--run", run.replace("{dir}", output_dir.name)) if run else ()
    url = _absolute(store) if store else "STORE"
    return shlex.join(["ckptsync", "push", str(output_dir), "--store", url, *name])


# --- the wait for the store


def is_served(spool: Path) -> bool:
    """Return whether a worker holds its lock in a spool, as each does for as long as it lives.

    False too where this user may not open the spool or the lock.  A shared lock is tried for a
    moment: a worker that starts in this moment fails, and its service tries again.
    """
    try:
        locks = [path for path in safe_files.list_paths(spool) if path.match("worker-*.lock")]
    except CkptsyncError:  # another user's: no worker of this user is at work in it
        return False
    for lock in locks:
        try:
            descriptor = safe_files.lock_file(lock, is_new=False)
        except OSError:
            continue  # gone, or not readable
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(descriptor)
    return False


def list_unstored(output_dir: Path) -> tuple[str, ...]:
    """Return the names of hooks' pins that no manifest in the store names yet.

    Raises as `pins.list_pins`.
    """
    return tuple(
        p.path.name for p in pins.list_pins(output_dir) if p.commit is not None and not p.stored
    )


def wait(output_dir: Path, until: float, log: Callable[[str], None]) -> None:
    """Wait until the store has all that hooks have pinned, at most until ``until`` (monotonic).

    Stops when no worker has run for 15 seconds, and logs that, or what is not stored by then.
    Raises as `list_unstored`.
    """
    served_at = time.monotonic()
    while unstored_pins := list_unstored(output_dir):
        now = time.monotonic()
        if is_worker_running(output_dir) or is_served(output_dir / SPOOL):
            served_at = now
        if now - served_at >= RESTART:
            log(f"not waiting: no worker runs for {output_dir / SPOOL}")
            return
        if now >= until:
            log(f"no longer waiting: not uploaded yet: {', '.join(unstored_pins)}")
            return
        time.sleep(_POLL)


# --- in the embedded worker's own process


def main(arguments: list[str]) -> None:
    """Replace this process by ``ckptsync run`` with ``[config, spool, pid]``; wait for its turn.

    Returns, and starts nothing, if another worker sends what is left; else never returns.  The run
    ends when process ``pid`` is gone and all is stored.
    """
    # a trainer's environment may lack what it needs
    from ckptsync.worker.node_identity import node_id  # noqa: PLC0415

    config, spool, pid = arguments
    began = markers.start_time(int(pid))
    if not await_turn(Path(spool), int(pid)):
        return
    settings = json.loads(safe_files.read(Path(config)) or b"")
    requested_node = os.environ.get("CKPTSYNC_NODE") or settings.get("node") or node_id()
    node = claim_node(requested_node, settings["store"]["url"], Path(spool))
    # another process may have its number by now
    is_alive = markers.start_time(int(pid)) == began != ""
    run = [sys.executable, "-m", "ckptsync", "run", "-c", config]
    os.execve(  # noqa: S606  # no shell is wanted
        sys.executable,
        [*run, "--until-gone", pid if is_alive else "0"],
        {**os.environ, "CKPTSYNC_NODE": node},
    )


def await_turn(spool: Path, pid: int, patience: float = PATIENCE) -> bool:
    """Wait until no worker uses ``spool``; return whether that was so in time.

    False if one still uses it ``patience`` seconds after process ``pid`` is gone: that worker sends
    what the process left.
    """
    began, until = markers.start_time(pid), time.monotonic() + patience
    if is_served(spool):
        sys.stderr.write(f"ckptsync: waiting: another worker is at work in {spool}\n")
    while is_served(spool):
        if began and markers.start_time(pid) == began:
            until = time.monotonic() + patience
        elif time.monotonic() >= until:
            return False
        time.sleep(_POLL)
    return True


def claim_node(node: str, store: str, spool: Path, patience: float = RESTART) -> str:
    """Reserve a node id for this process and return it: ``node``, or one of this directory alone.

    Two trainings of one machine may send to one store at the same time, and a node's id is one
    worker's there.  The id is reserved until this process ends, whatever program it becomes.
    Where the system has no such reservations, ``node`` is returned unreserved: the store tells two
    workers of one id apart.

    Where a worker has served ``spool`` under this id, that worker may be about to end: then this
    waits up to ``patience`` seconds for the id.  Under a new id, the old worker's pins would count
    as another node's for minutes.
    """
    # without a file: it goes with its process, and all containers of a network see it
    with socket.socket(socket.AF_UNIX) as holder:
        until = time.monotonic() + patience
        while True:
            try:
                holder.bind(f"\0ckptsync {_short(f'{node} {store}')}")
                break
            except OSError as e:
                if e.errno != errno.EADDRINUSE:
                    # no such sockets here; the store tells two workers of one id apart, and the
                    # second one ends
                    return node
                if time.monotonic() >= until or not (spool / f"worker-{node}.lock").exists():
                    return directory_node(node, spool)
            time.sleep(_POLL)
        os.set_inheritable(holder.detach(), True)  # noqa: FBT003  # the standard library's own
    return node


def directory_node(node: str, spool: Path) -> str:
    """Return the node id of a worker of this output directory alone."""
    return f"{node[:90]}-{_short(str(spool))[:8]}"


def _short(text: str) -> str:
    """Return 16 hex digits of a text's digest."""
    return sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


if __name__ == "__main__":
    main(sys.argv[1:])
