"""What every writer script here needs: the batches, the reference file, the end of a process group."""

import os
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
VOCABULARY = 71


def batch(generator: torch.Generator, rows: int = 2, length: int = 16) -> torch.Tensor:
    """Token ids that no rank shares with another (seed the generator with the rank)."""
    return torch.randint(4, VOCABULARY, (rows, length), generator=generator)


def save_reference(path: Path, tensors: dict[str, torch.Tensor]) -> None:
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
