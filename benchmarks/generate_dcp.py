"""torch Distributed Checkpoints as 4 ranks write them, one rank at a time.

Source: ``torch/distributed/checkpoint/{filesystem,hf_storage}.py``.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from benchmarks.sizes import RANKS, Shapes

Box = tuple[list[int], list[int]]


def items(shapes: Shapes, where: Path, axis: int | None) -> None:
    """Each rank's file holds one ``torch.save`` archive for every chunk, back to back.

    Without ``axis`` tensors are whole, dealt to the ranks.
    """
    described: dict[str, Any] = {
        f"model.{name}": TensorStorageMetadata(
            TensorProperties(dtype=torch.float32), torch.Size(shape), []
        )
        for name, shape in shapes.items()
    }
    stored = {}
    for rank in range(RANKS):
        with (where / f"__{rank}_0.distcp").open("wb") as out:
            for name, (offsets, sizes) in _of_rank(shapes, rank, axis):
                start, key = out.tell(), f"model.{name}"
                torch.save(torch.randn(sizes), out)
                described[key].chunks.append(
                    ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                )
                stored[MetadataIndex(key, offsets, rank)] = _StorageInfo(
                    f"__{rank}_0.distcp", start, out.tell() - start
                )
    paths = {f"model.{name}": ("model", name) for name in shapes}
    with (where / ".metadata").open("wb") as out:
        pickle.dump(Metadata(described, paths, stored, StorageMeta()), out)


def safetensors(shapes: Shapes, where: Path) -> None:
    """One safetensors file a rank, with the offsets of its chunks in the header, and the random
    states that tell how many ranks there were.
    """
    for rank in range(RANKS):
        chunks = dict(_of_rank(shapes, rank, 0))
        told = {name: {"saved_offsets": offsets} for name, (offsets, _) in chunks.items()}
        save_file(
            {name: torch.randn(sizes) for name, (_, sizes) in chunks.items()},
            where / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors",
            {"DCP_SHARDING_INFO": json.dumps(told), "DCP_VERSION": "1.0", "format": "pt"},
        )
        torch.save({"cpu": torch.get_rng_state()}, where / f"rng_state_{rank}.pth")


def _of_rank(shapes: Shapes, rank: int, axis: int | None) -> Iterator[tuple[str, Box]]:
    for number, (name, shape) in enumerate(shapes.items()):
        if axis is None:
            if number % RANKS == rank:
                yield name, ([0] * len(shape), list(shape))
            continue
        along = min(axis, len(shape) - 1)
        each = -(-shape[along] // RANKS)  # as torch.chunk cuts
        start = min(rank * each, shape[along])
        size = min(each, shape[along] - start)
        if size:
            yield (
                name,
                (
                    [start if d == along else 0 for d in range(len(shape))],
                    [size if d == along else n for d, n in enumerate(shape)],
                ),
            )
