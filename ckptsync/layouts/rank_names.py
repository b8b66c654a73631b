"""Which rank of a training wrote a file, by its name alone."""

from __future__ import annotations

import re
from collections.abc import Iterable

_FROM_0 = re.compile(
    r"__([0-9]+)_[0-9]+\.distcp|__([0-9]+)\.metadata|.*zero_pp_rank_([0-9]+)_mp_rank_.*|rng_state_([0-9]+)\.pth|random_states_([0-9]+)\.pkl|.*_rank_([0-9]+)\.pt|.*_rank([0-9]+)\.bin"
)
_FROM_1 = re.compile(r"shard-([0-9]{5,})-model-[0-9]{5,}-of-[0-9]{5,}\.safetensors")

MOST = 1 << 20  # no training has so many ranks: a higher number in a name is something else


def rank(name: str) -> int | None:
    """The rank whose own file this is; ``None`` where the name does not say."""
    base = name.rpartition("/")[2]
    if found := _FROM_0.fullmatch(base):
        return _known(int(next(filter(None, found.groups()))))
    found = _FROM_1.fullmatch(base)
    return _known(max(0, int(found[1]) - 1)) if found else None


def _known(number: int) -> int | None:
    return number if number < MOST else None


def ranks(names: Iterable[str]) -> tuple[int, ...]:
    """The ranks whose own files these are."""
    return tuple(sorted({found for found in map(rank, names) if found is not None}))
