"""One marked location, removed or taken back, beside other heads and people who keep it by hand at the same moment.

Who removes first writes that it begins, then looks once more; who keeps, or takes back, writes that first, and looks then.  So at least one of the two
sees the other.  Only the head that wrote it so a moment ago removes what is still whole; from anybody else it wants a new beginning, after `LEASE`.
What is not whole any more can only be finished, and is, by whoever comes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from ckptsync.catalogue.fresh import fresh_location, read_records
from ckptsync.catalogue.reading import Cache, read
from ckptsync.catalogue.shortened import summary
from ckptsync.catalogue.summary import Catalogue, Summary
from ckptsync.errors import Incomplete
from ckptsync.head import tombs
from ckptsync.head.clearing import Cleared, Sure, Told, check_alone, clear, forget, tidy
from ckptsync.head.marking import Step, may_go
from ckptsync.head.retaining import doubtful, is_verified
from ckptsync.head.tombs import Grave
from ckptsync.records.locations import record_names
from ckptsync.records.manifest import Manifest
from ckptsync.records.names import OURS, consolidated_prefix, sending_prefix
from ckptsync.records.state import Snapshot
from ckptsync.records.tombstone import Scope, fate
from ckptsync.stores.contract import Store

PROMPT = 60.0
"""s (this process) within which the first file goes after the last look: else it looks again another time."""
LEASE = 15 * 60.0
"""s (store's clock) for which a beginning that another head wrote is left to that head."""
SENDING = 15 * 60.0
"""s (store's clock) for which a node's word that it sends holds: see docs/store-format.md, Write once."""


def nobody(_size: int) -> None:
    """Is told, and nobody wants to know."""


def elapsed() -> float:
    """Seconds that also pass while the machine sleeps, where it can tell: the store's clock goes on, and others with it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform == "linux" else time.monotonic()


class _TooLate(Incomplete):
    """It took longer to begin than a look may be trusted."""


@dataclass(frozen=True, slots=True)
class Road:
    """``cache``: of the run's catalogue; ``told`` of bytes that are gone; ``clock``: seconds, of this process; ``wait``: for so many."""

    cache: Cache
    told: Told = nobody
    clock: Callable[[], float] = elapsed
    wait: Callable[[float], object] = time.sleep


Outcome = Literal["removed", "taken back", "waits", "gone", "marked again"]


@dataclass(frozen=True, slots=True)
class Removal:
    """What became of a location.  ``reason``: why it waits, or is kept after all."""

    outcome: Outcome
    reason: str = ""
    cleared: Cleared = Cleared(0, 0)  # noqa: RUF009 - frozen


@dataclass(frozen=True, slots=True)
class Look:
    """A run as it is now, in short, and of it one location, listed.  ``summary`` is of that location."""

    catalogue: Catalogue
    seen: Snapshot
    summary: Summary
    step: Step

    @property
    def scope(self) -> Scope:
        """What of it should go."""
        return self.step.scope

    @property
    def resumes(self) -> bool:
        """Whether all that resuming needs is there, also where its shards are marked."""
        there, demands = self.seen.present(), self.seen.demands
        return bool(demands.resume) and all(path in there for path in (*demands.model, *demands.resume))

    @property
    def is_whole(self) -> bool:
        """Whether nothing of what should go has gone."""
        return is_whole(self.seen, self.scope)

    @property
    def may_come_back(self) -> bool:
        """Whether no removal has taken a file: nothing is missing, or none ever began that could have."""
        stones = self.seen.records.tombstones.values()
        taking = [t for t in stones if t.stage in ("begun", "done") and (t.scope == "location" or self.scope == "shards")]
        return self.is_whole or not taking

    @property
    def manifests(self) -> dict[str, Manifest]:
        """Those of it that count, by name."""
        return {k.name: k.manifest for k in self.seen.manifests}

    @property
    def others(self) -> list[Summary]:
        """The other locations of its run."""
        return [s for s in self.catalogue.summaries if s.location != self.summary.location]


def is_whole(seen: Snapshot, scope: Scope) -> bool:
    """Whether every file that a manifest, or with the location the model record, names is listed with its size.

    Where the shards may be gone already, the model record is all that says what should be there: without it nobody can know.
    """
    if scope == "location" and seen.conditions.shards and seen.model_record is None:
        return False
    return all(seen.sizes.get(name) == size for name, size in named(seen, scope).items())


def named(seen: Snapshot, scope: Scope) -> dict[str, int]:
    """Store name → bytes of every file that goes, as far as records say."""
    shards = () if scope == "location" and seen.conditions.shards else seen.files.values()
    found = {at.name: at.entry.size for where in shards for at in where}
    if scope == "location" and seen.model_record:
        found |= {consolidated_prefix(seen.run, seen.location) + f.path: f.size for f in seen.model_record.files}
    return found


def look(store: Store, step: Step, cache: Cache) -> Look | None:
    """Now; ``None`` if no manifest of it counts, or nothing may be said of it."""
    catalogue = read(store, cache, step.run)
    found = fresh_location(store, step.run, step.location)
    seen = next(iter(found.readable), None)
    return Look(catalogue, seen, summary(seen, found.mtimes), step) if seen else None


def remove(store: Store, step: Step, road: Road) -> Removal:
    """Remove a location, or its shards, that was marked and has stood for its grace.  Raises StoreError, and ConfigError where it lies in another run."""
    check_alone(store, step.run, step.location)
    now = tombs.store_now(store)
    seen = look(store, step, road.cache)
    if seen is None:
        return Removal("gone")
    marked = fate(seen.seen.records.tombstones, set(seen.manifests))
    if not (marked.retired if step.scope == "location" else marked.shards):
        return Removal("waits", "it is not marked any more")
    if not (marked.is_begun and not seen.is_whole):
        stopped = _stopped(store, seen, now)
        if stopped is not None:
            return stopped
        mine = tombs.write(store, _grave(seen), "begun")
        if store.late:
            road.wait(store.late)  # only then what others have written before must be seen here
        begun = road.clock()
        again = look(store, step, road.cache)
        if again is None:
            return Removal("gone")
        if why := _why_not(store, again, now):
            return Removal("waits", why) if _others_began(again.seen, mine) else _taken_back(store, again, why)
        return _begun(store, again, road, begun)
    tidy(store, named(seen.seen, seen.scope).keys() - seen.seen.sizes.keys())
    return _carried_out(store, seen, road.told, lambda: None)


def take_back(store: Store, step: Step, road: Road) -> Removal:
    """What was marked is kept after all, if its removal has not begun, and none has taken a file before.  Raises StoreError."""
    seen = look(store, step, road.cache)
    if seen and not seen.is_whole and seen.may_come_back:
        road.wait(store.late)  # whoever has taken what is missing had said before that he begins: by now that is seen
        seen = look(store, step, road.cache)
    if seen is None:
        return Removal("gone")
    if seen.summary.begun or not seen.may_come_back:
        return Removal("waits", "its removal has begun" if seen.summary.begun else "it is not whole any more")
    return _taken_back(store, seen, step.reason)


def _stopped(store: Store, seen: Look, now: float) -> Removal | None:
    """What keeps this head from beginning; ``None`` if nothing does."""
    short = seen.summary
    if short.begun and now - short.said < LEASE:
        return Removal("waits", "another head has begun to remove it")
    why = _why_not(store, seen, now)
    if why:
        return _taken_back(store, seen, why) if short.begun and seen.is_whole else Removal("waits", why)
    stones = fate(seen.seen.records.tombstones, set(seen.manifests)).said
    named = {name for stone in stones for name in seen.seen.records.tombstones[stone].manifests}
    if not named.issuperset(seen.manifests):
        tombs.write(store, _grave(seen), "said")
        return Removal("marked again", "more of it has come")
    return None


def _why_not(store: Store, seen: Look, now: float) -> str:
    """By all that is known at this moment."""
    short = seen.summary
    if short.kept:
        return f"kept by hand: {short.kept}"
    if sender := _sender(store, seen.seen, now):
        return f"{sender} is sending files of it"
    others = list(_confirmed(store, seen))
    if why := may_go(short, [short, *others], seen.scope):
        return why
    if _may_be_last(seen) and not any(s.resume for s in others):
        return "a training could be resumed from no other"
    if any(s.checkpoint == short.checkpoint and s.status == "CONFLICT" for s in seen.others):
        return "evidence in a doubt about another save of its name"
    if short.checkpoint in doubtful(seen.catalogue.faults, short.run):
        return "a record of its name cannot be read"
    return ""


def _confirmed(store: Store, seen: Look) -> Iterator[Summary]:
    """Of the others that are not marked the newest that are verified, listed now: a catalogue remembers, and files may have gone since."""
    if seen.scope == "shards" and not _may_be_last(seen):
        return
    for other in sorted(seen.others, key=lambda s: s.ended, reverse=True):
        if other.retired or not is_verified(other):
            continue
        found = fresh_location(store, other.run, other.location)
        now = next((summary(s, found.mtimes) for s in found.readable), None)
        if now is not None and now.status == "VERIFIED":
            yield now
            if now.resume or not (seen.summary.resume or _may_be_last(seen)):
                return


def _may_be_last(seen: Look) -> bool:
    """Whether it matters for its shards that a training can be resumed from another."""
    return seen.scope == "shards" and seen.resumes and not seen.step.is_last_too


def _others_began(seen: Snapshot, mine: str) -> bool:
    """Whether another head may be removing it at this moment: then nothing can be taken back."""
    said = fate(seen.records.tombstones, {k.name for k in seen.manifests}).said
    return any(seen.records.tombstones[name].stage == "begun" and name != mine for name in said)


def _sender(store: Store, seen: Snapshot, now: float) -> str:
    prefix = sending_prefix(seen.run, seen.checkpoint)
    said = (e for e in store.names(prefix) if e.size and now - e.mtime < SENDING)
    return next((e.name.removeprefix(prefix) for e in said), "")


def _taken_back(store: Store, seen: Look, why: str) -> Removal:
    if not seen.may_come_back:
        return Removal("waits", why)
    tombs.write(store, Grave(seen.manifests, seen.scope, why), "back")
    return Removal("taken back", why)


def _begun(store: Store, seen: Look, road: Road, since: float) -> Removal:
    def sure() -> None:
        if road.clock() - since > PROMPT:
            raise _TooLate("it took too long to be sure")

    try:
        return _carried_out(store, seen, road.told, sure)
    except _TooLate as e:  # nothing has gone: another time
        return Removal("waits", str(e))


def _carried_out(store: Store, seen: Look, told: Told, sure: Sure) -> Removal:
    run, location = seen.seen.run, seen.seen.location
    done = clear(store, run, location, seen.scope, told, sure=sure)
    if seen.scope == "shards":
        tombs.write(store, _grave(seen), "done")
    elif not forget(store, run, location, _of_name(store, seen.seen)):
        return Removal("waits", "somebody writes files into it", done)
    else:
        for name in tombs.spent(seen.seen.records.tombstones):
            store.delete(name)
    return Removal("removed", seen.seen.conditions.retired or seen.seen.conditions.shards, done)


def _grave(seen: Look) -> Grave:
    """With what the tombstones said before."""
    stones = seen.seen.records.tombstones.values()
    metrics: Mapping[str, float] = next((t.metrics for t in stones if t.metrics), {})
    conditions = seen.seen.conditions
    return Grave(seen.manifests, seen.scope, conditions.retired if seen.scope == "location" else conditions.shards, metrics)


def _of_name(store: Store, seen: Snapshot) -> dict[str, Manifest]:
    """Every manifest of the checkpoint's name, in whatever location, also those that count no more."""
    listed = record_names(e.name for e in store.names(f"{seen.run}/{OURS}/"))
    wanted = {n: p for n, p in listed.items() if p.kind == "manifest" and p.location.partition("~")[0] == seen.checkpoint}
    records, _ = read_records(store, wanted)
    return {name: r for name, r in records.items() if isinstance(r, Manifest)}
