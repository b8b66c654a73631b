"""What a trainer measured of a checkpoint, by its `trainer_state.json`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptsync.catalogue.fresh import read_record
from ckptsync.catalogue.summary import Summary
from ckptsync.digest import digest
from ckptsync.errors import CkptsyncError, Corrupt, NotFound, StoreError
from ckptsync.parsing import parse
from ckptsync.records.manifest import Manifest
from ckptsync.records.names import parse_record_name, records_prefix
from ckptsync.records.saves import locate
from ckptsync.records.tombstone import Tombstone
from ckptsync.stores.contract import Store, read_all

STATE = "trainer_state.json"
LIMIT = 256 << 20
MOST = 200  # names of metrics that are kept of one checkpoint

Metrics = Mapping[str, float]


@dataclass(slots=True)
class Measured:
    """By run, location and state; ``None`` where it could not be read.  Losing it costs reading again."""

    known: dict[tuple[str, str, str], Metrics | None] = field(default_factory=dict)


def parsed(data: bytes, step: int | None) -> dict[str, float]:
    """The last value of every metric that was logged up to ``step``.  Raises Corrupt.

    transformers (trainer_callback.py, TrainerState) logs in ``log_history``, in the order of time: a mapping with ``step`` and what was measured.
    """
    try:
        history = parse(data, STATE)["log_history"]
        entries = [e for e in history if step is None or e.get("step", 0) <= step]
        return _last(entries)
    except (KeyError, TypeError, AttributeError, OverflowError) as e:
        raise Corrupt(f"{STATE}: no history of a trainer's: {e}") from e


def _last(entries: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for entry in entries:
        found.update({str(k): float(v) for k, v in entry.items() if isinstance(v, int | float) and math.isfinite(v)})
    return dict(sorted(found.items())[:MOST])


def of_locations(store: Store, locations: Iterable[Summary], metric: str, memory: Measured) -> dict[str, float | None]:
    """Location → value; ``None`` where it could not be read, no entry where it was not measured.  Raises StoreError where the store does not answer."""
    found: dict[str, float | None] = {}
    for seen in locations:
        measured = of_location(store, seen, memory)
        if measured is None or metric in measured:
            found[seen.location] = measured[metric] if measured else None
    return found


def of_location(store: Store, seen: Summary, memory: Measured) -> Metrics | None:
    """All that is known of one location, read once for each state that it is in.  Raises StoreError where the store does not answer."""
    key = (seen.run, seen.location, seen.state)
    if key not in memory.known:
        try:
            memory.known[key] = _buried(store, seen) if seen.let_go else _read(store, seen)
        except CkptsyncError as e:
            if isinstance(e, StoreError) and not isinstance(e, NotFound):
                raise
            memory.known[key] = None  # damaged, or gone: what cannot be judged is kept
    return memory.known[key]


def _read(store: Store, seen: Summary) -> Metrics:
    found = locate(read_manifests(store, seen.manifests)).get(STATE)
    if not found:
        return {}
    data = read_all(store, found[0].name, LIMIT)
    if digest(data) != found[0].entry.digest:
        raise Corrupt(f"{found[0].name}: not the bytes that its node sent")
    return parsed(data, seen.step)


def read_manifests(store: Store, names: Iterable[str]) -> list[Manifest]:
    """Raises Corrupt, Unsupported, NotFound, StoreError."""
    parsed_names = (parse_record_name(name) for name in names)
    records = (read_record(store, name) for name in parsed_names if name is not None)
    return [r for r in records if isinstance(r, Manifest)]


def _buried(store: Store, seen: Summary) -> Metrics:
    """Said by the tombstone of its shards."""
    names = [
        p
        for e in store.names(records_prefix(seen.run, seen.location))
        if (p := parse_record_name(e.name)) and p.kind == "tombstone"
    ]
    stones = [r for p in names if isinstance(r := read_record(store, p), Tombstone)]
    return next((t.metrics for t in sorted(stones, key=lambda t: -t.n) if t.scope == "shards" and t.metrics), {})
