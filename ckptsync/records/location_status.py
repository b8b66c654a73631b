"""What may be said of each location of a store: conditions with their evidence, and one status.

A listing is no instant: a file may be written, or deleted, while it is being made.  So a file that
is named and not listed makes a condition not hold, and the evidence says so, but only a report says
DAMAGED.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar, get_args

from ckptsync.layouts.registry import is_known
from ckptsync.records.event_record import EventRecord
from ckptsync.records.io import Record
from ckptsync.records.manifest import Manifest
from ckptsync.records.manifest_groups import (
    Located,
    Sibling,
    StoredManifest,
    collect_manifests,
    explain_conflict,
    find_siblings,
    live_manifests,
    locate_files,
    merge_demands,
)
from ckptsync.records.model_record import ModelRecord
from ckptsync.records.report import LEVELS, Level, Report, Verdict, VerifyFinding
from ckptsync.records.save_decisions import Keep, Scope, Tombstone, fate
from ckptsync.records.store_paths import (
    RecordName,
    consolidated_prefix,
    own_prefixes,
    parse_record_name,
)
from ckptsync.records.weights_record import WeightsRecord
from ckptsync.tensors import Demands

R = TypeVar("R", Manifest, ModelRecord, Report, Tombstone, Keep, WeightsRecord, EventRecord)
Location = tuple[str, str]
"""Run, location."""
_PIECES = re.compile(r"[0-9]+|[^0-9]+")
_DIGITS = "0123456789"  # `str.isdigit` knows more, of which `int` reads none
Status = Literal[
    "WAITING",
    "REFUSED",
    "UPLOADING",
    "INCOMPLETE",
    "COMPLETE",
    "CONSOLIDATED",
    "VERIFIED",
    "DAMAGED",
    "CONFLICT",
    "RETIRED",
]
STATUSES: tuple[Status, ...] = get_args(Status)
DIGEST = LEVELS.index("digest")


@dataclass(frozen=True, slots=True)
class LocationRecords:
    """All records about one location, by name."""

    manifests: Mapping[str, Manifest] = field(default_factory=dict)
    model_records: Mapping[str, ModelRecord] = field(default_factory=dict)
    reports: Mapping[str, Report] = field(default_factory=dict)
    tombstones: Mapping[str, Tombstone] = field(default_factory=dict)
    keeps: Mapping[str, Keep] = field(default_factory=dict)
    weights: Mapping[str, WeightsRecord] = field(default_factory=dict)
    events: Mapping[str, EventRecord] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Condition:
    """``evidence``: a line for each thing that is missing, or that is worth knowing."""

    holds: bool
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Proof:
    """What the verifier found last.

    ``damage``: names of the reports that say DAMAGED and have not been answered.

    ``holds``: a report at level digest or above found no damage in these very manifests and this
    very model record. ``report`` is the name of the one that ``verdict``, ``level`` and ``when``
    are of; empty if there is none.
    """

    holds: bool = False
    damage: tuple[str, ...] = ()
    report: str = ""
    verdict: Verdict | None = None
    level: Level | None = None
    when: float = 0.0


@dataclass(frozen=True, slots=True)
class Conditions:
    """``conflict`` and ``retired`` give the reason, and are empty where they do not apply.

    ``shards``: why the trainer's own files were deleted while the consolidated model stays: none of
    them is expected in the store.
    """

    model: Condition
    resume: Condition
    consolidated: Condition
    proof: Proof
    conflict: str = ""
    retired: str = ""
    shards: str = ""


@dataclass(frozen=True, slots=True)
class LocationState:
    """One location as the names and records in the store describe it.

    ``manifests``: those that count.  ``files``: path → where its contents lie (see `locate`); empty
    where two saves conflict.  ``sizes``: store name → bytes of all that is listed of this location.
    ``model_record``: the one that counts, and its name, also where its files are missing.
    ``siblings``: other locations with parts of this save, or of what may be this save, with the
    paths of their files.
    """

    run: str
    checkpoint: str
    location: str
    manifests: tuple[StoredManifest, ...]
    files: Mapping[str, tuple[Located, ...]]
    sizes: Mapping[str, int]
    demands: Demands
    records: LocationRecords
    conditions: Conditions
    model_record_name: str = ""
    model_record: ModelRecord | None = None
    siblings: Mapping[Sibling, frozenset[str]] = field(default_factory=dict)

    @property
    def is_unknown(self) -> bool:
        """Return whether no file is of a layout that is merged: nothing can be awaited."""
        return not self.demands.model and self.conditions.model.evidence == (_NO_LAYOUT,)

    @property
    def status(self) -> Status:
        """Return its status."""
        return status(self.conditions)

    @property
    def evidence(self) -> tuple[str, ...]:
        """Return why its status is no better."""
        f = self.conditions
        by_status = {
            "INCOMPLETE": f.model.evidence,
            "COMPLETE": f.consolidated.evidence,
            "CONFLICT": (f.conflict,),
            "RETIRED": (f.retired,),
        }
        return by_status.get(
            self.status, f.proof.damage if self.status == "DAMAGED" else f.consolidated.evidence
        )

    def present(self) -> dict[str, tuple[str, int]]:
        """Return path → (store name, size), as in `StoreFiles`, of files in their full size."""
        owners = {path: where[0] for path, where in self.files.items()}
        return {
            path: (at.name, at.entry.size)
            for path, at in owners.items()
            if self.sizes.get(at.name) == at.entry.size
        }

    @property
    def unnamed(self) -> tuple[str, ...]:
        """Return the store names of files in its directories that no record names.

        None where nothing says which files are its own: in conflict, or once it is given up.
        """
        if self.conditions.conflict or self.conditions.retired:
            return ()
        named = self.named_files().keys() | self.named_files("shards").keys()
        return tuple(sorted(self.sizes.keys() - named))

    def named_files(self, scope: Scope = "location") -> dict[str, int]:
        """Return store name → bytes of every file that its records name.

        With scope ``shards``: the trainer's own files, also where they were deleted.
        """
        shards = () if scope == "location" and self.conditions.shards else self.files.values()
        found = {at.name: at.entry.size for where in shards for at in where}
        if scope == "location" and self.model_record:
            found |= {
                consolidated_prefix(self.run, self.location) + f.path: f.size
                for f in self.model_record.files
            }
        return found


def status(conditions: Conditions) -> Status:
    """Return the status: the worst that is known comes first, then the best that is proven."""
    if conditions.retired:
        return "RETIRED"
    if conditions.conflict:
        return "CONFLICT"
    if conditions.proof.damage:
        return "DAMAGED"
    if not conditions.model.holds:
        return "INCOMPLETE"
    if not conditions.consolidated.holds:
        return "COMPLETE"
    return "VERIFIED" if conditions.proof.holds else "CONSOLIDATED"


def list_locations(
    records: Mapping[str, Record], sizes: Mapping[str, int], hidden: Iterable[Location] = ()
) -> tuple[LocationState, ...]:
    """Return every location that has a manifest that counts, by run, then by step.

    ``sizes``: store name → bytes of everything listed.  ``hidden``: locations with records that
    cannot be read; they are left out.
    """
    checkpoints: dict[Location, dict[str, Record]] = {}
    by_location: dict[Location, dict[str, Record]] = {}
    for name, record in sorted(records.items()):
        checkpoints.setdefault((record.run, record.checkpoint), {})[name] = record
        by_location.setdefault((record.run, record.location), {})[name] = record
    known = {key: collect_manifests(its) for key, its in checkpoints.items()}
    names = sorted(sizes)
    found = []
    for (run, location), its in by_location.items():
        checkpoint = next((m.checkpoint for m in its.values() if isinstance(m, Manifest)), None)
        if checkpoint is None or (run, location) in hidden:
            continue
        own, of_records, model = own_prefixes(run, location)
        prefixes = (own, f"{of_records}files/", model)
        listed = {}
        for prefix in prefixes:
            for i in range(bisect_left(names, prefix), len(names)):
                if not names[i].startswith(prefix):
                    break
                listed[names[i]] = sizes[names[i]]
        seen = describe_location(location, group_records(its), known[run, checkpoint], listed)
        found += [seen] if seen else []
    return tuple(sorted(found, key=lambda s: reading_order(s.run, s.location)))


def group_records(records: Mapping[str, Record]) -> LocationRecords:
    """Return the records of a location by their kinds."""
    return LocationRecords(
        _of(Manifest, records),
        _of(ModelRecord, records),
        _of(Report, records),
        _of(Tombstone, records),
        _of(Keep, records),
        _of(WeightsRecord, records),
        _of(EventRecord, records),
    )


def _of(kind: type[R], records: Mapping[str, Record]) -> dict[str, R]:
    return {name: record for name, record in records.items() if isinstance(record, kind)}


def reading_order(run: str, location: str) -> tuple[object, ...]:
    """Return a key that sorts locations as people read them.

    ``checkpoint-9`` comes before ``checkpoint-10``, and ``checkpoint-9~…`` right after
    ``checkpoint-9``.
    """
    name, _, save = location.partition("~")
    pieces = _PIECES.findall(name)
    return (
        run,
        [
            (piece[0] in _DIGITS, int(piece) if piece[0] in _DIGITS else 0, piece)
            for piece in pieces
        ],
        save,
    )


def record_names(names: Iterable[str]) -> dict[str, RecordName]:
    """Return those that are records' names, taken apart."""
    parsed = ((name, parse_record_name(name)) for name in names)
    return {name: p for name, p in parsed if p is not None}


def describe_location(
    location: str,
    records: LocationRecords,
    known: Iterable[StoredManifest],
    sizes: Mapping[str, int],
) -> LocationState | None:
    """Return what records and the names below a location say; None if its save has moved.

    ``known``: every manifest of the checkpoint's name, in whatever location, since they tell which
    of them are one save.
    """
    counting = live_manifests(known)
    here = tuple(k for k in counting if k.manifest.location == location)
    if not here:
        return None
    first = here[0].manifest
    manifests = [k.manifest for k in here]
    conflict = explain_conflict(location, counting)
    files = {} if conflict else locate_files(manifests)
    demands = merge_demands(manifests)
    name, model_record = newest_model_record(records.model_records, here)
    names = {k.name for k in here}
    end = fate(records.tombstones, names)
    beside = {} if conflict or end.retired else find_siblings(location, counting)
    unknown = _UNKNOWN if demands.model or conflict or is_known(files) else _NO_LAYOUT
    if end.shards:  # what is left is proven by its model record alone
        model = Condition(holds=True)
        resume = Condition(holds=False, evidence=(f"its shards were deleted: {end.shards}",))
    else:
        lacking = (
            _missing(demands.model, files, sizes, beside)
            if demands.model
            else [*demands.remarks] or [unknown.format("a whole model is")]
        )
        model = Condition(not lacking, tuple(lacking))
        lacking = [*lacking, *_missing(demands.resume, files, sizes, beside)]
        if not demands.resume:
            lacking = [unknown.format("a resumed training needs")]
        resume = Condition(not lacking, tuple(lacking))
    conditions = Conditions(
        model=model,
        resume=resume,
        consolidated=_consolidated(records.model_records, name, model_record, sizes),
        proof=proof(records.reports, set() if end.shards else names, name),
        conflict=conflict,
        retired=end.retired,
        shards=end.shards,
    )
    return LocationState(
        run=first.run,
        checkpoint=first.checkpoint,
        location=location,
        manifests=here,
        files=files,
        sizes=sizes,
        demands=demands,
        records=records,
        conditions=conditions,
        model_record_name=name,
        model_record=model_record,
        siblings=beside,
    )


_UNKNOWN = "no file here says what {}"
_NO_LAYOUT = "of no layout that ckptsync merges (`ckptsync help formats`): stored as it is"


def newest_model_record(
    model_records: Mapping[str, ModelRecord], manifests: Iterable[StoredManifest]
) -> tuple[str, ModelRecord | None]:
    """Return the one with the highest number, then the first by name, made of these manifests."""
    names = {k.name for k in manifests}
    valid = {
        name: s
        for name, s in model_records.items()
        if s.manifests and names.issuperset(s.manifests)
    }
    name = min(valid, key=lambda name: (-valid[name].n, name), default="")
    return name, valid.get(name)


def proof(reports: Mapping[str, Report], manifests: set[str], model_record: str) -> Proof:
    """Return what reports prove.

    Only a later number at its level or above answers damage: less reading proves less.
    """
    if not reports:
        return Proof()
    ordered = sorted(reports.items(), key=lambda r: (r[1].n, _BADNESS[r[1].verdict], r[0]))
    damage = tuple(
        name
        for name, report in ordered
        if report.verdict == "damaged"
        and not any(r.verdict != "damaged" and _reads_as_much(r, report) for r in reports.values())
    )
    proven = [
        (name, r)
        for name, r in ordered
        if r.verdict == "ok"
        and LEVELS.index(r.level) >= DIGEST
        and manifests.issubset(r.manifests)
        and r.model_record == model_record
    ]
    name, last = (
        (damage[-1], reports[damage[-1]]) if damage else proven[-1] if proven else ordered[-1]
    )
    return Proof(bool(proven) and not damage, damage, name, last.verdict, last.level, last.when)


_BADNESS: dict[Verdict, int] = {"ok": 0, "incomplete": 1, "damaged": 2}


def _reads_as_much(later: Report, report: Report) -> bool:
    """Return whether a report is later than another, and has looked as closely."""
    return later.n > report.n and LEVELS.index(later.level) >= LEVELS.index(report.level)


def unanswered_findings(seen: LocationState) -> tuple[VerifyFinding, ...]:
    """Return the findings of the reports that no later one answers, the newest last.

    A later report that still finds damage answers none before it. But what it looked for as
    closely, and no longer finds, is well by now.
    """
    reports = [seen.records.reports[name] for name in seen.conditions.proof.damage]
    return tuple(
        f
        for report in reports
        for f in report.findings
        if not any(
            _reads_as_much(later, report) and f.name not in {g.name for g in later.findings}
            for later in reports
        )
    )


def _missing(
    demands: Mapping[str, int | None],
    files: Mapping[str, tuple[Located, ...]],
    sizes: Mapping[str, int],
    beside: Mapping[Sibling, frozenset[str]],
) -> list[str]:
    """Return a line for each demanded file that is missing (and who has it) or of another size."""
    found = []
    for path, expected in sorted(demands.items()):
        if path not in files:
            locations = [
                f"{', '.join(s.nodes)} uploaded it to {s.location}"
                for s, paths in beside.items()
                if path in paths
            ]
            found.append(f"{path}: {'; '.join(locations) or 'no node has uploaded it'}")
            continue
        at = files[path][0]
        if expected is not None and at.entry.size != expected:
            found.append(f"{path}: {at.entry.size} bytes, expected {expected}")
        elif sizes.get(at.name) != at.entry.size:
            found.append(
                f"{path}: {at.nodes[0]} uploaded {at.entry.size} bytes,"
                f" {_there(sizes.get(at.name))}"
            )
    return found


def _there(size: int | None) -> str:
    return "but it is not in the store" if size is None else f"but the store has {size}"


def _consolidated(
    model_records: Mapping[str, ModelRecord],
    name: str,
    model_record: ModelRecord | None,
    sizes: Mapping[str, int],
) -> Condition:
    if model_record is None:
        return Condition(holds=False, evidence=("no head has merged it yet",))
    prefix = consolidated_prefix(model_record.run, model_record.location)
    lacking = tuple(
        f"consolidated {f.path}: {f.size} bytes were written, {_there(sizes.get(prefix + f.path))}"
        for f in model_record.files
        if sizes.get(prefix + f.path) != f.size
    )
    rivals = sorted(
        other for other, s in model_records.items() if s.n == model_record.n and other != name
    )
    differing = tuple(
        f"{other}: another model record of the same number, by a head with other options; {name}"
        " counts"
        for other in rivals
    )
    return Condition(not lacking, lacking + differing)
