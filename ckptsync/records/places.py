"""From all records and a listing to one snapshot a place."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from ckptsync.records.coding import Record
from ckptsync.records.keep import Keep
from ckptsync.records.manifest import Manifest
from ckptsync.records.names import RecordName, consolidated_prefix, parse_record_name, records_prefix
from ckptsync.records.report import Report
from ckptsync.records.saves import Known, known_of
from ckptsync.records.seal import Seal
from ckptsync.records.state import Records, Snapshot, snapshot
from ckptsync.records.tombstone import Tombstone

R = TypeVar("R", Manifest, Seal, Report, Tombstone, Keep)
_PIECES = re.compile(r"[0-9]+|[^0-9]+")
_DIGITS = "0123456789"  # `str.isdigit` knows more, of which `int` reads none
Place = tuple[str, str]
"""Run, place."""


def snapshots(records: Mapping[str, Record], sizes: Mapping[str, int], hidden: Iterable[Place] = ()) -> tuple[Snapshot, ...]:
    """Every place that has a manifest that counts, in the order that people read: by run, then by step.

    ``sizes``: store name → bytes of everything listed.  ``hidden``: places of which some record cannot be read; nothing is said of them.
    """
    by_place = _by_place(records)
    checkpoints: dict[Place, dict[str, Record]] = {}
    for name, record in records.items():
        checkpoints.setdefault((record.run, record.checkpoint), {})[name] = record
    known: dict[Place, tuple[Known, ...]] = {key: known_of(its) for key, its in checkpoints.items()}
    names = sorted(sizes)
    found = []
    for (run, place), its in by_place.items():
        checkpoint = next((m.checkpoint for m in its.manifests.values()), None)
        if checkpoint is None or (run, place) in hidden:
            continue
        under = {name: sizes[name] for prefix in _prefixes(run, place) for name in _starting(names, prefix)}
        seen = snapshot(place, its, known[run, checkpoint], under)
        found += [seen] if seen else []
    return tuple(sorted(found, key=lambda s: reading_order(s.run, s.place)))


def reading_order(run: str, place: str) -> tuple[object, ...]:
    """Sorts ``checkpoint-9`` before ``checkpoint-10``, and ``checkpoint-9~…`` right after it."""
    name, _, save = place.partition("~")
    pieces = _PIECES.findall(name)
    return run, [(piece[0] in _DIGITS, int(piece) if piece[0] in _DIGITS else 0, piece) for piece in pieces], save


def _by_place(records: Mapping[str, Record]) -> dict[Place, Records]:
    grouped: dict[Place, dict[str, Record]] = {}
    for name, record in sorted(records.items()):
        grouped.setdefault((record.run, record.place), {})[name] = record
    return {
        place: Records(_of(Manifest, its), _of(Seal, its), _of(Report, its), _of(Tombstone, its), _of(Keep, its))
        for place, its in grouped.items()
    }


def _of(kind: type[R], records: Mapping[str, Record]) -> dict[str, R]:
    return {name: record for name, record in records.items() if isinstance(record, kind)}


def _prefixes(run: str, place: str) -> tuple[str, ...]:
    return f"{run}/{place}/", f"{records_prefix(run, place)}files/", consolidated_prefix(run, place)


def _starting(names: Sequence[str], prefix: str) -> Iterator[str]:
    for i in range(bisect_left(names, prefix), len(names)):
        if not names[i].startswith(prefix):
            return
        yield names[i]


def record_names(names: Iterable[str]) -> dict[str, RecordName]:
    """Those that are records' names, taken apart."""
    parsed = ((name, parse_record_name(name)) for name in names)
    return {name: p for name, p in parsed if p is not None}
