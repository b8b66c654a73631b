"""One file where it belongs: made of what this node holds, or of what the store has under another name; and others' bytes out of its way first."""

from __future__ import annotations

from collections.abc import Iterable

from ckptsync.errors import Incomplete
from ckptsync.records.manifest import FileEntry
from ckptsync.worker.content import Source, Stored, is_stored
from ckptsync.worker.deciding import Parcel
from ckptsync.worker.hold import Held, Hold
from ckptsync.worker.road import Road


def make_room(parcel: Parcel, road: Road) -> None:
    """Larger nodes' bytes lie under a name that becomes ours: they are copied to their own names before they are replaced.

    If they are not there, they are lost, or an earlier try of ours has replaced them: those nodes see them missing, and send again.
    """
    for target, entry in parcel.moves:
        if not is_stored(road.store, target, entry, road.passed):
            copy_within(
                Parcel(entry, target), road, [parcel.name, *(name for name, other in parcel.moves if other.digest == entry.digest)]
            )


def copy_within(parcel: Parcel, road: Road, elsewhere: Iterable[str]) -> bool:
    """Whether one of the names had its bytes, and it has them now, too."""
    for name in elsewhere:
        if name != parcel.name and is_stored(road.store, name, parcel.entry, road.passed):
            copy = Stored(road.store, name, parcel.entry, road.node, road.passed)
            road.store.write(parcel.name, copy, copy.about)
            return True
    return False


def put(parcel: Parcel, hold: Hold, road: Road, elsewhere: Iterable[str]) -> None:
    """Write a file from what this node holds, or from where the store has the same bytes; raises Incomplete if neither."""
    held = hold.held.get(parcel.entry.path)
    if held is not None and _is_it(held, parcel.entry, road):
        source = Source(held, road.node, parcel.entry, road.passed)
        road.store.write(parcel.name, source, source.about)
        return
    if not copy_within(parcel, road, elsewhere):
        raise Incomplete(f"{parcel.name}: neither this node nor the store holds its bytes any more", hint="verify the checkpoint")


def _is_it(held: Held, entry: FileEntry, road: Road) -> bool:
    """Whether a file of ours has the bytes of an entry, which may be another node's with the same bytes, and other times."""
    if held.stat.size != entry.size or held.stat.mtime == entry.mtime:
        return held.stat.size == entry.size
    return Source(held, road.node, passed=lambda _: road.passed(0)).digested().digest == entry.digest
