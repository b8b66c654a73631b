"""Which checkpoints of a run are kept, and why; what is due about the others.

A wrong deletion cannot be undone, and clocks, steps and arrivals of checkpoints can be wrong. So
`decide` gives one decision for each location, from the summaries of its whole run and the rules, as
a pure function: a dry run shows what is done. `removal` checks `protection` again before it
deletes.

Protections come first, and no rule outvotes them: what a person keeps, a conflict, what cannot be
judged, the newest checkpoint that is VERIFIED, the newest of those that a training can be resumed
from, and what arrived in the store last.  Then the rules: what `keep_last`, `keep_every` or
`keep_best` names stays.  What none of them names stays only if no such rule is given, or while it
is within every limit (`max_age`, `max_size`) that is given.

What is newer is decided by `location_summary.by_age`: a run that was started again writes small
step numbers, and a node's clock can be wrong.  A checkpoint that was never VERIFIED is deleted only
once a later one is VERIFIED, no rule would keep it if it were, and no part of it has arrived for
`PATIENCE`: before that it may still be on its way, or be repaired.

What no rule keeps is marked first, by a tombstone, and removed after a grace period:

    kept ── drop ──▶ marked ── grace, still drop ──▶ begun ──▶ files deleted, then records
      ▲                │
      └── withdrawn ◀──┘ kept after all, and whole

After a mark was withdrawn, it is not set again before another grace period: so two heads with
different rules do not write a record a minute.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ckptsync.catalogue.location_summary import Summary, by_age, last_models, times_written
from ckptsync.head.retention_rules import Best, Rules
from ckptsync.quantities import show_duration, show_size
from ckptsync.records.io import Fault, is_made_anew
from ckptsync.records.save_decisions import Scope
from ckptsync.records.store_paths import checkpoint_of

RetentionVerdict = Literal["keep", "drop-shards", "drop"]
Action = Literal["nothing", "mark", "wait", "withdraw", "remove"]
PATIENCE = 6 * 3600.0
"""Seconds after its last manifest in which a checkpoint that is not VERIFIED is never deleted."""
MOMENT = 0.5
"""Seconds within which arrivals tell no order: somebody has copied the store."""


@dataclass(frozen=True, slots=True)
class RetentionDecision:
    """What becomes of a location, and why.

    ``action``: what is due now, of what ``scope`` says: all of the location, or its shards.
    ``left``: seconds of grace until the next action is due, if it waits. ``any_shards``: shards are
    deleted even if a training can be resumed from no other checkpoint.
    """

    run: str
    location: str
    verdict: RetentionVerdict
    reason: str
    action: Action = "nothing"
    scope: Scope = "location"
    left: float = 0.0
    any_shards: bool = False


@dataclass(frozen=True, slots=True)
class RunEvidence:
    """What is known of a run beside its summaries.

    ``metrics``: location → the value that `keep_best` reads; None if it could not be read, no entry
    if it was never measured. ``unreadable``: names of checkpoints of which some record cannot be
    read.
    """

    metrics: Mapping[str, float | None] = field(default_factory=dict)
    unreadable: Collection[str] = ()


def decide(
    locations: Iterable[Summary],
    rules: Rules,
    evidence: RunEvidence,
    now: float,
    grace: float = 0.0,
) -> tuple[RetentionDecision, ...]:
    """Return one decision a location, with the action that is due, the newest first. Pure.

    A location is kept if it is protected or a rule keeps it; then its shards may be dropped.
    ``locations``: all of one run, also those that are marked. ``now`` and ``grace`` in seconds, on
    the store's clock. A location whose removal has begun counts for no rule.
    """
    ordered = by_age(locations)[::-1]
    run_rules = _RunRules([s for s in ordered if not is_being_deleted(s)], rules, evidence, now)
    decisions = []
    for summary in ordered:
        if is_being_deleted(summary):
            decision = RetentionDecision(
                summary.run, summary.location, "drop", f"its removal has begun: {summary.retired}"
            )
        elif reason := run_rules.protection(summary) or run_rules.rule_for(summary):
            shards = run_rules.rule_against_shards(summary)
            decision = RetentionDecision(
                summary.run, summary.location, "drop-shards" if shards else "keep", shards or reason
            )
        else:
            decision = RetentionDecision(
                summary.run, summary.location, "drop", run_rules.rules_against(summary)
            )
        decisions.append(
            replace(with_action(decision, summary, now, grace), any_shards=rules.shards == 0)
        )
    return tuple(decisions)


def with_action(
    decision: RetentionDecision, summary: Summary, now: float, grace: float
) -> RetentionDecision:
    """Return the decision with the action due at ``now``, its scope, and the seconds of grace left.

    What is dropped is marked, or removed if it was marked ``grace`` seconds ago; it waits before,
    and for ``grace`` seconds after a withdrawal. What is kept is withdrawn if it is marked; so is a
    location that is marked as a whole and now loses only its shards. A removal that has begun goes
    on ("remove"), or is "nothing" once the shards are deleted. ``now``: on the store's clock.
    """
    verdict = decision.verdict
    # A location marked as a whole is removed, or its mark withdrawn, before its shards matter.
    is_of_shards = verdict == "drop-shards" or (verdict == "keep" and bool(summary.shards_retired))
    scope: Scope = "shards" if is_of_shards and not summary.retired else "location"
    is_marked = bool(summary.retired if scope == "location" else summary.shards_retired)
    action: Action
    seconds_left = 0.0
    if is_marked and summary.begun:
        action = "nothing" if scope == "shards" and summary.shards_deleted else "remove"
    elif verdict == "keep" or (verdict == "drop-shards" and summary.retired):
        action = "withdraw" if summary.retired or summary.shards_retired else "nothing"
    elif is_marked:
        seconds_left = summary.marked_at + grace - now
        action = "wait" if seconds_left > 0 else "remove"
    else:
        seconds_left = summary.withdrawn_at + grace - now if summary.withdrawn_at else 0.0
        action = "wait" if seconds_left > 0 else "mark"
    return replace(decision, action=action, scope=scope, left=max(0.0, seconds_left))


def unreadable_checkpoints(faults: Iterable[Fault], run: str) -> frozenset[str]:
    """Return the checkpoints of a run that an unreadable record could be a reason to keep.

    A damaged model record or report is none; a damaged keep is one, and so is a damaged event,
    which may have measured that the checkpoint is the best.
    """
    return frozenset(
        checkpoint_of(f.location)
        for f in faults
        if f.run == run
        if f.record.kind in ("keep", "event") or not is_made_anew(f.record, f.error)
    )


def protection(summary: Summary, conflicts: Collection[str], unreadable: Collection[str]) -> str:
    """Return why no rule may delete a location, whatever its neighbours are; empty if one may.

    ``conflicts``, ``unreadable``: names of checkpoints in conflict, and of those with an unreadable
    record.
    """
    if summary.kept:
        return f"kept by hand: {summary.kept}" if summary.kept != "kept by hand" else summary.kept
    if summary.status == "CONFLICT" or summary.checkpoint in conflicts:
        return "conflict: two saves have this name"
    return "a record of its name cannot be read" if summary.checkpoint in unreadable else ""


def last_protection(
    summary: Summary, scope: Scope, others: Iterable[Summary], *, resumes: bool
) -> str:
    """Return why the remaining checkpoints do not allow this removal; empty if they do.

    Shards are not removed while the location's own model is not verified. A location is not the
    last verified one of its run, and what can be resumed from is not the last such one.
    ``others``: locations of its run that are whole at this moment. ``resumes``: a training can be
    resumed from it, and must be from another one then. All that is marked counts as removed: so of
    two heads that mark each other's last one, neither removes it.
    """
    remaining = [s for s in others if not s.retired and is_verified(s)]
    if scope == "shards" and not is_verified(summary):
        return "its model is not verified now"
    if scope == "location" and not remaining:
        return "no other checkpoint of the run is verified and not marked"
    if resumes and not any(s.resume for s in remaining):
        return "no other checkpoint can be resumed from"
    return ""


def is_being_deleted(summary: Summary) -> bool:
    """Return whether its files are being deleted, so that nothing is left to decide."""
    return bool(summary.retired) and summary.begun


def is_verified(summary: Summary) -> bool:
    """Return whether a location is VERIFIED, or would be if it were not RETIRED."""
    return summary.status == "VERIFIED" or (
        summary.status == "RETIRED"
        and summary.model
        and summary.consolidated
        and summary.proof.holds
    )


def is_resumable(summary: Summary) -> bool:
    """Return whether a location is verified, and a training can be resumed from it."""
    return is_verified(summary) and summary.resume


class _RunRules:
    """The rules of a run, applied to its locations, which come newest first.

    Each method returns a reason, empty if it does not apply.
    """

    def __init__(
        self, locations: Sequence[Summary], rules: Rules, evidence: RunEvidence, now: float
    ) -> None:
        """Find the newest location of each kind, and count each location's newer ones and bytes.

        ``now``: seconds on the store's clock.
        """
        self._rules, self._evidence, self._now = rules, evidence, now
        self._last_models = last_models(locations)
        verified = [s for s in locations if is_verified(s) and s.location not in self._last_models]
        resumable = [s for s in verified if s.resume]
        self._newest, self._newest_resumable = _newest(verified), _newest(resumable)
        saves = [s for s in locations if s.location not in self._last_models]
        later = [s for s in saves if s.first_arrival > saves[0].first_arrival + MOMENT]
        self._last_arrived = _newest(sorted(later, key=lambda s: -s.first_arrival))
        self._written = times_written(locations[::-1])
        self._conflicts = {s.checkpoint for s in locations if s.status == "CONFLICT"}
        self._newer_counts: dict[str, int] = {}  # location → how many verified ones are newer
        self._sizes_to: dict[str, int] = {}  # location → bytes of it and of all that is newer
        verified_names = {s.location for s in verified}
        count = total = 0
        for summary in locations:
            total += (
                0 if summary.shards_retired and summary.shards_deleted else summary.size
            ) + summary.model_size
            self._newer_counts[summary.location], self._sizes_to[summary.location] = count, total
            count += summary.location in verified_names
        values = [evidence.metrics.get(s.location) for s in verified] if rules.keep_best else []
        self._values = [value for value in values if value is not None]

    def protection(self, summary: Summary) -> str:
        """Return why no rule may delete a location; empty if one may."""
        if why := protection(summary, self._conflicts, self._evidence.unreadable):
            return why
        if summary.location in self._last_models:
            return "the run's final model, or the DeepSpeed tag that it was made from"
        if summary.location in self._newest:
            return "the newest that is verified"
        if summary.location in self._newest_resumable:
            return "the newest that can be resumed from"
        if summary.location in self._last_arrived:
            return "the last that arrived in the store"
        if is_verified(summary):
            return ""
        status = summary.status.lower()
        if not self._newer_counts[summary.location]:
            return f"{status}, and nothing newer is verified"
        if (age := self._now - summary.arrived) < PATIENCE:
            return f"{status}, and files of it arrived {show_duration(max(0.0, round(age)))} ago"
        return ""

    def rule_for(self, summary: Summary) -> str:
        """Return why the first rule that keeps it, or all limits together, keep a location.

        Empty if none does. Without any rule or limit everything is kept ("no rule deletes it").
        """
        rules, limits = list(self._keeping(summary)), list(self._limits(summary))
        if why := next((why for keeps, why, _ in rules if keeps), ""):
            return why
        if limits and all(holds for holds, _, _ in limits):
            return ", ".join(why for _, why, _ in limits)
        return "" if rules or limits else "no rule deletes it"

    def rules_against(self, summary: Summary) -> str:
        """Return why no rule keeps a location, and which limits it exceeds.

        The caller knows that `protection` and `rule_for` are empty.
        """
        judgements = (*self._keeping(summary), *self._limits(summary))
        why = ", ".join(against for holds, _, against in judgements if not holds)
        if is_verified(summary):
            return why
        return f"{summary.status.lower()}, and a newer checkpoint is verified; {why}"

    def _keeping(self, summary: Summary) -> Iterator[tuple[bool, str, str]]:
        """Yield, for each rule that keeps some: whether it keeps this one, why, and why not.

        `keep_best` also keeps a location whose metric could not be read, and, while no verified
        location has the metric, every one without it. Equal values share a rank.
        """
        keep_last, keep_every, best = (
            self._rules.keep_last,
            self._rules.keep_every,
            self._rules.keep_best,
        )
        if keep_last:
            is_new = self._newer_counts[summary.location] < keep_last
            yield is_new, f"one of the newest {keep_last}", f"not one of the newest {keep_last}"
        if keep_every:
            is_nth = summary.step is not None and summary.step % keep_every == 0
            yield (
                is_nth,
                f"its step is a multiple of {keep_every}",
                f"its step is not a multiple of {keep_every}",
            )
        if best:
            against = f"not one of the best {best.count} by {best.metric}"
            value = self._evidence.metrics.get(summary.location)
            if value is None:
                # of a metric that nobody has nobody knows what it will say, or it is misspelt
                is_unknown = summary.location in self._evidence.metrics or not self._values
                yield is_unknown, "its metrics are not known", against
            else:
                better = sum(_score(each, best) < _score(value, best) for each in self._values)
                why = f"{best.metric} {value:g}, one of the best {best.count}"
                yield better < best.count, why, against

    def _limits(self, summary: Summary) -> Iterator[tuple[bool, str, str]]:
        """Yield, for each limit: whether this one is within it, why it is kept, and why not.

        It is younger than `max_age` since it was written; it and all newer ones have at most
        `max_size` bytes.
        """
        if age := self._rules.max_age:
            is_young = self._now - self._written[summary.location] < age
            yield is_young, f"younger than {show_duration(age)}", f"older than {show_duration(age)}"
        if size := self._rules.max_size:
            against = f"newer checkpoints already take {show_size(size)}"
            is_small = self._sizes_to[summary.location] <= size
            yield is_small, f"the newest {show_size(size)}", against

    def rule_against_shards(self, summary: Summary) -> str:
        """Return why a location's shards are deleted while its model stays; empty if they stay.

        They are deleted only of a verified location with a model, without a keep or a conflict,
        that at least ``shards`` newer ones follow.  They stay of the run's last models, and of the
        newest resumable locations unless ``shards`` is 0.
        """
        shards = self._rules.shards
        is_proven = is_verified(summary) and summary.consolidated
        if shards is None or summary.kept or summary.status == "CONFLICT" or not is_proven:
            return ""
        if summary.location in self._last_models or (
            shards > 0 and summary.location in self._newest_resumable
        ):
            return ""
        is_old = self._newer_counts[summary.location] >= shards
        return f"its model is verified, and not one of the newest {shards}" if is_old else ""


def _newest(ordered: Sequence[Summary]) -> set[str]:
    """Return the name of the newest location, and of the newest that is not marked.

    ``ordered``: the newest first; may be empty.
    """
    return {s.location for s in (*ordered[:1], *[s for s in ordered if not s.retired][:1])}


def _score(value: float, rule: Best) -> float:
    """Return a value by which the best checkpoint has the least; NaN is the worst."""
    if value != value:  # noqa: PLR0124 - nothing but NaN
        return float("inf")
    return -value if rule.is_greatest else value
