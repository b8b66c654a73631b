"""What keeps a checkpoint from being whole, and who should have it: what its metadata demands, and which node had which ranks before.  Pure.

Nothing waits for such a checkpoint: every other one is consolidated, verified and let go of as if it were not there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import merge
from itertools import chain

from ckptsync.catalogue.summary import LINES, Gap, Summary
from ckptsync.layouts.rank_names import rank
from ckptsync.records.state import Snapshot


def gaps(seen: Snapshot) -> tuple[Gap, ...]:
    """What is missing, by the rank whose it is, or by the node that says it has sent it."""
    demanded = {**seen.demands.resume, **seen.demands.model}
    absent: dict[int, list[str]] = {}
    for path in sorted(demanded):
        if path not in seen.files and not any(path in paths for paths in seen.siblings.values()):
            found = rank(path)
            absent.setdefault(-1 if found is None else found, []).append(path)
    for number in _silent_ranks(seen):
        absent.setdefault(number, [])
    unsent = [Gap(len(paths), paths[0] if paths else "", number) for number, paths in sorted(absent.items())]
    return (*unsent, *_gone(seen))


def _silent_ranks(seen: Snapshot) -> Iterable[int]:
    """Ranks that there were in this training, and of which no file has come."""
    heard = {number for known in seen.manifests for number in known.manifest.ranks}
    heard |= {number for paths in seen.siblings.values() for path in paths if (number := rank(path)) is not None}
    return set(range(seen.demands.world or 0)) - heard if heard else ()


def _gone(seen: Snapshot) -> Iterator[Gap]:
    """What a node said it has sent, and is not in the store as it was then."""
    by_node: dict[str, list[str]] = {}
    for path, where in seen.files.items():
        if seen.sizes.get(where[0].name) != where[0].entry.size:
            by_node.setdefault(where[0].nodes[0], []).append(path)
    yield from (Gap(len(paths), min(paths), -1, node) for node, paths in sorted(by_node.items()))


def explained(summaries: Sequence[Summary]) -> tuple[Summary, ...]:
    """The same, with ``lost`` and ``awaited`` of those that are ARRIVING."""
    runs: dict[str, list[Summary]] = {}
    if any(s.status == "ARRIVING" for s in summaries):
        for s in summaries:
            runs.setdefault(s.run, []).append(s)
    for its in runs.values():
        its.sort(key=lambda s: s.arrived)
    return tuple(_explained(s, _nearest(runs[s.run], s)) if s.status == "ARRIVING" else s for s in summaries)


def _nearest(run: Sequence[Summary], seen: Summary) -> Iterator[Summary]:
    """The others of which ranks are known, the nearest in time first; ``run`` is in the order of time."""
    after = bisect_right(run, seen.arrived, key=lambda s: s.arrived)
    earlier, later = reversed(run[:after]), iter(run[after:])
    yield from (s for s in merge(earlier, later, key=lambda s: abs(s.arrived - seen.arrived)) if s.ranks and s is not seen)


@dataclass(frozen=True, slots=True)
class _Owner:
    node: str
    location: str


def _explained(seen: Summary, nearest: Iterator[Summary]) -> Summary:
    first = next(nearest, None)
    near = chain([first], nearest) if first else iter(())
    owners = _owners({g.rank for g in seen.gaps if g.rank >= 0 and not g.node}, near)
    known: dict[_Owner | None, list[Gap]] = {}
    for gap in seen.gaps:
        if not gap.node:
            known.setdefault(owners.get(gap.rank), []).append(gap)
    lines = [_line(owner, its) for owner, its in known.items()]
    lines += [f"{g.node}: has sent {_files([g])}, not in the store now" for g in seen.gaps if g.node]
    others = [] if known.keys() - {None} else _others(seen, first)
    lines += [f"{o.node}: has sent nothing of it; it had a part of {o.location}" for o in others]
    awaited = {o.node for o in (*known, *others) if o} | {g.node for g in seen.gaps if g.node}
    more = (f"and {len(lines) - LINES} more",) if len(lines) > LINES else ()
    return replace(seen, lost=(*lines[:LINES], *more), awaited=tuple(sorted(awaited)))


def _owners(wanted: set[int], near: Iterable[Summary]) -> Mapping[int, _Owner]:
    """Who had each of these ranks in the checkpoint nearest in time that tells."""
    found: dict[int, _Owner] = {}
    for other in near:
        if found.keys() >= wanted:
            break
        for node, ranks in other.ranks:
            for number in wanted & numbers(ranks):
                found.setdefault(number, _Owner(node, other.location))
    return found


def _others(seen: Summary, near: Summary | None) -> list[_Owner]:
    """Where no missing rank is known: who took part in the nearest other checkpoint, and not in this."""
    there = {*seen.nodes, *(node for s in seen.siblings for node in s.nodes)}
    return [_Owner(node, near.location) for node, _ in near.ranks if node not in there] if near else []


def _line(owner: _Owner | None, its: Sequence[Gap]) -> str:
    ranks = {g.rank for g in its if g.rank >= 0}
    whose = f"{_plural('rank', len(ranks))} {ranges(ranks)}" if ranks else ""
    who = f"{owner.node}, which had {whose} in {owner.location}" if owner else whose
    what = f"{_files(its)}, which no node has sent" if any(g.files for g in its) else "nothing of it has come"
    return f"{who}: {what}" if who else what


def _files(its: Sequence[Gap]) -> str:
    count, first = sum(g.files for g in its), next(g.first for g in its if g.files)
    return first if count == 1 else f"{first} and {count - 1} more"


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"


def ranges(ranks: Iterable[int]) -> str:
    """``0-3,7``."""
    found: list[list[int]] = []
    for number in sorted(ranks):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


def numbers(text: str) -> set[int]:
    """The ranks that `ranges` wrote."""
    pairs = ([int(n) for n in part.split("-")] for part in text.split(",") if part)
    return {number for first, *last in pairs for number in range(first, (last[0] if last else first) + 1)}
