"""The two files of a node in a store: its heartbeat, and the facts of what it is made of.

They are the only files in a store that are overwritten, and nothing but people, and the check for a
second worker, depends on them. Two live workers under one node id would each take the other's
manifests for its own. Whether the other one lives is found out without comparing clocks: on the
same machine by its process, elsewhere by waiting whether it beats again.

Nothing secret is in the facts: of an environment only what the hook lists, of a configuration
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace

import msgspec

from ckptsync.errors import ConfigError, Corrupt, NotFound, StoreError
from ckptsync.records.progress import OF_SAVES, Progress
from ckptsync.records.store_paths import node_facts_name
from ckptsync.stores.contract import About, Store, read_all
from ckptsync.typed_json import Amount, Count, Decoder, FormatNumber, Nanoseconds, Seconds

FORMAT = 1
PERIOD = 30.0  # seconds between beats
LIMIT = 1 << 20
FACTS = "~facts.json"  # the end of the name of a node's facts; no node id has a ~
IsRunning = Callable[["Heartbeat"], bool | None]
"""Whether the process of a heartbeat runs; None if it is of another machine."""


@dataclass(frozen=True, slots=True)
class Disk:
    """The file system of an output directory, in bytes.

    ``spool``: what only our pins still hold there; ``budget`` for that, 0 where the free space
    decides.
    """

    path: str
    free: Count
    total: Count
    spool: Count
    budget: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentWork:
    """What a process of a node does.

    ``running``: each save that it knows and the store does not have whole, and each job of a head.
    ``sent_bytes``: given to the store since the start, failed tries too; ``rate``: bytes a second
    over the last minute. ``verifies``: seconds within which it reads every byte of the store again,
    0 if it does not. ``watch``: output directory → events, polling, waiting or none. ``errors``:
    what the last ticks failed with; ``notes``: what is no error. ``lacks``: name of a report (or of
    its own damaged manifest) → findings whose bytes this node no longer has.
    """

    running: tuple[Progress, ...] = ()
    rate: Amount = 0.0
    sent_bytes: Count = 0
    verifies: Seconds = 0.0
    disk: tuple[Disk, ...] = ()
    watch: Mapping[str, str] = field(default_factory=dict)
    errors: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    lacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def queue(self) -> tuple[str, ...]:
        """Return what is on its way: what moves first, then the oldest."""
        waiting = [
            p for p in self.running if p.kind in OF_SAVES or p.state in ("running", "queued")
        ]
        waiting.sort(key=lambda p: (not p.is_moving, p.since))
        return tuple(dict.fromkeys(p.subject for p in waiting))

    @property
    def jobs(self) -> tuple[Progress, ...]:
        """Return the running jobs of a head."""
        return tuple(p for p in self.running if p.state == "running")

    @property
    def blocked(self) -> dict[str, tuple[str, str]]:
        """Return by subject what no later try mends, such as a bad name, and what to do."""
        refused = (p for p in self.running if p.kind in OF_SAVES and p.state == "refused")
        return {p.subject: (p.reason, p.hint) for p in refused}


@dataclass(frozen=True, slots=True)
class Heartbeat(CurrentWork):
    """What a process of a node does now.

    ``instance`` is one process; ``machine`` one boot of one machine, within which ``pid`` and
    ``began`` name the process. ``started`` and ``written``: seconds on the
    node's clock.
    """

    node: str
    instance: str
    machine: str
    pid: Count
    began: str
    started: Seconds
    roles: tuple[str, ...]
    version: str
    beat: Count = 0
    written: Seconds = 0.0
    period: Seconds = PERIOD
    stopped: bool = False
    format: FormatNumber = FORMAT


@dataclass(frozen=True, slots=True)
class Train:
    """The newest training of a run on a node, as its hook introduced it.

    ``facts``: versions of libraries, and what the environment says of the network. ``local_world``:
    ranks that write into this output directory, 0 while they have not met. ``began``: seconds on
    the node's clock. ``state``: ``runs``, ``ended`` (every process here said so), ``gone`` (none is
    there, and not all had said so); empty where nobody knows.
    """

    trainer: str
    world: Count
    local_world: Count
    began: Seconds
    facts: Mapping[str, str] = field(default_factory=dict)
    state: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a node is made of, for whoever compares nodes; written again when something has changed.

    ``machine``: one boot of one machine; ``limits`` by the system's names; ``file_systems``: path →
    type; ``gpus``: the driver's names of them. ``at``: seconds on the node's clock, when something
    in it was last found changed. ``clock_offset``: that clock minus the store's in ns, measured
    once an hour; 0 within the error of measuring, None where it is not known.
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


_HEARTBEATS = Decoder(Heartbeat, "a heartbeat", LIMIT)
_FACTS = Decoder(Facts, "a node's facts", LIMIT)


def heartbeat_name(node: str, roles: tuple[str, ...]) -> str:
    """Return where a heartbeat lies.

    A head without a worker has a name of its own (no node id has a ``~``): it may share the machine
    with a worker.
    """
    return node_facts_name(node if "worker" in roles else f"{node}~head")


def facts_name(node: str, roles: tuple[str, ...]) -> str:
    """Return where facts lie: beside the heartbeat."""
    return heartbeat_name(node, roles).removesuffix(".json") + FACTS


def decode(name: str, data: bytes) -> Heartbeat | Facts:
    """Return the heartbeat, or the facts, in a file; raise Corrupt."""
    return (_FACTS if name.endswith(FACTS) else _HEARTBEATS).decode(data, name)


def write(store: Store, heart: Heartbeat) -> None:
    """Replace the node's last heartbeat; raise StoreError.

    It is one line of JSON. Where it would be longer than anybody reads, as with thousands of
    failures, lists end early.
    """
    most = 4096
    while len(data := _line(heart)) > LIMIT and most:
        most //= 2
        lacks = list(heart.lacks.items())[:most]
        heart = replace(
            heart,
            running=heart.running[:most],
            errors=heart.errors[:most],
            notes=heart.notes[:most],
            disk=heart.disk[:most],
            watch=dict(list(heart.watch.items())[:most]),
            lacks={record: names[:most] for record, names in lacks},
        )
    _replace(store, heartbeat_name(heart.node, heart.roles), data)


def write_facts(store: Store, facts: Facts, roles: tuple[str, ...]) -> None:
    """Replace the node's last facts; raise StoreError."""
    _replace(store, facts_name(facts.node, roles), _line(facts))


def _replace(store: Store, name: str, data: bytes) -> None:
    """Write a file of a known size: a small one waits for no buffer that an upload holds."""
    store.write(name, [data], About(len(data)))


def _line(record: Heartbeat | Facts) -> bytes:
    return msgspec.json.encode(asdict(record), order="sorted") + b"\n"


def read(store: Store, node: str, roles: tuple[str, ...]) -> Heartbeat | None:
    """Return the last heartbeat of a node; None if there is none that can be read."""
    name = heartbeat_name(node, roles)
    try:
        return _HEARTBEATS.decode(read_all(store, name, LIMIT), name)
    except (NotFound, Corrupt):
        return None  # the next beat replaces it


class Rival(ConfigError):
    """Another live process has this node's name."""


def claim(
    store: Store, mine: Heartbeat, is_running: IsRunning, pause: Callable[[float], object]
) -> Heartbeat:
    """Take the node's name by a first beat. Raises Rival if the process of the last one lives.

    ``pause`` waits that many seconds.
    """
    other = _other(store, mine)
    if other:
        lives = is_running(other)
        if lives is None:
            pause(min(other.period, 10 * PERIOD) * 2.5)
            now = read(store, other.node, other.roles)
            was = (other.instance, other.beat)
            lives = now is not None and not now.stopped and (now.instance, now.beat) != was
        if lives:
            raise _rival(other)
    return _write_next(store, mine)


def beat(store: Store, mine: Heartbeat) -> Heartbeat:
    """Beat once more; return the new heartbeat.  Raises Rival if another process was first.

    Of two, both read the same, so exactly the second one yields.
    """
    other = _other(store, mine)
    if other and (other.started, other.instance) < (mine.started, mine.instance):
        raise _rival(other)
    return _write_next(store, mine)


def farewell(store: Store, mine: Heartbeat) -> StoreError | None:
    """Write that this process has stopped; return the error of a store that does not take it."""
    try:
        write(store, replace(mine, beat=mine.beat + 1, stopped=True, running=()))
    except StoreError as e:
        return e
    return None


def _other(store: Store, mine: Heartbeat) -> Heartbeat | None:
    """Return the heartbeat of another worker of this name that has not stopped."""
    other = read(store, mine.node, mine.roles) if "worker" in mine.roles else None
    return other if other and not other.stopped and other.instance != mine.instance else None


def _write_next(store: Store, mine: Heartbeat) -> Heartbeat:
    following = replace(mine, beat=mine.beat + 1)
    write(store, following)
    return following


def _rival(other: Heartbeat) -> Rival:
    who = f"process {other.pid}, instance {other.instance}"
    return Rival(
        f"node {other.node}: another live worker has this id ({who})",
        hint="stop one of them, or give each its own `node` in the configuration",
    )
