"""DCP in safetensors: hf_writer.py {fsdp,hsdp,mesh} --reference DIR [--base DIR], by HuggingFaceStorageWriter.

`fsdp` and `hsdp` are a model of transformers in out/, saved with `save_pretrained(distributed_checkpoint=True)`, after a step of
AdamW: three ranks with the optimizer in out/optimizer, or two replicas of two ranks without. `mesh` is torch alone: FSDP over
tensor parallelism, three files a rank in out/sharded, the optimizer in out/optim.
"""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import RANK, Tensors, batch, finish, gathered, parser, save_reference
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.distributed.checkpoint import save_optimizer_distributed

OUT = Path("out")


class Pair(nn.Module):
    """Two linears for tensor parallelism, what fewer ranks than there are can have a part of, and scalars."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 11, dtype=torch.bfloat16)
        self.down = nn.Linear(11, 7, dtype=torch.bfloat16)
        self.one_row = nn.Parameter(torch.randn(1, 9))
        self.register_buffer("scale", torch.tensor(3.25))
        self.register_buffer("steps", torch.tensor(2**40 + 1))
        self.register_buffer("is_warm", torch.tensor(True))  # noqa: FBT003


def step(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """Train a step, so that the optimizer has states."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(base: Path, *, replicas: int, ranks: int) -> Tensors:
    """Train a model of transformers for a step and save it as transformers does."""
    config = DistributedConfig(fsdp_size=ranks, dp_replicate_size=replicas)
    model = AutoModelForCausalLM.from_pretrained(base, distributed_config=config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = batch(torch.Generator().manual_seed(RANK))
    step(optimizer, model(input_ids=ids, labels=ids).loss)
    model.save_pretrained(OUT, distributed_checkpoint=True)
    if replicas == 1:
        save_optimizer_distributed(model, optimizer, str(OUT / "optimizer"))
    return gathered(model.state_dict())


def mesh() -> Tensors:
    """Four ranks as two by two, three numbered files for each of them."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    model = parallelize_module(Pair(), grid["inner"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for part in (model.up, model.down, model):
        fully_shard(part, mesh=grid["outer"])
    table = nn.Parameter(distribute_tensor(torch.randn(5, 7), grid, [Shard(0), Shard(1)]))
    shared = nn.Parameter(distribute_tensor(torch.randn(3, 2).half(), grid, [Replicate(), Replicate()]))
    optimizer = torch.optim.AdamW([*model.parameters(), table, shared], foreach=False)
    for parameter in (*model.parameters(), table, shared):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = get_model_state_dict(model) | {"table": table.detach(), "shared": shared.detach()}
    mapping = {name: 1 + number % 3 for number, name in enumerate(sorted(state))}
    writer = HuggingFaceStorageWriter(str(OUT / "sharded"), fqn_to_index_mapping=mapping, save_distributed=True)
    dcp.save(state, storage_writer=writer)
    moments = dict(zip(state_names(model), optimizer.state_dict()["state"].values(), strict=True))
    dcp.save({"optim": {"state": moments}}, checkpoint_id=str(OUT / "optim"))
    return gathered(state)


def state_names(model: nn.Module) -> list[str]:
    """Return the names of the parameters in the order that the optimizer has them."""
    return [*(name for name, _ in model.named_parameters()), "table", "shared"]


def main() -> None:
    """Save in the wanted way, gather."""
    options = parser(__doc__, ("fsdp", "hsdp", "mesh")).parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    if options.kind == "mesh":
        state = mesh()
    else:
        state = trained(options.base, replicas=1 + (options.kind == "hsdp"), ranks=2 if options.kind == "hsdp" else 3)
    save_reference(options.reference / "full.safetensors", state)
    finish()


if __name__ == "__main__":
    main()
