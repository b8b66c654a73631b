"""What may be said of each location of a store: conditions with their evidence, and one status.

There is no database: a status is a pure function of the records and of what the store lists. Each
`Condition` (a whole model, resuming, a consolidated model, a proof) is judged by itself; `status`
picks the worst that is known, then the best that is proven. A listing shows no single moment: a
file that is named and not listed only makes a condition not hold. DAMAGED is said by reports alone.
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
    """All records about one location, by kind, then by name."""

    manifests: Mapping[str, Manifest] = field(default_factory=dict)
    model_records: Mapping[str, ModelRecord] = field(default_factory=dict)
    reports: Mapping[str, Report] = field(default_factory=dict)
    tombstones: Mapping[str, Tombstone] = field(default_factory=dict)
    keeps: Mapping[str, Keep] = field(default_factory=dict)
    weights: Mapping[str, WeightsRecord] = field(default_factory=dict)
    events: Mapping[str, EventRecord] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Condition:
    """Whether something holds of a location; ``evidence``: a line for each thing that is missing.

    A condition that holds may have evidence that is worth knowing.
    """

    holds: bool
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Proof:
    """What the reports about a location prove.

    ``damage``: names of the DAMAGED reports that no later report answers. ``holds``: a report at
    level digest or above found no damage in these very manifests and this very model record.
    ``report``: the name of the report that ``verdict``, ``level`` and ``when`` are of: the last
    unanswered DAMAGED one, else the last proof, else the newest; empty if there is none.
    """

    holds: bool = False
    damage: tuple[str, ...] = ()
    report: str = ""
    verdict: Verdict | None = None
    level: Level | None = None
    when: float = 0.0


@dataclass(frozen=True, slots=True)
class Conditions:
    """All conditions of a location.

    ``conflict`` and ``retired`` are reasons, empty if they do not apply. ``shards``: why the
    trainer's own files were deleted while the consolidated model stays; then none of them is
    expected in the store.
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

    ``manifests``: those that count. ``files``: path → its stored copies (`locate_files`); empty if
    two saves conflict. ``sizes``: store name → bytes of all that is listed of this location.
    ``model_record``: the one that counts, with its name, also if its files are missing.
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
        """Return whether no file is of a layout that is merged: then no node has to send more."""
        return not self.demands.model and self.conditions.model.evidence == (_NO_LAYOUT,)

    @property
    def status(self) -> Status:
        """Return the location's status, as `status` computes it from the conditions."""
        return status(self.conditions)

    @property
    def evidence(self) -> tuple[str, ...]:
        """Return why the location's status is no better; () if no reason is known.

        Of a DAMAGED one they are the names of unanswered reports.
        """
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
        """Return path → (store name, size) of files whose first copy is listed in its full size."""
        owners = {path: copies[0] for path, copies in self.files.items()}
        return {
            path: (copy.name, copy.entry.size)
            for path, copy in owners.items()
            if self.sizes.get(copy.name) == copy.entry.size
        }

    @property
    def unnamed(self) -> tuple[str, ...]:
        """Return the listed names in its directories that no record names, sorted.

        Return () if it is in conflict or retired: then nothing says which files are its own.
        """
        if self.conditions.conflict or self.conditions.retired:
            return ()
        named_files = self.named_files().keys() | self.named_files("shards").keys()
        return tuple(sorted(self.sizes.keys() - named_files))

    def named_files(self, scope: Scope = "location") -> dict[str, int]:
        """Return store name → bytes of every file that its records name.

        With scope `shards`: of the trainer's own files alone, also if they were deleted. With scope
        `location`: of those that are not, and of the consolidated model.
        """
        shards = () if scope == "location" and self.conditions.shards else self.files.values()
        sizes = {copy.name: copy.entry.size for copies in shards for copy in copies}
        if scope == "location" and self.model_record:
            sizes |= {
                consolidated_prefix(self.run, self.location) + f.path: f.size
                for f in self.model_record.files
            }
        return sizes


def status(conditions: Conditions) -> Status:
    """Return the status of a location: the worst that is known, else the best that is proven.

    Never UPLOADING, WAITING or REFUSED, which others set.
    """
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
    """Return every location that has a manifest that counts, by run, then by `reading_order`.

    ``records``: of whole checkpoints, since manifests of one name decide together. ``sizes``: store
    name → bytes of everything listed. ``hidden``: locations to leave out, since some of their
    records cannot be read.
    """
    checkpoints: dict[Location, dict[str, Record]] = {}
    by_location: dict[Location, dict[str, Record]] = {}
    for name, record in sorted(records.items()):
        checkpoints.setdefault((record.run, record.checkpoint), {})[name] = record
        by_location.setdefault((record.run, record.location), {})[name] = record
    by_checkpoint = {
        key: collect_manifests(own_records) for key, own_records in checkpoints.items()
    }
    names = sorted(sizes)
    states = []
    for (run, location), own_records in by_location.items():
        checkpoint = next(
            (m.checkpoint for m in own_records.values() if isinstance(m, Manifest)), None
        )
        if checkpoint is None or (run, location) in hidden:
            continue
        own, records_prefix, model = own_prefixes(run, location)
        prefixes = (own, f"{records_prefix}files/", model)
        listed = {}
        for prefix in prefixes:
            for i in range(bisect_left(names, prefix), len(names)):
                if not names[i].startswith(prefix):
                    break
                listed[names[i]] = sizes[names[i]]
        state = describe_location(
            location, group_records(own_records), by_checkpoint[run, checkpoint], listed
        )
        states += [state] if state else []
    return tuple(sorted(states, key=lambda s: reading_order(s.run, s.location)))


def group_records(records: Mapping[str, Record]) -> LocationRecords:
    """Return the records of a location by their kinds; joins are left out."""
    return LocationRecords(
        _of_type(Manifest, records),
        _of_type(ModelRecord, records),
        _of_type(Report, records),
        _of_type(Tombstone, records),
        _of_type(Keep, records),
        _of_type(WeightsRecord, records),
        _of_type(EventRecord, records),
    )


def _of_type(kind: type[R], records: Mapping[str, Record]) -> dict[str, R]:
    """Return the records of one kind, by name."""
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
    """Return the parsed names of those ``names`` that are records', by name."""
    parsed = ((name, parse_record_name(name)) for name in names)
    return {name: p for name, p in parsed if p is not None}


def describe_location(
    location: str,
    records: LocationRecords,
    stored_manifests: Iterable[StoredManifest],
    sizes: Mapping[str, int],
) -> LocationState | None:
    """Return a location as its records and listed files describe it; None if no manifest counts.

    ``stored_manifests``: every manifest of the checkpoint's name, in whatever location, since
    together they tell which are one save. A location in conflict has no ``files``. If a tombstone
    in force is of its shards, its model counts as whole, and no training can resume.
    """
    live = live_manifests(stored_manifests)
    manifests_here = tuple(k for k in live if k.manifest.location == location)
    if not manifests_here:
        return None
    first = manifests_here[0].manifest
    manifests = [k.manifest for k in manifests_here]
    conflict = explain_conflict(location, live)
    files = {} if conflict else locate_files(manifests)
    demands = merge_demands(manifests)
    name, model_record = newest_model_record(records.model_records, manifests_here)
    names = {k.name for k in manifests_here}
    given_up = fate(records.tombstones, names)
    siblings = {} if conflict or given_up.retired else find_siblings(location, live)
    if given_up.shards:  # what is left is proven by its model record alone
        model = Condition(holds=True)
        resume = Condition(holds=False, evidence=(f"its shards were deleted: {given_up.shards}",))
    else:
        no_demands = _UNKNOWN if demands.model or conflict or is_known(files) else _NO_LAYOUT
        model, resume = _judge_shards(demands, files, sizes, siblings, no_demands)
    conditions = Conditions(
        model=model,
        resume=resume,
        consolidated=_judge_consolidated(records.model_records, name, model_record, sizes),
        proof=proof(records.reports, set() if given_up.shards else names, name),
        conflict=conflict,
        retired=given_up.retired,
        shards=given_up.shards,
    )
    return LocationState(
        run=first.run,
        checkpoint=first.checkpoint,
        location=location,
        manifests=manifests_here,
        files=files,
        sizes=sizes,
        demands=demands,
        records=records,
        conditions=conditions,
        model_record_name=name,
        model_record=model_record,
        siblings=siblings,
    )


def _judge_shards(
    demands: Demands,
    files: Mapping[str, tuple[Located, ...]],
    sizes: Mapping[str, int],
    siblings: Mapping[Sibling, frozenset[str]],
    no_demands: str,
) -> tuple[Condition, Condition]:
    """Return whether all files are stored that a model needs, and all that resuming needs.

    Resuming needs the model's files too. A file that only a sibling has is missing. A condition
    without demands fails; its evidence is ``no_demands``, with the use in its braces, and of a
    model its remarks instead if there are any.
    """
    missing = (
        _explain_missing(demands.model, files, sizes, siblings)
        if demands.model
        else [*demands.remarks] or [no_demands.format("a whole model is")]
    )
    model = Condition(not missing, tuple(missing))
    missing = [*missing, *_explain_missing(demands.resume, files, sizes, siblings)]
    if not demands.resume:
        missing = [no_demands.format("a resumed training needs")]
    return model, Condition(not missing, tuple(dict.fromkeys(missing)))


_UNKNOWN = "no file here says what {}"
_NO_LAYOUT = "of no layout that ckptsync merges (`ckptsync help formats`): stored as it is"


def newest_model_record(
    model_records: Mapping[str, ModelRecord], manifests: Iterable[StoredManifest]
) -> tuple[str, ModelRecord | None]:
    """Return the model record that counts, with its name; ("", None) if none does.

    Of those that were made of these manifests, or of some of them, the highest number counts; on a
    tie the first by name.
    """
    names = {k.name for k in manifests}
    current_records = {
        name: record
        for name, record in model_records.items()
        if record.manifests and names.issuperset(record.manifests)
    }
    name = min(current_records, key=lambda name: (-current_records[name].n, name), default="")
    return name, current_records.get(name)


def proof(reports: Mapping[str, Report], manifests: set[str], model_record: str) -> Proof:
    """Return what reports prove about these manifests and this model record.

    A report that is ok counts at level digest or above, if it names all ``manifests`` and this
    ``model_record``. Only a report with a later number, at the same level or above, that is not
    DAMAGED answers a DAMAGED one; other manifests do not matter for that.
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
    name, newest = (
        (damage[-1], reports[damage[-1]]) if damage else proven[-1] if proven else ordered[-1]
    )
    return Proof(
        bool(proven) and not damage, damage, name, newest.verdict, newest.level, newest.when
    )


_BADNESS: dict[Verdict, int] = {"ok": 0, "incomplete": 1, "damaged": 2}


def _reads_as_much(later: Report, report: Report) -> bool:
    """Return whether ``later`` has a higher number than ``report``, and no lower level."""
    return later.n > report.n and LEVELS.index(later.level) >= LEVELS.index(report.level)


def unanswered_findings(state: LocationState) -> tuple[VerifyFinding, ...]:
    """Return the findings of unanswered reports that no later one answers, the newest last.

    A later DAMAGED report answers those findings of an earlier one, at its level or below, whose
    files it does not name.
    """
    reports = [state.records.reports[name] for name in state.conditions.proof.damage]
    return tuple(
        f
        for report in reports
        for f in report.findings
        if not any(
            _reads_as_much(later, report) and f.name not in {g.name for g in later.findings}
            for later in reports
        )
    )


def _explain_missing(
    demands: Mapping[str, int | None],
    files: Mapping[str, tuple[Located, ...]],
    sizes: Mapping[str, int],
    siblings: Mapping[Sibling, frozenset[str]],
) -> list[str]:
    """Return a line for each demanded file that is missing, or has another size, sorted by path.

    ``siblings``: other locations, which may have the file; the line names them.
    """
    lines = []
    for path, expected in sorted(demands.items()):
        if path not in files:
            locations = [
                f"{', '.join(s.nodes)} uploaded it to {s.location}"
                for s, paths in siblings.items()
                if path in paths
            ]
            lines.append(f"{path}: {'; '.join(locations) or 'no node has uploaded it'}")
            continue
        copy = files[path][0]
        if expected is not None and copy.entry.size != expected:
            lines.append(f"{path}: {copy.entry.size} bytes, expected {expected}")
        elif sizes.get(copy.name) != copy.entry.size:
            lines.append(
                f"{path}: {copy.nodes[0]} uploaded {copy.entry.size} bytes,"
                f" {_stored_size_text(sizes.get(copy.name))}"
            )
    return lines


def _stored_size_text(size: int | None) -> str:
    """Return the end of a sentence that says which size was expected of a file."""
    return "but it is not in the store" if size is None else f"but the store has {size}"


def _judge_consolidated(
    model_records: Mapping[str, ModelRecord],
    name: str,
    model_record: ModelRecord | None,
    sizes: Mapping[str, int],
) -> Condition:
    """Return whether the model record counts and all its files are listed with their sizes.

    Further model records of the same number are evidence that does not fail the condition. It fails
    without ``model_record``.
    """
    if model_record is None:
        return Condition(holds=False, evidence=("no head has merged it yet",))
    prefix = consolidated_prefix(model_record.run, model_record.location)
    missing = tuple(
        f"consolidated {f.path}: {f.size} bytes were written,"
        f" {_stored_size_text(sizes.get(prefix + f.path))}"
        for f in model_record.files
        if sizes.get(prefix + f.path) != f.size
    )
    rivals = sorted(
        rival
        for rival, record in model_records.items()
        if record.n == model_record.n and rival != name
    )
    differing = tuple(
        f"{rival}: another model record of the same number, by a head with other options; {name}"
        " counts"
        for rival in rivals
    )
    return Condition(not missing, missing + differing)
