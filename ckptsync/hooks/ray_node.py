"""One worker of ours for each node of a Ray training, where nobody can install one: it sends what this node's Ray workers write.

It sees Ray's working directory of the run (``<session>/artifacts/<run>``, where relative outputs of Ray Train 2 land) and output directories in it, whoever writes
there.  Other outputs are sent by the hook's own embedded worker.

It is no child of the Ray worker that starts it: Ray kills those.  When a Ray worker dies, and another begins in its place, the one that is at work is waited for
(`ckptsync.hooks.turn`): it stays until all that the dead one left is stored.
"""

from __future__ import annotations

import glob
import re
import sys
import time
from pathlib import Path

from ckptsync.hooks import embedded
from ckptsync.hooks.embedded import LOG, Apart
from ckptsync.spool import folders
from ckptsync.walk import OURS

_POLL = 1.0  # seconds


def start(store: str, directory: Path, run: str, pid: int) -> Apart:
    """Begin to send what is written in ``directory``, a run's working directory, until process ``pid`` has gone and all is stored.

    Its own checkpoints are of ``run`` in the store, those of a directory ``out`` in it of ``run-out``.  Raises OSError.
    """
    spool = directory / OURS
    directory.mkdir(parents=True, exist_ok=True)
    folders.make(spool)
    config = spool / f"ray-{pid}.yaml"
    embedded.write_config(config, store, runs(directory, run))
    command = [sys.executable, "-m", "ckptsync.hooks.turn", str(config), str(spool), str(pid)]
    return embedded.start_apart(command, spool / LOG, Path("/"))  # where no module of the user's lies


def log_size(directory: Path) -> int:
    """Of what workers have said there until now, in bytes."""
    log = folders.status(directory / OURS / LOG)
    return log.st_size if log else 0


def last_words(worker: Apart, directory: Path, since: int) -> str:
    """Wait until it ends; why it did, if it could not do its work: a store that is named wrongly, keys that only the driver has.  Raises OSError."""
    while worker.poll() is None:
        time.sleep(_POLL)
    grown = log_size(directory) - since
    said = (folders.read(directory / OURS / LOG, last=max(1, grown)) or b"").decode("utf-8", "replace").splitlines()
    return "; ".join(line.removeprefix("ckptsync: ") for line in said if line.startswith(("ckptsync: error: ", "ckptsync: hint: ")))


def runs(directory: Path, run: str) -> list[dict[str, str]]:
    """What a worker is told of it.

    Directories that a wildcard matches are named after what the wildcards matched, so the run's own is one that matches nothing else.  No run of a store
    begins with a sign: where a Ray run does, Ray's directory stands before it.
    """
    name, above = directory.name, glob.escape(str(directory.parent))
    if not name[:1].isalnum():
        above = f"{glob.escape(str(directory.parent.parent))}/{_alone(directory.parent.name)}"
    return [{"path": glob.escape(str(directory)), "name": plain(run)}, {"path": f"{above}/{_alone(name)}/*"}]


def _alone(name: str) -> str:
    """A wildcard that matches this name and no other."""
    at = next((n for n, sign in enumerate(name) if sign.isalnum()), 0)
    return f"{glob.escape(name[:at])}[{name[at]}]{glob.escape(name[at + 1 :])}"


def plain(run: str) -> str:
    """A Ray run's name as a store can keep it."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", run).lstrip("._-")[:100] or "ray"
