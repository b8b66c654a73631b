"""Facts in, findings out: what each node shows alone, and what nodes that train together show beside each other.  Needs nothing but the standard library."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ckptsync.doctor import gpus, known, launching, machines, networking, versions
from ckptsync.doctor.findings import Finding, in_order
from ckptsync.doctor.nodes import Node, read, share_a_network


def compare(facts: Iterable[Mapping[str, Any]]) -> tuple[Finding, ...]:
    """What is wrong with nodes that are to train together, failures first; ``facts`` as `ckptsync.doctor.probe.gather` gives them, one node or more.

    Of several processes on a node (one id, one boot) the first speaks for it.
    """
    nodes = list({(node.name, node.boot): node for node in reversed([read(one) for one in facts])}.values())[::-1]
    return in_order(_all(nodes))


def alone(facts: Mapping[str, Any]) -> tuple[Finding, ...]:
    """What is wrong with a node whoever else there is."""
    node = read(facts)
    return in_order([*_each(node), *launching.misled_alone(node)])


def _all(nodes: Sequence[Node]) -> Iterator[Finding]:
    for node in nodes:
        yield from _each(node)
    yield from launching.misled(nodes)
    if len(nodes) < 2:
        return
    for node in [] if share_a_network(nodes) else nodes:
        yield from networking.reaching(node)
    for compared in (
        versions.differing,
        gpus.unequal,
        networking.differing,
        machines.clocks,
        machines.confused,
        machines.places,
        machines.models,
    ):
        yield from compared(nodes)


def _each(node: Node) -> Iterator[Finding]:
    yield from gpus.alone(node)
    yield from networking.alone(node)
    yield from known.misbehaving(node)
    yield from known.scarce(node)
    yield from machines.clock(node)
