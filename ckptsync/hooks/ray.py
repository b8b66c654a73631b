"""The names that go into a configuration of Ray Train (v2).

Ray starts the training's processes itself, on any node, and passes on only what is named in its
configuration.  So every way to use ckptsync under Ray has one name here:

    RunConfig(callbacks=[CkptSyncRayCallback()])
        (or RAY_TRAIN_CALLBACKS=ckptsync.hooks.ray.CkptSyncRayCallback)
    ray.train.report(..., checkpoint=..., checkpoint_upload_fn=upload_fn(store))
    TorchTrainer(..., validation_config=ValidationConfig(fn=validate))
        (up to Ray 2.53: report(..., validate_fn=validate))
    with as_directory(ray.train.get_checkpoint()) as directory: ...
    runtime_env: {worker_process_setup_hook: ckptsync.hooks.ray.setup_worker}

Ray imports this module in each of its worker processes, so nothing is imported here before it is
used.  Tried with Ray 2.51, 2.54 and 2.60.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptsync.hooks.ray_callback import CkptSyncRayCallback
    from ckptsync.hooks.ray_checkpoints import as_directory, upload_fn, validate

__all__ = ["CkptSyncRayCallback", "as_directory", "setup_worker", "upload_fn", "validate"]


def __getattr__(name: str) -> Any:
    """Import a name of ``__all__`` from the module that has it, and return it.

    Raise AttributeError for other names. For the callback, raise ImportError without Ray, and
    ConfigError if this version of Ray is not supported.
    """
    if name == "CkptSyncRayCallback":
        from ckptsync.hooks.ray_callback import CkptSyncRayCallback  # noqa: PLC0415

        return CkptSyncRayCallback
    if name in __all__:
        from ckptsync.hooks import ray_checkpoints  # noqa: PLC0415

        return getattr(ray_checkpoints, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def setup_worker() -> None:
    """Give every Trainer of this process the hook.  Never raises, or Ray would start no worker."""
    from ckptsync.hooks import autoload  # noqa: PLC0415

    autoload.install()
