"""``ckptsync ls``: list the checkpoints of a store with their status, as a table or as JSON.

A status follows from the store's records and from what nodes do now.  `ls` reads both into a
`Listing`, and prints it: a store as a table of all runs, a run by `ls_run`, a checkpoint in full,
or with ``--watch`` as a screen.
"""

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
BESIDE = 50  # columns of text beside a sparkline
FEW = 5  # alarms, and activities of nodes, above a table
SPARE = ("KEPT", "NODES", "RESUME", "EVAL", "SIZE", "AGE")
"""Columns that are left out on a narrow terminal, in this order."""

NOTES = """\
STEP is the step of `checkpoint-STEP`, or the location's name. LOSS and EVAL are the last `loss`
and `eval_loss` up to it, from the newest `trainer_state.json` in the store. RESUME: whether a
training can resume from it. KEPT: whether `keep` keeps it. REASON: why it is no better, and how
many more reasons there are.

MODEL is `opens`; `no config`: its configuration is missing; `damaged`: files are damaged or
missing; `none`: nothing is merged yet.

`ls RUN/CHECKPOINT` shows times, every reason, damaged bytes and tensors, files, and the next
command. An incomplete checkpoint names the ranks whose files are missing, and the node that had
those ranks in the checkpoint nearest in time.

Unknown values are sorted last; `loss` and `eval` need a run. With alarms the exit code is 0; it
is that of the error if a record cannot be read.

`ls` and `status` cache what they read in `$XDG_CACHE_HOME/ckptsync/catalogue-…` (`~/.cache`; a
service in its `CacheDirectory`), about 1.2 KB a checkpoint. You may delete it at any time.
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
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
    """The state of a store, or of a run, at the time ``now`` (seconds since the epoch).

    ``shown``: the selected locations, in their order.  ``rows`` and ``curves``: only of one run.
    ``alarms``: only for a screen.
    """

    live: LiveCatalogue
    shown: Sequence[Summary]
    now: float
    rows: Sequence[Row] = ()
    curves: Mapping[str, Curve] = field(default_factory=dict)
    alarms: Sequence[Alarm] = ()


@paused()
def run(args: argparse.Namespace) -> int:
    """List the store, or a run; return the greatest exit code of unreadable records, else 0.

    With ``--watch`` list again every `EVERY` seconds: on a terminal as a `Screen`, until q (then
    0); elsewhere, or with ``--json``, for ever.  Garbage collection is paused.  Raises ConfigError,
    also for ``--sort loss`` or ``eval`` without a run; StoreError.
    """
    store, run_, location = store_run_location(args, only_target(args))
    if args.sort in ("loss", "eval") and not run_:
        why = f"--sort {args.sort}: only the checkpoints of one run have it"
        raise ConfigError(why, hint=f"ckptsync ls RUN --sort {args.sort}")
    has_screen = args.watch and not args.json and sys.stdout.isatty()
    read = _listing_reader(args, store, run_, location, with_alarms=has_screen)
    if has_screen:
        # rich puts a file without an encoding in the place of stdout
        lines = partial(watch_lines, store, sys.stdout.encoding, is_sorted=bool(args.sort))
        return Screen(read, lines, store.url).run()
    while True:
        code = _show(args, store, read(), in_full=bool(location) and not args.watch)
        if not args.watch:
            return code
        sys.stdout.flush()
        time.sleep(EVERY)


def _listing_reader(
    args: argparse.Namespace, store: Store, run_: str, location: str, *, with_alarms: bool
) -> Callable[[], Listing]:
    """Return a function that reads the store and returns the listing of now.

    It raises ConfigError if the target is not in the store, StoreError.  It saves the catalogue's
    cache, and reads curves (of a run only) again only if the trainers' states have changed.
    """
    reader = OverviewReader(store, catalogue_reader(store, run_), run=run_)
    last: tuple[object, Mapping[str, Curve]] = None, {}

    def read() -> Listing:
        """Read, select and sort.  Raises StoreError; ConfigError if the target is not there."""
        nonlocal last
        alarms: Sequence[Alarm] = ()
        if with_alarms:
            overview = reader.read()
            live, now = LiveCatalogue(overview.catalogue, overview.running), overview.at
            alarms = overview.alarms
        else:
            live, now = reader.read_live_catalogue()
        if run_ and (states := states_of(live.catalogue.summaries)) != last[0]:
            last = states, read_newest(store, states)
        live = replace(live, catalogue=select(store, live.catalogue, run_, location))
        shown = [s for s in live.catalogue.shown if args.status in (None, s.status)]
        if not (run_ or args.sort):
            return Listing(live, shown, now, alarms=alarms)
        rows = read_rows(store.url, shown, live.running, last[1], now)
        if args.sort:
            rows.sort(key=SORT[args.sort])
        run_rows = rows if run_ else ()
        return Listing(live, [r.summary for r in rows], now, run_rows, last[1], alarms)

    return read


def _show(args: argparse.Namespace, store: Store, listing: Listing, *, in_full: bool) -> int:
    """Print a listing as JSON or for people, and its unreadable records; return the exit code.

    With ``in_full`` read each row's records again, and print all that they say.  Lines of a run's
    table are cut on a terminal only.  Raises StoreError.
    """
    catalogue, running = listing.live.catalogue, listing.live.running
    faults = [fault.text for fault in catalogue.faults]
    if args.json:
        locations = describe_locations(store.url, listing.shown, running)
        for document, row in zip(locations, listing.rows, strict=False):
            document.update(row.values)
        result = {"store": store.url, "locations": locations, "unreadable": faults}
        output.print_json(result, exit_code(catalogue))
        return exit_code(catalogue)
    if in_full:
        for row in listing.rows:
            details = read_details(store, row.summary)
            output.print_lines(full_lines(store.url, row, details, listing.now))
    elif listing.rows:
        output.print_lines(curve_line(listing.curves, sys.stdout.encoding))
        heading, rows = list_rows_of_run(listing.rows, listing.now)
        # lines are cut on a terminal only, not for a program or in a file
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
        lines = output.aligned([heading, *rows])
        output.print_lines(cut(line, width) if width else line for line in lines)
    elif listing.shown:
        output.print_table(HEADING, list_rows(store, listing.shown, running, listing.now))
    elif not faults:
        output.say(f"{store.url}: {_empty_text(catalogue)}")
    for line in faults:
        output.say(f"unreadable: {line}")
    return exit_code(catalogue)


def _empty_text(catalogue: Catalogue) -> str:
    """Return why no checkpoint is listed: none has the status, or there is none."""
    return "no checkpoint has that status" if catalogue.shown else "no checkpoints yet"


def watch_lines(
    store: Store, encoding: str, listing: Listing, width: int, *, is_sorted: bool
) -> list[str]:
    """Return a listing as lines of at most ``width`` columns: alarms, activities, the table.

    Rows are in reverse order, those on their way first, unless ``is_sorted``.  A row has no
    detail if a line above has it.
    """
    catalogue, running = listing.live.catalogue, listing.live.running
    heading: Sequence[str] = HEADING
    lines = list_rows(store, listing.shown, running, listing.now)
    if listing.rows:
        heading, lines = list_rows_of_run(listing.rows, listing.now)
    listed = list(zip(listing.shown, lines, strict=True))
    if not is_sorted:
        moving = {(e.run, e.location) for e in running}
        listed = listed[::-1] if listing.rows else sorted(listed, key=lambda pair: -pair[0].arrived)
        listed.sort(key=lambda pair: (pair[0].run, pair[0].location) not in moving)
    described = {(e.run, e.location) for e in running[:FEW]}
    rows = [
        (cells, [detail] if detail and (s.run, s.location) not in described else [])
        for s, (*cells, detail) in listed
    ]
    faults = [f"unreadable: {fault.text}" for fault in catalogue.faults]
    curves = curve_line(listing.curves, encoding, max(LEAST, min(CELLS, width - BESIDE)))
    return [
        *alarms_of(listing.alarms, listing.now, width, FEW),
        *running_lines(running, listing.now, width, FEW),
        *(line for fault in faults[:MOST] for line in wrapped(fault, width)),
        *more(faults, "more records that cannot be read"),
        *([""] if listing.alarms or running or faults else []),
        *(line for curve in curves for line in wrapped(curve, width)),
        *(
            table(*narrowed(heading[:-1], rows, width, SPARE), width)
            if rows
            else [_empty_text(catalogue)]
        ),
    ]


def catalogue_reader(store: Store, run: str) -> Callable[[], Catalogue]:
    """Return a function that reads the catalogue of a store, or of a run; it may raise StoreError.

    Each call continues from the cache on this machine, and saves it.
    """
    cache = Cache.load(store.url)

    def read() -> Catalogue:
        """Return the catalogue of now; save the cache, also after an error.  Raises StoreError."""
        try:
            return read_catalogue(store, cache, run)
        finally:
            cache.save(store.url)

    return read


def select(store: Store, catalogue: Catalogue, run: str, location: str) -> Catalogue:
    """Return the part of a catalogue that is of a run, and of a location or checkpoint in it.

    An empty ``run`` selects all; an empty ``location`` all of the run.  Raises ConfigError if the
    store has nothing of it.
    """
    if not run:
        return catalogue
    summaries = [s for s in catalogue.summaries if s.run == run]
    uploads = [s for s in catalogue.begun if s.run == run]
    faults = [fault for fault in catalogue.faults if fault.run == run]
    if location:
        summaries = [s for s in summaries if location in (s.location, s.checkpoint)]
        uploads = [s for s in uploads if location in (s.location, s.checkpoint)]
        faults = [f for f in faults if location in (f.location, checkpoint_of(f.location))]
    if not (summaries or uploads or faults):
        raise not_found(store, run, location)
    return replace(
        catalogue, summaries=tuple(summaries), begun=tuple(uploads), faults=tuple(faults)
    )


def exit_code(catalogue: Catalogue) -> int:
    """Return the greatest exit code of the records that cannot be read; 0 if all can."""
    return max((fault.error.exit_code for fault in catalogue.faults), default=0)


def list_rows(
    store: Store,
    summaries: Sequence[Summary],
    running: Sequence[NodeProgress] = (),
    now: float = 0.0,
) -> list[list[str]]:
    """Return locations as rows of a table under `HEADING`.  Reads nothing from the store.

    ``store``: its URL is in the texts; ``running``: the progress of nodes; ``now``: seconds since
    the epoch.
    """
    newer, entries, rows = newer_saves(summaries), by_location(running), []
    for s in summaries:
        key = (s.run, s.location)
        size, nodes = show_size(s.whole or s.size), str(len(s.nodes))
        activities, later, model = entries.get(key, ()), newer.get(key, ""), _model_line(store, s)
        line = "; ".join(reasons(store.url, s, activities, later, now=now, model=model))
        rows.append([*key, s.status, size, nodes, line])
    return rows


def _model_line(store: Store, summary: Summary) -> str:
    """Return the URL of a location's model, between what it lacks to be loaded and its level.

    The level is shown if it is VERIFIED; code that was left out comes last.  "" if none applies.
    """
    model = model_url(store.url, summary) or ""
    line = f"{summary.unopenable}; {summary.supply_hint}; {model}" if summary.unopenable else model
    line += f" ({summary.proof.level})" if summary.status == "VERIFIED" else ""
    line += "; no tokenizer" if TOKENIZER in summary.to_open else ""
    return line + (f"; code left out: {', '.join(summary.left_out)}" if summary.left_out else "")
