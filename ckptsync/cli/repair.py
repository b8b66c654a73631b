"""``ckptsync repair``: show what is damaged, who can repair it and what is lost; then repair it."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from ckptsync.catalogue.uncached import StoreState, not_found, read_state
from ckptsync.cli import output
from ckptsync.cli.arguments import (
    IN_STORE,
    add_targets,
    configuration,
    only_target,
    store_run_location,
)
from ckptsync.cli.consolidate import bases_of
from ckptsync.cli.output import Progress, say
from ckptsync.cli.progress import add_progress, with_progress
from ckptsync.errors import CkptsyncError, without_frames
from ckptsync.head.consolidate import HeadOptions
from ckptsync.head.repair import NodeState, RepairPlan, plan_repair, repair
from ckptsync.merger.plan import MergeOptions
from ckptsync.quantities import show_size
from ckptsync.records.location_status import LocationState, proof, unanswered_findings
from ckptsync.records.report import LEVELS, Level, Report, VerifyFinding
from ckptsync.spool.markers import boot
from ckptsync.status.nodes import list_nodes, read_nodes
from ckptsync.stores.contract import Store
from ckptsync.verifier.expected_files import check_records, check_sizes, expected_files
from ckptsync.verifier.tracked_files import ReadCounter
from ckptsync.verifier.verification import InStore, VerifyOptions, verify
from ckptsync.verifier.write_reports import write_report

KEPT = "were read; what was repaired stays so, and the same command continues"
EVERY = 2.0  # seconds between two steps of --wait
LABELS = {
    "lost": "LOST",
    "away": "waits for a node",
    "ask": "upload requested",
    "later": "later",
    "copy": "copied",
    "rebuild": "made again",
    "delete": "deleted",
    "ignore": "nothing to do",
}
DETAILS = """Consolidated files are made again from shards; nodes that still have the shards \
upload them again.
Exit code 10: something cannot be repaired; 3: nodes still have to upload files again."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add_targets(command, IN_STORE, "what to repair (default: all that is damaged)")
    add("--dry-run", action="store_true", help="only say what would be done, and what is lost")
    add(
        "--wait",
        action="store_true",
        help="wait until the nodes have uploaded the files again, and verify these",
    )
    add_progress(command)


@dataclass(frozen=True, slots=True)
class RepairOutcome:
    """The outcome of one repair: names of what changed, the error, the damage that is left."""

    plan: RepairPlan
    written: tuple[str, ...] = ()
    error: CkptsyncError | None = None
    left: RepairPlan | None = None

    @property
    def exit_code(self) -> int:
        """The error's, else that of the damage that is left; 3 where it can still be repaired."""
        if self.error:
            return self.error.exit_code
        if self.left is None:
            return self.plan.exit_code
        return self.left.exit_code or (3 if self.left.doable else 0)

    @property
    def waits(self) -> bool:
        """Whether a node may still do something about it."""
        return not self.error and (self.left or self.plan).exit_code == 3


def run(args: argparse.Namespace) -> int:
    """Plan, show and repair; with ``--wait`` until no node can do anything more."""
    return with_progress(args, _run, "verifying", KEPT)


def _run(args: argparse.Namespace, progress: Progress) -> int:
    store, run_, location = store_run_location(args, only_target(args))
    options = HeadOptions()
    if config := configuration(args):
        head = config.head
        merge = MergeOptions(head.dtype, head.max_shard_size, allow_code=head.allow_code)
        options = HeadOptions(merge, head.config_from, **bases_of(config))
    repairs = StoreRepairs(store, options, progress)
    plans = repairs.plans(run_, location)
    if location and (not plans or (not args.dry_run and repairs.is_answered(plans[0]))):
        plans = _plans_by_reading(args, repairs, run_, location)
    elif not args.json:
        _show(plans)
    done = [RepairOutcome(plan) for plan in plans]
    if not args.dry_run:
        done = [repairs.repair(plan) for plan in plans]
        while args.wait and any(one.waits for one in done):
            time.sleep(EVERY)
            done = [repairs.follow(one) if one.waits else one for one in done]
    code = max((one.exit_code for one in done), default=0)
    if args.json:
        locations = []
        for one in done:
            error = str(one.error) if one.error else None
            locations.append({**asdict(one.plan), "written": one.written, "error": error})
        output.print_json({"dry_run": args.dry_run, "locations": locations, "exit_code": code})
        return code
    for one in done:
        at = f"{one.plan.run}/{one.plan.location}"
        for name in one.written:
            say(f"written: {at}: {name}")
        if one.error:
            say(f"failed: {at}: {one.error}")
    return code


def _plans_by_reading(
    args: argparse.Namespace, repairs: StoreRepairs, run_: str, location: str
) -> list[RepairPlan]:
    """Read every byte of a location without known damage, or whose files have all come.

    Show and return the plan.
    """
    plans = []
    for report, news in repairs.verify(run_, location):
        if not args.json:
            found = "DAMAGED" if report.verdict == "damaged" else "nothing is damaged"
            line = f"{found} (every byte in the store was read: {show_size(report.read)})"
            notes = [finding.detail for finding in report.findings if finding.kind == "note"]
            if notes and report.verdict == "incomplete":
                line += f"; {notes[0]}"
            say(f"{run_}/{location}: {line}")
        if news and not args.dry_run:
            write_report(repairs.store, news)
        plan = repairs.plan(run_, location, news if args.dry_run else None)
        plans += [plan] if plan.parts else []
    if plans and not args.json:
        _show(plans)
    return plans


def _show(plans: Sequence[RepairPlan]) -> None:
    """Print each location: its damaged files, what is done about them, and what is lost."""
    for plan in plans:
        say(f"{plan.run}/{plan.location}")
        for part in plan.parts:
            say(f"  {LABELS[part.how]}: {part.name}: {part.words}")
            if part.damage:
                say(f"      {part.damage}")
            for lost in part.consequences:
                say(f"      lost: {lost}")
    if not plans:
        more = "`ckptsync verify` reads every byte"
        say(f"nothing is damaged according to reports and listings; {more}")


@dataclass(frozen=True, slots=True)
class StoreRepairs:
    """Plans and carries out repairs in a store."""

    store: Store
    options: HeadOptions
    progress: Progress

    def plans(self, run_: str, location: str) -> list[RepairPlan]:
        """Return the plans of all damaged locations, or of the named ones.

        Raises ConfigError if they are not found.
        """
        states, found = self._states(), read_state(self.store, run_)
        names = {(one.run, one.location) for one in found.locations}
        names |= {(fault.run, fault.location) for fault in found.faults}
        if (run_ and not names) or (location and (run_, location) not in names):
            raise not_found(self.store, run_, location)
        plans = [_plan(found, *name, states) for name in sorted(names) if location in ("", name[1])]
        return [plan for plan in plans if plan.parts]

    def plan(self, run_: str, location: str, news: Report | None = None) -> RepairPlan:
        """Return the plan of a location, as if ``news`` were written."""
        found = read_state(self.store, run_)
        if news:
            as_if = (
                _with_report(s, news) if s.location == location else s for s in found.locations
            )
            found = replace(found, locations=tuple(as_if))
        return _plan(found, run_, location, self._states())

    def _states(self) -> dict[str, NodeState]:
        files = read_nodes(self.store)
        known = list_nodes(files, files.now(boot(), time.time()))
        workers = [node for node in known if "worker" in node.roles]
        return {node.node: NodeState(node.state == "alive", node.lacks) for node in workers}

    def verify(
        self, run_: str, location: str, level: Level | None = None
    ) -> Iterator[tuple[Report, Report | None]]:
        """Verify a location at a level, or at one that answers every report of damage.

        Yield each report, and what is new in it.
        """
        levels: list[Level] = [level or "digest"]
        seen = read_state(self.store, run_).of(run_, location)
        if seen and level is None:
            levels += [seen.records.reports[name].level for name in seen.conditions.proof.damage]
        read, deepest = ReadCounter(self.progress), max(levels, key=LEVELS.index)
        options = VerifyOptions(deepest, time.time(), progress=read, expect=read.expect)
        for one in verify(InStore(self.store, run_, location), options):
            yield one.report, one.news

    def _verify(self, plan: RepairPlan, level: Level | None = None) -> None:
        found = read_state(self.store, plan.run)
        if not (found.of(plan.run, plan.location) or found.faults_of(plan.run, plan.location)):
            return  # its damaged record was the last: no manifest of it is left
        for _, news in self.verify(plan.run, plan.location, level):
            if news:
                write_report(self.store, news)

    def repair(self, plan: RepairPlan) -> RepairOutcome:
        """Repair and verify, and repair what that finds, each part once.

        Where only a listing shows damage, a report is written first: that is what nodes answer.
        """
        written: list[str] = []
        tried, left = frozenset[str](), plan
        try:
            while True:
                seen = self._seen(plan)
                if seen and _names(_findings(seen)) - _names(unanswered_findings(seen)):
                    self._verify(plan, "stat")
                    seen = self._seen(plan)
                written += repair(self.store, left, seen, self.options)
                if not left.doable:
                    return RepairOutcome(plan, tuple(written))
                self._verify(plan)
                tried |= left.doable
                left = self.plan(plan.run, plan.location)
                if not left.doable - tried:
                    return RepairOutcome(plan, tuple(written), None, left)
        except CkptsyncError as e:
            return RepairOutcome(plan, tuple(written), without_frames(e))

    def _seen(self, plan: RepairPlan) -> LocationState | None:
        return _readable(read_state(self.store, plan.run), plan.run, plan.location)

    def follow(self, before: RepairOutcome) -> RepairOutcome:
        """Verify what nodes have uploaded since, and repair what can be made of it."""
        plan = self.plan(before.plan.run, before.plan.location)
        if self.is_answered(plan):
            try:
                self._verify(plan)
            except CkptsyncError as e:
                return RepairOutcome(plan, before.written, without_frames(e))
            plan = self.plan(plan.run, plan.location)
        done = self.repair(plan) if plan.doable else RepairOutcome(plan)
        return replace(done, written=(*before.written, *done.written))

    def is_answered(self, plan: RepairPlan) -> bool:
        """Return whether nodes have uploaded all requested files since the report."""
        found = read_state(self.store, plan.run)
        seen = _readable(found, plan.run, plan.location)
        asked = [f"{plan.run}/{part.name}" for part in plan.parts if part.how in ("ask", "away")]
        if not seen or not asked:
            return False
        times, damage = found.mtimes, seen.conditions.proof.damage
        last = max((times.get(name, 0.0) for name in damage), default=0.0)
        return all(times.get(name, 0.0) >= last and name in seen.sizes for name in asked)


def _plan(
    found: StoreState, run_: str, location: str, states: Mapping[str, NodeState]
) -> RepairPlan:
    seen = _readable(found, run_, location)
    return plan_repair(found, run_, location, _findings(seen) if seen else (), states)


def _findings(seen: LocationState) -> tuple[VerifyFinding, ...]:
    """Return the damage of reports, and missing files of a listing that no report has."""
    if seen.conditions.retired or seen.conditions.conflict:
        return ()
    reported = unanswered_findings(seen)
    listed = (*check_sizes(expected_files(seen), seen.sizes), *check_records(seen))
    names = _names(reported)
    return (*reported, *(one for one in listed if one.name not in names))


def _names(findings: Iterable[VerifyFinding]) -> set[str]:
    return {finding.name for finding in findings}


def _with_report(seen: LocationState, news: Report) -> LocationState:
    last = max((report.n for report in seen.records.reports.values()), default=0)
    reports = {**seen.records.reports, "dry run": replace(news, n=last + 1)}
    found = proof(reports, {one.name for one in seen.manifests}, seen.model_record_name)
    records = replace(seen.records, reports=reports)
    return replace(seen, records=records, conditions=replace(seen.conditions, proof=found))


def _readable(found: StoreState, run_: str, location: str) -> LocationState | None:
    """Return a location whose manifests and tombstone can be read; others cannot be judged."""
    return next((s for s in found.readable if (s.run, s.location) == (run_, location)), None)
