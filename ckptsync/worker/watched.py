"""One save that is looked at again and again: since when has nothing changed, what do its files say, and is it finished?

Nothing here asks the store, so nothing here waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from ckptsync.errors import Incomplete, StoreError
from ckptsync.spool import pins as spool
from ckptsync.spool.marks import Took, took_of
from ckptsync.walk import Stat
from ckptsync.worker.facts import Facts, gathered, renewed
from ckptsync.worker.hooked import Hooked
from ckptsync.worker.likeness import is_like_another
from ckptsync.worker.looking import Seen
from ckptsync.worker.observed import Evidence, Rule, Sighting, Verdict, observe
from ckptsync.worker.order_of_writing import Beside, is_later
from ckptsync.worker.proof import proof
from ckptsync.worker.resting import at_rest
from ckptsync.worker.result import Failure, failure
from ckptsync.worker.settle import alone, judge

SELDOM = 0.1  # of the time for which files have stayed the same, they are not asked again whether they are whole

Key = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class Watched:
    """One save as the last look saw it.  ``first``: when it was first seen.  ``evidence`` is ``None`` of what needs none (`Asked.is_done`).

    ``sighting``: since when nothing has changed.  ``found``: whether it is finished, by what is known of the store without asking it.
    ``save``: the id that a hook's marks give it, where its pin says none.  ``asked``: when its files were asked last.
    """

    seen: Seen
    first: float
    sighting: Sighting
    evidence: Evidence | None
    found: Verdict
    save: str = ""
    asked: float = 0.0

    @property
    def key(self) -> Key:
        """One save of a checkpoint on this node."""
        return key_of(self.seen)


@dataclass(frozen=True, slots=True)
class Asked:
    """What the look asks of those who send, and who may not ask the store: is a save stored or given up, is another node's part, is one like it?"""

    is_done: Callable[[Seen], bool]
    has_mate: Callable[[Seen], bool]
    is_like_stored: Callable[[Seen], bool] = lambda _: False


@dataclass(frozen=True, slots=True)
class Glimpse:
    """One look at one save.  ``before``: what the look before it saw of it.  ``is_new``: its checkpoint was not there when its run was looked at last.

    ``wrong`` is added to.
    """

    one: Seen
    before: Watched | None
    is_new: bool
    beside: Beside
    now: float
    wrong: list[Failure]


def glimpsed(look: Glimpse, asked: Asked, rule: Rule) -> Watched:
    """The save as it is now.  Raises as the files do, but for those that change under our hands."""
    one, before, now = look.one, look.before, look.now
    first = before.first if before else now
    sighting = observe(before.sighting if before else None, _shown(one), now)
    if asked.is_done(one):
        return Watched(one, first, sighting, None, Verdict(finished=False, reason="stored, or another's", left=None))
    fresh = _is_fresh(look, sighting, rule)
    facts = Facts(is_later(one, look.beside.spans), asked.has_mate(one), fresh, look.beside.awaited, look.beside.hooked)
    try:
        evidence, found, at = _judged(look, sighting, facts, asked, rule)
    except Incomplete as e:  # it changes under our hands
        return Watched(one, first, sighting, None, Verdict(finished=False, reason=str(e), left=None))
    noted = _noted(one, at_rest(evidence, sighting, now, rule), found, look.wrong)
    return Watched(noted, first, sighting, evidence, found, _marked(evidence, look.beside.hooked, one), at)


def key_of(seen: Seen) -> Key:
    """What names a save on this node."""
    return (seen.run, seen.spot.name, seen.k)


def recorded(one: Seen, took: Took) -> Seen:
    """The same save, with what is known of it by now written beside its pin.  Raises Incomplete if the pin has gone."""
    assert one.pin is not None
    spool.record(one.pin, took)
    return replace(one, pin=replace(one.pin, took=took_of(one.pin.path)))


def _is_fresh(look: Glimpse, sighting: Sighting, rule: Rule) -> bool:
    """Whether nothing of it was there at an earlier look, and it has not been written over since it had an end, or had been cut short."""
    before = look.before
    if before is None:
        return look.is_new and look.one.k == 0 and not _was_moved_in(look.one)
    if before.evidence is None or not before.evidence.fresh or before.sighting == sighting:
        return before.evidence is not None and before.evidence.fresh
    has_rested = sighting.since - before.sighting.since >= rule.unmarked
    return not (before.found.finished or has_rested or _is_over(before.evidence, look.one))


def _was_moved_in(one: Seen) -> bool:
    """Whether its directory was renamed, with all that is in it, however old: that changes its ctime alone, and a new name in it both times."""
    if one.spot.only is not None:
        return False
    try:
        info = one.spot.path.stat()
    except OSError:  # rotation: what was there came and went since the last look
        return False
    return info.st_ctime_ns > info.st_mtime_ns


def _judged(look: Glimpse, sighting: Sighting, facts: Facts, asked: Asked, rule: Rule) -> tuple[Evidence, Verdict, float]:
    """Files are asked anew until they have been seen at rest, ever more seldom while they stay the same, and before they are called finished."""
    one, before, now = look.one, look.before, look.now
    if before and before.evidence and before.sighting == sighting and _needs_no_asking(before, now):
        evidence = _compared(renewed(before.evidence, one, facts), look, asked, rule)
        found = judge(evidence, sighting, now, rule)
        if before.found.finished or not found.finished:
            return evidence, found, before.asked
    evidence = _compared(gathered(one, facts), look, asked, rule)
    return evidence, judge(evidence, sighting, now, rule), now


def _compared(evidence: Evidence, look: Glimpse, asked: Asked, rule: Rule) -> Evidence:
    """With the checkpoints beside it, where that counts."""
    if not alone(evidence, rule):
        return evidence
    return replace(evidence, alike=is_like_another(look.one, look.beside.seen) or asked.is_like_stored(look.one))


def _noted(one: Seen, stable: int, found: Verdict, wrong: list[Failure]) -> Seen:
    """What was seen is kept beside the pin: for when rotation has taken the rest, and since the manifest says when it was finished."""
    took = one.pin.took if one.pin else Took()
    new = Took(stable=stable, finished=time.time_ns() if found.finished and not took.finished else 0)
    if one.pin is None or (new.stable in (0, took.stable) and not new.finished):
        return one
    try:
        return recorded(one, new)
    except StoreError as e:  # a full disk: it is sent all the same, and its manifest says less
        wrong.append(failure(one.run, one.spot.name, e))
        return one


def _needs_no_asking(before: Watched, now: float) -> bool:
    if before.found.finished or (before.evidence is not None and before.evidence.stable):
        return True
    return now - before.asked < SELDOM * (now - before.sighting.since)


def _is_over(before: Evidence, one: Seen) -> bool:
    """Whether something proved that it was finished, and a file of it has been written again since."""
    now = {f.path: (f.size, f.mtime) for f in one.hold.stats}
    return bool(proof(before)) and any(now.get(f.path, (f.size, f.mtime)) != (f.size, f.mtime) for f in before.files)


def _marked(evidence: Evidence, hooked: Hooked, one: Seen) -> str:
    """The save id that all ranks here gave to what nobody pinned for them."""
    marks = hooked.marks.get(one.spot.name, ()) if evidence.hook == "marked" else ()
    return max(marks, key=lambda m: m.at).save if marks else ""


def _shown(one: Seen) -> tuple[Stat, ...]:
    """What a change of is a change of the save.  A pinned file is ours to replace, by a reflink of it: its inode says nothing."""
    stats = ((h.stat, h.is_pinned) for h in one.hold.held.values())
    return (*(Stat(s.path, s.size, s.mtime, 0, 0) if is_pinned else s for s, is_pinned in stats), *one.hold.partial)
