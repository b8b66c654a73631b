"""Which alarms hold: those of nodes and their disks, and those of locations, runs and the store.  Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckptsync.catalogue.summary import Catalogue, Summary
from ckptsync.fleet.alarms import Alarm, Patience, Room, Severity
from ckptsync.fleet.heartbeat import Disk
from ckptsync.fleet.nodes import Node
from ckptsync.fleet.runs import Run
from ckptsync.units import show_duration, show_size

SKEW = 10.0  # seconds
FULL = (
    "no space left",
    "disk is full",
    "quota exceeded",
    "storagefull",
    "insufficient storage",
)  # as systems and servers say it, in lower case
BEHIND = 1.25  # times the period


@dataclass(frozen=True, slots=True)
class Scene:
    """What alarms are judged by: all that is known of a store.  ``now`` is on its clock."""

    catalogue: Catalogue
    nodes: Sequence[Node]
    runs: Sequence[Run]
    room: Room | None
    now: float
    patience: Patience

    @property
    def alive(self) -> tuple[Node, ...]:
        """Return the nodes that live."""
        return tuple(n for n in self.nodes if n.state == "alive")


def of_nodes(scene: Scene) -> Iterator[Alarm]:
    """Yield the alarms of nodes and their disks."""
    yield from _unreadable(scene)
    yield from _lost(scene)
    yield from _headless(scene)
    yield from _disks(scene)
    yield from _told_full(scene)
    yield from _waiting(scene)
    yield from _clocks(scene)


def _unreadable(scene: Scene) -> Iterator[Alarm]:
    for node in scene.nodes:
        if node.state == "unreadable":
            todo = "remove that file if the node is no more: a live one writes it again"
            yield Alarm("unreadable", node.name, "warning", node.beat, f"heartbeat of {node.name}: {_first(node.errors)}", todo)


def _lost(scene: Scene) -> Iterator[Alarm]:
    for node in scene.nodes:
        if node.state == "silent" and scene.patience.node < node.age < scene.patience.over:
            waiting = [f"{r.run}/{p.location}" for r in scene.runs for p in r.arriving if node.node in p.awaited]
            work = tuple(dict.fromkeys((*node.queue, *waiting)))
            had = f", and it has {_first(work)}" if work else ""
            text = f"{node.name}: no sign of life for {show_duration(node.age)}{had}"
            todo = "start its service again: what is pinned there is sent; if the machine is no more, remove its file in .ckptsync/nodes"
            yield Alarm("node-lost", node.name, "critical" if work else "warning", node.beat, text, todo)


def _headless(scene: Scene) -> Iterator[Alarm]:
    heads = [n for n in scene.nodes if {"head", "verifier"} & {*n.roles}]
    if heads and not any(n.state == "alive" for n in heads):
        last = max(heads, key=lambda n: n.beat)
        if last.age > scene.patience.node:
            text = f"no head is alive: nothing is consolidated or verified; the last one was {last.name}, {show_duration(last.age)} ago"
            yield Alarm("no-head", "store", "critical", last.beat, text, f"start ckptsync-head on {last.host or last.node}")


def _disks(scene: Scene) -> Iterator[Alarm]:
    saves = _saves(scene.catalogue.summaries)
    for node in scene.alive:
        for disk in node.disk:
            where = f"{node.node}:{disk.path}"
            save = saves.get(node.node, 0)
            if disk.free < max(save, disk.total // 50):
                text = f"{where}: {_free_of(disk.free, disk.total)}{f', where a save takes {show_size(save)}' if save else ''}"
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


def _told_full(scene: Scene) -> Iterator[Alarm]:
    """What a write found, of a bucket or of another machine's disk."""
    for node in scene.alive:
        said = [error for error in node.errors if any(words in error.lower() for words in FULL)]
        if said:
            yield Alarm("no-space", node.name, "critical", None, f"{node.name}: {_first(said)}", "make room where the error says")


def _waiting(scene: Scene) -> Iterator[Alarm]:
    for node in scene.alive:
        if node.queue and node.oldest > scene.patience.slow:
            error = f"; {_first(node.errors)}" if node.errors else ""
            text = f"{node.name}: {len(node.queue)} on the way, the first for {show_duration(node.oldest)}{error}"
            todo = "see its errors and notes, its rate and limits.bandwidth"
            yield Alarm("waiting", node.name, "warning", node.beat - node.oldest, text, todo)


def _clocks(scene: Scene) -> Iterator[Alarm]:
    for node in scene.alive:
        if node.clock_offset is not None and abs(node.clock_offset) > SKEW:
            text = f"{node.name}: its clock is {show_duration(abs(node.clock_offset))} {'ahead of' if node.clock_offset > 0 else 'behind'} the store's"
            todo = "let NTP set it: times of files say what belongs to one save where no hook does"
            yield Alarm("clock", node.name, "warning", None, text, todo)


def _saves(summaries: Sequence[Summary]) -> dict[str, int]:
    """About how many bytes each node writes at a save, by the newest that it took part in."""
    newest: dict[str, Summary] = {}
    for s in summaries:
        for node in s.nodes:
            if node not in newest or s.ended > newest[node].ended:
                newest[node] = s
    return {node: s.size // len(s.nodes) for node, s in newest.items()}


def of_locations(scene: Scene) -> Iterator[Alarm]:
    """Yield the alarms of locations, runs and the store that holds them."""
    yield from _damage(scene)
    yield from _stalls(scene)
    yield from _store(scene)
    yield from _arriving(scene)
    yield from _behind(scene)
    yield from _unopenable(scene)


def _damage(scene: Scene) -> Iterator[Alarm]:
    for s in scene.catalogue.summaries:
        where = f"{s.run}/{s.location}"
        if s.status == "DAMAGED":
            yield _damaged(s, where, lacking(s, scene.nodes))
        elif s.status == "CONFLICT" and scene.now - s.arrived < scene.patience.over:
            todo = "nobody merges it: give the jobs output directories of their own, or use the hook"
            yield Alarm("ambiguous", where, "warning", s.arrived, f"{where}: {_first(s.evidence)}", todo)
    for fault in scene.catalogue.faults:
        todo = "`ckptsync verify` says what it was of; a newer version's record wants a newer ckptsync"
        yield Alarm("unreadable", fault.name, "critical", None, f"{fault.name}: {fault.error}", todo)


def _damaged(s: Summary, where: str, lacking: Sequence[str]) -> Alarm:
    if set(s.nodes) <= set(lacking):
        text = f"{where}: {_first(s.evidence)}; {_those(lacking)} no longer {'has' if len(lacking) == 1 else 'have'} its bytes"
        todo = "`ckptsync repair` says what is lost by it; an earlier checkpoint may serve"
    else:
        text = f"{where}: {_first(s.evidence)}"
        todo = f"`ckptsync repair` says who can send it again; {_those(s.nodes)} would, if their services run"
    return Alarm("damaged", where, "critical", s.proof.said, text, todo)


def lacking(s: Summary, nodes: Sequence[Node]) -> tuple[str, ...]:
    """Return the nodes of a damaged location that cannot send again what a report asks for."""
    asked = {*s.proof.damage, *s.manifests}
    return tuple(n.node for n in nodes if n.node in s.nodes and not asked.isdisjoint(n.lacks))


def _stalls(scene: Scene) -> Iterator[Alarm]:
    workers = [n for n in scene.alive if "worker" in n.roles]
    alive = {n.node for n in workers}
    queued = {item.partition("/")[0] for n in workers for item in n.queue}
    for run in scene.runs:
        if run.newest is None or run.every is None or run.training == "ended" or run.run in queued or alive.isdisjoint(run.nodes):
            continue
        quiet, patience = scene.now - run.newest.ended, scene.patience
        over = patience.over if run.training else min(patience.over, max(patience.ended, 10 * run.every))
        if max(patience.steps * run.every, patience.least) < quiet < over:
            gone = "; its training process is gone and had not ended" if run.training == "gone" else ""
            text = f"{run.run}: no checkpoint for {show_duration(quiet)}, where one came every {show_duration(run.every)}{gone}"
            todo = f"look at the training on {_those(run.nodes)}, then at `journalctl -u 'ckptsync-worker@*'` there"
            yield Alarm("stalled", run.run, "critical" if gone else "warning", run.newest.ended + run.every, text, todo)


def _store(scene: Scene) -> Iterator[Alarm]:
    room = scene.room
    if room is None:
        return
    largest = max((s.size + s.model_size for s in scene.catalogue.summaries), default=0)
    if room.free < max(2 * largest, room.total // 50):
        text = f"the store: {_free_of(room.free, room.total)}, where a checkpoint with its model takes up to {show_size(largest)}"
        severity: Severity = "critical" if room.free < max(largest, room.total // 100) else "warning"
        todo = "make room, or let retention do it: `ckptsync gc --dry-run` shows what would go"
        yield Alarm("store-full", "store", severity, None, text, todo)


def _arriving(scene: Scene) -> Iterator[Alarm]:
    slow, over = scene.patience.slow, scene.patience.over
    alive = {n.node for n in scene.alive}
    for run in scene.runs:
        for location in run.arriving:
            waited = scene.now - location.since
            if slow < waited < over:
                where = f"{run.run}/{location.location}"
                dead = [n for n in location.awaited if n not in alive]
                text = f"{where}: not whole {show_duration(waited)} after its last part: {_first(location.lost)}"
                text += f"; {_those(dead)} {'does' if len(dead) == 1 else 'do'} not live" if dead else ""
                todo = "a node that has it sends it when its service runs; what was lost with a node never comes: an earlier checkpoint serves"
                yield Alarm("arriving", where, "warning", location.since, text, todo)


def _behind(scene: Scene) -> Iterator[Alarm]:
    """What the heads that live should have done.  A run is said once, with its oldest."""
    roles = {role for n in scene.alive for role in n.roles}
    if "head" in roles:
        yield from _undone(scene, "unconsolidated", [s for s in scene.catalogue.summaries if s.status == "COMPLETE"])
    if "verifier" in roles:
        waiting = [s for s in scene.catalogue.summaries if s.status in ("COMPLETE", "CONSOLIDATED") and not s.proof.holds]
        yield from _undone(scene, "unverified", waiting)
        yield from _stale(scene, min((n.verifies for n in scene.alive if n.verifies), default=scene.patience.period))


def _unopenable(scene: Scene) -> Iterator[Alarm]:
    """Models that lack their configuration.  A run is said once, with its newest."""
    newest: dict[str, list[Summary]] = {}
    for s in sorted(scene.catalogue.summaries, key=lambda s: (-s.arrived, s.location)):
        if s.unopenable and s.consolidated and not s.retired and scene.now - s.arrived < scene.patience.over:
            newest.setdefault(s.run, []).append(s)
    for run, found in newest.items():
        more = f" (and {len(found) - 1} more models of this run)" if len(found) > 1 else ""
        yield Alarm(
            "no-config",
            run,
            "warning",
            found[-1].arrived,
            f"{run}/{found[0].location}{more}: {found[0].unopenable}",
            found[0].to_give,
        )


def _undone(scene: Scene, code: str, waiting: Sequence[Summary]) -> Iterator[Alarm]:
    slow = [s for s in waiting if scene.patience.slow < scene.now - s.arrived < scene.patience.over]
    oldest: dict[str, Summary] = {}
    for s in sorted(slow, key=lambda s: (s.arrived, s.location)):
        oldest.setdefault(s.run, s)
    for run, s in oldest.items():
        text = f"{run}/{s.location}: {code} {show_duration(scene.now - s.arrived)} after it was whole"
        yield Alarm(code, run, "warning", s.arrived, text, "see the heads' errors and jobs in `ckptsync status`")


def _stale(scene: Scene, period: float) -> Iterator[Alarm]:
    for run in scene.runs:
        if run.proven is not None and scene.now - run.proven > BEHIND * period:
            text = f"{run.run}: some of it was last read {show_duration(scene.now - run.proven)} ago, where {show_duration(period)} is asked for"
            todo = "the verifier is behind: more head.jobs, another verifier, or a longer verify.period"
            yield Alarm("unread", run.run, "warning", run.proven + period, text, todo)


def _first(lines: Sequence[str]) -> str:
    """Return the first line, and how many more there are."""
    more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
    return f"{lines[0]}{more}" if lines else "no reason is known"


def _those(nodes: Sequence[str]) -> str:
    """Return the names of some nodes."""
    return f"{', '.join(nodes[:3])}{' and others' if len(nodes) > 3 else ''}" or "its node"


def _free_of(free: int, total: int) -> str:
    """Return the bytes that are free, as people read them."""
    return f"{show_size(free)} of {show_size(total)} are free"
