"""Plan what can be done about a location's damage, and by whom; do what can be done here.

The same bytes may exist elsewhere. Consolidated files are made again from undamaged shards. A shard
is copied from another location of the run that holds the same bytes, or uploaded by a node that
named it and still has them; a node that no longer has them says so in its heartbeat. Only its own
node can write a damaged manifest again. `plan_repair` is a pure function; `repair` does what the
plan has for this machine.
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
"""How a damaged file or record is repaired.

Here and now: ``rebuild`` a consolidated file from its shards, ``copy`` it within the store,
``delete`` it. By a node: ``ask`` one that runs, or ``away``: it does not run. ``later``: after
another repair. ``ignore``: nothing has to be done. ``lost``: no node has it any more."""
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
    """A node by its heartbeat: whether it runs, and by record which files it cannot supply."""

    is_alive: bool
    lacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Repair:
    """What to do about one damaged file or record; ``name`` is as in reports.

    ``words``: how, and who does it; ``consequences``: what is lost. ``source``: the name in the
    store that it is copied from.
    """

    name: str
    how: How
    words: str
    damage: str = ""
    consequences: tuple[str, ...] = ()
    source: str = ""


@dataclass(frozen=True, slots=True)
class RepairPlan:
    """What to do about all damage of one location, the worst first."""

    run: str
    location: str
    parts: tuple[Repair, ...]

    @property
    def exit_code(self) -> int:
        """Return 10 if something is lost, 3 if somebody must act first, else 0."""
        hows = {part.how for part in self.parts}
        return 10 if "lost" in hows else 3 if hows & {"ask", "away", "later"} else 0

    @property
    def doable(self) -> frozenset[str]:
        """Return the names of what can be repaired here: rebuilt, copied or deleted."""
        return frozenset(
            part.name for part in self.parts if part.how in ("rebuild", "copy", "delete")
        )


def plan_repair(
    run_state: StoreState,
    run: str,
    location: str,
    findings: Sequence[VerifyFinding],
    nodes: Mapping[str, NodeState],
) -> RepairPlan:
    """Return what to do about a location; no parts if nothing of it is damaged. Pure.

    ``run_state``: all of its run; ``findings``: all known damage, reported or not; ``nodes``: by
    id. Findings about files that no record names are left out; so are all findings if the
    location's manifests cannot be read, and those about shards that retention deletes.
    """
    state = next((s for s in run_state.readable if (s.run, s.location) == (run, location)), None)
    parts = [_plan_record(fault, state, nodes) for fault in run_state.faults_of(run, location)]
    if state is not None:
        # of each file the newest that says that its bytes differ, else the newest
        by_kind = sorted(
            (f for f in findings if f.kind in DAMAGE), key=lambda f: f.kind in OF_BYTES
        )
        damage = {f.name: f for f in by_kind}.values()
        located = {
            copy.name.removeprefix(f"{run}/"): (path, copy)
            for path, copies in state.files.items()
            for copy in copies
        }
        stored = _stored_digests(run_state, state)
        shards = [] if state.conditions.shards else [f for f in damage if f.name in located]
        shard_repairs = [_plan_shard(f, located[f.name], state, stored, nodes) for f in shards]
        parts += shard_repairs
        model = f"{CONSOLIDATED}/{location}"
        if state.model_record:
            model_files = {f"{model}/{f.path}" for f in state.model_record.files}
            parts += [
                _plan_model_file(f, state, shard_repairs) for f in damage if f.name in model_files
            ]
        else:
            parts += [
                _plan_model_record(f.name, _damage_text(f), state)
                for f in damage
                if f.name == model
            ]
    parts.sort(key=lambda p: (ORDER.index(p.how), p.name))
    return RepairPlan(run, location, tuple(parts))


def repair(
    store: Store, plan: RepairPlan, state: LocationState | None, options: HeadOptions
) -> tuple[str, ...]:
    """Do the parts of a plan that can be done here; return the names that were written or deleted.

    Names are relative to the run. Before a damaged keep or tombstone is deleted, a keep is written
    that protects the location. Copies write over the damaged files; without ``state``, the location
    as it was planned, or if the file has moved, they are passed over. One consolidation of the
    location rebuilds all that is due. Raise the first error; what was done before it stays.
    """
    changed_names: list[str] = []
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
                changed_names.append(append_record(store, keep).removeprefix(f"{plan.run}/"))
            store.delete(name)
            changed_names.append(part.name)
        elif part.how == "copy" and state is not None:
            copies = (
                located for copies_of_path in state.files.values() for located in copies_of_path
            )
            entry = next((located.entry for located in copies if located.name == name), None)
            if entry is None:  # it has moved since it was planned
                continue
            error = Corrupt(
                f"{part.source}: does not match the checksum of {part.name} either",
                hint="verify that checkpoint, too",
            )
            stored_copy = StoredCopy(store, part.source, entry.size, entry.digest, error)
            store.write(name, stored_copy, About(entry.size))
            changed_names.append(part.name)
    if any(part.how == "rebuild" for part in plan.parts):
        prefix = consolidated_prefix(plan.run, plan.location).removeprefix(f"{plan.run}/")
        for model in consolidate_location(store, plan.run, plan.location, options):
            changed_names += [prefix + name for name in model.files]
    return tuple(changed_names)


def _is_as_recorded(finding: VerifyFinding, state: LocationState) -> bool:
    """Return whether a finding is not of bytes, and a report with it compared all with digests.

    Then only the file's meaning is wrong. False if no unanswered report has the finding.
    """
    if finding.kind in OF_BYTES:
        return False
    for report in (state.records.reports[name] for name in state.conditions.proof.damage):
        compared = {reading.level: reading.size for reading in report.readings}
        if finding in report.findings and compared.get("digest", -1) == compared.get("stat"):
            return True
    return False


def _damage_text(finding: VerifyFinding) -> str:
    """Return the kind of damage and its detail."""
    return f"{finding.kind}: {finding.detail}"


def _stored_digests(run_state: StoreState, state: LocationState) -> dict[str, str]:
    """Return digest → a stored name with these bytes, which no unanswered report names.

    It is in the location itself, with its size, else in a VERIFIED location of the run that has its
    shards.
    """
    stored = {}
    for other_state in run_state.readable:
        is_sound = other_state.status == "VERIFIED" and not other_state.conditions.shards
        if other_state.run == state.run and other_state.location != state.location and is_sound:
            copies = (copy for all_copies in other_state.files.values() for copy in all_copies)
            stored.update({copy.entry.digest: copy.name for copy in copies})
    reports = [state.records.reports[name] for name in state.conditions.proof.damage]
    damaged_names = {f"{state.run}/{f.name}" for report in reports for f in report.findings}
    own_copies = (copy for all_copies in state.files.values() for copy in all_copies)
    sound_copies = (
        copy
        for copy in own_copies
        if copy.name not in damaged_names and state.sizes.get(copy.name) == copy.entry.size
    )
    return stored | {copy.entry.digest: copy.name for copy in sound_copies}


def _plan_shard(
    finding: VerifyFinding,
    shard: tuple[str, Located],
    state: LocationState,
    stored: Mapping[str, str],
    nodes: Mapping[str, NodeState],
) -> Repair:
    """Return what to do about a damaged shard, given with its path.

    "lost" if it has the bytes that were uploaded; "copy" if ``stored`` (`_stored_digests`) has its
    digest and its bytes differ. Otherwise the nodes decide: "ask" if one runs and may have it, else
    "away" if one does not run, else "lost", with the consequences.
    """
    path, copy = shard
    damage = _damage_text(finding)
    if _is_as_recorded(finding, state):
        words = f"it has the bytes that {copy.nodes[0]} uploaded: {_WRONG_MEANING}"
        return Repair(finding.name, "lost", words, damage)
    source = stored.get(copy.entry.digest, "")
    if source and finding.kind in OF_BYTES:
        return Repair(finding.name, "copy", f"from {source}", damage, source=source)
    reports = state.records.reports
    damage_reports = [
        n
        for n in state.conditions.proof.damage
        if any(f.name == finding.name for f in reports[n].findings)
    ]
    answers: list[tuple[How, str]] = []
    for name in copy.nodes:
        node = nodes.get(name)
        if node and any(finding.name in node.lacks.get(record, ()) for record in damage_reports):
            answers.append(("lost", f"{name} no longer has the file"))
        elif node and node.is_alive:
            answers.append(("ask", f"{name} has to upload it again"))
        else:
            start = "start its worker, if that node still has the checkpoint"
            answers.append(("away", f"{name} does not run: {start}"))
    hows = {how for how, _ in answers}
    how: How = "ask" if "ask" in hows else "away" if "away" in hows else "lost"
    consequences: list[str] = []
    if how == "lost":
        consequences += _list_tensors(finding, state)
        if ranks := file_names.ranks([path]):
            consequences.append(f"states of rank {', '.join(map(str, ranks))}")
        consequences.append(_explain_loss(path, state))
    words = "; ".join(words for _, words in answers)
    return Repair(finding.name, how, words, damage, tuple(consequences))


def _explain_loss(path: str, state: LocationState) -> str:
    """Return what cannot be done any more without a shard."""
    if path in state.demands.model and state.conditions.consolidated.holds:
        return (
            "the consolidated model still exists, but cannot be rebuilt, and no training can be"
            " resumed"
        )
    if path in state.demands.model:
        return "no model can be built from this checkpoint, and no training can be resumed"
    if path in state.demands.resume:
        return "no training can be resumed from it; the model does not need this file"
    return "neither the model nor a resumed training needs this file"


def _plan_model_file(
    finding: VerifyFinding, state: LocationState, shards: Iterable[Repair]
) -> Repair:
    """Return what to do about a damaged file of the model.

    "rebuild", or "later" if a damaged shard that the model needs can be repaired. "lost" if such a
    shard is lost, if retention deletes the shards, or if the model's file has its recorded bytes: a
    rebuilt one would have the same. ``shards``: the repairs of damaged shards.
    """
    name, damage = finding.name, _damage_text(finding)
    if _is_as_recorded(finding, state):
        words = f"a model made again has the same bytes: {_WRONG_MEANING}"
        return Repair(name, "lost", words, damage)
    if state.conditions.shards:
        words = f"its shards were deleted: {state.conditions.shards}"
        return Repair(name, "lost", words, damage, _list_tensors(finding, state))
    needed = {f"{state.location}/{path}" for path in state.demands.model}
    needed_repairs = [part for part in shards if part.name in needed]
    if any(part.how == "lost" for part in needed_repairs):
        words = "some shards that it is built from are lost too"
        return Repair(name, "lost", words, damage, _list_tensors(finding, state))
    if needed_repairs:
        words = f"rebuilt from the shards, after {needed_repairs[0].name} is repaired"
        return Repair(name, "later", words, damage)
    return Repair(name, "rebuild", "rebuilt from the shards", damage)


def _list_tensors(finding: VerifyFinding, state: LocationState) -> tuple[str, ...]:
    """Return a line with the tensors in the damage; all of a model's file if it names none."""
    path = finding.name.removeprefix(f"{CONSOLIDATED}/{state.location}/")
    recorded = state.model_record.tensors if state.model_record else ()
    names = finding.tensors or tuple(t.name for t in recorded if t.file == path)
    return (f"tensors {', '.join(names)}",) if names else ()


def _plan_record(
    fault: Fault, state: LocationState | None, nodes: Mapping[str, NodeState]
) -> Repair:
    """Return what to do about an unreadable record.

    "later": a newer program wrote it, or its name is none that a program writes. "delete": a later
    model record or report replaces it, or it is of a kind in `_DELETED`. "ignore": a report. Model
    records: see `_plan_model_record`. A manifest by its node: "lost" if that cannot supply it,
    "ask" if it runs, else "away".
    """
    name, kind = fault.name.removeprefix(f"{fault.run}/"), fault.record.kind
    damage = str(fault.error).removeprefix(f"{fault.name}: ")
    if isinstance(fault.error, Unsupported):
        return Repair(name, "later", "written by a newer ckptsync: upgrade this one", damage)
    try:
        own_prefixes(fault.run, fault.location)
    except Corrupt as e:  # nobody ever writes it right
        return Repair(name, "later", f"{e.hint}, and delete it", damage)
    if state and kind in ("model", "report"):
        records = state.records.model_records if kind == "model" else state.records.reports
        if any(record.n > fault.record.n for record in records.values()):
            words = f"it is damaged, and a later {kind} record replaces it: deleted"
            return Repair(name, "delete", words, damage)
    if kind == "model":
        return _plan_model_record(name, damage, state)
    if kind == "report":
        return Repair(name, "ignore", "it is damaged: the next verification replaces it", damage)
    if kind != "manifest":
        return Repair(name, "delete", _DELETED[kind], damage)
    owner = fault.record.node
    node = nodes.get(owner)
    if node and fault.name in node.lacks:
        consequence = (
            f"no record says any more which files {owner} uploaded; ckptsync leaves the location as"
            " it is"
        )
        return Repair(name, "lost", f"{owner} cannot write it again", damage, (consequence,))
    if node and node.is_alive:
        return Repair(name, "ask", f"{owner} writes it again, if it still has the files", damage)
    words = f"{owner} is not running: only that node can write its manifest again"
    return Repair(name, "away", words, damage)


def _plan_model_record(name: str, damage: str, state: LocationState | None) -> Repair:
    """Return a model record's repair: "rebuild", or "lost" if shards that it needs were deleted."""
    why = state.conditions.shards if state else ""
    if state is None or not why or state.demands.model.keys() <= state.present().keys():
        return Repair(name, "rebuild", "ckptsync writes it again together with the model", damage)
    consequences = ("the consolidated model may exist, but its checksums are lost",)
    return Repair(name, "lost", f"its shards were deleted: {why}", damage, consequences)
