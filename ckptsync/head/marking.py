"""From decisions to what is due: mark, wait, take back, remove.  Pure.

    alive ── drop ──▶ said ── grace, still drop ──▶ begun ──▶ no file, then no manifest
      ▲                 │
      └── back ◀────────┘ kept after all, and whole

Marked is not gone: for `grace` a tombstone stands, and every reader and worker knows.  What is kept after all in that time is taken back.  It is not
marked again before `grace` has passed once more, so that two heads with different rules do not write a record a minute.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from ckptsync.catalogue.summary import Summary
from ckptsync.head.retaining import Decision, is_resumable, is_verified
from ckptsync.records.tombstone import Scope

Deed = Literal["nothing", "mark", "wait", "take-back", "remove"]


@dataclass(frozen=True, slots=True)
class Step:
    """``scope``: all of the location, or its shards.  ``left``: seconds of grace, where it waits.

    ``is_last_too``: shards go even where a training can be resumed from no other.
    """

    run: str
    location: str
    deed: Deed
    scope: Scope
    reason: str
    left: float = 0.0
    is_last_too: bool = False


def steps(decisions: Iterable[Decision], locations: Mapping[str, Summary], grace: float, now: float) -> tuple[Step, ...]:
    """One for each decision, in their order.  ``locations``: by name; ``now`` and ``grace`` in seconds, on the store's clock."""
    return tuple(_step(d, locations[d.location], grace, now) for d in decisions)


def _step(decision: Decision, seen: Summary, grace: float, now: float) -> Step:
    # of a location that is marked as a whole nothing else can be said: its end is carried out, or taken back
    is_of_shards = not seen.retired and (decision.verdict == "drop-shards" or (decision.verdict == "keep" and bool(seen.let_go)))
    scope: Scope = "shards" if is_of_shards else "location"

    def step(deed: Deed, left: float = 0.0) -> Step:
        return Step(seen.run, seen.location, deed, scope, decision.reason, left)

    is_said = bool(seen.retired if scope == "location" else seen.let_go)
    if seen.begun and is_said:
        return step("nothing" if scope == "shards" and seen.done else "remove")
    if decision.verdict == "keep" or (decision.verdict == "drop-shards" and seen.retired):
        return step("take-back" if seen.retired or seen.let_go else "nothing")
    if not is_said:
        left = seen.back + grace - now if seen.back else 0.0
        return step("wait", left) if left > 0 else step("mark")
    left = seen.said + grace - now
    return step("wait", left) if left > 0 else step("remove")


def may_go(seen: Summary, others: Iterable[Summary], scope: Scope) -> str:
    """Why a marked location must not be removed now; empty if it may.  ``others``: all of its run as they are at this moment, itself among them.

    All that is marked counts as gone.  So two heads that mark each other's last one both find nothing left, and neither removes.
    """
    if scope == "shards":
        return "" if is_verified(seen) else "its model is not verified now"
    left = [s for s in others if s.location != seen.location and not s.retired and is_verified(s)]
    if not left:
        return "no other checkpoint of the run is verified and not marked"
    if is_resumable(seen) and not any(is_resumable(s) for s in left):
        return "a training could be resumed from no other"
    return ""
