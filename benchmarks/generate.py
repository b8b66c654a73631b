"""Large checkpoints in the real containers, one rank at a time: ``generate.py dcp-rows|dcp-columns|zero3 GIB DIR``.

Needs torch.  The layouts are those of the frameworks (item archives, ``.metadata``, flat groups); only the training is left out.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

RANKS = 4
SHAPE = (4096, 2048)


def names(gib: float) -> list[str]:
    count = max(1, round(gib * 2**30 / (SHAPE[0] * SHAPE[1] * 4)))
    return [f"model.layers.{n}.mlp.up_proj.weight" for n in range(count)]


def dcp(gib: float, where: Path, axis: int) -> None:
    """Each rank's file holds one ``torch.save`` archive for every tensor, back to back."""
    where.mkdir(parents=True)
    size = [n // RANKS if d == axis else n for d, n in enumerate(SHAPE)]
    described, stored, planned = {}, {}, {}
    for rank in range(RANKS):
        offsets = torch.Size([rank * size[axis] if d == axis else 0 for d in range(2)])
        with (where / f"__{rank}_0.distcp").open("wb") as out:
            for name in names(gib):
                start = out.tell()
                torch.save(torch.randn(size), out)
                chunk = ChunkStorageMetadata(offsets, torch.Size(size))
                key = f"model.{name}"
                known = described.setdefault(
                    key, TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size(SHAPE), [])
                )
                known.chunks.append(chunk)
                planned[key] = ("model", name)
                stored[MetadataIndex(key, offsets, rank)] = _StorageInfo(f"__{rank}_0.distcp", start, out.tell() - start)
    with (where / ".metadata").open("wb") as out:
        pickle.dump(Metadata(described, planned, stored, StorageMeta()), out)


def zero3(gib: float, where: Path) -> None:
    """Flat groups of fp32 masters, and model files with shapes and placeholders."""
    tag = where / "global_step1"
    tag.mkdir(parents=True)
    shapes = {name: torch.Size(SHAPE) for name in names(gib)}
    each = SHAPE[0] * SHAPE[1] // RANKS
    for rank in range(RANKS):
        module = {name: torch.empty(0) for name in shapes}
        states = {
            "module": module,
            "buffer_names": [],
            "param_shapes": [shapes],
            "frozen_param_shapes": None,
            "shared_params": {},
            "frozen_param_fragments": None,
        }
        torch.save(
            {**states, "ds_version": "0.19.8", "dp_world_size": RANKS}, tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        )
        flat = torch.randn(each * len(shapes))
        optim = {"zero_stage": 3, "partition_count": RANKS, "fp32_flat_groups": [flat]}
        torch.save({"optimizer_state_dict": optim, "ds_version": "0.19.8"}, tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    (where / "latest").write_text("global_step1")


if __name__ == "__main__":
    kind, gib, where = sys.argv[1], float(sys.argv[2]), Path(sys.argv[3])
    torch.manual_seed(0)
    if kind == "zero3":
        zero3(gib, where)
    else:
        dcp(gib, where, axis=0 if kind == "dcp-rows" else 1)
