"""The worker that a training brings along waits for its turn: the one before it, of a training that died or was restarted, may still have much to send.

    python -m ckptsync.hooks.turn CONFIG SPOOL PID      waits, and is the worker then, until process PID is gone and all is stored

Two trainings of one machine may send to one store at the same time, and a node's id is one worker's there: the second has an id of its own.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import sys
import time
from hashlib import sha256
from pathlib import Path

from ckptsync.hooks import leaving
from ckptsync.spool import folders, marks

PATIENCE = 60.0  # seconds; twice of what a worker may take to look once more (`worker.scan_every`)
_POLL = 0.5  # seconds


def await_turn(spool: Path, pid: int, patience: float = PATIENCE) -> bool:
    """Until no worker is at work here.  False where one still is, so long after process ``pid`` has gone: it stays, and sends what that left."""
    began, until = marks.began(pid), time.monotonic() + patience
    if leaving.is_served(spool):
        sys.stderr.write(f"ckptsync: waiting: another worker is at work in {spool}\n")
    while leaving.is_served(spool) or not _is_next(spool):
        if began and marks.began(pid) == began:
            until = time.monotonic() + patience
        elif time.monotonic() >= until:
            return False
        time.sleep(_POLL)
    return True


def _is_next(spool: Path) -> bool:
    """Of several that begin at once only one does, and the others come after it.  It keeps this lock until it ends, whatever it becomes."""
    descriptor = folders.lock_file(spool / "turn.lock")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False
    os.set_inheritable(descriptor, True)  # noqa: FBT003  # the standard library's own
    return True


def claimed(node: str, store: str, spool: Path) -> str:
    """``node``, if no other training here has it in this store; else an id of this output directory's.  It is held until this process ends, whatever it becomes."""
    if _is_mine(f"ckptsync {_short(f'{node} {store}')}"):
        return node
    return f"{node[:90]}-{_short(str(spool))[:8]}"


def main(words: list[str]) -> None:
    """Become the worker, unless there is nothing left to do."""
    from ckptsync.worker.node import node_id  # noqa: PLC0415  # it needs what a trainer's environment may not have; a worker does, too

    config, spool, pid = words
    began = marks.began(int(pid))
    if await_turn(Path(spool), int(pid)):
        store = json.loads(folders.read(Path(config)) or b"")["store"]["url"]
        node = claimed(os.environ.get("CKPTSYNC_NODE") or node_id(), store, Path(spool))
        is_alive = marks.began(int(pid)) == began != ""  # another process may have its number by now
        command = [sys.executable, "-m", "ckptsync", "run", "-c", config, "--until-gone", pid if is_alive else "0"]
        os.execve(sys.executable, command, {**os.environ, "CKPTSYNC_NODE": node})  # noqa: S606  # no shell is wanted


def _is_mine(name: str) -> bool:
    """Whether nobody else here has it: a socket without a file, which goes with its process, and is seen in all containers of one network.

    Where there is no such thing nobody can know; then the store tells two workers of one id apart, and the second one ends.
    """
    with socket.socket(socket.AF_UNIX) as holding:
        try:
            holding.bind(f"\0{name}")
        except OSError as e:
            return e.errno != errno.EADDRINUSE
        os.set_inheritable(holding.detach(), True)  # noqa: FBT003  # the standard library's own
        return True


def _short(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


if __name__ == "__main__":
    main(sys.argv[1:])
