"""Summaries, heartbeats and facts of stores that nobody has made: what is left out is well."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ckptsync.catalogue.summary import Catalogue, Fault, Proven, Summary
from ckptsync.fleet.alarms import Alarm, Patience, Room
from ckptsync.fleet.facts import FORMAT, Facts, Train
from ckptsync.fleet.heartbeat import Heartbeat
from ckptsync.fleet.nodes import Known, Told
from ckptsync.fleet.overview import Overview, Seen, overview
from ckptsync.records.state import Status
from ckptsync.stores.contract import Entry

NOW = 1_000_000.0
HOUR, DAY = 3600.0, 86400.0


def location(name: str = "run/checkpoint-1", word: Status = "VERIFIED", ago: float = 60.0, **changes: Any) -> Summary:
    """One that ended, and arrived, so many seconds ago."""
    run, _, where = name.partition("/")
    checkpoint = where.partition("~")[0]
    step = checkpoint.rpartition("-")[2]
    there = NOW - ago
    made = Summary(
        run, checkpoint, where, int(step) if step.isdigit() else None, word, (), (), ("n0",), ("m",), "", 0, 0, 0, 3, 1000, 0, 0,
        there, there, there, model=True, resume=True, consolidated=word == "VERIFIED",
        proof=Proven("r", "ok", "digest", there, word == "VERIFIED"),
    )  # fmt: skip
    return replace(made, **changes)


def heart(node: str = "n0", roles: tuple[str, ...] = ("worker",), ago: float = 5.0, **changes: Any) -> Known:
    """A heartbeat that came so many seconds ago."""
    known = Heartbeat(node, "i", "machine", 1, "1", NOW - DAY, roles, "1.0", 7, NOW - ago, **changes)
    end = "" if "worker" in roles else "~head"
    return Known(Entry(f".ckptsync/nodes/{node}{end}.json", 1, NOW - ago), known)


def fact(node: str = "n0", offset: float | None = None, **trains: str) -> Known:
    """What a node is made of, and the state of each run's training there."""
    told = {run: Train("t", 1, 1, NOW - DAY, {}, state) for run, state in trains.items()}
    measured = None if offset is None else int(offset * 1e9)
    facts = Facts(node, f"{node}.example", "machine", "u", "0022", "1", "3", "6", {}, {}, (), told, NOW, measured, FORMAT)
    return Known(Entry(f".ckptsync/nodes/{node}~facts.json", 1, NOW), facts)


def seen(
    *known: Known, locations: Iterable[Summary] = (), faults: tuple[Fault, ...] = (), room: Room | None = None, now: float = NOW
) -> Seen:
    """A store of these."""
    return Seen("/store", Catalogue(tuple(locations), faults), Told({k.entry.name: k for k in known}), now, room)


def shown(*known: Known, **rest: Any) -> Overview:
    """What is to be seen of it."""
    return overview(seen(*known, **rest), Patience())


def raised(*known: Known, **rest: Any) -> dict[str, Alarm]:
    """Its alarms, by ``code subject``."""
    return {alarm.key: alarm for alarm in shown(*known, **rest).alarms}
