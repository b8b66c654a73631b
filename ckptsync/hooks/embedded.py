"""A worker that the training brings along, where nobody can install one: a child process, which stays until all is sent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import ckptsync
from ckptsync.hooks.here import Here

_NICE = 10


def start(here: Here, store: str, pid: int) -> subprocess.Popen[bytes]:
    """Begin to send the run in this output directory to ``store``; it ends when process ``pid`` is gone and all is stored.

    It has a session of its own, so that a signal to the training's group does not end it, and none of the training's open files.
    What it has to say is in ``_ckptsync/embedded.log``.  Raises OSError.
    """
    config = here.spool / f"embedded-{here.rank}.yaml"  # JSON is YAML
    told = {"roles": ["worker"], "store": {"url": _absolute(store)}, "worker": {"runs": [{"path": str(here.output_dir)}]}}
    config.write_text(json.dumps(told) + "\n", "utf-8")
    above = str(Path(ckptsync.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (above, os.environ.get("PYTHONPATH", ""))))}
    command = [sys.executable, "-m", "ckptsync", "run", "-c", str(config), "--until-gone", str(pid)]
    with (here.spool / "embedded.log").open("ab") as log:
        child = subprocess.Popen(  # noqa: S603  # our own program
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd=here.output_dir, start_new_session=True
        )
    os.setpriority(os.PRIO_PROCESS, child.pid, _NICE)
    return child


def _absolute(store: str) -> str:
    """A path as the child will find it, whatever its working directory; a URL as it is."""
    return store if "://" in store else str(Path(store).absolute())
