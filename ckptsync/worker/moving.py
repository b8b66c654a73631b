"""Where a stored save lies, and where it belongs by all manifests that are known by now: what differs is put right.

Nothing is deleted here, since a worker may not be allowed to: what is of no use any more is overwritten with nothing, and left to gc.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ckptsync.records import saves
from ckptsync.records.manifest import FileEntry, Manifest
from ckptsync.records.names import file_name
from ckptsync.stores.contract import About
from ckptsync.worker.content import is_stored
from ckptsync.worker.deciding import Parcel, contested, displaced, missing, returned
from ckptsync.worker.hold import Hold
from ckptsync.worker.send import Road, create_record, make_room, put


def tidy(node: str, place: str, hold: Hold, road: Road, copies: Mapping[str, int]) -> str:
    """See that a stored save lies where all manifests that are known now say; the place it is in afterwards."""
    home = saves.better_place(node, place, road.known())
    if home != place:
        _move(node, place, home, hold, road)
    there = _live_in(home, road)
    for parcel in displaced(node, there, copies):
        put(parcel, hold, road, _places_of(parcel.entry, there))
    _take_back(node, home, hold, road, copies)
    return home


def _take_back(node: str, place: str, hold: Hold, road: Road, copies: Mapping[str, int]) -> None:
    """See that plain names of ours have our bytes, where they may have others'.

    Not while another node sends: a copy may be one that it has made to take the plain name.  Once it has ended, its manifest says so.
    """
    there = _live_in(place, road)
    # where names cannot be claimed, two that created one at once have both been told that it was theirs
    is_due = returned(node, there, copies) or (not road.store.is_exclusive and contested(node, there))
    if not is_due or road.is_contended():
        return
    there = _live_in(place, road)
    for parcel, copy in returned(node, there, copies):
        _restore(parcel, hold, road, [copy])
        _spend(copy, parcel.entry, road)
    for parcel in () if road.store.is_exclusive else contested(node, there):
        _restore(parcel, hold, road, _places_of(parcel.entry, there))


def _live_in(place: str, road: Road) -> list[Manifest]:
    return [k.manifest for k in saves.live(road.known()) if k.manifest.place == place]


def _restore(parcel: Parcel, hold: Hold, road: Road, elsewhere: Iterable[str]) -> None:
    if not is_stored(road.store, parcel.name, parcel.entry, road.passed):
        put(parcel, hold, road, elsewhere)


def _move(node: str, place: str, home: str, hold: Hold, road: Road) -> None:
    """Say again at home what was said elsewhere, once the bytes are there."""
    known = saves.live(road.known())
    mine = [k for k in known if (k.manifest.node, k.manifest.place) == (node, place)]
    manifest = saves.moved(mine, home, saves.next_n(road.known(), node, home))
    there = [k.manifest for k in known if k.manifest.place == home]
    for parcel in missing(manifest, there):
        if is_stored(road.store, parcel.name, parcel.entry, road.passed):
            continue
        make_room(parcel, road)
        put(parcel, hold, road, _places_of(parcel.entry, [k.manifest for k in known if k.manifest.place == place]))
    create_record(road.store, manifest)


def _spend(copy: str, entry: FileEntry, road: Road) -> None:
    """Write over a copy that nothing names any more, with another size than `returned` asks for: so it is seen to be of no use."""
    nothing = b"" if entry.size else b"\n"
    road.store.write(copy, [nothing], About(len(nothing)))


def _places_of(entry: FileEntry, there: Iterable[Manifest]) -> tuple[str, ...]:
    """Names under which a place may hold the bytes of ``entry``."""
    manifests = tuple(there)
    located = [at.name for at in saves.locate(manifests).get(entry.path, ())]
    plain = [file_name(m.run, m.place, entry.path) for m in manifests]
    return tuple(dict.fromkeys([*located, *plain]))
