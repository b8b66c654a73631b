"""One save of a checkpoint on its way: is it stored already, is it settled, what are its bytes, send them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ckptsync import __version__
from ckptsync.errors import Incomplete
from ckptsync.model import Demands
from ckptsync.records import saves
from ckptsync.records.manifest import Manifest
from ckptsync.spool import links
from ckptsync.walk import walk
from ckptsync.worker import deciding
from ckptsync.worker.content import Source
from ckptsync.worker.evidence import gather
from ckptsync.worker.hold import AGAIN, Held, Hold
from ckptsync.worker.known import Known
from ckptsync.worker.looking import Seen
from ckptsync.worker.moving import tidy
from ckptsync.worker.result import Phase, Progress
from ckptsync.worker.send import Road, Sent, send
from ckptsync.worker.settle import Rule, Sighting, Verdict, is_hopeless, judge, observe
from ckptsync.worker.take import Changed, Taken, take, unchanged
from ckptsync.worker.together import Together

Key = tuple[str, str, int]


@dataclass(slots=True)
class Memory:
    """What a worker remembers between ticks.  All of it may be lost: then it waits, reads and asks once more."""

    sightings: dict[Key, Sighting] = field(default_factory=dict)
    taken: dict[Key, Taken] = field(default_factory=dict)
    tidied: dict[Key, frozenset[str]] = field(default_factory=dict)
    """Names of the manifests in whose light a stored save was last seen to lie where it belongs."""


@dataclass(frozen=True, slots=True)
class Desk:
    """All that handling one save needs: who we are, how to reach the store, what the store says, and how long to wait."""

    node: str
    road: Road
    known: Known
    rule: Rule
    offset: Callable[[], int]
    memory: Memory


def told(seen: Seen, node: str) -> Manifest:
    """A manifest that says nothing yet but whose it is."""
    return Manifest(seen.run, seen.spot.name, "", node, 0, (), (), 0, 0, Demands(), version=__version__)


def known_already(seen: Seen, desk: Desk) -> Progress | None:
    """What need not be looked at any further: it is stored, by this node or another on the same disk, or it was given up."""
    if seen.pin is not None and seen.pin.node != desk.node:
        return _progress(seen, "elsewhere", f"{seen.pin.node} sends it")
    if is_given_up(seen, desk.node, desk.known):
        return _progress(seen, "retired", "given up in the store")
    live = [k.manifest for k in saves.live(desk.known.manifests(seen.spot.name))]
    mine = deciding.holder(seen.hold.stats, [m for m in live if m.node == desk.node])
    if mine is not None:
        return _stored(seen, mine, desk)
    other = deciding.holder(seen.hold.stats, [m for m in live if m.node != desk.node])
    if other is not None and seen.hold.stats[0].mtime % 10**9:  # a time without a fraction may be chance
        return _progress(seen, "elsewhere", f"{other.node} has stored these very files", other.place)
    return None


def is_given_up(seen: Seen, node: str, known: Known) -> bool:
    """Whether a tombstone speaks of these very files."""
    name = seen.spot.name
    buried = {n: (t, known.times.get(n, 0.0)) for n, t in known.tombstones(name).items()}
    return deciding.is_retired(told(seen, node), seen.hold.stats, buried, known.manifests(name))


def verdict(seen: Seen, desk: Desk, *, later: bool, now: float) -> tuple[Verdict, bool]:
    """Whether it is settled, and whether it never will be."""
    key = (seen.run, seen.spot.name, seen.k)
    sighting = observe(desk.memory.sightings.get(key), (*seen.hold.stats, *seen.hold.partial), now)
    desk.memory.sightings[key] = sighting
    live = [k.manifest for k in saves.live(desk.known.manifests(seen.spot.name))]
    mates = any(m.node != desk.node for m in live) and deciding.has_mate(seen.hold.stats, desk.node, desk.offset(), live)
    evidence = gather(seen.hold, seen.spot, later=later, mates=mates)
    return judge(evidence, sighting, now, desk.rule), is_hopeless(evidence)


def save(seen: Seen, desk: Desk) -> Progress:
    """Take it, unless that was done for these very files, and send it.  Raises Incomplete if it changes meanwhile."""
    key = (seen.run, seen.spot.name, seen.k)
    if key not in desk.memory.taken or desk.memory.taken[key].stats != seen.hold.stats:
        seen = hardened(seen)
    found = taken(seen, desk)
    planned = replace(deciding.draft(told(seen, desk.node), found), clock_offset=desk.offset())
    try:
        sent = send(planned, seen.hold, desk.road, found.read)
    except Changed:
        found.read.clear()  # no time of a file may have changed with its bytes
        raise
    progress = sent_progress(seen, found, sent)
    return replace(progress, notes=(*progress.notes, *_of_pins(seen.hold)))


def taken(seen: Seen, desk: Desk) -> Taken:
    """What these very files are: remembered, or looked at now.  Raises Incomplete if they change meanwhile."""
    key = (seen.run, seen.spot.name, seen.k)
    found = desk.memory.taken.get(key)
    if found is None or found.stats != seen.hold.stats:
        found = desk.memory.taken[key] = take(seen.hold)
    return found


def read_whole(seen: Seen, desk: Desk) -> Taken:
    """The same with every digest.  Raises Incomplete if the files change meanwhile."""
    found = taken(seen, desk)
    together = Together(desk.road.threads, desk.road.passed)
    unread = [seen.hold.held[f.path] for f in found.files if not f.digest]
    read = together.each(lambda held: Source(held, desk.node, passed=together.passed).digested(), unread)
    unchanged(seen.hold)
    found.read.update({entry.path: entry for entry in read})
    return found


def sent_progress(seen: Seen, taken: Taken, sent: Sent) -> Progress:
    """What was sent, as a value."""
    phase: Phase = "waiting" if sent.waiting else "sent"
    detail = f"another node is writing {sent.waiting[0]}" if sent.waiting else "sent"
    notes = (*taken.notes, *_notes(seen.hold))
    return Progress(seen.run, seen.spot.name, seen.k, phase, detail, sent.place, sent.files, sent.size, notes)


def hardened(seen: Seen) -> Seen:
    """The same save, its pin out of every writer's reach where the file system can do that."""
    if seen.pin is None:
        return seen
    links.harden(seen.pin)
    pinned = {f.path: Held(f, seen.pin.root, is_pinned=True) for f in walk(seen.pin.root).files}
    if {p: h.stat.size for p, h in pinned.items() if p in seen.hold.held} != {
        f.path: f.size for f in seen.hold.stats if seen.hold.held[f.path].is_pinned
    }:
        raise Incomplete(f"{seen.spot.name}: its pin changed", hint=AGAIN)
    return replace(seen, hold=replace(seen.hold, held=dict(seen.hold.held) | pinned))


def _stored(seen: Seen, mine: Manifest, desk: Desk) -> Progress:
    known = desk.known.manifests(seen.spot.name)
    there = [k.manifest for k in saves.live(known) if k.manifest.place == mine.place]
    place, copies = mine.place, desk.known.copies
    is_due = deciding.displaced(desk.node, there, copies) or deciding.returned(desk.node, there, copies)
    key, names = (seen.run, seen.spot.name, seen.k), frozenset(k.name for k in known)
    is_new = not desk.road.store.is_exclusive and desk.memory.tidied.get(key) != names and deciding.contested(desk.node, there)
    if is_due or is_new or saves.better_place(desk.node, place, known) != place:
        place = tidy(desk.node, place, seen.hold, desk.road, desk.known.copies)
        desk.memory.tidied[key] = names
    return _progress(seen, "stored", "stored", place)


def _progress(seen: Seen, phase: Phase, detail: str, place: str = "") -> Progress:
    return Progress(seen.run, seen.spot.name, seen.k, phase, detail, place, notes=(*_notes(seen.hold), *_of_pins(seen.hold)))


def _notes(hold: Hold) -> tuple[str, ...]:
    return (f"{len(hold.others)} links or special files are not sent: {hold.others[0]}",) if hold.others else ()


def _of_pins(hold: Hold) -> tuple[str, ...]:
    """A daemon pins what it sends; ``push`` does not, and need not say so."""
    unpinned = hold.unpinned if not hold.gone else ()
    return (f"{len(unpinned)} files are not pinned, rotation may take them",) if unpinned else ()
