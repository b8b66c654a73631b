"""The base model that a merge is compared with: names, shapes and dtypes, of which headers alone are read.  Pure but for small reads."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod

from ckptsync.errors import Corrupt, Incomplete, Unsupported
from ckptsync.formats.dtypes import is_castable
from ckptsync.layouts import table
from ckptsync.merge.adapter import PREFIX, TUNERS
from ckptsync.merge.ties import HEADS
from ckptsync.model import Files, Shape, Tensor

FIRST = 3  # names that a message lists
MOST_HEADS = 8  # first components that are tried as the part one model is of the other
# Buffers that older versions of transformers stored, and newer ones compute.
_COMPUTED = re.compile(r"(.*\.)?(inv_freq|position_ids|masked_bias|attn\.bias|attention\.bias|num_batches_tracked)")


@dataclass(frozen=True, slots=True)
class Base:
    """The tensors of a base model by name."""

    tensors: Mapping[str, Tensor]

    def under_names_of(self, names: Collection[str]) -> Base:
        """The same under the names that a model has for these tensors, of which transformers gives it others when it is saved or loaded.

        GPT-2's ``wte.weight`` is ``transformer.wte.weight`` in a model with a head; ``language_model.model.x`` of a file is
        ``model.language_model.x`` in memory.
        """
        if self.tensors.keys() <= set(names):
            return self
        heads = Counter(name.partition(".")[0] for name in (*names, *self.tensors))
        found = [self.tensors, _by_parts(self.tensors, names)]
        for head, _ in heads.most_common(MOST_HEADS):
            found.append({f"{head}.{n}": t for n, t in self.tensors.items()})
            found.append({n.removeprefix(f"{head}."): t for n, t in self.tensors.items()})
        return Base(max(found, key=lambda tensors: sum(n in names for n in tensors)))

    def beside(self, own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Its tensors under the names of ``own``; experts as one tensor where ``own`` has them so."""
        return _fused(self.under_names_of(own).tensors, own)


def read(files: Files) -> Base:
    """The base model of a directory: ``save_pretrained``'s files.  Raises Unsupported, Incomplete or Corrupt."""
    source = table.choose(files, None)
    if source.layout == "peft":
        raise Unsupported("--base: an adapter, a model is wanted", hint="give the model that the adapter was trained on")
    return Base({t.name: t for t in table.tensors(files, source)})


def with_dtypes(tensors: Sequence[Tensor], base: Base) -> tuple[Tensor, ...]:
    """The tensors with the base model's element types where both are floating: what ``auto`` casts to."""
    there = base.beside({t.name: t for t in tensors})
    return tuple(_with_dtype(t, there.get(t.name)) for t in tensors)


def compare(tensors: Sequence[Tensor], base: Base, tied: Iterable[str] = ()) -> tuple[str, ...]:
    """Notes on what the base model has not; raises Corrupt where a shape differs, Incomplete where a name is missing.

    ``tied``: names that were left out, or may be, since another tensor has their values.
    """
    own = {t.name: t for t in tensors}
    there = base.beside(own)
    resized = _resized(own, there)
    misshapen = [
        f"{n} is {list(own[n].shape)}, {list(t.shape)} in the base model"
        for n, t in there.items()
        if n in own and own[n].shape != t.shape and n not in resized and not (_is_packed(t) or _is_packed(own[n]))
    ]
    missing = [n for n in there if n not in own and n not in set(tied) and not _COMPUTED.fullmatch(n)]
    unexpected = [n for n in own if n not in there and n not in set(tied)]
    if misshapen:
        raise Corrupt(f"{listed(misshapen)}", hint="is it the base of this model? without --base nothing is compared")
    if missing:
        same = len(own.keys() & there.keys())
        raise Incomplete(
            f"{len(missing)} of the base model's {len(there)} tensors are missing ({same} are there): {listed(missing)}",
            hint="was all of the model saved? if the base model only has other names for them, give it with --config-from instead",
        )
    return _notes(unexpected, len(own), resized, len(there))


def compare_adapter(tensors: Sequence[Tensor], base: Base) -> tuple[str, ...]:
    """Raises Corrupt where an adapter adapts what the base model has not, or not in this shape."""
    targets = {t.name: _target(t.name) for t in tensors}
    there = base.under_names_of({*targets.values(), *(f"{target}.weight" for target in targets.values())}).tensors
    modules = {above for name in there for above in accumulate(name.split("."), "{}.{}".format)}
    lost = [n for n, target in targets.items() if target and target not in modules and f"{target}.weight" not in HEADS]
    heads = [n for n in lost if targets[n] == _own(n)]  # saved whole: a classifier that the base model need not have
    if len(lost) > len(heads):
        raise Corrupt(
            f"{len(lost)} of {len(tensors)} adapter tensors adapt modules that the base model has not: {listed(lost)}",
            hint="is it the model that this adapter was trained on?",
        )
    wrong = [t.name for t in tensors if not _fits(t, there.get(f"{targets[t.name]}.weight"))]
    if wrong:
        raise Corrupt(f"not of the base model's shapes: {listed(wrong)}", hint="is it the model that this adapter was trained on?")
    return (f"{len(heads)} of {len(tensors)} tensors are not in the base model: {listed(heads)}",) if heads else ()


def listed(names: Sequence[str]) -> str:
    """The first few, and how many more."""
    more = f" and {len(names) - FIRST} more" if len(names) > FIRST else ""
    return ", ".join(names[:FIRST]) + more


def _by_parts(tensors: Mapping[str, Tensor], names: Collection[str]) -> Mapping[str, Tensor]:
    """By the components that both ways of naming have; as they are, where that would make two of one."""
    own = {_parts(name): name for name in names}
    base = {_parts(name): tensor for name, tensor in tensors.items()}
    if len(own) != len(set(names)) or len(base) != len(tensors):
        return tensors
    return {own.get(parts, name): tensors[name] for name in tensors for parts in (_parts(name),)}


def _parts(name: str) -> tuple[str, ...]:
    return tuple(_ALIKE.get(part, part) for part in name.split(".") if part not in _MOVED)


_MOVED = frozenset({"model", "language_model", "text_model", "vision_model", "transformer"})
_ALIKE = {"block_sparse_moe": "mlp"}  # Mixtral's, in memory and in its files


def _fused(there: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """transformers 5 keeps all experts of a layer in one tensor in memory, its files hold one an expert: compared by their elements."""
    stored: dict[tuple[str, ...], list[str]] = {}
    for name in there:
        if (match := _EXPERT.fullmatch(name)) and name not in own:
            stored.setdefault(_parts(match[1]), []).append(name)
    fused: dict[tuple[str, ...], list[str]] = {}
    for name in own:
        if (match := _FUSED.fullmatch(name)) and name not in there:
            fused.setdefault(_parts(match[1]), []).append(name)
    found = dict(there)
    for parts, names in fused.items():
        experts = stored.get(parts, [])
        dtypes = {there[n].dtype for n in experts}
        if len(dtypes) == 1 and sum(prod(there[n].shape) for n in experts) == sum(prod(own[n].shape) for n in names):
            dtype = dtypes.pop()
            found = {n: t for n, t in found.items() if n not in set(experts)} | {n: replace(own[n], dtype=dtype) for n in names}
    return found


_EXPERT = re.compile(r"(.+\.experts)\.[0-9]+\.\w+\.(?:weight|bias)")
_FUSED = re.compile(r"(.+\.experts)\.(?:gate_up_proj|down_proj|gate_proj|up_proj)")


def _with_dtype(tensor: Tensor, base: Tensor | None) -> Tensor:
    """A packed matrix, which some quantisers store as floats, has another shape than the weights in it."""
    if base is None or not is_castable(base.dtype) or not is_castable(tensor.dtype) or base.shape[1:] != tensor.shape[1:]:
        return tensor
    return replace(tensor, dtype=base.dtype)


def _is_packed(tensor: Tensor) -> bool:
    """Quantised weights have shapes of their own."""
    return tensor.dtype in ("U8", "I8", "I32", "U32")


def _is_embedding(name: str) -> bool:
    return name.rpartition(".weight")[0].rpartition(".")[2] in _VOCABULARY


_VOCABULARY = (
    "embed_tokens",
    "wte",
    "word_embeddings",
    "embed_in",
    "embeddings",
    "shared",
    "lm_head",
    "embed_out",
    "proj_out",
    "decoder",
)


def _resized(own: Mapping[str, Tensor], there: Mapping[str, Tensor]) -> dict[str, Shape]:
    """Embeddings and heads with another number of rows, the same for all: a vocabulary that was resized, as trainers do."""
    found = {n: own[n].shape for n in there if n in own and own[n].shape != there[n].shape and _is_embedding(n)}
    rows = {(shape[:1], there[n].shape[:1]) for n, shape in found.items()}
    is_same_width = all(shape and shape[1:] == there[n].shape[1:] for n, shape in found.items())
    every = {n for n in own if _is_embedding(n) and n in there and there[n].shape[:1] in {old for _, old in rows}}
    return found if len(rows) == 1 and is_same_width and every == found.keys() else {}


def _notes(unexpected: Sequence[str], own: int, resized: Mapping[str, Shape], count: int) -> tuple[str, ...]:
    notes = [f"{len(unexpected)} of {own} tensors are not in the base model: {listed(unexpected)}"] if unexpected else []
    notes += [
        f"{name} has {shape[0]} rows, not as many as in the base model: its vocabulary was resized"
        for name, shape in resized.items()
    ]
    return (*notes, f"names and shapes compared with the base model's {count} tensors")


def _target(name: str) -> str:
    """``base_model.model.x.q_proj.lora_A.weight`` → ``x.q_proj``; of a module that is saved whole its tensor's own name."""
    parts = name.removeprefix(PREFIX).split(".")
    for at, part in enumerate(parts):
        if part.startswith(_ADAPTED):
            return ".".join(p for p in parts[:at] if p != "base_layer")
    return "" if parts[0].startswith("prompt_") else _own(name)


def _own(name: str) -> str:
    return ".".join(part for part in name.removeprefix(PREFIX).split(".") if part != "base_layer")


_ADAPTED = (*TUNERS, "token_adapter")


def _fits(tensor: Tensor, weight: Tensor | None) -> bool:
    """LoRA's two factors against the linear layer between them, stored either way round (GPT-2 has it transposed)."""
    if weight is None or _is_packed(weight) or len(tensor.shape) != 2 or len(weight.shape) != 2:
        return True
    if tensor.name.endswith(".lora_A.weight"):
        return tensor.shape[1] in weight.shape
    return not tensor.name.endswith(".lora_B.weight") or tensor.shape[0] in weight.shape
