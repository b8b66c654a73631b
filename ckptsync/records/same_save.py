"""Whether two manifests are of one save, by the evidence of their files.

Several nodes each write a part of one save, and the same checkpoint name can be saved twice; no id
says which parts belong together unless a hook agreed on one. So `compare` judges two manifests by
their files, ranks and times: one save, two saves, or unproven. The evidence, strongest first:

1. One node, one path, two contents: two saves (or a file edited later, which nobody can tell from
   one).
2. Hook ids on both sides decide.
3. Two nodes with a rank in both, unless its files are the same bytes: two saves, since a rank is
   one process on one node.
4. Metadata that contradicts itself (two sizes demanded of a file, two numbers of ranks), or whole
   weights with two contents: two saves.
5. One node: its own manifests of one location, or a file that is still the very same one, with its
   mtime: one save.
6. The spans of their files' times touch, on the store's clock: one save.
7. Otherwise nothing is proven by these two: what joins them are a person's join, or that they
   complete each other (`manifest_groups.reasons_against`).

A file that a node had already named in an earlier save, with this digest and this mtime, was not
written in this one, so it does not stretch the span. A checkpoint that is written over, or edited
the day after, therefore does not reach back to the nodes of the first save. The same holds of a
file that another node had named in an earlier save: it was pulled, or copied from that node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ckptsync.layouts import file_names
from ckptsync.records.manifest import Manifest
from ckptsync.tensors import Demands

SLACK = 1_000_000_000
"""ns that may lie between the spans of one save.

Ranks leave the last barrier together, file systems keep mtimes by the clock tick (4 ms) and some by
the second, and clocks that NTP holds differ by milliseconds; measured between two real nodes it was
1 ms.  A restart that comes to the same step again takes longer.
"""
Relation = Literal["one", "two", "unproven"]
FileDigests = Mapping[str, tuple[str, int]]
"""Path → digest, mtime."""
Item = tuple[str, tuple[str, int]]
"""A path with its digest and mtime."""


@dataclass(frozen=True, slots=True)
class Sameness:
    """Whether two manifests are one save.

    ``reason`` is for people, and names no node: the caller knows which manifests were compared.
    """

    relation: Relation
    reason: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """A manifest as evidence.

    ``start`` and ``end``: when the files of this save were written, ns on the store's clock.
    ``save`` is the hook's id, empty if there is none or if it proves nothing.
    """

    manifest: Manifest
    files: FileDigests
    save: str
    start: int
    end: int


def parts(manifests: Sequence[Manifest]) -> tuple[Evidence, ...]:
    """Return the evidence of each manifest, in their order, with the time span of new files alone.

    ``manifests`` are all of one checkpoint name: they show which files an earlier save had already.
    """
    plain = []
    naming: dict[Item, list[Evidence]] = {}
    for m in manifests:
        files = {f.path: (f.digest, f.mtime) for f in m.files}
        part = Evidence(m, files, m.save, m.started - m.clock_offset, m.ended - m.clock_offset)
        plain.append(part)
        for item in files.items():
            naming.setdefault(item, []).append(part)
    return tuple(_without_earlier(part, plain, naming) for part in plain)


def _without_earlier(
    part: Evidence, all_parts: Sequence[Evidence], naming: Mapping[Item, Sequence[Evidence]]
) -> Evidence:
    """Return ``part`` with the time span of only those files that were written in this save.

    Files of an earlier save, of this node or copied from another one, do not count, and neither
    does a save id that an earlier save had. An earlier save is every manifest of a location in
    which some file of ``part`` had another content. ``naming``: which parts name a file.
    """
    node = part.manifest.node
    ended_before = [o for o in all_parts if o.end < part.end and o is not part]
    own_before = [o for o in ended_before if o.manifest.node == node]
    locations = {o.manifest.location for o in own_before if two_contents(o.files, part.files)}
    earlier = [o for o in own_before if o.manifest.location in locations]
    old_files = {item for e in earlier for item in e.files.items()}
    copied = {
        item: {
            o.manifest.location
            for o in naming[item]
            if o.manifest.node != node and o.end < part.end
        }
        for item in part.files.items()
        if len(naming[item]) > 1
    }
    if any(copied.values()):
        changed = {o.manifest.location for o in ended_before if two_contents(o.files, part.files)}
        old_files |= {item for item, copied_from in copied.items() if copied_from & changed}
    first, last, offset = part.manifest.started, part.manifest.ended, part.manifest.clock_offset
    written = (f for f in part.manifest.files if (f.path, (f.digest, f.mtime)) not in old_files)
    # what was added to the save is older, or came later
    times = [f.mtime for f in written if first <= f.mtime <= last]
    if not old_files or not times:
        return part
    save = "" if part.save in {e.save for e in earlier} else part.save
    return replace(part, save=save, start=min(times) - offset, end=max(times) - offset)


def compare(a: Evidence, b: Evidence) -> Sameness:
    """Return whether two parts are one save ("one", "two" or "unproven"), and why; symmetric.

    The module's docstring has the order of evidence.
    """
    is_one_node = a.manifest.node == b.manifest.node
    if is_one_node and (path := two_contents(a.files, b.files)):
        return Sameness("two", f"{path} has two contents")
    if a.save and b.save:
        return (
            Sameness("one", "one save id") if a.save == b.save else Sameness("two", "two save ids")
        )
    contradiction = (_rank_in_both(a, b) or _two_weights(a, b)) if not is_one_node else ""
    contradiction = contradiction or demands_differ(a.manifest.demands, b.manifest.demands)
    if contradiction:
        return Sameness("two", contradiction)
    is_one_location = a.manifest.location == b.manifest.location != ""
    if is_one_node and (is_one_location or a.files.items() & b.files.items()):
        return Sameness("one", "one node's own files")
    gap = max(a.start, b.start) - min(a.end, b.end)
    if gap <= SLACK:
        return Sameness("one", "written at one time")
    return Sameness(
        "unproven",
        f"their files were written {gap / 1e9:.1f} s apart, and no save id from the hook"
        " links them",
    )


def demands_differ(a: Demands, b: Demands) -> str:
    """Return how two demands contradict each other, as text: world size, or a file's size; else "".

    An unknown value contradicts nothing.
    """
    if a.world is not None and b.world is not None and a.world != b.world:
        return f"{min(a.world, b.world)} and {max(a.world, b.world)} ranks"
    for first, second in (
        (a.model, b.model),
        (a.resume, b.resume),
        (a.model, b.resume),
        (a.resume, b.model),
    ):
        for path in sorted(first.keys() & second.keys()):
            sizes = sorted({size for size in (first[path], second[path]) if size is not None})
            if len(sizes) > 1:
                return f"{path} should have {sizes[0]} and {sizes[1]} bytes"
    return ""


def two_contents(a: FileDigests, b: FileDigests) -> str:
    """Return the first path, by name, that both have with two digests, or an empty string."""
    return min((path for path in a.keys() & b.keys() if a[path][0] != b[path][0]), default="")


def _rank_in_both(a: Evidence, b: Evidence) -> str:
    """Return, as text, the first rank that proves two saves; empty if there is none.

    Both parts have the rank, and they share no file of it, or one whose contents differ. The caller
    knows that they are of two nodes.
    """
    for rank in sorted(set(a.manifest.ranks) & set(b.manifest.ranks)):
        shared = [
            path for path in a.files.keys() & b.files.keys() if rank in file_names.ranks([path])
        ]
        if not shared or any(a.files[path][0] != b.files[path][0] for path in shared):
            return f"both have files of rank {rank}"
    return ""


def _two_weights(a: Evidence, b: Evidence) -> str:
    """Return which file of whole weights has two contents, as text; empty if none.

    Replicas write the same bytes of whole weights, since safetensors is a function of its tensors.
    """
    weights = a.manifest.demands.model.keys() & b.manifest.demands.model.keys()
    shared = {p for p in weights if p.endswith(".safetensors")} & a.files.keys() & b.files.keys()
    path = min((p for p in shared if a.files[p][0] != b.files[p][0]), default="")
    return f"{path} has two contents" if path else ""
