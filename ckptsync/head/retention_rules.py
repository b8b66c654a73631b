"""The retention rules that an operator gives.

A module by itself: the configuration needs it, and no more of the head.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Best:
    """The ``count`` checkpoints of the least, or greatest, ``metric``.

    Events measured it, or it is in ``trainer_state.json``.
    """

    metric: str
    count: int
    is_greatest: bool = False


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules of one run.  Durations are seconds, sizes are bytes; 0, and None, set no rule.

    ``keep_every``: keeps steps that are a multiple of it.  ``shards``: the trainer's own files of
    all but so many newest checkpoints are deleted while the model stays.
    """

    keep_last: int = 0
    keep_every: int = 0
    keep_best: Best | None = None
    max_age: float = 0.0
    max_size: int = 0
    shards: int | None = None
