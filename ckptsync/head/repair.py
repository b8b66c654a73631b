"""Plan what can be done about a location's damage, and by whom; do what can be done here.

Consolidated files are made again from shards that are well.  A shard is copied from another
location of the run that holds the same bytes, or uploaded by a node that named it and still has
them; a node that has them no more says so in its heartbeat.  Only its own node can write a damaged
manifest again.  The plan is a pure function.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ckptsync.catalogue.uncached import StoreState
from ckptsync.errors import Corrupt, Unsupported
from ckptsync.head.consolidate import HeadOptions, consolidate_location
from ckptsync.layouts import file_names
from ckptsync.records.io import Fault, append_record
from ckptsync.records.location_status import LocationState
from ckptsync.records.manifest_groups import Located
from ckptsync.records.report import DAMAGE, OF_BYTES, VerifyFinding
from ckptsync.records.save_decisions import Keep
from ckptsync.records.store_paths import (
    checked_own,
    checkpoint_of,
    consolidated_prefix,
    own_prefixes,
    parse_record_name,
)
from ckptsync.safe_names import CONSOLIDATED
from ckptsync.stores.contract import About, Store
from ckptsync.stores.stream import StoredCopy

How = Literal["rebuild", "copy", "delete", "ask", "away", "later", "ignore", "lost"]
"""Make it again, copy it in the store or delete it, here and now; ask a node that runs, or one that
does not; do it after something else; nothing to do; nobody has it."""
ORDER: tuple[How, ...] = ("lost", "away", "ask", "later", "copy", "rebuild", "delete", "ignore")
_WRONG_MEANING = (
    "it was wrong before the upload, and no node can have better; correct it in the checkpoint's"
    " directory and upload that under another run (`ckptsync push --run`), or use an earlier one"
)
_DELETED = {
    "keep": (
        "it is damaged: ckptsync writes a new record that keeps the location (`ckptsync keep"
        " --release` releases it), then deletes the damaged record"
    ),
    "tombstone": (
        "it is damaged: ckptsync writes a record that keeps the location (`ckptsync keep --release`"
        " releases it), then deletes the damaged tombstone"
    ),
    "event": "it is damaged: ckptsync deletes it; a head runs that event once more",
    "join": "it is damaged: ckptsync deletes it; `ckptsync join` joins the locations again",
    "weights": "it is damaged: ckptsync deletes it; only the statistics of the model are lost",
}


@dataclass(frozen=True, slots=True)
class NodeState:
    """A node by its heartbeat: whether it runs, and by record what it cannot give."""

    is_alive: bool
    lacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Repair:
    """What to do about one damaged file or record, which ``name`` names as reports do.

    ``words``: how, and who; ``consequences``: what is lost.

    ``source``: the name in the store that it is copied from.
    """

    name: str
    how: How
    words: str
    damage: str = ""
    consequences: tuple[str, ...] = ()
    source: str = ""


@dataclass(frozen=True, slots=True)
class RepairPlan:
    """What to do about all damage of one location."""

    run: str
    location: str
    parts: tuple[Repair, ...]

    @property
    def exit_code(self) -> int:
        """10: something cannot be repaired; 3: somebody must act first; 0: all will be well."""
        hows = {part.how for part in self.parts}
        return 10 if "lost" in hows else 3 if hows & {"ask", "away", "later"} else 0

    @property
    def doable(self) -> frozenset[str]:
        """Names of what can be repaired here."""
        return frozenset(
            part.name for part in self.parts if part.how in ("rebuild", "copy", "delete")
        )


def plan_repair(
    found: StoreState,
    run: str,
    location: str,
    findings: Sequence[VerifyFinding],
    nodes: Mapping[str, NodeState],
) -> RepairPlan:
    """Return what to do about a location.

    ``found``: all of its run; ``findings``: all known damage, reported or not.
    """
    seen = next((s for s in found.readable if (s.run, s.location) == (run, location)), None)
    parts = [_of_record(fault, seen, nodes) for fault in found.faults_of(run, location)]
    if seen is not None:
        # of each file the newest that says that its bytes differ, else the newest
        known = sorted((f for f in findings if f.kind in DAMAGE), key=lambda f: f.kind in OF_BYTES)
        damage = {f.name: f for f in known}.values()
        located = {
            at.name.removeprefix(f"{run}/"): (path, at)
            for path, where in seen.files.items()
            for at in where
        }
        stored = _stored_digests(found, seen)
        shards = [] if seen.conditions.shards else [f for f in damage if f.name in located]
        broken = [_of_shard(f, located[f.name], seen, stored, nodes) for f in shards]
        parts += broken
        model = f"{CONSOLIDATED}/{location}"
        if seen.model_record:
            bound = {f"{model}/{f.path}" for f in seen.model_record.files}
            parts += [_of_model(f, seen, broken) for f in damage if f.name in bound]
        else:
            parts += [_of_model_record(f.name, _damage(f), seen) for f in damage if f.name == model]
    parts.sort(key=lambda p: (ORDER.index(p.how), p.name))
    return RepairPlan(run, location, tuple(parts))


def repair(
    store: Store, plan: RepairPlan, seen: LocationState | None, options: HeadOptions
) -> tuple[str, ...]:
    """Do what can be done here; return the names of what was written or deleted.

    Raises the first error.
    """
    done: list[str] = []
    for part in plan.parts:
        name = f"{plan.run}/{part.name}"
        if part.how in ("delete", "copy"):
            checked_own(name, own_prefixes(plan.run, plan.location))
        if part.how == "delete":
            record = parse_record_name(name)
            # it may have protected the location
            if record is not None and record.kind in ("keep", "tombstone"):
                checkpoint = checkpoint_of(plan.location)
                reason = f"its {record.kind} was damaged: release it if it may be deleted"
                keep = Keep(plan.run, checkpoint, plan.location, 0, keeps=True, reason=reason)
                done.append(append_record(store, keep).removeprefix(f"{plan.run}/"))
            store.delete(name)
            done.append(part.name)
        elif part.how == "copy" and seen is not None:
            copies = (at for where in seen.files.values() for at in where)
            entry = next((at.entry for at in copies if at.name == name), None)
            if entry is None:  # it has moved since it was planned
                continue
            error = Corrupt(
                f"{part.source}: does not match the checksum of {part.name} either",
                hint="verify that checkpoint, too",
            )
            copy = StoredCopy(store, part.source, entry.size, entry.digest, error)
            store.write(name, copy, About(entry.size))
            done.append(part.name)
    if any(part.how == "rebuild" for part in plan.parts):
        prefix = consolidated_prefix(plan.run, plan.location).removeprefix(f"{plan.run}/")
        for made in consolidate_location(store, plan.run, plan.location, options):
            done += [prefix + name for name in made.files]
    return tuple(done)


def _is_as_recorded(finding: VerifyFinding, seen: LocationState) -> bool:
    """Return whether a report has compared all bytes and calls a file wrong only in its meaning."""
    if finding.kind in OF_BYTES:
        return False
    for report in (seen.records.reports[name] for name in seen.conditions.proof.damage):
        compared = {reading.level: reading.size for reading in report.readings}
        if finding in report.findings and compared.get("digest", -1) == compared.get("stat"):
            return True
    return False


def _damage(finding: VerifyFinding) -> str:
    return f"{finding.kind}: {finding.detail}"


def _stored_digests(found: StoreState, seen: LocationState) -> dict[str, str]:
    """Return digest → a name with these bytes.

    In the location itself if no report complains of the file, else in a VERIFIED location.
    """
    stored = {}
    for other in found.readable:
        is_sound = other.status == "VERIFIED" and not other.conditions.shards
        if other.run == seen.run and other.location != seen.location and is_sound:
            copies = (at for where in other.files.values() for at in where)
            stored.update({at.entry.digest: at.name for at in copies})
    reports = [seen.records.reports[name] for name in seen.conditions.proof.damage]
    bad = {f"{seen.run}/{f.name}" for report in reports for f in report.findings}
    own = (at for where in seen.files.values() for at in where)
    sound = (at for at in own if at.name not in bad and seen.sizes.get(at.name) == at.entry.size)
    return stored | {at.entry.digest: at.name for at in sound}


def _of_shard(
    finding: VerifyFinding,
    shard: tuple[str, Located],
    seen: LocationState,
    stored: Mapping[str, str],
    nodes: Mapping[str, NodeState],
) -> Repair:
    path, at = shard
    damage = _damage(finding)
    if _is_as_recorded(finding, seen):
        words = f"it has the bytes that {at.nodes[0]} uploaded: {_WRONG_MEANING}"
        return Repair(finding.name, "lost", words, damage)
    source = stored.get(at.entry.digest, "")
    if source and finding.kind in OF_BYTES:
        return Repair(finding.name, "copy", f"from {source}", damage, source=source)
    reports = seen.records.reports
    records = [
        n
        for n in seen.conditions.proof.damage
        if any(f.name == finding.name for f in reports[n].findings)
    ]
    answers: list[tuple[How, str]] = []
    for name in at.nodes:
        node = nodes.get(name)
        if node and any(finding.name in node.lacks.get(record, ()) for record in records):
            answers.append(("lost", f"{name} no longer has the file"))
        elif node and node.is_alive:
            answers.append(("ask", f"{name} has to upload it again"))
        else:
            start = "start its worker, if that node still has the checkpoint"
            answers.append(("away", f"{name} does not run: {start}"))
    hows = {how for how, _ in answers}
    how: How = "ask" if "ask" in hows else "away" if "away" in hows else "lost"
    lost: list[str] = []
    if how == "lost":
        lost += _tensors(finding, seen)
        if ranks := file_names.ranks([path]):
            lost.append(f"states of rank {', '.join(map(str, ranks))}")
        lost.append(_consequence(path, seen))
    words = "; ".join(words for _, words in answers)
    return Repair(finding.name, how, words, damage, tuple(lost))


def _consequence(path: str, seen: LocationState) -> str:
    """Return what cannot be done any more without a shard."""
    if path in seen.demands.model and seen.conditions.consolidated.holds:
        return (
            "the consolidated model still exists, but cannot be rebuilt, and no training can be"
            " resumed"
        )
    if path in seen.demands.model:
        return "no model can be built from this checkpoint, and no training can be resumed"
    if path in seen.demands.resume:
        return "no training can be resumed from it; the model does not need this file"
    return "neither the model nor a resumed training needs this file"


def _of_model(finding: VerifyFinding, seen: LocationState, shards: Iterable[Repair]) -> Repair:
    """Plan the repair of a consolidated file."""
    name, damage = finding.name, _damage(finding)
    if _is_as_recorded(finding, seen):
        words = f"a model made again has the same bytes: {_WRONG_MEANING}"
        return Repair(name, "lost", words, damage)
    if seen.conditions.shards:
        words = f"its shards were deleted: {seen.conditions.shards}"
        return Repair(name, "lost", words, damage, _tensors(finding, seen))
    needed = {f"{seen.location}/{path}" for path in seen.demands.model}
    broken = [part for part in shards if part.name in needed]
    if any(part.how == "lost" for part in broken):
        words = "some shards that it is built from are lost too"
        return Repair(name, "lost", words, damage, _tensors(finding, seen))
    if broken:
        words = f"rebuilt from the shards, after {broken[0].name} is repaired"
        return Repair(name, "later", words, damage)
    return Repair(name, "rebuild", "rebuilt from the shards", damage)


def _tensors(finding: VerifyFinding, seen: LocationState) -> tuple[str, ...]:
    """Name the tensors that the damage overlaps; of a missing consolidated file, all in it."""
    path = finding.name.removeprefix(f"{CONSOLIDATED}/{seen.location}/")
    known = seen.model_record.tensors if seen.model_record else ()
    names = finding.tensors or tuple(t.name for t in known if t.file == path)
    return (f"tensors {', '.join(names)}",) if names else ()


def _of_record(fault: Fault, seen: LocationState | None, nodes: Mapping[str, NodeState]) -> Repair:
    name, kind = fault.name.removeprefix(f"{fault.run}/"), fault.record.kind
    damage = str(fault.error).removeprefix(f"{fault.name}: ")
    if isinstance(fault.error, Unsupported):
        return Repair(name, "later", "written by a newer ckptsync: upgrade this one", damage)
    try:
        own_prefixes(fault.run, fault.location)
    except Corrupt as e:  # nobody ever writes it right
        return Repair(name, "later", f"{e.hint}, and delete it", damage)
    if kind == "model":
        return _of_model_record(name, damage, seen)
    if kind == "report":
        reports = seen.records.reports.values() if seen else ()
        if any(report.n > fault.record.n for report in reports):
            words = "it is damaged, and a later report replaces it: deleted"
            return Repair(name, "delete", words, damage)
        return Repair(name, "ignore", "it is damaged: the next verification replaces it", damage)
    if kind != "manifest":
        return Repair(name, "delete", _DELETED[kind], damage)
    own = fault.record.node
    node = nodes.get(own)
    if node and fault.name in node.lacks:
        lost = (
            f"no record says any more which files {own} uploaded; ckptsync leaves the location as"
            " it is"
        )
        return Repair(name, "lost", f"{own} cannot write it again", damage, (lost,))
    if node and node.is_alive:
        return Repair(name, "ask", f"{own} writes it again, if it still has the files", damage)
    words = f"{own} is not running: only that node can write its manifest again"
    return Repair(name, "away", words, damage)


def _of_model_record(name: str, damage: str, seen: LocationState | None) -> Repair:
    """Plan the repair of a model record: rebuild it from the shards, unless they are deleted."""
    why = seen.conditions.shards if seen else ""
    if seen is None or not why or seen.demands.model.keys() <= seen.present().keys():
        return Repair(name, "rebuild", "ckptsync writes it again together with the model", damage)
    lost = ("the consolidated model may exist, but its checksums are lost",)
    return Repair(name, "lost", f"its shards were deleted: {why}", damage, lost)
