"""ZeRO checkpoints as DeepSpeed 0.19.8 would write them, made the slow obvious way, for any world
size.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from typing import Any

import torch
from hypothesis import strategies as st

from ckptsync.merger.plan import DType, MergeOptions
from tests.support.files_in_memory import MemoryFiles
from tests.support.merge_in_memory import Written, consolidate
from tests.support.torch_bytes import saved

Tensors = dict[str, torch.Tensor]
PARAM_GROUPS = [{"lr": 0.5, "betas": (0.9, 0.99), "foreach": None, "params": [0]}]
JUNK = 77.0  # in every padding: it must not show


@dataclass
class Zero:
    """What is trained, by parameter group, and everything else that a checkpoint says."""

    stage: int
    world: int
    groups: list[Tensors]
    frozen: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    gaps: list[list[int]] | None = None  # elements behind each parameter
    extra: int = 0  # elements of padding at the end of a group
    lean: bool = True  # DeepSpeed cuts that padding off, `BF16_Optimizer` does not
    cuts: tuple[float, ...] = ()  # where stage 3 begins another sub-group
    prefix: str = ""
    root: str = "global_step2"
    states: dict[str, float] = field(default_factory=dict)  # of the optimizer: factors of masters

    @property
    def trained(self) -> Tensors:
        return {name: tensor for group in self.groups for name, tensor in group.items()}


def files(of: Zero) -> MemoryFiles:
    """Return every rank's files."""
    content: dict[str, bytes] = {}
    for rank in range(of.world):
        optim = f"{of.prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        state = {"optimizer_state_dict": optimizer(of, rank), "ds_version": "0.19.8"}
        content[optim] = saved(state)
        if of.stage == 3:
            content[f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"] = saved(model(of, rank))
    if of.stage < 3:
        content["mp_rank_00_model_states.pt"] = saved(model(of, 0))
    prefix = f"{of.root}/" if of.root else ""
    return MemoryFiles({prefix + name: data for name, data in content.items()})


def own(tensor: torch.Tensor) -> torch.Tensor:
    """Return the model's copy of a weight: the master rounded to nearest, as DeepSpeed does."""
    return tensor.to(torch.bfloat16)


def model(of: Zero, rank: int) -> dict[str, Any]:
    """Return the content of a rank's ``model_states.pt``."""
    third = of.stage == 3
    trained = {
        n: torch.empty(0, dtype=torch.bfloat16) if third else own(t) for n, t in of.trained.items()
    }
    frozen = {n: torch.empty(0, dtype=t.dtype) if third else t for n, t in of.frozen.items()}
    tied = {name: trained.get(stored, frozen.get(stored)) for name, stored in of.tied.items()}
    frozen_shapes = {n: t.shape for n, t in of.frozen.items()}
    fragments = {n: _slice(t, rank, of.world) if third else t for n, t in of.frozen.items()}
    return {
        "module": {**trained, **frozen, **tied, **of.buffers},
        "buffer_names": list(of.buffers),
        "optimizer": None,
        "param_shapes": [{n: t.shape for n, t in group.items()} for group in of.groups],
        "frozen_param_shapes": None if of.stage == 1 else frozen_shapes,
        "frozen_param_fragments": None if of.stage == 1 else fragments,
        "shared_params": of.tied if rank == 0 else {},
        "dp_world_size": of.world,
        "ds_config": {"zero_optimization": {"stage": of.stage}},
    }


def optimizer(of: Zero, rank: int) -> dict[str, Any]:
    """Return a rank's optimizer state."""
    if of.stage == 3:
        slices = [_slice(t, rank, of.world) for t in of.trained.values()]
        flat = torch.cat([torch.empty(0), *slices])
        cuts = sorted({0, len(flat), *(int(c * len(flat)) for c in of.cuts)})
        groups = [flat[a:b].clone() for a, b in pairwise(cuts)] or [flat]
        states = {n: _states(of, group) for n, group in enumerate(groups)}
        return {
            "fp32_flat_groups": groups,
            "zero_stage": 3,
            "partition_count": of.world,
            "optimizer_state_dict": {"state": states, "param_groups": PARAM_GROUPS},
        }
    partitions = [_partition(of, index, rank) for index in range(len(of.groups))]
    state = {
        "single_partition_of_fp32_groups": [tensor for tensor, _ in partitions],
        "group_paddings": [padding for _, padding in partitions],
        "zero_stage": of.stage,
        "partition_count": [of.world] * len(of.groups),
        "base_optimizer_state": {
            "state": {
                # the optimizer's own tensors have the padding that masters may have lost
                n: _states(of, _partition(replace(of, lean=False), n, rank)[0])
                for n in range(len(of.groups))
            },
            "param_groups": [{"lr": 0.5, "params": [n]} for n in range(len(of.groups))],
        },
    }
    return state if of.gaps is None else state | {"param_alignment_paddings": of.gaps}


def _states(of: Zero, flat: torch.Tensor) -> dict[str, Any]:
    """Return what an optimizer keeps of a flat tensor: ``of.states`` times it; {} for none."""
    named = {name: flat * factor for name, factor in of.states.items()}
    return {"step": torch.tensor(3.0), **named} if named else {}


def _slice(tensor: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """Return a rank's ``ceil(numel / world)`` elements, the last ones padding."""
    each = -(-tensor.numel() // world)
    padding = torch.full((each * world - tensor.numel(),), JUNK, dtype=tensor.dtype)
    padded = torch.cat([tensor.reshape(-1), padding])
    return padded[rank * each : (rank + 1) * each].clone()


def _partition(of: Zero, index: int, rank: int) -> tuple[torch.Tensor, int]:
    """Return a rank's piece of a flattened group, and how much of it is padding.

    If ``of.lean``, the piece is without it, as DeepSpeed writes it.
    """
    gaps = of.gaps[index] if of.gaps else [0] * len(of.groups[index])
    pieces = [
        p
        for t, gap in zip(of.groups[index].values(), gaps, strict=True)
        for p in (t.reshape(-1), torch.full((gap,), JUNK))
    ]
    flat = torch.cat([torch.empty(0), *pieces])
    padded = torch.cat([flat, torch.full((of.extra + -(len(flat) + of.extra) % of.world,), JUNK)])
    each = len(padded) // of.world
    padding = max(0, min(each, (rank + 1) * each - len(flat)))
    piece = padded[rank * each : (rank + 1) * each].clone()
    return (piece[: each - padding], padding) if of.lean else (piece, padding)


def expected(of: Zero, dtype: DType) -> Tensors:
    """Return what a merge must give."""
    keep = dtype == "keep"
    trained = {n: t if keep else own(t) for n, t in of.trained.items()}
    tensors = {**trained, **of.frozen, **of.buffers}
    return tensors | {name: tensors[stored] for name, stored in of.tied.items()}


def merged(sources: MemoryFiles, dtype: DType) -> Tensors:
    """Return the output of a merge, read by the safetensors library."""
    from safetensors.torch import load

    written = Written()
    consolidate(sources, written.write, MergeOptions(dtype))
    return load(written["model.safetensors"]) if written else {}


def values(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return numbers that differ from element to element and from tensor to tensor."""
    return (torch.arange(prod(shape), dtype=torch.float32).reshape(shape) + seed / 8).to(dtype)


SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple) | st.sampled_from(
    [(), (1,), (2,), (37,)]
)


@st.composite
def zeros(draw: st.DrawFn) -> Zero:
    """Draw any checkpoint there might be."""
    stage, world = draw(st.sampled_from([1, 2, 3])), draw(st.integers(1, 9))
    shapes_of_groups = st.lists(st.lists(SHAPES, min_size=1, max_size=5), min_size=1, max_size=3)
    groups = [
        {f"g{g}.p {n}": values(shape, 1000 * g + 64 * n) for n, shape in enumerate(shapes)}
        for g, shapes in enumerate(draw(shapes_of_groups))
    ]
    frozen = {
        f"frozen.{n}": values(s, n, torch.bfloat16)
        for n, s in enumerate(draw(st.lists(SHAPES, max_size=2)))
    }
    buffers = {
        f"buffer.{n}": values(s, n, torch.int64)
        for n, s in enumerate(draw(st.lists(SHAPES, max_size=2)))
    }
    stored = draw(st.sampled_from(["", *groups[0], *frozen]))
    gaps = (
        [[draw(st.integers(0, 3)) for _ in group] for group in groups]
        if draw(st.booleans())
        else None
    )
    extra, lean = draw(st.integers(0, 2 * world - 1)), draw(st.booleans())
    cuts = tuple(draw(st.lists(st.floats(0, 1), max_size=3)))
    tied, prefix = {"tied": stored} if stored else {}, draw(st.sampled_from(["", "bf16_"]))
    return Zero(stage, world, groups, frozen, buffers, tied, gaps, extra, lean, cuts, prefix)
