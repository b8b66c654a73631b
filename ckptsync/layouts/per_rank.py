"""A file a rank: accelerate with ``use_dcp=False`` (``pytorch_model_fsdp_0_rank3.bin``), verl (``model_world_size_8_rank_3.pt``).

A root is what the names of all ranks' files begin with: ``pytorch_model_fsdp_0``, ``actor/model``. Placements say what is cut and
how; a plain tensor is replicated, and rank 0's is taken. A tensor may lie on some axes of the mesh only (FSDP within tensor
parallelism that leaves it alone): each group of ranks then has all of it, which nothing but equal bytes can prove.

Sources: accelerate 1.15 (``save_fsdp_model``, ``use_dcp=False``; LOCAL_STATE_DICT of every version has the same names), verl
(``FSDPCheckpointManager.save_checkpoint``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ckptsync.errors import CkptsyncError, Corrupt, Incomplete, Unsupported
from ckptsync.formats import torch_pickle, torch_save
from ckptsync.formats.dtypes import ITEMSIZE
from ckptsync.formats.pickles import Build, Name, brief
from ckptsync.formats.torch_pickle import Stored
from ckptsync.layouts import dtensor, wrapped
from ckptsync.layouts.names import inside
from ckptsync.layouts.rank_names import MOST
from ckptsync.layouts.wrapped import Share, Wrapped
from ckptsync.model import Copy, Extent, Files, Part, Shape, Tensor

NAME = "per_rank"
ALLOWED: Mapping[Name, Build] = {**torch_pickle.ALLOWED, **dtensor.ALLOWED, **wrapped.ALLOWED}
_NAME = re.compile(
    r"((?:pytorch_model_fsdp|optimizer)(?:_[0-9]+)?)_rank([0-9]+)\.bin|(model|optim|extra_state)_world_size_([0-9]+)_rank_([0-9]+)\.pt"
)
_MODEL = re.compile(r"pytorch_model_fsdp(_[0-9]+)?|model")
_MIXED = "files of different saves are mixed: give only those of one"


@dataclass(frozen=True, slots=True)
class RankFile:
    """A file's name taken apart; ``stem`` is what all ranks' names begin with, ``world`` is None where the name does not say."""

    stem: str
    rank: int
    world: int | None

    def of(self, rank: int) -> str:
        """Return the name of the same file of another rank."""
        return f"{self.stem}_rank{rank}.bin" if self.world is None else f"{self.stem}_world_size_{self.world}_rank_{rank}.pt"


def rank_file(name: str) -> RankFile | None:
    """Return the name taken apart; None for files that are not of one rank each."""
    folder, slash, base = name.rpartition("/")
    found = _NAME.fullmatch(base)
    if found is None:
        return None
    stem = f"{folder}{slash}{found[1] or found[3]}"
    return RankFile(stem, int(found[2] or found[5]), int(found[4]) if found[4] else None)


def of_stem(names: Collection[str], stem: str) -> list[tuple[RankFile, str]]:
    """Return the files of all ranks that are here, in the order of the ranks."""
    there = ((rank_file(name), name) for name in inside(names, stem.rpartition("/")[0]).values())
    return sorted(((found, name) for found, name in there if found and found.stem == stem), key=lambda f: (f[0].rank, f[1]))


def roots(names: Collection[str]) -> tuple[str, ...]:
    """Return what the names of each set of ranks' files begin with: models and what is for resuming."""
    return tuple(sorted({found.stem for found in map(rank_file, names) if found}))


def holds_weights(root: str) -> bool:
    """Return False for optimizers, schedulers and random states."""
    return bool(_MODEL.fullmatch(root.rpartition("/")[2]))


def configuration(root: str) -> str:
    """Return the directory in which verl keeps configuration and tokenizer of the model beside ``root``."""
    folder, slash, _ = root.rpartition("/")
    return f"{folder}{slash}huggingface"


def demands(files: Files, root: str) -> dict[str, int | None]:
    """Return the file of every rank. verl's names say how many there are; of accelerate's, the tensors in any file of the model do."""
    there = of_stem(files.sizes(), root)
    if not there:
        raise Incomplete(f"{root}: no file of any rank is here")
    worlds = {found.world for found, _ in there}
    if len(worlds) > 1:
        raise Corrupt(f"{root}: files of worlds of {' and '.join(map(str, sorted(filter(None, worlds))))} ranks", hint=_MIXED)
    first = there[0][0]
    world = first.world if first.world is not None else _world_of_model(files, root)
    if world > MOST:
        raise Corrupt(f"{root}: files of a world of {world} ranks: no training has so many", hint=_MIXED)
    beyond = [name for found, name in there if found.rank >= world]
    if beyond or not world:
        raise Corrupt(f"{beyond[0] if beyond else root}: of a rank that a world of {world} has not", hint=_MIXED)
    return dict.fromkeys(map(first.of, range(world)))


def tensors(files: Files, root: str) -> tuple[Tensor, ...]:
    """Return every tensor, put together from all ranks' files."""
    names = [*demands(files, root)]
    loaded = [load(files, name, rank) for rank, name in enumerate(names)]
    for other in loaded[1:]:
        if other.tensors.keys() != loaded[0].tensors.keys():
            odd = sorted(other.tensors.keys() ^ loaded[0].tensors.keys())
            raise Corrupt(f"{other.name}: {odd[0]} is not in every rank's file", hint=_MIXED)
    found = tuple(_joined(files, loaded, key) for key in loaded[0].tensors)
    _check_not_cut(found, loaded[0])
    return tuple(_tied(found, loaded))


def _world_of_model(files: Files, root: str) -> int:
    """Return how many ranks there were: an optimizer's files are as many as the model's beside them."""
    folder, slash, base = root.rpartition("/")
    model = f"{folder}{slash}{base.replace('optimizer', 'pytorch_model_fsdp')}"
    there = of_stem(files.sizes(), model)
    if not there:
        raise Incomplete(f"{root}: the model's own files are not here, which say how many ranks there are")
    first, name = there[0]
    shares = {key: held for key, held in load(files, name, first.rank).tensors.items() if isinstance(held, Share)}
    if not shares:  # each holds everything: see `_check_not_cut`
        return there[-1][0].rank + 1
    return max(share.world for share in shares.values())


def _joined(files: Files, loaded: Sequence[Loaded], key: str) -> Tensor:
    held = [file.tensors[key] for file in loaded]
    if len(set(map(_kind, held))) > 1:
        odd = next(n for n, h in enumerate(held) if _kind(h) != _kind(held[0]))
        raise Corrupt(f"{loaded[odd].name}: {key} is {_kind(held[odd])}, and {_kind(held[0])} in {loaded[0].name}", hint=_MIXED)
    shares = [h for h in held if isinstance(h, Share)]
    if not shares:
        return _replicated(files, loaded, key, [h for h in held if isinstance(h, Stored)])
    _check_agreement(loaded, key, shares)
    return Tensor(key, shares[0].dtype, shares[0].shape, (_copy(files, loaded, key, shares),))


def _check_not_cut(found: Sequence[Tensor], first: Loaded) -> None:
    """Raise unless files are shards: those without one sharded tensor are whole models if they are the same; if not, they were cut in a way that nothing tells."""
    if any(isinstance(held, Share) for held in first.tensors.values()):
        return
    if not found:
        raise Unsupported(f"{first.name}: holds no tensors")
    if any(tensor.remark for tensor in found):
        raise Unsupported(f"{first.name}: its tensors are not sharded, and other ranks' differ: nothing says how they go together")


def _kind(held: Held) -> str:
    return f"{'a shard of' if isinstance(held, Share) else 'a whole'} {held.dtype} {held.shape}"


def _check_agreement(loaded: Sequence[Loaded], key: str, shares: Sequence[Share]) -> None:
    """Raise Corrupt unless all ranks cut the tensor alike: all of them together, or each of several groups for itself."""
    first, world = shares[0], max(share.world for share in shares)  # a slice of an older mesh knows its own ranks alone
    groups = Counter(share.peers for share in shares if share.group < len(loaded))
    for file, share in zip(loaded, shares, strict=True):
        is_alone = share.group < len(loaded) and bool(share.peers) and groups[share.peers] != share.group
        if world != len(loaded) or (share.cut, share.group) != (first.cut, first.group) or is_alone:
            raise Corrupt(f"{file.name}: {key} is cut otherwise than {loaded[0].name} says", hint=_MIXED)


def _copy(files: Files, loaded: Sequence[Loaded], key: str, shares: Sequence[Share]) -> Copy:
    """Return each piece once, of the lowest rank that holds it, with what other ranks have of it."""
    found: dict[tuple[Shape, Shape], list[Part]] = {}
    for file, share in zip(loaded, shares, strict=True):
        for piece in share.pieces:
            if prod(piece.sizes):
                part = file.part(files, piece.stored)
                found.setdefault((piece.offsets, piece.sizes), []).append(
                    Part(piece.offsets, piece.sizes, part.extent, part.strides, part.checksum)
                )
    if len(set(map(len, found.values()))) > 1:
        raise Corrupt(f"{loaded[0].name}: {key} has parts that more ranks hold than others", hint=_MIXED)
    dtype, shape, group = shares[0].dtype, shares[0].shape, shares[0].group
    doubt = f"lies on {group} of {len(loaded)} ranks"
    parts = tuple(_with_replicas(key, dtype, each) for each in found.values())
    return Copy(dtype, shape, parts, doubt=doubt if group < len(loaded) else "")


def _with_replicas(key: str, dtype: str, parts: Sequence[Part]) -> Part:
    """Return the first with the others as its replicas.  Raises Unsupported if their bytes cannot be compared."""
    first = parts[0]
    for part in parts[1:]:
        if part.strides != first.strides or not part.extent.size == first.extent.size == prod(part.sizes) * ITEMSIZE[dtype]:
            raise Unsupported(
                f"{part.extent.file}: {key} is stored in another order, or with gaps, so that it cannot be compared with the replica"
                f" in {first.extent.file}",
                hint="make it contiguous before saving",
            )
    return replace(first, replicas=tuple(parts[1:]))


def _replicated(files: Files, loaded: Sequence[Loaded], key: str, held: Sequence[Stored]) -> Tensor:
    """Return rank 0's, as torch gathers it.  Ranks may rightly differ (statistics that each keeps for itself): a remark says so."""
    parts = [file.part(files, tensor) for file, tensor in zip(loaded, held, strict=True)]
    sums = {part.checksum.crc32 for part in parts if part.checksum}
    is_whole = all(part.checksum and part.extent == part.checksum.extent for part in parts)
    remark = f"{key} is no sharded tensor, and differs between ranks: rank 0's is taken" if is_whole and len(sums) > 1 else ""
    return Tensor(key, held[0].dtype, held[0].shape, (Copy(held[0].dtype, held[0].shape, (parts[0],)),), remark=remark)


def _tied(found: Iterable[Tensor], loaded: Sequence[Loaded]) -> Iterator[Tensor]:
    """Yield the tensors; names that view the same elements on every rank are one."""
    owners: dict[object, str] = {}
    for tensor in found:
        views = tuple(_views(file.tensors[tensor.name]) for file in loaded)
        owner = owners.setdefault((tensor.dtype, tensor.shape, views), tensor.name) if any(views) else tensor.name
        yield tensor if owner == tensor.name else replace(tensor, tied=owner)


def _views(held: Held) -> tuple[object, ...]:
    stored = [piece.stored for piece in held.pieces] if isinstance(held, Share) else [held]
    return tuple((s.storage.key, s.offset, s.shape, s.strides) for s in stored if s.numel)


# One rank's file

Held = Share | Stored


@dataclass(frozen=True, slots=True)
class Loaded:
    """What one rank's file holds: of sharded tensors its share, plain ones as they are."""

    name: str
    container: torch_save.Container
    tensors: dict[str, Held]

    def part(self, files: Files, tensor: Stored) -> Part:
        """Return where a tensor's elements lie."""
        return torch_save.part(files, self.container, tensor)


def load(files: Files, name: str, rank: int) -> Loaded:
    """Read the pickle of one file. Raises Incomplete if it is not here, Corrupt if it is another rank's under this name."""
    if name not in files.sizes():
        raise Incomplete(
            f"{name}: not there", hint="each rank writes a file of its own: add the directory of the node that ran this rank"
        )
    try:
        value, container = torch_save.load(files, Extent(name, 0, files.sizes()[name]), ALLOWED)
        tensors = dict(_read_tensors(value))
    except (Corrupt, Unsupported) as e:
        raise _named(e, name) from e
    strangers = {held.rank for held in tensors.values() if isinstance(held, Share)} - {rank}
    if strangers:
        raise Corrupt(f"{name}: rank {min(strangers)} wrote it", hint="files were renamed, or come from different saves")
    return Loaded(name, container, tensors)


def _read_tensors(value: Any) -> Iterator[tuple[str, Held]]:
    if not isinstance(value, dict):
        raise Corrupt(f"a {type(value).__name__}, a state dict expected")
    meshes: dtensor.Meshes = {}
    for key, held in value.items():
        if isinstance(held, dict):
            raise Unsupported(f"{brief(key)} is a dictionary, a tensor expected", hint="only flat state dicts are read")
        if isinstance(held, (Stored, Wrapped)):
            if not isinstance(key, str):
                raise Corrupt(f"a tensor named {brief(key)}, a text expected")
            yield key, _read_tensor(key, held, meshes)


def _read_tensor(key: str, value: Stored | Wrapped, meshes: dtensor.Meshes) -> Held:
    if key.rpartition(".")[2] == "_flat_param":
        raise Unsupported(
            "FSDP's LOCAL_STATE_DICT: flattened parameters, whose names and shapes are not in the files",
            hint="save with SHARDED_STATE_DICT or FULL_STATE_DICT; these files load only into the same model, wrapped the same way",
        )
    if isinstance(value, Stored):
        return value
    try:
        if value.kind in dtensor.KINDS:
            return dtensor.share(value, meshes)
        if value.kind == wrapped.SHARDED_TENSOR:
            return wrapped.sharded_share(value)
    except (Corrupt, Unsupported) as e:
        raise _named(e, key) from e
    raise Unsupported(f"{key}: a {value.kind}, DTensor and ShardedTensor are known")


def _named(error: CkptsyncError, what: str) -> CkptsyncError:
    return type(error)(f"{what}: {error}", hint=error.hint)
