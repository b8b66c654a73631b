"""Checkpoints with one file a rank, of accelerate, verl and torchtitan.

accelerate writes ``pytorch_model_fsdp_0_rank3.bin`` with ``use_dcp=False``, verl
``model_world_size_8_rank_3.pt``. ``torch_checkpointing``, torchtitan's second checkpointer, writes
``model_3.pt``, and ``metadata.pkl`` beside it, which says how many ranks there are.

A root is what the names of all ranks' files begin with: ``pytorch_model_fsdp_0``, ``actor/model``.
Placements say what is cut and how; a plain tensor is replicated, and rank 0's is taken. A tensor
may lie on some axes of the mesh only (FSDP within tensor parallelism that leaves it alone): each
group of ranks then has all of it, which nothing but equal bytes can prove.

Sources: accelerate 1.15 (``save_fsdp_model``, ``use_dcp=False``; LOCAL_STATE_DICT of every version
has the same names), verl (``FSDPCheckpointManager.save_checkpoint``),
torch_checkpointing 0.1.1 (``checkpoint_layout.py``, ``distributed_metadata.py``).
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

    ``stem`` is what all ranks' names begin with. ``world`` is None where the name does not say it.
    ``before`` and ``end`` stand before and behind the rank.
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
        """Return the file that tells the number of ranks, where torch_checkpointing wrote it."""
        return join(self.stem.rpartition("/")[0], PICKLED_METADATA) if self.before == "_" else ""


def rank_file(name: str) -> RankFile | None:
    """Return the name taken apart; None for files that are not of one rank each."""
    folder, slash, base = name.rpartition("/")
    found = _NAME.fullmatch(base)
    if found is None:
        return None
    stem, before, rank, end = filter(None, found.groups())
    world = _WORLD.fullmatch(before)
    return RankFile(
        f"{folder}{slash}{stem}", int(rank), int(world[1]) if world else None, before, end
    )


def of_stem(names: Collection[str], stem: str) -> list[tuple[RankFile, str]]:
    """Return the files of all ranks that are here, in the order of the ranks."""
    own = _claimed(inside(names, stem.rpartition("/")[0]).values())
    return sorted(
        ((found, name) for found, name in own if found.stem == stem),
        key=lambda f: (f[0].rank, f[1]),
    )


def _claimed(names: Collection[str]) -> Iterator[tuple[RankFile, str]]:
    """Yield the files of one rank each; a ``model_0.pt`` without its metadata is anybody's."""
    for name in names:
        found = rank_file(name)
        if found and (not found.metadata or found.metadata in names):
            yield found, name


def roots(names: Collection[str]) -> tuple[str, ...]:
    """Return what the names of each set of ranks' files begin with, whatever states they hold."""
    return tuple(sorted({found.stem for found, _ in _claimed(names)}))


def demands(files: Files, root: str) -> dict[str, int | None]:
    """Return every rank's file, as verl's names or the model's sharded tensors count them."""
    there = of_stem(files.sizes(), root)
    if not there:
        raise Incomplete(
            f"{root}: no file of any rank found, or not the {PICKLED_METADATA} beside",
            hint="rank 0 of torch_checkpointing writes that: add the directory of its node",
        )
    worlds = {found.world for found, _ in there}
    if len(worlds) > 1:
        raise Corrupt(
            f"{root}: files of worlds of {' and '.join(map(str, sorted(filter(None, worlds))))}"
            " ranks",
            hint=_MIXED,
        )
    first = there[0][0]
    world = (
        _world_of_metadata(files, first.metadata)
        if first.metadata
        else first.world or _world_of_model(files, root)
    )
    if world > MOST_RANKS:
        raise Corrupt(f"{root}: files of {world} ranks: no training has so many ranks", hint=_MIXED)
    beyond = [name for found, name in there if found.rank >= world]
    if beyond or not world:
        raise Corrupt(
            f"{beyond[0] if beyond else root}: its rank does not fit a world size of {world}",
            hint=_MIXED,
        )
    needed = dict.fromkeys(map(first.of, range(world)))
    return needed | ({first.metadata: None} if first.metadata else {})


def tensors(files: Files, root: str) -> tuple[Tensor, ...]:
    """Return every tensor, put together from all ranks' files."""
    names = [name for name in demands(files, root) if rank_file(name)]
    loaded = [load(files, name, rank) for rank, name in enumerate(names)]
    for other in loaded[1:]:
        if other.tensors.keys() != loaded[0].tensors.keys():
            odd = sorted(other.tensors.keys() ^ loaded[0].tensors.keys())
            raise Corrupt(f"{other.name}: {odd[0]} is not in every rank's file", hint=_MIXED)
    found = tuple(_joined(files, loaded, key) for key in loaded[0].tensors)
    _check_not_cut(found, loaded[0])
    return without_extra_states(tuple(_tied(found, loaded)), loaded[0].extra)


def _world_of_metadata(files: Files, name: str) -> int:
    """Return the number of ranks that torch_checkpointing's metadata tells: plain values."""
    with name_in_errors(name):
        value, _ = loads(read_whole(files, name, MAX_BYTES), {})
    world = value.get("world_size") if isinstance(value, dict) else None
    if type(world) is not int or not 0 < world < MOST_RANKS:
        raise Corrupt(f"{name}: world_size is {brief(world)}", hint="it is damaged: fetch it again")
    return world


def _world_of_model(files: Files, root: str) -> int:
    """Return the number of ranks, from the model's files beside an optimizer's."""
    folder, slash, base = root.rpartition("/")
    model = f"{folder}{slash}{base.replace('optimizer', 'pytorch_model_fsdp')}"
    there = of_stem(files.sizes(), model)
    if not there:
        raise Incomplete(
            f"{root}: world size unknown: the model's own files ({model}_rank*.bin), which tell it,"
            " are missing",
            hint="give their directory too",
        )
    first, name = there[0]
    shares = {
        key: held
        for key, held in load(files, name, first.rank).tensors.items()
        if isinstance(held, RankShards)
    }
    if not shares:  # each holds everything: see `_check_not_cut`
        return there[-1][0].rank + 1
    return max(share.world for share in shares.values())


def _joined(files: Files, loaded: Sequence[LoadedRank], key: str) -> Tensor:
    held = [file.tensors[key] for file in loaded]
    if len(set(map(_kind, held))) > 1:
        odd = next(n for n, h in enumerate(held) if _kind(h) != _kind(held[0]))
        raise Corrupt(
            f"{loaded[odd].name}: {key} is {_kind(held[odd])}, and {_kind(held[0])} in"
            f" {loaded[0].name}",
            hint=_MIXED,
        )
    shares = [h for h in held if isinstance(h, RankShards)]
    if not shares:
        return _replicated(files, loaded, key, [h for h in held if isinstance(h, StoredTensor)])
    _check_agreement(loaded, key, shares)
    return Tensor(key, shares[0].dtype, shares[0].shape, (_copy(files, loaded, key, shares),))


def _check_not_cut(found: Sequence[Tensor], first: LoadedRank) -> None:
    """Raise Unsupported if files are shards that nothing says how to join.

    Files without one sharded tensor are whole models if they are the same. If they differ, they
    were cut in an unknown way.
    """
    if any(isinstance(held, RankShards) for held in first.tensors.values()):
        return
    if not found:
        raise Unsupported(f"{first.name}: holds no tensors")
    if any(tensor.remark for tensor in found):
        raise Unsupported(
            f"{first.name}: its tensors are not sharded, and other ranks' differ: nothing says how"
            " they go together"
        )


def _kind(held: RankTensor) -> str:
    return (
        f"{'a shard of' if isinstance(held, RankShards) else 'a whole'} {held.dtype} {held.shape}"
    )


def _check_agreement(loaded: Sequence[LoadedRank], key: str, shares: Sequence[RankShards]) -> None:
    """Raise Corrupt unless all ranks, or each of several groups, cut the tensor alike."""
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
    """Return each piece once, of the lowest rank that holds it, with the other ranks' copies."""
    found: dict[tuple[Shape, Shape], list[Part]] = {}
    for file, share in zip(loaded, shares, strict=True):
        for offsets, stored in share.pieces:
            if stored.numel:
                part = torch_save.part(files, file.container, stored)
                found.setdefault((offsets, part.sizes), []).append(
                    Part(offsets, part.sizes, part.extent, part.strides, part.checksum)
                )
    if len(set(map(len, found.values()))) > 1:
        raise Corrupt(
            f"{loaded[0].name}: some parts of {key} are on more ranks than others", hint=_MIXED
        )
    dtype, shape, group = shares[0].dtype, shares[0].shape, shares[0].group
    doubt = f"lies on {group} of {len(loaded)} ranks"
    parts = tuple(_with_replicas(key, dtype, each) for each in found.values())
    return Copy(dtype, shape, parts, doubt=doubt if group < len(loaded) else "")


def _with_replicas(key: str, dtype: str, parts: Sequence[Part]) -> Part:
    """Return the first with the others as its replicas, if they can be compared."""
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
    files: Files, loaded: Sequence[LoadedRank], key: str, held: Sequence[StoredTensor]
) -> Tensor:
    """Return rank 0's, as torch gathers it; a remark says where other ranks' differ."""
    parts = [
        torch_save.part(files, file.container, tensor)
        for file, tensor in zip(loaded, held, strict=True)
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
        held[0].dtype,
        held[0].shape,
        (Copy(held[0].dtype, held[0].shape, (parts[0],)),),
        remark=remark,
    )


def _tied(found: Iterable[Tensor], loaded: Sequence[LoadedRank]) -> Iterator[Tensor]:
    """Yield the tensors; names that view the same elements on every rank are one."""
    owners: dict[object, str] = {}
    for tensor in found:
        views = tuple(_views(file.tensors[tensor.name]) for file in loaded)
        owner = (
            owners.setdefault((tensor.dtype, tensor.shape, views), tensor.name)
            if any(views)
            else tensor.name
        )
        yield tensor if owner == tensor.name else replace(tensor, tied=owner)


def _views(held: RankTensor) -> tuple[object, ...]:
    stored = [one for _, one in held.pieces] if isinstance(held, RankShards) else [held]
    return tuple((s.storage.key, s.offset, s.shape, s.strides) for s in stored if s.numel)


# One rank's file

RankTensor = RankShards | StoredTensor


@dataclass(frozen=True, slots=True)
class LoadedRank:
    """What one rank's file holds: of sharded tensors its share, plain ones as they are.

    ``extra``: the names of modules' extra states.
    """

    name: str
    container: torch_save.Container
    tensors: dict[str, RankTensor]
    extra: tuple[str, ...]


def load(files: Files, name: str, rank: int) -> LoadedRank:
    """Read the pickle of one file.

    Raises Incomplete if it is not here, Corrupt if it is another rank's under this name.
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
    strangers = {held.rank for held in tensors.values() if isinstance(held, RankShards)} - {rank}
    if strangers:
        raise Corrupt(
            f"{name}: rank {min(strangers)} wrote it",
            hint="files were renamed, or come from different saves",
        )
    return LoadedRank(name, container, tensors, extra)


def _read_tensors(value: Any) -> Iterator[tuple[str, RankTensor]]:
    if not isinstance(value, dict):
        raise Corrupt(f"a {type(value).__name__}, a state dict expected")
    nested = [key for key, held in value.items() if isinstance(held, dict)]
    if any(not is_extra_state(key) for key in nested):
        raise Unsupported(
            f"{brief(nested[0])} is a dictionary, a tensor expected",
            hint="only flat state dicts are read",
        )
    meshes: Meshes = {}
    for key, held in entries(value):
        yield key, _read_tensor(key, held, meshes)


def _read_tensor(key: str, value: Any, meshes: Meshes) -> RankTensor:
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
