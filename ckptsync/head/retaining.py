"""What is kept of one run, and why.  One pure function, so that what a dry run shows is what is done.

Protection comes first, and is never outvoted: what a person keeps, what is in doubt, what cannot be judged, the newest checkpoint that is VERIFIED,
and the newest of those that a training can be resumed from.  Then the rules: what `keep_last`, `keep_every` or `keep_best` names stays, each for
itself.  What none of them names stays only if no such rule is given, or while it is within every limit (`max_age`, `max_size`) that is.

Newest is what was written last, on the store's clock: a run that was started again from scratch writes small numbers.

A checkpoint that was never seen VERIFIED goes only once it is overtaken: a later one is VERIFIED, no rule would keep it if it were, and nothing
has come of it for `PATIENCE`.  Before that it may still be on its way, or be repaired.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ckptsync.catalogue.summary import Fault, Summary
from ckptsync.head.rules import Best, Rules
from ckptsync.records.coding import is_made_anew
from ckptsync.scan import family_of
from ckptsync.units import show_duration, show_size

Verdict = Literal["keep", "drop-shards", "drop"]
PATIENCE = 6 * 3600.0
"""s after the last manifest in which what is not VERIFIED is never let go of."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of a location, and why."""

    run: str
    location: str
    verdict: Verdict
    reason: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of a run beside its summaries.

    ``metrics``: location → the value that `keep_best` asks for; ``None`` where it could not be read, and no entry where it was never measured.
    ``doubtful``: checkpoint names of which some record cannot be read.
    """

    metrics: Mapping[str, float | None] = field(default_factory=dict)
    doubtful: Collection[str] = ()


def decide(locations: Iterable[Summary], rules: Rules, evidence: Evidence, now: float) -> tuple[Decision, ...]:
    """One decision a location, the newest first.  ``locations``: all of one run, also those that are marked to go.  ``now``: seconds on the store's clock.

    A location whose removal has begun is no longer there for any rule.
    """
    ordered = sorted(locations, key=lambda s: (s.ended, s.step or 0, s.location), reverse=True)
    there = [s for s in ordered if not is_going(s)]
    kept = _Kept(there, rules, evidence, now)
    return tuple(_decision(s, kept) for s in ordered)


def doubtful(faults: Iterable[Fault], run: str) -> frozenset[str]:
    """Checkpoint names of a run of which something is not known that could keep them; a damaged model record or report keeps nothing."""
    return frozenset(
        f.location.partition("~")[0]
        for f in faults
        if f.run == run and (f.record.kind == "keep" or not is_made_anew(f.record, f.error))
    )


def is_going(seen: Summary) -> bool:
    """Whether its files are being deleted: nothing is left to decide."""
    return bool(seen.retired) and seen.begun


def is_verified(seen: Summary) -> bool:
    """Whether it is proven, or was when it was marked to go."""
    return seen.status == "VERIFIED" or (seen.status == "RETIRED" and seen.model and seen.consolidated and seen.proof.holds)


def is_resumable(seen: Summary) -> bool:
    """Whether it is, and a training can be resumed from it."""
    return is_verified(seen) and seen.resume


def _decision(seen: Summary, kept: _Kept) -> Decision:
    if is_going(seen):
        return Decision(seen.run, seen.location, "drop", f"its removal has begun: {seen.retired}")
    reason = kept.protected(seen) or kept.by_rule(seen)
    if not reason:
        return Decision(seen.run, seen.location, "drop", kept.why_not(seen))
    shards = kept.shards_go(seen)
    return Decision(seen.run, seen.location, "drop-shards" if shards else "keep", shards or reason)


class _Kept:
    """Reasons to keep a location, each empty where it does not apply.  ``there``: the newest first."""

    def __init__(self, there: Sequence[Summary], rules: Rules, evidence: Evidence, now: float) -> None:
        self._rules, self._evidence, self._now = rules, evidence, now
        self._beside = _beside(there)
        verified = [s for s in there if is_verified(s) and s.location not in self._beside]
        resumable = [s for s in verified if s.resume]
        self._newest = {s.location for s in (*verified[:1], *_alive(verified)[:1])}
        self._resumed = {s.location for s in (*resumable[:1], *_alive(resumable)[:1])}
        self._ambiguous = {s.checkpoint for s in there if s.status == "CONFLICT"}
        self._newer = _counts(there, verified)
        self._sums = _sums(there)
        self._best = _best(verified, rules.keep_best, evidence.metrics)

    def protected(self, seen: Summary) -> str:
        """What no rule can outvote."""
        if seen.kept:
            return f"kept by hand: {seen.kept}" if seen.kept != "kept by hand" else seen.kept
        if seen.status == "CONFLICT":
            return "nobody can say which save it is: that is for people to decide"
        if seen.checkpoint in self._ambiguous:
            return "evidence in a doubt about another save of its name"
        if seen.checkpoint in self._evidence.doubtful:
            return "a record of its name cannot be read"
        if seen.location in self._beside:
            return "what its trainer left beside the checkpoints"
        if seen.location in self._newest:
            return "the newest that is verified"
        if seen.location in self._resumed:
            return "the newest that can be resumed from"
        return "" if is_verified(seen) else self._unproven(seen)

    def _unproven(self, seen: Summary) -> str:
        if not self._newer[seen.location]:
            return f"{seen.status.lower()}, and nothing newer is verified"
        if self._now - seen.arrived < PATIENCE:
            return f"{seen.status.lower()}, and some of it came {show_duration(max(0.0, round(self._now - seen.arrived)))} ago"
        return ""

    def by_rule(self, seen: Summary) -> str:
        """The first rule that keeps it; within the limits, where there are any."""
        rules = self._rules
        named = [rule(seen) for rule in (self._last, self._every, self._of_best)]
        if any(named):
            return next(filter(None, named))
        limits = [limit for limit in (self._young(seen), self._small(seen)) if limit is not None]
        if limits:
            return ", ".join(limits) if all(limits) else ""
        has_rule = rules.keep_last or rules.keep_every or rules.keep_best
        return "" if has_rule else "no rule lets it go"

    def why_not(self, seen: Summary) -> str:
        """Why nothing keeps it."""
        rules, why = self._rules, []
        if rules.keep_last:
            why.append(f"not one of the newest {rules.keep_last}")
        if rules.keep_every:
            why.append(f"no multiple of {rules.keep_every}")
        if rules.keep_best:
            why.append(f"not one of the best {rules.keep_best.count} by {rules.keep_best.metric}")
        if self._young(seen) == "":
            why.append(f"older than {show_duration(rules.max_age)}")
        if self._small(seen) == "":
            why.append(f"what is newer takes {show_size(rules.max_size)} already")
        state = "" if is_verified(seen) else f"{seen.status.lower()}, and overtaken; "
        return state + ", ".join(why)

    def _last(self, seen: Summary) -> str:
        n = self._rules.keep_last
        return f"one of the newest {n}" if n and self._newer[seen.location] < n else ""

    def _every(self, seen: Summary) -> str:
        n = self._rules.keep_every
        return f"its step is a multiple of {n}" if n and seen.step is not None and seen.step % n == 0 else ""

    def _of_best(self, seen: Summary) -> str:
        rule, metrics = self._rules.keep_best, self._evidence.metrics
        if rule is None:
            return ""
        if seen.location in metrics and metrics[seen.location] is None:
            return "its metrics cannot be read"
        value = metrics.get(seen.location)
        if value is None:
            return ""
        better = sum(_score(other, rule) < _score(value, rule) for other in self._best)
        return f"{rule.metric} {value:g}, one of the best {rule.count}" if better < rule.count else ""

    def _young(self, seen: Summary) -> str | None:
        age, most = self._now - seen.ended, self._rules.max_age
        return (f"younger than {show_duration(most)}" if age < most else "") if most else None

    def _small(self, seen: Summary) -> str | None:
        most = self._rules.max_size
        return (f"the newest {show_size(most)}" if self._sums[seen.location] <= most else "") if most else None

    def shards_go(self, seen: Summary) -> str:
        """Why its shards may go while the model stays; empty if they stay."""
        n = self._rules.shards
        if (
            n is None
            or seen.kept
            or not (is_verified(seen) and seen.consolidated)
            or seen.status == "CONFLICT"
            or seen.location in self._beside
            or (n > 0 and seen.location in self._resumed)
        ):
            return ""
        return f"its model is verified, and not one of the newest {n}" if self._newer[seen.location] >= n else ""


def _alive(locations: Iterable[Summary]) -> list[Summary]:
    return [s for s in locations if not s.retired]


def _beside(there: Iterable[Summary]) -> frozenset[str]:
    """Locations that are no checkpoints of a training: its last model, and under DeepSpeed the tag that this was made from."""
    families = {s.location: family_of(s.checkpoint) for s in there}
    kinds = {"final", "deepspeed"} if {"trainer", "accelerate"} & set(families.values()) else {"final"}
    return frozenset(location for location, family in families.items() if family in kinds)


def _counts(there: Iterable[Summary], verified: Iterable[Summary]) -> dict[str, int]:
    """Location → how many that are verified are newer."""
    names, count, found = {s.location for s in verified}, 0, {}
    for seen in there:
        found[seen.location] = count
        count += seen.location in names
    return found


def _sums(there: Iterable[Summary]) -> dict[str, int]:
    """Location → bytes of it and of all that is newer."""
    total, found = 0, {}
    for seen in there:
        total += (0 if seen.let_go and seen.done else seen.size) + seen.model_size
        found[seen.location] = total
    return found


def _best(verified: Iterable[Summary], rule: Best | None, metrics: Mapping[str, float | None]) -> list[float]:
    values = [metrics.get(s.location) for s in verified] if rule else []
    return [v for v in values if v is not None]


def _score(value: float, rule: Best) -> float:
    """Less is better; what is no number is worst."""
    if value != value:  # noqa: PLR0124 - nothing but NaN
        return float("inf")
    return -value if rule.is_greatest else value
