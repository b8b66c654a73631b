"""One save of a checkpoint on its way: is it stored already, is it finished, what are its bytes, send them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckptsync import __version__
from ckptsync.errors import Corrupt, Incomplete, Unsupported
from ckptsync.layouts import table
from ckptsync.merge.output import is_beside
from ckptsync.model import Demands
from ckptsync.records import saves
from ckptsync.records.manifest import Manifest
from ckptsync.scan import Spot
from ckptsync.spool import links
from ckptsync.spool.marks import Took
from ckptsync.walk import walk
from ckptsync.worker import plan
from ckptsync.worker.companions import YOUNG, at_rest, companions, is_of_first
from ckptsync.worker.content import Source
from ckptsync.worker.result import Phase, Progress
from ckptsync.worker.selecting import EVERYTHING, Selection, select
from ckptsync.worker.snapshot import AGAIN, Changed, Held, Hold, Seen, Taken, take, unchanged, unread
from ckptsync.worker.store_view import RunRecords, held, standing
from ckptsync.worker.together import Together
from ckptsync.worker.upload import Destination, Sent, in_doubt, settle, upload

Key = tuple[str, str, int]


@dataclass(slots=True)
class Memory:
    """What a worker remembers between ticks.  All of it may be lost: then it waits, reads and asks once more."""

    taken: dict[Key, Taken] = field(default_factory=dict)
    settled: dict[Key, frozenset[str]] = field(default_factory=dict)
    """Names of the manifests in whose light a stored save was last seen to lie where it belongs."""


@dataclass(frozen=True, slots=True)
class Desk:
    """All that handling one save needs: who we are, how to reach the store, what the store says, and how long to wait."""

    node: str
    to: Destination
    known: RunRecords
    offset: Callable[[], int]
    memory: Memory
    selection: Selection = EVERYTHING


def told(seen: Seen, node: str) -> Manifest:
    """A manifest that says nothing yet but whose it is, and what is remembered beside its pin."""
    nothing = Manifest(
        seen.run, seen.spot.name, "", node, 0, (), (), 0, 0, Demands(), version=__version__, trainer=seen.spot.family
    )
    return with_took(nothing, begun(seen, 0))


def with_took(manifest: Manifest, took: Took) -> Manifest:
    """The same, as it is said where this was remembered."""
    times = {key: at for key, at in (("finished", took.finished), ("sending", took.sending)) if at}
    return replace(manifest, save=took.save, trainer=took.trainer or manifest.trainer, times=times)


def begun(seen: Seen, at: int, save: str = "") -> Took:
    """What to remember beside a pin when sending begins, at ``at`` (ns), and to say in every manifest of it: what was remembered first, stays.

    ``save``: the id of the save, where no commit says it.
    """
    took = seen.pin.took if seen.pin else Took()
    commit = seen.pin.commit if seen.pin and seen.pin.is_committed else None
    trainer = "".join(c for c in commit.trainer if c.isprintable())[:200] if commit else ""
    return replace(
        took,
        sending=took.sending or at,
        trainer=took.trainer or trainer or seen.spot.family,
        save=took.save or (commit.save if commit else save),
    )


def known_already(seen: Seen, desk: Desk) -> Progress | None:
    """As `standing`; what is stored is moved to where it belongs by now."""
    found = standing(seen, desk.node, desk.known, desk.selection)
    if found is None:
        return None
    return _stored(seen, found.mine, desk) if found.mine else progress(seen, found.phase, found.detail, found.other)


def save(seen: Seen, desk: Desk) -> Progress:
    """Take it, unless that was done for these very files, and send it.  Raises Incomplete if it changes meanwhile."""
    key = (seen.run, seen.spot.name, seen.k)
    known = desk.known.manifests(seen.spot.name)

    def beside(hold: Hold) -> Mapping[str, Held]:
        return at_rest(sent_first(hold, seen.spot, desk.node, known))

    going = outgoing(seen, desk.selection, beside)
    if key not in desk.memory.taken or desk.memory.taken[key].stats != going.hold.stats:
        going = outgoing(hardened(seen), desk.selection, beside)
    seen = going
    found = taken(seen, desk)
    planned = replace(plan.draft(told(seen, desk.node), found), clock_offset=desk.offset())
    planned = replace(planned, supersedes=instead_of(desk.known, desk.node, seen.spot.name))
    try:
        sent = upload(planned, seen.hold, desk.to, found.read)
    except Changed:
        found.read.clear()  # no time of a file may have changed with its bytes
        raise
    if sent.held is not None:
        desk.known.remember(seen.spot.name, digests(found))
        there = held(sent.held, desk.node)
        return progress(seen, there.phase, there.detail, sent.held)
    done = sent_progress(seen, found, sent)
    return replace(done, notes=(*done.notes, *_of_pins(seen.hold)))


def digests(taken: Taken) -> dict[plan.FileKey, str]:
    """Return the digest of every file that has been read."""
    return {(f.path, f.size, f.mtime): f.digest for f in taken.files if f.digest}


def instead_of(known: RunRecords, node: str, checkpoint: str) -> tuple[str, ...]:
    """Manifests of this node that are gone, and could not be written again: a new one stands in their stead."""
    return tuple(sorted(map(str, known.lost_of(node, checkpoint))))


def outgoing(seen: Seen, selection: Selection, beside: Callable[[Hold], Mapping[str, Held]] | None = None) -> Seen:
    """The same save with what opens its model, and without what is not sent by choice.  Raises Incomplete if it changes meanwhile.

    The hook added that, or it is found around the checkpoint: all of it, or of a hold what ``beside`` gives.
    """
    hold = seen.hold
    if seen.pin is not None and seen.pin.is_committed:
        hold = hold.with_added(seen.pin.beside, (s for s in seen.pin.added if is_beside(s.path)))
    found = beside(hold) if beside else companions(hold, seen.spot)
    hold = replace(hold, held={**found, **hold.held})
    if not selection.is_everything:
        hold = hold.only(select(hold.held, selection, _demands(hold)))
    return replace(seen, hold=hold)


def sent_first(hold: Hold, spot: Spot, node: str, known: Iterable[saves.Known]) -> Mapping[str, Held]:
    """Return what opens the model and may be sent with its checkpoint: rank 0's node knows what the checkpoint has itself.

    What this node has named with other bytes under this checkpoint's name would make it another save: `send_late` sends that.
    """
    found = companions(hold, spot) if is_of_first(hold) else {}
    mine = (f for k in saves.live(known) if k.manifest.node == node for f in k.manifest.files if f.path in found)
    is_other = any((f.size, f.mtime) != (found[f.path].stat.size, found[f.path].stat.mtime) for f in mine)
    return {} if is_other else found


def send_late(
    seen: Seen, location: str, to: Destination, selection: Selection, known: Sequence[saves.Known], *, young: float = YOUNG
) -> tuple[str, ...]:
    """Send what opens the model of a stored save, if the location has nothing of that kind: a further manifest.  Return its files.

    ``known``: all manifests of the checkpoint's name.  While the save is not whole, another node may still send its own.
    ``young``: seconds for which what was written a moment ago is left alone.
    """
    there = [k.manifest for k in saves.live(known) if k.manifest.location == location]
    mine, named = [m for m in there if m.node == to.node], {f.path for m in there for f in m.files}
    hold = seen.hold
    found = at_rest(companions(hold, seen.spot, named), young) if mine else {}
    demands = saves.demanded(there) if found else Demands()
    if not demands.model or not demands.model.keys() <= named:
        return ()
    found = {name: found[name] for name in select(found, selection, demands)}
    files = {f.path: f for m in mine for f in m.files} | {name: unread(held.stat) for name, held in found.items()}
    planned = replace(
        mine[-1],
        files=tuple(files[path] for path in sorted(files)),
        started=min(m.started for m in mine),
        ended=max(m.ended for m in mine),
        supersedes=(),
    )
    sent = upload(planned, replace(hold, held={**hold.held, **found}), to) if found else None
    return tuple(sorted(found)) if sent and not sent.held else ()


def _demands(hold: Hold) -> Demands:
    try:
        return table.demands(hold)
    except (Corrupt, Unsupported):  # the take says so in a note, and sends what names alone allow
        return Demands()


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
    together = Together(desk.to.threads, desk.to.passed)
    unread = [seen.hold.held[f.path] for f in found.files if not f.digest]
    read = together.each(lambda held: Source(held, desk.node, passed=together.passed, files=len(seen.hold.held)).digested(), unread)
    unchanged(seen.hold)
    found.read.update({entry.path: entry for entry in read})
    return found


def sent_progress(seen: Seen, taken: Taken, sent: Sent) -> Progress:
    """What was sent, as a value."""
    added = added_to(seen.hold)
    found = (f"not in the checkpoint, and sent with it: {', '.join(added)}",) if added else ()
    notes, left_out = (*taken.notes, *_notes(seen.hold), *found), seen.hold.left_out
    return Progress(seen.run, seen.spot.name, seen.k, "sent", "sent", sent.location, sent.files, sent.size, notes, left_out, added)


def hardened(seen: Seen) -> Seen:
    """The same save, its pin out of every writer's reach where the file system can do that."""
    if seen.pin is None:
        return seen
    links.harden(seen.pin)
    pinned = {f.path: Held(f, seen.pin.root, is_pinned=True) for f in walk(seen.pin.root).files if f.path in seen.hold.held}
    if {p: h.stat.size for p, h in pinned.items()} != {f.path: f.size for f in seen.hold.stats if seen.hold.held[f.path].is_pinned}:
        raise Incomplete(f"{seen.spot.name}: its pin changed", hint=AGAIN)
    return replace(seen, hold=replace(seen.hold, held=dict(seen.hold.held) | pinned))


def _stored(seen: Seen, mine: Manifest, desk: Desk) -> Progress:
    """Return that it is stored, after it was moved to where it belongs by now, and what opens its model was sent."""
    known = desk.known.manifests(seen.spot.name)
    key, names = (seen.run, seen.spot.name, seen.k), frozenset(k.name for k in known)
    location = mine.location
    is_elsewhere = saves.better_location(desk.node, location, known) != location
    if is_elsewhere and desk.to.must_wait(mine, known):
        return progress(seen, "stored", "stored", mine)
    is_unsettled = desk.memory.settled.get(key) != names and bool(in_doubt(desk.node, location, known, desk.to.store))
    if is_elsewhere or is_unsettled:
        location = settle(desk.node, location, outgoing(seen, desk.selection).hold, desk.to)
        desk.memory.settled[key] = names
    elif added := send_late(seen, location, desk.to, desk.selection, known):
        return progress(seen, "sent", f"sent {', '.join(added)}", mine)
    return progress(seen, "stored", "stored", replace(mine, location=location))


def progress(seen: Seen, phase: Phase, detail: str, at: Manifest | None = None) -> Progress:
    """Where it stands, as a value."""
    location = at.location if at else ""
    return Progress(seen.run, seen.spot.name, seen.k, phase, detail, location, notes=(*_notes(seen.hold), *_of_pins(seen.hold)))


def _notes(hold: Hold) -> tuple[str, ...]:
    return (f"{len(hold.others)} links or special files are not sent: {hold.others[0]}",) if hold.others else ()


def added_to(hold: Hold) -> tuple[str, ...]:
    """Return the paths on this node of what was found around the checkpoint."""
    return tuple(sorted(f"{h.root}/{h.stat.path}" for h in hold.held.values() if h.is_added and not h.is_pinned))


def _of_pins(hold: Hold) -> tuple[str, ...]:
    """A daemon pins what it sends; ``push`` does not, and need not say so."""
    unpinned = hold.unpinned if not hold.gone else ()
    return (f"{len(unpinned)} files are not pinned, rotation may take them",) if unpinned else ()
