"""What a Ray Train worker does for us, in its own process: called by `ckptsync.hooks.ray_callback`, and never raises."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptsync.hooks import embedded, ray_node
from ckptsync.hooks.embedded import Apart
from ckptsync.hooks.ray_setup import setup_worker

_log = logging.getLogger("ckptsync.hook")
_COPIES = "ckptsync-copy"  # the thread that copies where there are no links: `ckptsync.hooks.pinning`
_PATIENCE = 300.0  # seconds that copies may take
TELLING = 60.0  # seconds to tell of oneself: a driver, a name service or a mount may hang, and a training would with it


def prepare(told: Mapping[str, str]) -> None:
    """Every Trainer of this process has the hook, and knows what the driver's environment says; Ray passes none of that on."""
    os.environ.update(told)
    setup_worker()


def serve(store: str) -> str:
    """On the first worker of each node: the node's embedded worker.  What went wrong, or the empty string."""
    try:
        from ray import train  # noqa: PLC0415

        context = train.get_context()
        if _is_in_working_directory():
            directory = Path(context.get_storage().local_working_directory)
            embedded.cover(
                {directory, directory.resolve()}
            )  # the process stands in the latter where Ray's own directory is behind a link
            if context.get_local_rank() == 0:
                since = ray_node.log_size(directory)
                worker = ray_node.start(store, directory, context.get_experiment_name(), os.getpid())
                threading.Thread(target=_hear, args=(worker, directory, since), name="ckptsync-hear", daemon=True).start()
    except Exception as e:  # noqa: BLE001  # training comes first; the caller says it
        return f"{socket.gethostname()}: {type(e).__name__}: {e}"
    return ""


def _hear(worker: Apart, directory: Path, since: int) -> None:
    """Nobody else would see it before the end of the training."""
    with contextlib.suppress(OSError):  # somebody deleted the log
        if said := ray_node.last_words(worker, directory, since):
            embedded.say_ended({directory, directory.resolve()}, said)
            _log.warning("ckptsync: nothing is sent from %s, %s: %s", socket.gethostname(), directory, said)


def tell_facts(patience: float = TELLING) -> dict[str, Any]:
    """What `ckptsync.doctor` wants to know of this worker's process and its machine; ``error`` where that cannot be told, or not in time."""
    told: list[dict[str, Any]] = []
    telling = threading.Thread(target=lambda: told.append(_facts()), name="ckptsync-doctor", daemon=True)
    telling.start()
    telling.join(patience)
    return told[0] if told else {"error": f"{socket.gethostname()}: no answer within {patience:g} s"}


def _facts() -> dict[str, Any]:
    try:
        from ckptsync.doctor import probe  # noqa: PLC0415

        return probe.gather()
    except Exception as e:  # noqa: BLE001  # the same
        return {"error": f"{socket.gethostname()}: {type(e).__name__}: {e}"}


def leave() -> None:
    """The training has ended well, and this process will be killed: the final model is pinned, and copies are finished."""
    hf = sys.modules.get("ckptsync.hooks.hf")
    if hf is not None:
        hf.leave()
    for thread in threading.enumerate():
        if thread.name == _COPIES:
            thread.join(_PATIENCE)


def _is_in_working_directory() -> bool:
    """Whether Ray gives its workers a working directory of the run's own; Ray 2.60: RAY_CHDIR_TO_TRIAL_DIR, true by default."""
    return os.environ.get("RAY_CHDIR_TO_TRIAL_DIR", "1").lower() not in ("0", "false")
