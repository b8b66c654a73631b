"""``ckptsync gc``: delete checkpoints that no retention rule keeps.

`head.gc` decides and deletes; this module takes the rules from options or configuration, and prints
decisions and results.  A head runs the same command as a child.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from ckptsync.catalogue.cached import Cache
from ckptsync.catalogue.uncached import not_found
from ckptsync.cli import output
from ckptsync.cli.arguments import (
    add_targets,
    checked_name,
    configuration,
    may_be_store,
    named_store,
    only_target,
    option_value,
    with_store,
)
from ckptsync.cli.output import Progress
from ckptsync.cli.progress import add_progress, with_progress
from ckptsync.config.value_parsers import RULES, duration
from ckptsync.errors import ConfigError
from ckptsync.head.gc import (
    PlannedRemoval,
    RetentionRequest,
    RetentionResult,
    apply_retention,
    plan_retention,
)
from ckptsync.head.orphans import Orphan, delete_orphans, find_orphans
from ckptsync.head.removal import RemovalOutcome
from ckptsync.head.retention import RetentionDecision
from ckptsync.head.retention_rules import Rules
from ckptsync.quantities import show_duration, show_size
from ckptsync.safe_names import RECORDS
from ckptsync.stores.clock import store_now
from ckptsync.stores.contract import Store

GRACE = 86400.0
HEADING = ("RUN", "CHECKPOINT", "STATUS", "SIZE", "DECISION", "REASON")
DETAILS = (
    "A checkpoint is marked first, and deleted by a later run when the grace period is over."
    " The last verified checkpoint of a run is never deleted."
    " Rules given here replace those of the configuration."
)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    add = command.add_argument
    add_targets(command, "", argparse.SUPPRESS)
    add("--run", metavar="RUN", default="", help="only this run")
    add("--keep-last", metavar="N", help="keep the newest N that are verified")
    add("--keep-every", metavar="N", help="keep steps that are a multiple of N")
    add(
        "--keep-best",
        metavar="METRIC:N",
        help="keep the best N by a metric in trainer_state.json, or of an event: eval_loss:2"
        " (lowest), max:eval_accuracy:2",
    )
    text = "delete checkpoints that no rule keeps and that are older, for example 30d"
    add("--max-age", metavar="TIME", help=text)
    add(
        "--max-size",
        metavar="SIZE",
        help="delete checkpoints that no rule keeps if newer ones take more room than this, for"
        " example 2TB",
    )
    add(
        "--shards",
        metavar="WHICH",
        help="keep, or drop-after:N: delete the trainer's own files of all but the newest N;"
        " consolidated models stay",
    )
    add(
        "--grace",
        metavar="TIME",
        help="time between marking and deleting (default: the configuration's, or 1d)",
    )
    add(
        "--orphans",
        action="store_true",
        help="also delete orphaned files: files that no record names for a day, and unfinished"
        " writes of killed processes",
    )
    add("--dry-run", action="store_true", help="only say what would be kept or deleted, and why")
    add(
        "--stop-after",
        metavar="TIME",
        help="begin with no other checkpoint after this time; the next gc continues",
    )
    add_progress(command)


def run(args: argparse.Namespace) -> int:
    """Decide which checkpoints are marked and deleted, and do it unless it is a dry run.

    With ``--orphans`` also delete orphaned files.  Return the greatest exit code of what failed,
    else 0.  Raises ConfigError, StoreError.
    """
    return with_progress(args, _run)


def _run(args: argparse.Namespace, progress: Progress) -> int:
    """Decide, delete and print, as `run`; report the deleted bytes to ``progress``.

    Orphaned files follow once retention is done, whatever failed.  With ``--progress`` the JSON has
    no ``locations``.  Raises ConfigError for a target, no rules, or a run that is not in the store.
    """
    if word := only_target(args):
        hint = with_store(args, word) if may_be_store(args, word) else f"one run is --run {word}"
        raise ConfigError(f"{word}: gc takes no argument", hint=hint)
    request = build_request(args)
    store = named_store(args)
    if args.run and next(iter(store.names(f"{checked_name(args.run, 'run')}/")), None) is None:
        raise not_found(store, args.run)
    if args.dry_run:
        result = plan_retention(store, request, _clock(store))
    else:
        result = _apply(args, store, request, progress)
    orphans: list[Orphan] = []
    if args.orphans:
        now = _clock(store) if args.dry_run else store_now(store)
        orphans = list(find_orphans(store, now, args.run))
        orphans = orphans if args.dry_run else list(delete_orphans(store, orphans, now))
    code = max((f.error.exit_code for f in result.failed), default=0)
    if args.json:
        document = _describe(result, is_dry=args.dry_run)
        if args.progress:  # the list of what is kept may be long
            del document["locations"]
        entries = [
            {"name": orphan.entry.name, "bytes": orphan.entry.size, "mtime": orphan.entry.mtime}
            for orphan in orphans
        ]
        output.print_json({**document, "orphans": entries}, code)
    else:
        verb = "orphaned" if args.dry_run else "deleted orphaned file"
        for line in _lines(result, is_dry=args.dry_run):
            output.say(line)
        for orphan in orphans:
            output.say(f"{verb}: {orphan.entry.name}, {show_size(orphan.entry.size)}")
    return code


def _apply(
    args: argparse.Namespace, store: Store, request: RetentionRequest, progress: Progress
) -> RetentionResult:
    """Mark and delete what is due, and return the result; stop after ``--stop-after`` seconds.

    Continues from the catalogue cache on this machine, and saves it, also after an error, unless
    ``--run`` is given.  Raises ConfigError for a wrong ``--stop-after``, StoreError if the store
    cannot be listed; other failures are in the result.
    """
    seconds = option_value("--stop-after", duration, args.stop_after) if args.stop_after else None
    removed, began = 0, time.monotonic()
    cache = Cache.load(store.url)

    def count(size: int) -> None:
        """Report the bytes that were deleted so far."""
        nonlocal removed
        removed += size
        progress(removed, 0)

    def is_over() -> bool:
        """Return whether ``--stop-after`` has passed."""
        return seconds is not None and time.monotonic() - began > seconds

    try:
        return apply_retention(store, request, cache, count, is_over)
    finally:
        if not args.run:  # records of one run would replace the cached ones of all runs
            cache.save(store.url)  # also after an error: the next gc continues there


def build_request(args: argparse.Namespace) -> RetentionRequest:
    """Return the rules of the command line, else of the configuration, and the grace period.

    The rules of the command line hold for all runs.  Raises ConfigError for a wrong value, or
    without rules and ``-c``, unless ``--orphans`` is given.
    """
    rule_texts = {key: value for key in RULES if (value := getattr(args, key)) is not None}
    loaded = configuration(args)
    config = loaded.retention if loaded else None
    grace = config.grace if config else GRACE
    if args.grace:
        grace = option_value("--grace", duration, args.grace)
    if rule_texts:
        rules = Rules(**{key: _rule(key, value) for key, value in rule_texts.items()})
        return RetentionRequest(lambda _: rules, grace, args.run)
    if config is None and not args.orphans:
        hint = "give a configuration with -c, or rules such as --keep-last 3"
        raise ConfigError("no rule is given", hint=hint)
    return RetentionRequest(config.of if config else lambda _: Rules(), grace, args.run)


def _rule(key: str, text: str) -> Any:
    """Return the value of a rule's option, read as in a configuration.  Raises ConfigError."""

    def read(text: str) -> Any:
        """Return the rule's value from a whole number or a text.  Raises ValueError."""
        return RULES[key](int(text) if text.isdigit() else text)

    return option_value(f"--{key.replace('_', '-')}", read, text)


def _clock(store: Store) -> float:
    """Return an estimate of the store's clock, without writing to it, for a dry run.

    It is this machine's time, or that of the newest record if that is later.  Raises StoreError.
    """
    return max([time.time(), *(entry.mtime for entry in store.names(f"{RECORDS}/"))])


def _lines(result: RetentionResult, *, is_dry: bool) -> Iterator[str]:
    """Yield lines for people: the table of decisions, then what was done, then what failed.

    In a dry run what would be done stands for what was.  The last line has the totals (`_summary`).
    """
    if result.planned:
        yield from output.aligned([HEADING, *map(_row, result.planned)])
    else:
        yield "no checkpoint to which a rule applies"
    yield ""
    verbs = {"mark": "mark", "remove": "delete", "withdraw": "withdraw the mark of"}
    for removal in result.planned if is_dry else ():
        decision = removal.decision
        if verb := verbs.get(decision.action):
            yield f"would {verb} {_name(decision)}: {show_size(removal.size)}"
    for outcome in result.done:
        size = f", {show_size(outcome.size)}" if outcome.result in ("marked", "removed") else ""
        yield f"{outcome.result}: {_name(outcome)}{size} ({outcome.reason})"
    for failed in result.failed:
        target = f"{failed.run}/{failed.location}".rstrip("/")
        yield f"failed: {target}: {failed.error}"
    yield _summary(result, is_dry=is_dry)


def _row(removal: PlannedRemoval) -> list[str]:
    """Return a decision as a row under `HEADING`; the size is that of files and model."""
    summary, decision = removal.summary, removal.decision
    verdict: str = decision.verdict
    if decision.action == "wait" and decision.left:
        verdict += f" (in {show_duration(round(decision.left))})"
    size = show_size(summary.size + summary.model_size)
    return [summary.run, summary.location, summary.status, size, verdict, decision.reason]


def _name(removal: RetentionDecision | RemovalOutcome) -> str:
    """Return ``RUN/LOCATION``, and whether only its shards are meant."""
    return f"{removal.run}/{removal.location}{', its shards' if removal.scope == 'shards' else ''}"


def _summary(result: RetentionResult, *, is_dry: bool) -> str:
    """Return a line with the number and the size of the checkpoints for each outcome.

    In a dry run the outcomes are the planned actions.
    """
    sizes: dict[str, list[int]] = {}
    for outcome in () if is_dry else result.done:
        sizes.setdefault(outcome.result, []).append(outcome.size)
    names = {"mark": "to mark", "remove": "to remove", "wait": "waiting", "withdraw": "to withdraw"}
    for removal in result.planned if is_dry else ():
        if word := names.get(removal.decision.action):
            sizes.setdefault(word, []).append(removal.size)
    listed = [
        f"{len(amounts)} {word} ({show_size(sum(amounts))})" for word, amounts in sizes.items()
    ]
    return f"{len(result.planned)} checkpoints; {', '.join(listed) or 'nothing to do'}"


def _describe(result: RetentionResult, *, is_dry: bool) -> dict[str, Any]:
    """Return the decisions, and what was done and failed, for ``--json``."""
    locations = [
        {
            "run": p.summary.run,
            "location": p.summary.location,
            "status": p.summary.status,
            "bytes": p.summary.size + p.summary.model_size,
            "decision": p.decision.verdict,
            "reason": p.decision.reason,
            "deed": p.decision.action,
            "scope": p.decision.scope,
            "in": p.decision.left or None,
            "would_free": p.size,
        }
        for p in result.planned
    ]
    names = {"result": "outcome", "size": "bytes"}
    done = [{names.get(key, key): value for key, value in asdict(o).items()} for o in result.done]
    failed = [
        {"run": f.run, "location": f.location, "error": str(f.error), "hint": f.error.hint}
        for f in result.failed
    ]
    return {"dry_run": is_dry, "locations": locations, "done": done, "failed": failed}
