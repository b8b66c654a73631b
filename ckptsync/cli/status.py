"""``ckptsync status``: show what the nodes and heads of a store do, and what is wrong.

`status` and `service.monitor` read the store into an `Overview`; this module prints it: alarms
first, then what is on its way, runs and nodes; or as JSON, as an HTML file, or for a monitor.
"""

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
from ckptsync.cli.ls import catalogue_reader, exit_code
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

WIDE = 10_000  # columns without a terminal: lines stay whole, so that programs can search them
NODES = ("NODE", "ROLES", "STATE", "BEAT", "QUEUE", "OLDEST", "RATE")
RUNS = ("RUN", "LOCATIONS", "SIZE", "NEWEST", "STATUS", "AGO", "LAST GOOD")
DETAILS = "With --json everything is printed as one document (`ckptsync help json`)."
_LAST = 253402300799.0  # the last second that datetime can show; a file's time may be later


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
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
    """Print the overview, or write it to a ``--html`` file; return unreadable records' code or 0.

    With ``--check`` return 10 for damage, 1 for any other alarm, else 0.  With ``--watch`` print
    every `EVERY` seconds: on a terminal until q (then 0), elsewhere, or with ``--json``, for ever.
    Raises ConfigError, StoreError; CkptsyncError if the file cannot be written.
    """
    store, run_, location = store_run_location(args, only_target(args, "RUN"))
    if location:
        hint = f"ckptsync ls {run_}/{location} shows a checkpoint"
        raise ConfigError(f"{run_}/{location}: status is of a run", hint=hint)
    config = configuration(args)
    waits = patience(config) if config else Patience()
    overviews = OverviewReader(store, catalogue_reader(store, run_), waits, run_)
    if args.watch and not args.json and sys.stdout.isatty():
        return Screen(overviews.read, overview_lines, store.url).run()
    while True:
        overview = overviews.read()
        code = exit_code(overview.catalogue)
        if args.html is not None:
            _write_html(store, overview, Path(args.html))
            if not args.json:
                output.say(f"{args.html}: written, open it in a browser")
                return code
        if args.check:
            is_damaged = any(alarm.kind in ("damage", "weights") for alarm in overview.alarms)
            code = 10 if is_damaged else int(bool(overview.alarms))
        if args.json:
            locations = describe_locations(store.url, overview.catalogue.shown, overview.running)
            output.print_json({**document(overview), "locations": locations}, code)
        else:
            width = WIDE
            if sys.stdout.isatty():
                width = max(NARROWEST, shutil.get_terminal_size().columns)
            for line in alarm_lines(overview) if args.check else overview_lines(overview, width):
                print(output.paint(line))
        if not args.watch:
            return code
        sys.stdout.flush()
        time.sleep(EVERY)


def _write_html(store: Store, overview: Overview, path: Path) -> None:
    """Write the page to a file, whole or not at all, in place of one that exists.

    Writes ``PATH.part`` first, and deletes it after an error.  Reads the store.  Raises ConfigError
    for a directory, StoreError, CkptsyncError if it cannot be written.
    """
    from ckptsync.web.documents import Documents
    from ckptsync.web.html_file import html_file

    if path.is_dir():
        raise ConfigError(f"--html: {path} is a directory", hint="name a file: --html status.html")
    body, draft = html_file(overview, Documents(store)), path.with_name(f"{path.name}.part")
    try:
        draft.write_bytes(body)
        draft.replace(path)
    except OSError as e:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise CkptsyncError(f"{path}: {e.strerror}", hint="name a file that you may write") from e


def alarm_lines(overview: Overview) -> list[str]:
    """Return a line for each alarm, for ``--check``; one with counts if there is none."""
    lines = [f"{alarm.severity.upper()} {alarm.code}: {alarm.text}" for alarm in overview.alarms]
    return [clean(line) for line in lines or [f"OK: {_counts(overview)}"]]


def overview_lines(overview: Overview, width: int = WIDE) -> list[str]:
    """Return an overview as lines of at most ``width`` columns, which is at least `NARROWEST`.

    Runs are listed newest first.  Nodes that do not answer come first, then those with errors, and
    stopped ones last.
    """
    urgent = sorted(
        overview.nodes,
        key=lambda n: (n.state == "stopped", n.state == "alive", not n.errors, n.name),
    )
    nodes = [_node_row(node) for node in urgent]
    newest = sorted(overview.runs, key=lambda r: r.newest.ended if r.newest else 0.0, reverse=True)
    described = {(e.run, e.location) for e in overview.running if e.state in ON_ITS_WAY}
    runs = [_run_row(run_status, overview.at, overview.store, described) for run_status in newest]
    faults = [f"unreadable: {fault.text}" for fault in overview.catalogue.faults]
    return [
        *_heading(overview, width),
        *([""] if overview.running else []),
        *running_lines(overview.running, overview.at, width),
        "",
        *(table(RUNS, runs, width) if runs else ["no checkpoints yet"]),
        *(line for fault in faults[:MOST] for line in wrapped(fault, width)),
        *more(faults, "more records that cannot be read"),
        "",
        *(table(NODES, nodes, width) if nodes else ["no node has written to this store"]),
    ]


def _heading(overview: Overview, width: int) -> Iterator[str]:
    """Yield the store, the time, counts, free space and alarms."""
    moment = datetime.fromtimestamp(min(max(overview.at, 0.0), _LAST), timezone.utc)
    yield from wrapped(f"store {overview.store}  {moment:%Y-%m-%d %H:%M:%SZ}", width)
    yield from wrapped(_counts(overview), width)
    if overview.room:
        yield f"{show_size(overview.room.free)} of {show_size(overview.room.total)} free"
    if overview.alarms:
        yield ""
    yield from alarms_of(overview.alarms, overview.at, width)


def _counts(overview: Overview) -> str:
    """Return the numbers of nodes, runs, locations, bytes and alarms as one line."""
    states = _numbers({state: sum(n.state == state for n in overview.nodes) for state in STATES})
    locations = _numbers(overview.checkpoints)
    parts = [
        f"nodes: {states or 'none'}",
        f"runs: {len(overview.runs)}",
        f"locations: {locations or 'none'}",
        f"{show_size(overview.size)} + models {show_size(overview.model_size)}",
    ]
    if overview.alarms:
        parts.append(f"{len(overview.alarms)} alarm{'s' if len(overview.alarms) > 1 else ''}")
    return "; ".join(parts)


def _node_row(node: Node) -> Row:
    """Return a node under `NODES`; below it disks, errors and notes, unless it is stopped.

    At most `MOST` disks, and three errors and notes each.
    """
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


def _run_row(
    status: RunStatus, now: float, url: str, described: AbstractSet[tuple[str, str]]
) -> Row:
    """Return a run under `RUNS`, and below it what is unverified, on its way or incomplete.

    Of uploads and incomplete locations the last three each; ``described``: (run, location) to leave
    out there, since other lines say what nodes do.
    """
    newest, total = status.newest, sum(status.checkpoints.values())
    cells = [
        status.run,
        str(total),
        show_size(status.size),
        _step(newest),
        newest.status if newest else "-",
        _ago(now, newest.ended) if newest else "-",
        _step(status.verified),
    ]
    below = []
    if total > 1 and set(status.checkpoints) != {"VERIFIED"}:
        below.append(f"locations {_numbers(status.checkpoints)}")
    if oldest := status.unverified:
        since = _ago(now, oldest.arrived)
        below.append(f"oldest unverified {oldest.location}, {oldest.status} for {since}")
    uploads = [u for u in status.uploading if (status.run, u.location) not in described][-3:]
    below += [f"uploading {u.location} {upload_line(u.nodes, u.percent)}" for u in uploads]
    for location in [s for s in status.incomplete if (status.run, s.location) not in described][
        -3:
    ]:
        missing = first_of(location.lost) or "unknown what is missing"
        below.append(f"incomplete {location.location} for {_ago(now, location.since)}: {missing}")
        below += [
            sibling_line(url, status.run, location.location, sibling)
            for sibling in location.siblings
        ]
    if status.unopenable:
        below.append(
            f"no configuration: the models of {first_of(status.unopenable)} cannot be loaded"
        )
    if status.every:
        training = f", its training {status.training}" if status.training else ""
        below.append(f"one every {_shortly(status.every)}{training}")
    return cells, below


def _step(point: Point | None) -> str:
    """Return a checkpoint's step, or its name, cut at `LEAST`; "-" without a checkpoint."""
    if point is None:
        return "-"
    return str(point.step) if point.step is not None else cut(point.checkpoint, LEAST)


def _numbers(counts: Mapping[str, int]) -> str:
    """Return the counts above zero, with their words."""
    return ", ".join(f"{n} {word}" for word, n in counts.items() if n)


def _shortly(seconds: float) -> str:
    """Return a duration, rounded to whole seconds, for people."""
    return show_duration(round(seconds))


def _ago(now: float, then: float) -> str:
    """Return how long before ``now`` a time was; 0 seconds for a later one."""
    return _shortly(max(0.0, now - then))
