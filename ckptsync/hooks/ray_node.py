"""One worker of ours for each node of a Ray training, where nobody can install one: it sends what this node's Ray workers write.

It sees Ray's working directory of the run (``<session>/artifacts/<run>``, where relative outputs of Ray Train 2 land) and output directories in it, whoever writes
there.  Other outputs are sent by the hook's own embedded worker.

It is no child of the Ray worker that starts it: Ray kills those.  When a Ray worker dies, and another begins in its place, the one that is at work is waited for:
it stays until all that the dead one left is stored.

    python -m ckptsync.hooks.ray_node CONFIG SPOOL PID      waits for its turn, and is the worker then
"""

from __future__ import annotations

import glob
import os
import re
import sys
import time
from pathlib import Path

from ckptsync.hooks import embedded, leaving
from ckptsync.hooks.embedded import Apart
from ckptsync.spool import marks
from ckptsync.walk import OURS

LOG = "embedded.log"
_POLL = 1.0  # seconds


def start(store: str, directory: Path, run: str, pid: int) -> Apart:
    """Begin to send what is written in ``directory``, a run's working directory, until process ``pid`` has gone and all is stored.

    Its own checkpoints are of ``run`` in the store, those of a directory ``out`` in it of ``run-out``.  Raises OSError.
    """
    spool = directory / OURS
    spool.mkdir(parents=True, exist_ok=True)
    config = spool / f"ray-{pid}.yaml"
    embedded.write_config(config, store, runs(directory, run))
    embedded.cover({directory})
    command = [sys.executable, "-m", "ckptsync.hooks.ray_node", str(config), str(spool), str(pid)]
    return embedded.start_apart(command, spool / LOG, directory)


def runs(directory: Path, run: str) -> list[dict[str, str]]:
    """What a worker is told of it.

    Directories that a wildcard matches are named after what the wildcards matched, so the run's own is one that matches nothing else.
    """
    first, rest = directory.name[:1], glob.escape(directory.name[1:])
    inside = f"{glob.escape(str(directory.parent))}/[{first}]{rest}/*"
    return [{"path": glob.escape(str(directory)), "name": plain(run)}, {"path": inside}]


def plain(run: str) -> str:
    """A Ray run's name as a store can keep it."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", run).lstrip("._-")[:100] or "ray"


def await_turn(spool: Path, pid: int, began: str) -> bool:
    """Until no worker is at work here; whether there is still anything to do then: who is at work when the process ends sends what that left."""
    while leaving.is_served(spool):
        if marks.began(pid) != began:
            return False
        time.sleep(_POLL)
    return True


def main(words: list[str]) -> None:
    """Become the worker, if there is anything to do."""
    config, spool, pid = words
    if await_turn(Path(spool), int(pid), marks.began(int(pid))):
        os.execv(sys.executable, [sys.executable, "-m", "ckptsync", "run", "-c", config, "--until-gone", pid])  # noqa: S606


if __name__ == "__main__":
    main(sys.argv[1:])
