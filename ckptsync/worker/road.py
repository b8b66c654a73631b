"""How a checkpoint gets from this node to a store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ckptsync.records import saves
from ckptsync.stores.contract import Store
from ckptsync.stores.limits import Limits
from ckptsync.worker.take import Passed, nothing

SMALL_AT_ONCE = 4  # times as many


@dataclass(frozen=True, slots=True)
class Road:
    """How to reach the store, as which node: what it says of a checkpoint now, who else is sending it now, what to do between chunks.

    All of these are called by several threads, but for ``passed``: by one at a time.  ``threads``: large files that are sent at once.
    ``small``: files at once that cost a round trip rather than bandwidth; 0: as `small_at_once` says.
    """

    store: Store
    node: str
    known: Callable[[], tuple[saves.Known, ...]]
    is_contended: Callable[[], bool] = lambda: False
    passed: Passed = nothing
    threads: int = Limits().threads
    small: int = 0


def small_at_once(threads: int) -> int:
    """Small files beside ``threads`` large ones; who asks for one at a time gets that."""
    return SMALL_AT_ONCE * threads if threads > 1 else 1
