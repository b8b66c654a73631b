"""``ckptsync events``: print what happened to a run's checkpoints, or run one event by hand.

What happened follows from the store's records, so printing needs no log.  A head runs this command
as a child for each event that is due.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from ckptsync.cli import output
from ckptsync.cli.arguments import (
    CHECKPOINT,
    add_targets,
    configuration,
    run_and_location,
    store_and_name,
    store_run_location,
)
from ckptsync.cli.progress import add_progress, with_progress
from ckptsync.errors import ConfigError
from ckptsync.near_names import did_you_mean
from ckptsync.records.event_record import EVENTS

if TYPE_CHECKING:
    from ckptsync.catalogue.location_summary import Summary
    from ckptsync.cli.output import Progress
    from ckptsync.config.schema import Config
    from ckptsync.events.definitions import Definition
    from ckptsync.events.handling import Request
    from ckptsync.stores.contract import Store

WORDS = "RUN[/CHECKPOINT] | run RUN/CHECKPOINT NAME"
EVERY = 2.0  # seconds between two readings with --follow
DETAILS = (
    "With `run`, a checkpoint and a name, the event of that name in the configuration is run for it"
    " now, also if it was done before."
)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    add_targets(command, WORDS, "whose events are printed; or the event to run, with -c")
    add = command.add_argument
    add("--follow", action="store_true", help="go on, and print what happens, until interrupted")
    add("--on", choices=EVENTS, metavar="EVENT", help="run it as for this event, not the last one")
    add("--if-due", action="store_true", help="do nothing if it was done, or another head does it")
    add_progress(command)


def run(args: argparse.Namespace) -> int:
    """Print what happened, or run an event (``events run RUN/CHECKPOINT NAME``).

    Return the exit code.  Raises ConfigError, and the errors of the event.
    """
    words: list[str] = args.targets
    if words[:1] == ["run"] and len(words) > 1:
        return with_progress(args, _run_one)
    if len(words) != 1:
        raise ConfigError(
            f"{' '.join(words) or 'nothing'}: expected {WORDS}",
            hint="`ckptsync help events` shows examples",
        )
    for option, is_given in (("--on", args.on), ("--if-due", args.if_due)):
        if is_given:
            raise ConfigError(f"{option} is for `events run {CHECKPOINT} NAME`")
    return _print(args, words[0])


def _run_one(args: argparse.Namespace, progress: Progress) -> int:
    """Run the event that the words name, and print what was done; return 0.

    With ``--if-due`` print no event if another head handles it.  Raises ConfigError, and the errors
    of the event.
    """
    from ckptsync.events.handling import Elsewhere, handle

    store, request = _request(args)
    beats = 0

    def beat() -> None:
        """Report a sign of life."""
        nonlocal beats
        beats += 1
        progress(beats, 0)

    try:
        handled = handle(store, request, lambda s: describe(store, s), beat)
    except Elsewhere:
        if not args.if_due:
            raise
        output.print_json({"events": []})
        return 0
    run_, location, name = request.run, request.location, request.definition.name
    if args.json or args.progress:
        entry = {
            "run": run_,
            "location": location,
            "name": name,
            "event": handled.happened.event,
            "was_done": handled.was_done,
            "metrics": dict(handled.metrics),
            "note": handled.note,
            "seconds": round(handled.seconds, 1),
        }
        output.print_json({"events": [entry]})
        return 0
    output.say(
        f"{run_}/{location}: {name} ({handled.happened.event}):"
        f" {'was done before' if handled.was_done else f'done in {handled.seconds:.1f} s'}"
    )
    for metric, value in handled.metrics.items():
        output.say(f"  {metric}: {value:g}")
    if handled.note:
        output.say(f"  {handled.note}")
    return 0


def _request(args: argparse.Namespace) -> tuple[Store, Request]:
    """Return the store, and the event to run there by configuration and words.

    Raises ConfigError for missing or wrong words and options, StoreError.
    """
    from ckptsync.events.handling import Request
    from ckptsync.worker.node_identity import node_id

    if len(args.targets) != 3:
        raise ConfigError(
            f"events {' '.join(args.targets)}: expected run {CHECKPOINT} NAME",
            hint="`ckptsync events RUN` prints the events of a run, also of one named run",
        )
    config = configuration(args)
    if config is None:
        raise ConfigError("events run: -c FILE is missing", hint="it says what to run")
    definition = _definition(config, args.targets[2])
    if args.on and args.on not in definition.on:
        hint = f"it is on {', '.join(definition.on)}"
        raise ConfigError(f"--on {args.on}: {definition.name} has no such event", hint=hint)
    store, path = store_and_name(args, args.targets[1])
    run_, location = run_and_location(path)
    secrets = {
        "CKPTSYNC_STORE": store.url,
        "CKPTSYNC_STORAGE_OPTIONS": json.dumps(dict(config.store.options)),
    }
    node = config.node or node_id()
    return store, Request(definition, run_, location, args.on or "", args.if_due, node, secrets)


def _definition(config: Config, name: str) -> Definition:
    """Return the event of a name in a configuration; raise ConfigError if it has none."""
    for definition in config.events:
        if definition.name == name:
            return definition
    names = [definition.name for definition in config.events]
    has = f"it has {', '.join(names)}" if names else "it has none: see `ckptsync help events`"
    raise ConfigError(
        f"{config.file}: has no event {name!r}", hint=did_you_mean(name, names) or has
    )


def describe(store: Store, s: Summary) -> dict[str, Any]:
    """Return a location as `ls RUN/CHECKPOINT --json` prints it.

    Reads its curves from the store; without them its losses are None.
    """
    from ckptsync.status.location_details import describe_progress
    from ckptsync.status.locations import describe_locations
    from ckptsync.status.training_curves import read_newest

    [plain] = describe_locations(store.url, [s])
    curves = read_newest(store, [s]) if s.manifests else {}
    return {
        "format": output.FORMAT,
        "exit_code": 0,
        "store": store.url,
        "unreadable": [],
        "locations": [{**plain, **describe_progress(s, curves)}],
    }


def _print(args: argparse.Namespace, target: str) -> int:
    """Print what happened to a run, or to one checkpoint; return unreadable records' code or 0.

    With ``--follow`` print what is new, every `EVERY` seconds, until interrupted.  The cache of the
    catalogue is saved.  Raises ConfigError if the store has nothing of it, StoreError.
    """
    from ckptsync.cli.ls import catalogue_reader, exit_code, select

    store, run_, location = store_run_location(args, target)
    read_now = catalogue_reader(store, run_)
    printed: set[tuple[Any, ...]] = set()
    while True:
        catalogue = select(store, read_now(), run_, location)
        rows = [row for row in _list_rows(catalogue.summaries) if _key(row) not in printed]
        printed |= {_key(row) for row in rows}
        if args.json and (rows or not args.follow):
            output.print_json({"store": store.url, "events": rows}, exit_code(catalogue))
        elif not args.json:
            output.print_lines([_line(row) for row in rows])
            if not (rows or args.follow):
                output.say(f"{store.url}/{target}: nothing has happened yet")
        if not args.follow:
            return exit_code(catalogue)
        sys.stdout.flush()
        time.sleep(EVERY)


def _list_rows(summaries: tuple[Summary, ...]) -> list[Mapping[str, Any]]:
    """Return a row for all that happened, and for each event that was handled, by time."""
    rows = [row for s in summaries for row in _rows_of_location(s)]
    return sorted(rows, key=lambda row: row["at"])


def _rows_of_location(s: Summary) -> Iterator[Mapping[str, Any]]:
    """Yield what happened to a location, then each event that was handled for it."""
    from ckptsync.events.due import list_occurrences

    names = {"run": s.run, "checkpoint": s.checkpoint, "location": s.location, "step": s.step}
    for event in list_occurrences(s):
        yield {
            **names,
            "event": event.event,
            "at": event.at,
            "name": None,
            "outcome": None,
            "failures": 0,
            "error": None,
        }
    for h in s.handled:
        yield {
            **names,
            "event": h.event,
            "at": h.at,
            "name": h.name,
            "outcome": "done" if h.done else "failed",
            "failures": h.failures,
            "error": h.error or None,
        }


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the values of a row, by which rows are compared."""
    return tuple(row.values())


def _line(row: Mapping[str, Any]) -> str:
    """Return a row as a line for people, with the local time; a handled event with its outcome."""
    moment = datetime.fromtimestamp(row["at"], timezone.utc).astimezone()
    line = f"{moment:%Y-%m-%d %H:%M:%S}  {row['run']}/{row['location']}  {row['event']}"
    if row["name"]:
        tries = f" {row['failures']} times" if row["failures"] > 1 else ""
        line += f"  {row['name']} {row['outcome']}{tries if row['outcome'] == 'failed' else ''}"
    return line + (f": {row['error']}" if row["error"] else "")
