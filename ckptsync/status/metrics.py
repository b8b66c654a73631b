"""The metrics of a process, and of a head for the whole store, in the format of Prometheus.

Metrics are tables of a name, a help text and a function, so that each kind of thing (node, run,
disk) is one loop. Names and labels are an interface; docs/metrics.md is made of them. Labels are
bounded: a run, a node, a directory, and a checkpoint only while this process works on it; at most
`MOST` runs and nodes, the newest first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from ckptsync.quantities import clean
from ckptsync.records.location_status import STATUSES
from ckptsync.records.progress import Progress
from ckptsync.status.alarms import Channel
from ckptsync.status.heartbeat import Disk
from ckptsync.status.nodes import STATES, Node
from ckptsync.status.overview import Overview
from ckptsync.status.run_status import RunStatus

MOST = 500
PREFIX = "ckptsync_"

Values = Iterable[tuple[Sequence[str], float]]  # the labels' values, and the sample
Of = TypeVar("Of")
Table = Sequence[tuple[str, str, Callable[[Of], float | None]]]
"""Name and help of metrics, and a function from an item to its sample, None if unknown."""


@dataclass(frozen=True, slots=True)
class Loop:
    """A task of a process: its finished and failed runs, and the seconds of the present one.

    ``busy`` is 0 if it is not running.
    """

    name: str
    runs: int
    failed: int
    busy: float


@dataclass(frozen=True, slots=True)
class Process:
    """The state of a process.

    ``oldest``: seconds for which the oldest upload has waited; ``errors``: of the last runs of its
    tasks; ``running``: the entries of progress whose bytes move.
    """

    node: str
    version: str
    roles: tuple[str, ...]
    is_healthy: bool
    loops: Sequence[Loop] = ()
    queue: int = 0
    oldest: float = 0.0
    sent_bytes: int = 0
    errors: int = 0
    disks: Sequence[Disk] = ()
    running: Sequence[Progress] = ()
    channels: Sequence[Channel] = ()


_LOOPS: Table[Loop] = (
    (
        "loop_runs",
        "Finished runs of a task (scan, worker, heartbeat, head, verifier, overview, …).",
        lambda x: x.runs,
    ),
    ("loop_failures", "Failed runs of a task.", lambda x: x.failed),
)
_DISKS: Table[Disk] = (
    ("disk_free_bytes", "Free bytes of an output directory's file system.", lambda d: d.free),
    ("disk_size_bytes", "Size in bytes of an output directory's file system.", lambda d: d.total),
    (
        "spool_bytes",
        "Bytes that only pins still hold: the trainer has deleted the files.",
        lambda d: d.spool,
    ),
    (
        "spool_budget_bytes",
        "Limit of spool_bytes (worker.spool_budget); 0: the free space decides.",
        lambda d: d.budget,
    ),
)
_CHANNELS: Table[Channel] = (
    (
        "alerts_delivered",
        "Messages that a channel (`slack-1`, `command`) accepted.",
        lambda t: t.delivered,
    ),
    ("alerts_failed", "Failed tries to deliver a message.", lambda t: t.failed),
)
_NODES: Table[Node] = (
    (
        "node_alive",
        "1 if the node's last heartbeat is recent, else 0.",
        lambda n: n.state == "alive",
    ),
    ("node_beat_timestamp_seconds", "Unix time of the node's last heartbeat.", lambda n: n.beat),
    (
        "node_queue_checkpoints",
        "Checkpoints in the node's upload queue, by its last heartbeat.",
        lambda n: len(n.queue),
    ),
    ("node_errors", "Errors of the node, by its last heartbeat.", lambda n: len(n.errors)),
)
_RUNS: Table[RunStatus] = (
    (
        "run_size_bytes",
        "Bytes of the run's checkpoints, without consolidated models.",
        lambda r: r.size,
    ),
    ("run_model_size_bytes", "Bytes of the run's consolidated models.", lambda r: r.model_size),
    (
        "run_newest_timestamp_seconds",
        "Unix time at which the newest checkpoint was written.",
        lambda r: r.newest.ended if r.newest else None,
    ),
    (
        "run_newest_step",
        "Step of the newest checkpoint.",
        lambda r: r.newest.step if r.newest else None,
    ),
    (
        "run_verified_timestamp_seconds",
        "Unix time at which the newest verified checkpoint was written.",
        lambda r: r.verified.ended if r.verified else None,
    ),
    (
        "run_verified_step",
        "Step of the newest verified checkpoint.",
        lambda r: r.verified.step if r.verified else None,
    ),
    (
        "run_proven_timestamp_seconds",
        "Unix time of the oldest of the last verifications of its verified locations.",
        lambda r: r.proven,
    ),
    ("run_interval_seconds", "Median seconds between checkpoints.", lambda r: r.every),
)


def exposition(process: Process, overview: Overview | None) -> bytes:
    """Return the text of all metrics, in version 0.0.4 of Prometheus' format.

    ``overview``: a head's last overview of the store, None elsewhere.
    """
    registry = CollectorRegistry()
    registry.register(_Fixed((*_of_process(process), *(_of_store(overview) if overview else ()))))
    ProcessCollector(registry=registry)
    return bytes(generate_latest(registry))


def _of_process(p: Process) -> Iterator[Metric]:
    """Yield the metrics of this process."""
    about = (p.node, p.version, "+".join(p.roles))
    yield _gauge("build_info", "Always 1.", [(about, 1)], "node", "version", "roles")
    yield _gauge("healthy", "1 if /healthz answers 200, else 0.", [((), p.is_healthy)])
    loops = [(x.name, x) for x in p.loops]
    yield from _each(_count, _LOOPS, loops, "loop")
    yield _gauge(
        "loop_busy_seconds",
        "Seconds since the current run of a task began; 0 if it is idle.",
        [((name,), x.busy) for name, x in loops],
        "loop",
    )
    yield _gauge("errors", "Errors in the last run of every task.", [((), p.errors)])
    yield _count(
        "sent_bytes",
        "Bytes uploaded since the start, failed attempts included.",
        [((), p.sent_bytes)],
    )
    yield _gauge(
        "queue_checkpoints", "Checkpoints that upload or wait for upload.", [((), p.queue)]
    )
    yield _gauge(
        "queue_oldest_seconds",
        "Seconds that the oldest checkpoint in the queue has waited.",
        [((), p.oldest)],
    )
    yield from _each(_gauge, _DISKS, [(d.path, d) for d in p.disks], "path")
    jobs = sorted(Counter(entry.kind for entry in p.running if entry.state == "running").items())
    yield _gauge("jobs", "Running child processes.", [((kind,), n) for kind, n in jobs], "kind")
    running = [((e.kind, e.run, e.location or e.checkpoint), e) for e in p.running]
    labels = ("kind", "run", "checkpoint")
    done = [(about, e.done) for about, e in running]
    yield _gauge(
        "running_done_bytes",
        "Bytes done of an upload, repair or job of this process.",
        done,
        *labels,
    )
    totals = [(about, e.total) for about, e in running if e.total]
    yield _gauge("running_total_bytes", "Bytes in all of it, if known.", totals, *labels)
    yield from _each(_count, _CHANNELS, [(t.channel, t) for t in p.channels], "channel")


def _of_store(overview: Overview) -> Iterator[Metric]:
    """Yield the metrics of the whole store.  Times are on the store's clock."""
    yield _gauge(
        "overview_timestamp_seconds",
        "Unix time when the head read the store for these metrics; an old one: it cannot read it.",
        [((), overview.at)],
    )
    alarms = Counter((a.kind, a.code, a.severity) for a in overview.alarms)
    yield _gauge("alarms", "Active alarms.", sorted(alarms.items()), "kind", "code", "severity")
    free, total = (
        ([((), overview.room.free)], [((), overview.room.total)]) if overview.room else ([], [])
    )
    yield _gauge("store_free_bytes", "Free bytes (a store at a path).", free)
    yield _gauge("store_size_bytes", "Size (a store at a path).", total)
    states = Counter(n.state for n in overview.nodes)
    yield _gauge(
        "nodes",
        "Processes with a heartbeat: alive, silent, stopped, unreadable.",
        [((state,), states[state]) for state in STATES],
        "state",
    )
    nodes = sorted(overview.nodes, key=lambda n: -n.beat)[:MOST]
    yield from _each(_gauge, _NODES, [(n.name, n) for n in nodes], "node")
    runs = sorted(overview.runs, key=lambda r: -(r.newest.ended if r.newest else 0.0))[:MOST]
    statuses = [
        ((r.run, status.lower()), r.checkpoints.get(status, 0)) for r in runs for status in STATUSES
    ]
    yield _gauge(
        "run_checkpoints", "Locations of a run by status, in lower case.", statuses, "run", "state"
    )
    yield from _each(_gauge, _RUNS, [(r.run, r) for r in runs], "run")


@dataclass(frozen=True, slots=True, eq=False)
class _Fixed:
    """A collector that returns these metrics."""

    metrics: Sequence[Metric]

    def collect(self) -> Iterable[Metric]:
        """Return the metrics."""
        return self.metrics


def _each(
    family: Callable[[str, str, Values, str], Metric],
    table: Table[Of],
    items: Sequence[tuple[str, Of]],
    label: str,
) -> Iterator[Metric]:
    """Yield each metric of a table, with a sample of each item that has a value for it.

    ``items``: each with the value of its label; ``label``: the label's name.
    """
    for name, text, sample in table:
        samples = [
            ((item_label,), value)
            for item_label, item in items
            if (value := sample(item)) is not None
        ]
        yield family(name, text, samples, label)


def _gauge(name: str, text: str, values: Values, *labels: str) -> Metric:
    """Return a gauge with one sample for each of ``values``."""
    return _filled(GaugeMetricFamily(f"{PREFIX}{name}", text, labels=labels), values)


def _count(name: str, text: str, values: Values, *labels: str) -> Metric:
    """Return a counter; Prometheus shows its name with ``_total`` at the end."""
    return _filled(CounterMetricFamily(f"{PREFIX}{name}", text, labels=labels), values)


def _filled(metric: GaugeMetricFamily | CounterMetricFamily, values: Values) -> Metric:
    """Add samples to a metric, and return it; of samples with equal clean labels only the last.

    Prometheus refuses all samples if two have the same labels.
    """
    for labels, value in {tuple(map(clean, names)): value for names, value in values}.items():
        metric.add_metric(labels, value)
    return metric
