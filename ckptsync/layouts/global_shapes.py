"""Prove the shapes of tensors that are stored in boxes only, and that no box is missing.

The boxes themselves prove neither: without those of the last rank a tensor is smaller and as whole
as before, and ranks that keep the replicas of another (HSDP) can hold every box of a tensor, so
that without them its name is gone, too.  Nor do files that every rank writes: a node that has not
sent its shards has not sent those either.  A model that was made of the shards proves nothing of
them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal

from ckptsync.errors import Corrupt, Incomplete, Unsupported
from ckptsync.layouts import config_shapes, file_names
from ckptsync.layouts.dcp_metadata import ChunkedTensor, chunked, read_metadata
from ckptsync.layouts.file_names import METADATA, join
from ckptsync.tensors import Files, Part, Shape, read_whole

CONFIG = "config.json"
HINT = (
    "give the model it was trained from with --base, the optimizer's DCP directory beside it, "
    "or, if you know how many ranks wrote it, --source 'dcp_safetensors:.#world=N'"
)
# State of torch's own optimizers that is made as ``zeros_like(parameter)`` (torch/optim, 2.13).
_LIKE_PARAMETER = frozenset(
    {
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "momentum_buffer",
        "square_avg",
        "acc_delta",
        "exp_inf",
        "grad_avg",
    }
)


@dataclass(frozen=True, slots=True)
class ExpectedModel:
    """What is known of a model besides its checkpoint.

    ``shapes``: those of the base model's tensors; ``config``: a ``config.json``.
    """

    shapes: Mapping[str, Shape] = field(default_factory=dict)
    config: bytes | None = None


@dataclass(frozen=True, slots=True)
class ShapeProof:
    """Shapes, and what proves them (``by``).

    ``needed``: tensors that must be there.  ``ranks``: those that are known to have written
    something.  ``files``: where it was read. ``names``: besides the tensors of ``shapes`` there are
    others (some), hardly any (most), or none (all).
    """

    by: str
    shapes: Mapping[str, Shape]
    names: Literal["some", "most", "all"]
    needed: Collection[str] = ()
    ranks: tuple[int, ...] = ()
    files: tuple[str, ...] = ()


def proofs(
    files: Files, root: str, names: Collection[str], model: ExpectedModel
) -> tuple[ShapeProof, ...]:
    """Return all proofs that there are, the strongest first. ``names``: the tensors in question."""
    by_config, config = _by_config(files, root, names, model)
    found = [*_by_optimizers(files), *_by_base(names, model), *by_config]
    if config_shapes.ties(config):
        found += _by_tie(names, found)
    return tuple(found)


def shapes(boxes: Mapping[str, Sequence[Part]], found: Sequence[ShapeProof]) -> dict[str, Shape]:
    """Return the shape of every tensor.

    Raises Incomplete where nothing proves one, Corrupt where boxes are outside of it.
    """
    proven: dict[str, Shape] = {}
    unproven = []
    for name, parts in boxes.items():
        proof = next((p for p in found if name in p.shapes), None)
        if proof:
            proven[name] = _checked(name, parts, proof)
        elif not parts[0].offsets:
            proven[name] = ()
        else:
            unproven.append(name)
    if unproven:
        raise Incomplete(
            f"{min(unproven)}{more(unproven)}: boxes are here, but nothing says what shape it has",
            hint=HINT,
        )
    if not found:
        raise Incomplete("nothing names the tensors that there should be", hint=HINT)
    return proven


def by_world(boxes: Mapping[str, Sequence[Part]]) -> ShapeProof:
    """Return the proof that these are the boxes of all ranks: tensors end where they do."""
    ends = {
        name: [tuple(o + n for o, n in zip(p.offsets, p.sizes, strict=True)) for p in parts]
        for name, parts in boxes.items()
    }
    return ShapeProof(
        "the number of ranks given",
        {name: tuple(map(max, *found, found[0])) for name, found in ends.items()},
        "all",
    )


def lacking(
    boxes: Mapping[str, Sequence[Part]], proven: Mapping[str, Shape], found: Sequence[ShapeProof]
) -> str:
    """Return which tensors, or elements of them, are missing, in words.

    Empty if none is that the proofs know of.
    """
    for proof in found:
        absent = sorted(name for name in proof.needed if name not in boxes)
        if absent:
            return f"{absent[0]}{more(absent)}: in no shard that is here, but in {proof.by}"
    for name, parts in boxes.items():
        held, wanted = sum(prod(part.sizes) for part in parts), prod(proven[name])
        if held < wanted:
            return f"{name}: {held} of {wanted} elements are in the shards that are here"
    return ""


def more(rest: Sequence[object]) -> str:
    """Return `` and 3 more``, where ``rest`` has four of which one was named."""
    return f" and {len(rest) - 1} more" if rest[1:] else ""


def _checked(name: str, parts: Sequence[Part], proof: ShapeProof) -> Shape:
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


def _by_optimizers(files: Files) -> list[ShapeProof]:
    """Return a proof of every DCP beside the shards.

    ``save_optimizer_distributed`` writes one (transformers/distributed/checkpoint.py, 5.23).
    """
    roots = sorted(
        name.rpartition("/")[0] for name in files.sizes() if name.rpartition("/")[2] == METADATA
    )
    return [proof for root in roots if (proof := _by_optimizer(files, root))]


def _by_optimizer(files: Files, root: str) -> ShapeProof | None:
    name = join(root, METADATA)
    try:
        metadata = read_metadata(files, root)
        shapes = {fqn: c.shape for c in chunked(metadata) if (fqn := _parameter(c))}
    except Unsupported:
        return None  # whatever it is, it proves nothing that we can read
    wrote = file_names.ranks({item.file for item in metadata.items.values()})
    return ShapeProof(name, shapes, "some", tuple(shapes), wrote, (name,)) if shapes else None


def _parameter(tensor: ChunkedTensor) -> str:
    """Return the parameter of which a flattened optimizer's tensor is the state; else empty.

    Such as ``optimizer.state.<name>.exp_avg``.
    """
    path = ".".join(tensor.path)
    head, state, rest = (
        path.partition("state.") if path.startswith("state.") else path.partition(".state.")
    )
    name, _, kind = rest.rpartition(".")
    return name if state and "." not in head and kind in _LIKE_PARAMETER else ""


def _by_base(names: Collection[str], model: ExpectedModel) -> list[ShapeProof]:
    """Return the proof of the base model.

    One that has none of the tensors is another model, or names them otherwise: it proves nothing.
    """
    known = {name: model.shapes[name] for name in names if name in model.shapes}
    return [ShapeProof("the base model", known, "most")] if known else []


def _by_config(
    files: Files, root: str, names: Collection[str], model: ExpectedModel
) -> tuple[list[ShapeProof], Mapping[str, object]]:
    here = next(
        (
            n
            for n in (join(root, CONFIG), join(root.rpartition("/")[0], CONFIG), CONFIG)
            if n in files.sizes()
        ),
        None,
    )
    data = read_whole(files, here) if here else model.config
    if data is None:
        return [], {}
    config = config_shapes.parsed(here or CONFIG, data)
    known = config_shapes.shapes(config)
    if not known or not known.keys() >= set(names):
        return [], config
    needed = known.keys() - ({config_shapes.HEAD} if config_shapes.ties(config) else set())
    return [ShapeProof(here or CONFIG, known, "all", needed, (), (here,) if here else ())], config


def _by_tie(names: Collection[str], found: Sequence[ShapeProof]) -> list[ShapeProof]:
    """Return the proof of a tie: an output layer that is the embedding has its shape.

    Optimizers know the two as one.
    """
    embeddings = [
        shape
        for p in found
        for name, shape in p.shapes.items()
        if name.endswith("embed_tokens.weight") and name in names
    ]
    return (
        [
            ShapeProof(
                "the embedding that it is tied to", {config_shapes.HEAD: embeddings[0]}, "some"
            )
        ]
        if embeddings
        else []
    )
