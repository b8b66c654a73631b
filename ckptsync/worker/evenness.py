"""Has every rank that wrote something written all that it writes?  Pure.

It tells what is missing, and never that nothing is: a rank of which no file is here is not missed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ckptsync.layouts import rank_names
from ckptsync.walk import Stat

# Every rank writes its random state after everything else that it writes: HF Trainer, accelerate, LLaMA-Factory v1
_RANDOM = re.compile(r"rng_state(_[0-9]+)?\.pth|random_states_[0-9]+\.pkl|(.+/)?rng_state/rank_[0-9]+\.pt")
_OF_RANK = re.compile(r"(.*/)?rank_([0-9]+)\.pt")
_PART = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.(safetensors|bin)")


def is_random_state(path: str) -> bool:
    """Whether a rank wrote this, and nothing after it."""
    return _RANDOM.fullmatch(path) is not None


def rank(path: str) -> int | None:
    """The rank whose own file this is; ``None`` where the name does not say."""
    named = _OF_RANK.fullmatch(path)
    return int(named[2]) if named else rank_names.rank(path)


def current(files: Iterable[Stat]) -> list[str]:
    """Names, by path, without random states that are older than what their rank writes before: those are of an older save.

    A second or less is no save, and a ``cp -r`` mixes them that far.
    """
    newest: dict[int, int] = {}
    ordered = sorted(files)
    for file in ordered:
        writer = None if is_random_state(file.path) else rank(file.path)
        if writer is not None:
            newest[writer] = max(newest.get(writer, 0), file.mtime)
    return [f.path for f in ordered if not is_random_state(f.path) or newest.get(_owner(f.path), 0) - f.mtime <= 10**9]


def _owner(path: str) -> int:
    found = rank(path)
    return -1 if found is None else found


def has_every_random_state(names: Iterable[str]) -> bool:
    """Whether each rank of which a file is here has left its random state, so that it had nothing more to write."""
    ranks = _by_rank(names)
    return bool(ranks) and all(_has_random(kinds) for kinds in ranks.values())


def lacking(names: Iterable[str]) -> str:
    """A file that a rank should have written by now, in words; empty if there is none such.

    A rank that has left its random state is done.  Where nobody left one, each rank has every kind of file that another has.
    """
    there = list(names)
    return _late(_by_rank(there)) or _absent_part(there)


def _late(ranks: Mapping[int, set[str]]) -> str:
    if any(map(_has_random, ranks.values())):
        late = next((r for r, kinds in sorted(ranks.items()) if not _has_random(kinds)), None)
        return "" if late is None else f"the random state of rank {late}"
    every = {kind for kinds in ranks.values() for kind in kinds}
    uneven = ((r, kind) for r, kinds in sorted(ranks.items()) for kind in sorted(every - kinds))
    return next((f"{kind.replace('#', '*')} of rank {r}" for r, kind in uneven), "")


def _by_rank(names: Iterable[str]) -> Mapping[int, set[str]]:
    """The kinds of files of each rank: paths without their numbers."""
    ranks: dict[int, set[str]] = {}
    for name in names:
        found = rank(name)
        if found is not None:
            ranks.setdefault(found, set()).add(re.sub(r"[0-9]+", "#", name))
    return ranks


def _has_random(kinds: Iterable[str]) -> bool:
    return any(is_random_state(kind.replace("#", "0")) for kind in kinds)


def _absent_part(names: Iterable[str]) -> str:
    """Of whole weights in numbered parts one that is not there.  One process writes all of them."""
    there = set(names)
    for found in filter(None, map(_PART.fullmatch, sorted(there))):
        parts = (f"{found[1]}-{n:05}-of-{found[3]}.{found[4]}" for n in range(1, int(found[3]) + 1))
        absent = next((p for p in parts if p not in there), "")
        if absent and rank_names.rank(found[0]) is None:
            return absent
    return ""
