"""What a node still has to send of a save, where it belongs, and whether it may be sent now.

Nodes upload parts of one save without talking to each other, and files may be in the store already:
sent before a kill, by another node, or pulled from it. `decide` answers all three questions from
one reading of the store's records (`Reading`) and the draft of the node's manifest. Pure: whoever
has read the same records decides the same.
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

    ``plain``: whether its plain name has no file, the same bytes, or other bytes, by the location's
    manifests.
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
    """What a node has to do for a save.

    ``part``: what of the draft the node names in its manifest, in the location where it belongs;
    ``unsent``: its files that are still to be sent there. ``recorded``: a manifest that already has
    all of it. ``is_early``: only ranks and times link it to another node's save, which may turn out
    wrong.
    """

    part: Manifest
    unsent: tuple[Unsent, ...]
    recorded: Manifest | None
    is_early: bool

    def is_same(self, other: UploadDecision) -> bool:
        """Return whether another decision sends the same paths to the same location."""
        paths, other_paths = ({u.entry.path for u in decision.unsent} for decision in (self, other))
        return paths == other_paths and self.part.location == other.part.location


def decide(draft: Manifest, reading: Reading) -> UploadDecision:
    """Return what to do for a save, by one reading of the store's records.

    ``draft`` names all files of the node, with the digest of each that some manifest names.
    """
    part, recorded = find_recorded(draft, reading.manifests)
    part = replace(part, location=manifest_groups.choose_location(part, reading.manifests))
    unsent = list_unsent(part, manifest_groups.manifests_in(part.location, reading.manifests))
    return UploadDecision(part, unsent, recorded, is_early(part, reading))


def is_early(part: Manifest, reading: Reading) -> bool:
    """Return whether ``part`` may not be added yet to the save that ranks and times suggest.

    That is so until `doubtful_until`, and for as long as another node announces an upload.
    """
    until = manifest_groups.doubtful_until(part, reading.manifests)
    return bool(until) and (reading.at - part.clock_offset < until or reading.is_contended)


def part_of(whole: Manifest, files: Iterable[FileEntry]) -> Manifest:
    """Return ``whole`` reduced to ``files``, with their ranks and the time span of their mtimes.

    Files with an mtime outside the save's span, which were added, do not count for the span; of
    added files alone it is the whole save's.
    """
    entries = tuple(sorted(files, key=lambda f: f.path))
    times = [f.mtime for f in entries if whole.started <= f.mtime <= whole.ended] or [
        whole.started,
        whole.ended,
    ]
    ranks = file_names.ranks([f.path for f in entries])
    return replace(whole, files=entries, ranks=ranks, started=min(times), ended=max(times))


def list_unsent(draft: Manifest, stored: Sequence[Manifest]) -> tuple[Unsent, ...]:
    """Return the files of ``draft`` that this node has not named in the location, small ones first.

    A file counts as named with its digest. Small files are metadata that says what the shards are.
    ``stored``: the live manifests of ``draft.location``.
    """
    own_files = {(f.path, f.digest) for m in stored if m.node == draft.node for f in m.files}
    plain_digests: dict[str, str] = {}
    for m in sorted(stored, key=lambda m: (m.node, m.n)):
        for f in m.files:
            if not f.stored_as:
                plain_digests.setdefault(f.path, f.digest)

    def plain_name(file: FileEntry) -> PlainName:
        """Return what the plain name of a file has, by the first manifest that names it."""
        return (
            "free"
            if file.path not in plain_digests
            else "same"
            if plain_digests[file.path] == file.digest
            else "other"
        )

    unsent = (Unsent(f, plain_name(f)) for f in draft.files if (f.path, f.digest) not in own_files)
    return tuple(sorted(unsent, key=lambda u: (u.entry.size, u.entry.path)))


def list_left_behind(
    draft: Manifest, stored_manifests: Iterable[manifest_groups.StoredManifest]
) -> tuple[str, ...]:
    """Return the names of this node's manifests elsewhere that name only files of ``draft``.

    Path, digest and mtime must match, for all its manifests of a location. They name a part of the
    same save, and were written before it was known to belong here.
    """
    draft_files = {(f.path, f.digest, f.mtime) for f in draft.files}
    locations: dict[str, list[manifest_groups.StoredManifest]] = {}
    for k in stored_manifests:
        if k.manifest.node == draft.node and k.manifest.location != draft.location:
            locations.setdefault(k.manifest.location, []).append(k)
    names: list[str] = []
    for manifests in locations.values():
        if draft_files.issuperset(
            (f.path, f.digest, f.mtime) for k in manifests for f in k.manifest.files
        ):
            names += [k.name for k in manifests]
    return tuple(sorted(names))


# What the store has already, or has given up.


def find_holder(
    stats: Iterable[Stat],
    node: str,
    manifests: Sequence[Manifest],
    known_digests: KnownDigests = NOTHING_READ,
) -> Manifest | None:
    """Return a manifest of a location that has all of these files by path, size and mtime (ns).

    None if no location has, or there are no files. What ``node`` named itself counts first, then
    what all nodes together have (a directory may hold files of several nodes, pulled or copied),
    then what ``node`` has without the files of other nodes' ranks. A file of another node whose
    time has no fraction does not count, since that may be chance. ``known_digests``: digests of
    files that were read because their times differ from the manifests'.
    """
    keys = [(s.path, s.size, s.mtime) for s in stats]
    own_manifests = [m for m in manifests if m.node == node]
    holder = _find_covering(keys, node, own_manifests, known_digests) or _find_covering(
        keys, node, manifests, known_digests
    )
    return holder or (
        _find_covering(_files_written_by(keys, node, manifests), node, own_manifests, known_digests)
        if own_manifests
        else None
    )


def find_stored(
    files: Iterable[FileEntry], node: str, manifests: Iterable[Manifest]
) -> Manifest | None:
    """Return a manifest of a location that has all these files by path and digest, or None.

    It is the last of ``node`` there if there is one. That is proof, where `find_holder` is a good
    guess.
    """
    digests = {f.path: {f.digest} for f in files}
    return next(
        (
            _last_manifest(node, manifests_here)
            for manifests_here in _by_location(manifests)
            if _is_covered(digests, node, manifests_here)
        ),
        None,
    )


def find_recorded(
    draft: Manifest, stored_manifests: Iterable[manifest_groups.StoredManifest]
) -> tuple[Manifest, Manifest | None]:
    """Return the draft without other nodes' files, and a manifest that has all of it, or None.

    A save with a hook's id is this node's part of that save: the node writes a manifest of its own,
    even if another node has stored the same bytes. Without an id, or once the node has that
    manifest, files with the same bytes may be copies (pulled, or brought from another node) and
    need no manifest.
    """
    live = [k.manifest for k in manifest_groups.live_manifests(stored_manifests)]
    own_part = without_copies(draft, live)
    # where a hook said that they are two saves, the same bytes (random states, a part that did not
    # change) belong to both
    of_this_save = [m for m in live if not (m.save and draft.save) or m.save == draft.save]
    own_manifests = [m for m in of_this_save if m.node == draft.node and _may_be_of_save(m, draft)]
    has_own = not draft.save or any(m.save == draft.save for m in own_manifests)
    recorded = find_stored(draft.files, draft.node, of_this_save if has_own else own_manifests)
    if recorded is None:  # the rest are copies of other nodes' files
        recorded = find_stored(own_part.files, draft.node, own_manifests)
    return own_part, recorded


def _may_be_of_save(manifest: Manifest, draft: Manifest) -> bool:
    """Return whether a manifest of the same node may be of the save of ``draft``.

    It may if ``draft`` has no id, or both have the same. Else some file must be the same by path,
    digest and mtime: it was stored before the hook marked the save. The same bytes alone may be of
    an earlier attempt, which was killed.
    """
    if not draft.save or manifest.save == draft.save:
        return True
    manifest_files = {(f.path, f.digest, f.mtime) for f in manifest.files}
    return any((f.path, f.digest, f.mtime) in manifest_files for f in draft.files)


def without_copies(draft: Manifest, manifests: Iterable[Manifest]) -> Manifest:
    """Return ``draft`` without the files of ranks that another node wrote; all if none is left.

    Its ``ranks`` are then those of the files that are left. `_files_written_by` says which files
    go.
    """
    written = {
        key[0]
        for key in _files_written_by(
            [(f.path, f.size, f.mtime) for f in draft.files], draft.node, manifests
        )
    }
    if not written:
        return draft
    return replace(
        draft,
        files=tuple(f for f in draft.files if f.path in written),
        ranks=file_names.ranks(written),
    )


def _files_written_by(
    files: Sequence[FileKey], node: str, manifests: Iterable[Manifest]
) -> list[FileKey]:
    """Return ``files`` without those of ranks that another node wrote.

    Such files are shards that were pulled, or copied, so that a training can resume. A rank is one
    process on one node. So if all files of a rank are another node's by path, size and mtime (a
    time without a fraction may be chance), ``node`` has written nothing of that rank; in a save
    that was written over the copies they would be a mixture.
    """
    files_of_others = {
        (f.path, f.size, f.mtime)
        for m in manifests
        if m.node != node
        for f in m.files
        if f.mtime % 10**9
    }
    ranks = {key: file_names.rank(key[0]) for key in files}
    own_ranks = {ranks[key] for key in files if key not in files_of_others}
    return [key for key in files if ranks[key] is None or ranks[key] in own_ranks]


def has_other_part(
    stats: Iterable[Stat], node: str, offset: int, manifests: Iterable[Manifest]
) -> bool:
    """Return whether another node has stored its part of the save that wrote these files.

    The newest of ``stats`` must lie within the time span of that node's manifest, or `SLACK` of it;
    False without ``stats``. ``offset``: this node's clock minus the store's, ns.
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
    tombstones: Mapping[str, tuple[Tombstone, float]],
    stored_manifests: Iterable[manifest_groups.StoredManifest],
) -> bool:
    """Return whether these files, or a save that they are added to, were given up.

    ``tombstones``: those of this checkpoint's name, with the mtime of each in seconds on the
    store's clock; withdrawn ones do not count, those of shards do. If a tombstone names a manifest
    of this node that is deleted, time decides: a save that ended no later than the tombstone says
    of this node, or before the tombstone's mtime if it says nothing, was meant.
    """
    files_now = tuple(stats)
    manifests = {k.name: k.manifest for k in stored_manifests}
    in_force: dict[str, Tombstone] = {}
    for location in {stone.location for stone, _ in tombstones.values()}:
        in_force |= save_decisions.tombstones_in_force(
            {name: stone for name, (stone, _) in tombstones.items() if stone.location == location}
        )
    given_up_names = {name for stone in in_force.values() for name in stone.manifests}
    given_up = [m for name, m in manifests.items() if name in given_up_names]
    if find_holder(files_now, node, given_up):
        return True
    # more files of it, and none is another by the same name
    for manifest in (m for m in given_up if m.node == node):
        files = {f.path: (f.size, f.mtime) for f in manifest.files}
        same = [files[s.path] == (s.size, s.mtime) for s in files_now if s.path in files]
        if same and all(same):
            return True
    ended = max((s.mtime for s in files_now), default=0)
    own_prefix = f"/manifest-{node}-"
    without_manifest = (
        (name, tombstone)
        for name, tombstone in in_force.items()
        if any(own_prefix in m and m not in manifests for m in tombstone.manifests)
    )
    return any(
        ended <= tombstone.ended[node]
        if node in tombstone.ended
        else ended < tombstones[name][1] * 1e9
        for name, tombstone in without_manifest
    )


def list_doubtful_names(
    node: str,
    location: str,
    stored_manifests: Iterable[manifest_groups.StoredManifest],
    *,
    is_exclusive: bool,
) -> frozenset[str]:
    """Return the names of this node's stored files that may have another node's bytes.

    Another node names the same stored file with another digest. If the store cannot create a name
    exclusively (``is_exclusive`` is false), any plain name of a path that two nodes name with two
    digests may have been written by both. Only live manifests of ``location`` count.
    """
    manifests_here = manifest_groups.manifests_in(location, stored_manifests)
    contested = manifest_groups.contested_names(manifests_here)
    digests: dict[str, set[str]] = {}
    for f in (f for m in manifests_here for f in m.files):
        digests.setdefault(f.path, set()).add(f.digest)
    own_files = ((m.stored_name(f), f) for m in manifests_here if m.node == node for f in m.files)
    conflicting_paths = {
        path for path, contents in digests.items() if len(contents) > 1 and not is_exclusive
    }
    return frozenset(
        name
        for name, f in own_files
        if name in contested or (f.path in conflicting_paths and not f.stored_as)
    )


def _find_covering(
    keys: Sequence[FileKey], node: str, manifests: Iterable[Manifest], known_digests: KnownDigests
) -> Manifest | None:
    """Return the last manifest of the first location, by name, that has all these files, or None.

    See `find_holder` for what counts.
    """
    for manifests_here in _by_location(manifests):
        digests = {key[0]: {known_digests[key]} if key in known_digests else set() for key in keys}
        all_keys = set(keys)
        for m in manifests_here:
            for f in m.files:
                if (f.path, f.size, f.mtime) in all_keys and (m.node == node or f.mtime % 10**9):
                    digests[f.path].add(f.digest)
        if _is_covered(digests, node, manifests_here):
            return _last_manifest(node, manifests_here)
    return None


def _is_covered(
    files: Mapping[str, Collection[str]], node: str, location: Iterable[Manifest]
) -> bool:
    """Return whether one location has all these files, as a pull of it writes them.

    ``files``: path → digests, one of which the file has; False without any. A pull is for no node,
    or for one of the location's nodes, whose own content of a path is chosen. If ``node`` has named
    files there, only its own content counts: another content of a path has still to be recorded.
    """
    if not files or not all(files.values()):
        return False
    digests_by_path: dict[str, dict[str, str]] = {}
    claims = ((f, m.node, m.n) for m in location for f in m.files)
    for f, name, _ in sorted(claims, key=lambda c: (bool(c[0].stored_as), c[1], c[2])):
        digests_by_path.setdefault(f.path, {}).setdefault(name, f.digest)
    if not files.keys() <= digests_by_path.keys():
        return False
    nodes = {n for digests in digests_by_path.values() for n in digests}
    return any(
        all(
            digests_by_path[path].get(owner, next(iter(digests_by_path[path].values()))) in digests
            for path, digests in files.items()
        )
        for owner in ("", *((node,) if node in nodes else sorted(nodes)))
    )


def _last_manifest(node: str, manifests: Sequence[Manifest]) -> Manifest:
    """Return the last manifest of ``node``, or the last of all if it has none."""
    return next((m for m in reversed(manifests) if m.node == node), manifests[-1])


def _by_location(manifests: Iterable[Manifest]) -> list[list[Manifest]]:
    """Return the manifests of each location, ordered by the location's name."""
    locations: dict[str, list[Manifest]] = {}
    for m in manifests:
        locations.setdefault(m.location, []).append(m)
    return [manifests_here for _, manifests_here in sorted(locations.items())]
