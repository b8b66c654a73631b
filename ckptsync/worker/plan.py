"""What to send, and what need not be sent.  Pure: from manifests and a take to plans."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from ckptsync.layouts import rank_names
from ckptsync.records import saves, tombstone
from ckptsync.records.manifest import FileEntry, Manifest
from ckptsync.records.tombstone import Tombstone
from ckptsync.walk import Stat
from ckptsync.worker.snapshot import Taken

FileKey = tuple[str, int, int]
"""Path, bytes, mtime in ns: a file as it was when it was read."""
Read = Mapping[FileKey, str]
"""Digests of files of this node."""
NOTHING_READ: Read = MappingProxyType({})


Lies = Literal["nowhere", "there", "taken"]


@dataclass(frozen=True, slots=True)
class Unsent:
    """A file that this node has still to send.

    ``lies``: what manifests of the location say of its plain name: nothing, that it holds these bytes, or that it holds other bytes.
    """

    entry: FileEntry
    lies: Lies


def draft(told: Manifest, taken: Taken) -> Manifest:
    """A manifest of all that was taken; run, checkpoint, node and save are as in ``told``, location and number are still open."""
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
    """Return the first and the last mtime of some files of a take (ns), but for what was added to it; of that alone the take's own span."""
    times = [f.mtime for f in files if whole.started <= f.mtime <= whole.ended]
    return (min(times), max(times)) if times else (whole.started, whole.ended)


def holder(stats: Iterable[Stat], node: str, manifests: Sequence[Manifest], read: Read = NOTHING_READ) -> Manifest | None:
    """Return a manifest of the location that holds all of these files already, each with the same path, size and mtime (ns).

    What ``node`` named itself counts before what all nodes together have: a directory may hold the files of several, pulled or copied.  Of another node's file
    a time without a fraction may be chance, and does not count.  ``read``: digests of files whose times differ from
    those that the manifests name.  This is what spares a worker that was started again from reading everything again.
    """
    wanted = [(s.path, s.size, s.mtime) for s in stats]
    mine = [m for m in manifests if m.node == node]
    found = _covering(wanted, node, mine, read) or _covering(wanted, node, manifests, read)
    return found or (_covering(_written(wanted, node, manifests), node, mine, read) if mine else None)


def stored(files: Iterable[FileEntry], node: str, manifests: Iterable[Manifest]) -> Manifest | None:
    """Return a manifest of the location that holds all of these files by path and digest: proof, where `holder` is a good guess."""
    wanted = {f.path: {f.digest} for f in files}
    return next((_of(node, its) for _, its in _by_location(manifests) if _is_covered(wanted, node, its)), None)


def part(whole: Manifest, files: Iterable[FileEntry]) -> Manifest:
    """Return what ``whole`` says of some of its files: their ranks, and the time in which they were written."""
    named = tuple(sorted(files, key=lambda f: f.path))
    first, last = span(named, whole)
    return replace(whole, files=named, ranks=rank_names.ranks([f.path for f in named]), started=first, ended=last)


def without_copies(planned: Manifest, manifests: Iterable[Manifest]) -> Manifest:
    """Return ``planned`` without the files of ranks that another node wrote (`_written`); all of it where nothing would be left."""
    kept = {key[0] for key in _written([(f.path, f.size, f.mtime) for f in planned.files], planned.node, manifests)}
    if not kept:
        return planned
    return replace(planned, files=tuple(f for f in planned.files if f.path in kept), ranks=rank_names.ranks(kept))


def _written(files: Sequence[FileKey], node: str, manifests: Iterable[Manifest]) -> list[FileKey]:
    """Return the files but for those of ranks that another node wrote: shards that were pulled, or copied, so that a training can resume.

    A rank is one process on one node.  If all that is here of a rank are another node's files, by path, size and mtime (a time without a fraction may be
    chance), then this node has written nothing of that rank.  In a save that was written over the copies they would be a mixture.
    """
    theirs = {(f.path, f.size, f.mtime) for m in manifests if m.node != node for f in m.files if f.mtime % 10**9}
    ranks = {key: rank_names.rank(key[0]) for key in files}
    own = {ranks[key] for key in files if key not in theirs}
    return [key for key in files if ranks[key] is None or ranks[key] in own]


def left_behind(planned: Manifest, known: Iterable[saves.Known]) -> tuple[str, ...]:
    """Manifests of its node in other locations that say nothing but what ``planned`` says: part of the same take, sent before it was known to belong here."""
    wanted = {(f.path, f.digest, f.mtime) for f in planned.files}
    locations: dict[str, list[saves.Known]] = {}
    for k in known:
        if k.manifest.node == planned.node and k.manifest.location != planned.location:
            locations.setdefault(k.manifest.location, []).append(k)
    of_it = (
        its for its in locations.values() if wanted.issuperset((f.path, f.digest, f.mtime) for k in its for f in k.manifest.files)
    )
    return tuple(sorted(k.name for its in of_it for k in its))


def missing(planned: Manifest, there: Sequence[Manifest]) -> tuple[Unsent, ...]:
    """Return what this take has still to send to ``planned.location``, small files first: metadata that says what the shards are.

    ``there``: the live manifests of that location.
    """
    own = {(f.path, f.digest) for m in there if m.node == planned.node for f in m.files}
    plain: dict[str, str] = {}
    for m in sorted(there, key=lambda m: (m.node, m.n)):
        for f in m.files:
            if not f.stored_as:
                plain.setdefault(f.path, f.digest)

    def lies(file: FileEntry) -> Lies:
        return "nowhere" if file.path not in plain else "there" if plain[file.path] == file.digest else "taken"

    unsent = (Unsent(f, lies(f)) for f in planned.files if (f.path, f.digest) not in own)
    return tuple(sorted(unsent, key=lambda u: (u.entry.size, u.entry.path)))


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
    node: str, stats: Iterable[Stat], buried: Mapping[str, tuple[Tombstone, float]], known: Iterable[saves.Known]
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
    if holder(seen, node, given_up) or any(_is_more_of(seen, m) for m in given_up if m.node == node):
        return True
    ended = max((s.mtime for s in seen), default=0)
    mine = f"/manifest-{node}-"
    lost = ((name, t) for name, t in force.items() if any(mine in m and m not in manifests for m in t.manifests))
    return any(ended <= t.ended[node] if node in t.ended else ended < buried[name][1] * 1e9 for name, t in lost)


def _in_force(stones: Mapping[str, Tombstone]) -> dict[str, Tombstone]:
    locations = {t.location for t in stones.values()}
    by_location = ({name: t for name, t in stones.items() if t.location == location} for location in locations)
    return {name: t for its in by_location for name, t in tombstone.in_force(its).items()}


def _is_more_of(seen: Iterable[Stat], given_up: Manifest) -> bool:
    """Whether some of the files are those of a manifest, and none is another by the same name."""
    named = {f.path: (f.size, f.mtime) for f in given_up.files}
    both = [named[s.path] == (s.size, s.mtime) for s in seen if s.path in named]
    return bool(both) and all(both)


def _covering(wanted: Sequence[FileKey], node: str, manifests: Iterable[Manifest], read: Read) -> Manifest | None:
    """Return a manifest of the first location by name that has all."""
    for _, its in _by_location(manifests):
        digests = {key[0]: {read[key]} if key in read else set() for key in wanted}
        keys = set(wanted)
        for m in its:
            for f in m.files:
                if (f.path, f.size, f.mtime) in keys and (m.node == node or f.mtime % 10**9):
                    digests[f.path].add(f.digest)
        if _is_covered(digests, node, its):
            return _of(node, its)
    return None


def _is_covered(wanted: Mapping[str, Collection[str]], node: str, location: Iterable[Manifest]) -> bool:
    """Whether some files are what a pull of a location gives: for everybody, or for one of its nodes, whose own content of a path comes before the others'.

    ``wanted``: path → digests, one of which it has.  A node that has named files there has no other's: that it has another's content of a path has still to be said.
    """
    if not wanted or not all(wanted.values()):
        return False
    named: dict[str, dict[str, str]] = {}
    claims = ((f, m.node, m.n) for m in location for f in m.files)
    for f, name, _ in sorted(claims, key=lambda c: (bool(c[0].stored_as), c[1], c[2])):
        named.setdefault(f.path, {}).setdefault(name, f.digest)
    if not wanted.keys() <= named.keys():
        return False
    nodes = {n for digests in named.values() for n in digests}
    return any(
        all(named[path].get(one, next(iter(named[path].values()))) in digests for path, digests in wanted.items())
        for one in ("", *((node,) if node in nodes else sorted(nodes)))
    )


def _of(node: str, manifests: Sequence[Manifest]) -> Manifest:
    """The last one of a node, or of whom there is."""
    return next((m for m in reversed(manifests) if m.node == node), manifests[-1])


def _by_location(manifests: Iterable[Manifest]) -> list[tuple[str, list[Manifest]]]:
    locations: dict[str, list[Manifest]] = {}
    for m in manifests:
        locations.setdefault(m.location, []).append(m)
    return sorted(locations.items())
