"""torchtitan's own CheckpointManager on a tiny model: titan.py [--last] --reference DIR.

The manager writes checkpoint/step-2, the model's tensors at the top of the state dict beside optimizer, dataloader, lr_scheduler
and train_state; with --last it is the last step, which holds the model only.
"""

from typing import Any

import torch
import torch.distributed as dist
from common import RANK, WORLD, finish, gathered, parser, save_reference
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpointer.dcp import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig


class Block(nn.Module):
    """Two linears and a norm, with a buffer of no axes."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(10, 6, bias=False)
        self.down = nn.Linear(6, 10, bias=False)
        self.norm = nn.RMSNorm(10)
        self.register_buffer("tokens_per_expert", torch.tensor(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Tiny(nn.Module):
    """As torchtitan's models are named: tok_embeddings, layers, norm, output; the optimizer of a layer is a name that misleads."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(23, 10)
        self.layers = nn.ModuleDict({str(n): Block() for n in range(1)})
        self.optimizer_bias = nn.Parameter(torch.randn(3))
        self.output = nn.Linear(10, 23, bias=False)
        self.register_buffer("freqs_cis", torch.polar(torch.ones(5, 3), torch.randn(5, 3)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.output(x) + self.optimizer_bias.sum()


class Loader:
    """What StatefulDataLoader may hold: bytes of each rank, and a tensor."""

    def state_dict(self) -> dict[str, Any]:
        return {
            f"dp_rank_{RANK}": b"state",
            "world_size": WORLD,
            "generator": torch.arange(6, dtype=torch.uint8),
            "mixture": torch.rand(3),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError


class Train:
    """As torchtitan's Trainer."""

    def state_dict(self) -> dict[str, Any]:
        return {"step": 2, "ntokens_seen": torch.tensor(4096)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError


def main() -> None:
    """Train two steps, let the manager save, gather."""
    words = parser(__doc__)
    words.add_argument("--last", action="store_true")
    options = words.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Tiny()
    shards = init_device_mesh("cpu", (WORLD,))
    for layer in model.layers.values():
        fully_shard(layer, mesh=shards)
    fully_shard(model, mesh=shards)
    config = OptimizersContainer.Config(
        param_groups=[ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.01})],
        implementation="for-loop",
    )
    optimizers = OptimizersContainer(config, model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=1).build(optimizers=optimizers, training_steps=4)
    for step in range(2):
        model(torch.arange(8).reshape(2, 4) + step + 2 * RANK).pow(2).mean().backward()
        optimizers.step()
        schedulers.step()
        optimizers.zero_grad()
    manager = CheckpointManager(
        CheckpointManager.Config(enable=True, interval=2, export_dtype="bfloat16", keep_latest_k=0),
        dataloader=Loader(), model_parts=[model], optimizers=optimizers, lr_schedulers=schedulers, states={"train_state": Train()},
        sd_adapter=None, base_folder=".",
    )  # fmt: skip
    assert manager.save(2, last_step=options.last)
    full = gathered(model.state_dict())
    if options.last:
        full = {k: v.bfloat16() if v.is_floating_point() else v for k, v in full.items()}
    save_reference(options.reference / "full.safetensors", full)
    finish()


if __name__ == "__main__":
    main()
