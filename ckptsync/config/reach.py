"""From what is configured of a store's limits to what stores are given."""

from __future__ import annotations

from ckptsync.config.values import LimitsConfig
from ckptsync.stores.limits import Limits, Pace, Unlimited
from ckptsync.stores.pace import Paces


def limits(config: LimitsConfig) -> Limits:
    """For all stores of a process: its transfers share one pace, so call it once."""
    pace: Pace = Paces(config.bandwidth) if config.bandwidth else Unlimited()
    return Limits(pace, config.threads, config.memory, config.patience, config.stall)
