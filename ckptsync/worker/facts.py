"""What the files of a save do not say themselves, put beside what they say."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ckptsync.spool.marks import is_running
from ckptsync.worker.evidence import gather
from ckptsync.worker.hooked import Hooked, word
from ckptsync.worker.looking import Seen
from ckptsync.worker.observed import Evidence
from ckptsync.worker.resting import was_at_rest


@dataclass(frozen=True, slots=True)
class Facts:
    """See `Evidence`."""

    later: bool
    mates: bool
    fresh: bool
    awaited: bool
    hooked: Hooked


def gathered(one: Seen, facts: Facts) -> Evidence:
    """All that there is to know; asks every file.  Raises Incomplete if they vanish meanwhile."""
    told = {"later": facts.later, "mates": facts.mates, "fresh": facts.fresh, "awaited": facts.awaited}
    return gather(one.hold, one.spot, **told, pin=one.pin, hooked=facts.hooked)


def renewed(before: Evidence, one: Seen, facts: Facts) -> Evidence:
    """The same of files that have not changed since: they are not asked again.  What was fresh then is."""
    return replace(
        before,
        later=facts.later,
        mates=facts.mates,
        awaited=facts.awaited,
        gone=one.hold.gone,
        hook=word(facts.hooked, one.pin, one.spot.name, is_running),
        stable=one.pin is not None and was_at_rest(one.pin.took.stable, one.hold.stats),
    )
