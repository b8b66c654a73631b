"""Which manifests form one save, which place in the store is theirs, and where each file lies.

One directory of the store (a *place*) holds one save.  Writers cannot lock it, so two of them may open it at once, or open two for one
save.  Both are mended by moving: every manifest of a checkpoint name, wherever it lies, is grouped into saves (`groups`), and each
group has one home (`_home`), a function of the manifests alone.  A node that finds itself elsewhere writes its manifest again at home,
naming the one it takes back (`moved`, `Manifest.supersedes`).  Nodes that see the same manifests agree, so moving ends; until it has,
nothing is mixed: a place whose manifests are not provably of one save is ambiguous, and nobody merges it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, count

from ckptsync.digest import digest
from ckptsync.model import Demands
from ckptsync.records.manifest import FileEntry, Manifest
from ckptsync.records.names import file_name, node_file_name
from ckptsync.records.sameness import SLACK, Part, Sameness, compare, parts, same_save

__all__ = [
    "SLACK",
    "Known",
    "Located",
    "Sameness",
    "better_place",
    "choose_place",
    "live",
    "locate",
    "moved",
    "same_save",
    "save_of",
]


_PLAIN = re.compile(r"[A-Za-z0-9]{8}")


@dataclass(frozen=True, slots=True)
class Known:
    """A manifest and the name of the record that holds it."""

    name: str
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Group:
    """Parts that evidence ties together; ``doubt`` says why they may be two saves all the same, and is empty if they are one."""

    parts: tuple[Part, ...]
    doubt: str

    @property
    def claim(self) -> tuple[object, ...]:
        """Of two groups in one place the smaller keeps it: one in doubt, since it never moves; then the one that began first."""
        return (not self.doubt, *min((p.start, p.manifest.node, p.end, sorted(p.files.items())) for p in self.parts))

    def has(self, node: str, place: str) -> bool:
        """Whether a node has manifests of it in a place."""
        return any((p.manifest.node, p.manifest.place) == (node, place) for p in self.parts)

    def only(self, manifest: Manifest) -> Group:
        """One of its manifests by itself."""
        return Group(tuple(p for p in self.parts if p.manifest is manifest), "")

    def places(self) -> list[str]:
        """Those it has manifests in; a take that has none yet counts for nothing."""
        return sorted({p.manifest.place for p in self.parts} - {""})


@dataclass(frozen=True, slots=True)
class Located:
    """A file of a save: where it lies in the store, and the nodes that named it with this content."""

    name: str
    entry: FileEntry
    nodes: tuple[str, ...]


def live(known: Iterable[Known]) -> tuple[Known, ...]:
    """Without those that their own node has taken back, sorted by name.  Nobody can take back another node's word."""
    found = tuple(sorted(known, key=lambda k: k.name))
    gone = {(k.manifest.node, name) for k in found for name in k.manifest.supersedes}
    return tuple(k for k in found if (k.manifest.node, k.name) not in gone)


def save_of(place: str, known: Iterable[Known]) -> str:
    """Why the manifests in ``place`` are not provably one save; empty if they are.

    ``known``: all of this checkpoint name, in every place.  Those elsewhere matter: if one of them is as near to a manifest here as
    another one here that contradicts it, nobody can say which of the two belongs here.
    """
    found = groups([k.manifest for k in live(known)])
    here = [g for g in found if place in g.places()]
    if len(here) > 1:
        return _difference(*(next(p for p in g.parts if p.manifest.place == place) for g in here[:2]))
    return here[0].doubt if here else ""


def groups(manifests: Sequence[Manifest]) -> tuple[Group, ...]:
    """Manifests of one checkpoint name, tied together by every pair that is provably of one save.  Their order does not matter."""
    everyone = parts(manifests)
    root = list(range(len(everyone)))
    doubts: dict[int, str] = {}
    pairs = [(a, b, compare(everyone[a], everyone[b])) for a, b in combinations(range(len(everyone)), 2)]
    for a, b, found in pairs:
        if found.relation == "one":
            old, new = root[b], root[a]
            root = [new if r == old else r for r in root]
    for a, b, found in pairs:
        if found.relation == "two" and root[a] == root[b]:
            doubts.setdefault(root[a], _difference(everyone[a], everyone[b]))
    return tuple(
        Group(tuple(p for p, its in zip(everyone, root, strict=True) if its == r), doubts.get(r, "")) for r in dict.fromkeys(root)
    )


def choose_place(ours: Manifest, known: Iterable[Known]) -> str:
    """Where a node's take belongs.  ``ours.place`` is not looked at; ``ours.files`` are all of the take, also those already stored.

    The home of the save that it provably belongs to; else a new place.  Where evidence ties it to two saves at once it gets a place of
    its own, and `save_of` says aloud what is in doubt: bytes are never refused for want of proof.
    """
    everyone = tuple(known)
    take = replace(ours, place="")
    found = groups([*(k.manifest for k in live(everyone)), take])
    mine = next(g for g in found if any(p.manifest is take for p in g.parts))
    if mine.doubt:
        return _own_place(mine, take) or _opened(mine.only(take), everyone)
    return _home(mine, found, take.node) or _opened(mine, everyone)


def better_place(node: str, place: str, known: Iterable[Known]) -> str:
    """Where the manifests that ``node`` has in ``place`` belong, by all that is known now: mostly ``place`` itself.

    Otherwise the node moves there: it sees that the bytes are stored there too, then writes what `moved` gives.
    """
    everyone = tuple(known)
    found = groups([k.manifest for k in live(everyone)])
    mine = [g for g in found if g.has(node, place)]
    if len(mine) != 1 or mine[0].doubt:
        return place  # nothing proves where else it should be
    return _home(mine[0], found, node) or _opened(mine[0], everyone)


def moved(mine: Sequence[Known], place: str, n: int) -> Manifest:
    """One manifest that says in ``place``, as number ``n``, all that a node's manifests in another place said, and takes those back."""
    manifests = [k.manifest for k in sorted(mine, key=lambda k: k.manifest.n)]
    return replace(
        manifests[-1],
        place=place,
        n=n,
        files=tuple(sorted({f.path: f for m in manifests for f in m.files}.values(), key=lambda f: f.path)),
        ranks=tuple(sorted({r for m in manifests for r in m.ranks})),
        started=min(m.started for m in manifests),
        ended=max(m.ended for m in manifests),
        demands=demanded(manifests),
        sources=tuple(dict.fromkeys(s for m in manifests for s in m.sources)),
        supersedes=tuple(sorted({k.name for k in mine})),
    )


def next_n(known: Iterable[Known], node: str, place: str) -> int:
    """The number of a node's next manifest in a place: those taken back count too."""
    return max((k.manifest.n for k in known if (k.manifest.node, k.manifest.place) == (node, place)), default=-1) + 1


def demanded(manifests: Iterable[Manifest]) -> Demands:
    """What all of them demand.  Contradictions are `save_of`'s to find: here the first size that is known counts."""
    model: dict[str, int | None] = {}
    resume: dict[str, int | None] = {}
    world = None
    for m in manifests:
        for whole, part in ((model, m.demands.model), (resume, m.demands.resume)):
            whole.update({path: size for path, size in part.items() if whole.get(path) is None})
        world = m.demands.world if world is None else world
    return Demands(model, resume, world)


def locate(manifests: Iterable[Manifest]) -> Mapping[str, tuple[Located, ...]]:
    """Path → where its contents lie, the one under its plain name first.  ``manifests``: those of one save, in one place.

    The smallest node id that names a path owns its plain name; nodes with the same content share it, others' copies lie apart.
    """
    claims: dict[str, dict[str, tuple[Manifest, FileEntry]]] = {}
    for m in sorted(manifests, key=lambda m: (m.node, m.n)):
        for entry in m.files:
            claims.setdefault(entry.path, {}).setdefault(m.node, (m, entry))
    return {path: tuple(_located(list(claims[path].values()))) for path in sorted(claims)}


def _located(claims: Sequence[tuple[Manifest, FileEntry]]) -> Iterator[Located]:
    owner, owned = claims[0]
    sharing = tuple(m.node for m, e in claims if e.digest == owned.digest)
    yield Located(file_name(owner.run, owner.place, owned.path), owned, sharing)
    for m, e in claims:
        if e.digest != owned.digest:
            yield Located(node_file_name(m.run, m.place, m.node, e.path), e, (m.node,))


def _own_place(group: Group, take: Manifest) -> str:
    """Where this node has already stored files of the same take; empty if nowhere."""
    others = [p for p in group.parts if p.manifest.node == take.node and p.manifest is not take]
    own = next(p for p in group.parts if p.manifest is take)
    return min((p.manifest.place for p in others if compare(p, own).relation == "one"), default="")


def _home(mine: Group, found: Sequence[Group], node: str) -> str:
    """The first of its places by name that no other group has an earlier claim to; empty if there is none.

    Not one that ``node`` has still to leave with another save of its own: one node's manifests of a place are taken for one save.
    """
    for place in mine.places():
        others = [g for g in found if g is not mine and place in g.places()]
        if all(mine.claim < g.claim and not g.has(node, place) for g in others):
            return place
    return ""


def _opened(mine: Group, known: Sequence[Known]) -> str:
    """A name that no manifest was ever written under, the same for every node of the group that knows as much."""
    first = min(mine.parts, key=lambda p: (p.start, p.manifest.node)).manifest
    taken = {k.manifest.place for k in known}
    return next(place for place in _names(first) if place not in taken)


def _names(first: Manifest) -> Iterator[str]:
    yield first.checkpoint
    if first.save:
        plain = first.save[:8] if _PLAIN.fullmatch(first.save[:8]) else digest(first.save.encode())[:8]
        yield f"{first.checkpoint}~{plain}"
    for again in count():
        yield f"{first.checkpoint}~{digest(f'{first.node} {first.started}{again or str()}'.encode())[:8]}"


def _difference(a: Part, b: Part) -> str:
    found = compare(a, b)
    what = "are two saves" if found.relation == "two" else "may be two saves"
    return f"{a.manifest.node} and {b.manifest.node} {what}: {found.reason}"
