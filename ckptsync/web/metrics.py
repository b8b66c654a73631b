"""What a process, and a head of all of the store, tells Prometheus.  Names and labels are an interface: docs/monitoring.md has them.

Labels are bounded: a run, a node, a directory, never a checkpoint; of runs and nodes at most `MOST`, the newest first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from ckptsync.fleet.nodes import STATES, Node
from ckptsync.fleet.overview import Overview
from ckptsync.fleet.runs import Point, Run
from ckptsync.records.state import STATUSES
from ckptsync.units import clean
from ckptsync.web.measured import Process

MOST = 500
PREFIX = "ckptsync_"

Values = Sequence[tuple[Sequence[str], float]]  # the labels' values, and the sample


def exposition(process: Process, seen: Overview | None) -> bytes:
    """The text that Prometheus reads, version 0.0.4; ``seen``: the last that a head made of the store."""
    registry = CollectorRegistry()
    registry.register(_Given((*of_process(process), *(of_store(seen) if seen else ()))))
    ProcessCollector(registry=registry)
    return bytes(generate_latest(registry))


def of_process(p: Process) -> Iterator[Metric]:
    """Of every process."""
    yield _gauge("build_info", "Always 1.", [((p.node, p.version, "+".join(p.roles)), 1)], "node", "version", "roles")
    yield _gauge("healthy", "Whether /healthz answers 200.", [((), p.is_healthy)])
    yield _count("loop_runs", "Runs of a loop that have ended.", [((x.name,), x.runs) for x in p.loops], "loop")
    yield _count("loop_failures", "Runs of a loop that failed.", [((x.name,), x.failed) for x in p.loops], "loop")
    yield _gauge(
        "loop_busy_seconds", "For how long a loop has been at work; 0: it rests.", [((x.name,), x.busy) for x in p.loops], "loop"
    )
    yield _gauge("errors", "Things that the last runs of all loops failed with.", [((), p.errors)])
    yield _count("sent_bytes", "Bytes given to the store, tries that failed among them.", [((), p.sent_bytes)])
    yield _gauge("queue_checkpoints", "Checkpoints on their way, or waiting.", [((), p.queue)])
    yield _gauge("queue_oldest_seconds", "For how long the first of them has waited.", [((), p.oldest)])
    yield _gauge("disk_free_bytes", "Of an output directory's file system.", [((d.path,), d.free) for d in p.disks], "path")
    yield _gauge("disk_size_bytes", "Of an output directory's file system.", [((d.path,), d.total) for d in p.disks], "path")
    yield _gauge("spool_bytes", "What only pins still hold.", [((d.path,), d.spool) for d in p.disks], "path")
    yield _gauge("spool_budget_bytes", "For that; 0: the free space decides.", [((d.path,), d.budget) for d in p.disks], "path")
    jobs = Counter(job.kind for job in p.jobs)
    yield _gauge("jobs", "Child processes at work.", [((kind,), n) for kind, n in sorted(jobs.items())], "kind")
    yield _count("alerts_delivered", "Messages that a channel took.", [((t.channel,), t.delivered) for t in p.told], "channel")
    yield _count("alerts_failed", "Messages that a channel did not take.", [((t.channel,), t.failed) for t in p.told], "channel")


def of_store(seen: Overview) -> Iterator[Metric]:
    """Of a head.  Times are on the store's clock."""
    yield _gauge("overview_timestamp_seconds", "When what follows was read.", [((), seen.at)])
    alarms = Counter((a.kind, a.code, a.severity) for a in seen.alarms)
    yield _gauge("alarms", "Alarms that hold.", [(key, n) for key, n in sorted(alarms.items())], "kind", "code", "severity")
    yield _gauge("unreadable_records", "Records that cannot be read.", [((), len(seen.catalogue.faults))])
    room = seen.room
    yield _gauge("store_free_bytes", "Of a store that is a path.", [((), room.free)] if room else [])
    yield _gauge("store_size_bytes", "Of a store that is a path.", [((), room.total)] if room else [])
    yield from _nodes(seen.nodes)
    yield from _runs(seen.runs)


def _nodes(nodes: Sequence[Node]) -> Iterator[Metric]:
    states = Counter(n.state for n in nodes)
    yield _gauge("nodes", "Processes that have ever beaten.", [((state,), states[state]) for state in STATES], "state")
    newest = sorted(nodes, key=lambda n: -n.beat)[:MOST]
    yield _gauge("node_alive", "Whether a node beats.", [((n.name,), n.state == "alive") for n in newest], "node")
    yield _gauge("node_beat_timestamp_seconds", "When it beat last.", [((n.name,), n.beat) for n in newest], "node")
    yield _gauge("node_queue_checkpoints", "What was on its way then.", [((n.name,), len(n.queue)) for n in newest], "node")
    yield _gauge("node_errors", "What its last ticks had failed with then.", [((n.name,), len(n.errors)) for n in newest], "node")


def _runs(runs: Sequence[Run]) -> Iterator[Metric]:
    yield _gauge("runs", "Runs that have a checkpoint.", [((), len(runs))])
    newest = sorted(runs, key=lambda r: -(r.newest.ended if r.newest else 0.0))[:MOST]

    def each(value: Callable[[Run], float | None]) -> Values:
        return [((r.run,), found) for r in newest if (found := value(r)) is not None]

    words = [((r.run, word.lower()), r.checkpoints.get(word, 0)) for r in newest for word in STATUSES]
    yield _gauge("run_checkpoints", "Locations by what is known of them.", words, "run", "state")
    for name, (text, value) in _EACH.items():
        yield _gauge(name, text, each(value), "run")


def _ended(point: Point | None) -> float | None:
    return point.ended if point else None


def _step(point: Point | None) -> float | None:
    return point.step if point else None


_EACH: Mapping[str, tuple[str, Callable[[Run], float | None]]] = {
    "run_size_bytes": ("The checkpoints' own files.", lambda r: r.size),
    "run_model_size_bytes": ("The consolidated models.", lambda r: r.model_size),
    "run_newest_timestamp_seconds": ("When the newest checkpoint was written.", lambda r: _ended(r.newest)),
    "run_newest_step": ("The newest checkpoint's number.", lambda r: _step(r.newest)),
    "run_verified_timestamp_seconds": ("When the newest verified one was written.", lambda r: _ended(r.verified)),
    "run_verified_step": ("The newest verified one's number.", lambda r: _step(r.verified)),
    "run_unverified_timestamp_seconds": (
        "When the whole one that has waited longest to be verified had arrived.",
        lambda r: r.unverified.arrived if r.unverified else None,
    ),
    "run_proven_timestamp_seconds": ("When the verified one that was read longest ago was read.", lambda r: r.proven),
    "run_unopenable_models": ("Consolidated models that lack their configuration.", lambda r: len(r.unopenable)),
    "run_interval_seconds": ("How often checkpoints come.", lambda r: r.every),
}
"""Of each run one sample, where it is known."""


@dataclass(frozen=True, slots=True, eq=False)
class _Given:
    """What a registry wants to be asked for."""

    metrics: Sequence[Metric]

    def collect(self) -> Iterable[Metric]:
        return self.metrics


def _gauge(name: str, text: str, values: Values, *labels: str) -> Metric:
    made = GaugeMetricFamily(f"{PREFIX}{name}", text, labels=labels)
    for given, value in _samples(values):
        made.add_metric(given, value)
    return made


def _count(name: str, text: str, values: Values, *labels: str) -> Metric:
    """Its name ends in ``_total`` where it is shown."""
    made = CounterMetricFamily(f"{PREFIX}{name}", text, labels=labels)
    for given, value in _samples(values):
        made.add_metric(given, value)
    return made


def _samples(values: Values) -> Iterable[tuple[Sequence[str], float]]:
    """With labels that may be shown, and each of them once: with two of the same, Prometheus takes none of all."""
    return {tuple(map(clean, given)): value for given, value in values}.items()
