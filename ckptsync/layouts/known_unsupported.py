"""Recognise checkpoints of formats that are not read, and say what they are and what to do.

As a layout they are not mistaken for another format, or for no checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from ckptsync.errors import Unsupported
from ckptsync.tensors import Files, Tensor

# The pattern of a file's whole name, whose first group is the root; a description; the hint.
_KNOWN = (
    (
        re.compile(
            r"(?:(.*)/)?mp_rank_[0-9]{2,}(?:_[0-9]{3,})*/(?:model_optim_rng|model_rng|distrib_optim)\.pt"
        ),
        "Megatron's own format: only Megatron's code says how the tensors are sharded",
        (
            "save with --ckpt-format torch_dist, or convert it with Megatron's"
            " tools/checkpoint/convert.py or Megatron-Bridge"
        ),
    ),
    (
        re.compile(r"(?:(.*)/)?[^/]*rank-?[0-9]+-of-[0-9]+[^/]*\.(?:pth|pt|bin)"),
        (
            "torch_xla's FSDP shards: flattened and padded parameters that only torch_xla can"
            " restore"
        ),
        (
            "run python -m torch_xla.distributed.fsdp.consolidate_sharded_ckpts on it, then merge"
            " the result if it is still sharded"
        ),
    ),
)


def roots(names: Collection[str]) -> tuple[str, ...]:
    """Return the directories that hold files of formats that are not read, sorted."""
    return tuple(
        sorted(
            {
                (match[1] or "")
                for name in names
                for pattern, *_ in _KNOWN
                if (match := pattern.fullmatch(name))
            }
        )
    )


def demands(_files: Files, _root: str) -> dict[str, int | None]:
    """Return nothing: how many files there should be is not known."""
    return {}


def tensors(files: Files, root: str) -> tuple[Tensor, ...]:
    """Always raise Unsupported, which says what the checkpoint is, and how to convert it."""
    for pattern, description, hint in _KNOWN:
        matching = sorted(
            name
            for name in files.sizes()
            if (match := pattern.fullmatch(name)) and (match[1] or "") == root
        )
        if matching:
            raise Unsupported(f"{matching[0]}: {description}", hint=hint)
    raise Unsupported(f"{root or '.'}: holds nothing that is known")
