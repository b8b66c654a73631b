"""What nodes say of themselves in a store before a training, each in a file of its own, and what the workers' facts say while it runs."""

from __future__ import annotations

import contextlib
import itertools
import json
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptsync.decoding import Decoder
from ckptsync.doctor.findings import Finding, finding_of
from ckptsync.doctor.nodes import number
from ckptsync.doctor.probe import LIBRARIES, NCCL
from ckptsync.errors import ConfigError, Corrupt, NotFound, Transient
from ckptsync.fleet import facts, heartbeat
from ckptsync.fleet.facts import Facts, Train
from ckptsync.fleet.heartbeat import LIMIT, Heartbeat
from ckptsync.records.names import OURS, checked_node
from ckptsync.stores.contract import Entry, Store, read_all

Write = Callable[[Callable[[], None]], None]

FOLDER = f"{OURS}/launches/"
FRESH = 3600.0  # seconds
_SKEW = 60.0  # seconds by which two clocks may differ without two machines being taken for one that was booted in between
_POLL = 1.0  # seconds between two readings of the other nodes' facts, or longer where reading takes longer
_SETTLE = 10.0  # seconds that a node waits beyond its time while others still arrive
_AGAIN = "remove it, and run `ckptsync doctor --publish` on that node again"
_DECODER: Decoder[dict[str, Any]] = Decoder(dict[str, Any], "what a node says of itself", LIMIT)
_PASSED_ON = ("NCCL_", "GLOO_", "TORCH_NCCL_", "OMP_")  # the ranks have met: how they were told of each other is past
_MOST = 200  # findings of one node
_LIBRARIES = {**{name: name for name in LIBRARIES}, **dict.fromkeys(NCCL, "nccl")}  # by the names that the hook tells


def launch_name(node: str) -> str:
    """Where a node's lie; raises Corrupt for what is no node's id."""
    return f"{FOLDER}{checked_node(node)}.json"


def publish(store: Store, said: Mapping[str, Any]) -> None:
    """Replace what this node said before; raises StoreError, and ConfigError if another machine has this id.

    That one spoke of another boot, a short while ago, and after this one's, all by the store's clock.
    """
    name, ahead = launch_name(str(said["node"])), number(said.get("clock")) or 0.0
    booted, now = (number(said.get("booted")) or 0.0) - ahead, (number(said.get("at")) or 0.0) - ahead
    last = [entry for entry in store.names(FOLDER) if entry.name == name and now - entry.mtime <= FRESH]
    before = next((told for _, told in _read(store, last) if isinstance(told, dict)), {})
    if last and before.get("boot") not in ("", None, said.get("boot")) and last[0].mtime > booted + _SKEW > _SKEW:
        if _call(said):
            _write(store, said)  # so that the other machine, which may be waiting, finds out, too
        raise _two_machines(said, before)
    _write(store, said)


def _write(store: Store, said: Mapping[str, Any]) -> None:
    text = json.dumps(said, sort_keys=True, ensure_ascii=False)
    name = launch_name(str(said["node"]))
    store.write(name, [text.encode(errors="replace") + b"\n"])  # a variable or a path may be no text


def _two_machines(said: Mapping[str, Any], other: Mapping[str, Any]) -> ConfigError:
    return ConfigError(
        f"node {said['node']}: another machine ({other.get('host')}) has published under this id, too",
        hint="give each node its own id: `node` in its configuration, or --node",
    )


def published(store: Store, now: float, fresh: float = FRESH) -> tuple[list[dict[str, Any]], list[Corrupt]]:
    """What was said within ``fresh`` seconds of ``now`` (the store's clock), and what cannot be read."""
    found, odd = [], []
    for entry, told in _read(store, [entry for entry in store.names(FOLDER) if now - entry.mtime <= fresh]):
        if isinstance(told, Corrupt):
            odd.append(told)
        else:
            found.append(told | {"node": entry.name.removeprefix(FOLDER).removesuffix(".json")})
    return found, odd


@dataclass(frozen=True, slots=True)
class Arrived:
    """Which nodes of a launch have published their facts.

    ``nodes``: the facts of those that wait for each other, this node among them; ``wanted``: how many are to come; ``others``: the facts of nodes
    that do not wait now: of an earlier launch, or published without ``--wait``.
    """

    nodes: Sequence[Mapping[str, Any]]
    wanted: int
    others: Sequence[Mapping[str, Any]] = ()

    @property
    def is_complete(self) -> bool:
        """Whether all have come."""
        return len(self.nodes) >= self.wanted


def meet(
    store: Store,
    said: Mapping[str, Any],
    wanted: int,
    seconds: float,
    *,
    write: Write,
    progress: Callable[[Arrived], object],
) -> Arrived:
    """Publish this node's facts, and wait until ``wanted`` nodes have read each other's, or ``seconds`` are over.

    Each call has a new id, and each node writes beside its facts the ids that it has read.  A node counts when it has read this node's id, and this
    node its: what an earlier launch left behind never reads a new id.  All nodes see the same ids, so that all come to the same group.

    Raises StoreError; ConfigError if another machine publishes under this node's id.  ``write`` does what writes to the store.
    """
    own = {**said, "call": {"id": secrets.token_hex(8), "nnodes": wanted, "read": []}}
    write(lambda: publish(store, own))
    deadline, arrived = time.monotonic() + seconds, Arrived([own], wanted)
    progress(arrived)
    for attempt in itertools.count():
        began, before = time.monotonic(), (len(arrived.nodes), _call(own)["read"])
        try:
            own, others = _read_others(store, own, write)
            arrived = _arrived(own, others)
        except Transient:  # the next reading may succeed
            if began > deadline:
                raise
        if arrived.is_complete or began > deadline:
            break
        if before[0] != len(arrived.nodes):
            progress(arrived)
        if attempt and before[1] != _call(own)["read"]:  # a node has just come, and answers in a moment
            deadline = max(deadline, began + _SETTLE)
        time.sleep(max(_POLL, time.monotonic() - began))
    return arrived


def _read_others(store: Store, own: dict[str, Any], write: Write) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Publish which ids this node has read by now; its facts with them, and the facts of the job's other nodes."""
    now = time.time() - (number(own.get("clock")) or 0.0)
    records = [one for one in published(store, now)[0] if one.get("job", "") == own.get("job", "")]
    _check_own(store, own, records, write)
    others = [one for one in records if one["node"] != own["node"]]
    read = sorted(filter(None, map(_call_id, others)))
    if read != own["call"]["read"]:
        own = {**own, "call": {**own["call"], "read": read}}
        write(lambda: _write(store, own))
    return own, others


def _check_own(store: Store, own: Mapping[str, Any], records: Sequence[Mapping[str, Any]], write: Write) -> None:
    """Raise ConfigError if somebody else has replaced this node's facts."""
    now = next((one for one in records if one["node"] == own["node"]), own)
    if _call_id(now) == _call_id(own):
        return
    if all(now.get(key) == own.get(key) for key in ("boot", "network", "host")):
        raise ConfigError(
            f"node {own['node']}: a later `ckptsync doctor --publish` on this machine has replaced what this one published",
            hint="wait for that one; two launches at once on one machine need a --node each",
        )
    write(lambda: _write(store, own))  # so that the other machine finds out, too
    raise _two_machines(own, now)


def _arrived(own: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> Arrived:
    """The largest group, this node in it, in which each has read the ids of all others."""
    waiting = {_call_id(one): (one, set(_call(one)["read"])) for one in (own, *others) if _call_id(one)}
    best = {_call_id(own)}
    for centre, (_, read) in waiting.items():
        group = {centre, *(other for other in read & waiting.keys() if centre in waiting[other][1])}
        if _call_id(own) in group and len(group) > len(best) and all(group - {one} <= waiting[one][1] for one in group):
            best = group
    wanted = max(_call(waiting[one][0])["nnodes"] for one in best)
    nodes = sorted((waiting[one][0] for one in best), key=lambda one: str(one["node"]))
    return Arrived(nodes, wanted, [one for one in others if _call_id(one) not in best])


def _call(said: Mapping[str, Any]) -> dict[str, Any]:
    """The id of the call that published it, how many nodes it waits for, and which ids it has read; empty for a node that does not wait."""
    call = said.get("call")
    if not isinstance(call, dict) or not isinstance(call.get("id"), str):
        return {}
    nnodes, read = call.get("nnodes"), call.get("read")
    return {
        "id": call["id"],
        "nnodes": nnodes if isinstance(nnodes, int) else 0,
        "read": [one for one in read if isinstance(one, str)] if isinstance(read, list) else [],
    }


def _call_id(said: Mapping[str, Any]) -> str:
    return str(_call(said).get("id", ""))


def repeated(said: Iterable[Mapping[str, Any]]) -> list[Finding]:
    """What nodes found on themselves, each named; what nobody could have published so is left out."""
    listed = [(one, found) for one in said if isinstance(found := one.get("findings"), list)]
    given = [finding_of(raw, str(one["node"])) for one, found in listed for raw in found[:_MOST]]
    return [finding for finding in given if finding]


def jobs(said: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Those that train together: of one job, where that was said; who trains alone is alone."""
    found: dict[str, list[dict[str, Any]]] = {}
    for one in said:
        found.setdefault(f"/{one['node']}" if is_alone(one) else f"{one.get('job', '')}", []).append(one)
    return list(found.values())


def is_alone(said: Mapping[str, Any]) -> bool:
    """Whether a node trains with no other."""
    variables = said.get("variables")
    return isinstance(variables, dict) and variables.get("NNODES") == "1"


def _read(store: Store, entries: Iterable[Entry]) -> Iterator[tuple[Entry, dict[str, Any] | Corrupt]]:
    for entry in entries:
        with contextlib.suppress(NotFound):  # gone since it was listed
            yield entry, _said(store, entry.name)


def _said(store: Store, name: str) -> dict[str, Any] | Corrupt:
    try:
        return _DECODER.decode(read_all(store, name, LIMIT), name, _AGAIN)
    except Corrupt as e:
        return e


def living(store: Store, now: float, fresh: float = FRESH) -> list[Facts]:
    """What nodes are made of whose workers have beaten within ``fresh`` seconds of ``now``, and have not said goodbye."""
    beating = {
        heart.node
        for entry, heart in heartbeat.listed(store)
        if isinstance(heart, Heartbeat) and not heart.stopped and now - entry.mtime <= fresh
    }
    return [told for told in facts.listed(store) if isinstance(told, Facts) and told.node in beating]


def trainings(told: Iterable[Facts]) -> dict[str, list[dict[str, Any]]]:
    """The nodes of each run that trains now, by what their hooks and workers say: run → facts as `ckptsync.doctor.compare` takes them."""
    found: dict[str, list[dict[str, Any]]] = {}
    for node in told:
        for run, train in node.trains.items():
            if train.state == "runs":
                found.setdefault(run, []).append(_of_train(node, train))
    return found


def _of_train(node: Facts, train: Train) -> dict[str, Any]:
    said = train.facts
    return {
        "node": node.node,
        "host": node.host,
        "boot": node.machine.partition(" ")[0],
        "within": "run",
        "gpus": list(node.gpus),
        "python": said.get("python", ""),
        "versions": {ours: said[name] for name, ours in _LIBRARIES.items() if said.get(name)},
        "builds": {"cuda": said["cuda"]} if said.get("cuda") else {},
        "variables": {name: value for name, value in said.items() if name.startswith(_PASSED_ON)},
        "clock": None if (offset := number(node.clock_offset)) is None else offset / 1e9,
    }
