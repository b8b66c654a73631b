"""What can be done about the damage of a location, by whom, and what is lost where nothing can.  Pure.

Consolidated files are made again from shards that are well.  A shard comes from another location of the run that holds the same bytes, or from a node
that named it and still has them; a node that has them no more says so in its heartbeat.  A damaged manifest only its own node can write again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ckptsync.catalogue.summary import Fault
from ckptsync.errors import Unsupported
from ckptsync.layouts import rank_names
from ckptsync.records.names import CONSOLIDATED
from ckptsync.records.report import Finding
from ckptsync.records.saves import Located
from ckptsync.records.state import Snapshot

How = Literal["rebuild", "copy", "ask", "away", "later", "ignore", "lost"]
"""Made again here; copied within the store; asked of a node that runs; of one that does not run now; after something else; nothing to do; nobody has it."""
OF_BYTES = ("missing", "size", "digest", "parse", "load")


@dataclass(frozen=True, slots=True)
class NodeWord:
    """A node by its heartbeat: whether it runs, and by record what it cannot give."""

    is_alive: bool
    lacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Part:
    """One damaged file or record, ``name`` as reports have it.  ``words``: how, and who; ``consequences``: what is lost, where ``how`` says so.

    ``source``: the name in the store that it is copied from.
    """

    name: str
    how: How
    words: str
    damage: str = ""
    consequences: tuple[str, ...] = ()
    source: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """Of one location."""

    run: str
    location: str
    parts: tuple[Part, ...]

    @property
    def exit_code(self) -> int:
        """10: something cannot be repaired; 3: somebody has to do something first; 0: all is, or will be here and now, well."""
        hows = {part.how for part in self.parts}
        return 10 if "lost" in hows else 3 if hows & {"ask", "away", "later"} else 0


@dataclass(frozen=True, slots=True)
class Ground:
    """What is known beside the location.  ``elsewhere``: digest → a name under which the store has such bytes, in another location that is verified."""

    nodes: Mapping[str, NodeWord] = field(default_factory=dict)
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    faults: Sequence[Fault] = ()


def plan(run: str, location: str, seen: Snapshot | None, findings: Sequence[Finding], ground: Ground) -> Plan:
    """What to do.  ``findings``: all that stands against the location, also what no report says yet; ``seen``: ``None`` where no manifest counts."""
    parts = [_of_record(fault, seen, ground) for fault in ground.faults]
    if seen is not None:
        shards = [p for f in _each(findings) if (p := _of_shard(f, seen, ground))]
        parts += [*shards, *(p for f in _each(findings) if (p := _of_model(f, seen, shards)))]
        parts += [p for f in _each(findings) if (p := _of_lost_model_record(f, seen))]
    order: tuple[How, ...] = ("lost", "away", "ask", "later", "copy", "rebuild", "ignore")
    return Plan(run, location, tuple(sorted(parts, key=lambda p: (order.index(p.how), p.name))))


def _each(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Damage, once a file: as the newest report has it."""
    return tuple({f.name: f for f in findings if f.kind in OF_BYTES}.values())


def _of_shard(finding: Finding, seen: Snapshot, ground: Ground) -> Part | None:
    located = {at.name: (path, at) for path, where in seen.files.items() for at in where}
    if f"{seen.run}/{finding.name}" not in located or seen.conditions.shards:
        return None
    path, at = located[f"{seen.run}/{finding.name}"]
    damage = f"{finding.kind}: {finding.detail}"
    source = ground.elsewhere.get(at.entry.digest, "") if finding.kind in ("missing", "size", "digest") else ""
    if source:
        return Part(finding.name, "copy", f"from {source}", damage, source=source)
    how, words = _asked(finding, seen, at, ground.nodes)
    return Part(finding.name, how, words, damage, tuple(_lost_with(path, finding, seen)) if how == "lost" else ())


def _asked(finding: Finding, seen: Snapshot, at: Located, nodes: Mapping[str, NodeWord]) -> tuple[How, str]:
    records = [
        name for name in seen.conditions.proof.damage if any(f.name == finding.name for f in seen.records.reports[name].findings)
    ]
    said = {node: _word(nodes.get(node), records, finding.name) for node in at.nodes}
    words = "; ".join(f"{node} {word}" for node, (_, word) in said.items())
    hows = [how for how, _ in said.values()]
    return ("ask" if "ask" in hows else "away" if "away" in hows else "lost"), words


def _word(node: NodeWord | None, records: Iterable[str], finding: str) -> tuple[How, str]:
    if node is not None and any(finding in node.lacks.get(record, ()) for record in records):
        return "lost", "no longer has its bytes"
    if node is not None and node.is_alive:
        return "ask", "is asked for it"
    return "away", "does not run: start its worker, if that node still has the checkpoint"


def _of_model(finding: Finding, seen: Snapshot, shards: Sequence[Part]) -> Part | None:
    prefix = f"{CONSOLIDATED}/{seen.location}/"
    path = finding.name.removeprefix(prefix)
    if seen.model_record is None or not finding.name.startswith(prefix) or path not in {f.path for f in seen.model_record.files}:
        return None
    damage = f"{finding.kind}: {finding.detail}"
    if seen.conditions.shards:
        lost = _of_tensors(finding, seen)
        return Part(finding.name, "lost", f"its shards were let go: {seen.conditions.shards}", damage, lost)
    needed = {f"{seen.location}/{name}" for name in seen.demands.model}
    broken = [p for p in shards if p.name in needed]
    if any(p.how == "lost" for p in broken):
        return Part(finding.name, "lost", "shards that it is made of are lost, too", damage, _of_tensors(finding, seen))
    if broken:
        return Part(finding.name, "later", f"made again from the shards, when {broken[0].name} is well", damage)
    return Part(finding.name, "rebuild", "made again from the shards", damage)


def _lost_with(path: str, finding: Finding, seen: Snapshot) -> Iterator[str]:
    yield from _of_tensors(finding, seen)
    ranks = rank_names.ranks([path])
    if ranks:
        yield f"states of rank {', '.join(map(str, ranks))}"
    if path in seen.demands.model:
        if seen.conditions.consolidated.holds:
            yield "the consolidated model was made before, and stays; it cannot be made again, and no training resumed"
        else:
            yield "no model can be made of this checkpoint, and no training resumed"
    elif path in seen.demands.resume:
        yield "no training can be resumed from it; the model does not need it"
    else:
        yield "neither the model nor resuming demands it"


def _of_tensors(finding: Finding, seen: Snapshot) -> tuple[str, ...]:
    """Those that the damage overlaps; of a consolidated file that is missing, all that were in it."""
    path = finding.name.removeprefix(f"{CONSOLIDATED}/{seen.location}/")
    names = finding.tensors or tuple(t.name for t in (seen.model_record.tensors if seen.model_record else ()) if t.file == path)
    return (f"tensors {', '.join(names)}",) if names else ()


def _of_record(fault: Fault, seen: Snapshot | None, ground: Ground) -> Part:
    name, kind = fault.name.removeprefix(f"{fault.run}/"), fault.record.kind
    damage = str(fault.error).removeprefix(f"{fault.name}: ")
    if isinstance(fault.error, Unsupported):
        return Part(name, "later", "written by a newer ckptsync: upgrade this one", damage)
    if kind == "model":
        return _of_model_record(name, damage, seen)
    if kind == "report":
        if seen is not None and any(report.n > fault.record.n for report in seen.records.reports.values()):
            return Part(name, "rebuild", "counts for nothing, and a later one says what is: removed", damage)
        return Part(name, "ignore", "counts for nothing: the next verification says again what is", damage)
    if kind in _WORDS:
        return Part(name, "rebuild", _WORDS[kind], damage)
    return _of_manifest(fault, name, damage, ground)


_WORDS = {
    "keep": "says nothing any more: removed, after a new word that keeps the location; `ckptsync keep --release` lets it go",
    "join": "joins nothing any more: removed; `ckptsync join` joins the locations again",
    "tombstone": "says nothing any more: removed, after what it may have taken back is taken back; gc decides again",
}


def _of_model_record(name: str, damage: str, seen: Snapshot | None) -> Part:
    """It follows from the shards, unless they have gone."""
    if seen is None or not seen.conditions.shards or seen.demands.model.keys() <= seen.present().keys():
        return Part(name, "rebuild", "written again with the model that it is of", damage)
    lost = ("the consolidated model may be there, and nothing proves any more that its bytes are right",)
    return Part(name, "lost", f"its shards were let go: {seen.conditions.shards}", damage, lost)


def _of_lost_model_record(finding: Finding, seen: Snapshot) -> Part | None:
    is_it = seen.model_record is None and finding.name == f"{CONSOLIDATED}/{seen.location}"
    return _of_model_record(finding.name, f"{finding.kind}: {finding.detail}", seen) if is_it else None


def _of_manifest(fault: Fault, name: str, damage: str, ground: Ground) -> Part:
    node = ground.nodes.get(fault.record.node)
    if node is not None and fault.name in node.lacks:
        lost = (f"nobody knows any more which files {fault.record.node} sent, and nothing is done about the location",)
        return Part(name, "lost", f"{fault.record.node} cannot write it again", damage, lost)
    if node is not None and node.is_alive:
        return Part(name, "ask", f"{fault.record.node} writes it again, if it still has the files", damage)
    return Part(name, "away", f"{fault.record.node} does not run: only it can write its manifest again", damage)
