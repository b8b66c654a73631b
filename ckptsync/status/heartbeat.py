"""The two files of a node in a store: its heartbeat, and the facts of its hardware and software.

By heartbeats people see what each node does, and a second worker with the same node id is refused:
two such workers would each take the other's manifests for its own. Whether the other one lives is
decided without comparing clocks: on the same machine by its process, elsewhere by waiting for its
next beat. Unlike all other files in a store, these two are overwritten.

Facts hold nothing secret: of an environment only the variables that the hook lists, of a
configuration nothing.
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

    ``spool``: bytes of files that only pins still have; ``budget``: their limit, 0 if the free
    space decides.
    """

    path: str
    free: Count
    total: Count
    spool: Count
    budget: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentWork:
    """What a process of a node does.

    ``running``: each save that is not completely stored, and each job of a head. ``sent_bytes``:
    uploaded since the start, failed tries included; ``rate``: bytes a second over the last minute.
    ``verifies``: seconds within which it reads every byte of the store again, 0 if it does not.
    ``watch``: output directory → events, polling, waiting or none. ``errors``: of the last runs of
    its tasks; ``notes``: remarks that are no errors. ``lacks``: name of a report (or of its own
    damaged manifest) → damaged files whose bytes this node no longer has.
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
        """Return the subjects of saves, and of running or queued jobs: moving ones first."""
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
        """Return, by subject, why a save cannot be uploaded, such as a bad name, and what to do."""
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
    """The newest training of a run on a node, as its hook announced it.

    ``facts``: versions of libraries, and the environment's variables for the network.
    ``local_world``: ranks that write into this output directory, 0 while that is unknown.
    ``began``: seconds on the node's clock. ``state``: ``runs``, ``ended`` (every process here wrote
    that), ``gone`` (none exists, and not all wrote that); empty if unknown.
    """

    trainer: str
    world: Count
    local_world: Count
    began: Seconds
    facts: Mapping[str, str] = field(default_factory=dict)
    state: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """The hardware, software and trainings of a node; written again when something has changed.

    ``machine``: one boot of one machine; ``limits`` by the system's names; ``file_systems``: path →
    type; ``gpus``: the driver's names of them. ``at``: seconds on the node's clock, of the last
    change. ``clock_offset``: that clock minus the store's in ns, measured once an hour; 0 within
    the error of measuring, None if unknown.
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
    """Return the name of a node's heartbeat in the store.

    A head without a worker has a name of its own (no node id has a ``~``), since a worker may share
    its machine.
    """
    return node_facts_name(node if "worker" in roles else f"{node}~head")


def facts_name(node: str, roles: tuple[str, ...]) -> str:
    """Return the name of a node's facts, beside the heartbeat."""
    return heartbeat_name(node, roles).removesuffix(".json") + FACTS


def decode(name: str, data: bytes) -> Heartbeat | Facts:
    """Return the facts (a name that ends with `FACTS`) or heartbeat in bytes. Raises Corrupt."""
    return (_FACTS if name.endswith(FACTS) else _HEARTBEATS).decode(data, name)


def write(store: Store, heart: Heartbeat) -> None:
    """Replace the node's last heartbeat. Raises StoreError.

    It is one line of JSON. While that is longer than `LIMIT`, as with thousands of failures, all
    its lists are halved, from 2048 entries on.
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
    """Replace the node's last facts. Raises StoreError."""
    _replace(store, facts_name(facts.node, roles), _line(facts))


def _replace(store: Store, name: str, data: bytes) -> None:
    """Write a file with its size, so that a small one waits for no buffer of an upload.

    Raises StoreError.
    """
    store.write(name, [data], About(len(data)))


def _line(record: Heartbeat | Facts) -> bytes:
    """Return a record as one line of JSON with sorted keys."""
    return msgspec.json.encode(asdict(record), order="sorted") + b"\n"


def read(store: Store, node: str, roles: tuple[str, ...]) -> Heartbeat | None:
    """Return the last heartbeat of a node; None if it is missing or damaged. Raises StoreError."""
    name = heartbeat_name(node, roles)
    try:
        return _HEARTBEATS.decode(read_all(store, name, LIMIT), name)
    except (NotFound, Corrupt):
        return None  # the next beat replaces it


class Rival(ConfigError):
    """Another live process has this node's id."""


def claim(
    store: Store, first_beat: Heartbeat, is_running: IsRunning, pause: Callable[[float], object]
) -> Heartbeat:
    """Claim the node's id by writing a first heartbeat, which is returned.

    If another worker's last heartbeat is there, of another machine, this waits two and a half
    periods, by ``pause``, for its next one.

    Raises Rival if that worker lives, StoreError, and what ``pause`` raises.
    """
    rival = _find_rival(store, first_beat)
    if rival:
        lives = is_running(rival)
        if lives is None:
            pause(min(rival.period, 10 * PERIOD) * 2.5)
            now = read(store, rival.node, rival.roles)
            last_beat = (rival.instance, rival.beat)
            lives = now is not None and not now.stopped and (now.instance, now.beat) != last_beat
        if lives:
            raise _rival_error(rival)
    return _write_next(store, first_beat)


def beat(store: Store, last_beat: Heartbeat) -> Heartbeat:
    """Write and return the next heartbeat.

    Raises StoreError, and Rival if another worker has this node id and was started earlier: of two,
    exactly the later one stops.
    """
    rival = _find_rival(store, last_beat)
    if rival and (rival.started, rival.instance) < (last_beat.started, last_beat.instance):
        raise _rival_error(rival)
    return _write_next(store, last_beat)


def farewell(store: Store, last_beat: Heartbeat) -> StoreError | None:
    """Write that this process has stopped and runs nothing; return the StoreError if that fails."""
    try:
        write(store, replace(last_beat, beat=last_beat.beat + 1, stopped=True, running=()))
    except StoreError as e:
        return e
    return None


def _find_rival(store: Store, heart: Heartbeat) -> Heartbeat | None:
    """Return the last heartbeat of another worker with this node id, unless it has stopped.

    None without one, and for a head without a worker. Raises StoreError.
    """
    last = read(store, heart.node, heart.roles) if "worker" in heart.roles else None
    return last if last and not last.stopped and last.instance != heart.instance else None


def _write_next(store: Store, last_beat: Heartbeat) -> Heartbeat:
    """Write and return the heartbeat after ``last_beat``. Raises StoreError."""
    following = replace(last_beat, beat=last_beat.beat + 1)
    write(store, following)
    return following


def _rival_error(rival: Heartbeat) -> Rival:
    """Return the error that names a rival."""
    who = f"process {rival.pid}, instance {rival.instance}"
    return Rival(
        f"node {rival.node}: another live worker has this id ({who})",
        hint="stop one of them, or give each its own `node` in the configuration",
    )
