"""What is due of each location: to merge, repair or complete its model, or to verify its bytes.

A head asks often, and its child processes ask again before they act, so the answer is a pure
function of summaries (but for `verify_jobs_in_store`). The service lists jobs from its catalogue;
the child that has one for a model reads the location again, and asks `todo_for` what is due then.
Nothing that merges or verifies is imported. Which locations a run no longer needs is a question
about the whole run, and `retention` answers it.

Verifications: repairs and new locations are due at once. Everything else is read again within the
period, spread evenly over it: an old location is due when its time has come, or when those behind
it would otherwise have to be read faster than all bytes divided by the period. So a store that was
verified in one night is not read again in one night, and nothing is remembered but the reports'
times. A location is verified as a whole, since a report is about one; `limits.bandwidth` paces
reading. Times are seconds on the store's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ckptsync.catalogue.location_summary import Catalogue, Summary, summarize
from ckptsync.catalogue.uncached import read_location
from ckptsync.digest import digest
from ckptsync.errors import Unsupported
from ckptsync.records.io import is_made_anew
from ckptsync.records.location_status import Status
from ckptsync.records.report import LEVELS, Level
from ckptsync.stores.contract import Store

ANY_RUN = "*"
FINAL = "final"
"""The trainer's last model: it has the configuration that sharded checkpoints lack."""
LEFT_ALONE: frozenset[Status] = frozenset({"RETIRED", "CONFLICT"})
"""Statuses of locations of which nothing is merged, repaired, lent or verified."""
RETRY = 600.0
"""Seconds until unchanged damage is read again; doubled with each report, so that few pile up."""
MERGED_WITHIN = 300.0
"""Seconds in which a complete checkpoint may still be consolidated: else it would be read twice."""
SPARE = 0.1
"""Share of the period by which reading is planned earlier, for heads and stores that are away."""
Todo = Literal["merge", "repair", "configure"]
JobKind = Literal["consolidate", "verify", "retain", "event"]
STOP_AFTER = "10m"
"""Time after which retention begins with no other location; 900 s is its deadline."""


@dataclass(frozen=True, slots=True)
class Job:
    """One piece of work on a run's ``location``, on a whole ``run``, or (both empty) on the store.

    ``size``: bytes to read. ``level``: of a verification. ``key`` changes when a retry could end
    differently: a job that failed waits as long as its key is the same. ``once_per_key``: a job
    that succeeded is not done again either until its key changes. ``name``, ``event``: see
    `ckptsync.events`; ``seconds``: how long it may take, if its size does not say.
    """

    kind: JobKind
    run: str = ""
    location: str = ""
    size: int = 0
    level: Level | None = None
    key: str = ""
    once_per_key: bool = False
    name: str = ""
    event: str = ""
    seconds: float = 0.0

    @property
    def subject(self) -> str:
        """Return ``run/location`` (with name and event), the run, or "every run": for messages."""
        if self.name:
            return f"{self.run}/{self.location}: {self.name} ({self.event})"
        return f"{self.run}/{self.location}" if self.location else self.run or "every run"

    def command(self, config: str) -> tuple[str, ...]:
        """Return the words of the command that does the job; ``config``: the configuration's path.

        Retention works on every run. A consolidation without location completes a run's models.
        """
        if self.kind == "retain":
            return ("ckptsync", "gc", "-c", config, "--stop-after", STOP_AFTER)
        if self.kind == "event":
            options = ("-c", config, "--on", self.event, "--if-due")
            event_words = ("run", f"{self.run}/{self.location}", self.name)
            return ("ckptsync", "events", *options, "--", *event_words)
        more: tuple[str, ...] = ("--level", self.level or "digest", "--always-report")
        if self.kind == "consolidate":
            more = () if self.location else ("--only-configuration",)
        # a name may begin like an option
        return ("ckptsync", self.kind, "-c", config, *more, "--", self.subject)


@dataclass(frozen=True, slots=True)
class VerifyPolicy:
    """How closely each location is verified, and within how many seconds it is read again."""

    level: Level = "digest"
    every: float = 7 * 86400.0


def todo_for(summary: Summary) -> Todo | None:
    """Return what is due about a location's model.

    Without a model record "merge", once a model can be made and unless retention has deleted the
    shards. With one "repair" if it has suspects, else "configure", also if nothing is missing. None
    for `LEFT_ALONE`, or if nothing can be merged. Damage to shards delays nothing.
    """
    if summary.status in LEFT_ALONE:
        return None
    if not summary.model_record:
        return "merge" if summary.model and (summary.size or not summary.shards_deleted) else None
    return "repair" if summary.suspects else "configure"


def head_jobs(locations: Iterable[Summary], configured: Callable[[str], str]) -> tuple[Job, ...]:
    """Return all jobs about models: merges, the last arrived first; repairs; completions.

    A completion adds missing configuration files to the models of a run: at most one job a run.
    Repairs and completions are in the order of ``locations``.

    ``configured``: returns, for a run, a text that changes with the files that an operator
    configured for it; empty without any.
    """
    to_merge: list[Summary] = []
    repairs: list[Job] = []
    models: dict[str, list[Summary]] = {}
    finals: dict[str, list[str]] = {}
    for summary in locations:
        todo = todo_for(summary)
        if todo == "merge":
            to_merge.append(summary)
        elif todo == "repair":
            key, size = f"{summary.state} {summary.consolidated}", summary.size + summary.model_size
            job = Job("consolidate", summary.run, summary.location, size, key=key)
            repairs.append(replace(job, once_per_key=summary.consolidated))
        elif todo == "configure":
            models.setdefault(summary.run, []).append(summary)
        if summary.checkpoint == FINAL and summary.status not in LEFT_ALONE:
            finals.setdefault(summary.run, []).append(summary.state)
    to_merge.sort(key=lambda s: (-s.arrived, s.run, s.location))
    merges = [Job("consolidate", s.run, s.location, s.size, key=s.state) for s in to_merge]
    completions = (
        _completion_job(
            run, models_of_run, " ".join([*finals.get(run, []), configured(run)]).strip()
        )
        for run, models_of_run in models.items()
    )
    return (*merges, *repairs, *filter(None, completions))


def _completion_job(run: str, models: Sequence[Summary], source_key: str) -> Job | None:
    """Return the job that completes the models of a run; None if no model may gain a file.

    A model may gain one if manifests came late, if it lacks files and ``source_key`` (which stands
    for the final model and the operator's files) is not empty, or if another model lacks fewer. The
    job's key changes with these three, so that it runs once for each. ``models``: one or more.
    """
    fewest = min(len(s.to_open) for s in models)
    lenders = [s for s in models if len(s.to_open) == fewest]
    lacking = [s for s in models if s.late or (s.to_open and source_key) or len(s.to_open) > fewest]
    if not lacking:
        return None
    lender_names = " ".join(f"{s.location} {s.model_record}" for s in lenders)
    states = "\n".join(sorted(s.state for s in lacking))
    key = digest(f"{source_key}\n{lender_names}\n{states}".encode())
    return Job("consolidate", run, key=key, once_per_key=True)


def verify_jobs_in_store(
    store: Store, catalogue: Catalogue, policy: VerifyPolicy, now: float
) -> tuple[Job, ...]:
    """Return verifications that are due, also of locations that a damaged record hides.

    The catalogue has no summary of those, so they are read. Locations that a newer program's record
    hides are left out. ``now``: seconds; the store's newest mtime counts if it is later. Raise
    StoreError.
    """
    unsupported = {
        (f.run, f.location) for f in catalogue.faults if isinstance(f.error, Unsupported)
    }
    hiding = (f for f in catalogue.faults if not is_made_anew(f.record, f.error))
    locations = list(catalogue.summaries)
    for run, location in sorted({(f.run, f.location) for f in hiding} - unsupported):
        state = read_location(store, run, location)
        if location_state := state.of(run, location):
            locations.append(summarize(location_state, state.mtimes))
    return verify_jobs(locations, policy, max(now, catalogue.clock))


def verify_jobs(locations: Iterable[Summary], policy: VerifyPolicy, now: float) -> tuple[Job, ...]:
    """Return verifications that are due, in this order; within 1 to 3 the last arrived first.

    1. Damaged locations that were written since the report, at its level or above.
    2. Locations that were never verified. A model that may yet be made has `MERGED_WITHIN` seconds
       from arrival. Without a model: at level stat, only if a file is missing that a node sent.
    3. Other damage, after `RETRY` seconds, doubled with each report, at most ``policy.every``.
    4. The others whose time has come (`_list_old`), the longest unread first.

    Locations in `LEFT_ALONE` are left out. ``now``: seconds on the store's clock.
    """
    ranked: list[tuple[int, Summary, Level]] = []
    proven: list[tuple[float, Summary]] = []
    for summary in locations:
        proof = summary.proof
        if summary.status in LEFT_ALONE:
            continue
        if proof.damage:
            # Only a report at the level that found the damage, or above, answers it.
            level = max(policy.level, proof.damage_level or "stat", key=LEVELS.index)
            patience = min(policy.every, RETRY * 2 ** min(len(proof.damage) - 1, 20))
            if proof.rewritten_at > proof.damaged_at:
                ranked.append((0, summary, level))
            elif now - proof.damaged_at >= patience:
                ranked.append((2, summary, level))
        elif not summary.model:
            if any(gap.node for gap in summary.gaps):  # a node says that it sent what is not there
                ranked.append((1, summary, "stat"))
        elif (last_time := _last_proof(summary, policy.level)) is not None:
            proven.append((last_time, summary))
        elif summary.consolidated or now - summary.arrived >= min(MERGED_WITHIN, policy.every):
            ranked.append((1, summary, policy.level))
    ranked.sort(key=lambda entry: (entry[0], -entry[1].arrived, entry[1].run, entry[1].location))
    ranked += [(3, summary, policy.level) for summary in _list_old(proven, policy, now)]
    return tuple(
        Job("verify", s.run, s.location, s.size + s.model_size, level, f"{level} {s.state}")
        for _, s, level in ranked
    )


def _last_proof(summary: Summary, level: Level) -> float | None:
    """Return when a report last found no damage in these manifests and this model; None if never.

    Reports count that are at ``level`` or above, or at level digest or above: it reads every byte.
    Seconds on the store's clock.
    """
    least = min(LEVELS.index(level), LEVELS.index("digest"))
    times = (
        time for passed_level, time in summary.proof.passed if LEVELS.index(passed_level) >= least
    )
    return max(times, default=None)


def _list_old(
    proven: list[tuple[float, Summary]], policy: VerifyPolicy, now: float
) -> Iterator[Summary]:
    """Yield the proven locations that are due again, the longest unread first.

    ``proven``: each with the time of its last proof; it is sorted in place. A location is due while
    reading at the even rate, all bytes divided by the period, would miss some deadline.
    """
    proven.sort(key=lambda entry: (entry[0], entry[1].run, entry[1].location))
    sizes = [max(1, summary.size + summary.model_size) for _, summary in proven]
    period = policy.every * (1 - SPARE)
    rate = sum(sizes) / max(period, 1e-9)  # bytes a second; a period of 0: always
    # slack: the bytes by which reading can be delayed and still meet every deadline
    slack, bytes_before = float("inf"), 0
    for (last_time, _), size in zip(proven, sizes, strict=True):
        slack = min(slack, rate * (last_time + period - now) - bytes_before)
        bytes_before += size
    for (_, summary), size in zip(proven, sizes, strict=True):
        if slack > 0:
            return
        yield summary
        slack += size
