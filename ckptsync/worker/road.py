"""How a checkpoint gets from this node to a store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckptsync.records import saves
from ckptsync.records.manifest import Manifest
from ckptsync.stores.contract import Store
from ckptsync.stores.limits import Limits
from ckptsync.worker.take import Passed, nothing

SMALL_AT_ONCE = 4  # times as many


@dataclass(frozen=True, slots=True)
class Road:
    """How to reach the store, as which node: what it says of a checkpoint now, who else is sending it now, what to do between chunks.

    All of these are called by several threads, but for ``passed``: by one at a time.  ``threads``: large files that are sent at once.
    ``small``: files at once that cost a round trip rather than bandwidth; 0: as `small_at_once` says.
    ``clock``: this node's, in ns, of who tries again and again, and so may wait for proof.
    """

    store: Store
    node: str
    known: Callable[[], tuple[saves.Known, ...]]
    is_contended: Callable[[], bool] = lambda: False
    passed: Passed = nothing
    threads: int = Limits().threads
    small: int = 0
    clock: Callable[[], int] | None = None

    def must_wait(self, part: Manifest, known: Sequence[saves.Known]) -> bool:
        """Whether it is too early to take a part for one of a save that nothing but ranks and time ties it to."""
        if self.clock is None or not (until := saves.doubtful_until(part, known)):
            return False
        return self.clock() - part.clock_offset < until or self.is_contended()


def small_at_once(threads: int) -> int:
    """Small files beside ``threads`` large ones; who asks for one at a time gets that."""
    return SMALL_AT_ONCE * threads if threads > 1 else 1
