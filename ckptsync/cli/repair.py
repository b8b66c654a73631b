"""``ckptsync repair``: what is damaged, what can be done about it and by whom, what is lost; then the doing."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace

from ckptsync.catalogue.fresh import Fresh, fresh
from ckptsync.catalogue.reading import read
from ckptsync.catalogue.summary import Catalogue
from ckptsync.cli import output
from ckptsync.cli.arguments import add_config
from ckptsync.cli.locations import asked_store, configuration
from ckptsync.errors import CkptsyncError, ConfigError
from ckptsync.fleet.nodes import nodes, told
from ckptsync.head.consolidate import HeadOptions
from ckptsync.head.mending import ground, mend
from ckptsync.head.repairing import NodeWord, Plan, plan
from ckptsync.merge.plan import Options
from ckptsync.records.report import LEVELS, Finding, Level, Report
from ckptsync.records.state import Snapshot, proof, standing
from ckptsync.spool.marks import boot
from ckptsync.stores.contract import Store
from ckptsync.units import show_size
from ckptsync.verify.expected import expected, sealless, stat
from ckptsync.verify.reporting import write_report
from ckptsync.verify.target import Asked, InStore, verify

EVERY = 2.0  # seconds between two looks of --wait
LETTERS = {
    "lost": "LOST",
    "away": "waits for a node",
    "ask": "asked",
    "later": "later",
    "copy": "copied",
    "rebuild": "made again",
    "ignore": "nothing to do",
}


@dataclass(frozen=True, slots=True)
class Done:
    """A plan, and what became of it: names that were written or removed, what failed, and the plan for what was still damaged then."""

    plan: Plan
    written: tuple[str, ...] = ()
    error: CkptsyncError | None = None
    left: Plan | None = None

    @property
    def exit_code(self) -> int:
        """Of what failed, or of what is left; 3 where that could be mended, and is not mended yet; of the plan where nobody has looked again."""
        if self.error:
            return self.error.exit_code
        if self.left is None:
            return self.plan.exit_code
        return self.left.exit_code or (3 if _doable(self.left) else 0)

    @property
    def waits(self) -> bool:
        """Whether somebody may still do something about it."""
        return not self.error and (self.left or self.plan).exit_code == 3


DETAILS = """Consolidated files are made again from shards; nodes that still have the shards upload them again.
Exit code 10: something cannot be repaired; 3: nodes were asked and have not answered yet."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Define the arguments."""
    command.add_argument(
        "what",
        metavar="URL | RUN[/CHECKPOINT]",
        nargs="*",
        help="the store; and what to repair in it (default: all that is damaged)",
    )
    add_config(command)
    command.add_argument("--dry-run", action="store_true", help="only say what would be done, and what is lost")
    command.add_argument("--wait", action="store_true", help="wait until nodes have answered, and what they uploaded is verified")


def run(args: argparse.Namespace) -> int:
    """Plan, show, do; with --wait until nothing is left that somebody may still do."""
    store, run_, location = _asked(args)
    options = _options(args)
    found = _plans(store, run_, location)
    if location and (not found or (not args.dry_run and _is_sent_again(store, found[0]))):
        found = _read(store, run_, location, args)
    elif not args.json:
        _show(found)
    if args.dry_run:
        return _end(args, [Done(p) for p in found])
    done = [_mend(store, p, options) for p in found]
    while args.wait and any(d.waits for d in done):
        time.sleep(EVERY)
        done = [_followed(store, d, options) for d in done]
    return _end(args, done)


def _asked(args: argparse.Namespace) -> tuple[Store, str, str]:
    """The store, a run and a location, as far as they are named; raises ConfigError."""
    words = [*args.what]
    has_url = bool(words) and not args.config and ("://" in words[0] or len(words) > 1 or words[0].startswith(("/", ".")))
    args.url = words.pop(0) if has_url else None
    if len(words) > 1:
        raise ConfigError(f"{' '.join(words)}: one RUN[/CHECKPOINT] wanted")
    store = asked_store(args)
    what = words[0].strip("/") if words else ""
    found = read(store) if what else Catalogue()
    runs = {s.run for s in found.summaries} | {f.run for f in found.faults}
    if not what or what in runs:
        return store, what, ""
    run_, _, location = what.rpartition("/")
    return store, run_, location


def _options(args: argparse.Namespace) -> HeadOptions:
    config = configuration(args)
    if config is None:
        return HeadOptions()
    head = config.head
    return HeadOptions(Options(head.dtype, head.max_shard_size, allow_code=head.allow_code), head.config_from)


def _plans(store: Store, run_: str, location: str) -> list[Plan]:
    words = node_words(store)
    found = fresh(store, run_)
    named = {(s.run, s.location) for s in found.locations} | {(f.run, f.location) for f in found.faults}
    if location and (run_, location) not in named:
        raise ConfigError(f"{run_}/{location}: no node has told this store of it", hint="`ckptsync ls` shows what is there")
    plans = [planned(found, *one, words) for one in sorted(named) if location in ("", one[1])]
    return [p for p in plans if p.parts]


def _read(store: Store, run_: str, location: str, args: argparse.Namespace) -> list[Plan]:
    """Read every byte of a location against which nothing is said, or of which all that was asked for has come; the plan for what that finds."""
    found = []
    level = _level(fresh(store, run_).of(run_, location))
    for one in verify(InStore(store, run_, location), Asked(level, time.time())):
        if not args.json:
            print(output.clean(f"{run_}/{location}: {_outcome(one.report)}"), flush=True)
        if one.news and not args.dry_run:
            write_report(store, one.news)
        seen = fresh(store, run_)
        if one.news and args.dry_run:
            seen = replace(seen, locations=tuple(_reported(s, one.news) if s.location == location else s for s in seen.locations))
        now = planned(seen, run_, location, node_words(store))
        found += [now] if now.parts else []
    if found and not args.json:
        _show(found)
    return found


def _reported(seen: Snapshot, news: Report) -> Snapshot:
    """The location as it would be if the report were written."""
    last = max((report.n for report in seen.records.reports.values()), default=0)
    reports = {**seen.records.reports, "dry run": replace(news, n=last + 1)}
    found = proof(reports, {k.name for k in seen.manifests}, seen.model_record_name)
    return replace(seen, records=replace(seen.records, reports=reports), conditions=replace(seen.conditions, proof=found))


def _outcome(report: Report) -> str:
    read = f"(every byte that is there was read: {show_size(report.read)})"
    if report.verdict == "damaged":
        return f"DAMAGED {read}"
    why = next((f.detail for f in report.findings if f.kind == "note" and report.verdict == "arriving"), "")
    return f"nothing is damaged {read}{f'; {why}' if why else ''}"


def node_words(store: Store) -> dict[str, NodeWord]:
    """Every worker, by what it last said."""
    said = told(store)
    known = nodes(said, said.now(boot(), time.time()))
    return {n.node: NodeWord(n.state == "alive", n.lacks) for n in known if "worker" in n.roles}


def planned(found: Fresh, run_: str, location: str, words: Mapping[str, NodeWord]) -> Plan:
    """Of one location; a file that is not there is damage also before a report says so."""
    seen = next((s for s in found.readable if (s.run, s.location) == (run_, location)), None)
    its = Fresh(tuple(s for s in found.locations if s.run == run_), tuple(f for f in found.faults if f.run == run_), found.mtimes)
    return plan(run_, location, seen, findings(seen) if seen else (), ground(its, location, words))


def findings(seen: Snapshot) -> tuple[Finding, ...]:
    """What stands against it by reports, and what is seen to be missing."""
    if seen.conditions.retired or seen.conditions.ambiguous:
        return ()
    said = standing(seen)
    names = {f.name for f in said}
    listed = (*stat(expected(seen), seen.sizes), *sealless(seen))
    return (*said, *(f for f in listed if f.name not in names))


def _mend(store: Store, plan_: Plan, options: HeadOptions, tried: frozenset[str] = frozenset()) -> Done:
    """What can be done here; and where only a listing shows the damage, a report, for that is what nodes answer.

    Where that should be all, it is verified; what that finds is mended too, each part once (``tried``).
    """
    seen = _of(fresh(store, plan_.run), plan_)
    try:
        if seen is not None and {f.name for f in findings(seen)} - {f.name for f in standing(seen)}:
            _verified(store, plan_, "stat")
            seen = _of(fresh(store, plan_.run), plan_)
        written = mend(store, plan_, seen, options)
        if plan_.exit_code or not _doable(plan_):
            return Done(plan_, written)
        _verified(store, plan_, _level(seen))
        left = planned(fresh(store, plan_.run), plan_.run, plan_.location, node_words(store))
    except CkptsyncError as e:
        return Done(plan_, (), e)
    tried |= _doable(plan_)
    if not _doable(left) - tried:
        return Done(plan_, written, None, left)
    more = _mend(store, left, options, tried)
    return Done(plan_, (*written, *more.written), more.error, more.left or more.plan)


def _doable(plan_: Plan) -> frozenset[str]:
    """Names of what can be mended here."""
    return frozenset(part.name for part in plan_.parts if part.how in ("rebuild", "copy"))


def _followed(store: Store, before: Done, options: HeadOptions) -> Done:
    """Look again: what has been sent since is verified, what can be made of it is made."""
    if not before.waits:
        return before
    found = fresh(store, before.plan.run)
    now = planned(found, before.plan.run, before.plan.location, node_words(store))
    seen = _of(found, now)
    if seen is not None and _is_answered(seen, found, now):
        try:
            _verified(store, now, _level(seen))
        except CkptsyncError as e:
            return Done(now, before.written, e)
        found = fresh(store, now.run)
        now = planned(found, now.run, now.location, node_words(store))
    done = _mend(store, now, options) if _doable(now) else Done(now)
    return Done(now, (*before.written, *done.written), done.error, done.left)


def _is_answered(seen: Snapshot, found: Fresh, plan_: Plan) -> bool:
    """Whether all that was asked of nodes is newer than the report that asked."""
    asked = [f"{seen.run}/{p.name}" for p in plan_.parts if p.how in ("ask", "away")]
    last = max((found.mtimes.get(name, 0.0) for name in seen.conditions.proof.damage), default=0.0)
    return bool(asked) and all(found.mtimes.get(name, 0.0) >= last and name in seen.sizes for name in asked)


def _is_sent_again(store: Store, plan_: Plan) -> bool:
    found = fresh(store, plan_.run)
    seen = _of(found, plan_)
    return seen is not None and _is_answered(seen, found, plan_)


def _verified(store: Store, plan_: Plan, level: Level) -> None:
    """Read the location, and record what is new."""
    for one in verify(InStore(store, plan_.run, plan_.location), Asked(level, time.time())):
        if one.news:
            write_report(store, one.news)


def _level(seen: Snapshot | None) -> Level:
    """What answers all that stands."""
    said = [seen.records.reports[name].level for name in seen.conditions.proof.damage] if seen else []
    return max([*said, "digest"], key=LEVELS.index)


def _of(found: Fresh, plan_: Plan) -> Snapshot | None:
    return next((s for s in found.readable if (s.run, s.location) == (plan_.run, plan_.location)), None)


def _show(found: list[Plan]) -> None:
    for one in found:
        for line in lines(one):
            print(output.clean(line), flush=True)
    if not found:
        print("nothing is damaged, as far as reports and listings tell; `ckptsync verify` reads every byte")


def lines(one: Plan) -> Iterator[str]:
    """A location: each damaged file, what is done about it, and what is lost."""
    yield f"{one.run}/{one.location}"
    for part in one.parts:
        yield f"  {LETTERS[part.how]}: {part.name}: {part.words}"
        yield from ([f"      {part.damage}"] if part.damage else [])
        yield from (f"      lost: {what}" for what in part.consequences)


def _end(args: argparse.Namespace, done: list[Done]) -> int:
    code = max((d.exit_code for d in done), default=0)
    if args.json:
        locations = [{**asdict(d.plan), "written": d.written, "error": str(d.error) if d.error else None} for d in done]
        output.print_json({"dry_run": args.dry_run, "locations": locations, "exit_code": code})
        return code
    for d in done:
        at = f"{d.plan.run}/{d.plan.location}"
        for name in d.written:
            print(output.clean(f"written: {at}: {name}"))
        if d.error:
            print(output.clean(f"failed: {at}: {d.error}"))
    return code
