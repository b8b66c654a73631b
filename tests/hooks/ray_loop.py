"""Ray Train runs of two workers without torch, on a cluster of this machine; run as a program: ray_loop.py HOME.

Prints a JSON object: of each case what came of it.  ``reported``: three steps are reported with `upload_fn` and `validate`; a worker is killed in the middle of the
second one's report, when the other rank's part is in the store, and the next life reports that step again with other bytes; the last is sent beside the training; a
loop of somebody's own writes into a relative directory.  ``replaced``: Ray replaces one worker that dies, and the other trains on.  ``unfit``: the nodes do not pass `doctor`.
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

    from ckptsync.hooks import embedded
    from ckptsync.hooks.ray import as_directory, upload_fn, validate

    rank, life = train.get_context().get_world_rank(), int(Path(config["killed"]).exists())
    covered = embedded.is_covered(Path("out").absolute())
    first, seen = 1, dict[str, str]()
    if (last := train.get_checkpoint()) is not None:
        with as_directory(last) as brought:
            seen = {path.name: path.read_text() for path in Path(brought).iterdir()}
        first = int(seen[f"rank-{rank}"].partition(" ")[0]) + 1
    for step in range(first, STEPS + 1):
        if rank == 0:
            write_own(Path(f"out/checkpoint-{step}"), step)
        folder = tempfile.mkdtemp(dir=Path(config["killed"]).parent)
        Path(folder, f"rank-{rank}").write_text(f"{step} {life}")
        is_last = (rank, step, life) == (1, 2, 0)
        train.report(
            {"step": step, "seen": seen, "covered": covered},
            checkpoint=Checkpoint.from_directory(folder),
            checkpoint_dir_name=f"step-{step}",
            checkpoint_upload_mode=CheckpointUploadMode.ASYNC if step == STEPS else CheckpointUploadMode.SYNC,
            delete_local_checkpoint_after_upload=True,
            checkpoint_upload_fn=(lambda *_: die(config)) if is_last else upload_fn(config["store"]),
            **({"validation": True} if config["validates"] else {"validate_fn": validate}),
        )


def die(config: dict[str, Any]) -> None:
    """Once Ray has taken note of the first step, and the other rank's part of the second is in the store."""
    noted, sent = Path(config["snapshot"]), Path(config["store"], "sft", ".ckptsync", "step-2")
    while not (noted.exists() and "step-1" in noted.read_text() and [*sent.glob("manifest-*")]):
        time.sleep(0.1)
    Path(config["killed"]).touch()
    os.kill(os.getpid(), signal.SIGKILL)


def write_own(checkpoint: Path, step: int) -> None:
    """As a loop of somebody's own saves."""
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": step}))


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
    found = [(Path(checkpoint.path).name, metrics) for checkpoint, metrics in result.best_checkpoints]
    return {"checkpoints": found, "path": result.path}


def served(config: dict[str, Any]) -> None:
    """Rank 1 dies once, and both end when what it began again has said whether a worker of ours was begun for it."""
    from ray import train

    told = Path(config["told"])
    if not told.with_suffix(".killed").exists():
        for _ in range(3):  # then Ray has taken the first one, and no longer starts the group
            train.report({})
    if train.get_context().get_world_rank() == 1:
        if not told.with_suffix(".killed").exists():
            told.with_suffix(".killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        told.write_text(json.dumps(Path(f"_ckptsync/ray-{os.getpid()}.yaml").exists()))
    while not told.exists():
        time.sleep(0.1)


def replaced(home: Path) -> dict[str, Any]:
    """With replica groups, as torchft has them: the whole group does not begin again.  What is wrong with the nodes is only said."""
    from ray.train import BackendConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.backend import Backend
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    from ckptsync.hooks.ray import CkptSyncRayCallback

    if not hasattr(Backend, "has_replica_groups"):
        return {}

    class Replicas(Backend):  # type: ignore[misc,type-arg,unused-ignore]
        has_replica_groups = True

    class Config(BackendConfig):  # type: ignore[misc,unused-ignore]
        @property
        def backend_cls(self) -> type:
            return Replicas

    told = home / "told"
    run = RunConfig(
        name="replicas",
        storage_path=str(home / "results"),
        failure_config=FailureConfig(max_failures=1),
        callbacks=[CkptSyncRayCallback(str(home / "store"), doctor="warn")],
        worker_runtime_env={"env_vars": {"GLOO_SOCKET_IFNAME": "nosuch1"}},
    )
    DataParallelTrainer(
        served,
        train_loop_config={"told": str(told)},
        backend_config=Config(),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=run,
    ).fit()
    return {"told": json.loads(told.read_text())}


def unfit(home: Path) -> dict[str, Any]:
    """An interface that is not there, and a backend of Ray's that would hang with it."""
    from ray.train import BackendConfig, RunConfig, ScalingConfig
    from ray.train.backend import Backend
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    from ckptsync.hooks.ray import CkptSyncRayCallback

    class Hanging(Backend):  # type: ignore[misc,type-arg,unused-ignore]
        def on_start(self, worker_group: Any, backend_config: Any) -> None:
            (home / "began").touch()

    class Config(BackendConfig):  # type: ignore[misc,unused-ignore]
        @property
        def backend_cls(self) -> type:
            return Hanging

    told = {"env_vars": {"GLOO_SOCKET_IFNAME": "nosuch0", "CKPTSYNC_TEST_BEGAN": str(home / "began")}}
    run = RunConfig(name="unfit", storage_path=str(home / "results"), callbacks=[CkptSyncRayCallback()], worker_runtime_env=told)
    try:
        DataParallelTrainer(nothing, backend_config=Config(), scaling_config=ScalingConfig(num_workers=1), run_config=run).fit()
    except Exception as e:  # noqa: BLE001  # what a user sees of it
        return {"error": f"{type(e).__name__}: {e}", "began": (home / "began").exists()}
    return {"error": "", "began": (home / "began").exists()}


def awaiting() -> bool:
    """Whether a worker process waits for a Trainer that it may give the hook."""
    return any(type(finder).__module__ == "ckptsync.hooks.autoload" for finder in sys.meta_path)


def main(home: Path) -> None:
    """All, one after the other, on workers that `setup_worker` was named to, in a directory of Ray's behind a link."""
    import ray

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    hook = {"worker_process_setup_hook": "ckptsync.hooks.ray.setup_worker"}
    (home / "disk").mkdir()
    (home / "t").symlink_to("disk")
    ray.init(
        "local", num_cpus=3, object_store_memory=100_000_000, include_dashboard=False, _temp_dir=str(home / "t"), runtime_env=hook
    )
    told = {"awaiting": ray.get(ray.remote(awaiting).remote()), "reported": reported(home)}
    told |= {"replaced": replaced(home), "unfit": unfit(home)}
    ray.shutdown()
    print(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
