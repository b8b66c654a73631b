"""Ray Train runs of two workers without torch, on a cluster of this machine; run as a program: ray_loop.py HOME.

Prints a JSON object: of each case what came of it.  ``reported``: two steps are reported with `upload_fn` and `validate`, the second life of a run whose worker was
killed goes on from what the first has reported, and a loop of somebody's own writes into a relative directory.  ``unfit``: the nodes do not pass `doctor`.
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
    from ray.train import Checkpoint

    from ckptsync.hooks.ray import as_directory, upload_fn

    rank = train.get_context().get_world_rank()
    first, seen = 1, dict[str, str]()
    if (last := train.get_checkpoint()) is not None:
        with as_directory(last) as brought:
            seen = {path.name: path.read_text() for path in Path(brought).iterdir()}
        first = int(seen[f"rank-{rank}"]) + 1
    for step in range(first, STEPS + 1):
        if rank == 0:
            write_own(Path(f"out/checkpoint-{step}"), step)
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, f"rank-{rank}").write_text(str(step))
            train.report(
                {"step": step, "seen": seen},
                checkpoint=Checkpoint.from_directory(folder),
                checkpoint_upload_fn=upload_fn(config["store"]),
                validation=True,
            )
        if step == 1 and first == 1 and rank == 1:
            time.sleep(3)  # what was reported is taken note of by a process that asks twice a second
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
    """A worker is killed after the first step; see `loop`."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
    from ray.train.v2.api.validation_config import ValidationConfig

    from ckptsync.hooks.ray import CkptSyncRayCallback, validate

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
        train_loop_config={"store": store},
        scaling_config=scaling,
        run_config=run,
        validation_config=ValidationConfig(fn=validate),
    ).fit()
    found = [(Path(checkpoint.path).name, metrics) for checkpoint, metrics in result.best_checkpoints]
    return {"checkpoints": found, "path": result.path}


def unfit(home: Path) -> dict[str, Any]:
    """An interface that is not there."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    from ckptsync.hooks.ray import CkptSyncRayCallback

    told = {"env_vars": {"GLOO_SOCKET_IFNAME": "nosuch0", "CKPTSYNC_TEST_BEGAN": str(home / "began")}}
    run = RunConfig(name="unfit", storage_path=str(home / "results"), callbacks=[CkptSyncRayCallback()], worker_runtime_env=told)
    try:
        DataParallelTrainer(nothing, scaling_config=ScalingConfig(num_workers=1), run_config=run).fit()
    except Exception as e:  # noqa: BLE001  # what a user sees of it
        return {"error": f"{type(e).__name__}: {e}", "began": (home / "began").exists()}
    return {"error": "", "began": (home / "began").exists()}


def awaiting() -> bool:
    """Whether a worker process waits for a Trainer that it may give the hook."""
    return any(type(finder).__module__ == "ckptsync.hooks.autoload" for finder in sys.meta_path)


def main(home: Path) -> None:
    """Both, one after the other, on workers that `setup_worker` was named to."""
    import ray

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    hook = {"worker_process_setup_hook": "ckptsync.hooks.ray.setup_worker"}
    ray.init(
        "local", num_cpus=3, object_store_memory=100_000_000, include_dashboard=False, _temp_dir=str(home / "t"), runtime_env=hook
    )
    told = {"awaiting": ray.get(ray.remote(awaiting).remote()), "reported": reported(home), "unfit": unfit(home)}
    ray.shutdown()
    print(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
