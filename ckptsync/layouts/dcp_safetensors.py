"""torch's Distributed Checkpoint in safetensors: find the boxes, and prove that none is missing.

Each rank writes a file for each numbered file of the model that it has a part of.
``HuggingFaceStorageWriter(save_distributed=True)`` writes them, for torchtitan, NeMo Automodel,
VeOmni and transformers 5 (``save_pretrained(distributed_checkpoint=True)``). A header says where
each box begins (``DCP_SHARDING_INFO``), but not how large a tensor is, how many ranks there were or
that all have written: these need a proof from elsewhere (`ShapeProof`). Source:
``torch/distributed/checkpoint/{hf_storage,_hf_utils,filesystem}.py``, torch 2.13.

The boxes themselves prove neither shapes nor that no box is missing. Without those of the last rank
a tensor is smaller and seems whole. Ranks that keep the replicas of another (HSDP) can hold every
box of a tensor, so that without them its name is missing, too. Files that every rank writes prove
nothing either: a node that has not sent its shards has not sent those. Nor does a model that was
made of the shards.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

from ckptsync.errors import Corrupt, Incomplete, Unsupported
from ckptsync.formats import safetensors
from ckptsync.layouts import config_shapes, file_names
from ckptsync.layouts.dcp_metadata import ChunkedTensor, chunked, read_metadata
from ckptsync.layouts.file_names import METADATA, inside, join
from ckptsync.plain_json import parse
from ckptsync.tensors import Copy, Files, Part, Shape, Tensor, read_whole

INFO, VERSION = "DCP_SHARDING_INFO", "DCP_VERSION"
_SHARD = re.compile(r"shard-([0-9]{5,})-model-([0-9]{5,})-of-([0-9]{5,})\.safetensors")
_MOST_RANKS = 1 << 17
_CONFIG = "config.json"
_HINT = (
    "give the model it was trained from with --base, the optimizer's DCP directory beside it, "
    "or, if you know how many ranks wrote it, --source 'dcp_safetensors:.#world=N'"
)
_OTHER_BASE = (
    "check that --base is the model it was trained from, or give the optimizer's DCP directory"
    " beside it, or, if you know how many ranks wrote it, --source 'dcp_safetensors:.#world=N'"
)
# State of torch's own optimizers that is made as ``zeros_like(parameter)`` (torch/optim, 2.13).
_LIKE_PARAMETER = frozenset(
    {
        *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"),
        *("square_avg", "acc_delta", "exp_inf", "grad_avg"),
    }
)


@dataclass(frozen=True, slots=True)
class ExpectedModel:
    """What else is known of a model: the ``shapes`` of a base model, and a ``config.json``.

    ``packed``: the element types of matrices of the base that may hold quantised weights; their
    shapes prove only shards of the same type. ``path``: a function from the names of the shards to
    the prefix before the model's own names.
    """

    shapes: Mapping[str, Shape] = field(default_factory=dict)
    config: bytes | None = None
    packed: Mapping[str, str] = field(default_factory=dict)
    path: Callable[[Sequence[str]], str] = lambda _: ""


@dataclass(frozen=True, slots=True)
class ShapeProof:
    """Shapes, and the text that says what proves them (``by``).

    ``needed``: tensors that must exist. ``ranks``: those that are known to have written something.
    ``files``: the files that the proof was read from. ``names``: whether the checkpoint may have
    other tensors than ``shapes``: yes (some), hardly any (most), or none (all).
    """

    by: str
    shapes: Mapping[str, Shape]
    names: Literal["some", "most", "all"]
    needed: Collection[str] = ()
    ranks: tuple[int, ...] = ()
    files: tuple[str, ...] = ()


def roots(names: Collection[str]) -> tuple[str, ...]:
    """Return every directory with such shards: the model's own, or ``sharded`` in it."""
    split = (name.rpartition("/") for name in names)
    return tuple(sorted({root for root, _, base in split if _SHARD.fullmatch(base)}))


def demands(files: Files, root: str) -> dict[str, int | None]:
    """Return the shards and the files that prove them whole, with sizes: None for a missing shard.

    Raise Incomplete if no proof exists, or if it is unknown which shards are missing; Corrupt or
    Unsupported for wrong shards.
    """
    needed, _, error = _read_shards(files, root, ExpectedModel())
    if error and needed.keys() <= files.sizes().keys():
        raise error
    return needed


def tensors(files: Files, root: str, outside: ExpectedModel | None = None) -> tuple[Tensor, ...]:
    """Return the weights, if a proof outside of the shards says that they are whole.

    ``outside``: a base model or configuration that may prove it, beside the files in ``files``.
    ``root`` may end in ``#world=N``, the number of ranks as the user knows it; then the shards of
    all ranks are the proof. Raise Incomplete without a proof or if a shard is missing, Corrupt or
    Unsupported for wrong shards.
    """
    _, weights, error = _read_shards(files, root, outside or ExpectedModel())
    if error:
        raise error
    return weights


def _read_shards(
    files: Files, root: str, outside: ExpectedModel
) -> tuple[dict[str, int | None], tuple[Tensor, ...], Incomplete | None]:
    """Return the files that are needed, the tensors, and an error if something is missing.

    Needed are the shards, the files that prove them whole, and missing shards whose names are
    known. Raise Incomplete if a shape is not proven, Corrupt or Unsupported for wrong shards.
    """
    root, world = _split_root(root)
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
    proofs = find_proofs(files, root, dtypes, outside)
    ranks_here = file_names.ranks(shards)
    if world is not None:
        _check_world(world, ranks_here, len(shards), count)
        proofs = (*proofs, by_world(boxes))
    shapes = proven_shapes(boxes, proofs, _OTHER_BASE if outside.shapes else _HINT)
    wrote = {*range(ranks_here[-1]), *file_names.ranks(files.sizes())}
    ranks = sorted(wrote.union(*(proof.ranks for proof in proofs)).difference(ranks_here))
    lacking = find_missing(boxes, shapes, proofs)
    proven_names = {proof.names for proof in proofs}
    # a rank with nothing to write leaves no file: only a proof with all names can tell
    if not lacking and "all" not in proven_names:
        if ranks:
            lacking = f"no shard of rank {ranks[0]}{_more(ranks)} is here"
        elif "most" not in proven_names and len(shards) < len(ranks_here) * count:
            lacking = (
                f"{len(shards)} shards are here, {len(ranks_here) * count} expected of {count}"
                " files a rank"
            )
    absent = [
        join(root, f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors")
        for rank in (ranks if lacking and count == 1 else ())
    ]
    enough = [proof for proof in proofs if proof.names == "all"] or proofs
    names = (*shards, *(name for proof in enough for name in proof.files))
    weights = tuple(
        _tensor(name, dtypes[name], shape, boxes[name]) for name, shape in shapes.items()
    )
    named_file = f"; {absent[0]}{_more(absent)}: not found" if absent else ""
    hint = "give the other nodes' directories too: shards of some ranks are missing"
    error = Incomplete(f"{lacking}{named_file}", hint=hint) if lacking else None
    return {name: files.sizes().get(name) for name in (*names, *absent)}, weights, error


def _tensor(name: str, dtype: str, shape: Shape, parts: Collection[Part]) -> Tensor:
    """Return the tensor of these boxes, without empty ones."""
    filled = tuple(part for part in parts if 0 not in part.sizes)
    return Tensor(name, dtype, shape, (Copy(dtype, shape, filled),))


def _split_root(root: str) -> tuple[str, int | None]:
    """Return the directory of a root, and the number of ranks or None.

    Raise Unsupported if that is no number.
    """
    folder, mark, number = root.rpartition("#world=")
    if not mark:
        return root, None
    if not number.isdecimal() or not 0 < int(number[:9]) <= _MOST_RANKS:
        raise Unsupported(
            f"#world={number:.20}: not a number of ranks",
            hint="give how many ranks wrote the shards: #world=8",
        )
    return "" if folder == "." else folder, int(number)


def _shards(names: Collection[str], root: str) -> tuple[tuple[str, ...], int]:
    """Return the shards in the directory ``root``, and the number of files of the model.

    Raise Corrupt if their numbers are impossible or do not agree.
    """
    matches = {
        full: match
        for base, full in inside(names, root).items()
        if (match := _SHARD.fullmatch(base))
    }
    counts = {int(match[3]) for match in matches.values()}
    odd = [
        full
        for full, match in matches.items()
        if not (0 < int(match[1]) <= _MOST_RANKS and 0 < int(match[2]) <= int(match[3]))
    ]
    if odd or len(counts) != 1:
        message = (
            f"{min(odd)}: no shard has such a number"
            if odd
            else f"{root or '.'}: shards of {len(counts)} different sets"
        )
        raise Corrupt(message, hint="files of an earlier save may be among them")
    return tuple(sorted(matches)), counts.pop()


def _check_world(world: int, ranks_here: Sequence[int], shards: int, count: int) -> None:
    """Raise Incomplete unless the shards of all ranks are here, Corrupt if there are others."""
    if ranks_here[-1] >= world:
        raise Corrupt(
            f"a shard of rank {ranks_here[-1]}, of {world} ranks",
            hint="it was left by an earlier save, or there were more ranks",
        )
    if shards != world * count:
        absent = sorted(set(range(world)).difference(ranks_here))
        absent_text = f": none of rank {absent[0]}{_more(absent)}" if absent else ""
        raise Incomplete(
            f"{shards} shards are here, {world * count} expected of {world} ranks{absent_text}"
        )


def _pieces(files: Files, shard: str) -> Iterator[tuple[str, str, Part]]:
    """Yield name, dtype and box of every tensor in one shard.

    Raise Corrupt if the header and its ``DCP_SHARDING_INFO`` disagree, Unsupported without one.
    """
    stored, metadata = safetensors.contents(files, shard)
    begins = _begins(shard, metadata)
    if begins.keys() != {tensor.name for tensor in stored}:
        raise Corrupt(f"{shard}: {INFO} names other tensors than the file has")
    for tensor in stored:
        (part,) = tensor.copies[0].parts
        offsets = begins[tensor.name]
        if len(offsets) != len(tensor.shape):
            raise Corrupt(
                f"{shard}: {tensor.name} has {len(tensor.shape)} axes and begins at {offsets}"
            )
        yield tensor.name, tensor.dtype, Part(offsets, part.sizes, part.extent)


def _begins(shard: str, metadata: Mapping[str, Any]) -> dict[str, Shape]:
    """Return the offsets of each box in its tensor.

    Raise Unsupported if the shard does not have them or is of another version, Corrupt if they are
    damaged.
    """
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
    """Return offsets as a tuple; raise ValueError if they are no natural numbers."""
    if value and (set(map(type, value)) != {int} or min(value) < 0 or max(value) >= 1 << 63):
        raise ValueError(f"offsets {value!r:.100}")
    return tuple(value)


# What proves shapes, and that no box is missing


def find_proofs(
    files: Files, root: str, dtypes: Mapping[str, str], model: ExpectedModel
) -> tuple[ShapeProof, ...]:
    """Return all proofs for the tensors in ``dtypes``, the strongest first.

    Raise Corrupt if a file that could prove something is damaged, Incomplete if it lacks others.
    """
    names = dtypes.keys()
    path = model.path(tuple(names))
    prefix = f"{path}." if path else ""
    by_config, config = _by_config(files, root, names, model, prefix)
    proofs = [*_by_optimizers(files)]
    base_shapes = {prefix + name: shape for name, shape in model.shapes.items()}
    # a base model that has none of the tensors is another model, or names them otherwise
    base = {
        name: base_shapes[name]
        for name, dtype in dtypes.items()
        if name in base_shapes and model.packed.get(name.removeprefix(prefix), dtype) == dtype
    }
    if base:
        proofs.append(ShapeProof("the base model", base, "most"))
    proofs += by_config
    if config_shapes.ties(
        config
    ):  # an optimizer has one state for the output layer and the embedding
        embedding = next(
            (
                {prefix + config_shapes.HEAD: shape}
                for proof in proofs
                for name, shape in proof.shapes.items()
                if name.endswith("embed_tokens.weight") and name in names
            ),
            None,
        )
        if embedding:
            proofs.append(ShapeProof("the embedding that it is tied to", embedding, "some"))
    return tuple(proofs)


def proven_shapes(
    boxes: Mapping[str, Sequence[Part]], proofs: Sequence[ShapeProof], hint: str = _HINT
) -> dict[str, Shape]:
    """Return the shape of every tensor, from the first proof that has it; () without axes.

    Raise Incomplete, with ``hint``, if no proof has one or there are no ``proofs``; Corrupt if a
    box is outside of its shape.
    """
    proven: dict[str, Shape] = {}
    unproven = []
    for name, parts in boxes.items():
        proof = next((p for p in proofs if name in p.shapes), None)
        if proof:
            proven[name] = _checked(name, parts, proof)
        elif not parts[0].offsets:
            proven[name] = ()
        else:
            unproven.append(name)
    if unproven:
        raise Incomplete(
            f"{min(unproven)}{_more(unproven)}: boxes are here, but nothing says what shape it has",
            hint=hint,
        )
    if not proofs:
        raise Incomplete("nothing names the tensors that there should be", hint=hint)
    return proven


def by_world(boxes: Mapping[str, Sequence[Part]]) -> ShapeProof:
    """Return the proof that all ranks' boxes are: a tensor ends where its boxes end."""
    ends = {
        name: [tuple(o + n for o, n in zip(p.offsets, p.sizes, strict=True)) for p in parts]
        for name, parts in boxes.items()
    }
    return ShapeProof(
        "the number of ranks given",
        {name: tuple(map(max, *corners, corners[0])) for name, corners in ends.items()},
        "all",
    )


def find_missing(
    boxes: Mapping[str, Sequence[Part]], proven: Mapping[str, Shape], proofs: Sequence[ShapeProof]
) -> str:
    """Return a text that names the first missing tensors or elements; empty if none is known."""
    for proof in proofs:
        absent = sorted(name for name in proof.needed if name not in boxes)
        if absent:
            return f"{absent[0]}{_more(absent)}: in no shard that is here, but in {proof.by}"
    for name, parts in boxes.items():
        stored, expected = sum(prod(part.sizes) for part in parts), prod(proven[name])
        if stored < expected:
            return f"{name}: {stored} of {expected} elements are in the shards that are here"
    return ""


def _more(items: Sequence[object]) -> str:
    """Return `` and 3 more`` for four ``items``, of which the text names one; empty for one."""
    return f" and {len(items) - 1} more" if items[1:] else ""


def _checked(name: str, parts: Sequence[Part], proof: ShapeProof) -> Shape:
    """Return the proven shape of a tensor; raise Corrupt if one of its boxes is outside."""
    shape = proof.shapes[name]
    for part in parts:
        if len(part.offsets) != len(shape) or any(
            o + n > most for o, n, most in zip(part.offsets, part.sizes, shape, strict=True)
        ):
            raise Corrupt(
                f"{part.extent.file}: {name} has a box at {part.offsets} of size {part.sizes},"
                f" outside of {shape} as in {proof.by}",
                hint="they belong to different models, or to different saves",
            )
    return shape


def _by_optimizers(files: Files) -> Iterator[ShapeProof]:
    """Yield a proof for every DCP in ``files``: ``save_optimizer_distributed`` writes one.

    One that is not supported, or has no parameters' states, is passed over. Raise Incomplete or
    Corrupt for one that cannot be read.
    """
    for name in sorted(n for n in files.sizes() if n.rpartition("/")[2] == METADATA):
        try:
            metadata = read_metadata(files, name.rpartition("/")[0])
            shapes = {fqn: c.shape for c in chunked(metadata) if (fqn := _parameter(c))}
        except Unsupported:
            continue  # it cannot be read, so it proves nothing
        wrote = file_names.ranks({item.file for item in metadata.items.values()})
        if shapes:
            yield ShapeProof(name, shapes, "some", tuple(shapes), wrote, (name,))


def _parameter(tensor: ChunkedTensor) -> str:
    """Return ``x`` for an optimizer's ``optimizer.state.x.exp_avg``; empty for other tensors."""
    path = ".".join(tensor.path)
    head, state, state_name = (
        path.partition("state.") if path.startswith("state.") else path.partition(".state.")
    )
    name, _, kind = state_name.rpartition(".")
    return name if state and "." not in head and kind in _LIKE_PARAMETER else ""


def _by_config(
    files: Files, root: str, names: Collection[str], model: ExpectedModel, prefix: str
) -> tuple[list[ShapeProof], Mapping[str, object]]:
    """Return a configuration after its proof, which is [] unless it implies all ``names``.

    The configuration lies beside the shards, above them, or is that of ``model``; it is empty if
    there is none. Raise Corrupt if it is damaged.
    """
    places = (join(root, _CONFIG), join(root.rpartition("/")[0], _CONFIG), _CONFIG)
    config_file = next((name for name in places if name in files.sizes()), None)
    data = read_whole(files, config_file) if config_file else model.config
    if data is None:
        return [], {}
    config = config_shapes.parsed(config_file or _CONFIG, data)
    shapes = config_shapes.shapes(config, names)
    full_shapes = {prefix + name: shape for name, shape in shapes.items()}
    if not full_shapes or not full_shapes.keys() >= set(names):
        return [], config
    needed = full_shapes.keys() - (
        {prefix + config_shapes.HEAD} if config_shapes.ties(config) else set()
    )
    return [
        ShapeProof(
            config_file or _CONFIG,
            full_shapes,
            "all",
            needed,
            (),
            (config_file,) if config_file else (),
        )
    ], config
