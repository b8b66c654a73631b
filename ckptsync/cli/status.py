"""``ckptsync status``: what a store's nodes and heads are doing, and what is missing."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptsync.catalogue.reading import read
from ckptsync.catalogue.summary import Catalogue
from ckptsync.cli import output, places
from ckptsync.config.units import show_duration, show_size
from ckptsync.daemon.identity import machine
from ckptsync.errors import Corrupt
from ckptsync.fleet import heartbeat
from ckptsync.fleet.heartbeat import Disk, Heartbeat
from ckptsync.stores.contract import Store

EVERY = 2.0  # seconds between two drawings of --watch
SILENT = 4  # periods without a beat
HEADING = ("NODE", "ROLES", "STATE", "LAST BEAT", "ON THE WAY", "OLDEST", "RATE", "LAST ERROR")
DISKS = ("NODE", "DIRECTORY", "WATCHED BY", "FREE", "ONLY PINNED", "BUDGET")
MOST = 20  # directories that are shown


@dataclass(frozen=True, slots=True)
class NodeState:
    """A node by its heartbeat; ``age`` in seconds on the store's clock.  ``state``: alive, stopped, silent or unreadable.

    ``oldest``: seconds for which the first of the queue has waited, ``rate``: bytes a second, both when it last beat.
    """

    node: str
    roles: tuple[str, ...]
    state: str
    age: float
    queue: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    version: str = ""
    oldest: float = 0.0
    rate: float = 0.0
    sent_bytes: int = 0
    disk: tuple[Disk, ...] = ()
    watch: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def run(args: argparse.Namespace) -> int:
    """Once, or again and again until it is interrupted."""
    store = places.asked_store(args)
    if args.watch:
        return _watch(store, as_json=args.json)
    return _once(store, as_json=args.json)


def node_states(store: Store, now: float) -> list[NodeState]:
    """Every node that has ever beaten, by name."""
    known = list(heartbeat.listed(store))
    there = heartbeat.store_now([(e, h) for e, h in known if isinstance(h, Heartbeat)], machine(), now)
    return [node_state(entry.name, heart, max(0.0, there - entry.mtime)) for entry, heart in known]


def node_state(name: str, heart: Heartbeat | Corrupt, age: float) -> NodeState:
    """Pure."""
    plain = name.rpartition("/")[2].removesuffix(".json")
    if isinstance(heart, Corrupt):
        return NodeState(plain, (), "unreadable", age, errors=(str(heart),))
    state = "stopped" if heart.stopped else "silent" if age > SILENT * heart.period else "alive"
    told = {key: getattr(heart, key) for key in ("oldest", "rate", "sent_bytes", "disk", "watch", "notes")}
    return NodeState(heart.node, heart.roles, state, age, heart.queue, heart.errors, heart.version, **told)


def _once(store: Store, *, as_json: bool) -> int:
    nodes, found = node_states(store, time.time()), read(store)
    if as_json:
        output.print_json(_described(store, nodes, found))
    else:
        for line in lines(store, nodes, found):
            print(output.painted(line) if sys.stdout.isatty() else line)
    return places.exit_code(found)


def _described(store: Store, nodes: Iterable[NodeState], found: Catalogue) -> dict[str, Any]:
    described = [places.described(store, snapshot) for snapshot in found.summaries]
    return {"store": store.url, "nodes": list(nodes), "places": described, "unreadable": places.fault_lines(found)}


def lines(store: Store, nodes: list[NodeState], found: Catalogue) -> list[str]:
    """Tables: the nodes, their output directories and what an operator should know of them, and the places with what is missing."""
    rows = [_row(node) for node in nodes]
    disks = [row for node in nodes for row in _disk_rows(node)]
    shown = [places.row(store, snapshot) for snapshot in found.summaries]
    return [
        f"store {output.clean(store.url)}",
        "",
        *(output.aligned([HEADING, *rows]) if rows else ["no node has been seen here"]),
        *(["", *output.aligned([DISKS, *disks[:MOST]])] if disks else []),
        *([f"and {len(disks) - MOST} more"] if len(disks) > MOST else []),
        *(output.clean(f"note: {node.node}: {note}") for node in nodes if node.state != "stopped" for note in node.notes),
        "",
        *(output.aligned([places.HEADING, *shown]) if shown else ["no checkpoints yet"]),
        *(output.clean(f"unreadable: {line}") for line in places.fault_lines(found)),
    ]


def _row(node: NodeState) -> list[str]:
    return [
        node.node,
        "+".join(node.roles),
        node.state,
        f"{show_duration(round(node.age))} ago",
        places.first_of(node.queue),
        show_duration(round(node.oldest)) if node.queue else "-",
        f"{show_size(round(node.rate))}/s" if node.rate >= 1 else "-",
        places.first_of(node.errors),
    ]


def _disk_rows(node: NodeState) -> list[list[str]]:
    """Of a node that lives: how its output directories are watched, and how full their disks are."""
    return [
        [
            node.node,
            disk.path,
            node.watch.get(disk.path, "-"),
            f"{show_size(disk.free)} of {show_size(disk.total)}",
            show_size(disk.spool),
            show_size(disk.budget) if disk.budget else "-",
        ]
        for disk in node.disk
        if node.state != "stopped"
    ]


def _watch(store: Store, *, as_json: bool) -> int:
    if as_json or not sys.stdout.isatty():
        while True:
            _once(store, as_json=as_json)
            time.sleep(EVERY)
    from rich.live import Live
    from rich.text import Text

    with Live(auto_refresh=False, screen=True) as live:
        while True:
            drawn = lines(store, node_states(store, time.time()), read(store))
            live.update(Text.from_ansi("\n".join(map(output.painted, drawn))), refresh=True)
            time.sleep(EVERY)
