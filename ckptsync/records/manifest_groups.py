"""Which manifests are of one save, and which location of the store each save belongs in.

A directory of the store (a *location*) holds one save, but writers cannot lock it: two saves can
open one location at once, and the parts of one save can open two. So all manifests of a checkpoint
name, wherever they lie, are grouped into saves (`group_by_save`), and each group claims one
location (`choose_location`, `better_location`), as a function of these manifests and of people's
joins alone. A node whose manifest lies elsewhere writes it again there (`moved_manifest`); nodes
that read the same manifests agree, so moving ends. Until then nothing is mixed: a location whose
manifests are not provably of one save is in CONFLICT (`explain_conflict`), and nobody merges it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, count, product

from ckptsync.digest import digest
from ckptsync.records.manifest import FileEntry, Manifest
from ckptsync.records.same_save import (
    Evidence,
    compare,
    parts,
    two_contents,
)
from ckptsync.records.save_decisions import Join, joins_by_manifest
from ckptsync.tensors import Demands

NEAR_NS = 300_000_000_000
"""ns that may lie between the files of two parts of one save that complete each other: copies
without their times, slow disks.
"""
QUIET = 60_000_000_000
"""ns that a worker waits before it takes its part for one of a save that only ranks and time tie it
to.
"""
_PLAIN = re.compile(r"[A-Za-z0-9]{8}")


@dataclass(frozen=True, slots=True)
class StoredManifest:
    """A manifest, with the name of its record and the names of the joins that hold for it."""

    name: str
    manifest: Manifest
    joins: frozenset[str] = frozenset()
    """Names of the records that join it with others."""


@dataclass(frozen=True, slots=True)
class Group:
    """The parts of one save, as far as evidence links them.

    ``doubt``: why they may be two saves all the same; empty if they are one.
    """

    parts: tuple[Evidence, ...]
    doubt: str

    @property
    def claim(self) -> tuple[object, ...]:
        """Return a key: of two groups in one location, the smaller one keeps it.

        A group in doubt is smaller than all others, since it never moves; else the earliest is.
        """
        return (
            not self.doubt,
            *min((p.start, p.manifest.node, p.end, sorted(p.files.items())) for p in self.parts),
        )

    def has(self, node: str, location: str) -> bool:
        """Return whether a node has manifests of this save in a location."""
        return any((p.manifest.node, p.manifest.location) == (node, location) for p in self.parts)

    def holds(self, manifest: Manifest) -> bool:
        """Return whether this very manifest object is in the group."""
        return any(p.manifest is manifest for p in self.parts)

    def only(self, manifest: Manifest) -> Group:
        """Return a group of one of this group's manifests alone, without doubt."""
        return Group(tuple(p for p in self.parts if p.manifest is manifest), "")

    def manifests(self) -> list[Manifest]:
        """Return the manifests of all parts."""
        return [p.manifest for p in self.parts]

    def locations(self) -> list[str]:
        """Return the locations of its manifests, sorted; one that is not stored yet has none."""
        return sorted({p.manifest.location for p in self.parts} - {""})


@dataclass(frozen=True, slots=True)
class Sibling:
    """Another location with parts of a save, or of what may be this save.

    ``against``: why nothing joins the two by itself; empty if they are joined.
    """

    location: str
    nodes: tuple[str, ...]
    against: tuple[str, ...] = ()

    def command(self, url: str, run: str, location: str) -> str:
        """Return the command by which a person joins this location with ``location``."""
        first, second = sorted((location, self.location))
        return shlex.join(["ckptsync", "join", f"{run}/{first}", f"{run}/{second}", "--store", url])


@dataclass(frozen=True, slots=True)
class Located:
    """A stored copy of a file: its name in the store, and the nodes that named this content."""

    name: str
    entry: FileEntry
    nodes: tuple[str, ...]


def collect_manifests(records: Mapping[str, object]) -> tuple[StoredManifest, ...]:
    """Return the manifests among the records of one checkpoint name, each with its joins.

    ``records``: by name, of every location of that checkpoint's name.
    """
    manifests = {name: r for name, r in records.items() if isinstance(r, Manifest)}
    joins = joins_by_manifest(
        manifests, {name: r for name, r in records.items() if isinstance(r, Join)}
    )
    return tuple(StoredManifest(name, m, joins[name]) for name, m in manifests.items())


def live_manifests(stored_manifests: Iterable[StoredManifest]) -> tuple[StoredManifest, ...]:
    """Return the manifests that no manifest of the same node supersedes, sorted by name."""
    by_name = tuple(sorted(stored_manifests, key=lambda k: k.name))
    superseded = {(k.manifest.node, name) for k in by_name for name in k.manifest.supersedes}
    return tuple(k for k in by_name if (k.manifest.node, k.name) not in superseded)


def manifests_in(location: str, stored_manifests: Iterable[StoredManifest]) -> list[Manifest]:
    """Return the live manifests of one location."""
    return [k.manifest for k in live_manifests(stored_manifests) if k.manifest.location == location]


def explain_conflict(location: str, stored_manifests: Iterable[StoredManifest]) -> str:
    """Return why the manifests in ``location`` are not provably one save; empty if they are.

    ``stored_manifests``: all of this checkpoint name, in every location. Those elsewhere matter: if
    one is as near to a manifest of this location as another one that contradicts it, nobody can say
    which of the two belongs here.
    """
    groups = group_by_save(live_manifests(stored_manifests))
    groups_here = [g for g in groups if location in g.locations()]
    if len(groups_here) > 1:
        return _explain_difference(
            *(next(p for p in g.parts if p.manifest.location == location) for g in groups_here[:2])
        )
    return groups_here[0].doubt if groups_here else ""


def group_by_save(stored_manifests: Sequence[StoredManifest]) -> tuple[Group, ...]:
    """Return the live manifests of one checkpoint name, grouped by save; their order is irrelevant.

    Manifests that evidence or a join links are one save. Groups that were each written within
    `NEAR_NS` of the one before are then united if `reasons_against` returns nothing.
    ``stored_manifests``: the live ones alone.
    """
    groups = _link_manifests(stored_manifests)
    for nearby in _written_together(groups):
        if not reasons_against(nearby):
            union = Group(tuple(p for g in nearby for p in g.parts), "")
            groups = (*(g for g in groups if g not in nearby), union)
    return groups


def reasons_against(groups: Sequence[Group]) -> tuple[str, ...]:
    """Return why these groups may not be united into one save; empty if they may.

    They may if no two of them contradict each other, each is of other nodes and other ranks,
    together they are all ranks and all files that the checkpoint's metadata demands, and at most
    `NEAR_NS` lies between the times of their files.
    """
    manifests = [m for g in groups for m in g.manifests()]
    rankless = (g for g in groups if not any(p.manifest.ranks for p in g.parts))
    without_ranks = [
        f"no file of {g.parts[0].manifest.node} says which rank wrote it" for g in rankless
    ]
    contradictions = (line for a, b in combinations(groups, 2) for line in _contradictions(a, b))
    return tuple(
        dict.fromkeys(
            (
                *proofs_against(groups),
                *without_ranks,
                *contradictions,
                *_explain_gap(groups),
                *_explain_incomplete(manifests),
            )
        )
    )


def find_siblings(
    location: str, stored_manifests: Iterable[StoredManifest]
) -> dict[Sibling, frozenset[str]]:
    """Return the other locations with parts of the save in ``location``, and the parts' paths.

    A location that may hold parts is one, too: both are incomplete, and nothing forbids to join
    them; its ``against`` says why they are not joined. Nothing is returned if ``location`` is in
    conflict or holds no live manifest. Sorted by location.
    """
    live = live_manifests(stored_manifests)
    if all(k.manifest.location == location for k in live):
        return {}
    groups = group_by_save(live)
    groups_here = [g for g in groups if location in g.locations()]
    if len(groups_here) != 1 or groups_here[0].doubt:
        return {}
    (own_group,) = groups_here
    siblings = [
        _sibling(elsewhere, own_group, ())
        for elsewhere in own_group.locations()
        if elsewhere != location
    ]
    for group in groups:
        if (
            group is not own_group
            and not proofs_against([own_group, group])
            and all(any(_explain_incomplete(g.manifests())) for g in (own_group, group))
        ):
            why = reasons_against([own_group, group]) or (
                "other parts of that name, written at the same time, complete it as well",
            )
            siblings += [_sibling(elsewhere, group, why) for elsewhere in group.locations()]
    return dict(sorted(siblings, key=lambda s: s[0].location))


def proofs_against(groups: Sequence[Group]) -> tuple[str, ...]:
    """Return what proves that groups are not one save, even against a join; empty if nothing.

    It is a group's own doubt, two manifests that `compare` calls two saves, or a rank in both.
    """
    pairs = [pair for a, b in combinations(groups, 2) for pair in product(a.parts, b.parts)]
    proven = [_explain_difference(a, b) for a, b in pairs if compare(a, b).relation == "two"]
    shared = [
        (a, b, ranks) for a, b in pairs if (ranks := set(a.manifest.ranks) & set(b.manifest.ranks))
    ]
    overlaps = [
        f"{a.manifest.node} and {b.manifest.node} both have files of rank {min(ranks)}"
        for a, b, ranks in shared
    ]
    return tuple(dict.fromkeys((*(g.doubt for g in groups if g.doubt), *proven, *overlaps)))


def doubtful_until(part: Manifest, stored_manifests: Iterable[StoredManifest]) -> int:
    """Return the time before which ``part`` may not be added to a save; ns on the store's clock.

    It is 0 if evidence links the part to all of that save, else `QUIET` after the save's newest
    file: another node that wrote this checkpoint again may not have announced its upload yet.
    """
    draft = replace(part, location="")
    candidates = [*live_manifests(stored_manifests), StoredManifest("", draft)]
    proven, likely = (
        next(g for g in groups if g.holds(draft))
        for groups in (_link_manifests(candidates), group_by_save(candidates))
    )
    return max(p.end for p in likely.parts) + QUIET if len(likely.parts) > len(proven.parts) else 0


def _link_manifests(stored_manifests: Sequence[StoredManifest]) -> tuple[Group, ...]:
    """Return groups of manifests that pairs of one save, or a join, link; in the order given.

    A group is in doubt if two of its manifests are proven to be two saves.
    """
    evidence = parts([k.manifest for k in stored_manifests])
    roots = list(range(len(evidence)))
    doubts: dict[int, str] = {}
    pairs = [
        (a, b, compare(evidence[a], evidence[b])) for a, b in combinations(range(len(evidence)), 2)
    ]
    for a, b, sameness in pairs:
        if sameness.relation == "one" or (
            sameness.relation == "unproven"
            and stored_manifests[a].joins & stored_manifests[b].joins
        ):
            old, new = roots[b], roots[a]
            roots = [new if r == old else r for r in roots]
    for a, b, sameness in pairs:
        if sameness.relation == "two" and roots[a] == roots[b]:
            doubts.setdefault(roots[a], _explain_difference(evidence[a], evidence[b]))
    return tuple(
        Group(
            tuple(p for p, group_root in zip(evidence, roots, strict=True) if group_root == r),
            doubts.get(r, ""),
        )
        for r in dict.fromkeys(roots)
    )


def choose_location(ours: Manifest, stored_manifests: Iterable[StoredManifest]) -> str:
    """Return the location in which a node's save belongs.

    It is the first that its group of manifests claims, else a new one. If evidence links the part
    to two saves at once, it goes where this node has files of it, else to a location of its own,
    and `explain_conflict` says what is in doubt: an upload is never refused because proof is
    missing. ``ours.location`` is ignored; ``ours.files`` are all of the save, also those already
    stored.
    """
    all_manifests = tuple(stored_manifests)
    draft = replace(ours, location="")
    groups = group_by_save([*live_manifests(all_manifests), StoredManifest("", draft)])
    own_group = next(g for g in groups if g.holds(draft))
    if own_group.doubt:
        return _own_location(own_group, draft) or _new_location(
            own_group.only(draft), all_manifests
        )
    return _claimed_location(own_group, groups, draft.node) or _new_location(
        own_group, all_manifests
    )


def better_location(node: str, location: str, stored_manifests: Iterable[StoredManifest]) -> str:
    """Return where the manifests that ``node`` has in ``location`` belong by now.

    Usually that is ``location`` itself; it is also if nothing proves where else they belong.
    Otherwise the node stores its files there, and writes what `moved_manifest` returns.
    """
    all_manifests = tuple(stored_manifests)
    groups = group_by_save(live_manifests(all_manifests))
    own_groups = [g for g in groups if g.has(node, location)]
    if len(own_groups) != 1 or own_groups[0].doubt:
        return location  # nothing proves where else it should be
    return _claimed_location(own_groups[0], groups, node) or _new_location(
        own_groups[0], all_manifests
    )


def moved_manifest(replaced: Sequence[StoredManifest], location: str, n: int) -> Manifest:
    """Return manifest ``n`` of a node in ``location``, which supersedes all of ``replaced``.

    It has their files (of one path the latest), ranks, times, demands and sources together; the
    rest is that of the last one. It is not stored.
    """
    manifests = [k.manifest for k in sorted(replaced, key=lambda k: k.manifest.n)]
    return replace(
        manifests[-1],
        location=location,
        n=n,
        files=tuple(
            sorted({f.path: f for m in manifests for f in m.files}.values(), key=lambda f: f.path)
        ),
        ranks=tuple(sorted({r for m in manifests for r in m.ranks})),
        started=min(m.started for m in manifests),
        ended=max(m.ended for m in manifests),
        demands=merge_demands(manifests),
        sources=tuple(dict.fromkeys(s for m in manifests for s in m.sources)),
        supersedes=tuple(sorted({k.name for k in replaced})),
    )


def merge_demands(manifests: Iterable[Manifest]) -> Demands:
    """Return what all manifests demand together.

    Of each file's size, and of the world size, the first known value counts, by node and number;
    `explain_conflict` finds values that differ. Of a node's remarks those of its last manifest
    count.
    """
    model: dict[str, int | None] = {}
    resume: dict[str, int | None] = {}
    world = None
    remarks: dict[str, tuple[str, ...]] = {}
    for m in sorted(manifests, key=lambda m: (m.node, m.n)):
        remarks[m.node] = m.demands.remarks  # a node's last manifest is of all of its files
        for whole, part in ((model, m.demands.model), (resume, m.demands.resume)):
            whole.update({path: size for path, size in part.items() if whole.get(path) is None})
        world = m.demands.world if world is None else world
    lines = tuple(
        dict.fromkeys(line for lines_of_node in remarks.values() for line in lines_of_node)
    )
    return Demands(model, resume, world, lines)


def locate_files(manifests: Iterable[Manifest]) -> Mapping[str, tuple[Located, ...]]:
    """Return path → its stored copies, the one under the plain name first; paths are sorted.

    ``manifests``: those of one save, in one location. If manifests name one stored file with
    different digests, the first by node and number counts, and the others' nodes are not named (see
    `contested_names`).
    """
    copies: dict[str, dict[str, Located]] = {}
    for m in sorted(manifests, key=lambda m: (m.node, m.n)):
        for entry in m.files:
            name, copies_by_name = m.stored_name(entry), copies.setdefault(entry.path, {})
            first = copies_by_name.get(name)
            if first is None:
                copies_by_name[name] = Located(name, entry, (m.node,))
            elif first.entry.digest == entry.digest and m.node not in first.nodes:
                copies_by_name[name] = replace(first, nodes=(*first.nodes, m.node))
    return {
        path: tuple(sorted(copies[path].values(), key=lambda copy: bool(copy.entry.stored_as)))
        for path in sorted(copies)
    }


def contested_names(manifests: Iterable[Manifest]) -> frozenset[str]:
    """Return the stored names that manifests of one location name with different digests.

    That happens in a store that cannot create a name exclusively; only one content can be stored.
    """
    digests: dict[str, set[str]] = {}
    for m in manifests:
        for entry in m.files:
            digests.setdefault(m.stored_name(entry), set()).add(entry.digest)
    return frozenset(name for name, contents in digests.items() if len(contents) > 1)


def _own_location(group: Group, part: Manifest) -> str:
    """Return the first location, by name, with files of ``part``'s save of this node, or ""."""
    other_parts = [
        p for p in group.parts if p.manifest.node == part.node and p.manifest is not part
    ]
    own_part = next(p for p in group.parts if p.manifest is part)
    return min(
        (p.manifest.location for p in other_parts if compare(p, own_part).relation == "one"),
        default="",
    )


def _claimed_location(own_group: Group, groups: Sequence[Group], node: str) -> str:
    """Return the first location of a group, by name, that no other group claims before it, or "".

    A location in which ``node`` also has manifests of another save is not returned: one node's
    manifests of a location count as one save.
    """
    for location in own_group.locations():
        rivals = [g for g in groups if g is not own_group and location in g.locations()]
        if all(own_group.claim < g.claim and not g.has(node, location) for g in rivals):
            return location
    return ""


def _new_location(own_group: Group, stored_manifests: Sequence[StoredManifest]) -> str:
    """Return a location without any manifest; all who read the same manifests get the same.

    It is the first unused of `_location_names` of the group's earliest part.
    """
    first = min(own_group.parts, key=lambda p: (p.start, p.manifest.node)).manifest
    used = {k.manifest.location for k in stored_manifests}
    return next(location for location in _location_names(first) if location not in used)


def _location_names(first: Manifest) -> Iterator[str]:
    """Yield endless names for a location: the plain one, one of the save id, then of the writer."""
    yield first.checkpoint
    if first.save:
        plain = (
            first.save[:8] if _PLAIN.fullmatch(first.save[:8]) else digest(first.save.encode())[:8]
        )
        yield f"{first.checkpoint}~{plain}"
    for again in count():
        seed = f"{first.node} {first.started}{again or ''}"
        yield f"{first.checkpoint}~{digest(seed.encode())[:8]}"


def _written_together(groups: Sequence[Group]) -> list[list[Group]]:
    """Return lists of two or more groups, each written within `NEAR_NS` of those before it."""
    runs: list[list[Group]] = []
    for group in sorted(groups, key=lambda g: g.claim[1:]):
        if runs and _gap_after(runs[-1], group) <= NEAR_NS:
            runs[-1].append(group)
        else:
            runs.append([group])
    return [run for run in runs if len(run) > 1]


def _gap_after(earlier: Iterable[Group], group: Group) -> int:
    """Return the ns from the last file of ``earlier`` to the first of ``group``; can be below 0."""
    return min(p.start for p in group.parts) - max(p.end for g in earlier for p in g.parts)


def _explain_gap(groups: Sequence[Group]) -> Iterator[str]:
    """Yield a line if more than `NEAR_NS` lies between a group and all groups before it."""
    ordered = sorted(groups, key=lambda g: g.claim[1:])
    gap = max((_gap_after(ordered[:i], ordered[i]) for i in range(1, len(ordered))), default=0)
    if gap > NEAR_NS:
        yield f"their files were written {gap / 1e9:.0f} s apart, more than {NEAR_NS // 10**9}"


def _sibling(
    location: str, group: Group, against: tuple[str, ...]
) -> tuple[Sibling, frozenset[str]]:
    """Return a location of a group as a sibling, with the paths of its files."""
    manifests = [m for m in group.manifests() if m.location == location]
    nodes = tuple(sorted({m.node for m in manifests}))
    return Sibling(location, nodes, against), frozenset(f.path for m in manifests for f in m.files)


def _contradictions(a: Group, b: Group) -> Iterator[str]:
    """Yield a line for each part of ``a`` and part of ``b`` that cannot be of one save."""
    for first, second in product(a.parts, b.parts):
        nodes = f"{first.manifest.node} and {second.manifest.node}"
        path = two_contents(first.files, second.files)
        if first.manifest.node == second.manifest.node:
            yield f"{first.manifest.node} uploaded both, and a node has only one part of a save"
        elif path:
            yield f"{nodes} have two contents of {path}"
        elif bool(first.save) != bool(second.save):
            yield f"only one of {nodes} has a save id of the hook"


def _explain_incomplete(manifests: Sequence[Manifest]) -> Iterator[str]:
    """Yield up to two lines: which ranks, and the first file, the manifests lack or have wrong.

    Unknown ranks count as lacking: nothing is yielded only for a checkpoint that is complete.
    """
    demands, files = merge_demands(manifests), {f.path: f.size for m in manifests for f in m.files}
    ranks = {rank for m in manifests for rank in m.ranks}
    if demands.world is None:
        yield "nothing in them says how many ranks wrote the checkpoint"
    elif ranks != set(range(demands.world)):
        missing = set(range(demands.world)) - ranks
        yield (
            f"no part has files of rank {min(missing)}"
            if missing
            else f"rank {max(ranks)} is out of range for world size {demands.world}"
        )
    for path, size in sorted({**demands.resume, **demands.model}.items()):
        if files.get(path) is None or size not in (None, files[path]):
            yield f"{path}: " + (
                f"{files[path]} bytes, {size} expected" if path in files else "no part has it"
            )
            return


def _explain_difference(a: Evidence, b: Evidence) -> str:
    """Return why two parts are, or may be, two saves."""
    sameness = compare(a, b)
    claim = "are two saves" if sameness.relation == "two" else "may be two saves"
    return f"{a.manifest.node} and {b.manifest.node} {claim}: {sameness.reason}"
