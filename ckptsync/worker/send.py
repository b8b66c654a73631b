"""Sending a take: files first, the manifest last.  Killed anywhere and called again, with or without memory, it finishes the job.

Nothing is ever appended to, nothing half sent has a name, and a name that a manifest binds is only written with those bytes.

A file that no manifest names is digested while it is sent: its digest decides nothing before, since all that is compared between manifests is
compared path by path.  What is named already is read first, and mostly need not be sent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from ckptsync.digest import BLOCK_HEX
from ckptsync.errors import Exists, Incomplete, Unsupported
from ckptsync.records import coding, saves
from ckptsync.records.manifest import FileEntry, Manifest
from ckptsync.records.names import node_file_name, records_prefix
from ckptsync.stores.contract import About, Store
from ckptsync.worker import deciding
from ckptsync.worker.announcing import announced
from ckptsync.worker.content import Guarded, Source, is_stored
from ckptsync.worker.deciding import Parcel, missing, stored
from ckptsync.worker.hold import AGAIN, Hold
from ckptsync.worker.putting import copy_within, make_room, put
from ckptsync.worker.road import Road as Road  # noqa: PLC0414  for others to import
from ckptsync.worker.road import small_at_once
from ckptsync.worker.take import unchanged
from ckptsync.worker.together import Together

ROUNDS = 5  # other nodes write manifests while we send; each may move a file of ours
SMALL = 1 << 20  # bytes of a file that costs a round trip rather than bandwidth


@dataclass(frozen=True, slots=True)
class Sent:
    """``location`` of the save; ``files`` and ``size`` of what this call stored; ``waiting`` for another node that is writing that name.

    ``held``: a manifest of the save that has all of it already, so that nothing was written.
    """

    location: str
    files: int = 0
    size: int = 0
    waiting: tuple[str, ...] = ()
    held: Manifest | None = None


class _Overtaken(Incomplete):
    """Another node has named what we were about to replace: look again."""


def send(planned: Manifest, hold: Hold, road: Road, read: dict[str, FileEntry] | None = None) -> Sent:
    """Store what ``planned`` names, then the manifest.  Raises Incomplete if the source changed: nothing was committed then.

    ``planned.supersedes``: manifests that are gone; those of the location where it comes to lie are taken back.

    ``read``: entries of what has been read of the take, by path; what is read here is added.
    """
    _check(planned)
    together = Together(road.threads, road.passed)
    delivery = _Delivery(hold, replace(road, passed=together.passed), together, {} if read is None else read)
    planned, mine = delivery.look(planned, known := road.known())
    if mine:
        return Sent(mine.location, held=mine)
    if road.must_wait(planned, known):
        raise Incomplete(
            f"{planned.checkpoint}: waits for proof that another node's part is of the same save", hint="it is tried again"
        )
    with announced(road.store, planned.node, planned.run, planned.checkpoint, road.passed) as passed:
        together.hook = passed
        return _send(planned, hold, delivery)


def _check(planned: Manifest) -> None:
    """Raise Unsupported for what a manifest cannot say, before the first file is sent: too many files, or times that no reader takes."""
    for file in planned.files:
        if not -(2**63) <= file.mtime < 2**63:
            raise Unsupported(f"{file.path}: its time is after the year 2262", hint="`touch` it: a trainer's clock was wrong")
    if len(planned.files) * _LEAST_ENTRY > coding.LIMITS["manifest"]:
        coding.encode(replace(planned, files=tuple(replace(f, digest="0" * 64, blocks=("0" * BLOCK_HEX,)) for f in planned.files)))


_LEAST_ENTRY = 200  # bytes of a file in a manifest


def _send(planned: Manifest, hold: Hold, delivery: _Delivery) -> Sent:
    road = delivery.road
    for _ in range(ROUNDS):
        known = road.known()
        planned, mine = delivery.look(planned, known)
        if mine:
            return Sent(mine.location, held=mine)
        planned, parcels = _plan(planned, known)
        try:
            waiting = delivery.send(planned, parcels)
        except _Overtaken:
            continue
        planned, parcels = delivery.told(planned), tuple(delivery.filled(p) for p in parcels)
        known = road.known()
        if _plan(planned, known) == (planned, parcels):
            unchanged(hold)
            if delivery.replaced:
                planned = replace(planned, supersedes=())  # it was another save that lay here, and whose manifest is gone
            _commit(planned, [p.entry for p in parcels if p.entry.path not in waiting], known, road.store)
            _heal(planned, {k.name for k in known}, hold, road)
            done = delivery.done.values()
            return Sent(planned.location, len(done), sum(p.entry.size for p in done), waiting)
    raise Incomplete(f"{planned.checkpoint}: other nodes kept changing the location it belongs to", hint="it is tried again")


def create_record(store: Store, record: coding.Record) -> None:
    """Write a record; it may be there already."""
    data = coding.encode(record)
    name = coding.record_name(record, data)
    try:
        store.create(
            name, [data], About(len(data), name)
        )  # the name is of these bytes alone: what a killed try left is gone on with
    except Exists:  # named by its own bytes: it is this very record
        return


def _is_another(there: Manifest, planned: Manifest) -> bool:
    """Whether a hook said that they are two saves: the same bytes again (random states, a part that did not change) belong to both."""
    return bool(there.save and planned.save) and there.save != planned.save


def _plan(planned: Manifest, known: Sequence[saves.Known]) -> tuple[Manifest, tuple[Parcel, ...]]:
    """Where things belong by what is known now: other nodes write manifests while we send."""
    placed = replace(planned, location=saves.choose_location(planned, known))
    return placed, missing(placed, [k.manifest for k in saves.live(known) if k.manifest.location == placed.location])


@dataclass(slots=True)
class _Delivery:
    """One take on its way.  ``done`` is what this call has sent, by name.  ``replaced``: other bytes lay under a name, which no manifest bound."""

    hold: Hold
    road: Road
    together: Together
    read: dict[str, FileEntry]
    done: dict[str, Parcel] = field(default_factory=dict)
    replaced: bool = False

    def told(self, planned: Manifest) -> Manifest:
        """With the digests that are known by now."""
        return replace(planned, files=tuple(self.read.get(f.path, f) for f in planned.files))

    def filled(self, parcel: Parcel) -> Parcel:
        """With its digest."""
        return replace(parcel, entry=self.read.get(parcel.entry.path, parcel.entry))

    def look(self, planned: Manifest, known: Sequence[saves.Known]) -> tuple[Manifest, Manifest | None]:
        """The plan with a digest for every file that some manifest of the checkpoint's name, in whatever location, names; and one of the save that has all of it.

        What a hook gave an id is this node's part of that save, and is said once also where another node has stored the same bytes.  Without an id, and
        what comes after that, may be a copy: pulled, or brought from another node.
        """
        named = {f.path for k in known for f in k.manifest.files}
        self.together.each(self._digest, [f for f in planned.files if f.path in named])
        planned, live = self.told(planned), [k.manifest for k in saves.live(known)]
        there = [m for m in live if not _is_another(m, planned)]
        ours = [m for m in there if m.node == planned.node]
        written = deciding.without_copies(planned, live)
        is_own_part = bool(planned.save) and all(m.save != planned.save for m in ours)
        mine = stored(planned.files, planned.node, ours if is_own_part else there) or stored(written.files, planned.node, ours)
        return written, mine

    def send(self, planned: Manifest, parcels: Sequence[Parcel]) -> tuple[str, ...]:
        """Send what is not there yet, small files first; paths of those that have to wait for another node are returned."""
        is_listed = any(p.is_bound for p in parcels)  # nothing else asks for it, and the first byte waits
        listed = {e.name: e.size for e in self.road.store.names(f"{planned.run}/{planned.location}/")} if is_listed else {}

        def deliver(parcel: Parcel) -> bool:
            return self._deliver(planned, parcel, listed.get(parcel.name))

        small = [p for p in parcels if p.entry.size <= SMALL]
        large = [p for p in parcels if p.entry.size > SMALL]
        many = self.road.small or small_at_once(self.road.threads)
        went = [*self.together.each(deliver, small, many), *self.together.each(deliver, large)]
        return tuple(p.entry.path for p, is_there in zip((*small, *large), went, strict=True) if not is_there)

    def _deliver(self, planned: Manifest, parcel: Parcel, listed: int | None) -> bool:
        """Whether it is where it belongs."""
        store = self.road.store
        if (parcel.is_bound and listed == parcel.entry.size) or self.done.get(parcel.name) == parcel:
            return True
        if parcel.is_shared:
            return self._put_first(planned, parcel)
        is_there = is_stored(store, parcel.name, parcel.entry, self.road.passed)
        if parcel.moves and not is_there and self.road.is_contended():
            return False  # who sends now may be about to take the same name from the same node
        make_room(parcel, self.road)
        if not is_there:
            self._replace(planned, parcel)
        return True

    def _put_first(self, planned: Manifest, parcel: Parcel) -> bool:
        """Whether a name that nobody has bound is ours: not if another node is sending other bytes under it at this moment."""
        source = self._source(parcel)
        try:
            self.road.store.create(parcel.name, source, source.about)
        except Exists as e:
            entry = self._learned(source.digested())
            if e.is_same or (e.is_same is None and is_stored(self.road.store, parcel.name, entry, self.road.passed)):
                return True
            if self.road.is_contended():
                return False
            self.replaced = True
            self._replace(planned, parcel)  # no manifest binds it and nobody is sending it: litter
            return True
        self._sent(parcel, source)
        return True

    def _replace(self, planned: Manifest, parcel: Parcel) -> None:
        """Write a name that may hold other bytes, unless another node's manifest has meanwhile said that they belong there."""
        source = self._source(parcel)

        def still_ours() -> None:
            self._learned(source.digested())
            if self.filled(parcel) not in _plan(self.told(planned), self.road.known())[1]:
                raise _Overtaken(f"{parcel.name}: named by another node meanwhile")

        self.road.store.write(parcel.name, Guarded(source, still_ours), source.about)
        self._sent(parcel, source)

    def _sent(self, parcel: Parcel, source: Source) -> None:
        self._learned(source.digested())
        self.done[parcel.name] = self.filled(parcel)

    def _digest(self, entry: FileEntry) -> None:
        if not entry.digest:
            self._learned(self._held(entry).digested())

    def _source(self, parcel: Parcel) -> Source:
        return self._held(self.read.get(parcel.entry.path, parcel.entry))

    def _held(self, entry: FileEntry) -> Source:
        held = self.hold.held.get(entry.path)
        if held is None:
            raise Incomplete(f"{entry.path}: no longer held", hint=AGAIN)
        return Source(held, self.road.node, entry, self.road.passed, len(self.hold.held))

    def _learned(self, entry: FileEntry) -> FileEntry:
        self.read[entry.path] = entry
        return entry


def _commit(planned: Manifest, files: Iterable[FileEntry], known: Iterable[saves.Known], store: Store) -> None:
    bound = tuple(sorted(files, key=lambda f: f.path))
    if not bound:
        raise Incomplete(f"{planned.checkpoint}: another node is writing its files", hint="it is tried again with the next look")
    known = tuple(known)
    n = saves.next_n(known, planned.node, planned.location)
    here = records_prefix(planned.run, planned.location)
    gone = (name for name in planned.supersedes if name.startswith(here))
    left = tuple(sorted({*gone, *deciding.left_behind(planned, saves.live(known))}))
    create_record(store, replace(deciding.part(planned, bound), n=n, supersedes=left))


def _heal(planned: Manifest, before: Collection[str], hold: Hold, road: Road) -> None:
    """If others have written manifests in the moment before ours, neither knew of the other: see that what both name is where it belongs.

    Plain names are not touched while somebody sends who may be about to own them: then ours lies beside, where he would have put it.
    """
    if not _strange(planned, before, saves.live(road.known())):
        return
    is_contended = road.is_contended()  # first: whoever has ended before has his manifest among those read now
    known = saves.live(road.known())
    located = saves.locate(k.manifest for k in known if k.manifest.location == planned.location)
    for path in sorted(_strange(planned, before, known)):
        for at in sorted(
            located[path], key=lambda at: planned.node in at.nodes
        ):  # others' copies first: ours may replace what they are made of
            if is_stored(road.store, at.name, at.entry, road.passed):
                continue
            if planned.node not in at.nodes:
                copy_within(Parcel(at.entry, at.name), road, [other.name for other in located[path]])
                continue
            beside = node_file_name(planned.run, planned.location, planned.node, path)
            put(Parcel(at.entry, beside if is_contended else at.name), hold, road, ())


def _strange(planned: Manifest, before: Collection[str], known: Iterable[saves.Known]) -> set[str]:
    """Paths in manifests that others have written since ``before``."""
    fresh = (k.manifest for k in known if k.name not in before and k.manifest.node != planned.node)
    return {f.path for m in fresh if m.location == planned.location for f in m.files}
