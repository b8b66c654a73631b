"""The table of checks: which look at one node's facts, and which compare the nodes that train together.  Needs nothing but the standard library."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ckptsync.doctor import launch, machines, versions
from ckptsync.doctor.findings import Finding, in_order
from ckptsync.doctor.nodes import Node, read, share_a_network

OF_ONE_NODE: tuple[Callable[[Node], Iterator[Finding]], ...] = (
    machines.check_gpus,
    machines.check_limits,
    machines.check_clock,
    launch.check_interfaces,
    versions.check_versions,
)
BETWEEN_NODES: tuple[Callable[[Sequence[Node]], Iterator[Finding]], ...] = (
    versions.compare_versions,
    machines.compare_gpus,
    launch.compare_network,
    machines.compare_clocks,
    machines.compare_identities,
    machines.compare_outputs,
    machines.compare_models,
)


def compare(facts: Iterable[Mapping[str, Any]]) -> tuple[Finding, ...]:
    """Return what is wrong with nodes that are to train together, failures first.

    ``facts``: of one node or more, as `ckptsync.doctor.probe.gather` gives them.  Of several processes on a node (one id, one boot) the first counts.
    """
    nodes = list({(node.name, node.boot): node for node in reversed([read(one) for one in facts])}.values())[::-1]
    return in_order([*(finding for node in nodes for finding in _of_one(node)), *launch.compare_launch(nodes), *_between(nodes)])


def alone(facts: Mapping[str, Any]) -> tuple[Finding, ...]:
    """Return what is wrong with a node whoever else there is."""
    node = read(facts)
    return in_order([*_of_one(node), *launch.check_launch(node)])


def _of_one(node: Node) -> Iterator[Finding]:
    for check in OF_ONE_NODE:
        yield from check(node)


def _between(nodes: Sequence[Node]) -> Iterator[Finding]:
    if len(nodes) < 2:
        return
    for node in [] if share_a_network(nodes) else nodes:
        yield from launch.check_reachable(node)
    for check in BETWEEN_NODES:
        yield from check(nodes)
