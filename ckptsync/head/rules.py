"""What an operator wants kept.  Durations are seconds, sizes are bytes; 0, and ``None``, say nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Best:
    """The ``count`` checkpoints of the best ``metric`` in ``trainer_state.json``: the least, or the greatest."""

    metric: str
    count: int
    is_greatest: bool = False


@dataclass(frozen=True, slots=True)
class Rules:
    """For one run.  ``keep_every``: steps that are a multiple of it.  ``shards``: of all but so many newest they go while the model stays; ``None``: they stay."""

    keep_last: int = 0
    keep_every: int = 0
    keep_best: Best | None = None
    max_age: float = 0.0
    max_size: int = 0
    shards: int | None = None
