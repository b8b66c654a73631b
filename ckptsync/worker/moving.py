"""Where a stored save lies, and where it belongs by all manifests that are known by now: what differs is put right.

Nothing is deleted here, since a worker may not be allowed to: what is of no use any more is overwritten with nothing, and left to gc.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ckptsync.records import saves
from ckptsync.records.manifest import FileEntry, Manifest
from ckptsync.records.names import file_name
from ckptsync.stores.contract import About
from ckptsync.worker.announcing import announced
from ckptsync.worker.content import is_stored
from ckptsync.worker.deciding import Parcel, contested, displaced, missing, returned
from ckptsync.worker.hold import Hold
from ckptsync.worker.putting import make_room, put
from ckptsync.worker.road import Road
from ckptsync.worker.send import create_record


def tidy(node: str, location: str, hold: Hold, road: Road, copies: Mapping[str, int]) -> str:
    """See that a stored save lies where all manifests that are known now say; the location it is in afterwards.

    ``node``: whose part it is; `road.node` is who puts it right, mostly the same.
    Plain names are not touched while another node sends, who may be about to take them: the next look finds it still to be done.
    """
    known = road.known()
    home = saves.better_location(node, location, known)
    if home != location or _to_take_back(node, _live_in(location, known), road, copies):
        with announced(road.store, road.node, known[0].manifest.run, known[0].manifest.checkpoint, road.passed) as passed:
            location = _put_right(node, location, hold, replace(road, passed=passed), copies)
    there = _live_in(location, road.known())
    for parcel in displaced(node, there, copies):
        put(parcel, hold, road, _locations_of(parcel.entry, there))
    return location


def _put_right(node: str, location: str, hold: Hold, road: Road, copies: Mapping[str, int]) -> str:
    """Once we have said that we send, either we see that another does, or he sees us."""
    if road.is_contended():
        return location
    known = (
        road.known()
    )  # now: who has ended meanwhile has his manifest among them, and what he displaced is no copy to be taken back
    home = saves.better_location(node, location, known)
    if home != location:
        _move(node, location, home, hold, road)
    there = _live_in(home, road.known())
    for parcel, copy in _to_take_back(node, there, road, copies):
        if not is_stored(road.store, parcel.name, parcel.entry, road.passed):
            put(parcel, hold, road, [copy, *_locations_of(parcel.entry, there)])
        if copies.get(copy) == parcel.entry.size:
            _spend(copy, parcel.entry, road)
    return home


def _to_take_back(node: str, there: Sequence[Manifest], road: Road, copies: Mapping[str, int]) -> list[tuple[Parcel, str]]:
    """Files whose plain names are ours, and may hold others' bytes; with names of copies.

    Where names cannot be claimed, two that created one at once have both been told that it was theirs.
    """
    doubtful = () if road.store.is_exclusive else contested(node, there)
    return [*returned(node, there, copies), *((parcel, "") for parcel in doubtful)]


def _live_in(location: str, known: Iterable[saves.Known]) -> list[Manifest]:
    return [k.manifest for k in saves.live(known) if k.manifest.location == location]


def _move(node: str, location: str, home: str, hold: Hold, road: Road) -> None:
    """Say again at home what was said elsewhere, once the bytes are there."""
    known = saves.live(road.known())
    mine = [k for k in known if (k.manifest.node, k.manifest.location) == (node, location)]
    manifest = saves.moved(mine, home, saves.next_n(road.known(), node, home))
    there = [k.manifest for k in known if k.manifest.location == home]
    for parcel in missing(manifest, there):
        if is_stored(road.store, parcel.name, parcel.entry, road.passed):
            continue
        make_room(parcel, road)
        put(parcel, hold, road, _locations_of(parcel.entry, [k.manifest for k in known if k.manifest.location == location]))
    create_record(road.store, manifest)


def _spend(copy: str, entry: FileEntry, road: Road) -> None:
    """Write over a copy that nothing names any more, with another size than `returned` asks for: so it is seen to be of no use."""
    nothing = b"" if entry.size else b"\n"
    road.store.write(copy, [nothing], About(len(nothing)))


def _locations_of(entry: FileEntry, there: Iterable[Manifest]) -> tuple[str, ...]:
    """Names under which a location may hold the bytes of ``entry``."""
    manifests = tuple(there)
    located = [at.name for at in saves.locate(manifests).get(entry.path, ())]
    plain = [file_name(m.run, m.location, entry.path) for m in manifests]
    return tuple(dict.fromkeys([*located, *plain]))
