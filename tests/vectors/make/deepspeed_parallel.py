"""DeepSpeed with experts, in a pipeline, or tensor-parallel: deepspeed_parallel.py KIND --stage N [--ep N] [--pp N].

KIND is experts, pipeline or tensor. Writes out/global_step2 and out/latest in the working directory, and reference/keep.safetensors
(the fp32 masters, the rest as stored) and reference/auto.safetensors (what the modules hold), put together by asking every rank's
engine for what it has; for `tensor`, AutoTP's own gathering, and `ds_to_universal` for the masters.
"""

import argparse
import os
import re
from collections.abc import Iterator
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
from common import RANK, WORLD, finish
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.utils import groups, safe_get_full_fp32_param
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F  # noqa: N812

Tensors = dict[str, torch.Tensor]
VOCABULARY = 37
LOCAL = re.compile(r"deepspeed_experts\.(\d+)")


class Expert(nn.Module):
    """Two linear layers; the seed tells experts apart."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, inner), nn.Linear(inner, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))

    def seed(self, number: int) -> None:
        """Fill with numbers that no other expert has."""
        generator = torch.Generator().manual_seed(100 + number)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


class Mixture(nn.Module):
    """A norm and four experts."""

    def __init__(self, inner: int, ep: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(10)
        self.moe = MoE(10, Expert(10, inner), num_experts=4, ep_size=ep, min_capacity=0, capacity_factor=4.0, use_rts=False)
        for number, expert in enumerate(self.moe.deepspeed_moe.experts.deepspeed_experts):
            expert.seed(RANK % ep * 4 // ep + number)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, auxiliary, _ = self.moe(self.norm(x))
        return x + y, auxiliary


class Experts(nn.Module):
    """Two mixtures, and buffers that no optimizer sees."""

    def __init__(self, ep: int) -> None:
        super().__init__()
        self.emb, self.b0, self.mid, self.b1 = nn.Embedding(VOCABULARY, 10), Mixture(7, ep), nn.Linear(10, 10), Mixture(5, ep)
        self.head = nn.Linear(10, VOCABULARY)
        self.register_buffer("scale", torch.tensor(1.5))
        self.register_buffer("steps", torch.arange(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, one = self.b0(self.emb(ids))
        x, other = self.b1(self.mid(x))
        return F.cross_entropy(self.head(x).float().flatten(0, 1), ids.flatten()) + 0.01 * (one + other)


class Embedding(nn.Module):
    """An embedding that is also the head."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, 10) * 0.1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight)


class Block(nn.Module):
    """A residual block with buffers."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.n, self.up, self.down = nn.LayerNorm(10), nn.Linear(10, inner), nn.Linear(inner, 10)
        self.register_buffer("k", torch.tensor(2))
        self.register_buffer("table", torch.arange(5.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.n(x))))


class Layer(nn.Module):
    """Linear layers of the names that AutoTP is told to cut by columns and by rows."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.n, self.up_proj, self.down_proj = nn.LayerNorm(8), nn.Linear(8, inner), nn.Linear(inner, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down_proj(torch.relu(self.up_proj(self.n(x))))


class Tensor(nn.Module):
    """A model to be cut over tensor-parallel ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.layers = nn.Embedding(VOCABULARY, 8), nn.ModuleList([Layer(12), Layer(6)])
        self.out = nn.Linear(8, VOCABULARY)
        self.register_buffer("k", torch.tensor(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.out(x).float().flatten(0, 1), ids.flatten())


def config(options: argparse.Namespace) -> dict[str, object]:
    """Return DeepSpeed's configuration."""
    made: dict[str, object] = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": options.stage, "reduce_bucket_size": 5000, "allgather_bucket_size": 5000},
    }
    if options.kind == "tensor":
        rows = {"patterns": [".*down_proj.weight$"], "partition_type": "row"}
        columns = {"patterns": [".*up_proj.weight$"], "partition_type": "column"}
        made["tensor_parallel"] = {
            "autotp_size": 2,
            "partition_config": {"use_default_specs": False, "layer_specs": [rows, columns]},
        }
    return made


def model_of(options: argparse.Namespace) -> nn.Module:
    """Return the module to train."""
    if options.kind == "experts":
        return Experts(options.ep)
    if options.kind == "tensor":
        return Tensor()
    ends = [TiedLayerSpec("embed", Embedding), TiedLayerSpec("embed", Embedding, forward_fn=lambda m, x: F.linear(x, m.weight))]
    middle = [LayerSpec(Block, 7), _same, LayerSpec(Block, 5), LayerSpec(nn.LayerNorm, 10)]
    loss = lambda o, y: F.cross_entropy(o.float().flatten(0, 1), y.flatten())  # noqa: E731
    return PipelineModule(
        layers=[ends[0], *middle, ends[1]],
        num_stages=options.pp,
        loss_fn=loss,
        partition_method="uniform",
        seed_layers=True,
        base_seed=3,
    )


def _same(x: torch.Tensor) -> torch.Tensor:
    """A layer that is a function: it has no file."""
    return x


def batches(options: argparse.Namespace) -> Iterator[torch.Tensor]:
    """Token ids, the same for the ranks of one tensor-parallel group."""
    generator = torch.Generator().manual_seed(RANK // 2 if options.kind == "tensor" else RANK)
    while True:
        yield torch.randint(0, VOCABULARY, (1, 16), generator=generator)


def gather(engine: deepspeed.DeepSpeedEngine, options: argparse.Namespace) -> tuple[Tensors, Tensors]:
    """Let every rank tell what it has, experts under their numbers over all ranks."""
    master, held = {}, {}
    for name, tensor in [*engine.module.named_parameters(), *engine.module.named_buffers()]:
        match = LOCAL.search(name)
        if match:
            number = groups._get_expert_parallel_rank(f"ep_size_{options.ep}") * (4 // options.ep) + int(match[1])
            name = LOCAL.sub(f"deepspeed_experts.{number}", name)  # noqa: PLW2901
        value = safe_get_full_fp32_param(tensor) if hasattr(tensor, "_hp_mapping") else None
        held[name] = tensor.detach().clone().cpu()
        master[name] = held[name] if value is None else value.detach().float().view(tensor.shape).clone()
    everyone: list[tuple[Tensors, Tensors]] = [({}, {})] * WORLD
    torch.distributed.all_gather_object(everyone, (master, held))
    merged: tuple[Tensors, Tensors] = ({}, {})
    for one, other in reversed(everyone):
        merged[0].update(one)
        merged[1].update(other)
    return merged


def gather_tensor(engine: deepspeed.DeepSpeedEngine) -> tuple[Tensors, Tensors]:
    """Let AutoTP gather the module's own, and ds_to_universal the masters."""
    held = engine._replace_module_consolidated_state_dict()
    torch.distributed.barrier()
    if RANK:
        return {}, {}
    held |= {name: buffer.detach().clone() for name, buffer in engine.module.named_buffers()}
    os.system(
        "python -m deepspeed.checkpoint.ds_to_universal --input_folder out/global_step2 --output_folder universal/u "
        "--num_extract_workers 1 --num_merge_workers 1"
    )
    path = "universal/u/zero/{}/fp32.pt"
    master = {n: torch.load(path.format(n), weights_only=False)["param"] for n, _ in engine.module.named_parameters()}
    return {**held, **master}, held


def train(engine: deepspeed.DeepSpeedEngine, options: argparse.Namespace) -> None:
    """Two steps."""
    data = batches(options)
    for _ in range(2):
        if options.kind == "pipeline":
            engine.train_batch((ids, ids) for ids in data)
        else:
            engine.backward(engine(next(data)))
            engine.step()


def main() -> None:
    """Train, save, gather."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["experts", "pipeline", "tensor"])
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--ep", type=int, default=2)
    parser.add_argument("--pp", type=int, default=2)
    options = parser.parse_args()
    torch.manual_seed(0)
    deepspeed.init_distributed("gloo")
    model = model_of(options)
    params = [p for p in model.parameters() if p.requires_grad]
    if options.kind == "experts":
        params = split_params_into_different_moe_groups_for_optimizer({"params": params, "name": "p"})
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(params, lr=1e-2), config=config(options))
    train(engine, options)
    engine.save_checkpoint("out")
    master, held = gather_tensor(engine) if options.kind == "tensor" else gather(engine, options)
    if RANK == 0:
        Path("reference").mkdir(exist_ok=True)
        for name, tensors in (("keep", master), ("auto", held)):
            save_file({n: t.contiguous().clone() for n, t in tensors.items()}, f"reference/{name}.safetensors")
    finish()


if __name__ == "__main__":
    main()
