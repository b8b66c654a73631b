"""What the writer scripts here share: their options, a model, two steps of training, the gathered state, the reference file."""

import argparse
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
VOCABULARY = 71
Tensors = dict[str, torch.Tensor]


class Pair(nn.Module):
    """Two linears for tensor parallelism: columns, then rows; no size that four divides."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)


def parser(description: str | None, kinds: Iterable[str] = ()) -> argparse.ArgumentParser:
    """Return a parser of what most scripts are told: a kind of state to write, the base model, where the reference goes."""
    made = argparse.ArgumentParser(description=description)
    if kinds:
        made.add_argument("kind", choices=tuple(kinds))
    made.add_argument("--base", type=Path)
    made.add_argument("--reference", type=Path, required=True)
    return made


def batch(generator: torch.Generator, rows: int = 2, length: int = 16) -> torch.Tensor:
    """Token ids that no rank shares with another (seed the generator with the rank)."""
    return torch.randint(4, VOCABULARY, (rows, length), generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, backward: Callable[[torch.Tensor], None] = torch.Tensor.backward) -> None:
    """Two steps of a language model on batches that no other seed has."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(2):
        ids = batch(generator)
        backward(model(input_ids=ids, labels=ids).loss)
        optimizer.step()
        optimizer.zero_grad()


def full_state(model: nn.Module) -> Tensors:
    """Let torch put a sharded model's state together; a collective."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def gathered(state: Tensors) -> Tensors:
    """Return a state with each sharded tensor gathered by torch; all ranks take part."""
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}


def gathered_zero3(module: nn.Module) -> Tensors:
    """Let DeepSpeed put the parameters of stage 3 together; a collective."""
    import deepspeed

    full = {}
    for name, parameter in module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            full[name] = parameter.detach().clone()
    return full


def save_reference(path: Path, tensors: Tensors) -> None:
    """Rank 0 writes what the framework gathered: contiguous copies, the dtypes as they came."""
    if RANK:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}, path)
    path.chmod(0o644)


def finish() -> None:
    """Leave together; gloo's teardown sometimes aborts, when all is long written."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
