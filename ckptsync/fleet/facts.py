"""What a node is made of, for whoever compares nodes: one file beside its heartbeat, written again when something in it has changed.

Nothing secret stands in it: of an environment only what the hook lists, of a configuration nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field

import msgspec

from ckptsync.decoding import Count, Decoder, FormatNumber, Nanoseconds, Seconds
from ckptsync.errors import Corrupt, NotFound
from ckptsync.fleet.heartbeat import FACTS, LIMIT, heartbeat_name
from ckptsync.records.names import OURS
from ckptsync.stores.contract import Store, read_all

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Train:
    """The newest training of a run on this node, as its hook introduced it: ``facts`` are versions of libraries and what the environment says of the network.

    ``local_world``: ranks that write into this output directory, 0 while they have not met.  ``began`` in seconds on the node's clock.
    ``state``: ``runs``, ``ended`` (every process here said so), ``gone`` (none is there, and not all had said so); empty where nobody knows.
    """

    trainer: str
    world: Count
    local_world: Count
    began: Seconds
    facts: Mapping[str, str] = field(default_factory=dict)
    state: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """``machine``: one boot of one machine; ``limits`` by the system's names; ``file_systems``: path → type; ``gpus``: the driver's names of them.

    ``at`` in seconds on the node's clock, when something in it was last found changed.  ``clock_offset``: that clock minus the store's in ns, measured
    once an hour; 0 within the error of measuring, ``None`` where it is not known.
    """

    node: str
    host: str
    machine: str
    user: str
    umask: str
    ckptsync: str
    python: str
    kernel: str
    limits: Mapping[str, int] = field(default_factory=dict)
    file_systems: Mapping[str, str] = field(default_factory=dict)
    gpus: tuple[str, ...] = ()
    trains: Mapping[str, Train] = field(default_factory=dict)
    at: Seconds = 0.0
    clock_offset: Nanoseconds | None = None
    format: FormatNumber = FORMAT


_DECODER = Decoder(Facts, "a node's facts", LIMIT)


def facts_name(node: str, roles: tuple[str, ...]) -> str:
    """Where they lie: beside the heartbeat."""
    return heartbeat_name(node, roles).removesuffix(".json") + FACTS


def write(store: Store, facts: Facts, roles: tuple[str, ...]) -> None:
    """Replaces the node's last ones; raises StoreError."""
    store.write(facts_name(facts.node, roles), [msgspec.json.encode(asdict(facts), order="sorted") + b"\n"])


def listed(store: Store) -> Iterator[Facts | Corrupt]:
    """Every node's; those that cannot be read are their errors."""
    for entry in store.names(f"{OURS}/nodes/"):
        if entry.name.endswith(FACTS):
            try:
                yield decode(entry.name, read_all(store, entry.name, LIMIT))
            except Corrupt as e:
                yield e
            except NotFound:
                continue  # gone since it was listed


def decode(name: str, data: bytes) -> Facts:
    """Raises Corrupt."""
    return _DECODER.decode(data, name)
