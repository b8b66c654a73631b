"""A file a rank: accelerate with ``use_dcp=False`` (``pytorch_model_fsdp_0_rank3.bin``), verl (``model_world_size_8_rank_3.pt``).

A root is what the names of all ranks' files begin with: ``pytorch_model_fsdp_0``, ``actor/model``.  Placements say what is cut and how;
a plain tensor is replicated, and rank 0's is taken.  A tensor may lie on some axes of the mesh only (FSDP within tensor parallelism that leaves it
alone): each group of ranks then has all of it, which nothing but equal bytes can prove.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod

from ckptsync.errors import Corrupt, Incomplete, Unsupported
from ckptsync.formats.dtypes import ITEMSIZE
from ckptsync.formats.torch_pickle import Stored
from ckptsync.layouts.rank_files import Held, Loaded, is_model, load, of_stem, rank_file
from ckptsync.layouts.rank_names import MOST
from ckptsync.layouts.wrapped import Share
from ckptsync.model import Copy, Files, Part, Shape, Tensor

NAME = "per_rank"
_MIXED = "files of different saves are mixed: give only those of one"


def roots(names: Collection[str]) -> tuple[str, ...]:
    """What the names of each set of ranks' files begin with: models and what is for resuming."""
    return tuple(sorted({found.stem for found in map(rank_file, names) if found}))


def holds_weights(root: str) -> bool:
    """False for optimizers, schedulers and random states."""
    return is_model(root)


def configuration(root: str) -> str:
    """The directory in which verl keeps configuration and tokenizer of the model beside ``root``."""
    folder, slash, _ = root.rpartition("/")
    return f"{folder}{slash}huggingface"


def demands(files: Files, root: str) -> dict[str, int | None]:
    """The file of every rank.  verl's names say how many there are; of accelerate's, the tensors in any file of the model do."""
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
    """Every tensor, put together from all ranks' files."""
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
    """An optimizer's files are as many as the model's beside them."""
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
    if len({(type(h), h.dtype, h.shape) for h in held}) > 1:
        odd = next(n for n, h in enumerate(held) if (type(h), h.dtype, h.shape) != (type(held[0]), held[0].dtype, held[0].shape))
        raise Corrupt(
            f"{loaded[odd].name}: {key} is not what it is in {loaded[0].name}: {_word(held[odd])}, {_word(held[0])}", hint=_MIXED
        )
    shares = [h for h in held if isinstance(h, Share)]
    if not shares:
        return _replicated(files, loaded, key, [h for h in held if isinstance(h, Stored)])
    _check_agreement(loaded, key, shares)
    return Tensor(key, shares[0].dtype, shares[0].shape, (_copy(files, loaded, key, shares),))


def _check_not_cut(found: Sequence[Tensor], first: Loaded) -> None:
    """Files without one sharded tensor are whole models if they are the same; if not, they were cut in a way that nothing tells."""
    if any(isinstance(held, Share) for held in first.tensors.values()):
        return
    if not found:
        raise Unsupported(f"{first.name}: holds no tensors")
    if any(tensor.remark for tensor in found):
        raise Unsupported(f"{first.name}: its tensors are not sharded, and other ranks' differ: nothing says how they go together")


def _word(held: Held) -> str:
    return f"{'a shard of' if isinstance(held, Share) else 'a whole'} {held.dtype} {held.shape}"


def _check_agreement(loaded: Sequence[Loaded], key: str, shares: Sequence[Share]) -> None:
    """Raise Corrupt unless all ranks cut the tensor alike: all of them together, or each of several groups for itself."""
    first, world = shares[0], max(share.world for share in shares)  # a slice of an older mesh knows its own ranks alone
    groups = Counter(share.peers for share in shares if share.group < len(loaded))
    for file, share in zip(loaded, shares, strict=True):
        is_alone = share.group < len(loaded) and bool(share.peers) and groups[share.peers] != share.group
        if world != len(loaded) or (share.told, share.group) != (first.told, first.group) or is_alone:
            raise Corrupt(f"{file.name}: {key} is cut otherwise than {loaded[0].name} says", hint=_MIXED)


def _copy(files: Files, loaded: Sequence[Loaded], key: str, shares: Sequence[Share]) -> Copy:
    """Each piece once, of the lowest rank that holds it, with what other ranks have of it."""
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
    """Rank 0's, as torch gathers it.  Ranks may rightly differ (statistics that each keeps for itself): said, not judged."""
    parts = [file.part(files, tensor) for file, tensor in zip(loaded, held, strict=True)]
    sums = {part.checksum.crc32 for part in parts if part.checksum}
    is_whole = all(part.checksum and part.extent == part.checksum.extent for part in parts)
    remark = f"{key} is no sharded tensor, and differs between ranks: rank 0's is taken" if is_whole and len(sums) > 1 else ""
    return Tensor(key, held[0].dtype, held[0].shape, (Copy(held[0].dtype, held[0].shape, (parts[0],)),), remark=remark)


def _tied(found: Iterable[Tensor], loaded: Sequence[Loaded]) -> Iterator[Tensor]:
    """Names that view the same elements on every rank are one tensor."""
    owners: dict[object, str] = {}
    for tensor in found:
        views = tuple(_views(file.tensors[tensor.name]) for file in loaded)
        owner = owners.setdefault((tensor.dtype, tensor.shape, views), tensor.name) if any(views) else tensor.name
        yield tensor if owner == tensor.name else replace(tensor, tied=owner)


def _views(held: Held) -> tuple[object, ...]:
    stored = [piece.stored for piece in held.pieces] if isinstance(held, Share) else [held]
    return tuple((s.storage.key, s.offset, s.shape, s.strides) for s in stored if s.numel)
