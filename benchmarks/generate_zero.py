"""DeepSpeed's ZeRO-2 and ZeRO-3 files of a bf16 model: fp32 masters and both moments, 12 bytes a
parameter.

Source: ``deepspeed/runtime/engine.py``, ``deepspeed/runtime/zero/{stage_1_and_2,stage3}.py``,
0.19.8.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch

from benchmarks.sizes import RANKS, Shapes, numel

VERSION = "0.19.8"
TAG = "global_step1"


def stage3(shapes: Shapes, where: Path) -> None:
    """Every parameter is cut into ``ceil(numel / W)`` elements a rank.

    The model files hold empty placeholders.
    """
    placeholders = {name: torch.empty(0, dtype=torch.bfloat16) for name in shapes}
    each = sum(-(-prod(shape) // RANKS) for shape in shapes.values())
    tag = _tag(where)
    for rank in range(RANKS):
        _save_model(tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", placeholders, shapes)
        flat = torch.randn(each)
        state = {
            "zero_stage": 3,
            "partition_count": RANKS,
            "fp32_flat_groups": [flat],
            "optimizer_state_dict": _moments(flat),
        }
        _save_optimizer(tag, rank, state)


def stage2_sliced(shapes: Shapes, where: Path) -> None:
    """As `stage2`, with the slices that ``ds_to_universal`` goes by; needs DeepSpeed."""
    from deepspeed.utils.tensor_fragment import fragment_address  # noqa: PLC0415  not needed by others

    stage2(shapes, where, fragment_address)


def stage2(shapes: Shapes, where: Path, address: Any = None) -> None:
    """The flattened group is cut into one partition a rank.

    The model file holds all of it in bf16, as views of one storage.
    """
    total = numel(shapes)
    each = -(-total // (2 * RANKS)) * 2
    whole = torch.randn(each * RANKS)
    tag, names, at = _tag(where), {}, 0
    narrow = whole.bfloat16()
    for name, shape in shapes.items():
        names[name] = narrow[at : at + prod(shape)].view(shape)
        at += prod(shape)
    _save_model(tag / "mp_rank_00_model_states.pt", names, shapes)
    for rank in range(RANKS):
        flat = whole[rank * each : min((rank + 1) * each, total)].clone()
        state = {
            "zero_stage": 2,
            "partition_count": [RANKS],
            "group_paddings": [each * RANKS - total if rank == RANKS - 1 else 0],
            "param_alignment_paddings": [[0] * len(shapes)],
            "single_partition_of_fp32_groups": [flat],
            "base_optimizer_state": _moments(flat),
        }
        if address:
            slices = _slices(shapes, rank * each, (rank + 1) * each)
            state["param_slice_mappings"] = [
                {name: address(numel=size, start=start) for name, start, size in slices}
            ]
        _save_optimizer(tag, rank, state)


def _slices(shapes: Shapes, low: int, high: int) -> Iterator[tuple[str, int, int]]:
    """Each parameter with elements from ``low`` to ``high``: where they begin there, how many."""
    at = 0
    for name, shape in shapes.items():
        end = at + prod(shape)
        if (first := max(at, low)) < (last := min(end, high)):
            yield name, first - low, last - first
        at = end


def _tag(where: Path) -> Path:
    (where / "latest").write_text(TAG)
    tag = where / TAG
    tag.mkdir()
    return tag


def _save_model(path: Path, module: dict[str, torch.Tensor], shapes: Shapes) -> None:
    states: dict[str, Any] = {
        "module": module,
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [{name: torch.Size(shape) for name, shape in shapes.items()}],
        "frozen_param_shapes": None,
        "shared_params": {},
        "frozen_param_fragments": None,
        "global_steps": 1,
        "dp_world_size": RANKS,
        "mp_world_size": 1,
        "ds_version": VERSION,
    }
    torch.save(states, path)


def _moments(flat: torch.Tensor) -> dict[str, Any]:
    moments = {"step": torch.tensor(1.0), "exp_avg": flat * 0.1, "exp_avg_sq": flat * flat}
    return {"state": {0: moments}, "param_groups": [{"lr": 1e-4, "params": [0]}]}


def _save_optimizer(tag: Path, rank: int, state: dict[str, Any]) -> None:
    torch.save(
        {"optimizer_state_dict": state, "ds_config": {}, "ds_version": VERSION},
        tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
    )
