"""Whether another node is sending files of the same checkpoint at this moment, by what the store says."""

from __future__ import annotations

from ckptsync.records.names import sending_prefix
from ckptsync.worker.known import Known

GRACE = 900.0  # seconds on the store's clock after which a node that no longer says so sends no more: it says so every minute


def is_contended(known: Known, node: str, run: str, checkpoint: str) -> bool:
    """Whether a live node other than ``node`` says that it is sending.  ``known``: as it is now, our own word in it."""
    prefix = sending_prefix(run, checkpoint)
    now = max(known.times.values(), default=0.0)
    others = (name for name, size in known.copies.items() if size and name.startswith(prefix) and name != prefix + node)
    return any(now - known.times[name] < GRACE for name in others)
