"""The roles of the head: what consolidates and what verifies.  Apart, since a worker alone does without all that they import."""

from __future__ import annotations

import time
from collections.abc import Callable

from ckptsync.config.values import Config
from ckptsync.daemon import told_head as told
from ckptsync.daemon.working import Outcome
from ckptsync.head import consolidate
from ckptsync.head.consolidate import HeadOptions
from ckptsync.merge.plan import Options
from ckptsync.stores.contract import Store
from ckptsync.verify import tick as verifying
from ckptsync.verify.due import Schedule


def head(config: Config, store: Store) -> Callable[[], Outcome]:
    """The head's tick."""
    options = HeadOptions(Options(config.head.dtype, config.head.max_shard_size), config.head.config_from)
    memory = consolidate.Memory()

    def look() -> Outcome:
        result = consolidate.tick(store, options, time.monotonic(), memory)
        return Outcome(tuple(told.head(result)), errors=told.head_errors(result))

    return look


class Proving:
    """The verifier role: a tick proves one place; while others wait, the next tick comes at once."""

    def __init__(self, config: Config, store: Store) -> None:
        self._store, self._schedule = store, Schedule(config.verify.level, config.verify.period)
        self.hint: Callable[[], None] = lambda: None

    def look(self) -> Outcome:
        """One tick."""
        result = verifying.tick(self._store, self._schedule, time.time())
        if result.report and result.waiting:
            self.hint()
        return Outcome(tuple(told.verifier(result)), errors=told.verifier_errors(result))
