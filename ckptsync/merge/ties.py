"""Tied weights: one copy where the model's configuration ties them and their bytes agree, else all of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from blake3 import blake3

from ckptsync.formats.dtypes import ITEMSIZE
from ckptsync.merge.copying import WINDOW, gather
from ckptsync.merge.cut import blocks
from ckptsync.merge.plan import Options, PlannedTensor, choose
from ckptsync.model import Files, Tensor

# The names under which transformers' models keep the output head, which `tie_word_embeddings` ties to the input embedding.
HEADS = ("lm_head.weight", "embed_out.weight")
EMBEDDINGS = (
    "embed_tokens.weight",
    "wte.weight",
    "word_embeddings.weight",
    "embed_in.weight",
    "embeddings.weight",
    "shared.weight",
)


def is_tied(config: bytes | None) -> bool:
    """Whether ``config.json`` says that head and embedding are one."""
    try:
        content = json.loads(config or b"{}")
    except (ValueError, RecursionError):
        return False  # it is copied as it is; what it means is for its reader to say
    nested = content.get("text_config") if isinstance(content, dict) else None
    places = [c for c in (content, nested) if isinstance(c, dict)]
    return any(c.get("tie_word_embeddings") is True for c in places)


def without_tied(
    tensors: Sequence[Tensor], files: Files, options: Options, config: bytes | None
) -> tuple[tuple[Tensor, ...], tuple[str, ...]]:
    """The tensors to write, and notes for the reader."""
    if not is_tied(config):
        return tuple(tensors), ()
    dropped, notes = set(), []
    for head, embedding in _pairs(tensors):
        if head.tied == embedding.name or embedding.tied == head.name or _same_bytes(files, head, embedding, options):
            dropped.add(head.name)
            notes.append(f"{head.name} is tied to {embedding.name}: one copy is kept")
        else:
            notes.append(f"{head.name} and {embedding.name} are tied by the configuration, but differ: both are kept")
    return tuple(t for t in tensors if t.name not in dropped), tuple(notes)


def _pairs(tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    heads = [t for t in tensors if t.name.endswith(HEADS)]
    embeddings = [t for t in tensors if t.name.endswith(EMBEDDINGS)]
    for head in heads:
        alike = [e for e in embeddings if (e.shape, e.dtype) == (head.shape, head.dtype)]
        if len(alike) == 1:
            yield head, alike[0]


def _same_bytes(files: Files, one: Tensor, other: Tensor, options: Options) -> bool:
    return _digest(files, one, options) == _digest(files, other, options)


def _digest(files: Files, tensor: Tensor, options: Options) -> str:
    copy = choose(tensor, options.dtype)
    planned = PlannedTensor(tensor.name, copy.dtype, tensor.shape, 0, 0, copy)
    digester = blake3()
    for block in blocks(copy.grid, WINDOW // ITEMSIZE[copy.dtype]):
        digester.update(gather(files, planned, block).data.cast("B"))
    return digester.hexdigest()
