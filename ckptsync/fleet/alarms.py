"""What somebody should look at: said once for each thing, with since when, and what to do.  Pure; times are seconds on the store's clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ckptsync.catalogue.summary import Catalogue, Summary
from ckptsync.fleet.heartbeat import Disk
from ckptsync.fleet.nodes import Node
from ckptsync.fleet.runs import Run
from ckptsync.units import show_duration, show_size

Severity = Literal["critical", "warning"]
SEVERITIES: tuple[Severity, ...] = ("critical", "warning")
Kind = Literal["damage", "stall", "lost-node", "full", "late", "clock"]
KINDS: tuple[Kind, ...] = ("damage", "stall", "lost-node", "full", "late", "clock")
CODES: dict[str, Kind] = {
    "damaged": "damage",
    "unreadable": "damage",
    "ambiguous": "damage",
    "stalled": "stall",
    "node-lost": "lost-node",
    "no-head": "lost-node",
    "store-away": "lost-node",
    "disk-full": "full",
    "spool-full": "full",
    "store-full": "full",
    "arriving": "late",
    "waiting": "late",
    "unconsolidated": "late",
    "unverified": "late",
    "unread": "late",
    "clock": "clock",
}
"""Every code, and which kind it is of: `alerts.on` names kinds."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """``code`` and ``subject`` (a place, a run, a node, a path) name it.  ``since``: ``None`` where nobody can tell."""

    code: str
    subject: str
    severity: Severity
    since: float | None
    text: str
    todo: str

    @property
    def kind(self) -> Kind:
        """What `alerts.on` calls it."""
        return CODES[self.code]

    @property
    def key(self) -> str:
        """The same as long as the alarm holds."""
        return f"{self.code} {self.subject}"


@dataclass(frozen=True, slots=True)
class Patience:
    """How long is too long, in seconds.

    ``node``: its silence; ``period``: within which every byte is read again; ``slow``: for a save that arrives, waits to be sent or to be
    consolidated; ``steps``: times the usual that a run may be without a checkpoint, and never less than ``least``;
    ``over``: after which what no longer changes is history and nobody is told of it.
    """

    node: float = 600.0
    period: float = 7 * 86400.0
    slow: float = 3600.0
    steps: float = 3.0
    least: float = 900.0
    over: float = 7 * 86400.0


@dataclass(frozen=True, slots=True)
class Room:
    """Of the store, in bytes, where that can be asked."""

    free: int
    total: int


@dataclass(frozen=True, slots=True)
class Scene:
    """What alarms are judged by."""

    catalogue: Catalogue
    nodes: Sequence[Node]
    runs: Sequence[Run]
    room: Room | None
    now: float
    patience: Patience


def alarms(scene: Scene) -> tuple[Alarm, ...]:
    """The critical ones first, then the oldest."""
    found = (a for look in (_damage, _stalls, _lost, _disks, _store, _late, _clocks) for a in look(scene))
    return tuple(sorted(found, key=lambda a: (SEVERITIES.index(a.severity), a.since or scene.now, a.key)))


def _damage(scene: Scene) -> Iterator[Alarm]:
    for s in scene.catalogue.summaries:
        where = f"{s.run}/{s.place}"
        if s.word == "DAMAGED":
            yield _damaged(s, where, lacking(s, scene.nodes))
        elif s.word == "AMBIGUOUS" and scene.now - s.arrived < scene.patience.over:
            todo = "nobody merges it: give the jobs output directories of their own, or use the hook"
            yield Alarm("ambiguous", where, "warning", s.arrived, f"{where}: {_first(s.evidence)}", todo)
    for fault in scene.catalogue.faults:
        todo = "`ckptsync verify` says what it was of; a newer version's record wants a newer ckptsync"
        yield Alarm("unreadable", fault.name, "critical", None, f"{fault.name}: {fault.error}", todo)
    for node in scene.nodes:
        if node.state == "unreadable":
            todo = "remove that file if the node is no more: a live one writes it again"
            yield Alarm("unreadable", node.name, "warning", node.beat, f"heartbeat of {node.name}: {_first(node.errors)}", todo)


def _damaged(s: Summary, where: str, lacking: Sequence[str]) -> Alarm:
    if set(s.nodes) <= set(lacking):
        text = f"{where}: {_first(s.evidence)}; {_those(lacking)} no longer {'has' if len(lacking) == 1 else 'have'} its bytes"
        todo = "`ckptsync repair` says what is lost by it; an earlier checkpoint may serve"
    else:
        text = f"{where}: {_first(s.evidence)}"
        todo = f"`ckptsync repair` says who can send it again; {_those(s.nodes)} would, if their services run"
    return Alarm("damaged", where, "critical", s.proof.said, text, todo)


def lacking(s: Summary, nodes: Sequence[Node]) -> tuple[str, ...]:
    """Of a damaged place the nodes that cannot send again what a report asks for."""
    asked = {*s.proof.damage, *s.manifests}
    return tuple(n.node for n in nodes if n.node in s.nodes and not asked.isdisjoint(n.lacks))


def _stalls(scene: Scene) -> Iterator[Alarm]:
    workers = [n for n in scene.nodes if n.state == "alive" and "worker" in n.roles]
    alive = {n.node for n in workers}
    queued = {item.partition("/")[0] for n in workers for item in n.queue}
    for run in scene.runs:
        if run.newest is None or run.every is None or run.training == "ended" or run.run in queued or alive.isdisjoint(run.nodes):
            continue
        quiet = scene.now - run.newest.ended
        if max(scene.patience.steps * run.every, scene.patience.least) < quiet < scene.patience.over:
            gone = "; its training process is gone and had not ended" if run.training == "gone" else ""
            text = f"{run.run}: no checkpoint for {show_duration(quiet)}, where one came every {show_duration(run.every)}{gone}"
            todo = f"look at the training on {_those(run.nodes)}, then at `journalctl -u 'ckptsync-worker@*'` there"
            yield Alarm("stalled", run.run, "critical" if gone else "warning", run.newest.ended + run.every, text, todo)


def _lost(scene: Scene) -> Iterator[Alarm]:
    for node in scene.nodes:
        if node.state == "silent" and scene.patience.node < node.age < scene.patience.over:
            had = f" with {len(node.queue)} on the way ({_first(node.queue)})" if node.queue else ""
            text = f"{node.name}: no sign of life for {show_duration(node.age)}{had}"
            todo = "start its service again: what is pinned there is sent; if the machine is no more, remove its file in .ckptsync/nodes"
            yield Alarm("node-lost", node.name, "critical" if node.queue else "warning", node.beat, text, todo)
    heads = [n for n in scene.nodes if {"head", "verifier"} & {*n.roles}]
    if heads and not any(n.state == "alive" for n in heads):
        last = max(heads, key=lambda n: n.beat)
        if last.age > scene.patience.node:
            text = f"no head is alive: nothing is consolidated or verified; the last one was {last.name}, {show_duration(last.age)} ago"
            yield Alarm("no-head", "store", "critical", last.beat, text, f"start ckptsync-head on {last.host or last.node}")


def _disks(scene: Scene) -> Iterator[Alarm]:
    saves = _saves(scene.catalogue.summaries)
    for node in scene.nodes:
        for disk in node.disk if node.state == "alive" else ():
            where = f"{node.node}:{disk.path}"
            save = saves.get(node.node, 0)
            if disk.free < max(save, disk.total // 50):
                text = f"{where}: {_free(disk.free, disk.total)}{f', where a save takes {show_size(save)}' if save else ''}"
                yield Alarm("disk-full", where, "critical", None, text, "the next save will fail: make room there")
            yield from _spool(disk, where)


def _spool(disk: Disk, where: str) -> Iterator[Alarm]:
    if disk.budget and disk.spool >= 0.9 * disk.budget:
        is_full = disk.spool >= disk.budget
        text = f"{where}: {show_size(disk.spool)} of a spool budget of {show_size(disk.budget)} hold what the trainer has removed"
        todo = (
            "what has not been sent is given up as worker.spool_full says: see why sending is behind, or raise worker.spool_budget"
        )
        yield Alarm("spool-full", where, "critical" if is_full else "warning", None, text, todo)


def _store(scene: Scene) -> Iterator[Alarm]:
    room = scene.room
    if room is None:
        return
    largest = max((s.size + s.model_size for s in scene.catalogue.summaries), default=0)
    if room.free < max(2 * largest, room.total // 50):
        text = f"the store: {_free(room.free, room.total)}, where a checkpoint with its model takes up to {show_size(largest)}"
        severity: Severity = "critical" if room.free < max(largest, room.total // 100) else "warning"
        yield Alarm(
            "store-full",
            "store",
            severity,
            scene.now,
            text,
            "make room, or let retention do it: `ckptsync gc --dry-run` shows what would go",
        )


def _late(scene: Scene) -> Iterator[Alarm]:
    slow, over = scene.patience.slow, scene.patience.over
    for run in scene.runs:
        for place in run.arriving:
            waited = scene.now - place.since
            if slow < waited < over:
                where = f"{run.run}/{place.place}"
                text = f"{where}: not whole {show_duration(waited)} after its last part: {_first(place.lost)}"
                yield Alarm(
                    "arriving",
                    where,
                    "warning",
                    place.since,
                    text,
                    "what only a lost node has never comes; the others resume without it",
                )
    for node in scene.nodes:
        if node.state == "alive" and node.queue and node.oldest > slow:
            error = f"; {_first(node.errors)}" if node.errors else ""
            text = f"{node.name}: {len(node.queue)} on the way, the first for {show_duration(node.oldest)}{error}"
            yield Alarm(
                "waiting", node.name, "warning", node.beat - node.oldest, text, "see its errors, its rate and limits.bandwidth"
            )
    yield from _behind(scene)


def _behind(scene: Scene) -> Iterator[Alarm]:
    """What the heads that live should have done.  A run is said once, with its oldest."""
    alive = [n for n in scene.nodes if n.state == "alive"]
    roles = {role for n in alive for role in n.roles}
    if "head" in roles:
        yield from _undone(scene, "unconsolidated", [s for s in scene.catalogue.summaries if s.word == "COMPLETE"])
    if "verifier" in roles:
        waiting = [s for s in scene.catalogue.summaries if s.word in ("COMPLETE", "CONSOLIDATED") and not s.proof.holds]
        yield from _undone(scene, "unverified", waiting)
        yield from _stale(scene, min((n.verifies for n in alive if n.verifies), default=scene.patience.period))


def _undone(scene: Scene, code: str, waiting: Sequence[Summary]) -> Iterator[Alarm]:
    slow = [s for s in waiting if scene.patience.slow < scene.now - s.arrived < scene.patience.over]
    for run in dict.fromkeys(s.run for s in slow):
        first = min((s for s in slow if s.run == run), key=lambda s: (s.arrived, s.place))
        text = f"{run}/{first.place}: {code} {show_duration(scene.now - first.arrived)} after it was whole"
        yield Alarm(code, run, "warning", first.arrived, text, "see the heads' errors and jobs in `ckptsync status`")


def _stale(scene: Scene, period: float) -> Iterator[Alarm]:
    for run in scene.runs:
        if run.proven is not None and scene.now - run.proven > BEHIND * period:
            text = f"{run.run}: some of it was last read {show_duration(scene.now - run.proven)} ago, where {show_duration(period)} is asked for"
            todo = "the verifier is behind: more head.jobs, another verifier, or a longer verify.period"
            yield Alarm("unread", run.run, "warning", run.proven + period, text, todo)


def _clocks(scene: Scene) -> Iterator[Alarm]:
    for node in scene.nodes:
        if node.state == "alive" and node.clock_offset is not None and abs(node.clock_offset) > SKEW:
            text = f"{node.name}: its clock is {show_duration(abs(node.clock_offset))} {'ahead of' if node.clock_offset > 0 else 'behind'} the store's"
            todo = "let NTP set it: times of files say what belongs to one save where no hook does"
            yield Alarm("clock", node.name, "warning", None, text, todo)


SKEW = 10.0  # seconds
BEHIND = 1.25  # times the period


def _saves(summaries: Sequence[Summary]) -> dict[str, int]:
    """About how many bytes each node writes at a save, by the newest that it took part in."""
    newest: dict[str, Summary] = {}
    for s in summaries:
        for node in s.nodes:
            if node not in newest or s.ended > newest[node].ended:
                newest[node] = s
    return {node: s.size // len(s.nodes) for node, s in newest.items()}


def _free(free: int, total: int) -> str:
    return f"{show_size(free)} of {show_size(total)} are free"


def _first(lines: Sequence[str]) -> str:
    more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
    return f"{lines[0]}{more}" if lines else "no reason is known"


def _those(nodes: Sequence[str]) -> str:
    return f"{', '.join(nodes[:3])}{' and others' if len(nodes) > 3 else ''}" or "its node"
