"""Saves as torchtitan makes them: its own CheckpointManager where it is installed, else torch's
distributed checkpoint as that uses it.

``step-N`` in ``OUT/checkpoint``, of which the newest two are kept.  What a save is when its
``.metadata`` appears, which comes last, is copied to ``TRUTH``. Slowed down at each fsync.  A model
may have frozen and tied parameters, as the environment says (FROZEN, TIED).
"""

import os
import shutil
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.device_mesh import init_device_mesh

OUT, TRUTH, MODE = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
BEGIN, STEPS, PAUSE, SLOW = (
    int(sys.argv[4]),
    int(sys.argv[5]),
    float(sys.argv[6]),
    float(sys.argv[7]),
)
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
KEPT = 2


class Tiny(nn.Module):
    """Names as torchtitan's models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(23, 10)
        self.layers = nn.ModuleDict(
            {
                str(n): nn.Sequential(nn.Linear(10, 600), nn.ReLU(), nn.Linear(600, 10))
                for n in range(3)
            }
        )
        self.output = nn.Linear(10, 23, bias=False)
        if os.environ.get("TIED"):
            self.output.weight = self.tok_embeddings.weight
        if os.environ.get("FROZEN"):
            self.layers["0"].requires_grad_(requires_grad=False)


class State:
    """What a data loader and the trainer itself save."""

    step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, f"rank_{RANK}": b"state", "seen": torch.tensor(self.step)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError


class Plain:
    """torchtitan's manager, without torchtitan."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._group = model, dist.new_group(backend="gloo")
        self._future: Any = None

    def maybe_wait_for_saving(self) -> None:
        if self._future is not None:
            self._future.result()
        self._future = None

    def save(self, step: int) -> None:
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh, path = init_device_mesh("cpu", (WORLD,)), OUT / "checkpoint" / f"step-{step}"
        states = {
            k: distribute_tensor(v.detach().clone(), mesh, [Shard(0)])
            for k, v in self._model.state_dict().items()
        }
        if MODE == "async":
            self._future = async_save(states, checkpoint_id=path, process_group=self._group)
        else:
            save(states, checkpoint_id=path)
        for old in (
            sorted((OUT / "checkpoint").glob("step-*"), key=lambda p: int(p.name[5:]))[:-KEPT]
            if RANK == 0
            else ()
        ):
            shutil.rmtree(old)

    def close(self) -> None:
        """Nothing is left open."""


def titan(model: Tiny, state: State) -> Any:
    """Its own manager; ImportError where it is not installed."""
    from torch.distributed.fsdp import fully_shard

    manager, optimizer = (
        import_module("torchtitan.components.checkpointer.dcp"),
        import_module("torchtitan.components.optimizer"),
    )
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    group = optimizer.ParamGroupConfig(
        pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.01}
    )
    optimizers = optimizer.OptimizersContainer(
        optimizer.OptimizersContainer.Config(param_groups=[group], implementation="for-loop"),
        model_parts=[model],
    )
    schedulers = optimizer.LRSchedulersContainer.Config(warmup_steps=1).build(
        optimizers=optimizers, training_steps=STEPS
    )
    config = manager.CheckpointManager.Config(
        enable=True, interval=1, keep_latest_k=KEPT, async_mode=MODE
    )
    return manager.CheckpointManager(
        config, dataloader=State(), model_parts=[model], optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": state}, sd_adapter=None, base_folder=str(OUT),
    )  # fmt: skip


def slow_down() -> None:
    """Each file takes its time, and what is whole is copied before anybody can take it away."""
    fsync, rename = os.fsync, FileSystem.rename

    def slowly(fd: int) -> None:
        time.sleep(SLOW)
        fsync(fd)

    def renamed(self: FileSystem, path: Any, new: Any) -> None:
        rename(self, path, new)
        if Path(new).name == ".metadata":
            fresh = TRUTH / f".{RANK}"
            shutil.rmtree(fresh, ignore_errors=True)
            shutil.copytree(Path(new).parent, fresh)
            fresh.rename(TRUTH / f"{Path(new).parent.name}.{time.time_ns()}")

    vars(os)["fsync"] = slowly
    FileSystem.rename = renamed  # type: ignore[method-assign, assignment]


def main() -> None:
    """From ``BEGIN`` to ``STEPS``; a step changes weights at random."""
    dist.init_process_group("gloo")
    torch.manual_seed(BEGIN)
    model, state = Tiny(), State()
    try:
        manager = titan(model, state)
    except ImportError:
        manager = Plain(model)
    slow_down()
    for step in range(BEGIN + 1, STEPS + 1):
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.1 * step)
        time.sleep(PAUSE)
        manager.maybe_wait_for_saving()
        dist.barrier()
        (TRUTH / f"saving-{step}").touch()
        state.step = step
        manager.save(step)
    manager.maybe_wait_for_saving()
    dist.barrier()
    manager.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
