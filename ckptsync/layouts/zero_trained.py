"""Which parameters a model-parallel rank trains, and where their fp32 masters lie.

``param_shapes`` of the model file names them; without it, the slices that ``BF16_Optimizer`` records.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckptsync.layouts import zero_experts, zero_masters, zero_slices
from ckptsync.layouts.zero_files import buffers, configuration, optimizer_state, section
from ckptsync.layouts.zero_rank import Rank, groups_of
from ckptsync.model import Copy, Shape

Groups = Sequence[dict[str, Shape]]


def groups(rank: Rank) -> Groups:
    """Names and shapes by parameter group, in the order of their elements; experts as the first rank numbers its own."""
    told = groups_of(rank.first)
    if rank.stage == 0:
        return []
    if told is not None:
        return told
    if rank.absent:
        named = buffers(rank.first)
        return [{name: value.shape for name, (_, value) in rank.own.items() if name not in named}]
    own = {name: value.shape for name, (_, value) in rank.own.items()}
    files = [zero_experts.first_set(rank.first, rank.optim, n) for n in zero_slices.count(rank.optim[0])]
    return zero_slices.groups(
        files, own, dealt=section(configuration(rank.first), "zero_optimization").get("round_robin_gradients") is True
    )


def shapes(rank: Rank, told: Groups) -> dict[str, Shape]:
    """The trained parameters; experts under their numbers over all ranks."""
    found: dict[str, Shape] = {}
    for group in told:
        found |= zero_experts.everywhere(group, rank.own) if zero_experts.is_of_experts(group) else group
    return found


def unordered(rank: Rank) -> str:
    """What to say of masters in an order that no file tells: with ``round_robin_gradients`` slices are not where they say.

    Older DeepSpeed leaves both ``param_shapes`` and ``ds_config`` out of checkpoints with experts (``_save_moe_checkpoint``, 0.16).
    """
    is_told = groups_of(rank.first) is not None or bool(configuration(rank.first)) or len(rank.optim) < 2
    if rank.absent or is_told or "zero_stage" not in optimizer_state(rank.optim[0]):
        return ""
    return "no file tells the order of the fp32 masters, and they are not read: the weights are the model's own"


def masters(rank: Rank, told: Groups) -> dict[str, Copy]:
    """The fp32 master of each, where all optimizer files are here."""
    if rank.absent or not rank.optim or unordered(rank):
        return {}
    if rank.stage == 3:
        return zero_masters.copies(rank.files, 3, rank.optim, told)
    found: dict[str, Copy] = {}
    for index, group in enumerate(told):
        if not zero_experts.is_of_experts(group):
            copies = zero_masters.group(rank.files, rank.optim, index, group)
            zero_slices.check(rank.files, rank.optim, index, copies)
            found |= copies
    return found | zero_experts.masters(rank.files, rank.first, rank.optim, told, rank.own)
