"""The alarms of locations, runs and the store that holds them.  Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptsync.catalogue.summary import Summary
from ckptsync.fleet.alarms import Alarm, Severity
from ckptsync.fleet.nodes import Node
from ckptsync.fleet.scene import Scene, first, free_of, those
from ckptsync.units import show_duration, show_size

BEHIND = 1.25  # times the period


def of_locations(scene: Scene) -> Iterator[Alarm]:
    """All of them."""
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
            yield Alarm("ambiguous", where, "warning", s.arrived, f"{where}: {first(s.evidence)}", todo)
    for fault in scene.catalogue.faults:
        todo = "`ckptsync verify` says what it was of; a newer version's record wants a newer ckptsync"
        yield Alarm("unreadable", fault.name, "critical", None, f"{fault.name}: {fault.error}", todo)


def _damaged(s: Summary, where: str, lacking: Sequence[str]) -> Alarm:
    if set(s.nodes) <= set(lacking):
        text = f"{where}: {first(s.evidence)}; {those(lacking)} no longer {'has' if len(lacking) == 1 else 'have'} its bytes"
        todo = "`ckptsync repair` says what is lost by it; an earlier checkpoint may serve"
    else:
        text = f"{where}: {first(s.evidence)}"
        todo = f"`ckptsync repair` says who can send it again; {those(s.nodes)} would, if their services run"
    return Alarm("damaged", where, "critical", s.proof.said, text, todo)


def lacking(s: Summary, nodes: Sequence[Node]) -> tuple[str, ...]:
    """Of a damaged location the nodes that cannot send again what a report asks for."""
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
            todo = f"look at the training on {those(run.nodes)}, then at `journalctl -u 'ckptsync-worker@*'` there"
            yield Alarm("stalled", run.run, "critical" if gone else "warning", run.newest.ended + run.every, text, todo)


def _store(scene: Scene) -> Iterator[Alarm]:
    room = scene.room
    if room is None:
        return
    largest = max((s.size + s.model_size for s in scene.catalogue.summaries), default=0)
    if room.free < max(2 * largest, room.total // 50):
        text = f"the store: {free_of(room.free, room.total)}, where a checkpoint with its model takes up to {show_size(largest)}"
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
                text = f"{where}: not whole {show_duration(waited)} after its last part: {first(location.lost)}"
                text += f"; {those(dead)} {'does' if len(dead) == 1 else 'do'} not live" if dead else ""
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
