"""The alarms of nodes and their disks.  Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptsync.catalogue.summary import Summary
from ckptsync.fleet.alarms import Alarm
from ckptsync.fleet.heartbeat import Disk
from ckptsync.fleet.scene import Scene, first, free_of
from ckptsync.units import show_duration, show_size

SKEW = 10.0  # seconds
FULL = (
    "no space left",
    "disk is full",
    "quota exceeded",
    "storagefull",
    "insufficient storage",
)  # as systems and servers say it, in lower case


def of_nodes(scene: Scene) -> Iterator[Alarm]:
    """All of them."""
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
            yield Alarm("unreadable", node.name, "warning", node.beat, f"heartbeat of {node.name}: {first(node.errors)}", todo)


def _lost(scene: Scene) -> Iterator[Alarm]:
    for node in scene.nodes:
        if node.state == "silent" and scene.patience.node < node.age < scene.patience.over:
            waiting = [f"{r.run}/{p.location}" for r in scene.runs for p in r.arriving if node.node in p.awaited]
            work = tuple(dict.fromkeys((*node.queue, *waiting)))
            had = f", and it has {first(work)}" if work else ""
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
                text = f"{where}: {free_of(disk.free, disk.total)}{f', where a save takes {show_size(save)}' if save else ''}"
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
            yield Alarm("no-space", node.name, "critical", None, f"{node.name}: {first(said)}", "make room where the error says")


def _waiting(scene: Scene) -> Iterator[Alarm]:
    for node in scene.alive:
        if node.queue and node.oldest > scene.patience.slow:
            error = f"; {first(node.errors)}" if node.errors else ""
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
