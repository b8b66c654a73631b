"""An overview as lines for people, within so many columns: what is wrong comes first.  Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone

from ckptsync.cli import output
from ckptsync.cli.locations import sibling_line
from ckptsync.fleet.alarms import Alarm, Room
from ckptsync.fleet.heartbeat import Disk, Job
from ckptsync.fleet.nodes import STATES, Node
from ckptsync.fleet.overview import Overview
from ckptsync.fleet.runs import Arriving, Point, Run
from ckptsync.units import show_duration, show_size

NODES = ("NODE", "ROLES", "STATE", "BEAT", "QUEUE", "OLDEST", "RATE")
RUNS = ("RUN", "LOCATIONS", "SIZE", "NEWEST", "STATE", "AGO", "LAST GOOD")
MOST = 20  # alarms, nodes and runs that are shown
LEAST = 12  # columns of a name, however narrow the terminal
WIDEST = 40  # characters of any other column
LONGEST = 5000  # characters of one error: what nodes say is bounded by the size of a heartbeat alone
_LAST = 253402300799.0  # the last second of a calendar; a file's own time may be any
WIDE = 10_000  # columns, where nothing is to be broken

Row = tuple[Sequence[str], Sequence[str]]  # its cells, and lines to stand below them


def lines(seen: Overview, width: int = WIDE) -> list[str]:
    """None is longer than ``width`` columns, if that is 80 or more."""
    nodes = [(_node(n), _about_node(n)) for n in sorted(seen.nodes, key=_trouble)]
    runs = [(_run(r, seen.at), _about_run(r, seen.at, seen.store)) for r in sorted(seen.runs, key=_newest, reverse=True)]
    faults = [f"{f.name}: {f.error}" for f in seen.catalogue.faults]
    return [
        *_heading(seen, width),
        *(line for a in seen.alarms[:MOST] for line in _alarm(a, seen.at, width)),
        *_more(seen.alarms, "alarms"),
        "",
        *(_table(NODES, nodes, width) if nodes else ["no node has been seen here"]),
        "",
        *(_table(RUNS, runs, width) if runs else ["no checkpoints yet"]),
        *(line for f in faults[:MOST] for line in _wrapped(f"unreadable: {f}", width)),
        *_more(faults, "records that cannot be read"),
    ]


def alarm_lines(seen: Overview) -> list[str]:
    """One for each alarm, or one that says that there is none: what a monitoring's check prints."""
    said = [f"{a.severity.upper()} {a.code}: {a.text}" for a in seen.alarms]
    return [output.clean(line) for line in said or [f"OK: {_counts(seen)}"]]


def _heading(seen: Overview, width: int) -> Iterator[str]:
    at = datetime.fromtimestamp(min(max(seen.at, 0.0), _LAST), timezone.utc).strftime("%Y-%m-%d %H:%M:%SZ")
    yield from _wrapped(f"store {seen.store}  {at}", width)
    yield from _wrapped(_counts(seen), width)
    if seen.room:
        yield f"{_free(seen.room)} free"
    if seen.alarms:
        yield ""


def _counts(seen: Overview) -> str:
    states = _numbers({state: sum(n.state == state for n in seen.nodes) for state in STATES})
    locations = _numbers(seen.checkpoints)
    sizes = f"{show_size(seen.size)} + models {show_size(seen.model_size)}"
    parts = [f"nodes: {states or 'none'}", f"runs: {len(seen.runs)}", f"locations: {locations or 'none'}", sizes]
    return "; ".join([*parts, *([f"{len(seen.alarms)} alarm{'s' if len(seen.alarms) > 1 else ''}"] if seen.alarms else [])])


def _alarm(alarm: Alarm, now: float, width: int) -> Iterator[str]:
    since = "" if alarm.since is None else f" for {_ago(now, alarm.since)}"
    yield from _wrapped(f"{alarm.severity.upper()} {alarm.code}{since}: {alarm.text}", width)
    yield from _wrapped(f"  -> {alarm.todo}", width)


def _node(node: Node) -> Sequence[str]:
    return [
        node.name,
        "+".join(node.roles),
        node.state,
        _shortly(node.age),
        str(len(node.queue)) if node.queue else "-",
        _shortly(node.oldest) if node.queue else "-",
        f"{show_size(round(node.rate))}/s" if node.rate >= 1 else "-",
    ]


def _about_node(node: Node) -> list[str]:
    if node.state == "stopped":
        return []
    return [
        *([f"now    {_first(node.queue)}"] if node.queue else []),
        *(f"job    {_job(job)}" for job in node.jobs[:MOST]),
        *(f"disk   {_disk(disk, node.watch)}" for disk in node.disk[:MOST]),
        *(f"error  {error}" for error in node.errors[:3]),
        *_more(node.errors, "errors", 3),
        *(f"note   {note}" for note in node.notes[:3]),
        *_more(node.notes, "notes", 3),
    ]


def _job(job: Job) -> str:
    far = (
        f": {100 * job.done // job.total}% of {show_size(job.total)}"
        if job.total
        else f": {show_size(job.done)}"
        if job.done
        else ""
    )
    return f"{job.kind} {job.subject}{far} for {_shortly(job.seconds)}"


def _disk(disk: Disk, watch: Mapping[str, str]) -> str:
    watched = f", watched by {watch[disk.path]}" if disk.path in watch else ""
    budget = f" of {show_size(disk.budget)}" if disk.budget else ""
    return (
        f"{disk.path}: {show_size(disk.free)} of {show_size(disk.total)} free, {show_size(disk.spool)}{budget} only pinned{watched}"
    )


def _run(run: Run, now: float) -> Sequence[str]:
    newest = run.newest
    return [
        run.run,
        str(sum(run.checkpoints.values())),
        show_size(run.size),
        _short(newest),
        newest.status if newest else "-",
        _ago(now, newest.ended) if newest else "-",
        _short(run.verified),
    ]


def _about_run(run: Run, now: float, url: str) -> list[str]:
    first = run.unverified
    others = {word: n for word, n in run.checkpoints.items() if word != "VERIFIED"}
    return [
        *([f"locations {_numbers(run.checkpoints)}"] if others and sum(run.checkpoints.values()) > 1 else []),
        *([f"oldest unverified {first.location}, {first.status} for {_ago(now, first.arrived)}"] if first else []),
        *(line for a in run.arriving[-3:] for line in _about_arriving(run.run, a, now, url)),
        *([f"no configuration, so that nothing opens the models of {_first(run.unopenable)}"] if run.unopenable else []),
        *([f"one every {_shortly(run.every)}{f', its training {run.training}' if run.training else ''}"] if run.every else []),
    ]


def _about_arriving(run: str, its: Arriving, now: float, url: str) -> list[str]:
    beside = [sibling_line(url, run, its.location, s) for s in its.siblings]
    return [f"arriving {its.location} for {_ago(now, its.since)}: {_first(its.lost)}", *beside]


def _trouble(node: Node) -> tuple[bool, bool, bool, str]:
    return node.state == "stopped", node.state == "alive", not node.errors, node.name


def _newest(run: Run) -> float:
    return run.newest.ended if run.newest else 0.0


def _table(heading: Sequence[str], rows: Sequence[Row], width: int) -> Iterator[str]:
    """Names in the first column give way where a row is too wide."""
    cells = [heading, *([row[0], *(_cut(cell, WIDEST) for cell in row[1:])] for row, _ in rows[:MOST])]
    others = sum(max(len(row[i]) for row in cells) + 2 for i in range(1, len(heading)))
    room = max(LEAST, width - others)
    table = output.aligned([[_cut(row[0], room), *row[1:]] for row in cells])
    yield table[0]
    for line, (_, below) in zip(table[1:], rows, strict=False):
        yield line
        for text in below:
            yield from _wrapped(f"  {text}", width)
    yield from _more(rows, "more")


def _wrapped(text: str, width: int) -> list[str]:
    """Long words are broken: a path is seen whole."""
    return textwrap.wrap(
        output.clean(text, LONGEST), width, subsequent_indent="    ", drop_whitespace=True, replace_whitespace=False, tabsize=1
    )


def _more(of: Sequence[object], what: str, most: int = MOST) -> list[str]:
    return [f"and {len(of) - most} {what if what == 'more' else f'more {what}'}"] if len(of) > most else []


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else f"{text[: room - 1]}…"


def _short(point: Point | None) -> str:
    return "-" if point is None else str(point.step) if point.step is not None else _cut(point.checkpoint, LEAST)


def _first(found: Sequence[str]) -> str:
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return f"{found[0]}{more}" if found else "nobody knows what is missing"


def _numbers(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {word}" for word, n in counts.items() if n)


def _free(room: Room) -> str:
    return f"{show_size(room.free)} of {show_size(room.total)}"


def _shortly(seconds: float) -> str:
    return show_duration(round(seconds))


def _ago(now: float, then: float) -> str:
    return _shortly(max(0.0, now - then))
