"""What nodes say of themselves in a store before a training, each in a file of its own, and what the workers' facts say while it runs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ckptsync.decoding import Decoder
from ckptsync.doctor.nodes import number
from ckptsync.doctor.probe import LIBRARIES, NCCL
from ckptsync.errors import ConfigError, Corrupt, NotFound
from ckptsync.fleet import facts, heartbeat
from ckptsync.fleet.facts import Facts, Train
from ckptsync.fleet.heartbeat import LIMIT, Heartbeat
from ckptsync.records.names import OURS, checked_node
from ckptsync.stores.contract import Entry, Store, read_all

FOLDER = f"{OURS}/launches/"
FRESH = 3600.0  # seconds
_SKEW = 60.0  # seconds by which two clocks may differ without two machines being taken for one that was booted in between
_AGAIN = "remove it, and run `ckptsync doctor --publish` on that node again"
_DECODER: Decoder[dict[str, Any]] = Decoder(dict[str, Any], "what a node says of itself", LIMIT)
_PASSED_ON = ("NCCL_", "GLOO_", "TORCH_NCCL_", "OMP_")  # the ranks have met: how they were told of each other is past
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
        raise ConfigError(
            f"node {said['node']}: another machine ({before.get('host')}) has said what it is under this id since this one was booted",
            hint="give each node its own: `node` in its configuration, or --node",
        )
    text = json.dumps(said, sort_keys=True, ensure_ascii=False)
    store.write(name, [text.encode(errors="replace") + b"\n"])  # a variable or a path may be no text


def published(store: Store, now: float, fresh: float = FRESH) -> tuple[list[dict[str, Any]], list[Corrupt]]:
    """What was said within ``fresh`` seconds of ``now`` (the store's clock), and what cannot be read."""
    found, odd = [], []
    for entry, told in _read(store, [entry for entry in store.names(FOLDER) if now - entry.mtime <= fresh]):
        if isinstance(told, Corrupt):
            odd.append(told)
        else:
            found.append(told | {"node": entry.name.removeprefix(FOLDER).removesuffix(".json")})
    return found, odd


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
