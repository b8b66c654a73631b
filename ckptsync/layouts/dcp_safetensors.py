"""torch Distributed Checkpoint in safetensors.

It has a file for each rank, and for each numbered file of the model that the rank has a part of.

``HuggingFaceStorageWriter(save_distributed=True)`` writes it, for torchtitan, NeMo Automodel,
VeOmni and transformers 5 (``save_pretrained(distributed_checkpoint=True)``). A header says where
each box begins (``DCP_SHARDING_INFO``), and nothing how large a tensor is, how many ranks there
were or that all is written: that takes a proof from elsewhere, see `global_shapes`.  Source:
``torch/distributed/checkpoint/{hf_storage,_hf_utils,filesystem}.py``, torch 2.13.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptsync.errors import Corrupt, Incomplete, Unsupported
from ckptsync.formats import safetensors
from ckptsync.layouts import file_names, global_shapes
from ckptsync.layouts.file_names import inside, join
from ckptsync.layouts.global_shapes import ExpectedModel, ShapeProof, more
from ckptsync.plain_json import parse
from ckptsync.tensors import Copy, Files, Part, Shape, Tensor

INFO, VERSION = "DCP_SHARDING_INFO", "DCP_VERSION"
_SHARD = re.compile(r"shard-([0-9]{5,})-model-([0-9]{5,})-of-([0-9]{5,})\.safetensors")
_NOTHING = ExpectedModel()
MOST_RANKS = 1 << 17


@dataclass(frozen=True, slots=True)
class _Shards:
    """What the shards that are here say, and what proves them whole.

    ``boxes`` and ``dtypes`` by tensor; ``absent`` are ranks of the training of which no shard is
    here.
    """

    shards: tuple[str, ...]
    files_per_rank: int
    boxes: Mapping[str, list[Part]]
    dtypes: Mapping[str, str]
    shapes: Mapping[str, Shape]
    proofs: tuple[ShapeProof, ...]
    absent: tuple[int, ...]

    @property
    def lacking(self) -> str:
        """Return what is missing, in words.

        A rank with nothing to write leaves no file: only who names all tensors can tell.
        """
        lacking = global_shapes.lacking(self.boxes, self.shapes, self.proofs)
        known = {proof.names for proof in self.proofs}
        if lacking or "all" in known:
            return lacking
        if self.absent:
            return f"no shard of rank {self.absent[0]}{more(self.absent)} is here"
        count = len(file_names.ranks(self.shards)) * self.files_per_rank
        if "most" not in known and len(self.shards) < count:
            return (
                f"{len(self.shards)} shards are here, {count} expected of {self.files_per_rank}"
                " files a rank"
            )
        return ""


def roots(names: Collection[str]) -> tuple[str, ...]:
    """Return every directory with such shards.

    It is the model's own, or ``sharded`` in it where torch consolidates them.
    """
    return tuple(
        sorted(
            {name.rpartition("/")[0] for name in names if _SHARD.fullmatch(name.rpartition("/")[2])}
        )
    )


def demands(files: Files, root: str, outside: ExpectedModel = _NOTHING) -> dict[str, int | None]:
    """Return the shards and what proves them whole.

    Raises Incomplete where nothing does, and where it is not known which are missing.
    """
    found = _look(files, root, outside)
    lacking = found.lacking
    enough = [proof for proof in found.proofs if proof.names == "all"] or found.proofs
    there = (*found.shards, *(name for proof in enough for name in proof.files))
    needed: dict[str, int | None] = {name: files.sizes()[name] for name in there}
    absent = _absent(found, root) if lacking else ()
    if lacking and not absent:
        raise _incomplete(lacking, absent)
    return needed | dict.fromkeys(absent)


def tensors(files: Files, root: str, outside: ExpectedModel | None = None) -> tuple[Tensor, ...]:
    """Return the weights.

    Raises Incomplete unless something outside of the shards proves every shape, and that nothing is
    missing.

    ``root`` may end in ``#world=N``: the number of ranks, as the caller knows it.  Then the shards
    of all of them prove both.
    """
    found = _look(files, root, outside or _NOTHING)
    if lacking := found.lacking:
        raise _incomplete(lacking, _absent(found, _place(root)[0]))
    return tuple(
        Tensor(
            name,
            found.dtypes[name],
            shape,
            (Copy(found.dtypes[name], shape, _without_empty(found.boxes[name])),),
        )
        for name, shape in found.shapes.items()
    )


def _absent(found: _Shards, root: str) -> tuple[str, ...]:
    """Return the shards of ranks that have none here, where they can be named."""
    ranks = found.absent if found.files_per_rank == 1 else ()
    return tuple(
        join(root, f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors") for rank in ranks
    )


def _incomplete(lacking: str, absent: Sequence[str]) -> Incomplete:
    what = f"; {absent[0]}{more(absent)}: not found" if absent else ""
    return Incomplete(
        f"{lacking}{what}",
        hint="give the other nodes' directories too: shards of some ranks are missing",
    )


def _place(root: str) -> tuple[str, int | None]:
    """Return the directory of a root, and the number of ranks where it is given."""
    folder, mark, number = root.rpartition("#world=")
    if not mark:
        return root, None
    if not number.isdecimal() or not 0 < int(number[:9]) <= MOST_RANKS:
        raise Unsupported(
            f"#world={number:.20}: not a number of ranks",
            hint="give how many ranks wrote the shards: #world=8",
        )
    return "" if folder == "." else folder, int(number)


def _look(files: Files, root: str, outside: ExpectedModel) -> _Shards:
    root, world = _place(root)
    shards, count = _shards(files.sizes(), root)
    boxes: dict[str, list[Part]] = {}
    dtypes: dict[str, str] = {}
    for shard in shards:
        for name, dtype, part in _pieces(files, shard):
            if dtypes.setdefault(name, dtype) != dtype:
                raise Corrupt(
                    f"{shard}: {name} is {dtype}, and {dtypes[name]} in another shard",
                    hint="they belong to different saves",
                )
            boxes.setdefault(name, []).append(part)
    proofs = global_shapes.proofs(files, root, boxes.keys(), outside)
    here = file_names.ranks(shards)
    if world is not None:
        _check_world(world, here, len(shards), count)
        proofs = (*proofs, global_shapes.by_world(boxes))
    wrote = {
        *range(here[-1]),
        *file_names.ranks(files.sizes()),
        *(rank for proof in proofs for rank in proof.ranks),
    }
    absent = tuple(sorted(wrote.difference(here)))
    return _Shards(
        shards, count, boxes, dtypes, global_shapes.shapes(boxes, proofs), proofs, absent
    )


def _shards(names: Collection[str], root: str) -> tuple[tuple[str, ...], int]:
    """Return the shards that are here, and how many files a rank may have.

    All must say the same of that.
    """
    found = {
        full: match
        for base, full in inside(names, root).items()
        if (match := _SHARD.fullmatch(base))
    }
    counts = {int(match[3]) for match in found.values()}
    odd = [
        full
        for full, match in found.items()
        if not (0 < int(match[1]) <= MOST_RANKS and 0 < int(match[2]) <= int(match[3]))
    ]
    if odd or len(counts) != 1:
        what = (
            f"{min(odd)}: no shard has such a number"
            if odd
            else f"{root or '.'}: shards of {len(counts)} different sets"
        )
        raise Corrupt(what, hint="files of an earlier save may be among them")
    return tuple(sorted(found)), counts.pop()


def _check_world(world: int, here: Sequence[int], shards: int, count: int) -> None:
    if here[-1] >= world:
        raise Corrupt(
            f"a shard of rank {here[-1]}, of {world} ranks",
            hint="it was left by an earlier save, or there were more ranks",
        )
    if shards != world * count:
        absent = sorted(set(range(world)).difference(here))
        which = f": none of rank {absent[0]}{more(absent)}" if absent else ""
        raise Incomplete(
            f"{shards} shards are here, {world * count} expected of {world} ranks{which}"
        )


def _pieces(files: Files, shard: str) -> Iterator[tuple[str, str, Part]]:
    """Yield name, dtype and box of everything in one file."""
    held, metadata = safetensors.contents(files, shard)
    begins = _begins(shard, metadata)
    if begins.keys() != {tensor.name for tensor in held}:
        raise Corrupt(f"{shard}: {INFO} names other tensors than the file has")
    for tensor in held:
        (part,) = tensor.copies[0].parts
        offsets = begins[tensor.name]
        if len(offsets) != len(tensor.shape):
            raise Corrupt(
                f"{shard}: {tensor.name} has {len(tensor.shape)} axes and begins at {offsets}"
            )
        yield tensor.name, tensor.dtype, Part(offsets, part.sizes, part.extent)


def _begins(shard: str, metadata: Mapping[str, Any]) -> dict[str, Shape]:
    """Return where each box begins in its tensor."""
    if INFO not in metadata:
        raise Unsupported(
            f"{shard}: no {INFO}, so nothing says which part of a tensor it has",
            hint="check that torch's DCP wrote it",
        )
    if metadata.get(VERSION) != "1.0":
        raise Unsupported(f"{shard}: {VERSION} {metadata.get(VERSION)!r:.40}, 1.0 is known")
    try:
        info = parse(metadata[INFO], f"{shard}: {INFO}", unique=safetensors.unique)
        return {name: _offsets(entry["saved_offsets"]) for name, entry in info.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise Corrupt(
            f"{shard}: {INFO} does not say where the boxes begin: {type(e).__name__}: {e}"
        ) from e


def _offsets(value: list[Any]) -> Shape:
    if value and (set(map(type, value)) != {int} or min(value) < 0 or max(value) >= 1 << 63):
        raise ValueError(f"offsets {value!r:.100}")
    return tuple(value)


def _without_empty(parts: Collection[Part]) -> tuple[Part, ...]:
    return tuple(part for part in parts if 0 not in part.sizes)
