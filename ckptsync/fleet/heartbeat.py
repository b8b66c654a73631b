"""A node's word about itself: the only file in a store that is overwritten, and nothing depends on it but people and this check.

Two live workers under one node id would each take the other's manifests for its own.  Whether another one lives is asked
without comparing clocks: on the same machine its process answers, and elsewhere a living heart beats again while we wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace

import msgspec

from ckptsync.decoding import Amount, Count, Decoder, FormatNumber, Seconds
from ckptsync.errors import ConfigError, Corrupt, NotFound, StoreError
from ckptsync.records.names import OURS, node_facts_name
from ckptsync.stores.contract import Entry, Store, read_all

FORMAT = 1
PERIOD = 30.0  # seconds between beats
LIMIT = 1 << 20
FACTS = "~facts.json"  # the end of a node's facts' name, which lie beside its heartbeat; no node id holds a ~


@dataclass(frozen=True, slots=True)
class Disk:
    """The file system of an output directory, in bytes: ``spool``, what only our pins still hold there; ``budget`` for that, 0 where the free space decides."""

    path: str
    free: Count
    total: Count
    spool: Count
    budget: Count = 0


@dataclass(frozen=True, slots=True)
class Job:
    """Long work of a head, in a process of its own: ``kind`` (consolidate, verify, ...) is done to ``subject`` (a run's location).

    ``done`` of ``total`` bytes, 0 where that is not known; ``seconds`` since it began.
    """

    kind: str
    subject: str
    done: Count = 0
    total: Count = 0
    seconds: Seconds = 0.0


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """``instance`` is one process; ``machine`` one boot of one machine, within which ``pid`` and ``began`` name the process.

    ``started`` and ``told`` (when it was written): seconds since the epoch on the node's clock.  ``queue``: what is on its way; ``errors``: what the last ticks said.

    ``oldest``: seconds for which the first of the queue has waited.  ``sent_bytes``: given to the store since the start, tries that failed among them;
    ``rate``: bytes a second over the last minute.  ``watch``: output directory → events, polling, waiting or none.  ``notes``: what is no error, and good to know.
    ``lacks``: name of a report (or of its own damaged manifest) → what of its findings this node cannot give, since its bytes are here no more.
    ``jobs``: what its child processes do; ``verifies``: seconds within which it reads every byte of the store again, 0 if it does not.
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
    told: Seconds = 0.0
    period: Seconds = PERIOD
    stopped: bool = False
    queue: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    oldest: Seconds = 0.0
    sent_bytes: Count = 0
    rate: Amount = 0.0
    disk: tuple[Disk, ...] = ()
    watch: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    lacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    jobs: tuple[Job, ...] = ()
    verifies: Seconds = 0.0
    format: FormatNumber = FORMAT


_DECODER = Decoder(Heartbeat, "a heartbeat", LIMIT)


def heartbeat_name(node: str, roles: tuple[str, ...]) -> str:
    """Where it lies.  A head without a worker has a name of its own (no node id holds a ``~``): it may share the machine with one."""
    return node_facts_name(node if "worker" in roles else f"{node}~head")


def encode(heart: Heartbeat) -> bytes:
    """One line of JSON.  Where it would be longer than anybody reads, as with thousands of failures, lists end early."""
    most = 4096
    while len(data := msgspec.json.encode(asdict(heart), order="sorted") + b"\n") > LIMIT and most:
        most //= 2
        heart = _shortened(heart, most)
    return data


def _shortened(heart: Heartbeat, most: int) -> Heartbeat:
    return replace(
        heart,
        queue=heart.queue[:most],
        errors=heart.errors[:most],
        notes=heart.notes[:most],
        disk=heart.disk[:most],
        jobs=heart.jobs[:most],
        watch=dict(list(heart.watch.items())[:most]),
        lacks={record: names[:most] for record, names in list(heart.lacks.items())[:most]},
    )


def decode(name: str, data: bytes) -> Heartbeat:
    """Raises Corrupt."""
    return _DECODER.decode(data, name)


def write(store: Store, heart: Heartbeat) -> None:
    """Replaces the node's last one; raises StoreError."""
    store.write(heartbeat_name(heart.node, heart.roles), [encode(heart)])


def read(store: Store, node: str, roles: tuple[str, ...]) -> Heartbeat | None:
    """The last one, or ``None`` if there is none that can be read: it is overwritten by the next beat."""
    name = heartbeat_name(node, roles)
    try:
        return decode(name, read_all(store, name, LIMIT))
    except (NotFound, Corrupt):
        return None


def listed(store: Store) -> Iterator[tuple[Entry, Heartbeat | Corrupt]]:
    """Every node's, with its entry (whose mtime is on the store's clock); one that cannot be read is its error."""
    for entry in store.names(f"{OURS}/nodes/"):
        if entry.name.endswith(".json") and not entry.name.endswith(FACTS):
            try:
                yield entry, decode(entry.name, read_all(store, entry.name, LIMIT))
            except Corrupt as e:
                yield entry, e
            except NotFound:
                continue  # gone since it was listed


class Rival(ConfigError):
    """Another live process has this node's name."""


def claim(
    store: Store, mine: Heartbeat, is_running: Callable[[Heartbeat], bool | None], pause: Callable[[float], object]
) -> Heartbeat:
    """Take the node's name: the first beat, which replaces a dead process's last one.  Raises Rival if its process lives.

    ``is_running`` knows of this machine's processes (``None``: another machine's); ``pause`` waits that many seconds.
    """
    other = read(store, mine.node, mine.roles) if "worker" in mine.roles else None
    is_own = other is not None and other.instance == mine.instance  # an earlier try, whose answer was lost
    if other and not other.stopped and not is_own and _lives(store, other, is_running, pause):
        raise _rival(other)
    return _beaten(store, mine)


def _lives(
    store: Store, other: Heartbeat, is_running: Callable[[Heartbeat], bool | None], pause: Callable[[float], object]
) -> bool:
    lives = is_running(other)
    if lives is not None:
        return lives
    pause(min(other.period, 10 * PERIOD) * 2.5)
    now = read(store, other.node, other.roles)
    return now is not None and not now.stopped and (now.instance, now.beat) != (other.instance, other.beat)


def beat(store: Store, mine: Heartbeat) -> Heartbeat:
    """Beat once more; the new heartbeat.  Raises Rival if another process beats under this id and was there first."""
    other = read(store, mine.node, mine.roles) if "worker" in mine.roles else None
    if other and not other.stopped and other.instance != mine.instance and yields_to(mine, other):
        raise _rival(other)
    return _beaten(store, mine)


def _beaten(store: Store, mine: Heartbeat) -> Heartbeat:
    following = replace(mine, beat=mine.beat + 1)
    write(store, following)
    return following


def yields_to(mine: Heartbeat, other: Heartbeat) -> bool:
    """Whether ``mine`` is the second of the two.  Both sides read the same two values, so exactly one of them yields."""
    return (other.started, other.instance) < (mine.started, mine.instance)


def farewell(store: Store, mine: Heartbeat) -> StoreError | None:
    """Say that this process has stopped; a store that cannot hear it is the answer, not an exception: we are leaving."""
    try:
        write(store, replace(mine, beat=mine.beat + 1, stopped=True, queue=()))
    except StoreError as e:
        return e
    return None


def store_now(known: Iterable[tuple[Entry, Heartbeat]], machine: str, now: float) -> float:
    """The time on the store's clock: this machine's own, corrected by what one of its heartbeats tells, if there is one.  Pure."""
    offsets = [heart.told - entry.mtime for entry, heart in known if machine and heart.machine == machine and heart.told]
    return now - min(offsets, key=abs, default=0.0)


def _rival(other: Heartbeat) -> Rival:
    return Rival(
        f"node {other.node}: another live worker has this id (process {other.pid}, instance {other.instance})",
        hint="stop one of them, or give each its own `node` in the configuration",
    )
