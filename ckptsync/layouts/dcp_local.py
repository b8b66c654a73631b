"""A distributed checkpoint that every rank describes for itself: ``__0.metadata``, ``__1.metadata``, … in place of ``.metadata``.

``dcp.save(…, use_collectives=False)`` lets no rank know of another, so each says which boxes of which tensors it wrote, and nobody says how many
ranks there were (``torch/distributed/checkpoint/filesystem.py`` 2.13, ``_get_metadata_path``).  A tensor that only a missing rank had would be
missed by nothing: so the number must be known from elsewhere, from the random states of every rank beside it, or from the caller.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ckptsync.errors import Corrupt, Incomplete, Unsupported
from ckptsync.formats.pickles import MAX_BYTES, brief
from ckptsync.layouts import dcp_metadata
from ckptsync.layouts.dcp_described import METADATA, Box, Described, Item, Key
from ckptsync.layouts.dcp_metadata import Metadata
from ckptsync.layouts.names import join
from ckptsync.model import Files, Shape, read_whole

_OWN = re.compile(r"__([0-9]{1,9})\.metadata")
_OF_EVERY_RANK = re.compile(r"(rng_state_|random_states_)([0-9]{1,9})(\.pth|\.pkl)")


def is_own(base: str) -> bool:
    """Whether a file of this name is one rank's own metadata."""
    return _OWN.fullmatch(base) is not None


def describing(names: Collection[str], root: str) -> tuple[str, ...]:
    """The files that describe the checkpoint in ``root``, in the order of ranks; none where they are missing."""
    name = join(root, METADATA)
    if name in names:
        return (name,)
    found = {int(m[1]): n for n in names if n.rpartition("/")[0] == root and (m := _OWN.fullmatch(n.rpartition("/")[2]))}
    return tuple(found[rank] for rank in sorted(found))


@dataclass(frozen=True, slots=True, eq=False)
class Told:
    """What is said of a checkpoint, and every item that its files hold, replicas too."""

    metadata: Metadata
    items: tuple[Item, ...]
    remark: str = ""


def described(files: Files, root: str, world: int | None) -> Told:
    """What the metadata in ``root`` says, whoever wrote it; ``world`` is the number of ranks where the caller knows it.

    Raises Incomplete on a node without it, or where ranks are missing, or where nothing says that none are.
    """
    names = describing(files.sizes(), root)
    if not names or names[0].rpartition("/")[2] == METADATA:
        if any(is_own(n.rpartition("/")[2]) for n in files.sizes() if n.rpartition("/")[0] == root):
            raise Unsupported(
                f"{join(root, METADATA)}: beside metadata of single ranks: two saves in one directory",
                hint="take away what the older one left",
            )
        told = dcp_metadata.metadata(files, root)
        return Told(told, tuple(told.items.values()))
    _check_ranks(files.sizes(), root, names, world)
    data = tuple(read_whole(files, name, MAX_BYTES) for name in names)
    together = _together(data, names, root)
    remark = "" if world else f"{len(names)} ranks wrote it, as their random states say, and nothing else does"
    return replace(together, remark=remark)


def _check_ranks(sizes: Collection[str], root: str, names: Sequence[str], world: int | None) -> None:
    ranks = [int(_OWN.fullmatch(n.rpartition("/")[2])[1]) for n in names]  # type: ignore[index]
    wanted = world or _world(sizes, root)
    if wanted is None:
        raise Incomplete(
            f"{root or '.'}: metadata of ranks {_told(ranks)}, and nothing says how many ranks there were",
            hint=f"if these are all: --source 'dcp:{root or '.'}#world={len(ranks)}'; random states of every rank beside it say so too",
        )
    missing = sorted(set(range(wanted)) - set(ranks))
    if missing:
        raise Incomplete(
            f"{join(root, f'__{missing[0]}.metadata')}: not there, of {wanted} ranks", hint="give the other nodes' directories too"
        )
    if ranks[-1] >= wanted:
        raise Corrupt(
            f"{root or '.'}: metadata of rank {ranks[-1]}, of {wanted} ranks", hint="are there shards of an older, larger save?"
        )


def _world(sizes: Collection[str], root: str) -> int | None:
    """As the random states of every rank tell, beside the shards or in the directory around."""
    places = {root, root.rpartition("/")[0]}
    found = {int(m[2]) for n in sizes if n.rpartition("/")[0] in places and (m := _OF_EVERY_RANK.fullmatch(n.rpartition("/")[2]))}
    return max(found) + 1 if found else None


def _told(ranks: Sequence[int]) -> str:
    return f"{ranks[0]} to {ranks[-1]}" if len(ranks) > 2 else " and ".join(map(str, ranks))


@lru_cache(maxsize=1)
def _together(data: tuple[bytes, ...], names: tuple[str, ...], root: str) -> Told:
    """One description of all; of a box that several ranks have, which is a replica, the lowest rank's."""
    parts = [_one(content, name, root) for content, name in zip(data, names, strict=True)]
    items: dict[Key, Item] = {}
    for part in parts:
        for key, item in part.items.items():
            items.setdefault(key, item)
    fields = {
        "state_dict_metadata": _tensors([part.fields["state_dict_metadata"] for part in parts]),
        "planner_data": _paths([part.fields.get("planner_data") for part in parts]),
        "storage_data": {},
    }
    return Told(Metadata(fields, items), tuple(item for part in parts for item in part.items.values()))


def _one(data: bytes, name: str, root: str) -> Metadata:
    try:
        return dcp_metadata.parsed.__wrapped__(data, root)
    except (Corrupt, Unsupported) as e:
        raise type(e)(f"{name}: {e}", hint=e.hint) from e


def _tensors(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    found: dict[str, list[Any]] = {}
    for part in parts:
        for name, described in part.items():
            found.setdefault(name, []).append(described)
    return {name: _joined(name, told) if len(told) > 1 else told[0] for name, told in found.items()}


def _joined(name: str, told: Sequence[Any]) -> Any:
    """One tensor as several ranks describe it: their boxes, each once."""
    tensors = [t for t in told if type(t) is Described]
    if not tensors:
        return told[0]  # a blob that each rank has of its own
    if len(tensors) != len(told) or len({(t.shape, t.dtype) for t in tensors}) > 1:
        raise Corrupt(f"{brief(name)}: ranks disagree on its shape or dtype", hint="are they of one save?")
    boxes: dict[Shape, Box] = {}
    for box in (box for tensor in tensors for box in tensor.boxes if 0 not in box.sizes):
        if boxes.setdefault(box.offsets, box).sizes != box.sizes:
            raise Corrupt(f"{brief(name)}: ranks disagree on the box at {box.offsets}", hint="are they of one save?")
    return tensors[0].with_boxes(boxes.values())


def _paths(parts: Iterable[Any]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for part in parts:
        for name, path in part.items() if isinstance(part, dict) else ():
            if found.setdefault(name, path) != path:
                raise Corrupt(f"{brief(name)}: ranks disagree on its path", hint="are they of one save?")
    return found
