"""``ckptsync gc``: what is kept and what goes, and why; then what was done."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator
from typing import Any

from ckptsync.cli import output
from ckptsync.cli.arguments import add_store
from ckptsync.cli.locations import asked_store, checked_name, configuration
from ckptsync.config.readers import RULES as READ
from ckptsync.config.readers import duration
from ckptsync.errors import ConfigError
from ckptsync.head import litter
from ckptsync.head.gc import Asked, Deed, Failed, Planned, Swept, plan, tick
from ckptsync.head.litter import Litter
from ckptsync.head.rules import Rules
from ckptsync.head.tombs import store_now
from ckptsync.records.names import OURS
from ckptsync.stores.contract import Store
from ckptsync.units import show_duration, show_size

GRACE = 86400.0
HEADING = ("RUN", "CHECKPOINT", "STATE", "SIZE", "DECISION", "REASON")


RULES = (
    ("keep-last", "N", "keep the newest N that are verified"),
    ("keep-every", "N", "keep steps that are a multiple of N"),
    ("keep-best", "METRIC:N", "keep the best N by a metric in trainer_state.json: eval_loss:2 (lowest), max:eval_accuracy:2"),
    ("max-age", "TIME", "delete what no rule keeps when it is older, for example 30d"),
    ("max-size", "SIZE", "delete what no rule keeps when newer checkpoints take more room than this, for example 2TB"),
    ("shards", "WHICH", "keep, or drop-after:N: delete the trainer's own files of all but the newest N; consolidated models stay"),
)
DETAILS = """A checkpoint is marked first, and deleted by a later run when the grace period is over. The last verified
checkpoint of a run is never deleted. Rules given here replace those of the configuration."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Define the arguments."""
    add_store(command)
    command.add_argument("--run", metavar="RUN", default="", help="only of this run")
    for name, what, text in RULES:
        command.add_argument(f"--{name}", metavar=what, help=text)
    command.add_argument("--grace", metavar="TIME", help="time between marking and deleting (default: the configuration's, or 1d)")
    command.add_argument(
        "--litter",
        action="store_true",
        help="also delete orphaned files: files that no record names for a day, and unfinished writes of killed processes",
    )
    command.add_argument("--dry-run", action="store_true", help="only say what would be kept or deleted, and why")


def run(args: argparse.Namespace) -> int:
    """Decide, and unless it is a dry run do it."""
    asked = asked_for(args)
    store = asked_store(args)
    _check_there(store, args.run)
    found = plan(store, asked, _clock(store)) if args.dry_run else tick(store, asked)
    swept = _litter(store, args) if args.litter else ()
    if args.json:
        output.print_json(described(found, is_dry=args.dry_run) | {"litter": [one.entry for one in swept]})
    else:
        for line in (*lines(found, is_dry=args.dry_run), *litter_lines(swept, is_dry=args.dry_run)):
            print(line)
    return max((f.error.exit_code for f in found.failed), default=0)


def _check_there(store: Store, run: str) -> None:
    """Raises ConfigError if a run is named that the store does not have."""
    if run and next(iter(store.names(f"{checked_name(run, 'run')}/")), None) is None:
        raise ConfigError(f"{run}: there is no such run in this store", hint="`ckptsync ls` shows what is there")


def asked_for(args: argparse.Namespace) -> Asked:
    """The rules that are given; raises ConfigError if there are none."""
    given = {name.replace("-", "_"): value for name, _, _ in RULES if (value := getattr(args, name.replace("-", "_"))) is not None}
    loaded = configuration(args)
    config = loaded.retention if loaded else None
    grace = _read("grace", args.grace) if args.grace else config.grace if config else GRACE
    if given:
        rules = Rules(**{key: _read(key, value) for key, value in given.items()})
        return Asked(lambda _: rules, grace, args.run)
    if config is None and args.litter:
        return Asked(lambda _: Rules(), grace, args.run)
    if config is None:
        raise ConfigError("no rule is given: nothing would go", hint="give a configuration with -c, or rules such as --keep-last 3")
    return Asked(config.of, grace, args.run)


def _read(key: str, value: str) -> Any:
    try:
        return duration(value) if key == "grace" else READ[key](int(value) if value.isdigit() else value)
    except ValueError as e:
        raise ConfigError(f"--{key.replace('_', '-')}: {e}") from e


def _clock(store: Store) -> float:
    """What time it is there, as far as can be told without writing: not before its newest word."""
    return max([time.time(), *(entry.mtime for entry in store.names(f"{OURS}/"))])


def _litter(store: Store, args: argparse.Namespace) -> tuple[Litter, ...]:
    now = _clock(store) if args.dry_run else store_now(store)
    there = list(litter.found(store, now, run=args.run))
    return tuple(there if args.dry_run else litter.remove(store, there, now))


def litter_lines(swept: Iterable[Litter], *, is_dry: bool) -> Iterator[str]:
    """What nothing speaks of."""
    verb = "litter" if is_dry else "removed litter"
    return (output.clean(f"{verb}: {one.entry.name}, {show_size(one.entry.size)}") for one in swept)


def lines(found: Swept, *, is_dry: bool) -> Iterator[str]:
    """A table of all that is decided, what was done, and what could not be."""
    if found.planned:
        yield from output.aligned([HEADING, *(row(one) for one in found.planned)])
    else:
        yield "no checkpoint of which a rule speaks"
    yield ""
    if is_dry:
        yield from (_would(one) for one in found.planned if one.step.deed not in ("nothing", "wait"))
    yield from map(_did, found.done)
    yield from (output.clean(f"failed: {_at(f)}: {f.error}") for f in found.failed)
    yield summary(found, is_dry=is_dry)


def row(one: Planned) -> list[str]:
    """One location."""
    seen = one.seen
    size = show_size(seen.size + seen.model_size)
    left = f" (in {show_duration(round(one.step.left))})" if one.step.deed == "wait" and one.step.left else ""
    return [seen.run, seen.location, seen.status, size, f"{one.decision.verdict}{left}", one.decision.reason]


def _would(one: Planned) -> str:
    verb = {"mark": "mark", "remove": "remove", "take-back": "take back"}[one.step.deed]
    return output.clean(f"would {verb} {one.step.run}/{one.step.location}{_scope(one.step.scope)}: {show_size(one.size)}")


def _did(deed: Deed) -> str:
    size = f", {show_size(deed.size)}" if deed.outcome in ("marked", "removed") else ""
    return output.clean(f"{deed.outcome}: {deed.run}/{deed.location}{_scope(deed.scope)}{size} ({deed.reason})")


def _scope(scope: str) -> str:
    return ", its shards" if scope == "shards" else ""


def _at(failed: Failed) -> str:
    return f"{failed.run}/{failed.location}".rstrip("/")


def summary(found: Swept, *, is_dry: bool) -> str:
    """How much of it goes."""
    deeds: Iterable[tuple[str, int]] = ((d.outcome, d.size) for d in found.done)
    if is_dry:
        named = {"mark": "to mark", "remove": "to remove", "wait": "waiting", "take-back": "to take back"}
        deeds = ((named[p.step.deed], p.size) for p in found.planned if p.step.deed in named)
    totals: dict[str, tuple[int, int]] = {}
    for word, size in deeds:
        count, total = totals.get(word, (0, 0))
        totals[word] = count + 1, total + size
    told = ", ".join(f"{count} {word} ({show_size(size)})" for word, (count, size) in totals.items())
    return f"{len(found.planned)} checkpoints; {told or 'nothing to do'}"


def described(found: Swept, *, is_dry: bool) -> dict[str, Any]:
    """For ``--json``."""
    locations = [
        {
            "run": p.seen.run,
            "location": p.seen.location,
            "status": p.seen.status,
            "bytes": p.seen.size + p.seen.model_size,
            "decision": p.decision.verdict,
            "reason": p.decision.reason,
            "deed": p.step.deed,
            "scope": p.step.scope,
            "in": p.step.left or None,
            "would_free": p.size,
        }
        for p in found.planned
    ]
    failed = [{"run": f.run, "location": f.location, "error": str(f.error), "hint": f.error.hint} for f in found.failed]
    return {"dry_run": is_dry, "locations": locations, "done": list(found.done), "failed": failed}
