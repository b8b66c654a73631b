"""Checkpoints with one file a rank, of accelerate, verl and torchtitan: join the ranks' shards.

accelerate writes ``pytorch_model_fsdp_0_rank3.bin`` with ``use_dcp=False``, verl
``model_world_size_8_rank_3.pt``. ``torch_checkpointing``, torchtitan's second checkpointer, writes
``model_3.pt``, and beside it ``metadata.pkl``, which says how many ranks there are. A root is the
common beginning of the names of all ranks' files: ``pytorch_model_fsdp_0``, ``actor/model``.

A sharded tensor records its placements, so its boxes are known (`sharded_tensors`); a plain tensor
is replicated, and rank 0's is used. A tensor may lie on some axes of the mesh only (FSDP within
tensor parallelism that leaves it alone): each group of ranks then has all of it, which only equal
bytes can prove.

Sources: accelerate 1.15 (``save_fsdp_model``, ``use_dcp=False``; LOCAL_STATE_DICT of every version
has the same names), verl 0.9 (``FSDPCheckpointManager.save_checkpoint``), torch_checkpointing 0.1.1
(``checkpoint_layout.py``, ``distributed_metadata.py``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ckptsync.errors import Corrupt, Incomplete, Unsupported, name_in_errors
from ckptsync.formats import torch_save
from ckptsync.formats.dtypes import ITEMSIZE
from ckptsync.formats.pickles import MAX_BYTES, brief, loads
from ckptsync.formats.torch_pickle import StoredTensor, Wrapped, plain_tensor
from ckptsync.layouts.file_names import MOST_RANKS, PICKLED_METADATA, inside, join
from ckptsync.layouts.sharded_tensors import (
    ALLOWED,
    DTENSORS,
    SHARDED_TENSOR,
    Meshes,
    RankShards,
    dtensor_share,
    sharded_share,
)
from ckptsync.layouts.state_dict import entries, is_extra_state, without_extra_states
from ckptsync.tensors import Copy, Extent, Files, Part, Shape, Tensor, read_whole

# what all ranks' names begin with, what follows it, the rank and the end
_NAME = re.compile(
    r"((?:pytorch_model_fsdp|optimizer)(?:_[0-9]+)?)(_rank)([0-9]+)(\.bin)"
    r"|(model|optim|extra_state)(_world_size_[0-9]+_rank_)([0-9]+)(\.pt)"
    r"|(model|optimizer)(_)([0-9]+)(\.pt)"
)
_WORLD = re.compile(r"_world_size_([0-9]+)_rank_")
_MIXED = "files of different saves are mixed: give only those of one"


@dataclass(frozen=True, slots=True)
class RankFile:
    """The parts of a file's name.

    ``stem``: the common beginning of all ranks' names. ``world``: None if the name does not say it.
    ``before`` and ``end``: the text before and after the rank.
    """

    stem: str
    rank: int
    world: int | None
    before: str
    end: str

    def of(self, rank: int) -> str:
        """Return the name of the same file of another rank."""
        return f"{self.stem}{self.before}{rank}{self.end}"

    @property
    def metadata(self) -> str:
        """The file that says the number of ranks, if torch_checkpointing wrote it; else empty."""
        return join(self.stem.rpartition("/")[0], PICKLED_METADATA) if self.before == "_" else ""


def rank_file(name: str) -> RankFile | None:
    """Return the parts of a name; None for a file that does not belong to one rank."""
    folder, slash, base = name.rpartition("/")
    match = _NAME.fullmatch(base)
    if match is None:
        return None
    stem, before, rank, end = filter(None, match.groups())
    world = _WORLD.fullmatch(before)
    return RankFile(
        f"{folder}{slash}{stem}", int(rank), int(world[1]) if world else None, before, end
    )


def of_stem(names: Collection[str], stem: str) -> list[tuple[RankFile, str]]:
    """Return the existing files of all ranks with this beginning, in the order of the ranks."""
    claimed_files = _claimed(inside(names, stem.rpartition("/")[0]).values())
    return sorted(
        ((parts, name) for parts, name in claimed_files if parts.stem == stem),
        key=lambda f: (f[0].rank, f[1]),
    )


def _claimed(names: Collection[str]) -> Iterator[tuple[RankFile, str]]:
    """Yield the parts of its name, and the name, of each file that belongs to one rank.

    A ``model_0.pt`` without its metadata among ``names`` may be any program's, and is left out.
    """
    for name in names:
        parts = rank_file(name)
        if parts and (not parts.metadata or parts.metadata in names):
            yield parts, name


def roots(names: Collection[str]) -> tuple[str, ...]:
    """Return the common beginnings of each set of ranks' files, whatever states they hold."""
    return tuple(sorted({parts.stem for parts, _ in _claimed(names)}))


def demands(files: Files, root: str) -> dict[str, int | None]:
    """Return every rank's file, and the metadata if there is any; their sizes are not known.

    The metadata, verl's names or the model's sharded tensors, for which a file is loaded, say how
    many ranks there are. Raise Incomplete if none does, or no file is here; Corrupt if files are of
    different saves; else as `load`.
    """
    existing = of_stem(files.sizes(), root)
    if not existing:
        raise Incomplete(
            f"{root}: no file of any rank found, or not the {PICKLED_METADATA} beside",
            hint="rank 0 of torch_checkpointing writes that: add the directory of its node",
        )
    worlds = {parts.world for parts, _ in existing}
    if len(worlds) > 1:
        raise Corrupt(
            f"{root}: files of worlds of {' and '.join(map(str, sorted(filter(None, worlds))))}"
            " ranks",
            hint=_MIXED,
        )
    first = existing[0][0]
    world = (
        _world_of_metadata(files, first.metadata)
        if first.metadata
        else first.world or _world_of_model(files, root)
    )
    if world > MOST_RANKS:
        raise Corrupt(f"{root}: files of {world} ranks: no training has so many ranks", hint=_MIXED)
    extra_files = [name for parts, name in existing if parts.rank >= world]
    if extra_files or not world:
        raise Corrupt(
            f"{extra_files[0] if extra_files else root}: its rank does not fit a world size of"
            f" {world}",
            hint=_MIXED,
        )
    needed = dict.fromkeys(map(first.of, range(world)))
    return needed | ({first.metadata: None} if first.metadata else {})


def tensors(files: Files, root: str) -> tuple[Tensor, ...]:
    """Load all ranks' files, and return every tensor, joined, without extra states.

    Raise Incomplete if a file is missing, Corrupt if one is damaged or of another save, Unsupported
    if nothing says how to join them.
    """
    names = [name for name in demands(files, root) if rank_file(name)]
    loaded = [load(files, name, rank) for rank, name in enumerate(names)]
    for rank_content in loaded[1:]:
        if rank_content.tensors.keys() != loaded[0].tensors.keys():
            odd = sorted(rank_content.tensors.keys() ^ loaded[0].tensors.keys())
            raise Corrupt(f"{rank_content.name}: {odd[0]} is not in every rank's file", hint=_MIXED)
    joined = tuple(_joined(files, loaded, key) for key in loaded[0].tensors)
    _check_not_cut(joined, loaded[0])
    return without_extra_states(tuple(_tied(joined, loaded)), loaded[0].extra)


def _world_of_metadata(files: Files, name: str) -> int:
    """Return the number of ranks in torch_checkpointing's metadata; raise Corrupt if it is none."""
    with name_in_errors(name):
        value, _ = loads(read_whole(files, name, MAX_BYTES), {})
    world = value.get("world_size") if isinstance(value, dict) else None
    if type(world) is not int or not 0 < world < MOST_RANKS:
        raise Corrupt(f"{name}: world_size is {brief(world)}", hint="it is damaged: fetch it again")
    return world


def _world_of_model(files: Files, root: str) -> int:
    """Return the number of ranks, from the first of the model's files; ``root`` may be the model.

    Its sharded tensors say it; without any it is the highest rank with a file, and one. Raise
    Incomplete if there is no such file, else as `load`.
    """
    folder, slash, base = root.rpartition("/")
    model = f"{folder}{slash}{base.replace('optimizer', 'pytorch_model_fsdp')}"
    existing = of_stem(files.sizes(), model)
    if not existing:
        raise Incomplete(
            f"{root}: world size unknown: the model's own files ({model}_rank*.bin), which tell it,"
            " are missing",
            hint="give their directory too",
        )
    first, name = existing[0]
    shares = {
        key: tensor
        for key, tensor in load(files, name, first.rank).tensors.items()
        if isinstance(tensor, RankShards)
    }
    if not shares:  # each holds everything: see `_check_not_cut`
        return existing[-1][0].rank + 1
    return max(share.world for share in shares.values())


def _joined(files: Files, loaded: Sequence[LoadedRank], key: str) -> Tensor:
    """Return one tensor, joined from all ranks, which is rank 0's with a remark if they are whole.

    Raise Corrupt if ranks disagree on its kind, dtype, shape or cuts; else as `_copy`.
    """
    per_rank = [file.tensors[key] for file in loaded]
    if len(set(map(_kind, per_rank))) > 1:
        odd = next(n for n, h in enumerate(per_rank) if _kind(h) != _kind(per_rank[0]))
        raise Corrupt(
            f"{loaded[odd].name}: {key} is {_kind(per_rank[odd])}, and {_kind(per_rank[0])} in"
            f" {loaded[0].name}",
            hint=_MIXED,
        )
    shares = [h for h in per_rank if isinstance(h, RankShards)]
    if not shares:
        return _replicated(files, loaded, key, [h for h in per_rank if isinstance(h, StoredTensor)])
    _check_agreement(loaded, key, shares)
    return Tensor(key, shares[0].dtype, shares[0].shape, (_copy(files, loaded, key, shares),))


def _check_not_cut(tensors: Sequence[Tensor], first: LoadedRank) -> None:
    """Raise Unsupported if files have no tensors, or shards that nothing says how to join.

    Without any sharded tensor in ``first`` the files are whole models if they are equal. If some of
    ``tensors`` has a remark, they differ: they were cut in an unknown way.
    """
    if any(isinstance(rank_tensor, RankShards) for rank_tensor in first.tensors.values()):
        return
    if not tensors:
        raise Unsupported(f"{first.name}: holds no tensors")
    if any(tensor.remark for tensor in tensors):
        raise Unsupported(
            f"{first.name}: its tensors are not sharded, and other ranks' differ: nothing says how"
            " they go together"
        )


def _kind(tensor: RankTensor) -> str:
    """Return what a rank has of a tensor as text, to compare and for messages."""
    kind = "a shard of" if isinstance(tensor, RankShards) else "a whole"
    return f"{kind} {tensor.dtype} {tensor.shape}"


def _check_agreement(loaded: Sequence[LoadedRank], key: str, shares: Sequence[RankShards]) -> None:
    """Raise Corrupt unless all ranks, or each of several groups, cut the tensor alike.

    So it is, too, if the tensor's world size is not the number of files, or a group lacks a rank.
    """
    # a slice of an older mesh knows its own ranks alone
    first, world = (shares[0], max(share.world for share in shares))
    groups = Counter(share.peers for share in shares if share.group < len(loaded))
    for file, share in zip(loaded, shares, strict=True):
        is_alone = (
            share.group < len(loaded) and bool(share.peers) and groups[share.peers] != share.group
        )
        if world != len(loaded) or (share.cut, share.group) != (first.cut, first.group) or is_alone:
            raise Corrupt(
                f"{file.name}: {key} is sharded differently than {loaded[0].name} and a world size"
                f" of {len(loaded)} require",
                hint=_MIXED,
            )


def _copy(
    files: Files, loaded: Sequence[LoadedRank], key: str, shares: Sequence[RankShards]
) -> Copy:
    """Return each box once, of the lowest rank that holds it, with other ranks' replicas.

    Empty boxes are left out; ``doubt`` is set if a group of ranks has all of the tensor. Raise
    Corrupt if some boxes are on more ranks than others, Unsupported as `_with_replicas`.
    """
    parts_by_box: dict[tuple[Shape, Shape], list[Part]] = {}
    for file, share in zip(loaded, shares, strict=True):
        for offsets, stored in share.pieces:
            if stored.numel:
                part = torch_save.part(files, file.container, stored)
                parts_by_box.setdefault((offsets, part.sizes), []).append(
                    Part(offsets, part.sizes, part.extent, part.strides, part.checksum)
                )
    if len(set(map(len, parts_by_box.values()))) > 1:
        raise Corrupt(
            f"{loaded[0].name}: some parts of {key} are on more ranks than others", hint=_MIXED
        )
    dtype, shape, group = shares[0].dtype, shares[0].shape, shares[0].group
    doubt = f"lies on {group} of {len(loaded)} ranks"
    parts = tuple(_with_replicas(key, dtype, each) for each in parts_by_box.values())
    return Copy(dtype, shape, parts, doubt=doubt if group < len(loaded) else "")


def _with_replicas(key: str, dtype: str, parts: Sequence[Part]) -> Part:
    """Return the first of ``parts`` with the others as its replicas.

    Raise Unsupported if they are stored in another order, or with gaps.
    """
    first = parts[0]
    for part in parts[1:]:
        if (
            part.strides != first.strides
            or not part.extent.size == first.extent.size == prod(part.sizes) * ITEMSIZE[dtype]
        ):
            raise Unsupported(
                f"{part.extent.file}: {key} is stored in another order, or with gaps, so that it"
                f" cannot be compared with the replica in {first.extent.file}",
                hint="make it contiguous before saving",
            )
    return replace(first, replicas=tuple(parts[1:]))


def _replicated(
    files: Files, loaded: Sequence[LoadedRank], key: str, stored: Sequence[StoredTensor]
) -> Tensor:
    """Return rank 0's tensor, as torch does; a remark says if other ranks' CRC32s differ.

    No remark without CRC32s, or if a tensor is only a part of its record.
    """
    parts = [
        torch_save.part(files, file.container, tensor)
        for file, tensor in zip(loaded, stored, strict=True)
    ]
    sums = {part.checksum.crc32 for part in parts if part.checksum}
    is_whole = all(part.checksum and part.extent == part.checksum.extent for part in parts)
    remark = (
        f"{key} is no sharded tensor, and differs between ranks: rank 0's is taken"
        if is_whole and len(sums) > 1
        else ""
    )
    return Tensor(
        key,
        stored[0].dtype,
        stored[0].shape,
        (Copy(stored[0].dtype, stored[0].shape, (parts[0],)),),
        remark=remark,
    )


def _tied(tensors: Iterable[Tensor], loaded: Sequence[LoadedRank]) -> Iterator[Tensor]:
    """Yield the tensors; a name with the dtype, shape and elements of an earlier one is tied to it.

    The elements must be the same on every rank; a tensor without elements is not tied.
    """
    owners: dict[object, str] = {}
    for tensor in tensors:
        views = tuple(_views(file.tensors[tensor.name]) for file in loaded)
        owner = (
            owners.setdefault((tensor.dtype, tensor.shape, views), tensor.name)
            if any(views)
            else tensor.name
        )
        yield tensor if owner == tensor.name else replace(tensor, tied=owner)


def _views(tensor: RankTensor) -> tuple[object, ...]:
    """Return which elements of which storages a rank has of a tensor; empty ones are left out."""
    stored = [piece for _, piece in tensor.pieces] if isinstance(tensor, RankShards) else [tensor]
    return tuple((s.storage.key, s.offset, s.shape, s.strides) for s in stored if s.numel)


# One rank's file

RankTensor = RankShards | StoredTensor


@dataclass(frozen=True, slots=True)
class LoadedRank:
    """The content of one rank's file: its share of sharded tensors, and plain ones.

    ``extra``: the names of modules' extra states.
    """

    name: str
    container: torch_save.Container
    tensors: dict[str, RankTensor]
    extra: tuple[str, ...]


def load(files: Files, name: str, rank: int) -> LoadedRank:
    """Return the content of one file.

    Raise Incomplete if it is missing; Corrupt if it is damaged, no dictionary, or its sharded
    tensors are another rank's than ``rank``; Unsupported if a dictionary lies in it or a tensor
    cannot be joined.
    """
    if name not in files.sizes():
        raise Incomplete(
            f"{name}: not found",
            hint=(
                "each rank writes a file of its own: add the directory of the node that ran this"
                " rank"
            ),
        )
    with name_in_errors(name):
        value, container = torch_save.load(files, Extent(name, 0, files.sizes()[name]), ALLOWED)
        tensors = dict(_read_tensors(value))
        extra = tuple(filter(is_extra_state, value))
    strangers = {tensor.rank for tensor in tensors.values() if isinstance(tensor, RankShards)} - {
        rank
    }
    if strangers:
        raise Corrupt(
            f"{name}: rank {min(strangers)} wrote it",
            hint="files were renamed, or come from different saves",
        )
    return LoadedRank(name, container, tensors, extra)


def _read_tensors(value: Any) -> Iterator[tuple[str, RankTensor]]:
    """Yield name and tensor of a state dict; raises as `load`."""
    if not isinstance(value, dict):
        raise Corrupt(f"a {type(value).__name__}, a state dict expected")
    nested = [key for key, item in value.items() if isinstance(item, dict)]
    if any(not is_extra_state(key) for key in nested):
        raise Unsupported(
            f"{brief(nested[0])} is a dictionary, a tensor expected",
            hint="only flat state dicts are read",
        )
    meshes: Meshes = {}
    for key, item in entries(value):
        yield key, _read_tensor(key, item, meshes)


def _read_tensor(key: str, value: Any, meshes: Meshes) -> RankTensor:
    """Return a tensor or the rank's share, adding its mesh to ``meshes``; raises as `load`."""
    if key.rpartition(".")[2] == "_flat_param":
        raise Unsupported(
            "FSDP's LOCAL_STATE_DICT: flattened parameters, whose names and shapes are not in the"
            " files",
            hint=(
                "save with SHARDED_STATE_DICT or FULL_STATE_DICT; these files load only into the"
                " same model, wrapped the same way"
            ),
        )
    with name_in_errors(key):
        if isinstance(value, Wrapped) and value.kind in DTENSORS:
            return dtensor_share(value, meshes)
        if isinstance(value, Wrapped) and value.kind == SHARDED_TENSOR:
            return sharded_share(value)
        tensor = plain_tensor(value)
    if tensor is None:
        raise Corrupt(f"{key}: no tensor")
    return tensor
