"""From all records and a listing to one snapshot a location."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from ckptsync.records.coding import Record
from ckptsync.records.keep import Keep
from ckptsync.records.manifest import Manifest
from ckptsync.records.model_record import ModelRecord
from ckptsync.records.names import RecordName, consolidated_prefix, parse_record_name, records_prefix
from ckptsync.records.report import Report
from ckptsync.records.saves import Known, known_of
from ckptsync.records.state import Records, Snapshot, snapshot
from ckptsync.records.tombstone import Tombstone

R = TypeVar("R", Manifest, ModelRecord, Report, Tombstone, Keep)
_PIECES = re.compile(r"[0-9]+|[^0-9]+")
_DIGITS = "0123456789"  # `str.isdigit` knows more, of which `int` reads none
Location = tuple[str, str]
"""Run, location."""


def snapshots(records: Mapping[str, Record], sizes: Mapping[str, int], hidden: Iterable[Location] = ()) -> tuple[Snapshot, ...]:
    """Every location that has a manifest that counts, in the order that people read: by run, then by step.

    ``sizes``: store name → bytes of everything listed.  ``hidden``: locations of which some record cannot be read; nothing is said of them.
    """
    by_location = _by_location(records)
    checkpoints: dict[Location, dict[str, Record]] = {}
    for name, record in records.items():
        checkpoints.setdefault((record.run, record.checkpoint), {})[name] = record
    known: dict[Location, tuple[Known, ...]] = {key: known_of(its) for key, its in checkpoints.items()}
    names = sorted(sizes)
    found = []
    for (run, location), its in by_location.items():
        checkpoint = next((m.checkpoint for m in its.manifests.values()), None)
        if checkpoint is None or (run, location) in hidden:
            continue
        under = {name: sizes[name] for prefix in _prefixes(run, location) for name in _starting(names, prefix)}
        seen = snapshot(location, its, known[run, checkpoint], under)
        found += [seen] if seen else []
    return tuple(sorted(found, key=lambda s: reading_order(s.run, s.location)))


def reading_order(run: str, location: str) -> tuple[object, ...]:
    """Sorts ``checkpoint-9`` before ``checkpoint-10``, and ``checkpoint-9~…`` right after it."""
    name, _, save = location.partition("~")
    pieces = _PIECES.findall(name)
    return run, [(piece[0] in _DIGITS, int(piece) if piece[0] in _DIGITS else 0, piece) for piece in pieces], save


def _by_location(records: Mapping[str, Record]) -> dict[Location, Records]:
    grouped: dict[Location, dict[str, Record]] = {}
    for name, record in sorted(records.items()):
        grouped.setdefault((record.run, record.location), {})[name] = record
    return {
        location: Records(_of(Manifest, its), _of(ModelRecord, its), _of(Report, its), _of(Tombstone, its), _of(Keep, its))
        for location, its in grouped.items()
    }


def _of(kind: type[R], records: Mapping[str, Record]) -> dict[str, R]:
    return {name: record for name, record in records.items() if isinstance(record, kind)}


def _prefixes(run: str, location: str) -> tuple[str, ...]:
    return f"{run}/{location}/", f"{records_prefix(run, location)}files/", consolidated_prefix(run, location)


def _starting(names: Sequence[str], prefix: str) -> Iterator[str]:
    for i in range(bisect_left(names, prefix), len(names)):
        if not names[i].startswith(prefix):
            return
        yield names[i]


def record_names(names: Iterable[str]) -> dict[str, RecordName]:
    """Those that are records' names, taken apart."""
    parsed = ((name, parse_record_name(name)) for name in names)
    return {name: p for name, p in parsed if p is not None}
