"""Functions that `ckptsync.hooks.ray_callback` runs in the processes of Ray's workers; none raises.

`serve` starts one embedded worker on each node.  It sends checkpoints of Ray's working directory of the run
(``<session>/artifacts/<run>``, where relative outputs of Ray Train 2 land) and of output directories in it.
Trainers that write elsewhere start an embedded worker of their own (`ckptsync.hooks.embedded`).
The embedded worker is no child of the Ray worker, since Ray kills those; one that was
started earlier on this node finishes first.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptsync.hooks import autoload, embedded
from ckptsync.hooks.embedded import LOG, Worker
from ckptsync.hooks.pinning import COPY_THREAD
from ckptsync.spool import folders
from ckptsync.walk import OURS

ANSWER_WITHIN = 60.0  # seconds for a worker's facts: a driver, name service or mount may hang
_log = logging.getLogger("ckptsync.hook")
_COPY_WITHIN = 300.0  # seconds
_POLL = 1.0  # seconds


def prepare(variables: Mapping[str, str]) -> None:
    """Give every Trainer of this process the hook, and the driver's variables, which Ray does not pass on."""
    os.environ.update(variables)
    autoload.install()


def serve(store: str) -> str:
    """Start the node's embedded worker, on the first Ray worker of each node; return what went wrong, or the empty string."""
    try:
        from ray import train  # noqa: PLC0415

        context = train.get_context()
        if os.environ.get("RAY_CHDIR_TO_TRIAL_DIR", "1").lower() in ("0", "false"):
            return ""  # Ray's workers have no working directory of the run's own
        directory = Path(context.get_storage().local_working_directory)
        embedded.cover({directory, directory.resolve()})  # Ray's own directory may be behind a link
        if context.get_local_rank() == 0:
            log_begins = log_size(directory)
            worker = start(store, directory, context.get_experiment_name(), os.getpid())
            watch = threading.Thread(target=_watch, args=(worker, directory, log_begins), name="ckptsync-watch", daemon=True)
            watch.start()
    except Exception as e:  # noqa: BLE001  # training comes first; the caller logs it
        return f"{socket.gethostname()}: {type(e).__name__}: {e}"
    return ""


def start(store: str, directory: Path, run: str, pid: int) -> Worker:
    """Start a worker that sends ``directory``, a run's working directory, until process ``pid`` has gone and all is stored.

    In the store, its own checkpoints belong to ``run``, those of a directory ``out`` in it to ``run-out``.
    Raises OSError.
    """
    spool = directory / OURS
    directory.mkdir(parents=True, exist_ok=True)
    folders.make(spool)
    return embedded.start(spool, spool / f"ray-{pid}.yaml", store, run_patterns(directory, run), pid)


def _watch(worker: Worker, directory: Path, log_begins: int) -> None:
    """Log an error of the embedded worker at once: nobody would see it before the end of the training."""
    with contextlib.suppress(OSError):  # somebody deleted the log
        if why := wait_for_error(worker, directory, log_begins):
            embedded.note_end({directory, directory.resolve()}, why)
            _log.warning("ckptsync: nothing is sent from %s, %s: %s", socket.gethostname(), directory, why)


def log_size(directory: Path) -> int:
    """Return the bytes that embedded workers have logged there until now."""
    log = folders.status(directory / OURS / LOG)
    return log.st_size if log else 0


def wait_for_error(worker: Worker, directory: Path, log_begins: int) -> str:
    """Wait until the worker ends; return its error: a store with a wrong name, keys that only the driver has.  Raises OSError."""
    while worker.is_running():
        time.sleep(_POLL)
    grown = log_size(directory) - log_begins
    lines = (folders.read(directory / OURS / LOG, last=max(1, grown)) or b"").decode("utf-8", "replace").splitlines()
    errors = [line for line in lines if line.startswith(("ckptsync: error: ", "ckptsync: hint: "))]
    return "; ".join(line.removeprefix("ckptsync: ") for line in errors)


def run_patterns(directory: Path, run: str) -> list[dict[str, str]]:
    """Return a worker's configuration of the runs in a Ray run's working directory.

    The worker names directories after what the wildcards of their pattern match, so the run's own name is a wildcard
    that matches nothing else.  No run's name in a store begins with a sign: where a Ray run's does,
    the name of the directory above goes before it.
    """
    name, above = directory.name, glob.escape(str(directory.parent))
    if not name[:1].isalnum():
        above = f"{glob.escape(str(directory.parent.parent))}/{_exact_wildcard(directory.parent.name)}"
    own = {"path": glob.escape(str(directory)), "name": store_name(run)}
    return [own, {"path": f"{above}/{_exact_wildcard(name)}/*"}]


def _exact_wildcard(name: str) -> str:
    """Return a wildcard that matches this name alone."""
    at = next((n for n, sign in enumerate(name) if sign.isalnum()), 0)
    return f"{glob.escape(name[:at])}[{name[at]}]{glob.escape(name[at + 1 :])}"


def store_name(run: str) -> str:
    """Return a Ray run's name as a store can keep it."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", run).lstrip("._-")[:100] or "ray"


def probe_node(within: float = ANSWER_WITHIN) -> dict[str, Any]:
    """Return the facts of this process and machine that doctor compares; ``error`` where there are none in time."""
    answers: list[dict[str, Any]] = []
    probing = threading.Thread(target=lambda: answers.append(_facts()), name="ckptsync-doctor", daemon=True)
    probing.start()
    probing.join(within)
    return answers[0] if answers else {"error": f"{socket.gethostname()}: no answer within {within:g} s"}


def _facts() -> dict[str, Any]:
    try:
        from ckptsync.doctor import probe  # noqa: PLC0415

        return probe.gather()
    except Exception as e:  # noqa: BLE001  # any error: the caller logs it
        return {"error": f"{socket.gethostname()}: {type(e).__name__}: {e}"}


def finish() -> None:
    """Pin the final model and finish copies: the training has ended well, and Ray will kill this process."""
    hf = sys.modules.get("ckptsync.hooks.hf")
    if hf is not None:
        hf.leave()
    for thread in threading.enumerate():
        if thread.name == COPY_THREAD:
            thread.join(_COPY_WITHIN)
