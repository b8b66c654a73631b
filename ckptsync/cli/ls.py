"""``ckptsync ls``: list the checkpoints of a store with their status, as a table or as JSON."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from ckptsync.catalogue.cached import Cache, read_catalogue
from ckptsync.catalogue.location_summary import TOKENIZER, Catalogue, Summary
from ckptsync.catalogue.uncached import not_found
from ckptsync.cli import output
from ckptsync.cli.arguments import IN_STORE, add_targets, only_target, store_run_location
from ckptsync.cli.screen import EVERY, MOST, Screen, more, table, wrapped
from ckptsync.gc_pause import paused
from ckptsync.quantities import show_size
from ckptsync.records.save_groups import Sibling
from ckptsync.records.store_paths import checkpoint_of
from ckptsync.service.monitor import OverviewReader
from ckptsync.status.locations import describe_locations, model_url, newer_saves
from ckptsync.status.overlay import Overlay, Running, by_location, describe
from ckptsync.stores.contract import Store

HEADING = ("RUN", "CHECKPOINT", "STATUS", "SIZE", "NODES", "DETAIL")


def add_arguments(command: argparse.ArgumentParser) -> None:
    add_targets(command, IN_STORE, "only this run, or this checkpoint")
    command.add_argument(
        "--watch", action="store_true", help="draw again every 2 seconds, until q is pressed"
    )


@paused()
def run(args: argparse.Namespace) -> int:
    """List the store, or a run; return the worst exit code of the records that cannot be read."""
    store, wanted, location = store_run_location(args, only_target(args))
    reader = OverviewReader(store, catalogues(store, wanted), run=wanted)

    def read() -> tuple[Overlay, float]:
        seen, now = reader.read_overlay()
        return replace(seen, catalogue=selected(store, seen.catalogue, wanted, location)), now

    if args.watch and not args.json and sys.stdout.isatty():
        return Screen(read, partial(_lines, store), store.url).run()
    while True:
        code = _show(args, store, *read())
        if not args.watch:
            return code
        sys.stdout.flush()
        time.sleep(EVERY)


def _show(args: argparse.Namespace, store: Store, seen: Overlay, now: float) -> int:
    """Print what was read; return the exit code."""
    found = seen.catalogue
    faults = [fault.text for fault in found.faults]
    if args.json:
        locations = describe_locations(store.url, found.shown, seen.running)
        result = {"store": store.url, "locations": locations, "unreadable": faults}
        output.print_json(result, exit_code(found))
        return exit_code(found)
    if found.shown:
        output.print_table(HEADING, list_rows(store, found.shown, seen.running, now))
    elif not faults:
        output.say(f"{store.url}: no checkpoints yet")
    for line in faults:
        output.say(f"unreadable: {line}")
    return exit_code(found)


def _lines(store: Store, read: tuple[Overlay, float], width: int) -> list[str]:
    """Return the same as lines of at most ``width`` columns, what is on its way first."""
    seen, now = read
    found = seen.catalogue
    moving = {(e.run, e.location) for e in seen.running}
    shown = sorted(found.shown, key=lambda s: (s.run, s.location) not in moving)
    rows = [
        (cells, [detail] if detail else [])
        for *cells, detail in list_rows(store, shown, seen.running, now)
    ]
    faults = [f"unreadable: {fault.text}" for fault in found.faults]
    return [
        *(line for fault in faults[:MOST] for line in wrapped(fault, width)),
        *more(faults, "more records that cannot be read"),
        *(table(HEADING[:-1], rows, width) if rows else ["no checkpoints yet"]),
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
    store: Store, summaries: Sequence[Summary], running: Sequence[Running] = (), now: float = 0.0
) -> list[list[str]]:
    """Return all checkpoints of a store as rows of a table under `HEADING`."""
    newer, entries, found = newer_saves(summaries), by_location(running), []
    for seen in summaries:
        run, location = seen.run, seen.location
        its = entries.get((run, location), ())
        details = [
            *(describe(e, now) for e in its),
            _detail(store, seen, is_known=bool(its)),
            *(d for d in seen.doubts if d not in seen.evidence),
        ]
        if later := newer.get((run, location)):
            details.append(f"{later} is newer")
        details += [sibling_line(store.url, run, location, other) for other in seen.siblings]
        details.append(seen.unnamed_line)
        size, nodes = show_size(seen.whole or seen.size), str(len(seen.nodes))
        line = "; ".join(filter(None, details))
        found.append([run, location, seen.status, size, nodes, line])
    return found


def sibling_line(url: str, run: str, location: str, other: Sibling) -> str:
    """Return what is known of another part of a save, and the command that joins them."""
    nodes, command = ", ".join(other.nodes), other.command(url, run, location)
    if not other.against:
        return f"{other.location} of {nodes} is another part of this save; to join them: {command}"
    what = f"{other.location} of {nodes} may be another part of this save"
    return f"{what} ({'; '.join(other.against)}); if so: {command}"


def upload_line(nodes: Sequence[str], percent: int | None) -> str:
    """Return who uploads a checkpoint, and how much of what its model needs is there."""
    return f"from {', '.join(nodes)}{f', {percent} %' if percent is not None else ''}"


def _detail(store: Store, seen: Summary, *, is_known: bool) -> str:
    """Return where the model lies, if the checkpoint has one; else why its status is no better."""
    model = model_url(store.url, seen)
    if seen.status not in ("VERIFIED", "CONSOLIDATED") or not model:
        why = output.first_of(seen.lost or seen.evidence)
        if is_known:  # the node said it
            is_told = seen.uploading or seen.status == "COMPLETE"
            return why if seen.manifests and not is_told else ""
        return f"{upload_line(seen.uploading, seen.percent)}; {why}" if seen.uploading else why
    line = f"{seen.unopenable}; {seen.to_give}; {model}" if seen.unopenable else model
    line += f" ({seen.proof.level})" if seen.status == "VERIFIED" else ""
    line += "; no tokenizer" if TOKENIZER in seen.to_open else ""
    return line + (f"; code left out: {', '.join(seen.left_out)}" if seen.left_out else "")
