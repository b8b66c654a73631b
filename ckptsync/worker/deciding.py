"""What to send, where it belongs, and what need not be sent.  Pure: from manifests, listings and a take to plans."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ckptsync.records import fate, saves
from ckptsync.records.manifest import FileEntry, Manifest
from ckptsync.records.names import node_file_name
from ckptsync.records.tombstone import Tombstone
from ckptsync.walk import Stat
from ckptsync.worker.take import Taken


@dataclass(frozen=True, slots=True)
class Parcel:
    """One file and the name it belongs under.

    ``is_bound``: another manifest vouches for these bytes under that name.  ``is_shared``: other nodes may be writing that name,
    too, and nothing says yet whose it is.  ``moves``: names that the bytes of another node must be copied to before.
    """

    entry: FileEntry
    name: str
    is_bound: bool = False
    is_shared: bool = False
    moves: tuple[tuple[str, FileEntry], ...] = ()


def draft(told: Manifest, taken: Taken) -> Manifest:
    """A manifest of all that was taken; run, checkpoint, node and save are as in ``told``, place and number are still open."""
    return replace(
        told,
        files=taken.files,
        ranks=taken.ranks,
        started=taken.started,
        ended=taken.ended,
        demands=taken.demands,
        sources=taken.sources,
    )


def span(files: Iterable[FileEntry], whole: Manifest) -> tuple[int, int]:
    """The first and the last mtime of some files of a take (ns), but for those that are older than it: a hook added them."""
    every = [f.mtime for f in files]
    times = [at for at in every if whole.started <= at <= whole.ended] or every
    return min(times), max(times)


def holder(stats: Iterable[Stat], manifests: Iterable[Manifest]) -> Manifest | None:
    """A manifest of the node and place that hold exactly these files already, by path, size and mtime (ns).

    This is what spares a worker that was started again from reading everything again.
    """
    return _covering({(s.path, s.size, s.mtime) for s in stats}, manifests, lambda f: (f.path, f.size, f.mtime))


def stored(files: Iterable[FileEntry], manifests: Iterable[Manifest]) -> Manifest | None:
    """The same by path and digest: proof, where `holder` is a good guess."""
    return _covering({(f.path, f.digest) for f in files}, manifests, lambda f: (f.path, f.digest))


def left_behind(planned: Manifest, known: Iterable[saves.Known]) -> tuple[str, ...]:
    """Manifests of its node in other places that say nothing but what ``planned`` says: part of the same take, sent before it was known to belong here."""
    wanted = {(f.path, f.digest, f.mtime) for f in planned.files}
    places: dict[str, list[saves.Known]] = {}
    for k in known:
        if k.manifest.node == planned.node and k.manifest.place != planned.place:
            places.setdefault(k.manifest.place, []).append(k)
    of_it = (
        its for its in places.values() if wanted.issuperset((f.path, f.digest, f.mtime) for k in its for f in k.manifest.files)
    )
    return tuple(sorted(k.name for its in of_it for k in its))


def missing(planned: Manifest, there: Sequence[Manifest]) -> tuple[Parcel, ...]:
    """What this take has still to send to ``planned.place``, small files first: metadata that says what the shards are.

    ``there``: the live manifests of that place.
    """
    own = {(f.path, f.digest) for m in there if m.node == planned.node for f in m.files}
    fresh = replace(planned, files=tuple(f for f in planned.files if (f.path, f.digest) not in own))
    before = saves.locate(there)
    after = saves.locate([*there, fresh])
    parcels = (_parcel(entry, fresh, before.get(entry.path, ()), after[entry.path]) for entry in fresh.files)
    return tuple(sorted(parcels, key=lambda p: (p.entry.size, p.entry.path)))


def displaced(node: str, there: Sequence[Manifest], copies: Mapping[str, int]) -> tuple[Parcel, ...]:
    """Files of this node that now belong beside the checkpoint, since a smaller node named them with other bytes, and are not there."""
    located = (at for every in saves.locate(there).values() for at in every[1:])
    return tuple(Parcel(at.entry, at.name) for at in located if at.nodes == (node,) and copies.get(at.name) != at.entry.size)


def returned(node: str, there: Sequence[Manifest], copies: Mapping[str, int]) -> tuple[tuple[Parcel, str], ...]:
    """Files of this node that belong under their plain names again, since the node that displaced them has left: with their copies.

    A copy of another size has served its time, and waits for gc.
    """
    located = [every[0] for every in saves.locate(there).values() if node in every[0].nodes]
    run, place = (there[0].run, there[0].place) if there else ("", "")
    found = ((at, node_file_name(run, place, node, at.entry.path)) for at in located)
    return tuple((Parcel(at.entry, at.name), copy) for at, copy in found if copies.get(copy) == at.entry.size)


def contested(node: str, there: Sequence[Manifest]) -> tuple[Parcel, ...]:
    """Files of this node that others have named with other bytes."""
    located = (at for every in saves.locate(there).values() if len(every) > 1 for at in every)
    return tuple(Parcel(at.entry, at.name) for at in located if node in at.nodes)


def has_mate(stats: Iterable[Stat], node: str, offset: int, manifests: Iterable[Manifest]) -> bool:
    """Whether another node has stored its part of the save that wrote these files, none of which may be newer than that save.

    ``offset``: this node's clock minus the store's, ns.
    """
    times = [s.mtime - offset for s in stats]
    return bool(times) and any(
        m.started - m.clock_offset - saves.SLACK <= max(times) <= m.ended - m.clock_offset + saves.SLACK
        for m in manifests
        if m.node != node
    )


def is_retired(
    told: Manifest, stats: Iterable[Stat], buried: Mapping[str, tuple[Tombstone, float]], known: Iterable[saves.Known]
) -> bool:
    """Whether these very files were given up.  ``buried``: tombstones of this checkpoint, and when they came (store's clock).

    So are files that come later to what was given up.  Where gc has already removed the manifest that a tombstone names, time decides: a save
    that ended before, by this node's own clock, was the one meant.
    """
    seen = tuple(stats)
    manifests = {k.name: k.manifest for k in known}
    force = _in_force({name: stone for name, (stone, _) in buried.items()})
    named = {name for stone in force.values() for name in stone.manifests}
    given_up = [m for name, m in manifests.items() if name in named]
    if holder(seen, given_up) or any(_is_more_of(seen, m) for m in given_up if m.node == told.node):
        return True
    ended = max((s.mtime for s in seen), default=0)
    mine = f"/manifest-{told.node}-"
    lost = ((name, t) for name, t in force.items() if any(mine in m and m not in manifests for m in t.manifests))
    return any(ended <= t.ended[told.node] if told.node in t.ended else ended < buried[name][1] * 1e9 for name, t in lost)


def _in_force(stones: Mapping[str, Tombstone]) -> dict[str, Tombstone]:
    places = {t.place for t in stones.values()}
    by_place = ({name: t for name, t in stones.items() if t.place == place} for place in places)
    return {name: t for its in by_place for name, t in fate.in_force(its).items()}


def _is_more_of(seen: Iterable[Stat], given_up: Manifest) -> bool:
    """Whether some of the files are those of a manifest, and none is another by the same name."""
    named = {f.path: (f.size, f.mtime) for f in given_up.files}
    both = [named[s.path] == (s.size, s.mtime) for s in seen if s.path in named]
    return bool(both) and all(both)


def _covering(wanted: set[Hashable], manifests: Iterable[Manifest], key: Callable[[FileEntry], Hashable]) -> Manifest | None:
    bound: dict[tuple[str, str], set[Hashable]] = {}
    last: dict[tuple[str, str], Manifest] = {}
    for m in manifests:
        bound.setdefault((m.place, m.node), set()).update(key(f) for f in m.files)
        last[m.place, m.node] = m
    found = [at for at, files in bound.items() if wanted and wanted <= files]
    return last[min(found)] if found else None


def _parcel(entry: FileEntry, fresh: Manifest, before: Sequence[saves.Located], after: Sequence[saves.Located]) -> Parcel:
    mine = next(at for at in after if fresh.node in at.nodes and at.entry.digest == entry.digest)
    if not before:
        return Parcel(entry, mine.name, is_shared=True)
    owner = before[0]
    if owner.name != mine.name or owner.entry.digest == entry.digest:
        return Parcel(entry, mine.name, is_bound=any((at.name, at.entry.digest) == (mine.name, entry.digest) for at in before))
    moves = ((node_file_name(fresh.run, fresh.place, node, entry.path), owner.entry) for node in owner.nodes)
    return Parcel(entry, mine.name, moves=tuple(sorted(moves)))
