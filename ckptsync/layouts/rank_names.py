"""Which rank of a training wrote a file, by its name alone."""

from __future__ import annotations

import re
from collections.abc import Iterable

_FROM_0 = re.compile(
    r"__([0-9]+)_[0-9]+\.distcp|__([0-9]+)\.metadata|.*zero_pp_rank_([0-9]+)_mp_rank_.*|rng_state_([0-9]+)\.pth"
    r"|random_states_([0-9]+)\.pkl|.*_rank_([0-9]+)\.pt|.*_rank([0-9]+)\.bin"
)
_FROM_1 = re.compile(r"shard-([0-9]{5,})-model-[0-9]{5,}-of-[0-9]{5,}\.safetensors")

MOST = 1 << 20  # no training has so many ranks: a higher number in a name is something else


def rank(name: str) -> int | None:
    """Return the rank whose own file this is; None where the name does not say."""
    base = name.rpartition("/")[2]
    if found := _FROM_0.fullmatch(base):
        number = int(next(filter(None, found.groups())))
    elif found := _FROM_1.fullmatch(base):
        number = max(0, int(found[1]) - 1)
    else:
        return None
    return number if number < MOST else None


def ranks(names: Iterable[str]) -> tuple[int, ...]:
    """Return the ranks whose own files these are, in order."""
    return tuple(sorted({found for found in map(rank, names) if found is not None}))
