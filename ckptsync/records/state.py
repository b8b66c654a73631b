"""What may be said of one location: conditions, each with its evidence, and the one word.

A listing is no instant: a file may be written, or let go, while it is being made.  So a file that is named and not listed makes a
condition not hold, and the evidence says so, but only a report says DAMAGED.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ckptsync.model import Demands
from ckptsync.records.keep import Keep
from ckptsync.records.manifest import Manifest
from ckptsync.records.model_record import ModelRecord
from ckptsync.records.names import consolidated_prefix
from ckptsync.records.report import LEVELS, Finding, Level, Report, Verdict
from ckptsync.records.saves import Known, Located, Sibling, demanded, live, locate, save_of, siblings
from ckptsync.records.tombstone import Fate, Tombstone, fate

Status = Literal["ARRIVING", "COMPLETE", "CONSOLIDATED", "VERIFIED", "DAMAGED", "CONFLICT", "RETIRED"]
STATUSES: tuple[Status, ...] = ("ARRIVING", "COMPLETE", "CONSOLIDATED", "VERIFIED", "DAMAGED", "CONFLICT", "RETIRED")
DIGEST = LEVELS.index("digest")


@dataclass(frozen=True, slots=True)
class Records:
    """All records about one location, by name."""

    manifests: Mapping[str, Manifest] = field(default_factory=dict)
    model_records: Mapping[str, ModelRecord] = field(default_factory=dict)
    reports: Mapping[str, Report] = field(default_factory=dict)
    tombstones: Mapping[str, Tombstone] = field(default_factory=dict)
    keeps: Mapping[str, Keep] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Condition:
    """``evidence``: why it does not hold, a line for each thing that is missing; or what should be known although it does."""

    holds: bool
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Proof:
    """What the verifier found last.  ``damage``: names of the reports that say DAMAGED and have not been answered.

    ``holds``: a report at level digest or above found no damage in these very manifests and this very model record.
    ``report`` is the name of the one that ``verdict``, ``level`` and ``when`` are of; empty if there is none.
    """

    holds: bool = False
    damage: tuple[str, ...] = ()
    report: str = ""
    verdict: Verdict | None = None
    level: Level | None = None
    when: float = 0.0


@dataclass(frozen=True, slots=True)
class Conditions:
    """``ambiguous`` and ``retired`` give the reason, and are empty where they do not apply.

    ``shards``: why the trainer's own files were let go while the consolidated model stays: nothing of them is expected in the store any more.
    """

    model: Condition
    resume: Condition
    consolidated: Condition
    proof: Proof
    ambiguous: str = ""
    retired: str = ""
    shards: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One location as the names and records in the store describe it.

    ``manifests``: those that count.  ``files``: path → where its contents lie (see `locate`); empty if ambiguous.  ``sizes``: store
    name → bytes of all that is listed of this location.  ``model_record``: the one that counts, and its name, also where its files are missing.
    ``siblings``: other locations with parts of this save, or of what may be this save, with the paths of their files.
    """

    run: str
    checkpoint: str
    location: str
    manifests: tuple[Known, ...]
    files: Mapping[str, tuple[Located, ...]]
    sizes: Mapping[str, int]
    demands: Demands
    records: Records
    conditions: Conditions
    model_record_name: str = ""
    model_record: ModelRecord | None = None
    siblings: Mapping[Sibling, frozenset[str]] = field(default_factory=dict)

    @property
    def status(self) -> Status:
        """The one word that people are shown."""
        return status(self.conditions)

    @property
    def evidence(self) -> tuple[str, ...]:
        """Why it is no better than its word says."""
        f = self.conditions
        by_status = {
            "ARRIVING": f.model.evidence,
            "COMPLETE": f.consolidated.evidence,
            "CONFLICT": (f.ambiguous,),
            "RETIRED": (f.retired,),
        }
        return by_status.get(self.status, f.proof.damage if self.status == "DAMAGED" else f.consolidated.evidence)

    def present(self) -> dict[str, tuple[str, int]]:
        """Path → (store name, size) of the files that are there as named: what `StoreFiles` takes."""
        owners = {path: where[0] for path, where in self.files.items()}
        return {path: (at.name, at.entry.size) for path, at in owners.items() if self.sizes.get(at.name) == at.entry.size}


def status(conditions: Conditions) -> Status:
    """The worst that is known comes first, then the best that is proven."""
    if conditions.retired:
        return "RETIRED"
    if conditions.ambiguous:
        return "CONFLICT"
    if conditions.proof.damage:
        return "DAMAGED"
    if not conditions.model.holds:
        return "ARRIVING"
    if not conditions.consolidated.holds:
        return "COMPLETE"
    return "VERIFIED" if conditions.proof.holds else "CONSOLIDATED"


def snapshot(location: str, records: Records, known: Iterable[Known], sizes: Mapping[str, int]) -> Snapshot | None:
    """What the records of ``location`` and the names under it say; ``None`` if none of its manifests counts any more (it has moved).

    ``known``: every manifest of the checkpoint's name, in whatever location, since they tell which of them are one save.
    """
    counting = live(known)
    here = tuple(k for k in counting if k.manifest.location == location)
    if not here:
        return None
    first = here[0].manifest
    manifests = [k.manifest for k in here]
    doubt = save_of(location, counting)
    files = {} if doubt else locate(manifests)
    demands = demanded(manifests)
    model_record_name, model_record = newest_model_record(records.model_records, here)
    names = {k.name for k in here}
    fate_ = fate(records.tombstones, names)
    beside = {} if doubt or fate_.retired else siblings(location, counting)
    model = Condition(holds=True) if fate_.shards else _model(demands, files, sizes, beside)
    conditions = Conditions(
        model=model,
        resume=_let_go(fate_) if fate_.shards else _resume(demands, files, sizes, model, beside),
        consolidated=_consolidated(records.model_records, model_record_name, model_record, sizes),
        proof=proof(records.reports, set() if fate_.shards else names, model_record_name),
        ambiguous=doubt,
        retired=fate_.retired,
        shards=fate_.shards,
    )
    return Snapshot(
        first.run,
        first.checkpoint,
        location,
        here,
        files,
        sizes,
        demands,
        records,
        conditions,
        model_record_name,
        model_record,
        beside,
    )


def newest_model_record(model_records: Mapping[str, ModelRecord], manifests: Iterable[Known]) -> tuple[str, ModelRecord | None]:
    """Of those made from manifests that still count, the highest number; of two with one number, the first by name."""
    names = {k.name for k in manifests}
    valid = {name: s for name, s in model_records.items() if s.manifests and names.issuperset(s.manifests)}
    name = min(valid, key=lambda name: (-valid[name].n, name), default="")
    return name, valid.get(name)


def proof(reports: Mapping[str, Report], manifests: set[str], model_record: str) -> Proof:
    """What the reports prove.  Damage is answered only by a later number at its level or above: less reading proves less."""
    if not reports:
        return Proof()
    ordered = sorted(reports.items(), key=lambda r: (r[1].n, _BADNESS[r[1].verdict], r[0]))
    damage = tuple(name for name, report in ordered if report.verdict == "damaged" and not _is_answered(report, reports))
    proven = [
        (name, r)
        for name, r in ordered
        if r.verdict == "ok"
        and LEVELS.index(r.level) >= DIGEST
        and manifests.issubset(r.manifests)
        and r.model_record == model_record
    ]
    name, last = (damage[-1], reports[damage[-1]]) if damage else proven[-1] if proven else ordered[-1]
    return Proof(bool(proven) and not damage, damage, name, last.verdict, last.level, last.when)


_BADNESS: dict[Verdict, int] = {"ok": 0, "arriving": 1, "damaged": 2}


def _is_answered(damaged: Report, reports: Mapping[str, Report]) -> bool:
    level = LEVELS.index(damaged.level)
    return any(r.n > damaged.n and r.verdict != "damaged" and LEVELS.index(r.level) >= level for r in reports.values())


def standing(seen: Snapshot) -> tuple[Finding, ...]:
    """Return the findings of the reports that nobody has answered, the newest last.

    A later report that still finds damage answers none before it. But what it looked for as closely, and no longer finds, is well by now.
    """
    reports = [seen.records.reports[name] for name in seen.conditions.proof.damage]
    return tuple(f for report in reports for f in report.findings if not any(_is_over(f, report, later) for later in reports))


def _is_over(finding: Finding, report: Report, later: Report) -> bool:
    is_as_close = later.n > report.n and LEVELS.index(later.level) >= LEVELS.index(report.level)
    return is_as_close and finding.name not in {f.name for f in later.findings}


def _model(
    demands: Demands, files: Mapping[str, tuple[Located, ...]], sizes: Mapping[str, int], beside: Mapping[Sibling, frozenset[str]]
) -> Condition:
    if not demands.model:
        return Condition(holds=False, evidence=("nothing here says what a whole model is",))
    lacking = tuple(_lacking(demands.model, files, sizes, beside))
    return Condition(not lacking, lacking)


def _resume(
    demands: Demands,
    files: Mapping[str, tuple[Located, ...]],
    sizes: Mapping[str, int],
    model: Condition,
    beside: Mapping[Sibling, frozenset[str]],
) -> Condition:
    if not demands.resume:
        return Condition(holds=False, evidence=("nothing here says what a resumed training needs",))
    lacking = (*model.evidence, *_lacking(demands.resume, files, sizes, beside))
    return Condition(model.holds and not lacking, lacking)


def _lacking(
    demands: Mapping[str, int | None],
    files: Mapping[str, tuple[Located, ...]],
    sizes: Mapping[str, int],
    beside: Mapping[Sibling, frozenset[str]],
) -> Iterator[str]:
    for path, wanted in sorted(demands.items()):
        if path not in files:
            locations = [
                f"{', '.join(s.nodes)} has sent one that lies in {s.location}" for s, paths in beside.items() if path in paths
            ]
            yield f"{path}: {'; '.join(locations) or 'no node has sent it'}"
            continue
        at = files[path][0]
        if wanted is not None and at.entry.size != wanted:
            yield f"{path}: {at.entry.size} bytes, {wanted} demanded"
        elif sizes.get(at.name) != at.entry.size:
            yield f"{path}: {at.nodes[0]} has sent {at.entry.size} bytes, {_there(sizes.get(at.name))}"


def _there(size: int | None) -> str:
    return "and it is not in the store" if size is None else f"{size} are in the store"


def _consolidated(
    model_records: Mapping[str, ModelRecord], name: str, model_record: ModelRecord | None, sizes: Mapping[str, int]
) -> Condition:
    if model_record is None:
        return Condition(holds=False, evidence=("it has not been consolidated",))
    prefix = consolidated_prefix(model_record.run, model_record.location)
    lacking = tuple(
        f"consolidated {f.path}: {f.size} bytes were written, {_there(sizes.get(prefix + f.path))}"
        for f in model_record.files
        if sizes.get(prefix + f.path) != f.size
    )
    rivals = sorted(other for other, s in model_records.items() if s.n == model_record.n and other != name)
    differing = tuple(
        f"{other}: another model record of the same number, by a head with other options; {name} counts" for other in rivals
    )
    return Condition(not lacking, lacking + differing)


def _let_go(fate_: Fate) -> Condition:
    """What is left is proven by its model record alone."""
    return Condition(holds=False, evidence=(f"its shards were let go: {fate_.shards}",))
