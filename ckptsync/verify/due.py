"""Which location to verify next, and how closely.  Pure; times are seconds on the store's clock.

Repairs and what is new are due at once.  Everything else is read again within the period, spread evenly over it: an old location is due when
its time has come, or when those behind it would otherwise have to be read faster, later, than all bytes divided by the period.  So a store
whose locations were all verified in one night is not read again in one night, and nothing needs to be remembered but the reports' times.

A location is verified as a whole: a report speaks of one.  What the bandwidth of that may be is `limits.bandwidth`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from ckptsync.catalogue.summary import Summary
from ckptsync.records.report import LEVELS, Level

Why = Literal["changed", "never", "again", "old"]
_ORDER: tuple[Why, ...] = ("changed", "never", "again", "old")
RETRY = 600.0
"""s until a damaged location in which nothing changed is looked at again; doubled with each report, so that reports do not pile up."""
SEALING = 300.0
"""s in which a complete checkpoint may still be consolidated: verified before, its shards would be read twice."""
SPARE = 0.1
"""Of the period: so much earlier everything is planned to be read, for heads that rest at night, and stores that are away for a while."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """How closely each location is verified, and within how many seconds every byte is read again."""

    level: Level = "digest"
    every: float = 7 * 86400.0


@dataclass(frozen=True, slots=True)
class Due:
    """A location, the level that it is due at, and why."""

    location: Summary
    level: Level
    why: Why


def due(locations: Iterable[Summary], schedule: Schedule, now: float) -> tuple[Due, ...]:
    """All that are due: repairs first, then what was never verified, the newest first; then the rest, those that wait longest first."""
    locations = tuple(locations)
    proven = {id(seen): last for seen in locations if (last := _proven(seen, schedule.level)) is not None}
    found = [d for seen in locations if (d := _due(seen, schedule, now, is_proven=id(seen) in proven))]
    first = sorted(found, key=lambda d: (_ORDER.index(d.why), -d.location.arrived, d.location.run, d.location.location))
    return (
        *first,
        *(
            Due(seen, schedule.level, "old")
            for seen in _old([(proven[id(s)], s) for s in locations if id(s) in proven], schedule, now)
        ),
    )


def _due(seen: Summary, schedule: Schedule, now: float, *, is_proven: bool) -> Due | None:
    if seen.retired or seen.status == "CONFLICT":
        return None
    if seen.proof.damage:
        return _damaged(seen, schedule, now)
    if not seen.model:
        return Due(seen, "stat", "never") if any(gap.node for gap in seen.gaps) else None  # sent, as a node says, and not there
    if is_proven:
        return None
    is_waiting = not seen.consolidated and now - seen.arrived < min(SEALING, schedule.every)
    return None if is_waiting else Due(seen, schedule.level, "never")


def _damaged(seen: Summary, schedule: Schedule, now: float) -> Due | None:
    """Only a report at the level that found the damage, or above, answers it."""
    proof = seen.proof
    level = max(schedule.level, proof.asked or "stat", key=LEVELS.index)
    if proof.changed > proof.said:
        return Due(seen, level, "changed")
    patience = min(schedule.every, RETRY * 2 ** min(len(proof.damage) - 1, 20))
    return Due(seen, level, "again") if now - proof.said >= patience else None


def _proven(seen: Summary, level: Level) -> float | None:
    """When a report last found these very manifests and this very model record well, at this level or the highest that reads every byte as stored.

    Above level digest what can be reached is up to the files; a level that was raised is reached as the locations' turns come.
    """
    if seen.retired or seen.status == "CONFLICT" or seen.proof.damage or not seen.model:
        return None
    least = min(LEVELS.index(level), LEVELS.index("digest"))
    return max((when for at, when in seen.proof.passed if LEVELS.index(at) >= least), default=None)


def _old(proven: Iterable[tuple[float, Summary]], schedule: Schedule, now: float) -> Iterator[Summary]:
    """Those whose turn it is, the one that waits longest first."""
    line = sorted(proven, key=lambda one: (one[0], one[1].run, one[1].location))
    period = schedule.every * (1 - SPARE)
    sizes = [max(1, seen.size + seen.model_size) for _, seen in line]
    slack = _slack([last + period - now for last, _ in line], sizes, period)
    ahead = 0
    for (_, seen), size in zip(line, sizes, strict=True):
        if slack + ahead > 0:
            return
        yield seen
        ahead += size


def _slack(left: Sequence[float], sizes: Sequence[int], period: float) -> float:
    """How many bytes less than now may still be read before some location's time is up, were all read at the even rate from now on.

    ``left``: seconds to each deadline, in their order.
    """
    rate = sum(sizes) / max(period, 1e-9)  # a period of nothing: always
    before = accumulate(sizes, initial=0)
    return min((rate * seconds - size for seconds, size in zip(left, before, strict=False)), default=1.0)
