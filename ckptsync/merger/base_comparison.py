"""Compare a merge with its base model, by names, shapes and dtypes.  Only headers are read.

A merged model should have what the model had that was trained: a missing tensor or another shape
shows a save that is not whole, or a wrong base.  The two may be named differently, so the base's
tensors are first looked for under the names that the merge has.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from math import prod

from ckptsync.errors import Corrupt, Incomplete, Unsupported
from ckptsync.formats.dtypes import is_castable
from ckptsync.layouts import registry
from ckptsync.merger.adapter import PREFIX, TUNERS
from ckptsync.merger.completeness import first_names
from ckptsync.merger.tensor_names import HEADS
from ckptsync.tensors import Files, Shape, Tensor

MOST_HEADS = 8  # first components that are tried as the part one model is of the other
# Buffers that older versions of transformers stored, and newer ones compute.
_COMPUTED = re.compile(
    r"(.*\.)?(inv_freq|position_ids|masked_bias|attn\.bias|attention\.bias|num_batches_tracked)"
)
_OPTIONAL_PARTS = frozenset(
    {"model", "language_model", "text_model", "vision_model", "transformer"}
)
_SYNONYMS = {"block_sparse_moe": "mlp"}  # Mixtral's, in memory and in its files
_EXPERT = re.compile(r"(.+\.experts)\.[0-9]+\.\w+\.(?:weight|bias)")
_FUSED = re.compile(r"(.+\.experts)\.(?:gate_up_proj|down_proj|gate_proj|up_proj)")
_VOCABULARY = (
    *("embed_tokens", "wte", "word_embeddings", "embed_in", "embeddings", "shared"),
    *("lm_head", "embed_out", "proj_out", "decoder"),
)
_ADAPTED = (*TUNERS, "token_adapter")
Model = Mapping[str, Tensor]
"""The tensors of a model by name."""
_OTHER_MODEL = "give the model that this adapter was trained on"


def read_base(files: Files, option: str = "--base") -> BaseModel:
    """Return the base model of a directory of ``save_pretrained``'s files.

    ``option``: what named the directory, for messages.  Raises Unsupported if it holds an adapter,
    and what its layout raises: Unsupported, Incomplete or Corrupt.
    """
    try:
        source = registry.choose(files, None)
        tensors = registry.tensors(files, source)
    except (Corrupt, Incomplete, Unsupported) as e:
        raise type(e)(f"{option}: {e}", hint=e.hint) from e
    if source.layout == "peft":
        raise Unsupported(
            f"{option}: an adapter, a model is expected",
            hint="give the model that the adapter was trained on",
        )
    return BaseModel(tensors)


class BaseModel:
    """The model that a merge is compared with."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.tensors: Model = {t.name: t for t in tensors}

    def shapes(self) -> Mapping[str, Shape]:
        """Return the shapes of the base's tensors by name."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def packed(self) -> Mapping[str, str]:
        """Return the element types of matrices that may hold quantised weights."""
        tensors = self.tensors.values()
        return {t.name: t.dtype for t in tensors if len(t.shape) > 1 and _is_packed(t)}

    def under_names_of(self, names: Collection[str]) -> Model:
        """Return all of this model's tensors, renamed so that most have one of ``names``.

        Unchanged if no renaming is better.  transformers renames some when it saves and loads:
        GPT-2's ``wte.weight`` is ``transformer.wte.weight`` in a model with a head;
        ``language_model.model.x`` of a file is ``model.language_model.x`` in memory.
        """
        base = self.tensors
        if base.keys() <= set(names):
            return base
        candidates = [base]
        names_by_parts = {_common_parts(name): name for name in names}
        parts_by_name = {name: _common_parts(name) for name in base}
        # else two of one would be made
        if len(names_by_parts) == len(set(names)) and len(set(parts_by_name.values())) == len(
            parts_by_name
        ):
            candidates.append(
                {
                    names_by_parts.get(parts, name): base[name]
                    for name, parts in parts_by_name.items()
                }
            )
        heads = Counter(name.partition(".")[0] for name in (*names, *base))
        for head, _ in heads.most_common(MOST_HEADS):
            candidates.append({f"{head}.{n}": t for n, t in base.items()})
            candidates.append({n.removeprefix(f"{head}."): t for n, t in base.items()})
        return max(candidates, key=lambda tensors: sum(n in names for n in tensors))

    def beside(self, merged: Model) -> Model:
        """Return this model's tensors as ``merged`` has them: by name, and experts as one tensor.

        transformers 5 keeps all experts of a layer in one tensor in memory, and its files hold one
        for each expert: they are the same if they have as many elements.
        """
        base = self.under_names_of(merged.keys())
        stored: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
        for name in base:
            if (match := _EXPERT.fullmatch(name)) and name not in merged:
                stored[_common_parts(match[1])].append(name)
        fused: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
        for name in merged:
            if (match := _FUSED.fullmatch(name)) and name not in base:
                fused[_common_parts(match[1])].append(name)
        matched = dict(base)
        for parts, names in fused.items():
            experts = stored[parts]
            dtypes = {base[n].dtype for n in experts}
            if len(dtypes) == 1 and _elements(base, experts) == _elements(merged, names):
                matched = {n: t for n, t in matched.items() if n not in set(experts)}
                matched |= {n: replace(merged[n], dtype=base[experts[0]].dtype) for n in names}
        return matched

    def with_dtypes(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the tensors with the base's dtypes where both are floating, for ``--dtype auto``.

        A tensor that the base lacks keeps its dtype.  So does one of another shape, which may be a
        packed matrix of a quantiser that stores it as floats; the first axis may differ, as after a
        resize of the vocabulary.
        """
        base = self.beside({t.name: t for t in tensors})

        def change(tensor: Tensor) -> Tensor:
            """Return a tensor with the dtype of the base's, if there is one that fits it."""
            base_tensor = base.get(tensor.name)
            if (
                base_tensor is None
                or not (is_castable(base_tensor.dtype) and is_castable(tensor.dtype))
                or base_tensor.shape[1:] != tensor.shape[1:]
            ):
                return tensor
            return replace(tensor, dtype=base_tensor.dtype)

        return tuple(map(change, tensors))

    def compare(self, tensors: Sequence[Tensor], tied: Collection[str] = ()) -> tuple[str, ...]:
        """Return notes: tensors that the base lacks, resized vocabularies, how many it has.

        Raises Corrupt if a shape differs, unless a vocabulary was resized or weights are packed;
        Incomplete if a name is missing that is neither in ``tied`` nor a computed buffer.
        """
        merged = {t.name: t for t in tensors}
        base = self.beside(merged)
        differ = {n for n, t in base.items() if n in merged and merged[n].shape != t.shape}
        resized = _find_resized(differ, merged, base)
        misshapen = [
            f"{n} is {list(merged[n].shape)}, {list(base[n].shape)} in the base model"
            for n in base
            if n in differ
            and n not in resized
            and not (_is_packed(base[n]) or _is_packed(merged[n]))
        ]
        if misshapen:
            raise Corrupt(
                first_names(misshapen),
                hint="give the base of this model; without --base nothing is compared",
            )
        if absent := [
            n for n in base if n not in merged and n not in tied and not _COMPUTED.fullmatch(n)
        ]:
            common = len(merged.keys() & base.keys())
            raise Incomplete(
                f"{len(absent)} of the base model's {len(base)} tensors are missing ({common} are"
                f" there): {first_names(absent)}",
                hint=(
                    "was all of the model saved? if the base model only has other names for them,"
                    " give it with --config-from instead"
                ),
            )
        notes = []
        if unexpected := [n for n in merged if n not in base and n not in tied]:
            notes.append(
                f"{len(unexpected)} of {len(merged)} tensors are not in the base model:"
                f" {first_names(unexpected)}"
            )
        for name in resized:
            rows = merged[name].shape[0]
            notes.append(
                f"{name} has {rows} rows, not as many as in the base model: its vocabulary was"
                " resized"
            )
        return (*notes, f"names and shapes compared with the base model's {len(base)} tensors")

    def compare_adapter(self, tensors: Sequence[Tensor]) -> tuple[str, ...]:
        """Return notes on an adapter's tensors that the base model does not have.

        Those are modules saved whole.  Raises Corrupt if the base model lacks an adapted module, or
        a LoRA factor does not fit it.
        """
        targets = {t.name: _adapted_module(t.name) for t in tensors}
        weights = {f"{target}.weight" for target in targets.values()}
        base = self.under_names_of(weights.union(targets.values()))
        modules = {above for name in base for above in accumulate(name.split("."), "{}.{}".format)}
        unmatched = [
            n
            for n, target in targets.items()
            if target and target not in modules and f"{target}.weight" not in HEADS
        ]
        # saved whole: a classifier that the base model need not have
        heads = [n for n in unmatched if targets[n] == _own_name(n)]
        if len(unmatched) > len(heads):
            raise Corrupt(
                f"{len(unmatched)} of {len(tensors)} adapter tensors belong to modules that the"
                f" base model does not have: {first_names(unmatched)}",
                hint=_OTHER_MODEL,
            )
        if wrong := [
            t.name for t in tensors if not _is_fitting(t, base.get(f"{targets[t.name]}.weight"))
        ]:
            raise Corrupt(
                f"shapes do not match the base model: {first_names(wrong)}", hint=_OTHER_MODEL
            )
        if heads:
            count = f"{len(heads)} of {len(tensors)} tensors"
            return (f"{count} are not in the base model: {first_names(heads)}",)
        return ()


def _common_parts(name: str) -> tuple[str, ...]:
    """Return the components of a name that both ways of naming have."""
    return tuple(
        _SYNONYMS.get(part, part) for part in name.split(".") if part not in _OPTIONAL_PARTS
    )


def _elements(tensors: Model, names: Iterable[str]) -> int:
    """Return the number of elements of these tensors together."""
    return sum(prod(tensors[name].shape) for name in names)


def _is_packed(tensor: Tensor) -> bool:
    """Return whether a tensor may hold quantized weights, which have shapes of their own."""
    return tensor.dtype in ("U8", "I8", "I32", "U32")


def _find_resized(differ: Iterable[str], own: Model, base: Model) -> list[str]:
    """Return embeddings and heads of a resized vocabulary; empty if the change is another one.

    It is another one if their columns differ, if the numbers of rows changed in different ways, or
    if a tensor with the base's number of rows did not change.
    """
    common = [
        n for n in base if n in own and n.rpartition(".weight")[0].rpartition(".")[2] in _VOCABULARY
    ]
    changed = [n for n in common if n in differ]
    rows = {(own[n].shape[:1], base[n].shape[:1]) for n in changed}
    is_same_width = all(own[n].shape and own[n].shape[1:] == base[n].shape[1:] for n in changed)
    if len(rows) != 1 or not is_same_width:
        return []
    ((_, base_rows),) = rows
    return changed if changed == [n for n in common if base[n].shape[:1] == base_rows] else []


def _adapted_module(name: str) -> str:
    """Return ``x.q_proj`` of ``base_model.model.x.q_proj.lora_A.weight``.

    For a module that is saved whole, return its tensor's own name; for what belongs to no module
    (prompts, vectors that all modules share), an empty name.
    """
    if not name.startswith(PREFIX):
        return ""
    parts = name.removeprefix(PREFIX).split(".")
    for index, part in enumerate(parts):
        if part.startswith(_ADAPTED):
            return ".".join(p for p in parts[:index] if p != "base_layer")
    return _own_name(name)


def _own_name(name: str) -> str:
    """Return a name without what peft adds: `PREFIX` and ``base_layer``."""
    return ".".join(part for part in name.removeprefix(PREFIX).split(".") if part != "base_layer")


def _is_fitting(tensor: Tensor, weight: Tensor | None) -> bool:
    """Return whether a LoRA factor fits the linear layer that it adapts; True if that is unknown.

    The layer may be stored transposed, as GPT-2's are.
    """
    if weight is None or _is_packed(weight) or len(tensor.shape) != 2 or len(weight.shape) != 2:
        return True
    if tensor.name.endswith(".lora_A.weight"):
        return tensor.shape[1] in weight.shape
    return not tensor.name.endswith(".lora_B.weight") or tensor.shape[0] in weight.shape
