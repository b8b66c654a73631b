"""Whether another node is sending files of the same checkpoint at this moment, by what the heartbeats in the store say."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ckptsync.errors import NotFound
from ckptsync.records.names import OURS, node_facts_name
from ckptsync.stores.contract import Entry, Store, read_all

GRACE = 900.0  # seconds on the store's clock after which a node that no longer beats sends no more; it beats four times a minute


def is_contended(store: Store, node: str, run: str, checkpoint: str) -> bool:
    """Whether a live node other than ``node`` has the checkpoint in its queue.  Raises StoreError."""
    entries = tuple(store.names(f"{OURS}/nodes/"))
    hearts = {e.name: heart for e, heart in _hearts(store, entries) if e.name != node_facts_name(node)}
    return any(_is_alive(e, entries) and f"{run}/{checkpoint}" in _queue(hearts[e.name]) for e in entries if e.name in hearts)


def _hearts(store: Store, entries: Iterable[Entry]) -> Iterator[tuple[Entry, Mapping[str, Any]]]:
    for entry in entries:
        with contextlib.suppress(NotFound, ValueError):  # being overwritten, or not a heartbeat: says nothing of anybody
            told = json.loads(read_all(store, entry.name, 1 << 20))
            if isinstance(told, dict):
                yield entry, told


def _is_alive(entry: Entry, entries: Iterable[Entry]) -> bool:
    """By the store's clock: our own heart beats beside it."""
    return max(e.mtime for e in entries) - entry.mtime < GRACE


def _queue(heart: Mapping[str, Any]) -> tuple[str, ...]:
    queue = heart.get("queue")
    return () if heart.get("stopped") or not isinstance(queue, list) else tuple(map(str, queue))
