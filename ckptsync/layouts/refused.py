"""Checkpoints that are known, and refused by name: what they are, why they are not read, and what to do.

They are claimed so that they are not taken for something else, or for nothing.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from ckptsync.errors import Unsupported
from ckptsync.model import Files, Tensor

NAME = "refused"


@dataclass(frozen=True, slots=True)
class _Known:
    """``pattern`` of a file's whole name; its first group is the directory that is claimed."""

    pattern: re.Pattern[str]
    what: str
    hint: str


_ALL = (
    _Known(
        re.compile(r"(?:(.*)/)?mp_rank_[0-9]{2,}(?:_[0-9]{3,})*/(?:model_optim_rng|model_rng|distrib_optim)\.pt"),
        "Megatron's own format: cut by rules that are in Megatron's code, and not in the files",
        "save with --ckpt-format torch_dist, or convert it with Megatron's tools/checkpoint/convert.py or Megatron-Bridge",
    ),
    _Known(
        re.compile(r"(?:(.*)/)?[^/]*rank-?[0-9]+-of-[0-9]+[^/]*\.(?:pth|pt|bin)"),
        "torch_xla's FSDP shards: flattened parameters, cut and padded as only torch_xla's own metadata tells",
        "run python -m torch_xla.distributed.fsdp.consolidate_sharded_ckpts on it, then merge what comes out, or nothing more",
    ),
)


def roots(names: Collection[str]) -> tuple[str, ...]:
    """The directories that hold such files."""
    return tuple(sorted({(match[1] or "") for name in names for known in _ALL if (match := known.pattern.fullmatch(name))}))


def holds_weights(root: str) -> bool:
    """Always: that is why it has to be said."""
    return root is not None


def demands(_files: Files, _root: str) -> dict[str, int | None]:
    """Nothing: how many files there should be is not known."""
    return {}


def tensors(files: Files, root: str) -> tuple[Tensor, ...]:
    """Always raises Unsupported."""
    for known in _ALL:
        there = sorted(name for name in files.sizes() if (match := known.pattern.fullmatch(name)) and (match[1] or "") == root)
        if there:
            raise Unsupported(f"{there[0]}: {known.what}", hint=known.hint)
    raise Unsupported(f"{root or '.'}: holds nothing that is known")
