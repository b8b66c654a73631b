"""A file a rank: rank_files.py {fsdp2,fsdp1,full,verl,mesh,parallel} --base DIR --reference DIR [--bf16].

fsdp2, fsdp1          accelerate's save_fsdp_model(use_dcp=False), and the optimizer's, into out/
full                  accelerate's save_fsdp_model with FULL_STATE_DICT, into out/
verl                  verl's own FSDPCheckpointManager, into out/actor
mesh                  torch.save as verl does it, of awkward tensors on meshes of one and two axes, into out/actor
parallel              torch.save as verl does it, of an actor under FSDP2 over tensor parallelism, with eight ranks also replicated, into out/actor
"""

import argparse
import os
from pathlib import Path

import shim  # noqa: F401  must come before the first Accelerator
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import save_fsdp_model, save_fsdp_optimizer
from common import RANK, VOCABULARY, WORLD, Pair, Tensors, finish, full_state, gathered, parser, save_reference, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

OUT = Path("out")


class Odd(nn.Module):
    """Sizes that no world divides, parameters smaller than it, and buffers of every sort."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 11)
        self.head = nn.Linear(11, 5, bias=False)
        self.pair = nn.Parameter(torch.tensor([0.5, -1.5]))
        self.single = nn.Parameter(torch.tensor([2.0]))
        self.register_buffer("counts", torch.arange(-2, 3))
        self.register_buffer("seen", torch.tensor(2**40 + 1))
        self.register_buffer("temperature", torch.tensor(0.7).bfloat16())
        self.register_buffer("ones", torch.ones(4))
        self.register_buffer("mask", torch.tensor([[True, False, True], [False, False, True]]))


class Tied(nn.Module):
    """Two names for one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 5), nn.Linear(3, 5)
        self.two.weight = self.one.weight


def full_of_fsdp1(model: nn.Module) -> Tensors:
    """FULL_STATE_DICT of FSDP1 wants a GPU: its shards, gathered by ShardedTensor itself."""
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = model.state_dict()
    full = {}
    for name, value in state.items():
        if isinstance(value, DTensor):
            full[name] = value.full_tensor()
        elif hasattr(value, "local_shards"):
            out = torch.empty(value.size(), dtype=value.dtype) if RANK == 0 else None
            value.gather(0, out)
            full[name] = out
        else:
            full[name] = value
    return full if RANK == 0 else {}


def accelerated(options: argparse.Namespace) -> Tensors:
    """accelerate, whose plain save_state has no use_dcp: its documented functions."""
    version = 1 if options.kind == "fsdp1" else 2
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type="FULL_STATE_DICT" if options.kind == "full" else "SHARDED_STATE_DICT",
        use_orig_params=True,
    )
    acc = Accelerator(fsdp_plugin=plugin)
    model = AutoModelForCausalLM.from_pretrained(options.base, dtype=torch.bfloat16 if options.bf16 else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = acc.prepare(model, optimizer)
    train(model, optimizer, RANK, acc.backward)
    save_fsdp_model(plugin, acc, model, OUT, use_dcp=False)
    if options.kind != "full":
        save_fsdp_optimizer(plugin, acc, optimizer, model, OUT, use_dcp=False)
    if version == 1:
        return full_of_fsdp1(model)
    return full_state(model)


def managed(options: argparse.Namespace) -> Tensors:
    """verl's actor, saved by verl."""
    from omegaconf import OmegaConf
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

    dist.init_process_group("gloo")
    model = AutoModelForCausalLM.from_pretrained(options.base, dtype=torch.bfloat16 if options.bf16 else torch.float32)
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("fsdp",))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, RANK)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    config = OmegaConf.create({"save_contents": ["model", "optimizer", "extra"], "load_contents": ["model"]})
    tokenizer = AutoTokenizer.from_pretrained(options.base)
    manager = FSDPCheckpointManager(model, optimizer, scheduler, processing_class=tokenizer, checkpoint_config=config)
    manager.save_checkpoint(str(OUT / "actor"), global_step=2)
    return full_state(model)


def saved_as_verl(state: Tensors) -> Tensors:
    """Save a rank's state as verl does; return it gathered."""
    (OUT / "actor").mkdir(parents=True, exist_ok=True)
    dist.barrier()
    torch.save(state, OUT / "actor" / f"model_world_size_{WORLD}_rank_{RANK}.pt")
    return gathered(state)


def meshed(_options: argparse.Namespace) -> Tensors:
    """Everything that placements can say, on one mesh and on two axes."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=("outer", "inner"))
    odd, hybrid = Odd(), nn.Linear(7, 5)
    fully_shard(odd)
    fully_shard(hybrid, mesh=mesh)
    both = parallelize_module(Pair(), mesh["inner"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(both, mesh=mesh["outer"])
    tied = Tied()
    fully_shard(tied)
    state = {
        f"{n}.{k}": v
        for n, m in {"odd": odd, "hybrid": hybrid, "both": both, "tied": tied}.items()
        for k, v in m.state_dict().items()
    }
    flat = init_device_mesh("cpu", (WORLD,))
    state |= {
        "columns": distribute_tensor(torch.arange(35.0).reshape(5, 7), flat, [Shard(1)]),
        "transposed": distribute_tensor(torch.arange(36.0).reshape(6, 6).t(), flat, [Shard(0)]),
        "grid": distribute_tensor(torch.arange(35.0).reshape(5, 7), mesh, [Shard(0), Shard(1)]),
        "flipped": distribute_tensor(torch.arange(35.0).reshape(7, 5), mesh, [Shard(1), Shard(0)]),
        "twice": distribute_tensor(torch.arange(27.0).reshape(9, 3), mesh, [Shard(0), Shard(0)]),
        "half replicated": distribute_tensor(torch.randn(5, 2), mesh, [Replicate(), Shard(0)]),
        "replicated": distribute_tensor(torch.randn(3), flat, [Replicate()]),
        "scalar": distribute_tensor(torch.tensor(1.5), flat, [Replicate()]),
        "integers": distribute_tensor(torch.arange(9), flat, [Shard(0)]),
        "empty": distribute_tensor(torch.empty(0, 3), flat, [Shard(0)]),
    }
    return saved_as_verl(state)


def parallel(options: argparse.Namespace) -> Tensors:
    """Return an actor whose norms, attention and embeddings tensor parallelism leaves alone: these lie on the axes of FSDP only, once a group."""
    dist.init_process_group("gloo")
    names = ("ddp", "fsdp", "tp") if WORLD == 8 else ("fsdp", "tp")
    mesh = init_device_mesh("cpu", (2,) * len(names), mesh_dim_names=names)
    data = mesh["ddp", "fsdp"] if WORLD == 8 else mesh["fsdp"]
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 12, "intermediate_size": 14, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes)).to(torch.bfloat16 if options.bf16 else torch.float32)
    columns, rows = ColwiseParallel(), RowwiseParallel()
    for layer in model.model.layers:
        parallelize_module(layer.mlp, mesh["tp"], {"gate_proj": columns, "up_proj": columns, "down_proj": rows})
        fully_shard(layer, mesh=data)
    fully_shard(model, mesh=data)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    train(model, optimizer, RANK // 2)  # what one tensor-parallel group sees
    head = parallelize_module(Pair(), mesh["tp"], {"up": columns, "down": rows})  # on the axis of tensor parallelism only
    state = model.state_dict() | {f"v_head.{name}": value for name, value in head.state_dict().items()}
    return saved_as_verl(state)


WRITERS = {
    **dict.fromkeys(("fsdp2", "fsdp1", "full"), accelerated),
    "verl": managed,
    "mesh": meshed,
    "parallel": parallel,
}


def main() -> None:
    """Write, then let torch gather what was written."""
    words = parser(__doc__, WRITERS)
    words.add_argument("--bf16", action="store_true")
    options = words.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    torch.manual_seed(0)
    OUT.mkdir(exist_ok=True)
    full = WRITERS[options.kind](options)
    if full:
        save_reference(options.reference / "full.safetensors", full)
    finish()


if __name__ == "__main__":
    main()
