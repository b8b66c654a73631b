"""``ckptsync repair``: show what is damaged, who can repair it and what is lost; then repair it.

`head.repair` plans one location and carries the plan out.  A repair is proven only by reading the
bytes again, and can show further damage, so this module repeats: plan, repair, verify, until
nothing is left that this command can do.
"""

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
from ckptsync.spool.markers import boot_id
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
    """Define the command's arguments."""
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
    """The outcome of one repair.

    ``written``: the names of what changed.  ``remaining``: the plan for damage that is left after
    the repair; None if nothing was, or could be, done.
    """

    plan: RepairPlan
    written: tuple[str, ...] = ()
    error: CkptsyncError | None = None
    remaining: RepairPlan | None = None

    @property
    def exit_code(self) -> int:
        """Return the exit code of the error, else of the remaining plan, else of the plan.

        3 instead of the remaining plan's 0 if its damage can be repaired.
        """
        if self.error:
            return self.error.exit_code
        if self.remaining is None:
            return self.plan.exit_code
        return self.remaining.exit_code or (3 if self.remaining.doable else 0)

    @property
    def is_waiting(self) -> bool:
        """Return whether nothing is lost or failed, and a node or a later run must act first."""
        return not self.error and (self.remaining or self.plan).exit_code == 3


def run(args: argparse.Namespace) -> int:
    """Plan, show and repair; with ``--wait`` until no node can do anything more.

    Return 10 if something is lost, 3 if nodes must still upload, or the code of an error; else 0.
    """
    return with_progress(args, _run, "verifying", KEPT)


def _run(args: argparse.Namespace, progress: Progress) -> int:
    """Do what `run` says; a named location without known damage is read first.

    Raises ConfigError if the target is not in the store, StoreError.
    """
    store, run_, location = store_run_location(args, only_target(args))
    options = HeadOptions()
    if config := configuration(args):
        head = config.head
        merge = MergeOptions(head.dtype, head.max_shard_size, allow_code=head.allow_code)
        options = HeadOptions(merge, head.config_from, **bases_of(config))
    repairs = StoreRepairs(store, options, progress)
    plans = repairs.list_plans(run_, location)
    if location and (not plans or (not args.dry_run and repairs.is_answered(plans[0]))):
        plans = _plans_by_reading(args, repairs, run_, location)
    elif not args.json:
        _show(plans)
    outcomes = [RepairOutcome(plan) for plan in plans]
    if not args.dry_run:
        outcomes = [repairs.repair(plan) for plan in plans]
        while args.wait and any(outcome.is_waiting for outcome in outcomes):
            time.sleep(EVERY)
            outcomes = [
                repairs.follow(outcome) if outcome.is_waiting else outcome for outcome in outcomes
            ]
    code = max((outcome.exit_code for outcome in outcomes), default=0)
    if args.json:
        locations = []
        for outcome in outcomes:
            error = str(outcome.error) if outcome.error else None
            locations.append({**asdict(outcome.plan), "written": outcome.written, "error": error})
        output.print_json({"dry_run": args.dry_run, "locations": locations, "exit_code": code})
        return code
    for outcome in outcomes:
        target = f"{outcome.plan.run}/{outcome.plan.location}"
        for name in outcome.written:
            say(f"written: {target}: {name}")
        if outcome.error:
            say(f"failed: {target}: {outcome.error}")
    return code


def _plans_by_reading(
    args: argparse.Namespace, repairs: StoreRepairs, run_: str, location: str
) -> list[RepairPlan]:
    """Verify a location, print and write the reports, and return its plan, [] without damage.

    With ``--dry-run`` no report is written; the plan is made as if it were.  Raises ConfigError if
    the store has nothing of it, Incomplete if it changed meanwhile, StoreError.
    """
    plans = []
    for report, news in repairs.verify(run_, location):
        if not args.json:
            verdict = "DAMAGED" if report.verdict == "damaged" else "nothing is damaged"
            line = f"{verdict} (every byte in the store was read: {show_size(report.read)})"
            notes = [finding.detail for finding in report.findings if finding.kind == "note"]
            if notes and report.verdict == "incomplete":
                line += f"; {notes[0]}"
            say(f"{run_}/{location}: {line}")
        if news and not args.dry_run:
            write_report(repairs.store, news)
        plan = repairs.make_plan(run_, location, news if args.dry_run else None)
        plans += [plan] if plan.parts else []
    if plans and not args.json:
        _show(plans)
    return plans


def _show(plans: Sequence[RepairPlan]) -> None:
    """Print each plan: the damaged files, what is done about each, and what is lost.

    Without a plan print that no damage is known, and how to look for it.
    """
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

    def list_plans(self, run_: str, location: str) -> list[RepairPlan]:
        """Return the plans of damaged locations, sorted: of all, of a run, or of the one named.

        Damage is what reports and listings show; files are not read.  Raises ConfigError if the
        store has no such run or location, StoreError.
        """
        states, state = self._read_node_states(), read_state(self.store, run_)
        names = {
            (location_state.run, location_state.location) for location_state in state.locations
        }
        names |= {(fault.run, fault.location) for fault in state.faults}
        if (run_ and not names) or (location and (run_, location) not in names):
            raise not_found(self.store, run_, location)
        plans = [
            _plan_of(state, *name, states) for name in sorted(names) if location in ("", name[1])
        ]
        return [plan for plan in plans if plan.parts]

    def make_plan(self, run_: str, location: str, news: Report | None = None) -> RepairPlan:
        """Return the plan of a location, as if the report ``news`` were written.

        Reads the run's records and the nodes' heartbeats.  Raises StoreError.
        """
        state = read_state(self.store, run_)
        if news:
            as_if = (
                _with_report(s, news) if s.location == location else s for s in state.locations
            )
            state = replace(state, locations=tuple(as_if))
        return _plan_of(state, run_, location, self._read_node_states())

    def _read_node_states(self) -> dict[str, NodeState]:
        """Return the state of each worker, by node.  Raises StoreError."""
        files = read_nodes(self.store)
        nodes = list_nodes(files, files.now(boot_id(), time.time()))
        workers = [node for node in nodes if "worker" in node.roles]
        return {node.node: NodeState(node.state == "alive", node.lacks) for node in workers}

    def verify(
        self, run_: str, location: str, level: Level | None = None
    ) -> Iterator[tuple[Report, Report | None]]:
        """Verify a location, lazily; yield its report, and the one to write (None if no news).

        If ``level`` is None, take digest, or the deepest level at which damage was reported.
        Writes nothing.  Raises ConfigError if the store has nothing of it, Incomplete if it changed
        meanwhile, Unsupported, StoreError.
        """
        levels: list[Level] = [level or "digest"]
        location_state = read_state(self.store, run_).of(run_, location)
        if location_state and level is None:
            levels += [
                location_state.records.reports[name].level
                for name in location_state.conditions.proof.damage
            ]
        counter, deepest = ReadCounter(self.progress), max(levels, key=LEVELS.index)
        options = VerifyOptions(deepest, time.time(), progress=counter, expect=counter.expect)
        for verified in verify(InStore(self.store, run_, location), options):
            yield verified.report, verified.news

    def _verify_and_report(self, plan: RepairPlan, level: Level | None = None) -> None:
        """Verify a location, and write its new reports; do nothing if the store has nothing of it.

        Raises as `verify`.
        """
        state = read_state(self.store, plan.run)
        if not (state.of(plan.run, plan.location) or state.faults_of(plan.run, plan.location)):
            return  # the repair deleted its last record, a damaged manifest
        for _, news in self.verify(plan.run, plan.location, level):
            if news:
                write_report(self.store, news)

    def repair(self, plan: RepairPlan) -> RepairOutcome:
        """Repair, verify, and repair further damage that this finds; try each part once.

        Damage that only a listing shows is reported first, since nodes act on reports.  A
        CkptsyncError is returned in the outcome, with what was written before.
        """
        written: list[str] = []
        tried_parts, remaining = frozenset[str](), plan
        try:
            while True:
                location_state = self._read_location(plan)
                if location_state and _names(_findings(location_state)) - _names(
                    unanswered_findings(location_state)
                ):
                    self._verify_and_report(plan, "stat")
                    location_state = self._read_location(plan)
                written += repair(self.store, remaining, location_state, self.options)
                if not remaining.doable:
                    return RepairOutcome(plan, tuple(written))
                self._verify_and_report(plan)
                tried_parts |= remaining.doable
                remaining = self.make_plan(plan.run, plan.location)
                if not remaining.doable - tried_parts:
                    return RepairOutcome(plan, tuple(written), None, remaining)
        except CkptsyncError as e:
            return RepairOutcome(plan, tuple(written), without_frames(e))

    def _read_location(self, plan: RepairPlan) -> LocationState | None:
        """Return the present state of a plan's location; None if it is gone or unreadable.

        Raises StoreError.
        """
        return _find_readable(read_state(self.store, plan.run), plan.run, plan.location)

    def follow(self, outcome: RepairOutcome) -> RepairOutcome:
        """Continue a waiting repair, and return its next outcome.

        Once all requested uploads came, verify them.  Then repair what this process can repair
        itself. An error of either is in the outcome; StoreError is raised if the plan cannot be
        read.
        """
        plan = self.make_plan(outcome.plan.run, outcome.plan.location)
        if self.is_answered(plan):
            try:
                self._verify_and_report(plan)
            except CkptsyncError as e:
                return RepairOutcome(plan, outcome.written, without_frames(e))
            plan = self.make_plan(plan.run, plan.location)
        next_outcome = self.repair(plan) if plan.doable else RepairOutcome(plan)
        return replace(next_outcome, written=(*outcome.written, *next_outcome.written))

    def is_answered(self, plan: RepairPlan) -> bool:
        """Return whether all requested files were uploaded since the last report of damage.

        False if no file was requested, or the location is gone or unreadable.  Raises StoreError.
        """
        state = read_state(self.store, plan.run)
        location_state = _find_readable(state, plan.run, plan.location)
        requested = [
            f"{plan.run}/{part.name}" for part in plan.parts if part.how in ("ask", "away")
        ]
        if not location_state or not requested:
            return False
        times, damage = state.mtimes, location_state.conditions.proof.damage
        reported_at = max((times.get(name, 0.0) for name in damage), default=0.0)
        return all(
            times.get(name, 0.0) >= reported_at and name in location_state.sizes
            for name in requested
        )


def _plan_of(
    state: StoreState, run_: str, location: str, node_states: Mapping[str, NodeState]
) -> RepairPlan:
    """Return the plan of a location; without parts if it is gone.

    Of an unreadable one it has only the parts of its unreadable records.
    """
    location_state = _find_readable(state, run_, location)
    return plan_repair(
        state, run_, location, _findings(location_state) if location_state else (), node_states
    )


def _findings(location_state: LocationState) -> tuple[VerifyFinding, ...]:
    """Return the damage of reports, and files that a listing shows missing or of another size.

    A reported file is not named twice.  Return none for a retired location, or one in conflict.
    """
    if location_state.conditions.retired or location_state.conditions.conflict:
        return ()
    reported = unanswered_findings(location_state)
    listed = (
        *check_sizes(expected_files(location_state), location_state.sizes),
        *check_records(location_state),
    )
    names = _names(reported)
    return (*reported, *(finding for finding in listed if finding.name not in names))


def _names(findings: Iterable[VerifyFinding]) -> set[str]:
    """Return the names of the files that findings are about."""
    return {finding.name for finding in findings}


def _with_report(location_state: LocationState, news: Report) -> LocationState:
    """Return a copy of a location as if ``news`` were its newest report."""
    last_number = max((report.n for report in location_state.records.reports.values()), default=0)
    reports = {**location_state.records.reports, "dry run": replace(news, n=last_number + 1)}
    new_proof = proof(
        reports,
        {manifest.name for manifest in location_state.manifests},
        location_state.model_record_name,
    )
    records = replace(location_state.records, reports=reports)
    return replace(
        location_state,
        records=records,
        conditions=replace(location_state.conditions, proof=new_proof),
    )


def _find_readable(state: StoreState, run_: str, location: str) -> LocationState | None:
    """Return a location whose manifests and tombstone can be read; None for any other."""
    return next((s for s in state.readable if (s.run, s.location) == (run_, location)), None)
