"""Checkpoints of very many small chunks, to measure what planning costs.

The bytes of tensors are zeros, and those of large tensors are holes of sparse files: planning reads
none of them.
"""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import StorageMeta, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from benchmarks.sizes import RANKS

HOLE = 1 << 14  # bytes of zeros from which on they are not written


def _saved(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def _names(count: int) -> Iterator[str]:
    return (f"model.layers.{n // 10}.mlp.experts.{n % 10}.up_proj.weight" for n in range(count))


def _dcp(where: Path, count: int, rows: int, columns: int) -> None:
    """``count`` chunks: tensors cut into rows over the ranks."""
    tensors: dict[str, TensorStorageMetadata] = {}
    paths: dict[str, tuple[str, str]] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    item = _saved(torch.zeros(rows, columns))
    for rank in range(RANKS):
        with (where / f"__{rank}_0.distcp").open("wb") as out:
            for name in _names(count // RANKS):
                key, start, offset = f"model.{name}", out.tell(), torch.Size([rows * rank, 0])
                properties = TensorProperties(dtype=torch.float32)
                described = tensors.setdefault(
                    key, TensorStorageMetadata(properties, torch.Size([rows * RANKS, columns]), [])
                )
                described.chunks.append(ChunkStorageMetadata(offset, torch.Size([rows, columns])))
                paths[key] = ("model", name)
                _write_sparse(out, item)
                storage[MetadataIndex(key, offset, rank)] = _StorageInfo(
                    f"__{rank}_0.distcp", start, len(item)
                )
    (where / ".metadata").write_bytes(
        pickle.dumps(Metadata(tensors, paths, storage, StorageMeta()))
    )


def _write_sparse(out: io.BufferedWriter, data: bytes) -> None:
    if len(data) < HOLE:
        out.write(data)
        return
    out.write(data[:4096])
    out.seek(len(data) - 8192, os.SEEK_CUR)
    out.write(data[-4096:])


def _zero2(where: Path, count: int) -> None:
    """A model file with a record for every parameter, and ranks that have one flat group of
    masters.
    """
    shape = torch.Size([4, 8])
    module = {name: torch.zeros(shape, dtype=torch.bfloat16) for name in _names(count)}
    _zero(
        where,
        2,
        "",
        {"module": module, "param_shapes": [dict.fromkeys(module, shape)]},
        32 * count // RANKS,
    )


def _zero3(where: Path, count: int) -> None:
    """Placeholders in the model files, every parameter cut over all ranks."""
    shape = torch.Size([4, 8])
    module = dict.fromkeys(_names(count), torch.empty(0, dtype=torch.bfloat16))
    for rank in range(RANKS):
        _zero(
            where,
            3,
            f"zero_pp_rank_{rank}_",
            {"module": module, "param_shapes": [dict.fromkeys(module, shape)]},
            8 * count,
        )


def _zero(where: Path, stage: int, rank: str, model: dict[str, Any], numel: int) -> None:
    tag = where / "global_step1"
    tag.mkdir(exist_ok=True)
    (where / "latest").write_text("global_step1")
    more = {
        "buffer_names": [],
        "shared_params": {},
        "frozen_param_shapes": {},
        "frozen_param_fragments": {},
        "dp_world_size": RANKS,
    }
    config = {"ds_config": {"zero_optimization": {"stage": stage}}, "optimizer": None}
    torch.save(model | more | config, tag / f"{rank}mp_rank_00_model_states.pt")
    flat = (
        {"fp32_flat_groups": [torch.zeros(numel)]}
        if stage == 3
        else {"single_partition_of_fp32_groups": [torch.zeros(numel)]}
    )
    state = flat | {
        "zero_stage": stage,
        "partition_count": RANKS if stage == 3 else [RANKS],
        "group_paddings": [0],
    }
    for number in range(RANKS):
        torch.save(
            {"optimizer_state_dict": state},
            tag / f"zero_pp_rank_{number}_mp_rank_00_optim_states.pt",
        )


def _safetensors(where: Path, count: int) -> None:
    """A whole model in one file."""
    size = 4 * 32
    header = {
        name: {"dtype": "F32", "shape": [4, 8], "data_offsets": [n * size, (n + 1) * size]}
        for n, name in enumerate(_names(count))
    }
    text = json.dumps(header).encode()
    with (where / "model.safetensors").open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + count * size)


SHAPES: dict[str, Callable[[Path, int], None]] = {
    "dcp": lambda where, count: _dcp(where, count, 4, 8),
    "dcp-large": lambda where, count: _dcp(where, count, 64, 1024),
    "zero2": _zero2,
    "zero3": _zero3,
    "safetensors": _safetensors,
}
