"""Facts of nodes in a store: publish them, wait for other nodes (`meet`), read them.

Nodes of a launch cannot reach each other before it, so they exchange facts through the store: each
writes one file, and `meet` waits until all have read each other's.  While a training runs,
`group_trainings` makes the same facts of those that workers write beside their heartbeats.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptsync.doctor.facts import read_number
from ckptsync.doctor.findings import Finding, read_finding
from ckptsync.doctor.probe import LIBRARIES, NCCL
from ckptsync.errors import ConfigError, Corrupt, NotFound, Transient, without_frames
from ckptsync.records.store_paths import checked_node
from ckptsync.safe_names import RECORDS
from ckptsync.status.heartbeat import LIMIT, Facts, Heartbeat, Train
from ckptsync.status.nodes import read_nodes
from ckptsync.stores.contract import Entry, Store, read_all
from ckptsync.typed_json import Decoder

FOLDER = f"{RECORDS}/launches/"
FRESH_WITHIN = 3600.0  # seconds
# seconds by which two clocks may differ without two machines being taken for one that was booted in
# between
_SKEW = 60.0
# seconds between two readings of the other nodes' facts, or longer where reading takes longer
_POLL = 1.0
_SETTLE = 10.0  # seconds that a node waits beyond its time while others still arrive
_AGAIN = "remove it, and run `ckptsync doctor --publish` on that node again"
_DECODER: Decoder[dict[str, Any]] = Decoder(dict[str, Any], "a node's facts", LIMIT)
# the ranks have met: the launch variables do not matter any more
_PASSED_ON = ("NCCL_", "GLOO_", "TORCH_NCCL_", "OMP_")
_MOST = 200  # findings of one node
# by the names that the hook tells
_LIBRARIES = {**{name: name for name in LIBRARIES}, **dict.fromkeys(NCCL, "nccl")}


def launch_name(node: str) -> str:
    """Return the name of a node's facts in the store.  Raises Corrupt if ``node`` is no id."""
    return f"{FOLDER}{checked_node(node)}.json"


def publish(store: Store, facts: Mapping[str, Any]) -> None:
    """Replace this node's facts in the store.

    Raises StoreError, and ConfigError if another machine has published under this id: its facts are
    of another boot, not old, and written after this machine booted, all by the store's clock.  If
    this node waits for others, its facts are written even then, so that the other one notices.
    """
    name, ahead = launch_name(str(facts["node"])), read_number(facts.get("clock")) or 0.0
    booted, now = ((read_number(facts.get(key)) or 0.0) - ahead for key in ("booted", "at"))
    last = next((entry for entry in store.names(FOLDER) if entry.name == name), None)
    before: dict[str, Any] = {}
    if last and now - last.mtime <= FRESH_WITHIN and last.mtime > booted + _SKEW > _SKEW:
        with contextlib.suppress(NotFound, Corrupt):
            before = _read(store, last)
    if before.get("boot") not in ("", None, facts.get("boot")):
        if _call(facts).id:
            _write(store, facts)  # so that the other machine, which may be waiting, finds out, too
        raise _two_machines(facts, before)
    _write(store, facts)


def _write(store: Store, facts: Mapping[str, Any]) -> None:
    """Replace a node's facts in the store by one line of JSON.  Raises StoreError, or Corrupt."""
    text = json.dumps(facts, sort_keys=True, ensure_ascii=False)
    # a variable or a path may be no text
    store.write(launch_name(str(facts["node"])), [text.encode(errors="replace") + b"\n"])


def _two_machines(facts: Mapping[str, Any], previous: Mapping[str, Any]) -> ConfigError:
    """Return the error of two machines with one node id."""
    what = f"another machine ({previous.get('host')}) has published under this id, too"
    hint = "give each node its own id: `node` in its configuration, or --node"
    return ConfigError(f"node {facts['node']}: {what}", hint=hint)


def read_published(
    store: Store, now: float, max_age: float = FRESH_WITHIN
) -> tuple[list[dict[str, Any]], list[Corrupt]]:
    """Return the facts published within ``max_age`` seconds, and an error for each unreadable file.

    The facts have the key ``node``, and are sorted by it.  ``now`` is on the store's clock.  Raises
    StoreError.
    """
    facts, errors = [], []
    for entry in [entry for entry in store.names(FOLDER) if now - entry.mtime <= max_age]:
        node = entry.name.removeprefix(FOLDER).removesuffix(".json")
        try:
            facts.append(_read(store, entry) | {"node": node})
        except NotFound:  # gone since it was listed
            continue
        except Corrupt as e:
            errors.append(without_frames(e))
    return facts, errors


def _read(store: Store, entry: Entry) -> dict[str, Any]:
    """Return the facts in one file.  Raises NotFound, Corrupt or another StoreError."""
    return _DECODER.decode(read_all(store, entry.name, LIMIT), entry.name, _AGAIN)


@dataclass(frozen=True, slots=True)
class Arrived:
    """The nodes of a launch that have published their facts.

    ``nodes``: the facts of those that wait for each other, this node among them.  ``expected``: how
    many must arrive.  ``earlier``: the facts of nodes that do not wait now: of an earlier launch,
    or published without ``--wait``.
    """

    nodes: Sequence[Mapping[str, Any]]
    expected: int
    earlier: Sequence[Mapping[str, Any]] = ()

    @property
    def is_complete(self) -> bool:
        """Return whether all expected nodes have arrived."""
        return len(self.nodes) >= self.expected


@dataclass(frozen=True, slots=True)
class _Call:
    """The call that published facts: its id, the nodes it waits for, and the ids that it has read.

    Without an id the node does not wait.
    """

    id: str = ""
    nnodes: int = 0
    read_ids: frozenset[str] = frozenset()


def meet(
    store: Store,
    facts: Mapping[str, Any],
    expected: int,
    seconds: float,
    progress: Callable[[Arrived], object] = lambda _: None,
) -> Arrived:
    """Publish this node's facts, and wait until ``expected`` nodes have read each other's.

    Waits at most ``seconds``, a little longer while nodes arrive; returns those that did, complete
    or not.  Reads the store about once a second.  ``progress`` is called now and at arrivals, but
    not when the wait ends.

    Each call has a new id, and each node writes with its facts the ids that it has read.  A node
    has arrived once it has read this node's id, and this node its id, so facts of an earlier launch
    never count.

    Raises ConfigError if another machine, or a later call, publishes under this node's id;
    StoreError, but Transient only after the time.
    """
    own_facts = {**facts, "call": {"id": secrets.token_hex(8), "nnodes": expected, "read": []}}
    publish(store, own_facts)
    deadline, arrived = time.monotonic() + seconds, Arrived([own_facts], expected)
    progress(arrived)
    for attempt in itertools.count():
        began, before, count = time.monotonic(), own_facts, len(arrived.nodes)
        try:
            own_facts, other_nodes = _read_others(store, own_facts)
            arrived = _arrived(own_facts, other_nodes)
        except Transient:  # the next reading may succeed
            if began > deadline:
                raise
        if arrived.is_complete or began > deadline:
            break
        if count != len(arrived.nodes):
            progress(arrived)
        if attempt and own_facts is not before:  # a node has just come, and answers in a moment
            deadline = max(deadline, began + _SETTLE)
        time.sleep(max(_POLL, time.monotonic() - began))
    return arrived


def _read_others(
    store: Store, own_facts: dict[str, Any]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return this node's facts with the ids that it has read, and those of the job's other nodes.

    Reads them, and publishes this node's if the ids have changed.  Raises as `meet` does.
    """
    now, job = time.time() - (read_number(own_facts.get("clock")) or 0.0), own_facts.get("job", "")
    records = [node for node in read_published(store, now)[0] if node.get("job", "") == job]
    _check_own(store, own_facts, records)
    other_nodes = [node for node in records if node["node"] != own_facts["node"]]
    read_ids = sorted({_call(node).id for node in other_nodes} - {""})
    if read_ids != own_facts["call"]["read"]:
        own_facts = {**own_facts, "call": {**own_facts["call"], "read": read_ids}}
        _write(store, own_facts)
    return own_facts, other_nodes


def _check_own(store: Store, own: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> None:
    """Raise ConfigError if another machine, or a later call here, has replaced this node's facts.

    In the first case this node's facts are written again, so that the other one notices.
    """
    now = next((node for node in records if node["node"] == own["node"]), own)
    if _call(now).id == _call(own).id:
        return
    if all(now.get(key) == own.get(key) for key in ("boot", "network", "host")):
        raise ConfigError(
            f"node {own['node']}: a later `ckptsync doctor --publish` on this machine has replaced"
            " what this one published",
            hint="wait for that one; two launches at once on one machine need a --node each",
        )
    _write(store, own)  # so that the other machine finds out, too
    raise _two_machines(own, now)


def _arrived(own: Mapping[str, Any], other_nodes: Sequence[Mapping[str, Any]]) -> Arrived:
    """Return this node and those that have read its id and whose ids it has read; also the others.

    The expected number is the greatest that one of them waits for.
    """
    own_call = _call(own)
    arrived_nodes = [
        node
        for node in other_nodes
        if _call(node).id in own_call.read_ids and own_call.id in _call(node).read_ids
    ]
    nodes = sorted([own, *arrived_nodes], key=lambda node: str(node["node"]))
    expected = max(_call(node).nnodes for node in nodes)
    return Arrived(nodes, expected, [node for node in other_nodes if node not in arrived_nodes])


def _call(facts: Mapping[str, Any]) -> _Call:
    """Return the call that published facts; an empty one if the node does not wait."""
    call = facts.get("call")
    if not isinstance(call, dict) or not isinstance(call.get("id"), str):
        return _Call()
    nnodes, ids_read = call.get("nnodes"), call.get("read")
    ids = (
        frozenset(call_id for call_id in ids_read if isinstance(call_id, str))
        if isinstance(ids_read, list)
        else ()
    )
    return _Call(call["id"], nnodes if isinstance(nnodes, int) else 0, frozenset(ids))


def repeat_findings(facts: Iterable[Mapping[str, Any]]) -> list[Finding]:
    """Return the findings that nodes published about themselves, of each its first `_MOST` entries.

    Entries that are no findings are skipped.
    """
    listed = [
        (node, raw_findings)
        for node in facts
        if isinstance(raw_findings := node.get("findings"), list)
    ]
    findings = [
        read_finding(raw, str(node["node"]))
        for node, raw_findings in listed
        for raw in raw_findings[:_MOST]
    ]
    return [finding for finding in findings if finding]


def group_jobs(facts: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the facts in groups of nodes that train together: one group for each job.

    A node that trains alone is a group of its own.
    """
    jobs: dict[str, list[dict[str, Any]]] = {}
    for node in facts:
        job = f"/{node['node']}" if is_alone(node) else f"{node.get('job', '')}"
        jobs.setdefault(job, []).append(node)
    return list(jobs.values())


def is_alone(facts: Mapping[str, Any]) -> bool:
    """Return whether a node trains alone (NNODES is 1)."""
    variables = facts.get("variables")
    return isinstance(variables, dict) and variables.get("NNODES") == "1"


def read_living(store: Store, now: float, max_age: float = FRESH_WITHIN) -> list[Facts]:
    """Read and return the facts beside the heartbeats of live workers; unreadable ones are skipped.

    A worker is live if it wrote a heartbeat within ``max_age`` seconds of ``now`` and has not
    stopped.  ``now`` is on the store's clock.  Raises StoreError.
    """
    files = read_nodes(store)
    beating = {
        file.content.node
        for file in files.hearts
        if isinstance(file.content, Heartbeat)
        and not file.content.stopped
        and now - file.entry.mtime <= max_age
    }
    return [
        node_facts
        for node_facts in files.facts.values()
        if isinstance(node_facts, Facts) and node_facts.node in beating
    ]


def group_trainings(nodes: Iterable[Facts]) -> dict[str, list[dict[str, Any]]]:
    """Return, by run, the facts of the nodes that train it now, in the form of `probe.gather`."""
    trainings: dict[str, list[dict[str, Any]]] = {}
    for node in nodes:
        for run, train in node.trains.items():
            if train.state == "runs":
                trainings.setdefault(run, []).append(_of_train(node, train))
    return trainings


def _of_train(node: Facts, train: Train) -> dict[str, Any]:
    """Return the facts of a node and of a training on it, in the form of `probe.gather`."""
    values = train.facts
    return {
        "node": node.node,
        "host": node.host,
        "boot": node.machine.partition(" ")[0],
        "within": "run",
        "gpus": list(node.gpus),
        "python": values.get("python", ""),
        "versions": {ours: values[name] for name, ours in _LIBRARIES.items() if values.get(name)},
        "builds": {"cuda": values["cuda"]} if values.get("cuda") else {},
        "variables": {name: value for name, value in values.items() if name.startswith(_PASSED_ON)},
        "clock": None if (offset := read_number(node.clock_offset)) is None else offset / 1e9,
    }
