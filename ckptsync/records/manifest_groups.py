"""Which manifests are of one save, and which location in the store is theirs.

One directory of the store (a *location*) holds one save.  Writers cannot lock it, so two of them
may open it at once, or open two for one save.  Both are repaired by moving: every manifest of a
checkpoint name, wherever it lies, is grouped into saves (`groups`), and each group has one home
(`_home`), a function of the manifests (and of what people have joined) alone.  A node that finds
itself elsewhere writes its manifest again at home, naming the one that it replaces (`moved`,
`Manifest.supersedes`).  Nodes that see the same manifests agree, so moving ends; until it has,
nothing is mixed: a location whose manifests are not provably of one save is in CONFLICT, and nobody
merges it.
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
    """A manifest and the name of the record that holds it."""

    name: str
    manifest: Manifest
    joins: frozenset[str] = frozenset()
    """Names of the records that join it with others."""


@dataclass(frozen=True, slots=True)
class Group:
    """Manifests that evidence ties together.

    ``doubt``: why they may be two saves all the same, empty if they are one.
    """

    parts: tuple[Evidence, ...]
    doubt: str

    @property
    def claim(self) -> tuple[object, ...]:
        """Return a sort key: the smallest keeps the location.

        That is a group in doubt, since it never moves; else the earliest.
        """
        return (
            not self.doubt,
            *min((p.start, p.manifest.node, p.end, sorted(p.files.items())) for p in self.parts),
        )

    def has(self, node: str, location: str) -> bool:
        """Return whether a node has manifests of it in a location."""
        return any((p.manifest.node, p.manifest.location) == (node, location) for p in self.parts)

    def holds(self, manifest: Manifest) -> bool:
        """Return whether this very manifest is in it."""
        return any(p.manifest is manifest for p in self.parts)

    def only(self, manifest: Manifest) -> Group:
        """Return a group of one of its manifests alone."""
        return Group(tuple(p for p in self.parts if p.manifest is manifest), "")

    def manifests(self) -> list[Manifest]:
        """Return its manifests."""
        return [p.manifest for p in self.parts]

    def locations(self) -> list[str]:
        """Return the locations of its manifests; one that is not stored yet has none."""
        return sorted({p.manifest.location for p in self.parts} - {""})


@dataclass(frozen=True, slots=True)
class Sibling:
    """Another location that may hold further parts of a save.

    ``against``: why nothing joins them by itself; empty where they are joined.
    """

    location: str
    nodes: tuple[str, ...]
    against: tuple[str, ...] = ()

    def command(self, url: str, run: str, location: str) -> str:
        """Return what a person types to join it with ``location``."""
        first, second = sorted((location, self.location))
        return shlex.join(["ckptsync", "join", f"{run}/{first}", f"{run}/{second}", "--store", url])


@dataclass(frozen=True, slots=True)
class Located:
    """A file of a save: its name in the store, and the nodes that named it with this content."""

    name: str
    entry: FileEntry
    nodes: tuple[str, ...]


def collect_manifests(records: Mapping[str, object]) -> tuple[StoredManifest, ...]:
    """Return the manifests among ``records``, each with its joins.

    All ``records`` are of one checkpoint name, in every location.
    """
    manifests = {name: r for name, r in records.items() if isinstance(r, Manifest)}
    joined = joins_by_manifest(
        manifests, {name: r for name, r in records.items() if isinstance(r, Join)}
    )
    return tuple(StoredManifest(name, m, joined[name]) for name, m in manifests.items())


def live_manifests(known: Iterable[StoredManifest]) -> tuple[StoredManifest, ...]:
    """Return the manifests that their own node has not superseded, sorted by name."""
    found = tuple(sorted(known, key=lambda k: k.name))
    gone = {(k.manifest.node, name) for k in found for name in k.manifest.supersedes}
    return tuple(k for k in found if (k.manifest.node, k.name) not in gone)


def manifests_in(location: str, known: Iterable[StoredManifest]) -> list[Manifest]:
    """Return the live manifests of one location."""
    return [k.manifest for k in live_manifests(known) if k.manifest.location == location]


def explain_conflict(location: str, known: Iterable[StoredManifest]) -> str:
    """Return why the manifests in ``location`` cannot be proven to be one save; empty if they can.

    ``known``: all of this checkpoint name, in every location.  Those elsewhere matter: if one of
    them is as near to a manifest here as another one here that contradicts it, nobody can say which
    of the two belongs here.
    """
    found = group_by_save(live_manifests(known))
    here = [g for g in found if location in g.locations()]
    if len(here) > 1:
        return _difference(
            *(next(p for p in g.parts if p.manifest.location == location) for g in here[:2])
        )
    return here[0].doubt if here else ""


def group_by_save(known: Sequence[StoredManifest]) -> tuple[Group, ...]:
    """Return the live manifests of one checkpoint name, by save.  Their order does not matter.

    Manifests that are linked by pairs of one save, proven or joined by hand, are one save.  Groups
    written close together are then united if `reasons_against` finds nothing.
    """
    found = _tied(known)
    for near in _written_together(found):
        if not reasons_against(near):
            whole = Group(tuple(p for g in near for p in g.parts), "")
            found = (*(g for g in found if g not in near), whole)
    return found


def reasons_against(found: Sequence[Group]) -> tuple[str, ...]:
    """Return why these groups may not be one save; empty if they may.

    They may if no two of them contradict each other, each is of other nodes and other ranks,
    together they are all ranks and all files that the checkpoint's metadata demands, and no more
    than `NEAR_NS` lies between the times of their files.
    """
    manifests = [m for g in found for m in g.manifests()]
    rankless = (g for g in found if not any(p.manifest.ranks for p in g.parts))
    alone = [f"no file of {g.parts[0].manifest.node} says which rank wrote it" for g in rankless]
    between = (line for a, b in combinations(found, 2) for line in _against(a, b))
    return tuple(
        dict.fromkeys(
            (*proofs_against(found), *alone, *between, *_apart(found), *_incomplete(manifests))
        )
    )


def find_siblings(location: str, known: Iterable[StoredManifest]) -> dict[Sibling, frozenset[str]]:
    """Return the other locations with parts of the save in ``location``, and the parts' paths.

    Also those that may be parts: both are incomplete, and nothing forbids it.
    """
    stored = live_manifests(known)
    if all(k.manifest.location == location for k in stored):
        return {}
    found = group_by_save(stored)
    here = [g for g in found if location in g.locations()]
    if len(here) != 1 or here[0].doubt:
        return {}
    (mine,) = here
    apart = [_sibling(other, mine, ()) for other in mine.locations() if other != location]
    for group in found:
        if (
            group is not mine
            and not proofs_against([mine, group])
            and all(any(_incomplete(g.manifests())) for g in (mine, group))
        ):
            why = reasons_against([mine, group]) or (
                "other parts of that name, written at the same time, complete it as well",
            )
            apart += [_sibling(other, group, why) for other in group.locations()]
    return dict(sorted(apart, key=lambda s: s[0].location))


def proofs_against(found: Sequence[Group]) -> tuple[str, ...]:
    """Return why groups cannot be parts of one save, whatever a person says; empty if they can."""
    pairs = [pair for a, b in combinations(found, 2) for pair in product(a.parts, b.parts)]
    proven = [_difference(a, b) for a, b in pairs if compare(a, b).relation == "two"]
    shared = [
        (a, b, ranks) for a, b in pairs if (ranks := set(a.manifest.ranks) & set(b.manifest.ranks))
    ]
    overlaps = [
        f"{a.manifest.node} and {b.manifest.node} both have files of rank {min(ranks)}"
        for a, b, ranks in shared
    ]
    return tuple(dict.fromkeys((*(g.doubt for g in found if g.doubt), *proven, *overlaps)))


def doubtful_until(part: Manifest, known: Iterable[StoredManifest]) -> int:
    """Return until when it is too early to add a node's part to a save, ns on the store's clock.

    It is 0 if proof ties the part to that save.  Without proof, the node must wait: another one
    that wrote this checkpoint again may not have announced it yet.
    """
    mine = replace(part, location="")
    everyone = [*live_manifests(known), StoredManifest("", mine)]
    proven, found = (
        next(g for g in its if g.holds(mine)) for its in (_tied(everyone), group_by_save(everyone))
    )
    return max(p.end for p in found.parts) + QUIET if len(found.parts) > len(proven.parts) else 0


def _tied(known: Sequence[StoredManifest]) -> tuple[Group, ...]:
    everyone = parts([k.manifest for k in known])
    root = list(range(len(everyone)))
    doubts: dict[int, str] = {}
    pairs = [
        (a, b, compare(everyone[a], everyone[b])) for a, b in combinations(range(len(everyone)), 2)
    ]
    for a, b, found in pairs:
        if found.relation == "one" or (
            found.relation == "unproven" and known[a].joins & known[b].joins
        ):
            old, new = root[b], root[a]
            root = [new if r == old else r for r in root]
    for a, b, found in pairs:
        if found.relation == "two" and root[a] == root[b]:
            doubts.setdefault(root[a], _difference(everyone[a], everyone[b]))
    return tuple(
        Group(
            tuple(p for p, its in zip(everyone, root, strict=True) if its == r), doubts.get(r, "")
        )
        for r in dict.fromkeys(root)
    )


def choose_location(ours: Manifest, known: Iterable[StoredManifest]) -> str:
    """Return where a node's save belongs.

    ``ours.location`` is ignored; ``ours.files`` are all of the save, also those already stored.

    The home of the save that it provably belongs to; else a new location.  Where evidence ties it
    to two saves at once it gets a location of its own, and `explain_conflict` says what is in
    doubt: bytes are never refused because proof is missing.
    """
    everyone = tuple(known)
    part = replace(ours, location="")
    found = group_by_save([*live_manifests(everyone), StoredManifest("", part)])
    mine = next(g for g in found if g.holds(part))
    if mine.doubt:
        return _own_location(mine, part) or _opened(mine.only(part), everyone)
    return _home(mine, found, part.node) or _opened(mine, everyone)


def better_location(node: str, location: str, known: Iterable[StoredManifest]) -> str:
    """Return where the manifests that ``node`` has in ``location`` belong, by what is known now.

    Usually that is ``location`` itself.  Otherwise the node moves there: it sees that the bytes are
    stored there too, then writes what `moved` gives.
    """
    everyone = tuple(known)
    found = group_by_save(live_manifests(everyone))
    mine = [g for g in found if g.has(node, location)]
    if len(mine) != 1 or mine[0].doubt:
        return location  # nothing proves where else it should be
    return _home(mine[0], found, node) or _opened(mine[0], everyone)


def moved_manifest(mine: Sequence[StoredManifest], location: str, n: int) -> Manifest:
    """Return manifest ``n`` of a node in ``location``, which replaces ``mine`` elsewhere."""
    manifests = [k.manifest for k in sorted(mine, key=lambda k: k.manifest.n)]
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
        supersedes=tuple(sorted({k.name for k in mine})),
    )


def merge_demands(manifests: Iterable[Manifest]) -> Demands:
    """Return what all of them demand, with the first size that is known of each file.

    `explain_conflict` compares the sizes.
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
    lines = tuple(dict.fromkeys(line for its in remarks.values() for line in its))
    return Demands(model, resume, world, lines)


def locate_files(manifests: Iterable[Manifest]) -> Mapping[str, tuple[Located, ...]]:
    """Return path → where its contents lie, the one under its plain name first.

    ``manifests``: those of one save, in one location.

    Nodes may name one stored file.  Where they name it with different digests, the smallest node id
    counts (see `contested`).
    """
    found: dict[str, dict[str, Located]] = {}
    for m in sorted(manifests, key=lambda m: (m.node, m.n)):
        for entry in m.files:
            name, lying = m.stored_name(entry), found.setdefault(entry.path, {})
            first = lying.get(name)
            if first is None:
                lying[name] = Located(name, entry, (m.node,))
            elif first.entry.digest == entry.digest and m.node not in first.nodes:
                lying[name] = replace(first, nodes=(*first.nodes, m.node))
    return {
        path: tuple(sorted(found[path].values(), key=lambda at: bool(at.entry.stored_as)))
        for path in sorted(found)
    }


def contested_names(manifests: Iterable[Manifest]) -> frozenset[str]:
    """Return the names of stored files that manifests of one location name with different digests.

    That happens where a store cannot create a name exclusively.  Only one of the contents can be
    there.
    """
    digests: dict[str, set[str]] = {}
    for m in manifests:
        for entry in m.files:
            digests.setdefault(m.stored_name(entry), set()).add(entry.digest)
    return frozenset(name for name, its in digests.items() if len(its) > 1)


def _own_location(group: Group, part: Manifest) -> str:
    """Return where this node has already stored files of the same save; empty if nowhere."""
    others = [p for p in group.parts if p.manifest.node == part.node and p.manifest is not part]
    own = next(p for p in group.parts if p.manifest is part)
    return min(
        (p.manifest.location for p in others if compare(p, own).relation == "one"), default=""
    )


def _home(mine: Group, found: Sequence[Group], node: str) -> str:
    """Return the first of its locations by name that no other group claims before it, or ``""``.

    Not one that ``node`` has still to leave with another save of its own: one node's manifests of a
    location count as one save.
    """
    for location in mine.locations():
        others = [g for g in found if g is not mine and location in g.locations()]
        if all(mine.claim < g.claim and not g.has(node, location) for g in others):
            return location
    return ""


def _opened(mine: Group, known: Sequence[StoredManifest]) -> str:
    """Return a location without any manifest: the same for all who have read the same manifests."""
    first = min(mine.parts, key=lambda p: (p.start, p.manifest.node)).manifest
    used = {k.manifest.location for k in known}
    return next(location for location in _names(first) if location not in used)


def _names(first: Manifest) -> Iterator[str]:
    yield first.checkpoint
    if first.save:
        plain = (
            first.save[:8] if _PLAIN.fullmatch(first.save[:8]) else digest(first.save.encode())[:8]
        )
        yield f"{first.checkpoint}~{plain}"
    for again in count():
        seed = f"{first.node} {first.started}{again or ''}"
        yield f"{first.checkpoint}~{digest(seed.encode())[:8]}"


def _written_together(found: Sequence[Group]) -> list[list[Group]]:
    """Return the groups that were written one soon after the other, several in each list."""
    near: list[list[Group]] = []
    for group in sorted(found, key=lambda g: g.claim[1:]):
        if near and _gap(near[-1], group) <= NEAR_NS:
            near[-1].append(group)
        else:
            near.append([group])
    return [its for its in near if len(its) > 1]


def _gap(earlier: Iterable[Group], group: Group) -> int:
    return min(p.start for p in group.parts) - max(p.end for g in earlier for p in g.parts)


def _apart(found: Sequence[Group]) -> Iterator[str]:
    ordered = sorted(found, key=lambda g: g.claim[1:])
    gap = max((_gap(ordered[:i], ordered[i]) for i in range(1, len(ordered))), default=0)
    if gap > NEAR_NS:
        yield f"their files were written {gap / 1e9:.0f} s apart, more than {NEAR_NS // 10**9}"


def _sibling(location: str, group: Group, why: tuple[str, ...]) -> tuple[Sibling, frozenset[str]]:
    its = [m for m in group.manifests() if m.location == location]
    nodes = tuple(sorted({m.node for m in its}))
    return Sibling(location, nodes, why), frozenset(f.path for m in its for f in m.files)


def _against(a: Group, b: Group) -> Iterator[str]:
    for first, second in product(a.parts, b.parts):
        what = f"{first.manifest.node} and {second.manifest.node}"
        path = two_contents(first.files, second.files)
        if first.manifest.node == second.manifest.node:
            yield f"{first.manifest.node} uploaded both, and a node has only one part of a save"
        elif path:
            yield f"{what} have two contents of {path}"
        elif bool(first.save) != bool(second.save):
            yield f"only one of {what} has a save id of the hook"


def _incomplete(manifests: Sequence[Manifest]) -> Iterator[str]:
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


def _difference(a: Evidence, b: Evidence) -> str:
    found = compare(a, b)
    what = "are two saves" if found.relation == "two" else "may be two saves"
    return f"{a.manifest.node} and {b.manifest.node} {what}: {found.reason}"
