"""NCCL's and Gloo's variables, and the interfaces that they name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptsync.doctor.findings import Finding
from ckptsync.doctor.launching import is_loopback
from ckptsync.doctor.nodes import Node, grouped, told

# What must be the same, since two ends agree by it on how they talk (NCCL, "Environment Variables"); of others it is only said that they differ.
_AGREED = (
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
_OWN = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_CONF_FILE", "NCCL_TOPO_FILE")  # each node's own
_UNLIKE = ("NCCL_HOSTID",)  # must differ
_TALK = ("NCCL_DEBUG", "GLOO_LOG", "TORCH_NCCL_DEBUG", "TORCH_NCCL_TRACE", "TORCH_NCCL_DUMP")  # what is logged, and where
_SOCKETS = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_HANG = "the nodes do not reach each other in the first collective"


def alone(node: Node) -> Iterator[Finding]:
    """Interfaces that are named and not there, or down."""
    if not node.interfaces:
        return
    for name in _SOCKETS:
        text = node.variables.get(name, "")
        if not text:
            continue
        chosen, lacking = _chosen(name, text, node), _lacking(name, text, node)
        if not chosen or lacking:
            what = f"{', '.join(lacking) or text}: there is none; {', '.join(sorted(node.interfaces))} are there"
            yield Finding(
                "fail",
                "interface-missing",
                (node.name,),
                name,
                what,
                _HANG,
                "name the one that `ip -br addr` shows with this node's address",
            )
        elif all(node.interfaces[one].get("state") in ("down", "lowerlayerdown") for one in chosen):
            what = f"{', '.join(chosen)}: the link is down"
            yield Finding("fail", "interface-down", (node.name,), name, what, _HANG, "bring it up, or name another")
        elif all(node.interfaces[one].get("address") == "no" for one in chosen if one != "lo") and chosen != ["lo"]:
            what = f"{', '.join(chosen)}: it has no address"
            hint = "give it one, or name the interface that `ip -br addr` shows with this node's address"
            yield Finding("fail", "interface-bare", (node.name,), name, what, _HANG, hint)


def reaching(node: Node) -> Iterator[Finding]:
    """What no other node reaches, of a node among several."""
    for name in _SOCKETS:
        chosen = _chosen(name, node.variables.get(name, ""), node) if node.variables.get(name) else []
        if chosen == ["lo"]:
            yield Finding(
                "fail",
                "interface-loopback",
                (node.name,),
                name,
                "lo, which no other node reaches",
                _HANG,
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


def differing(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Variables that are not the same on all nodes, and interfaces unlike each other."""
    names = sorted(
        {name for node in nodes for name in node.variables if name.startswith(("NCCL_", "RCCL_", "GLOO_", "TORCH_NCCL_", "OMP_"))}
    )
    for name in names:
        groups = grouped(nodes, lambda node, name=name: node.variables.get(name) or "not set")  # type: ignore[misc]
        if len(groups) == 1 or name.startswith((*_TALK, *_UNLIKE)) or (name in _OWN and "not set" not in groups):
            continue
        level, why = (
            ("fail", "two ends that talk in different ways hang")
            if name in _AGREED
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
    chosen = _chosen(variable, text, node) if text and not text.startswith("^") else []
    chosen = [one for one in chosen if one != "lo"]  # which is a fault of its own
    told = {node.interfaces[one].get(what, "") for one in chosen if node.interfaces[one].get("state") != "down"}
    return ", ".join(sorted(told - {"", "-1", "0", "4294967295"}))


def _lacking(variable: str, text: str, node: Node) -> list[str]:
    """Of several names those that are not there: Gloo and TensorPipe need each, NCCL any."""
    return [] if variable.startswith("NCCL_") else [name for name in text.split(",") if name and name not in node.interfaces]


def _chosen(variable: str, text: str, node: Node) -> list[str]:
    """The interfaces of a node that a variable chooses: NCCL takes names for prefixes, unless ``=`` stands before, and ``^`` for all but these; others take names."""
    there, sign = sorted(node.interfaces), text[:1]
    is_nccl = variable.startswith("NCCL_")
    names = [part for part in text.lstrip("^=").split(",") if part]
    if sign == "=" or text[:2] == "^=" or not is_nccl:
        hits = [name for name in there if name in names]
    else:
        hits = [name for name in there if name.startswith(tuple(names))]
    return [name for name in there if name not in hits] if is_nccl and sign == "^" else hits
