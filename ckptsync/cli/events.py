"""``ckptsync events``: what happened to the checkpoints of a run; run one event by hand."""

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
    from ckptsync.stores.contract import Store

WORDS = "RUN[/CHECKPOINT] | run RUN/CHECKPOINT NAME"
EVERY = 2.0  # seconds between two looks with --follow
DETAILS = (
    "With `run`, a checkpoint and a name, the event of that name in the configuration is run for it"
    " now, also if it was done before."
)


def add_arguments(command: argparse.ArgumentParser) -> None:
    add_targets(command, WORDS, "whose events are printed; or the event to run, with -c")
    add = command.add_argument
    add("--follow", action="store_true", help="go on, and print what happens, until interrupted")
    add("--on", choices=EVENTS, metavar="EVENT", help="run it as for this event, not the last one")
    add("--if-due", action="store_true", help="do nothing if it was done, or another head does it")
    add_progress(command)


def run(args: argparse.Namespace) -> int:
    """Print what happened, or run an event; see `ckptsync help events`."""
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
    from ckptsync.events.handling import Elsewhere, Request, handle
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
    store, what = store_and_name(args, args.targets[1])
    where, location = run_and_location(what)
    secrets = {
        "CKPTSYNC_STORE": store.url,
        "CKPTSYNC_STORAGE_OPTIONS": json.dumps(dict(config.store.options)),
    }
    request = Request(
        definition, where, location, args.on or "", args.if_due, config.node or node_id(), secrets
    )
    count = 0

    def beat() -> None:
        nonlocal count
        count += 1
        progress(count, 0)

    try:
        done = handle(store, request, lambda s: describe(store, s), beat)
    except Elsewhere:
        if not args.if_due:
            raise
        output.print_json({"events": []})
        return 0
    entry = {
        "run": where,
        "location": location,
        "name": definition.name,
        "event": done.happened.event,
        "was_done": done.was_done,
        "metrics": dict(done.metrics),
        "note": done.note,
        "seconds": round(done.seconds, 1),
    }
    if args.json or args.progress:
        output.print_json({"events": [entry]})
        return 0
    output.say(
        f"{where}/{location}: {definition.name} ({done.happened.event}):"
        f" {'was done before' if done.was_done else f'done in {done.seconds:.1f} s'}"
    )
    for name, value in done.metrics.items():
        output.say(f"  {name}: {value:g}")
    if done.note:
        output.say(f"  {done.note}")
    return 0


def _definition(config: Config, name: str) -> Definition:
    for definition in config.events:
        if definition.name == name:
            return definition
    names = [definition.name for definition in config.events]
    has = f"it has {', '.join(names)}" if names else "it has none: see `ckptsync help events`"
    raise ConfigError(
        f"{config.file}: has no event {name!r}", hint=did_you_mean(name, names) or has
    )


def describe(store: Store, s: Summary) -> dict[str, Any]:
    """Return a location as `ls RUN/CHECKPOINT --json` does."""
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


def _print(args: argparse.Namespace, what: str) -> int:
    """Print what happened to a run, or to a checkpoint of it; return the exit code."""
    from ckptsync.cli.ls import catalogues, exit_code, selected

    store, wanted, location = store_run_location(args, what)
    read = catalogues(store, wanted)
    printed: set[tuple[Any, ...]] = set()
    while True:
        catalogue = selected(store, read(), wanted, location)
        rows = [row for row in _rows(catalogue.summaries) if _key(row) not in printed]
        printed |= {_key(row) for row in rows}
        if args.follow and args.json:  # a line each
            for row in rows:
                print(json.dumps(row), flush=True)
        elif args.json:
            output.print_json({"store": store.url, "events": rows}, exit_code(catalogue))
        else:
            output.print_lines([_line(row) for row in rows])
            if not (rows or args.follow):
                output.say(f"{store.url}/{what}: nothing has happened yet")
        if not args.follow:
            return exit_code(catalogue)
        sys.stdout.flush()
        time.sleep(EVERY)


def _rows(summaries: tuple[Summary, ...]) -> list[Mapping[str, Any]]:
    """Return what happened, and what events did about it, by time."""
    rows = [row for s in summaries for row in _rows_of(s)]
    return sorted(rows, key=lambda row: row["at"])


def _rows_of(s: Summary) -> Iterator[Mapping[str, Any]]:
    from ckptsync.events.due import list_occurrences

    where = {"run": s.run, "checkpoint": s.checkpoint, "location": s.location, "step": s.step}
    for event in list_occurrences(s):
        yield {
            **where,
            "event": event.event,
            "at": event.at,
            "name": None,
            "outcome": None,
            "failures": 0,
            "error": None,
        }
    for h in s.handled:
        yield {
            **where,
            "event": h.event,
            "at": h.at,
            "name": h.name,
            "outcome": "done" if h.done else "failed",
            "failures": h.failures,
            "error": h.error or None,
        }


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row.values())


def _line(row: Mapping[str, Any]) -> str:
    moment = datetime.fromtimestamp(row["at"], timezone.utc).astimezone()
    line = f"{moment:%Y-%m-%d %H:%M:%S}  {row['run']}/{row['location']}  {row['event']}"
    if row["name"]:
        tries = f" {row['failures']} times" if row["failures"] > 1 else ""
        line += f"  {row['name']} {row['outcome']}{tries if row['outcome'] == 'failed' else ''}"
    return line + (f": {row['error']}" if row["error"] else "")
