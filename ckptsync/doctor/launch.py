"""How nodes find each other: the launch variables (NNODES, NODE_RANK, WORLD_SIZE, MASTER_ADDR), and what NCCL and Gloo talk over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from ipaddress import ip_address

from ckptsync.doctor.findings import Finding, Level
from ckptsync.doctor.nodes import Node, grouped, is_true, share_a_network, told

_WAITS = "the ranks wait for each other until the rendezvous times out"
_EQUAL = (
    "NNODES",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "RDZV_ID",
    "MIN_NNODES",
    "MAX_NNODES",
)
_SWITCHES = ("USE_RAY", "USE_V1", "FORCE_TORCHRUN")  # on or off, however that is written
# What must be the same, since two ends agree by it on how they talk (NCCL, "Environment Variables"); of others it is only said that they differ.
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
_PER_NODE = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_CONF_FILE", "NCCL_TOPO_FILE")  # each node's own
_MUST_DIFFER = ("NCCL_HOSTID",)  # must differ
_LOGGING = ("NCCL_DEBUG", "GLOO_LOG", "TORCH_NCCL_DEBUG", "TORCH_NCCL_TRACE", "TORCH_NCCL_DUMP")  # what is logged, and where
_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_NO_REACH = "the nodes do not reach each other in the first collective"


def compare_launch(nodes: Sequence[Node]) -> Iterator[Finding]:
    """What the variables of several nodes say of each other; where no variable says anything, or Ray launches, there is nothing to judge."""
    if not nodes or any(node.within for node in nodes):
        return
    for name in (*_EQUAL, *_SWITCHES):
        groups = grouped(nodes, lambda node, name=name: node.variables.get(name, ""))  # type: ignore[misc]
        if len(groups) > 1 and not _mean_the_same(name, nodes):
            yield _finding("launch-differs", _all(nodes), name, told(groups), _WAITS, f"export the same {name} on all nodes")
    yield from _missing(nodes)
    yield from _ranks(nodes)
    if len(nodes) > 1:
        for node in nodes:
            yield from _of_several(node, nodes)
    else:
        yield from check_launch(nodes[0])


def check_launch(node: Node) -> Iterator[Finding]:
    """What one node's variables say wrongly of others, whoever they are."""
    if _count(node) > 1:
        yield from _of_several(node, [node])


def _mean_the_same(name: str, nodes: Sequence[Node]) -> bool:
    """A switch that is written in two ways; a host's name here, and its address there."""
    if name in _SWITCHES:
        return len({is_true(node.variables.get(name, "")) for node in nodes}) == 1
    return name == "MASTER_ADDR" and bool(set.intersection(*(set(node.master) for node in nodes)))


def _of_several(node: Node, all_known: Sequence[Node]) -> Iterator[Finding]:
    if _is_told(node) and not _is_elastic(node):
        yield from _lacking(node, all_known)
    yield from _master(node, is_one_machine=len(all_known) > 1 and share_a_network(all_known))


def _is_told(node: Node) -> bool:
    """Whether somebody numbers the nodes; Ray tells its workers a NODE_RANK, too, but with their WORLD_SIZE."""
    said = node.variables
    return bool(said.get("NNODES") or (said.get("NODE_RANK") and not said.get("WORLD_SIZE")))


def _count(node: Node) -> int:
    text = node.variables.get("NNODES", "").rpartition(":")[2]  # 1:4 where it is elastic
    return int(text) if text.isdecimal() and len(text) < 9 else 0


def _is_elastic(node: Node) -> bool:
    return any(node.variables.get(name) for name in ("RDZV_ID", "MIN_NNODES", "MAX_NNODES")) or ":" in node.variables.get(
        "NNODES", ""
    )


def _missing(nodes: Sequence[Node]) -> Iterator[Finding]:
    wanted = max(map(_count, nodes))
    if len(nodes) < wanted and not any(map(_is_elastic, nodes)):
        yield _finding(
            "nodes-missing",
            _all(nodes),
            "NNODES",
            f"{wanted} nodes are to train, {len(nodes)} told of themselves here",
            "a node that is missing here cannot reach the store, has the same path on a disk of its own, or was not asked",
            "run `ckptsync doctor --publish` on each node, then compare again",
        )
    if 0 < wanted < len(nodes):
        yield _finding(
            "nodes-too-many",
            _all(nodes),
            "NNODES",
            f"{wanted} nodes are to train, {len(nodes)} told of themselves",
            "the launcher starts when it has as many as it was told, and leaves the others out, or hangs",
            f"set NNODES={len(nodes)}; if some do not take part, compare again when what they said is an hour old",
        )


def _lacking(node: Node, all_known: Sequence[Node]) -> Iterator[Finding]:
    """What a node is not told, or told wrongly.  What no node is told may stand on torchrun's command line; LLaMA-Factory knows variables alone."""
    for name, why in (
        ("NNODES", "it starts a training of its own"),
        ("NODE_RANK", "it takes itself for node 0, as others do"),
        ("MASTER_ADDR", "LLaMA-Factory looks for rank 0 on the node itself (127.0.0.1)"),
        ("MASTER_PORT", "LLaMA-Factory takes another free port on each node"),
    ):
        if not node.variables.get(name):
            is_read = "llamafactory" in node.versions or any(other.variables.get(name) for other in all_known)
            level: Level = "fail" if is_read else "warn"
            hint = f"export {name} before the launch" + ("" if is_read else ", unless a command line says it")
            yield Finding(level, "launch-missing", (node.name,), name, "not set", f"{why}: {_WAITS}", hint)
    rank = node.variables.get("NODE_RANK", "")
    if rank and (not rank.isdecimal() or 0 < _count(node) <= int(rank)):
        what = f"{rank}, wanted 0 to {_count(node) - 1}"
        yield _finding("node-rank", (node.name,), "NODE_RANK", what, _WAITS, "number the nodes from 0 on, each once")


def _ranks(nodes: Sequence[Node]) -> Iterator[Finding]:
    ranks = grouped((n for n in nodes if not _is_elastic(n) and n.variables.get("NODE_RANK")), lambda n: n.variables["NODE_RANK"])
    for rank, names in ranks.items():
        if len(names) > 1:
            what = f"{rank} on each of them"
            yield _finding("node-rank", names, "NODE_RANK", what, _WAITS, "number the nodes from 0 on, each once")
    worlds = {n.variables["WORLD_SIZE"] for n in nodes if n.variables.get("WORLD_SIZE", "").isdecimal()}
    each = [n.variables.get("NPROC_PER_NODE", "") for n in nodes]
    if len(worlds) == 1 and all(e.isdecimal() for e in each) and len(nodes) == _count(nodes[0]):
        (world,), ranks_in_all = worlds, sum(map(int, each))
        if int(world) not in (ranks_in_all, len(nodes)):  # some launchers of clusters count nodes in it
            what = f"{world}, while NPROC_PER_NODE makes {ranks_in_all} ranks"
            yield _finding("world-size", _all(nodes), "WORLD_SIZE", what, _WAITS, "leave WORLD_SIZE to the launcher")


def _master(node: Node, *, is_one_machine: bool) -> Iterator[Finding]:
    address = node.variables.get("MASTER_ADDR", "")
    if not address:
        return
    if not node.master:
        what = f"{address} is not known here"
        hint = "use an address, or put the name into /etc/hosts of all nodes"
        yield _finding("master-unknown", (node.name,), "MASTER_ADDR", what, _WAITS, hint)
    elif all(map(is_loopback, node.master)) and not is_one_machine and not _is_own_name(address, node):
        what = f"{address} is {', '.join(node.master)} here, which no other node reaches"
        hint = "use the address of node 0 in the network that the nodes share; /etc/hosts may name the host 127.0.1.1"
        yield _finding("master-loopback", (node.name,), "MASTER_ADDR", what, _WAITS, hint)
    elif node.variables.get("NODE_RANK") == "0":
        yield from _own(node, address)
    elif node.port in ("silent", "unreachable"):
        what = f"{address}:{node.variables.get('MASTER_PORT')} does not answer ({node.port})"
        hint = "open that port on node 0, and all ports between the nodes: NCCL and Gloo choose theirs by chance"
        yield _finding("master-unreachable", (node.name,), "MASTER_ADDR", what, _WAITS, hint)


def _own(node: Node, address: str) -> Iterator[Finding]:
    """Node 0, where rank 0 is to listen."""
    if node.is_master is False:
        what = f"{address} ({', '.join(node.master)}) is no address of node 0"
        yield _finding(
            "master-elsewhere",
            (node.name,),
            "MASTER_ADDR",
            what,
            _WAITS,
            "set it to node 0's own address, or give this node another NODE_RANK",
        )
    elif node.port == "taken":
        port = node.variables.get("MASTER_PORT", "")
        what = f"{port} is in use on node 0"
        hint = f"choose another port; `ss -ltnp 'sport = :{port}'` shows who has it, often an earlier training"
        yield _finding(
            "port-taken",
            (node.name,),
            "MASTER_PORT",
            what,
            "rank 0 cannot listen there: the launch fails, or joins a training that still runs",
            hint,
        )


def _is_own_name(address: str, node: Node) -> bool:
    """Debian calls its own name 127.0.1.1: rank 0 listens on all addresses there, and every other node asks where the name leads from there."""
    own, said = (name.partition(".")[0].lower() for name in (node.host, address))
    return own == said and own not in ("", "localhost") and node.variables.get("NODE_RANK", "0") == "0"


def is_loopback(address: str) -> bool:
    """Whether an address is of the machine itself alone; 0.0.0.0 leads there, too."""
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    return found.is_loopback or found.is_unspecified


def _all(nodes: Sequence[Node]) -> tuple[str, ...]:
    return tuple(sorted(Counter(node.name for node in nodes)))


def _finding(kind: str, nodes: tuple[str, ...], *told: str) -> Finding:
    subject, what, why, hint = told
    return Finding("fail", kind, nodes, subject, what, why, hint)


def check_interfaces(node: Node) -> Iterator[Finding]:
    """Interfaces that are named and not there, or down."""
    if not node.interfaces:
        return
    for name in _INTERFACES:
        text = node.variables.get(name, "")
        if not text:
            continue
        chosen, lacking = _chosen_interfaces(name, text, node), _absent_interfaces(name, text, node)
        if not chosen or lacking:
            what = f"{', '.join(lacking) or text}: there is none; {', '.join(sorted(node.interfaces))} are there"
            yield Finding(
                "fail",
                "interface-missing",
                (node.name,),
                name,
                what,
                _NO_REACH,
                "name the one that `ip -br addr` shows with this node's address",
            )
        elif all(node.interfaces[one].get("state") in ("down", "lowerlayerdown") for one in chosen):
            what = f"{', '.join(chosen)}: the link is down"
            yield Finding("fail", "interface-down", (node.name,), name, what, _NO_REACH, "bring it up, or name another")
        elif all(node.interfaces[one].get("address") == "no" for one in chosen if one != "lo") and chosen != ["lo"]:
            what = f"{', '.join(chosen)}: it has no address"
            hint = "give it one, or name the interface that `ip -br addr` shows with this node's address"
            yield Finding("fail", "interface-bare", (node.name,), name, what, _NO_REACH, hint)


def check_reachable(node: Node) -> Iterator[Finding]:
    """What no other node reaches, of a node among several."""
    for name in _INTERFACES:
        chosen = _chosen_interfaces(name, node.variables.get(name, ""), node) if node.variables.get(name) else []
        if chosen == ["lo"]:
            yield Finding(
                "fail",
                "interface-loopback",
                (node.name,),
                name,
                "lo, which no other node reaches",
                _NO_REACH,
                "name the interface of the network that the nodes share",
            )
        elif "lo" in chosen and node.variables[name].startswith("^"):
            text = node.variables[name]
            why = "NCCL takes lo, which stands first, unless it is excluded, too (aws/deep-learning-containers#4756); no other node reaches it"
            yield Finding("warn", "interface-loopback", (node.name,), name, f"{text} leaves lo", why, f"export {name}={text},lo")
    if node.addresses and all(map(is_loopback, node.addresses)) and not node.variables.get("GLOO_SOCKET_IFNAME"):
        what = f"{node.host} is {', '.join(node.addresses)} on {node.name} itself"
        why = "Gloo tells other nodes the address of the host's own name: they would connect to themselves"
        hint = "export GLOO_SOCKET_IFNAME, or give the host's name its real address in /etc/hosts"
        yield Finding("warn", "host-loopback", (node.name,), "/etc/hosts", what, why, hint)


def compare_network(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Variables that are not the same on all nodes, and interfaces unlike each other."""
    names = sorted(
        {name for node in nodes for name in node.variables if name.startswith(("NCCL_", "RCCL_", "GLOO_", "TORCH_NCCL_", "OMP_"))}
    )
    for name in names:
        groups = grouped(nodes, lambda node, name=name: node.variables.get(name) or "not set")  # type: ignore[misc]
        if len(groups) == 1 or name.startswith((*_LOGGING, *_MUST_DIFFER)) or (name in _PER_NODE and "not set" not in groups):
            continue
        level, why = (
            ("fail", "two ends that talk in different ways hang")
            if name in _MUST_EQUAL
            else ("warn", "nodes that are set differently may hang, or one slows the others down")
        )
        who = tuple(n for group in groups.values() for n in group)
        yield Finding(level, "network-differs", who, name, told(groups), why, f"export the same {name} on all nodes")  # type: ignore[arg-type]
    yield from _links(nodes)


def _links(nodes: Sequence[Node]) -> Iterator[Finding]:
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        for what, why in (("mtu", "large messages are lost on the way to the smaller one"), ("speed", "the slowest sets the pace")):
            using = [node for node in nodes if _link(name, what, node)]
            groups = grouped(using, lambda node, name=name, what=what: _link(name, what, node))  # type: ignore[misc]
            if len(groups) > 1:
                who = tuple(n for group in groups.values() for n in group)
                yield Finding(
                    "warn", "links-differ", who, f"{name}: {what}", told(groups), why, "use like interfaces, with one MTU"
                )


def _link(variable: str, what: str, node: Node) -> str:
    """Of the interfaces that are named, as far as they are up and the system knows it; which of those that are left by ``^`` carries anything nobody knows."""
    text = node.variables.get(variable, "")
    chosen = _chosen_interfaces(variable, text, node) if text and not text.startswith("^") else []
    chosen = [one for one in chosen if one != "lo"]  # which is a fault of its own
    told = {node.interfaces[one].get(what, "") for one in chosen if node.interfaces[one].get("state") != "down"}
    return ", ".join(sorted(told - {"", "-1", "0", "4294967295"}))


def _absent_interfaces(variable: str, text: str, node: Node) -> list[str]:
    """Of several names those that are not there: Gloo and TensorPipe need each, NCCL any."""
    return [] if variable.startswith("NCCL_") else [name for name in text.split(",") if name and name not in node.interfaces]


def _chosen_interfaces(variable: str, text: str, node: Node) -> list[str]:
    """The interfaces of a node that a variable chooses: NCCL takes names for prefixes, unless ``=`` stands before, and ``^`` for all but these; others take names."""
    there, sign = sorted(node.interfaces), text[:1]
    is_nccl = variable.startswith("NCCL_")
    names = [part for part in text.lstrip("^=").split(",") if part]
    if sign == "=" or text[:2] == "^=" or not is_nccl:
        hits = [name for name in there if name in names]
    else:
        hits = [name for name in there if name.startswith(tuple(names))]
    return [name for name in there if name not in hits] if is_nccl and sign == "^" else hits
