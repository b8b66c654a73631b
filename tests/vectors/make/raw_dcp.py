"""torch.distributed.checkpoint by hand: raw_dcp.py {dress,mesh,dtypes} --reference DIR.

Each writes the same state three times in the working directory: wrapped/ as {"model": state}, the way accelerate does;
plain/ as the state itself; items/ as the state with a file for every item. `dtypes` runs as one process.
"""

import io

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import RANK, WORLD, Pair, finish, parser, save_reference
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Dress(nn.Module):
    """What a sharder finds awkward: one row for three ranks, buffers of every sort."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 5)
        self.one_row = nn.Parameter(torch.randn(1, 9))
        self.fp16 = nn.Parameter(torch.randn(4, 3).half())
        self.register_buffer("scalar", torch.tensor(3.25))
        self.register_buffer("steps", torch.tensor(2**40 + 1))
        self.register_buffer("counts", torch.arange(-3, 4, dtype=torch.int32))
        self.register_buffer("octets", torch.arange(250, 256, dtype=torch.uint8))
        self.register_buffer("mask", torch.tensor([True, False, True]))


def dress() -> dict[str, object]:
    """FSDP2 over three ranks, column shards, views, odd names, items that are no tensors."""
    mesh = init_device_mesh("cpu", (WORLD,))
    module = Dress()
    fully_shard(module.inner, mesh=mesh)
    fully_shard(module, mesh=mesh)
    storage = torch.arange(60, dtype=torch.float32)
    return {
        **module.state_dict(),
        "columns": distribute_tensor(torch.arange(35.0).reshape(5, 7), mesh, [Shard(1)]),
        "columns.bf16": distribute_tensor(torch.randn(3, 8).bfloat16(), mesh, [Shard(1)]),
        "planes": distribute_tensor(torch.randn(2, 4, 3), mesh, [Shard(1)]),
        "replicated": distribute_tensor(torch.randn(3, 3), mesh, [Replicate()]),
        "transposed": torch.arange(12.0).reshape(3, 4).t(),
        "permuted": torch.randn(2, 3, 5).permute(2, 0, 1),
        "view": storage[10:22].view(3, 4),
        "strided view": storage[1::7],
        "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 6),
        "empty": torch.zeros(0, 5),
        "name with spaces.and.dots": torch.randn(2, 2),
        "nested": {"a.b": torch.randn(3), "list": [torch.tensor(1), torch.tensor([2, 3], dtype=torch.int16)]},
        "number": 17,
        "settings": {"lr": 0.125, "name": "not a tensor"},
        "blob": io.BytesIO(b"no tensor either"),
    }


def mesh_state() -> dict[str, object]:
    """Four ranks as two by two: HSDP, two dimensions of shards, FSDP over tensor parallelism."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    hybrid = nn.Linear(7, 5)
    fully_shard(hybrid, mesh=mesh)
    both = parallelize_module(Pair(), mesh["inner"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(both, mesh=mesh["outer"])
    return {
        **{f"hybrid.{name}": value for name, value in hybrid.state_dict().items()},
        **{f"parallel.{name}": value for name, value in both.state_dict().items()},
        "grid": distribute_tensor(torch.arange(35.0).reshape(5, 7), mesh, [Shard(0), Shard(1)]),
        "flipped": distribute_tensor(torch.arange(35.0).reshape(7, 5), mesh, [Shard(1), Shard(0)]),
        "twice": distribute_tensor(torch.arange(27.0).reshape(9, 3), mesh, [Shard(0), Shard(0)]),
        "half replicated": distribute_tensor(torch.randn(5, 2), mesh, [Replicate(), Shard(0)]),
        "one": distribute_tensor(torch.randn(1, 1), mesh, [Shard(0), Shard(1)]),
    }


def dtypes() -> dict[str, object]:
    """Return a plain tensor of every dtype that both torch and safetensors know."""
    values = torch.linspace(-3, 3, 35).reshape(5, 7)
    floats = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
    integers = (torch.int8, torch.int16, torch.int32, torch.int64)
    unsigned = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
    state: dict[str, object] = {str(dtype).removeprefix("torch."): values.to(dtype) for dtype in (*floats, *integers)}
    state |= {str(dtype).removeprefix("torch."): torch.arange(35).reshape(7, 5).to(dtype) for dtype in unsigned}
    state["complex64"] = torch.complex(values, values.flip(0))
    state["bool"] = values > 0
    state["float8 column"] = values.to(torch.float8_e4m3fn).t()
    state["float8 scalar"] = torch.tensor(1.5).to(torch.float8_e5m2)
    return state


def flatten(state: dict[str, object]) -> dict[str, torch.Tensor]:
    """Return the tensors under their joined names, each gathered by torch where it is sharded."""
    flat: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        if isinstance(value, dict | list):
            inner = value if isinstance(value, dict) else {str(i): item for i, item in enumerate(value)}
            flat |= {f"{key}.{name}": tensor for name, tensor in flatten(inner).items()}
        elif isinstance(value, DTensor):
            flat[key] = value.full_tensor()
        elif isinstance(value, torch.Tensor):
            flat[key] = value
    return flat


STATES = {"dress": dress, "mesh": mesh_state, "dtypes": dtypes}


def main() -> None:
    """Build the state, save it three times, gather it."""
    options = parser(__doc__, STATES).parse_args()
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    state = STATES[options.kind]()
    lone = WORLD == 1
    dcp.save({"model": state}, storage_writer=dcp.FileSystemWriter("wrapped"), no_dist=lone)
    dcp.save(state, storage_writer=dcp.FileSystemWriter("plain"), no_dist=lone)
    dcp.save(state, storage_writer=dcp.FileSystemWriter("items", single_file_per_rank=False), no_dist=lone)
    full = flatten(state)
    if RANK == 0:
        print(f"{options.kind}: {len(full)} tensors")
    save_reference(options.reference / "full.safetensors", full)
    finish()


if __name__ == "__main__":
    main()
