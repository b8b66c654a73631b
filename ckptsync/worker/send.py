"""Sending a take: files first, the manifest last.  Killed anywhere and called again, with or without memory, it finishes the job.

Nothing is ever appended to, nothing half sent has a name, and a name that a manifest binds is only written with those bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from blake3 import blake3

from ckptsync.errors import Corrupt, Exists, Incomplete, NotFound
from ckptsync.records import coding, saves
from ckptsync.records.manifest import FileEntry, Manifest
from ckptsync.records.names import file_name
from ckptsync.stores.contract import Store
from ckptsync.worker.deciding import Parcel, displaced, missing, returned, stored
from ckptsync.worker.hold import Hold
from ckptsync.worker.take import CHUNK, Passed, chunks, nothing, unchanged

ROUNDS = 5  # other nodes write manifests while we send; each may move a file of ours


@dataclass(frozen=True, slots=True)
class Sent:
    """``place`` of the save; ``files`` and ``size`` of what this call stored; ``waiting`` for another node that is writing that name."""

    place: str
    files: int = 0
    size: int = 0
    waiting: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Road:
    """How to reach the store: what it says of a checkpoint now, who else is sending it now, and what to do between chunks."""

    store: Store
    known: Callable[[], tuple[saves.Known, ...]]
    is_contended: Callable[[], bool] = lambda: False
    passed: Passed = nothing


class _Overtaken(Incomplete):
    """Another node has named what we were about to replace: look again."""


def send(planned: Manifest, hold: Hold, road: Road) -> Sent:
    """Store what ``planned`` names, then the manifest.  Raises Incomplete if the source changed: nothing was committed then."""
    done: dict[str, Parcel] = {}
    for _ in range(ROUNDS):
        known = road.known()
        mine = stored(planned.files, [k.manifest for k in saves.live(known) if k.manifest.node == planned.node])
        if mine is not None:
            return Sent(mine.place)
        planned, parcels = _plan(planned, known)
        try:
            waiting = _send_all(planned, parcels, hold, road, done)
        except _Overtaken:
            continue
        known = road.known()
        if _plan(planned, known) == (planned, parcels):
            unchanged(hold)
            _commit(planned, [p.entry for p in parcels if p not in waiting], known, road.store)
            _heal(planned, {k.name for k in known}, hold, road)
            return Sent(planned.place, len(done), sum(p.entry.size for p in done.values()), tuple(p.entry.path for p in waiting))
    raise Incomplete(f"{planned.checkpoint}: other nodes kept changing the place it belongs to", hint="it is tried again")


def tidy(node: str, place: str, hold: Hold, road: Road, copies: Mapping[str, int]) -> str:
    """See that a stored save lies where all manifests that are known now say; the place it is in afterwards."""
    home = saves.better_place(node, place, road.known())
    if home != place:
        _move(node, place, home, hold, road)
    there = [k.manifest for k in saves.live(road.known()) if k.manifest.place == home]
    for parcel in displaced(node, there, copies):
        _put(parcel, hold, road, _places_of(parcel.entry, there))
    for parcel, copy in returned(node, there, copies):
        if not is_stored(road.store, parcel.name, parcel.entry):
            _put(parcel, hold, road, [copy])
        road.store.delete(copy)
    return home


def checked(stream: Iterable[memoryview], entry: FileEntry, name: str) -> Iterator[memoryview]:
    """The chunks themselves; raises Incomplete at the end unless they were the bytes of ``entry``, so that nothing appears."""
    digest, size = blake3(), 0
    for chunk in stream:
        digest.update(chunk)
        size += len(chunk)
        yield chunk
    if (size, digest.hexdigest()) != (entry.size, entry.digest):
        raise Incomplete(f"{name}: these are not the bytes that were taken", hint="it is taken again when it is quiet")


def stored_chunks(store: Store, name: str, size: int) -> Iterator[memoryview]:
    """A stored file, a chunk at a time in one buffer that is used again."""
    buffer = memoryview(bytearray(min(CHUNK, max(1, size))))
    for start in range(0, size, CHUNK):
        piece = buffer[: min(CHUNK, size - start)]
        store.read_into(name, start, piece)
        yield piece


def is_stored(store: Store, name: str, entry: FileEntry) -> bool | None:
    """Whether ``name`` holds the bytes of ``entry``; ``None`` if there is no such name.  Reads them."""
    try:
        if store.size(name) != entry.size:
            return False
        digest = blake3()
        for chunk in stored_chunks(store, name, entry.size):
            digest.update(chunk)
    except NotFound:
        return None
    except Corrupt:  # it shrank meanwhile: somebody is writing it
        return False
    return digest.hexdigest() == entry.digest


def _plan(planned: Manifest, known: Sequence[saves.Known]) -> tuple[Manifest, tuple[Parcel, ...]]:
    """Where things belong by what is known now: other nodes write manifests while we send."""
    placed = replace(planned, place=saves.choose_place(planned, known))
    return placed, missing(placed, [k.manifest for k in saves.live(known) if k.manifest.place == placed.place])


def _send_all(planned: Manifest, parcels: Iterable[Parcel], hold: Hold, road: Road, done: dict[str, Parcel]) -> tuple[Parcel, ...]:
    """Send what is not there yet; those that have to wait for another node are returned.  ``done`` is what this call has sent."""
    listed = {e.name: e.size for e in road.store.names(f"{planned.run}/{planned.place}/")}
    waiting = []
    for parcel in parcels:
        is_there = parcel.is_bound and listed.get(parcel.name) == parcel.entry.size
        if is_there or done.get(parcel.name) == parcel or is_stored(road.store, parcel.name, parcel.entry):
            continue
        _make_room(parcel, road.store)
        if not parcel.is_shared:
            _replace(planned, parcel, hold, road)
        elif not _put_first(planned, parcel, hold, road):
            waiting.append(parcel)
            continue
        done[parcel.name] = parcel
    return tuple(waiting)


def _make_room(parcel: Parcel, store: Store) -> None:
    """A larger node's bytes lie under a name that becomes ours: they are copied to its own name before they are replaced.

    If they are not there, they are lost, or an earlier try of ours has replaced them: that node sees them missing, and sends again.
    """
    for target, entry in parcel.moves:
        if not is_stored(store, target, entry) and is_stored(store, parcel.name, entry):
            store.write(target, checked(stored_chunks(store, parcel.name, entry.size), entry, target))


def _put_first(planned: Manifest, parcel: Parcel, hold: Hold, road: Road) -> bool:
    """Whether a name that nobody has bound is ours: not if another node is sending other bytes under it at this moment."""
    try:
        road.store.create(parcel.name, _source(parcel, hold, road))
    except Exists:
        if is_stored(road.store, parcel.name, parcel.entry):
            return True
        if road.is_contended():
            return False
        _replace(planned, parcel, hold, road)  # no manifest binds it and nobody is sending it: litter
    return True


def _replace(planned: Manifest, parcel: Parcel, hold: Hold, road: Road) -> None:
    """Write a name that may hold other bytes, unless another node's manifest has meanwhile said that they belong there."""

    def guarded() -> Iterator[memoryview]:
        yield from _source(parcel, hold, road)
        if parcel not in _plan(planned, road.known())[1]:
            raise _Overtaken(f"{parcel.name}: named by another node meanwhile")

    road.store.write(parcel.name, guarded())


def _source(parcel: Parcel, hold: Hold, road: Road) -> Iterator[memoryview]:
    held = hold.held.get(parcel.entry.path)
    if held is None:
        raise Incomplete(f"{parcel.entry.path}: no longer held", hint="it is taken again when it is quiet")
    return checked(chunks(held, road.passed), parcel.entry, parcel.entry.path)


def _commit(planned: Manifest, files: Iterable[FileEntry], known: Iterable[saves.Known], store: Store) -> None:
    bound = tuple(sorted(files, key=lambda f: f.path))
    if not bound:
        raise Incomplete(f"{planned.checkpoint}: another node is writing its files", hint="it is tried again with the next look")
    times = [f.mtime for f in bound]
    n = saves.next_n(known, planned.node, planned.place)
    _create(store, replace(planned, n=n, files=bound, started=min(times), ended=max(times)))


def _create(store: Store, manifest: Manifest) -> None:
    data = coding.encode(manifest)
    try:
        store.create(coding.record_name(manifest, data), [data])
    except Exists:  # named by its own bytes: it is this very record
        return


def _heal(planned: Manifest, before: Collection[str], hold: Hold, road: Road) -> None:
    """If others have written manifests in the moment before ours, neither knew of the other: see that our files are ours."""
    known = saves.live(road.known())
    if all(k.name in before or k.manifest.node == planned.node for k in known):
        return
    located = saves.locate(k.manifest for k in known if k.manifest.place == planned.place)
    for at in (at for every in located.values() for at in every if planned.node in at.nodes):
        if not is_stored(road.store, at.name, at.entry):
            _put(Parcel(at.entry, at.name), hold, road, ())


def _move(node: str, place: str, home: str, hold: Hold, road: Road) -> None:
    """Say again at home what was said elsewhere, once the bytes are there."""
    known = saves.live(road.known())
    mine = [k for k in known if (k.manifest.node, k.manifest.place) == (node, place)]
    manifest = saves.moved(mine, home, saves.next_n(road.known(), node, home))
    there = [k.manifest for k in known if k.manifest.place == home]
    for parcel in missing(manifest, there):
        if is_stored(road.store, parcel.name, parcel.entry):
            continue
        _make_room(parcel, road.store)
        _put(parcel, hold, road, _places_of(parcel.entry, [k.manifest for k in known if k.manifest.place == place]))
    _create(road.store, manifest)


def _put(parcel: Parcel, hold: Hold, road: Road, elsewhere: Iterable[str]) -> None:
    """Write a file from what this node holds, or from where the store has the same bytes; raises Incomplete if neither."""
    held = hold.held.get(parcel.entry.path)
    if held is not None and (held.stat.size, held.stat.mtime) == (parcel.entry.size, parcel.entry.mtime):
        road.store.write(parcel.name, checked(chunks(held, road.passed), parcel.entry, parcel.name))
        return
    for name in elsewhere:
        if name != parcel.name and is_stored(road.store, name, parcel.entry):
            road.store.write(parcel.name, checked(stored_chunks(road.store, name, parcel.entry.size), parcel.entry, parcel.name))
            return
    raise Incomplete(f"{parcel.name}: neither this node nor the store holds its bytes any more", hint="verify the checkpoint")


def _places_of(entry: FileEntry, there: Iterable[Manifest]) -> tuple[str, ...]:
    """Names under which a place may hold the bytes of ``entry``."""
    manifests = tuple(there)
    located = [at.name for at in saves.locate(manifests).get(entry.path, ())]
    plain = [file_name(m.run, m.place, entry.path) for m in manifests]
    return tuple(dict.fromkeys([*located, *plain]))
