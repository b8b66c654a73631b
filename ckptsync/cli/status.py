"""``ckptsync status``: show what the nodes and heads of a store do, and what is wrong."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from datetime import datetime, timezone
from pathlib import Path

from ckptsync.cli import output
from ckptsync.cli.arguments import (
    add_targets,
    configuration,
    only_target,
    store_run_location,
)
from ckptsync.cli.ls import catalogues, exit_code
from ckptsync.cli.ls_run import sibling_line, upload_line
from ckptsync.cli.output import first_of
from ckptsync.cli.screen import (
    EVERY,
    LEAST,
    MOST,
    NARROWEST,
    Row,
    Screen,
    alarms_of,
    cut,
    more,
    running_lines,
    table,
    wrapped,
)
from ckptsync.errors import CkptsyncError, ConfigError
from ckptsync.quantities import clean, show_duration, show_size
from ckptsync.service.monitor import OverviewReader, patience
from ckptsync.status.alarms import Patience
from ckptsync.status.live_catalogue import ON_ITS_WAY
from ckptsync.status.locations import describe_locations
from ckptsync.status.nodes import STATES, Node
from ckptsync.status.overview import Overview, document
from ckptsync.status.run_status import Point, RunStatus
from ckptsync.stores.contract import Store

WIDE = 10_000  # columns off a terminal: no line is broken there, so that a program can search it
NODES = ("NODE", "ROLES", "STATE", "BEAT", "QUEUE", "OLDEST", "RATE")
RUNS = ("RUN", "LOCATIONS", "SIZE", "NEWEST", "STATUS", "AGO", "LAST GOOD")
DETAILS = "With --json everything is printed as one document (`ckptsync help monitoring`)."
_LAST = 253402300799.0  # the last second of a calendar; a file's time may be any


def add_arguments(command: argparse.ArgumentParser) -> None:
    add_targets(command, "RUN", "only this run, the nodes and the alarms")
    how = command.add_mutually_exclusive_group()
    how.add_argument(
        "--watch", action="store_true", help="draw again every 2 seconds, until q is pressed"
    )
    how.add_argument(
        "--check",
        action="store_true",
        help="print a line for each alarm; exit code 1 if there is any, 10 if one is damage: for"
        " cron, Nagios and the like",
    )
    how.add_argument(
        "--html",
        metavar="FILE",
        help="write the overview and the runs into an HTML file that needs no server",
    )


def run(args: argparse.Namespace) -> int:
    """Print the overview once; with ``--watch`` until it is interrupted."""
    store, wanted, location = store_run_location(args, only_target(args, "RUN"))
    if location:
        hint = f"ckptsync ls {wanted}/{location} shows a checkpoint"
        raise ConfigError(f"{wanted}/{location}: status is of a run", hint=hint)
    config = configuration(args)
    waits = patience(config) if config else Patience()
    overviews = OverviewReader(store, catalogues(store, wanted), waits, wanted)
    if args.watch and not args.json and sys.stdout.isatty():
        return Screen(overviews.read, overview_lines, store.url).run()
    while True:
        seen = overviews.read()
        code = exit_code(seen.catalogue)
        if args.html is not None:
            _write_html(store, seen, Path(args.html))
            if not args.json:
                output.say(f"{args.html}: written, open it in a browser")
                return code
        if args.check:
            is_damaged = any(alarm.kind in ("damage", "weights") for alarm in seen.alarms)
            code = 10 if is_damaged else int(bool(seen.alarms))
        if args.json:
            locations = describe_locations(store.url, seen.catalogue.shown, seen.running)
            output.print_json({**document(seen), "locations": locations}, code)
        else:
            width = WIDE
            if sys.stdout.isatty():
                width = max(NARROWEST, shutil.get_terminal_size().columns)
            for line in alarm_lines(seen) if args.check else overview_lines(seen, width):
                print(output.paint(line))
        if not args.watch:
            return code
        sys.stdout.flush()
        time.sleep(EVERY)


def _write_html(store: Store, seen: Overview, path: Path) -> None:
    """Write the page into a file, which is there whole or not at all.  Raises CkptsyncError."""
    from ckptsync.web.documents import Documents
    from ckptsync.web.html_file import html_file

    if path.is_dir():
        raise ConfigError(f"--html: {path} is a directory", hint="name a file: --html status.html")
    body, draft = html_file(seen, Documents(store)), path.with_name(f"{path.name}.part")
    try:
        draft.write_bytes(body)
        draft.replace(path)
    except OSError as e:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise CkptsyncError(f"{path}: {e.strerror}", hint="name a file that you may write") from e


def alarm_lines(seen: Overview) -> list[str]:
    """Return a line for each alarm, as ``--check`` prints them, or one that all is well."""
    lines = [f"{alarm.severity.upper()} {alarm.code}: {alarm.text}" for alarm in seen.alarms]
    return [clean(line) for line in lines or [f"OK: {_counts(seen)}"]]


def overview_lines(seen: Overview, width: int = WIDE) -> list[str]:
    """Return an overview as lines of at most ``width`` columns (20 or more), alarms first."""
    urgent = sorted(
        seen.nodes, key=lambda n: (n.state == "stopped", n.state == "alive", not n.errors, n.name)
    )
    nodes = [_node_row(node) for node in urgent]
    newest = sorted(seen.runs, key=lambda r: r.newest.ended if r.newest else 0.0, reverse=True)
    told = {(e.run, e.location) for e in seen.running if e.state in ON_ITS_WAY}
    runs = [_run_row(one, seen.at, seen.store, told) for one in newest]
    faults = [f"unreadable: {fault.text}" for fault in seen.catalogue.faults]
    return [
        *_heading(seen, width),
        *([""] if seen.running else []),
        *running_lines(seen.running, seen.at, width),
        "",
        *(table(RUNS, runs, width) if runs else ["no checkpoints yet"]),
        *(line for fault in faults[:MOST] for line in wrapped(fault, width)),
        *more(faults, "more records that cannot be read"),
        "",
        *(table(NODES, nodes, width) if nodes else ["no node has written to this store"]),
    ]


def _heading(seen: Overview, width: int) -> Iterator[str]:
    at = datetime.fromtimestamp(min(max(seen.at, 0.0), _LAST), timezone.utc)
    yield from wrapped(f"store {seen.store}  {at:%Y-%m-%d %H:%M:%SZ}", width)
    yield from wrapped(_counts(seen), width)
    if seen.room:
        yield f"{show_size(seen.room.free)} of {show_size(seen.room.total)} free"
    if seen.alarms:
        yield ""
    yield from alarms_of(seen.alarms, seen.at, width)


def _counts(seen: Overview) -> str:
    states = _numbers({state: sum(n.state == state for n in seen.nodes) for state in STATES})
    locations = _numbers(seen.checkpoints)
    parts = [
        f"nodes: {states or 'none'}",
        f"runs: {len(seen.runs)}",
        f"locations: {locations or 'none'}",
        f"{show_size(seen.size)} + models {show_size(seen.model_size)}",
    ]
    if seen.alarms:
        parts.append(f"{len(seen.alarms)} alarm{'s' if len(seen.alarms) > 1 else ''}")
    return "; ".join(parts)


def _node_row(node: Node) -> Row:
    rate = sum(p.rate for p in node.running if p.is_moving)
    cells = [
        node.name,
        "+".join(node.roles),
        node.state,
        _shortly(node.age),
        str(len(node.queue)) if node.queue else "-",
        _shortly(node.oldest + node.age) if node.oldest else "-",
        f"{show_size(round(rate))}/s" if rate >= 1 else "-",
    ]
    if node.state == "stopped":
        return cells, []
    below = []
    for disk in node.disk[:MOST]:
        free = f"{show_size(disk.free)} of {show_size(disk.total)} free"
        budget = f" of {show_size(disk.budget)}" if disk.budget else ""
        watched = f", watched by {node.watch[disk.path]}" if disk.path in node.watch else ""
        pinned = f"{show_size(disk.spool)}{budget} only pinned"
        below.append(f"disk   {disk.path}: {free}, {pinned}{watched}")
    for word, texts in (("error", node.errors), ("note ", node.notes)):
        below += [f"{word}  {text}" for text in texts[:3]]
        below += more(texts, f"more {word.strip()}s", 3)
    return cells, below


def _run_row(one: RunStatus, now: float, url: str, told: AbstractSet[tuple[str, str]]) -> Row:
    """Return a run; ``told``: locations of which other lines say what nodes do with them."""
    newest, total = one.newest, sum(one.checkpoints.values())
    cells = [
        one.run,
        str(total),
        show_size(one.size),
        _step(newest),
        newest.status if newest else "-",
        _ago(now, newest.ended) if newest else "-",
        _step(one.verified),
    ]
    below = []
    if total > 1 and set(one.checkpoints) != {"VERIFIED"}:
        below.append(f"locations {_numbers(one.checkpoints)}")
    if first := one.unverified:
        since = _ago(now, first.arrived)
        below.append(f"oldest unverified {first.location}, {first.status} for {since}")
    sent = [u for u in one.uploading if (one.run, u.location) not in told][-3:]
    below += [f"uploading {u.location} {upload_line(u.nodes, u.percent)}" for u in sent]
    for late in [s for s in one.incomplete if (one.run, s.location) not in told][-3:]:
        missing = first_of(late.lost) or "unknown what is missing"
        below.append(f"incomplete {late.location} for {_ago(now, late.since)}: {missing}")
        below += [sibling_line(url, one.run, late.location, other) for other in late.siblings]
    if one.unopenable:
        below.append(f"no configuration: the models of {first_of(one.unopenable)} cannot be loaded")
    if one.every:
        training = f", its training {one.training}" if one.training else ""
        below.append(f"one every {_shortly(one.every)}{training}")
    return cells, below


def _step(point: Point | None) -> str:
    if point is None:
        return "-"
    return str(point.step) if point.step is not None else cut(point.checkpoint, LEAST)


def _numbers(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {word}" for word, n in counts.items() if n)


def _shortly(seconds: float) -> str:
    return show_duration(round(seconds))


def _ago(now: float, then: float) -> str:
    return _shortly(max(0.0, now - then))
