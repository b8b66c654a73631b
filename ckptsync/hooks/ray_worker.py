"""What a Ray Train worker does for us, in its own process: called by `ckptsync.hooks.ray_callback`, and never raises."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptsync.hooks import embedded, ray_node
from ckptsync.hooks.ray_setup import setup_worker

_COPIES = "ckptsync-copy"  # the thread that copies where there are no links: `ckptsync.hooks.pinning`
_PATIENCE = 300.0  # seconds that copies may take


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
            if context.get_local_rank() == 0:
                ray_node.start(store, directory, context.get_experiment_name(), os.getpid())
            else:
                embedded.cover({directory})
    except Exception as e:  # noqa: BLE001  # training comes first; the caller says it
        return f"{type(e).__name__}: {e}"
    return ""


def tell_facts() -> dict[str, Any]:
    """What `ckptsync.doctor` wants to know of this worker's process and its machine; ``error`` where that cannot be told."""
    try:
        from ckptsync.doctor import probe  # noqa: PLC0415

        return probe.gather()
    except Exception as e:  # noqa: BLE001  # the same
        return {"error": f"{type(e).__name__}: {e}"}


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
