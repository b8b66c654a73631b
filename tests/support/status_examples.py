"""Summaries, heartbeats and facts of stores that nobody has made: what is left out is well."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ckptsync.catalogue.location_summary import Catalogue, Proven, Summary
from ckptsync.records.io import Fault
from ckptsync.records.location_status import Status
from ckptsync.records.progress import Progress
from ckptsync.records.store_paths import checkpoint_of
from ckptsync.status.alarms import Alarm, Patience
from ckptsync.status.heartbeat import Facts, Heartbeat, Train
from ckptsync.status.nodes import NodeFile, NodeFiles
from ckptsync.status.overview import Overview, Room, overview
from ckptsync.stores.contract import Entry

NOW = 1_000_000.0
HOUR, DAY = 3600.0, 86400.0


def location(
    name: str = "run/checkpoint-1", word: Status = "VERIFIED", ago: float = 60.0, **changes: Any
) -> Summary:
    """Return the summary of a location that ended, and arrived, ``ago`` seconds before `NOW`."""
    run, _, location_name = name.partition("/")
    checkpoint = checkpoint_of(location_name)
    step = checkpoint.rpartition("-")[2]
    arrival = NOW - ago
    summary = Summary(
        run, checkpoint, location_name, int(step) if step.isdigit() else None, word,
        nodes=("n0",), manifests=("m",), files=3, size=1000,
        ended=arrival, first_arrival=arrival, arrived=arrival,
        model=True, resume=True, consolidated=word == "VERIFIED",
        proof=Proven("r", "ok", "digest", arrival, word == "VERIFIED"),
    )  # fmt: skip
    return replace(summary, **changes)


def waiting(*subjects: str, since: float = NOW, **changes: Any) -> tuple[Progress, ...]:
    """Return uploads that wait, by ``run/checkpoint``."""
    names = [subject.partition("/") for subject in subjects]
    return tuple(
        replace(
            Progress(kind="upload", state="waiting", run=run, checkpoint=name, since=since),
            **changes,
        )
        for run, _, name in names
    )


def job(kind: str, subject: str, **changes: Any) -> Progress:
    """Return the progress of a head's job that runs."""
    run, _, place = subject.partition("/")
    checkpoint = checkpoint_of(place) if place else ""
    entry = Progress(
        kind=kind, state="running", run=run, checkpoint=checkpoint, location=place, since=NOW
    )
    return replace(entry, **changes)


def heart(
    node: str = "n0",
    roles: tuple[str, ...] = ("worker",),
    ago: float = 5.0,
    *,
    queue: tuple[str, ...] = (),
    oldest: float = 0.0,
    **changes: Any,
) -> NodeFile:
    """Return a heartbeat that came ``ago`` seconds before `NOW`."""
    if queue:
        changes["running"] = waiting(*queue, since=NOW - ago - oldest)
    heartbeat = Heartbeat(
        node, "i", "machine", 1, "1", NOW - DAY, roles, "1.0", 7, NOW - ago, **changes
    )
    end = "" if "worker" in roles else "~head"
    return NodeFile(Entry(f".ckptsync/nodes/{node}{end}.json", 1, NOW - ago), heartbeat)


def fact(node: str = "n0", offset: float | None = None, **trains: str) -> NodeFile:
    """Return a node's facts, with the state of each run's training; ``offset``: seconds."""
    trainings = {run: Train("t", 1, 1, NOW - DAY, {}, state) for run, state in trains.items()}
    measured = None if offset is None else int(offset * 1e9)
    machine = (f"{node}.example", "machine", "u", "0022", "1", "3", "6")
    facts = Facts(node, *machine, trains=trainings, at=NOW, clock_offset=measured)
    return NodeFile(Entry(f".ckptsync/nodes/{node}~facts.json", 1, NOW), facts)


def shown(
    *known: NodeFile,
    locations: Iterable[Summary] = (),
    faults: tuple[Fault, ...] = (),
    room: Room | None = None,
    now: float = NOW,
    run: str = "",
) -> Overview:
    """Return the overview of a store of these."""
    files = NodeFiles({k.entry.name: k for k in known})
    return overview(
        "/store",
        Catalogue(tuple(locations), faults),
        files,
        now,
        room=room,
        patience=Patience(),
        run=run,
    )


def raised(*known: NodeFile, **rest: Any) -> dict[str, Alarm]:
    """Return the alarms of `shown`, by ``code subject``."""
    return {alarm.key: alarm for alarm in shown(*known, **rest).alarms}
