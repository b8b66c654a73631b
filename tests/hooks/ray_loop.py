"""Ray Train runs of two workers without torch, on a cluster of this machine.

Run as a program: ray_loop.py HOME.

Prints a JSON object: of each case what came of it.  ``reported``: three steps are reported with
`upload_fn` and `validate`; a worker is killed in the middle of the second one's report, when the
other rank's part is in the store, and the next life reports that step again with other bytes; the
last is sent beside the training.  ``fail`` and ``warn``: the nodes do not pass `doctor`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STEPS = 3


def loop(config: dict[str, Any]) -> None:
    """On each worker."""
    from ray import train
    from ray.train import Checkpoint, CheckpointUploadMode

    from ckptsync.hooks.ray import as_directory, upload_fn, validate

    rank, life = train.get_context().get_world_rank(), int(Path(config["killed"]).exists())
    first, seen = 1, dict[str, str]()
    if (last := train.get_checkpoint()) is not None:
        with as_directory(last) as brought:
            seen = {path.name: path.read_text() for path in Path(brought).iterdir()}
        first = int(seen[f"rank-{rank}"].partition(" ")[0]) + 1
    for step in range(first, STEPS + 1):
        folder = tempfile.mkdtemp(dir=Path(config["killed"]).parent)
        Path(folder, f"rank-{rank}").write_text(f"{step} {life}")
        is_last = (rank, step, life) == (1, 2, 0)
        train.report(
            {"step": step, "seen": seen},
            checkpoint=Checkpoint.from_directory(folder),
            checkpoint_dir_name=f"step-{step}",
            checkpoint_upload_mode=CheckpointUploadMode.ASYNC
            if step == STEPS
            else CheckpointUploadMode.SYNC,
            delete_local_checkpoint_after_upload=True,
            checkpoint_upload_fn=(lambda *_: die(config))
            if is_last
            else upload_fn(config["store"]),
            **({"validation": True} if config["validates"] else {"validate_fn": validate}),
        )


def die(config: dict[str, Any]) -> None:
    """Once Ray has taken note of the first step, and the other rank's part of the second is in the
    store.
    """
    noted, sent = Path(config["snapshot"]), Path(config["store"], "sft", ".ckptsync", "step-2")
    while not (noted.exists() and "step-1" in noted.read_text() and [*sent.glob("manifest-*")]):
        time.sleep(0.1)
    Path(config["killed"]).touch()
    os.kill(os.getpid(), signal.SIGKILL)


def nothing() -> None:
    """A training that must not begin."""
    Path(os.environ["CKPTSYNC_TEST_BEGAN"]).touch()


def reported(home: Path) -> dict[str, Any]:
    """A worker is killed in the middle of the second step; see `loop`."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    from ckptsync.hooks.ray import CkptSyncRayCallback, validate

    try:
        from ray.train.v2.api.validation_config import ValidationConfig  # since Ray 2.54

        validates = {"validation_config": ValidationConfig(fn=validate)}
    except ImportError:
        validates = {}
    store = str(home / "store")
    run = RunConfig(
        name="sft",
        storage_path=str(home / "results"),
        failure_config=FailureConfig(max_failures=1),
        callbacks=[CkptSyncRayCallback(store)],
    )
    scaling = ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1})
    result = DataParallelTrainer(
        loop,
        train_loop_config={
            "store": store,
            "validates": bool(validates),
            "killed": str(home / "killed"),
            "snapshot": str(home / "results" / "sft" / "checkpoint_manager_snapshot.json"),
        },
        scaling_config=scaling,
        run_config=run,
        **validates,
    ).fit()
    found = [
        (Path(checkpoint.path).name, metrics) for checkpoint, metrics in result.best_checkpoints
    ]
    return {"checkpoints": found, "path": result.path}


def unfit(home: Path, doctor: str) -> dict[str, Any]:
    """An interface that is not there, and a backend of Ray's that would hang with it."""
    from ray.train import BackendConfig, RunConfig, ScalingConfig
    from ray.train.backend import Backend
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    from ckptsync.hooks.ray import CkptSyncRayCallback

    class Hanging(Backend):  # type: ignore[misc,type-arg,unused-ignore]
        def on_start(self, worker_group: Any, backend_config: Any) -> None:
            (home / doctor).touch()

    class Config(BackendConfig):  # type: ignore[misc,unused-ignore]
        @property
        def backend_cls(self) -> type:
            return Hanging

    told = {
        "env_vars": {"GLOO_SOCKET_IFNAME": "nosuch0", "CKPTSYNC_TEST_BEGAN": str(home / doctor)}
    }
    run = RunConfig(
        name=f"unfit-{doctor}",
        storage_path=str(home / "results"),
        callbacks=[CkptSyncRayCallback(doctor=doctor)],
        worker_runtime_env=told,
    )
    try:
        DataParallelTrainer(
            nothing,
            backend_config=Config(),
            scaling_config=ScalingConfig(num_workers=1),
            run_config=run,
        ).fit()
    except Exception as e:  # noqa: BLE001  # what a user sees of it
        return {"error": f"{type(e).__name__}: {e}", "began": (home / doctor).exists()}
    return {"error": "", "began": (home / doctor).exists()}


def awaiting() -> bool:
    """Whether a worker process waits for a Trainer that it may give the hook."""
    return any(type(finder).__module__ == "ckptsync.hooks.autoload" for finder in sys.meta_path)


def main(home: Path) -> None:
    """All, one after the other, on workers that `setup_worker` was named to, in a directory of
    Ray's behind a link.
    """
    import ray

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    hook = {"worker_process_setup_hook": "ckptsync.hooks.ray.setup_worker"}
    (home / "disk").mkdir()
    (home / "t").symlink_to("disk")
    ray.init(
        "local",
        num_cpus=3,
        object_store_memory=100_000_000,
        include_dashboard=False,
        _temp_dir=str(home / "t"),
        runtime_env=hook,
    )
    told = {"awaiting": ray.get(ray.remote(awaiting).remote()), "reported": reported(home)}
    told |= {doctor: unfit(home, doctor) for doctor in ("fail", "warn")}
    ray.shutdown()
    print(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
