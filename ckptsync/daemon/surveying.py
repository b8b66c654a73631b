"""The facts of this node, gathered where the system tells them; what it does not tell is left out."""

from __future__ import annotations

import getpass
import os
import platform
import resource
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from ckptsync import __version__
from ckptsync.daemon.identity import machine
from ckptsync.fleet.facts import Facts, Train
from ckptsync.mounts import mount_of
from ckptsync.spool import marks
from ckptsync.spool.marks import Begun
from ckptsync.walk import OURS
from ckptsync.worker.node import umask

_INOTIFY = Path("/proc/sys/fs/inotify")
_GPUS = Path("/proc/driver/nvidia")


def survey(node: str, runs: Mapping[str, Path], clock_offset: int | None = None) -> Facts:
    """Now; ``runs``: the output directories by the names of their runs.  ``clock_offset``: see `Facts`; the store alone can tell it."""
    return Facts(
        node=node,
        host=socket.gethostname(),
        machine=machine(),
        user=_user(),
        umask=umask(),
        ckptsync=__version__,
        python=platform.python_version(),
        kernel=platform.release(),
        limits=_limits(),
        file_systems={shown(path): mount_of(str(path)).kind for path in runs.values()},
        gpus=_gpus(),
        trains={name: train for name, path in runs.items() if (train := _train(path / OURS))},
        clock_offset=clock_offset,
    )


def shown(path: Path | str) -> str:
    """A path as text that JSON can hold."""
    return os.fsencode(path).decode("utf-8", "replace")


def _train(spool: Path) -> Train | None:
    """The newest one: of several ranks here the first speaks for all, with the number that they counted last."""
    begun = marks.begun(spool)
    newest = [b for b in begun if b.train == begun[-1].train]
    if not newest:
        return None
    first = min(newest, key=lambda b: b.rank)
    return Train(first.trainer, first.world, max(b.local_world for b in newest), first.at, dict(first.facts), _state(newest))


def _state(train: Sequence[Begun]) -> str:
    """Processes of another container cannot be asked: those run until they say that they have ended."""
    if all(b.ended for b in train):
        return "ended"
    return "runs" if any(marks.is_running(b) is not False for b in train if not b.ended) else "gone"


def _limits() -> dict[str, int]:
    found = {"nofile": resource.getrlimit(resource.RLIMIT_NOFILE)[0]}
    for name in ("max_user_instances", "max_user_watches", "max_queued_events"):
        text = _text(_INOTIFY / name).strip()
        found |= {name: int(text)} if text.isdigit() else {}
    return found


def _gpus() -> tuple[str, ...]:
    told = [_text(path) for path in sorted(_GPUS.glob("gpus/*/information"))]
    models = [line.partition(":")[2].strip() for text in told for line in text.splitlines() if line.startswith("Model:")]
    driver = _text(_GPUS / "version").partition("\n")[0].strip()
    return (*models, *([driver] if driver else []))


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a number without a name, as in containers
        return str(os.getuid())


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "surrogateescape")
    except OSError:
        return ""  # the system does not tell
