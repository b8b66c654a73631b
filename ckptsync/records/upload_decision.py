"""What a node still has to send of a save, where it belongs, and whether it may be sent now.

`decide` answers all three from one reading of the store's records (`Reading`) and the draft of the
node's manifest.  Pure: whoever has read the same records decides the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from ckptsync.layouts import file_names
from ckptsync.records import manifest_groups, save_decisions
from ckptsync.records.manifest import FileEntry, Manifest
from ckptsync.records.same_save import SLACK
from ckptsync.records.save_decisions import Tombstone
from ckptsync.walk import Stat

FileKey = tuple[str, int, int]
"""Path, bytes, mtime in ns: a file as it was when it was read."""
KnownDigests = Mapping[FileKey, str]
"""Digests of files of this node."""
NOTHING_READ: KnownDigests = MappingProxyType({})

PlainName = Literal["free", "same", "other"]


@dataclass(frozen=True, slots=True)
class Unsent:
    """A file that this node has still to send.

    ``plain``: what its plain name has, by the manifests of the location: nothing, the same bytes,
    or other bytes.
    """

    entry: FileEntry
    plain: PlainName


@dataclass(frozen=True, slots=True)
class Reading:
    """The records of one checkpoint name, as they were read at one time.

    ``manifests``: those of every location. ``is_contended``: another node has announced that it
    sends files of it. ``at``: when, on this node's clock (ns).
    """

    manifests: Sequence[manifest_groups.StoredManifest]
    is_contended: bool
    at: int


@dataclass(frozen=True, slots=True)
class UploadDecision:
    """What is to be done for a save.

    ``part``: what of the draft this node names in its manifest, with the location where it belongs;
    ``unsent``: the files of it that are still to be sent there.  ``recorded``: a manifest that has
    all of it already.  ``is_early``: only ranks and times tie it to another node's save, and that
    may still turn out wrong.
    """

    part: Manifest
    unsent: tuple[Unsent, ...]
    recorded: Manifest | None
    is_early: bool

    def is_same(self, other: UploadDecision) -> bool:
        """Return whether the same files are to be sent to the same location."""
        paths, others = ({u.entry.path for u in one.unsent} for one in (self, other))
        return paths == others and self.part.location == other.part.location


def decide(draft: Manifest, reading: Reading) -> UploadDecision:
    """Return what is to be done for a save, by what was read of the store's records.

    ``draft`` names all files here, and has the digest of each that some manifest names.
    """
    part, recorded = find_recorded(draft, reading.manifests)
    part = replace(part, location=manifest_groups.choose_location(part, reading.manifests))
    unsent = list_unsent(part, manifest_groups.manifests_in(part.location, reading.manifests))
    return UploadDecision(part, unsent, recorded, is_early(part, reading))


def is_early(part: Manifest, reading: Reading) -> bool:
    """Return whether it is too early to join a save that only ranks and times suggest."""
    until = manifest_groups.doubtful_until(part, reading.manifests)
    return bool(until) and (reading.at - part.clock_offset < until or reading.is_contended)


def part_of(whole: Manifest, files: Iterable[FileEntry]) -> Manifest:
    """Return what ``whole`` says of some of its files: their ranks, and when they were written.

    That time leaves out what was added to the save; of added files alone it is the whole save's.
    """
    named = tuple(sorted(files, key=lambda f: f.path))
    times = [f.mtime for f in named if whole.started <= f.mtime <= whole.ended] or [
        whole.started,
        whole.ended,
    ]
    ranks = file_names.ranks([f.path for f in named])
    return replace(whole, files=named, ranks=ranks, started=min(times), ended=max(times))


def list_unsent(draft: Manifest, there: Sequence[Manifest]) -> tuple[Unsent, ...]:
    """Return the files that are still to be sent to ``draft.location``, small files first.

    The small ones are metadata that says what the shards are. ``there``: the live manifests of that
    location.
    """
    own = {(f.path, f.digest) for m in there if m.node == draft.node for f in m.files}
    plain: dict[str, str] = {}
    for m in sorted(there, key=lambda m: (m.node, m.n)):
        for f in m.files:
            if not f.stored_as:
                plain.setdefault(f.path, f.digest)

    def plain_name(file: FileEntry) -> PlainName:
        return (
            "free"
            if file.path not in plain
            else "same"
            if plain[file.path] == file.digest
            else "other"
        )

    unsent = (Unsent(f, plain_name(f)) for f in draft.files if (f.path, f.digest) not in own)
    return tuple(sorted(unsent, key=lambda u: (u.entry.size, u.entry.path)))


def list_left_behind(
    draft: Manifest, known: Iterable[manifest_groups.StoredManifest]
) -> tuple[str, ...]:
    """Return manifests of its node in other locations that say nothing but what ``draft`` says.

    They say a part of the same save, and were written before it was known to belong here.
    """
    here = {(f.path, f.digest, f.mtime) for f in draft.files}
    locations: dict[str, list[manifest_groups.StoredManifest]] = {}
    for k in known:
        if k.manifest.node == draft.node and k.manifest.location != draft.location:
            locations.setdefault(k.manifest.location, []).append(k)
    names: list[str] = []
    for its in locations.values():
        if here.issuperset((f.path, f.digest, f.mtime) for k in its for f in k.manifest.files):
            names += [k.name for k in its]
    return tuple(sorted(names))


# What the store has already, or has given up.


def find_holder(
    stats: Iterable[Stat],
    node: str,
    manifests: Sequence[Manifest],
    read: KnownDigests = NOTHING_READ,
) -> Manifest | None:
    """Return a manifest of the location that has all of these files by path, size and mtime (ns).

    What ``node`` named itself counts before what all nodes together have: a directory may hold the
    files of several, pulled or copied.  Of another node's file a time without a fraction may be
    chance, and does not count.  ``read``: digests of files whose times differ from those that the
    manifests name.  This is what spares a worker that was started again from reading everything
    again.
    """
    keys = [(s.path, s.size, s.mtime) for s in stats]
    mine = [m for m in manifests if m.node == node]
    found = _covering(keys, node, mine, read) or _covering(keys, node, manifests, read)
    return found or (_covering(_written(keys, node, manifests), node, mine, read) if mine else None)


def find_stored(
    files: Iterable[FileEntry], node: str, manifests: Iterable[Manifest]
) -> Manifest | None:
    """Return a manifest of the location that has all of these files by path and digest.

    That is proof, where `find_holder` is a good guess.
    """
    digests = {f.path: {f.digest} for f in files}
    return next(
        (_of(node, its) for its in _by_location(manifests) if _is_covered(digests, node, its)), None
    )


def find_recorded(
    draft: Manifest, known: Iterable[manifest_groups.StoredManifest]
) -> tuple[Manifest, Manifest | None]:
    """Return the draft less the files of other nodes, and a manifest that has all of it, if any.

    A save with a hook's id is this node's part of that save: the node writes a manifest of its own,
    even where another node has stored the same bytes.  Without an id, or once the node has that
    manifest, files with the same bytes may be copies (pulled, or brought from another node) and
    need no manifest.
    """
    live = [k.manifest for k in manifest_groups.live_manifests(known)]
    written = without_copies(draft, live)
    # where a hook said that they are two saves, the same bytes (random states, a part that did not
    # change) belong to both
    same = [m for m in live if not (m.save and draft.save) or m.save == draft.save]
    ours = [m for m in same if m.node == draft.node and _may_say(m, draft)]
    has_own = not draft.save or any(m.save == draft.save for m in ours)
    recorded = find_stored(draft.files, draft.node, same if has_own else ours)
    if recorded is None:  # the rest are copies of other nodes' files
        recorded = find_stored(written.files, draft.node, ours)
    return written, recorded


def _may_say(manifest: Manifest, draft: Manifest) -> bool:
    """Return whether a manifest of the same node may be of the very save that a hook has marked.

    Without an id it is if it was written before the mark came: of a file that has not changed
    since.  The same bytes alone may be of an attempt before, which was killed.
    """
    if not draft.save or manifest.save == draft.save:
        return True
    its = {(f.path, f.digest, f.mtime) for f in manifest.files}
    return any((f.path, f.digest, f.mtime) in its for f in draft.files)


def without_copies(draft: Manifest, manifests: Iterable[Manifest]) -> Manifest:
    """Return ``draft`` without the files of ranks that another node wrote (`_written`).

    All of it where nothing would be left.
    """
    written = {
        key[0]
        for key in _written([(f.path, f.size, f.mtime) for f in draft.files], draft.node, manifests)
    }
    if not written:
        return draft
    return replace(
        draft,
        files=tuple(f for f in draft.files if f.path in written),
        ranks=file_names.ranks(written),
    )


def _written(files: Sequence[FileKey], node: str, manifests: Iterable[Manifest]) -> list[FileKey]:
    """Return the files without those of ranks that another node wrote.

    Those are shards that were pulled, or copied, so that a training can resume. A rank is one
    process on one node.  If all that is here of a rank are another node's files, by path, size and
    mtime (a time without a fraction may be chance), then this node has written nothing of that
    rank.  In a save that was written over the copies they would be a mixture.
    """
    theirs = {
        (f.path, f.size, f.mtime)
        for m in manifests
        if m.node != node
        for f in m.files
        if f.mtime % 10**9
    }
    ranks = {key: file_names.rank(key[0]) for key in files}
    own = {ranks[key] for key in files if key not in theirs}
    return [key for key in files if ranks[key] is None or ranks[key] in own]


def has_other_part(
    stats: Iterable[Stat], node: str, offset: int, manifests: Iterable[Manifest]
) -> bool:
    """Return whether another node has stored its part of the save that wrote these files.

    None of the files may be newer than that save. ``offset``: this node's clock minus the store's,
    ns.
    """
    times = [s.mtime - offset for s in stats]
    return bool(times) and any(
        m.started - m.clock_offset - SLACK <= max(times) <= m.ended - m.clock_offset + SLACK
        for m in manifests
        if m.node != node
    )


def is_retired(
    node: str,
    stats: Iterable[Stat],
    buried: Mapping[str, tuple[Tombstone, float]],
    known: Iterable[manifest_groups.StoredManifest],
) -> bool:
    """Return whether these very files were given up, or come later to a save that was.

    ``buried``: tombstones of this checkpoint, and when they came (store's clock).  Where gc has
    already removed the manifest that a tombstone names, time decides: a save that ended before, by
    this node's own clock, was the one meant.
    """
    seen = tuple(stats)
    manifests = {k.name: k.manifest for k in known}
    force: dict[str, Tombstone] = {}
    for location in {stone.location for stone, _ in buried.values()}:
        force |= save_decisions.tombstones_in_force(
            {name: stone for name, (stone, _) in buried.items() if stone.location == location}
        )
    named = {name for stone in force.values() for name in stone.manifests}
    given_up = [m for name, m in manifests.items() if name in named]
    if find_holder(seen, node, given_up):
        return True
    # more files of it, and none is another by the same name
    for manifest in (m for m in given_up if m.node == node):
        files = {f.path: (f.size, f.mtime) for f in manifest.files}
        same = [files[s.path] == (s.size, s.mtime) for s in seen if s.path in files]
        if same and all(same):
            return True
    ended = max((s.mtime for s in seen), default=0)
    mine = f"/manifest-{node}-"
    lost = (
        (name, t)
        for name, t in force.items()
        if any(mine in m and m not in manifests for m in t.manifests)
    )
    return any(
        ended <= t.ended[node] if node in t.ended else ended < buried[name][1] * 1e9
        for name, t in lost
    )


def list_doubtful_names(
    node: str, location: str, known: Iterable[manifest_groups.StoredManifest], *, is_exclusive: bool
) -> frozenset[str]:
    """Return the names of this node's stored files that may have another node's bytes.

    Another node names the same stored file with another digest.  Where the store cannot create a
    name exclusively, any plain name of a path that two nodes name with two digests may have been
    written by both.  ``is_exclusive``: whether it can.
    """
    here = manifest_groups.manifests_in(location, known)
    contested = manifest_groups.contested_names(here)
    digests: dict[str, set[str]] = {}
    for f in (f for m in here for f in m.files):
        digests.setdefault(f.path, set()).add(f.digest)
    mine = ((m.stored_name(f), f) for m in here if m.node == node for f in m.files)
    several = {path for path, its in digests.items() if len(its) > 1 and not is_exclusive}
    return frozenset(
        name for name, f in mine if name in contested or (f.path in several and not f.stored_as)
    )


def _covering(
    keys: Sequence[FileKey], node: str, manifests: Iterable[Manifest], read: KnownDigests
) -> Manifest | None:
    """Return a manifest of the first location by name that has all of these files."""
    for its in _by_location(manifests):
        digests = {key[0]: {read[key]} if key in read else set() for key in keys}
        every = set(keys)
        for m in its:
            for f in m.files:
                if (f.path, f.size, f.mtime) in every and (m.node == node or f.mtime % 10**9):
                    digests[f.path].add(f.digest)
        if _is_covered(digests, node, its):
            return _of(node, its)
    return None


def _is_covered(
    files: Mapping[str, Collection[str]], node: str, location: Iterable[Manifest]
) -> bool:
    """Return whether files are what a pull of a location gives.

    To everybody, or to one of its nodes, whose own content of a path comes first. ``files``: path →
    digests, one of which it has.  A node that has named files there has no other node's content of
    a path: that it has still has to be recorded.
    """
    if not files or not all(files.values()):
        return False
    named: dict[str, dict[str, str]] = {}
    claims = ((f, m.node, m.n) for m in location for f in m.files)
    for f, name, _ in sorted(claims, key=lambda c: (bool(c[0].stored_as), c[1], c[2])):
        named.setdefault(f.path, {}).setdefault(name, f.digest)
    if not files.keys() <= named.keys():
        return False
    nodes = {n for digests in named.values() for n in digests}
    return any(
        all(
            named[path].get(one, next(iter(named[path].values()))) in digests
            for path, digests in files.items()
        )
        for one in ("", *((node,) if node in nodes else sorted(nodes)))
    )


def _of(node: str, manifests: Sequence[Manifest]) -> Manifest:
    """Return the last manifest of a node, or of whom there is."""
    return next((m for m in reversed(manifests) if m.node == node), manifests[-1])


def _by_location(manifests: Iterable[Manifest]) -> list[list[Manifest]]:
    locations: dict[str, list[Manifest]] = {}
    for m in manifests:
        locations.setdefault(m.location, []).append(m)
    return [its for _, its in sorted(locations.items())]
