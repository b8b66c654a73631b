"""Checks of the launch: its variables, MASTER_ADDR, and the interfaces of NCCL and Gloo.

A launch whose nodes disagree does not fail but waits until the rendezvous times out; these checks
say before which variable is wrong.  Each takes the facts of one node or of several, and yields
findings.  Imports the standard library alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from ipaddress import ip_address

from ckptsync.doctor.facts import NodeFacts, find_difference, group_by, share_a_network
from ckptsync.doctor.findings import Finding, fail, warn

_EQUAL = (
    "NNODES",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "RDZV_ID",
    "MIN_NNODES",
    "MAX_NNODES",
)
_SWITCHES = ("USE_RAY", "USE_V1", "FORCE_TORCHRUN")
# what a launch with NNODES must say on each node, and what happens without
_NEEDED = {
    "NNODES": "the node starts a separate training",
    "NODE_RANK": "the node takes rank 0, as other nodes do",
    "MASTER_ADDR": "LLaMA-Factory looks for rank 0 on the node itself (127.0.0.1)",
    "MASTER_PORT": "LLaMA-Factory takes another free port on each node",
}
_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_COMPARED = ("NCCL_", "RCCL_", "GLOO_", "TORCH_NCCL_", "OMP_")
# Two ends agree by these on how they talk (NCCL, "Environment Variables").
_MUST_EQUAL = (
    "NCCL_IB_DISABLE",
    "NCCL_NET",
    "NCCL_NET_PLUGIN",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_SOCKET_FAMILY",
    "NCCL_COMM_ID",
    "NCCL_CROSS_NIC",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_NCHANNELS",
)
_PER_NODE = (
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
    "NCCL_IB_HCA",
    "NCCL_CONF_FILE",
    "NCCL_TOPO_FILE",
)
_MAY_DIFFER = (
    "NCCL_HOSTID",
    "NCCL_DEBUG",
    "GLOO_LOG",
    "TORCH_NCCL_DEBUG",
    "TORCH_NCCL_TRACE",
    "TORCH_NCCL_DUMP",
)
_LINKS = {
    "mtu": "large messages are lost on the way to the smaller one",
    "speed": "the slowest link slows all nodes",
}
_DOWN = ("down", "lowerlayerdown")
_WAITS = "the ranks wait for each other until the rendezvous times out"
_NO_REACH = "the nodes do not reach each other in the first collective"
_RANK_HINT = "number the nodes from 0 on, each once"


def compare_counts(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Yield a failure if more or fewer nodes published facts than NNODES, the greatest, says.

    Fewer are none in an elastic launch.  Yields nothing if any node is under Ray, or in a
    training that has begun.
    """
    if any(node.within for node in nodes):
        return
    expected = max(map(_count, nodes), default=0)
    what = f"NNODES is {expected}, {len(nodes)} nodes published here"
    if len(nodes) < expected and not any(map(_is_elastic, nodes)):
        why = "a node cannot reach the store, has another disk at its path, or did not run doctor"
        hint = "run `ckptsync doctor --publish` on each node, then compare again"
        yield fail("nodes-missing", "NNODES", what, why=why, hint=hint, nodes=_names(nodes))
    if 0 < expected < len(nodes):
        why = "the launcher starts NNODES nodes, and leaves the others out, or hangs"
        hint = f"set NNODES={len(nodes)}, or compare again when the others' facts are an hour old"
        yield fail("nodes-too-many", "NNODES", what, why=why, hint=hint, nodes=_names(nodes))


def compare_variables(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Yield a failure if a launch variable differs between nodes, or two nodes have one NODE_RANK.

    Also what `_compare_world` yields.  Yields nothing if any node is under Ray, or in a training
    that has begun.
    """
    if any(node.within for node in nodes):
        return
    for name in (*_EQUAL, *_SWITCHES):
        if not _mean_the_same(name, nodes):
            hint = f"export the same {name} on all nodes"
            yield from find_difference(
                fail, "launch-differs", name, nodes, _variable(name), why=_WAITS, hint=hint
            )
    ranked = [n for n in nodes if not _is_elastic(n) and n.variable("NODE_RANK")]
    for rank, names in group_by(ranked, _variable("NODE_RANK")).items():
        if len(names) > 1:
            what = f"{rank} on each of them"
            yield fail("node-rank", "NODE_RANK", what, why=_WAITS, hint=_RANK_HINT, nodes=names)
    yield from _compare_world(nodes)


def _compare_world(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Yield a failure if WORLD_SIZE is neither the sum of NPROC_PER_NODE nor the number of nodes.

    Yields nothing unless it has one value, each node has NPROC_PER_NODE, and NNODES published.
    """
    worlds = {world for n in nodes if (world := n.variable("WORLD_SIZE")).isdecimal()}
    each = [n.variable("NPROC_PER_NODE") for n in nodes]
    if len(worlds) != 1 or not all(e.isdecimal() for e in each) or len(nodes) != _count(nodes[0]):
        return
    world, total = worlds.pop(), sum(map(int, each))
    if int(world) not in (total, len(nodes)):  # some launchers of clusters count nodes in it
        what, hint = f"{world}, while NPROC_PER_NODE makes {total} ranks", "unset WORLD_SIZE"
        yield fail("world-size", "WORLD_SIZE", what, why=_WAITS, hint=hint, nodes=_names(nodes))


def _mean_the_same(name: str, nodes: Sequence[NodeFacts]) -> bool:
    """Return whether a variable means the same on all nodes, even if its texts differ.

    A switch may be written in two ways, and a host as its name or its address.  Else False.
    """
    if name in _SWITCHES:
        return len({node.is_on(name) for node in nodes}) == 1
    return name == "MASTER_ADDR" and bool(set.intersection(*(set(node.master) for node in nodes)))


def check_launch(node: NodeFacts, nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Yield the findings on the launch variables of one node.

    Yields nothing if it trains alone or under Ray, or if the training has begun.

    ``nodes``: all nodes with facts, this one among them.
    """
    is_alone = len(nodes) < 2 and _count(node) < 2
    if is_alone or any(each.within for each in nodes):
        return
    # Ray gives its workers a NODE_RANK, too, but with their WORLD_SIZE
    rank = node.variable("NODE_RANK")
    is_numbered = node.variable("NNODES") or (rank and not node.variable("WORLD_SIZE"))
    if is_numbered and not _is_elastic(node):
        yield from _check_missing(node, nodes)
        if rank and (not rank.isdecimal() or 0 < _count(node) <= int(rank)):
            what = f"{rank}, 0 to {_count(node) - 1} expected"
            yield fail("node-rank", "NODE_RANK", what, why=_WAITS, hint=_RANK_HINT)
    if node.variable("MASTER_ADDR"):
        yield from _check_master(node, nodes)


def _check_missing(node: NodeFacts, nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Yield a failure for each variable of `_NEEDED` that a node lacks.

    It is only a warning if no node has it, since it may be on torchrun's command line.
    LLaMA-Factory reads variables alone, so there it is a failure.
    """
    for name, why in _NEEDED.items():
        if not node.variable(name):
            is_read = "llamafactory" in node.versions or any(n.variable(name) for n in nodes)
            level, option = (fail, "") if is_read else (warn, ", or give it on the command line")
            hint = f"export {name} before the launch{option}"
            yield level("launch-missing", name, "not set", why=f"{why}: {_WAITS}", hint=hint)


def _check_master(node: NodeFacts, nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Yield a failure if MASTER_ADDR is not node 0's own address, or its port cannot be used.

    At most one: unknown, loopback, not node 0's, taken (on node 0), or silent (on the others).
    """
    address, port = node.variable("MASTER_ADDR"), node.variable("MASTER_PORT")
    addresses, is_one_machine = ", ".join(node.master), len(nodes) > 1 and share_a_network(nodes)
    is_loop = node.master and all(map(is_loopback, node.master))
    subject = "MASTER_ADDR"
    if not node.master:
        what = f"{address} is not known here"
        hint = "use an address, or put the name into /etc/hosts of all nodes"
        yield fail("master-unknown", subject, what, why=_WAITS, hint=hint)
    elif is_loop and not is_one_machine and not _is_own_name(address, node):
        what = f"{address} is {addresses} here, which no other node reaches"
        hint = "use node 0's address in the network that the nodes share (see /etc/hosts)"
        yield fail("master-loopback", subject, what, why=_WAITS, hint=hint)
    elif node.variable("NODE_RANK") == "0":
        if node.is_master is False:
            what = f"{address} ({addresses}) is no address of node 0"
            hint = "set it to node 0's own address, or give this node another NODE_RANK"
            yield fail("master-elsewhere", subject, what, why=_WAITS, hint=hint)
        elif node.port == "taken":
            what = f"{port} is in use on node 0"
            why = "rank 0 cannot listen there: the launch fails, or joins an earlier training"
            hint = f"choose another port; `ss -ltnp 'sport = :{port}'` shows the program"
            yield fail("port-taken", "MASTER_PORT", what, why=why, hint=hint)
    elif node.port in ("silent", "unreachable"):
        what = f"{address}:{port} does not answer ({node.port})"
        hint = "open that port on node 0, and all ports between the nodes: NCCL uses any"
        yield fail("master-unreachable", subject, what, why=_WAITS, hint=hint)


def _count(node: NodeFacts) -> int:
    """Return NNODES, its upper end for an elastic launch; 0 if it is not set."""
    text = node.variable("NNODES").rpartition(":")[2]  # 1:4 where the launch is elastic
    return int(text) if text.isdecimal() and len(text) < 9 else 0


def _is_elastic(node: NodeFacts) -> bool:
    """Return whether the launch may begin with fewer nodes, as ``1:4`` in NNODES or RDZV_ID say."""
    is_named = any(node.variable(name) for name in ("RDZV_ID", "MIN_NNODES", "MAX_NNODES"))
    return is_named or ":" in node.variable("NNODES")


def _is_own_name(address: str, node: NodeFacts) -> bool:
    """Return whether an address is node 0's own name, on node 0.

    Up to the first dot. Debian calls its own name 127.0.1.1: rank 0 listens on all addresses there,
    and each other node looks the name up for itself.
    """
    host, master = (name.partition(".")[0].lower() for name in (node.host, address))
    is_first = node.variables.get("NODE_RANK", "0") == "0"
    return host == master and host not in ("", "localhost") and is_first


def is_loopback(address: str) -> bool:
    """Return whether an address reaches only the machine itself, as 127.0.0.1 or 0.0.0.0."""
    try:
        ip = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    return ip.is_loopback or ip.is_unspecified


def _names(nodes: Sequence[NodeFacts]) -> tuple[str, ...]:
    """Return the sorted names of nodes, each once."""
    return tuple(sorted({node.name for node in nodes}))


def check_interfaces(node: NodeFacts) -> Iterator[Finding]:
    """Yield a failure if an interface in a variable does not exist, is down or has no address.

    Those that Gloo or TensorPipe names must all exist; one that is up and has an address is
    enough.  Yields nothing without facts about them.
    """
    show = "name the interface that `ip -br addr` shows with this node's address"
    for name in _INTERFACES if node.interfaces else ():
        if not (text := node.variable(name)):
            continue
        chosen = _chosen_interfaces(name, node)
        outer = [interface for interface in chosen if interface != "lo"]
        # Gloo and TensorPipe need each interface that is named, NCCL any of them
        each = (
            []
            if name.startswith("NCCL_")
            else [interface for interface in text.split(",") if interface]
        )
        absent = [interface for interface in each if interface not in node.interfaces]
        if not chosen or absent:
            existing = ", ".join(sorted(node.interfaces))
            what = f"{', '.join(absent) or text}: not found among {existing}"
            yield fail("interface-missing", name, what, why=_NO_REACH, hint=show)
        elif all(node.interfaces[interface].get("state") in _DOWN for interface in chosen):
            what, hint = f"{', '.join(chosen)}: the link is down", "bring it up, or name another"
            yield fail("interface-down", name, what, why=_NO_REACH, hint=hint)
        elif outer and all(
            node.interfaces[interface].get("address") == "no" for interface in outer
        ):
            what, hint = f"{', '.join(chosen)}: it has no address", f"give it one, or {show}"
            yield fail("interface-bare", name, what, why=_NO_REACH, hint=hint)


def compare_reachable(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Yield a finding for each node that gives the others an address that only it can reach.

    Yields nothing if all nodes are one machine.
    """
    for node in () if share_a_network(nodes) else nodes:
        yield from (finding.on(node.name) for finding in _check_reachable(node))


def _check_reachable(node: NodeFacts) -> Iterator[Finding]:
    """Yield a failure if the only chosen interface is loopback.

    Yield a warning if NCCL may choose it, or if the host's name has loopback addresses only and
    GLOO_SOCKET_IFNAME is not set.
    """
    for name in _INTERFACES:
        text = node.variable(name)
        chosen = _chosen_interfaces(name, node) if text else []
        if chosen == ["lo"]:
            what = "lo, which no other node reaches"
            hint = "name the interface of the network that the nodes share"
            yield fail("interface-loopback", name, what, why=_NO_REACH, hint=hint)
        elif "lo" in chosen and text.startswith("^"):
            what = f"{text} leaves lo, which no other node reaches"
            why = "NCCL takes lo unless it is excluded, too (aws/deep-learning-containers#4756)"
            hint = f"export {name}={text},lo"
            yield warn("interface-loopback", name, what, why=why, hint=hint)
    is_loop = node.addresses and all(map(is_loopback, node.addresses))
    if is_loop and not node.variable("GLOO_SOCKET_IFNAME"):
        what = f"{node.host} is {', '.join(node.addresses)} on {node.name} itself"
        why = "Gloo gives other nodes the address of the host's name: they reach themselves"
        hint = "export GLOO_SOCKET_IFNAME, or give the name its real address in /etc/hosts"
        yield warn("host-loopback", "/etc/hosts", what, why=why, hint=hint)


def compare_network(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Yield a finding for each variable of NCCL, Gloo or OpenMP that differs between nodes.

    It is a failure for the variables of `_MUST_EQUAL`, else a warning.  Variables of `_MAY_DIFFER`
    are not compared, nor those of `_PER_NODE` if all nodes set them.
    """
    variables = {name for node in nodes for name in node.variables if name.startswith(_COMPARED)}
    for name in sorted(variables):
        is_set = all(node.variable(name) for node in nodes)
        if name.startswith(_MAY_DIFFER) or (name in _PER_NODE and is_set):
            continue
        level, why = warn, "nodes may hang, or one slows the others down"
        if name in _MUST_EQUAL:
            level, why = fail, "NCCL hangs if nodes use different values"
        value, hint = _variable(name, "not set"), f"export the same {name} on all nodes"
        yield from find_difference(level, "network-differs", name, nodes, value, why=why, hint=hint)


def compare_links(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Yield a warning for NCCL's and Gloo's interfaces each, if their MTU or speed differs.

    Nodes whose interfaces or value are unknown are not compared.
    """
    hint = "use like interfaces, with one MTU"
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        for link_property, why in _LINKS.items():
            value, subject = (
                partial(_describe_links, name, link_property),
                f"{name}: {link_property}",
            )
            having = filter(value, nodes)
            yield from find_difference(
                warn, "links-differ", subject, having, value, why=why, hint=hint
            )


def _variable(name: str, default: str = "") -> Callable[[NodeFacts], str]:
    """Return a function from a node to a variable, or to ``default`` if that is unset or empty."""
    return lambda node: node.variable(name) or default


def _describe_links(variable: str, key: str, node: NodeFacts) -> str:
    """Return the MTUs or speeds of the interfaces that a variable names, each once, with commas.

    ``key``: a key of `_LINKS`. Interfaces that are down, loopback and unknown values are left out.
    "" if nothing is left, if the variable is not set, and if it begins with ``^``: then it is
    unknown what it chooses.
    """
    text = node.variable(variable)
    chosen = _chosen_interfaces(variable, node) if text and not text.startswith("^") else []
    links = [node.interfaces[interface] for interface in chosen if interface != "lo"]
    values = {link.get(key, "") for link in links if link.get("state") != "down"}
    return ", ".join(sorted(values - {"", "-1", "0", "4294967295"}))


def _chosen_interfaces(variable: str, node: NodeFacts) -> list[str]:
    """Return the existing interfaces that a variable, which must be set, chooses; sorted.

    NCCL takes names as prefixes, unless ``=`` precedes them, and all but these after ``^``; Gloo
    and TensorPipe take names.
    """
    text, is_nccl = node.variables[variable], variable.startswith("NCCL_")
    names = tuple(part for part in text.lstrip("^=").split(",") if part)
    is_exact = not is_nccl or text.startswith(("=", "^="))
    hits = {n for n in node.interfaces if (n in names if is_exact else n.startswith(names))}
    is_excluding = is_nccl and text.startswith("^")
    return sorted(set(node.interfaces) - hits if is_excluding else hits)
