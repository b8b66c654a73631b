"""From what is configured of stores to what stores are given."""

from __future__ import annotations

from collections.abc import Mapping

from ckptsync.config.values import LimitsConfig
from ckptsync.stores.limits import Limits, RateLimiter, TokenBucket, Unlimited
from ckptsync.stores.trees import Access
from ckptsync.stores.urls import Remote, located


def options_for(url: str, options: Mapping[str, object]) -> Mapping[str, object]:
    """Those of the place's own kind, where they are given for several (``{"s3": {…}, "sftp": {…}}``); a path gets all, and refuses any."""
    place = located(url)
    return Access(options).options_of(place) if isinstance(place, Remote) else options


def limits(config: LimitsConfig) -> Limits:
    """For all stores of a process: its transfers share one pace, so call it once."""
    pace: RateLimiter = TokenBucket(config.bandwidth) if config.bandwidth else Unlimited()
    return Limits(pace, config.threads, config.memory, config.patience, config.stall)
