"""Writing tombstones, and learning what time it is on the store's clock, by which they age."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from ckptsync.errors import Exists
from ckptsync.records.coding import encode, record_name
from ckptsync.records.keep import Keep
from ckptsync.records.manifest import Manifest
from ckptsync.records.names import OURS, parse_record_name, records_prefix
from ckptsync.records.tombstone import Scope, Stage, Tombstone
from ckptsync.stores.contract import Store

_CLOCK = f"{OURS}/clocks/~gc"  # no node's id holds a ~


@dataclass(frozen=True, slots=True)
class Grave:
    """What a tombstone is about.  ``manifests``: by name, all that count in that location."""

    manifests: Mapping[str, Manifest]
    scope: Scope
    reason: str
    metrics: Mapping[str, float] = field(default_factory=dict)


def store_now(store: Store) -> float:
    """Seconds on the store's clock.  Writes a file, whose mtime tells.  Raises StoreError."""
    store.write(_CLOCK, [b"now\n"])
    return max(entry.mtime for entry in store.names(f"{OURS}/clocks/") if entry.name == _CLOCK)


def write(store: Store, grave: Grave, stage: Stage) -> str:
    """Say it, with the next number; the record's name.  Raises StoreError."""
    first = next(iter(grave.manifests.values()))
    stone = Tombstone(
        run=first.run,
        checkpoint=first.checkpoint,
        location=first.location,
        n=_next_n(store, first.run, first.location, "tombstone"),
        manifests=tuple(sorted(grave.manifests)),
        reason=grave.reason,
        scope=grave.scope,
        stage=stage,
        ended=ended(grave.manifests.values()),
        metrics=dict(grave.metrics) if grave.scope == "shards" else {},
        by=secrets.token_hex(8) if stage == "begun" else "",
    )
    return _put(store, stone)


def keep(store: Store, word: Keep) -> str:
    """Say it, with the next number; the record's name.  Raises StoreError."""
    return _put(store, replace(word, n=_next_n(store, word.run, word.location, "keep")))


def ended(manifests: Iterable[Manifest]) -> dict[str, int]:
    """Node → the mtime of its last file (ns, its own clock)."""
    found: dict[str, int] = {}
    for m in manifests:
        found[m.node] = max(m.ended, found.get(m.node, m.ended), *(f.mtime for f in m.files))
    return found


def spent(stones: Mapping[str, Tombstone]) -> list[str]:
    """Of a location that is gone the tombstones beside the one that says all: by that a node knows its save again.  Pure."""
    stays = max(
        (t for t in stones.values() if t.stage == "said" and t.scope == "location"),
        key=lambda t: (len(t.manifests), t.n),
        default=None,
    )
    if stays is None:
        return []
    return [name for name, t in stones.items() if t is not stays and set(t.manifests).issubset(stays.manifests)]


def _put(store: Store, record: Tombstone | Keep) -> str:
    data = encode(record)
    name = record_name(record, data)
    with contextlib.suppress(Exists):  # named by its own bytes: it is this very record
        store.create(name, [data])
    return name


def _next_n(store: Store, run: str, location: str, kind: str) -> int:
    listed = (parse_record_name(entry.name) for entry in store.names(records_prefix(run, location)))
    return max((p.n for p in listed if p and p.kind == kind), default=-1) + 1
