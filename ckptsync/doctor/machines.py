"""Machines beside each other: who they are, their clocks, and whether one path is one disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

from ckptsync.doctor.findings import STORAGE, Finding, Level
from ckptsync.doctor.launching import is_loopback
from ckptsync.doctor.nodes import Node, grouped, is_true, share_a_network, told
from ckptsync.units import show_duration

SKEW_WARN, SKEW_FAIL = 1.0, 30.0  # seconds
_SAVES = "the times of one save are compared between nodes, S3 refuses what is signed a quarter of an hour off, and logs do not fit together"


def clock(node: Node) -> Iterator[Finding]:
    """A node's clock beside the store's."""
    if node.clock is not None and abs(node.clock) > SKEW_WARN:
        what = f"{show_duration(abs(node.clock))} {'ahead of' if node.clock > 0 else 'behind'} the store's"
        yield _skew(abs(node.clock), (node.name,), what)


def clocks(nodes: Sequence[Node]) -> Iterator[Finding]:
    """The two that are farthest from each other."""
    known = sorted((node.clock, node.name) for node in nodes if node.clock is not None)
    if known and known[-1][0] - known[0][0] > SKEW_WARN:
        apart = known[-1][0] - known[0][0]
        behind, ahead = known[0][1], known[-1][1]
        yield _skew(apart, tuple(sorted((behind, ahead))), f"{show_duration(apart)} apart, {behind} behind {ahead}")


def _skew(seconds: float, names: tuple[str, ...], what: str) -> Finding:
    level: Level = "fail" if seconds > SKEW_FAIL else "warn"
    hint = "let chrony or systemd-timesyncd set it: `timedatectl set-ntp true`"
    return Finding(level, "clock", names, "the clock", what, _SAVES, hint)


def confused(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Machines that share a name or an id.  Containers and namespaces of one machine do, and are told apart by what they were named."""
    for what, value, why, hint in _IDENTITIES:
        groups = grouped((n for n in nodes if value(n)), value)
        for shared, names in groups.items():
            if len({node.boot for node in nodes if node.name in names and node.boot}) > 1:
                yield Finding("warn", "identity-shared", names, what, f"{shared} on each of them", why, hint)


def _reached_at(node: Node) -> str:
    """Where the host's own name leads, as others would be told."""
    return ", ".join(address for address in node.addresses if not is_loopback(address))


_IDENTITIES: tuple[tuple[str, Callable[[Node], str], str, str], ...] = (
    (
        "the host name",
        lambda node: node.host,
        "logs, Ray and torchrun name nodes by it; whose checkpoint is whose cannot be told",
        "`hostnamectl hostname NAME`, another on each",
    ),
    (
        "/etc/machine-id",
        lambda node: node.machine,
        "a cloned image: what takes it for the machine (ckptsync's node id, DHCP, journald) takes two for one",
        "rm /etc/machine-id && systemd-machine-id-setup, on all but one",
    ),
    (
        "the address of the host's name",
        _reached_at,
        "who connects to another node by it reaches itself: containers have it, each behind a bridge of its own, or a network has one address twice",
        "`--network=host` for containers; else another address on each",
    ),
)


def places(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Output directories: one string everywhere, but for nodes that are one machine, and one disk for all nodes or one for each."""
    groups = grouped((n for n in nodes if n.places), lambda node: ", ".join(sorted(node.places)))
    if len(groups) > 1 and not share_a_network(nodes):
        names = tuple(name for found in groups.values() for name in found)
        why = "rank 0 tells the others where to resume from, and each looks at its own path; runs get different names in the store"
        yield Finding("warn", "output-differs", names, "output_dir", told(groups), why, "give all nodes the same absolute path")
    for path in sorted({path for node in nodes for path in node.places}):
        yield from _disks(path, sorted((n for n in nodes if path in n.places and n.places[path].nonce), key=lambda n: n.name))


def _disks(path: str, nodes: Sequence[Node]) -> Iterator[Finding]:
    pairs = {(a.name, b.name): _is_shared(path, a, b) for a, b in combinations(nodes, 2)}
    shared = [pair for pair, is_one in pairs.items() if is_one]
    apart = [pair for pair, is_one in pairs.items() if not is_one]
    names = tuple(node.name for node in nodes)
    if shared and apart:
        together = {name for pair in shared for name in pair}
        what = (
            f"one disk for {', '.join(sorted(together))}, another for {', '.join(sorted(set(names) - together)) or 'some of them'}"
        )
        why = "trainers take an output directory for shared, or for each node's own: what they leave out is nowhere then"
        yield Finding(
            "fail", "disk-differs", names, path, what, why, "mount the same file system on all nodes, or on none", STORAGE
        )
    elif apart and len({bool(node.places[path].server) for node in nodes}) > 1:
        what = told(grouped(nodes, lambda node: node.places[path].server or "a disk of the node's own"))
        why = "a mount is missing: what the nodes mean to share lies on one machine's own disk"
        yield Finding(
            "fail", "disk-differs", names, path, what, why, "mount the same file system on all nodes, or on none", STORAGE
        )
    elif shared and len({node.uid for node in nodes if node.uid is not None}) > 1:
        what = told(grouped(nodes, lambda node: f"uid {node.uid} ({node.user})"))
        why = "what one node writes another may not read, replace or rotate: safetensors 0.8 and newer write files for their owner alone"
        yield Finding("warn", "users-differ", names, path, what, why, "train as one user on all nodes")
    elif shared and any(is_true(node.training.get("save_on_each_node", "")) for node in nodes):
        why = "every node writes the same names into one directory: a shard may be lost in silence"
        hint = "set save_on_each_node: false, or give each node a disk of its own"
        yield Finding("fail", "disk-shared", names, path, "shared by the nodes, and save_on_each_node is set", why, hint)


def _is_shared(path: str, a: Node, b: Node) -> bool:
    """Whoever gathered later sees the other's word."""
    return a.places[path].nonce in b.places[path].seen or b.places[path].nonce in a.places[path].seen


def models(nodes: Sequence[Node]) -> Iterator[Finding]:
    """The model that is trained: its configuration and the sizes of its files."""
    groups = grouped((n for n in nodes if n.model), lambda node: node.digest)
    if len(groups) > 1:
        names = tuple(name for found in groups.values() for name in found)
        why = "ranks begin with other weights or shapes: they fail, hang, or train something that nobody has"
        yield Finding(
            "warn", "model-differs", names, "the base model", told(groups), why, "copy the model again, to all nodes alike"
        )
