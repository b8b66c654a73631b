"""The retention rules that an operator configures.

They are a module by themselves because the configuration needs them, and nothing else of the head.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Best:
    """Keep the ``count`` checkpoints with the least, or greatest, value of ``metric``.

    An event measured it, or it is in ``trainer_state.json``.
    """

    metric: str
    count: int
    is_greatest: bool = False


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of one run. Durations are seconds, sizes are bytes; 0, and None, set no rule.

    ``keep_every``: keeps steps that are a multiple of it. ``shards``: the number of newest
    checkpoints whose trainer's own files are kept; those of others are deleted while the model
    stays.
    """

    keep_last: int = 0
    keep_every: int = 0
    keep_best: Best | None = None
    max_age: float = 0.0
    max_size: int = 0
    shards: int | None = None
