"""Ray Train (v2): what goes into its configuration, under the names that do not change.

    RunConfig(callbacks=[CkptSyncRayCallback()])                             or RAY_TRAIN_CALLBACKS=ckptsync.hooks.ray.CkptSyncRayCallback
    ray.train.report(..., checkpoint=..., checkpoint_upload_fn=upload_fn(store))
    TorchTrainer(..., validation_config=ValidationConfig(fn=validate))       up to Ray 2.53 ray.train.report(..., validate_fn=validate)
    runtime_env: {worker_process_setup_hook: ckptsync.hooks.ray.setup_worker}

Ray imports this in each of its worker processes when one begins, so nothing is imported here before it is used.  Seen with Ray 2.51, 2.54 and 2.60.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckptsync.hooks.ray_setup import setup_worker as setup_worker  # noqa: PLC0414  # its public name

if TYPE_CHECKING:
    from ckptsync.hooks.ray_upload import UploadFn


def __getattr__(name: str) -> Any:
    """``CkptSyncRayCallback``, whose bases are Ray Train's."""
    if name == "CkptSyncRayCallback":
        from ckptsync.hooks.ray_callback import CkptSyncRayCallback  # noqa: PLC0415

        return CkptSyncRayCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def upload_fn(store: str, *, run: str = "", patience: float = 600.0) -> UploadFn:
    """For ``checkpoint_upload_fn=``: each Ray worker sends its part to ``store``; Ray keeps a note of where it is.

    ``run``: its name in the store, if not that of the Ray run.  ``patience``: for how many seconds a file that this rank has not finished is waited for.
    """
    from ckptsync.hooks.ray_upload import UploadFn  # noqa: PLC0415

    return UploadFn(store, run, patience)


def validate(checkpoint: Any, level: str | Mapping[str, str] | None = "") -> dict[str, Any]:
    """For ``ValidationConfig(fn=validate)``, and ``report(validate_fn=validate)`` of older versions: what `ckptsync.hooks.ray_validate.validate` says of it."""
    from ckptsync.hooks.ray_validate import validate as verified  # noqa: PLC0415

    return verified(checkpoint, level)


def as_directory(checkpoint: Any) -> contextlib.AbstractContextManager[str]:
    """The files of ``ray.train.get_checkpoint()`` in a directory of this node: out of the store, where `upload_fn` sent them there."""
    from ckptsync.hooks.ray_bring import as_directory as brought  # noqa: PLC0415

    return brought(checkpoint)
