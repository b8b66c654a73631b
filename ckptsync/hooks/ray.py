"""Ray Train (v2): the names that go into a Ray configuration.

    RunConfig(callbacks=[CkptSyncRayCallback()])           or RAY_TRAIN_CALLBACKS=ckptsync.hooks.ray.CkptSyncRayCallback
    ray.train.report(..., checkpoint=..., checkpoint_upload_fn=upload_fn(store))
    TorchTrainer(..., validation_config=ValidationConfig(fn=validate))   up to Ray 2.53 report(..., validate_fn=validate)
    runtime_env: {worker_process_setup_hook: ckptsync.hooks.ray.setup_worker}

Ray imports this module in each of its worker processes, so nothing is imported here before it is
used.  Tried with Ray 2.51, 2.54 and 2.60.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptsync.hooks.ray_checkpoints import UploadFn

_log = logging.getLogger("ckptsync.hook")


def __getattr__(name: str) -> Any:
    """Return ``CkptSyncRayCallback``, whose base classes are Ray Train's."""
    if name == "CkptSyncRayCallback":
        from ckptsync.hooks.ray_callback import CkptSyncRayCallback  # noqa: PLC0415

        return CkptSyncRayCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def setup_worker() -> None:
    """Give every Trainer of this process the hook.  Never raises: Ray would not start the worker."""
    try:
        from ckptsync.hooks import autoload  # noqa: PLC0415

        autoload.install()
    except Exception as e:  # noqa: BLE001  # any error: the training must start all the same
        _log.warning("ckptsync: no hook in this Ray worker: %s: %s", type(e).__name__, e)


def upload_fn(store: str, *, run: str = "", patience: float = 600.0) -> UploadFn:
    """Return a ``checkpoint_upload_fn``: each Ray worker sends its part to ``store``, and Ray keeps a note of the location.

    ``run``: the run's name in the store (default: the Ray run's).  ``patience``: how many seconds
    to wait for a file that this rank has not finished.
    """
    from ckptsync.hooks.ray_checkpoints import UploadFn  # noqa: PLC0415

    return UploadFn(store, run, patience)


def validate(checkpoint: Any, level: str | Mapping[str, str] | None = "") -> dict[str, Any]:
    """Verify a reported checkpoint and return metrics; see `ckptsync.hooks.ray_checkpoints.validate`."""
    from ckptsync.hooks import ray_checkpoints  # noqa: PLC0415

    return ray_checkpoints.validate(checkpoint, level)


def as_directory(checkpoint: Any) -> contextlib.AbstractContextManager[str]:
    """Return the files of ``ray.train.get_checkpoint()`` in a directory of this node, downloaded where `upload_fn` sent them."""
    from ckptsync.hooks import ray_checkpoints  # noqa: PLC0415

    return ray_checkpoints.as_directory(checkpoint)
