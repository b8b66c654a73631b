"""``ckptsync ls``: list the checkpoints of a store with their status, as a table or as JSON."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from ckptsync.catalogue.cached import Cache, read_catalogue
from ckptsync.catalogue.location_summary import TOKENIZER, Catalogue, Summary
from ckptsync.catalogue.uncached import not_found
from ckptsync.cli import output
from ckptsync.cli.arguments import IN_STORE, add_targets, only_target, store_run_location
from ckptsync.cli.ls_run import (
    CELLS,
    SORT,
    Row,
    curve_line,
    full_lines,
    list_rows_of_run,
    read_rows,
    reasons,
)
from ckptsync.cli.screen import (
    EVERY,
    LEAST,
    MOST,
    Screen,
    alarms_of,
    cut,
    more,
    narrowed,
    running_lines,
    table,
    wrapped,
)
from ckptsync.errors import ConfigError
from ckptsync.gc_pause import paused
from ckptsync.quantities import show_size
from ckptsync.records.location_status import STATUSES
from ckptsync.records.store_paths import checkpoint_of
from ckptsync.service.monitor import OverviewReader
from ckptsync.status.alarms import Alarm
from ckptsync.status.live_catalogue import LiveCatalogue, NodeProgress, by_location
from ckptsync.status.location_details import read_details
from ckptsync.status.locations import describe_locations, model_url, newer_saves
from ckptsync.status.training_curves import Curve, read_newest, states_of
from ckptsync.stores.contract import Store

HEADING = ("RUN", "CHECKPOINT", "STATUS", "SIZE", "NODES", "DETAIL")
BESIDE = 50  # columns beside a sparkline
FEW = 5  # alarms, and things that nodes do, above a table
SPARE = ("KEPT", "NODES", "RESUME", "EVAL", "SIZE", "AGE")
"""Columns that a narrow terminal does without, the first one first."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    add_targets(command, IN_STORE, "only this run, or this checkpoint")
    command.add_argument(
        "--sort", metavar="COLUMN", choices=SORT, help=f"the least first: {', '.join(SORT)}"
    )
    command.add_argument(
        "--status", type=str.upper, choices=STATUSES, metavar="STATUS", help="only those"
    )
    command.add_argument(
        "--watch", action="store_true", help="draw again every 2 seconds, until q is pressed"
    )


@dataclass(frozen=True, slots=True)
class Listing:
    """What was read of a store, or of a run; ``rows``: of a run, with its ``curves``.

    ``alarms``: read only to be watched.
    """

    overlay: LiveCatalogue
    shown: Sequence[Summary]
    now: float
    rows: Sequence[Row] = ()
    curves: Mapping[str, Curve] = field(default_factory=dict)
    alarms: Sequence[Alarm] = ()


@paused()
def run(args: argparse.Namespace) -> int:
    """List the store, or a run; return the worst exit code of the records that cannot be read."""
    store, wanted, location = store_run_location(args, only_target(args))
    if args.sort in ("loss", "eval") and not wanted:
        why = f"--sort {args.sort}: only the checkpoints of one run have it"
        raise ConfigError(why, hint=f"ckptsync ls RUN --sort {args.sort}")
    reader = OverviewReader(store, catalogues(store, wanted), run=wanted)
    last: tuple[object, Mapping[str, Curve]] = None, {}
    is_drawn = args.watch and not args.json and sys.stdout.isatty()

    def read() -> Listing:
        nonlocal last
        alarms: Sequence[Alarm] = ()
        if is_drawn:
            whole = reader.read()
            seen, now, alarms = (
                LiveCatalogue(whole.catalogue, whole.running),
                whole.at,
                whole.alarms,
            )
        else:
            seen, now = reader.read_live_catalogue()
        if wanted and (its := states_of(seen.catalogue.summaries)) != last[0]:
            last = its, read_newest(store, its)
        seen = replace(seen, catalogue=selected(store, seen.catalogue, wanted, location))
        shown = [s for s in seen.catalogue.shown if args.status in (None, s.status)]
        if not (wanted or args.sort):
            return Listing(seen, shown, now, alarms=alarms)
        rows = read_rows(store.url, shown, seen.running, last[1], now)
        if args.sort:
            rows.sort(key=SORT[args.sort])
        its_rows = rows if wanted else ()
        return Listing(seen, [r.summary for r in rows], now, its_rows, last[1], alarms)

    if is_drawn:
        # rich puts a file without an encoding in the place of stdout
        lines = partial(watch_lines, store, sys.stdout.encoding, is_sorted=bool(args.sort))
        return Screen(read, lines, store.url).run()
    while True:
        code = _show(args, store, read(), in_full=bool(location) and not args.watch)
        if not args.watch:
            return code
        sys.stdout.flush()
        time.sleep(EVERY)


def _show(args: argparse.Namespace, store: Store, seen: Listing, *, in_full: bool) -> int:
    """Print what was read; return the exit code."""
    found, running = seen.overlay.catalogue, seen.overlay.running
    faults = [fault.text for fault in found.faults]
    if args.json:
        locations = describe_locations(store.url, seen.shown, running)
        for document, row in zip(locations, seen.rows, strict=False):
            document.update(row.values)
        result = {"store": store.url, "locations": locations, "unreadable": faults}
        output.print_json(result, exit_code(found))
        return exit_code(found)
    if in_full:
        for row in seen.rows:
            details = read_details(store, row.summary)
            output.print_lines(full_lines(store.url, row, details, seen.now))
    elif seen.rows:
        output.print_lines(curve_line(seen.curves, sys.stdout.encoding))
        heading, rows = list_rows_of_run(seen.rows, seen.now)
        # what is read by a program, or in a file, is whole
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
        lines = output.aligned([heading, *rows])
        output.print_lines(cut(line, width) if width else line for line in lines)
    elif seen.shown:
        output.print_table(HEADING, list_rows(store, seen.shown, running, seen.now))
    elif not faults:
        output.say(f"{store.url}: {_none(found)}")
    for line in faults:
        output.say(f"unreadable: {line}")
    return exit_code(found)


def _none(found: Catalogue) -> str:
    return "no checkpoint has that status" if found.shown else "no checkpoints yet"


def watch_lines(
    store: Store, encoding: str, seen: Listing, width: int, *, is_sorted: bool
) -> list[str]:
    """Return the same as lines of at most ``width`` columns: alarms, what nodes do, the table.

    Rows that ``--sort`` does not sort begin with what is on its way, then the newest.
    """
    found, running = seen.overlay.catalogue, seen.overlay.running
    heading: Sequence[str] = HEADING
    lines = list_rows(store, seen.shown, running, seen.now)
    if seen.rows:
        heading, lines = list_rows_of_run(seen.rows, seen.now)
    listed = list(zip(seen.shown, lines, strict=True))
    if not is_sorted:
        moving = {(e.run, e.location) for e in running}
        listed = listed[::-1] if seen.rows else sorted(listed, key=lambda pair: -pair[0].arrived)
        listed.sort(key=lambda pair: (pair[0].run, pair[0].location) not in moving)
    told = {(e.run, e.location) for e in running[:FEW]}
    rows = [
        (cells, [detail] if detail and (s.run, s.location) not in told else [])
        for s, (*cells, detail) in listed
    ]
    faults = [f"unreadable: {fault.text}" for fault in found.faults]
    curves = curve_line(seen.curves, encoding, max(LEAST, min(CELLS, width - BESIDE)))
    return [
        *alarms_of(seen.alarms, seen.now, width, FEW),
        *running_lines(running, seen.now, width, FEW),
        *(line for fault in faults[:MOST] for line in wrapped(fault, width)),
        *more(faults, "more records that cannot be read"),
        *([""] if seen.alarms or running or faults else []),
        *(line for curve in curves for line in wrapped(curve, width)),
        *(table(*narrowed(heading[:-1], rows, width, SPARE), width) if rows else [_none(found)]),
    ]


def catalogues(store: Store, run: str) -> Callable[[], Catalogue]:
    """Return a function that reads the catalogue of a store, or of a run, and saves its cache."""
    cache = Cache.load(store.url)

    def catalogue() -> Catalogue:
        try:
            return read_catalogue(store, cache, run)
        finally:
            # also what was read before an error: the next call continues there
            cache.save(store.url)

    return catalogue


def selected(store: Store, catalogue: Catalogue, run: str, location: str) -> Catalogue:
    """Return the part of a catalogue that is of a run, and of a location or checkpoint in it.

    Both may be empty.  Raises ConfigError if that is not in the store.
    """
    if not run:
        return catalogue
    summaries = [s for s in catalogue.summaries if s.run == run]
    begun = [s for s in catalogue.begun if s.run == run]
    faults = [fault for fault in catalogue.faults if fault.run == run]
    if location:
        summaries = [s for s in summaries if location in (s.location, s.checkpoint)]
        begun = [s for s in begun if location in (s.location, s.checkpoint)]
        faults = [f for f in faults if location in (f.location, checkpoint_of(f.location))]
    if not (summaries or begun or faults):
        raise not_found(store, run, location)
    return replace(catalogue, summaries=tuple(summaries), begun=tuple(begun), faults=tuple(faults))


def exit_code(catalogue: Catalogue) -> int:
    """Return the worst exit code of the records that cannot be read; 0 if all can."""
    return max((fault.error.exit_code for fault in catalogue.faults), default=0)


def list_rows(
    store: Store,
    summaries: Sequence[Summary],
    running: Sequence[NodeProgress] = (),
    now: float = 0.0,
) -> list[list[str]]:
    """Return all checkpoints of a store as rows of a table under `HEADING`."""
    newer, entries, found = newer_saves(summaries), by_location(running), []
    for s in summaries:
        key = (s.run, s.location)
        size, nodes = show_size(s.whole or s.size), str(len(s.nodes))
        its, later, model = entries.get(key, ()), newer.get(key, ""), _model_line(store, s)
        line = "; ".join(reasons(store.url, s, its, later, now=now, model=model))
        found.append([*key, s.status, size, nodes, line])
    return found


def _model_line(store: Store, seen: Summary) -> str:
    """Return where the model of a location lies, and what is to be said of it."""
    model = model_url(store.url, seen) or ""
    line = f"{seen.unopenable}; {seen.to_give}; {model}" if seen.unopenable else model
    line += f" ({seen.proof.level})" if seen.status == "VERIFIED" else ""
    line += "; no tokenizer" if TOKENIZER in seen.to_open else ""
    return line + (f"; code left out: {', '.join(seen.left_out)}" if seen.left_out else "")
