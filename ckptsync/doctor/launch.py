"""Checks of how nodes find each other: the launch variables, MASTER_ADDR, and the interfaces that NCCL and Gloo use.

Each check takes the facts of one node or of several, and yields findings.  Needs the standard library alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from ipaddress import ip_address

from ckptsync.doctor.facts import Finding, Node, fail, grouped, is_true, names_of, share_a_network, show, warn

_EQUAL = ("NNODES", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RDZV_ID", "MIN_NNODES", "MAX_NNODES")
_SWITCHES = ("USE_RAY", "USE_V1", "FORCE_TORCHRUN")
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
_PER_NODE = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_CONF_FILE", "NCCL_TOPO_FILE")
_MAY_DIFFER = ("NCCL_HOSTID", "NCCL_DEBUG", "GLOO_LOG", "TORCH_NCCL_DEBUG", "TORCH_NCCL_TRACE", "TORCH_NCCL_DUMP")
_WAITS = "the ranks wait for each other until the rendezvous times out"
_NO_REACH = "the nodes do not reach each other in the first collective"
_RANK_HINT = "number the nodes from 0 on, each once"


def compare_launch(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Check the launch variables of the nodes that train together.  Under Ray, and in a training that has begun, there is nothing to judge."""
    if not nodes or any(node.within for node in nodes):
        return
    for name in (*_EQUAL, *_SWITCHES):
        groups = grouped(nodes, _variable(name))
        if len(groups) > 1 and not _mean_the_same(name, nodes):
            yield fail("launch-differs", _all(nodes), name, show(groups), why=_WAITS, hint=f"export the same {name} on all nodes")
    yield from _check_count(nodes)
    yield from _check_ranks(nodes)
    for node in nodes:
        yield from check_launch(node, nodes)


def check_launch(node: Node, known: Sequence[Node]) -> Iterator[Finding]:
    """Check what one node is told of the others.  ``known``: all nodes whose facts are there, this one among them."""
    if len(known) < 2 and _count(node) < 2:
        return
    is_numbered = node.variables.get("NNODES") or (node.variables.get("NODE_RANK") and not node.variables.get("WORLD_SIZE"))
    if is_numbered and not _is_elastic(node):  # Ray tells its workers a NODE_RANK, too, but with their WORLD_SIZE
        yield from _check_missing(node, known)
        rank = node.variables.get("NODE_RANK", "")
        if rank and (not rank.isdecimal() or 0 < _count(node) <= int(rank)):
            what = f"{rank}, 0 to {_count(node) - 1} expected"
            yield fail("node-rank", node.name, "NODE_RANK", what, why=_WAITS, hint=_RANK_HINT)
    yield from _check_master(node, known)


def _check_missing(node: Node, known: Sequence[Node]) -> Iterator[Finding]:
    """A variable that no node has may be given on torchrun's command line; LLaMA-Factory reads variables alone."""
    for name, why in (
        ("NNODES", "it starts a training of its own"),
        ("NODE_RANK", "it takes itself for node 0, as others do"),
        ("MASTER_ADDR", "LLaMA-Factory looks for rank 0 on the node itself (127.0.0.1)"),
        ("MASTER_PORT", "LLaMA-Factory takes another free port on each node"),
    ):
        if not node.variables.get(name):
            is_read = "llamafactory" in node.versions or any(other.variables.get(name) for other in known)
            hint = f"export {name} before the launch" + ("" if is_read else ", unless a command line says it")
            yield (fail if is_read else warn)("launch-missing", node.name, name, "not set", why=f"{why}: {_WAITS}", hint=hint)


def _check_master(node: Node, known: Sequence[Node]) -> Iterator[Finding]:
    address, port = node.variables.get("MASTER_ADDR", ""), node.variables.get("MASTER_PORT", "")
    is_one_machine = len(known) > 1 and share_a_network(known)
    if not address:
        return
    if not node.master:
        hint = "use an address, or put the name into /etc/hosts of all nodes"
        yield fail("master-unknown", node.name, "MASTER_ADDR", f"{address} is not known here", why=_WAITS, hint=hint)
    elif all(map(is_loopback, node.master)) and not is_one_machine and not _is_own_name(address, node):
        what = f"{address} is {', '.join(node.master)} here, which no other node reaches"
        hint = "use the address of node 0 in the network that the nodes share; /etc/hosts may name the host 127.0.1.1"
        yield fail("master-loopback", node.name, "MASTER_ADDR", what, why=_WAITS, hint=hint)
    elif node.variables.get("NODE_RANK") == "0":
        if node.is_master is False:
            what = f"{address} ({', '.join(node.master)}) is no address of node 0"
            hint = "set it to node 0's own address, or give this node another NODE_RANK"
            yield fail("master-elsewhere", node.name, "MASTER_ADDR", what, why=_WAITS, hint=hint)
        elif node.port == "taken":
            why = "rank 0 cannot listen there: the launch fails, or joins a training that still runs"
            hint = f"choose another port; `ss -ltnp 'sport = :{port}'` shows who has it, often an earlier training"
            yield fail("port-taken", node.name, "MASTER_PORT", f"{port} is in use on node 0", why=why, hint=hint)
    elif node.port in ("silent", "unreachable"):
        what = f"{address}:{port} does not answer ({node.port})"
        hint = "open that port on node 0, and all ports between the nodes: NCCL and Gloo choose theirs by chance"
        yield fail("master-unreachable", node.name, "MASTER_ADDR", what, why=_WAITS, hint=hint)


def _check_count(nodes: Sequence[Node]) -> Iterator[Finding]:
    wanted = max(map(_count, nodes))
    if len(nodes) < wanted and not any(map(_is_elastic, nodes)):
        what = f"{wanted} nodes are to train, {len(nodes)} published here"
        why = "the missing node cannot reach the store, has the same path on a disk of its own, or was not asked"
        hint = "run `ckptsync doctor --publish` on each node, then compare again"
        yield fail("nodes-missing", _all(nodes), "NNODES", what, why=why, hint=hint)
    if 0 < wanted < len(nodes):
        what = f"{wanted} nodes are to train, {len(nodes)} published here"
        why = "the launcher starts when it has as many as it was told, and leaves the others out, or hangs"
        hint = f"set NNODES={len(nodes)}; if some do not take part, compare again when their facts are an hour old"
        yield fail("nodes-too-many", _all(nodes), "NNODES", what, why=why, hint=hint)


def _check_ranks(nodes: Sequence[Node]) -> Iterator[Finding]:
    ranks = grouped((n for n in nodes if not _is_elastic(n) and n.variables.get("NODE_RANK")), lambda n: n.variables["NODE_RANK"])
    for rank, names in ranks.items():
        if len(names) > 1:
            yield fail("node-rank", names, "NODE_RANK", f"{rank} on each of them", why=_WAITS, hint=_RANK_HINT)
    worlds = {n.variables["WORLD_SIZE"] for n in nodes if n.variables.get("WORLD_SIZE", "").isdecimal()}
    each = [n.variables.get("NPROC_PER_NODE", "") for n in nodes]
    if len(worlds) == 1 and all(e.isdecimal() for e in each) and len(nodes) == _count(nodes[0]):
        (world,), total = worlds, sum(map(int, each))
        if int(world) not in (total, len(nodes)):  # some launchers of clusters count nodes in it
            what = f"{world}, while NPROC_PER_NODE makes {total} ranks"
            yield fail("world-size", _all(nodes), "WORLD_SIZE", what, why=_WAITS, hint="leave WORLD_SIZE to the launcher")


def _mean_the_same(name: str, nodes: Sequence[Node]) -> bool:
    """Return whether different texts mean the same: a switch written in two ways; a host's name here and its address there."""
    if name in _SWITCHES:
        return len({is_true(node.variables.get(name, "")) for node in nodes}) == 1
    return name == "MASTER_ADDR" and bool(set.intersection(*(set(node.master) for node in nodes)))


def _count(node: Node) -> int:
    text = node.variables.get("NNODES", "").rpartition(":")[2]  # 1:4 where the launch is elastic
    return int(text) if text.isdecimal() and len(text) < 9 else 0


def _is_elastic(node: Node) -> bool:
    is_named = any(node.variables.get(name) for name in ("RDZV_ID", "MIN_NNODES", "MAX_NNODES"))
    return is_named or ":" in node.variables.get("NNODES", "")


def _is_own_name(address: str, node: Node) -> bool:
    """Debian calls its own name 127.0.1.1: rank 0 listens on all addresses there, and each other node looks the name up for itself."""
    own, given = (name.partition(".")[0].lower() for name in (node.host, address))
    return own == given and own not in ("", "localhost") and node.variables.get("NODE_RANK", "0") == "0"


def is_loopback(address: str) -> bool:
    """Return whether an address is of the machine itself alone; 0.0.0.0 leads there, too."""
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    return found.is_loopback or found.is_unspecified


def _all(nodes: Sequence[Node]) -> tuple[str, ...]:
    return tuple(sorted({node.name for node in nodes}))


def check_interfaces(node: Node) -> Iterator[Finding]:
    """Check the interfaces that variables name: each is there, is up and has an address."""
    for name in _INTERFACES:
        text = node.variables.get(name, "")
        if not text or not node.interfaces:
            continue
        chosen = _chosen(name, node)
        # Gloo and TensorPipe need each interface that is named, NCCL any of them
        absent = [] if name.startswith("NCCL_") else [one for one in text.split(",") if one and one not in node.interfaces]
        if not chosen or absent:
            what = f"{', '.join(absent) or text}: there is none; {', '.join(sorted(node.interfaces))} are there"
            hint = "name the one that `ip -br addr` shows with this node's address"
            yield fail("interface-missing", node.name, name, what, why=_NO_REACH, hint=hint)
        elif all(node.interfaces[one].get("state") in ("down", "lowerlayerdown") for one in chosen):
            what = f"{', '.join(chosen)}: the link is down"
            yield fail("interface-down", node.name, name, what, why=_NO_REACH, hint="bring it up, or name another")
        elif all(node.interfaces[one].get("address") == "no" for one in chosen if one != "lo") and chosen != ["lo"]:
            what = f"{', '.join(chosen)}: it has no address"
            hint = "give it one, or name the interface that `ip -br addr` shows with this node's address"
            yield fail("interface-bare", node.name, name, what, why=_NO_REACH, hint=hint)


def check_reachable(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Check that no node tells the others an address that only it can reach."""
    for node in [] if share_a_network(nodes) else nodes:
        for name in _INTERFACES:
            text = node.variables.get(name, "")
            chosen = _chosen(name, node) if text else []
            if chosen == ["lo"]:
                hint = "name the interface of the network that the nodes share"
                yield fail("interface-loopback", node.name, name, "lo, which no other node reaches", why=_NO_REACH, hint=hint)
            elif "lo" in chosen and text.startswith("^"):
                why = "NCCL takes lo, which comes first, unless it is excluded, too (aws/deep-learning-containers#4756)"
                hint = f"export {name}={text},lo"
                yield warn(
                    "interface-loopback", node.name, name, f"{text} leaves lo, which no other node reaches", why=why, hint=hint
                )
        if node.addresses and all(map(is_loopback, node.addresses)) and not node.variables.get("GLOO_SOCKET_IFNAME"):
            what = f"{node.host} is {', '.join(node.addresses)} on {node.name} itself"
            why = "Gloo tells other nodes the address of the host's own name: they would connect to themselves"
            hint = "export GLOO_SOCKET_IFNAME, or give the host's name its real address in /etc/hosts"
            yield warn("host-loopback", node.name, "/etc/hosts", what, why=why, hint=hint)


def compare_network(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Check that the variables of NCCL, Gloo and OpenMP are the same on all nodes."""
    for name in sorted({name for node in nodes for name in node.variables if name.startswith(_COMPARED)}):
        groups = grouped(nodes, _variable(name, "not set"))
        if len(groups) == 1 or name.startswith(_MAY_DIFFER) or (name in _PER_NODE and "not set" not in groups):
            continue
        must_equal = name in _MUST_EQUAL
        why = "two ends that talk in different ways hang" if must_equal else "nodes may hang, or one slows the others down"
        hint = f"export the same {name} on all nodes"
        yield (fail if must_equal else warn)("network-differs", names_of(groups), name, show(groups), why=why, hint=hint)


def compare_links(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Check that the chosen interfaces have one MTU and one speed."""
    reasons = {"mtu": "large messages are lost on the way to the smaller one", "speed": "the slowest link slows all nodes"}
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        for what, why in reasons.items():
            value = partial(_link, name, what)
            groups = grouped(filter(value, nodes), value)
            if len(groups) > 1:
                hint = "use like interfaces, with one MTU"
                yield warn("links-differ", names_of(groups), f"{name}: {what}", show(groups), why=why, hint=hint)


def _variable(name: str, default: str = "") -> Callable[[Node], str]:
    return lambda node: node.variables.get(name) or default


def _link(variable: str, what: str, node: Node) -> str:
    """Return the MTU or the speed of the interfaces that are named and up; nobody knows which of those that ``^`` leaves is used."""
    text = node.variables.get(variable, "")
    chosen = [] if not text or text.startswith("^") else [one for one in _chosen(variable, node) if one != "lo"]
    values = {node.interfaces[one].get(what, "") for one in chosen if node.interfaces[one].get("state") != "down"}
    return ", ".join(sorted(values - {"", "-1", "0", "4294967295"}))


def _chosen(variable: str, node: Node) -> list[str]:
    """Return the interfaces that a variable chooses.

    NCCL takes names for prefixes, unless ``=`` stands before them, and ``^`` for all but these; others take names.
    """
    there, text, is_nccl = sorted(node.interfaces), node.variables[variable], variable.startswith("NCCL_")
    names = [part for part in text.lstrip("^=").split(",") if part]
    if not is_nccl or text.startswith(("=", "^=")):
        hits = [name for name in there if name in names]
    else:
        hits = [name for name in there if name.startswith(tuple(names))]
    return [name for name in there if name not in hits] if is_nccl and text.startswith("^") else hits
