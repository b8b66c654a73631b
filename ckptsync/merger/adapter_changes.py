"""What a LoRA adapter changes in its base model, tensor by tensor.  Pure.

Follows peft 0.21.2 (``tuners/lora/layer.py``, ``utils/save_and_load.py``, ``utils/other.py``): only
names, shapes and configuration are read here; whoever sums looks at values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.formats.dtypes import ITEMSIZE, is_castable
from ckptsync.merger import adapter_config as rules
from ckptsync.merger.adapter_config import Scales
from ckptsync.merger.adapter_factors import OTHER_MODEL, plan_products
from ckptsync.merger.adapter_names import Base, Parts, Slot, split
from ckptsync.merger.adapter_ties import WITH_HEAD, Tie
from ckptsync.merger.change_types import (
    BiasDelta,
    Change,
    Changes,
    IsEqual,
    LowRank,
    Replacement,
    Rows,
)
from ckptsync.merger.completeness import check_adapter, first_names
from ckptsync.merger.tensor_names import EMBEDDINGS, HEADS, ends_in
from ckptsync.tensors import Copy, Extent, Part, Shape, Tensor

_QUANTISED = re.compile(
    r".*(\.(absmax|qweight|qzeros|SCB|nested_absmax)|\.quant_state\..+|_scale_inv|_proj_blocks"
    r"|\.weight_(packed|scale))"
)
_VOCABULARY = (*EMBEDDINGS, *HEADS, "lm_head.bias", "predictions.bias")
_CLASSIFIERS = {
    "SEQ_CLS": "ForSequenceClassification",
    "TOKEN_CLS": "ForTokenClassification",
    "QUESTION_ANS": "ForQuestionAnswering",
}
_OWN_HEADS = ("score", "classifier", "qa_outputs")  # peft saves them without being told
_LAST = ("score", "classifier", "out_proj")  # modules with a row for each label
_LEFT = ("lm_head.", "cls.", "embed_out.")  # a language model's own, which a classifier lacks
_NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.)")
_UNQUANTISED = "give the unquantised model that it was made from, or a dequantised copy"


def plan_changes(
    base: Sequence[Tensor],
    base_config: Mapping[str, Any] | None,
    adapter: Sequence[Tensor],
    adapter_config: Mapping[str, Any],
    *,
    is_changed_base: bool = False,
    is_equal: IsEqual | None = None,
) -> Changes:
    """Return what the adapter changes in the base.

    ``base``: the tensors of the base's files; ``base_config``: its ``config.json``, None without.
    ``is_changed_base``: the base is the one that an initialisation such as PiSSA left for the
    training.  ``is_equal`` is asked only where an adapter adapts both of two tied embeddings;
    without it ``ensure_weight_tying`` decides.
    Raises Unsupported, Incomplete or Corrupt.
    """
    config = base_config or {}
    rules.check_kind(adapter_config, is_changed_base=is_changed_base)
    check_unquantised(base, config)
    check_adapter(adapter, adapter_config)
    return _Plan(base, config, split(adapter), adapter_config, is_equal).result()


def check_unquantised(base: Sequence[Tensor], config: Mapping[str, Any]) -> None:
    """Raise Unsupported of a quantised base: its weights are no numbers that can be added to."""
    for section in (config, *(v for v in config.values() if isinstance(v, dict))):
        quantisation = section.get("quantization_config")
        if isinstance(quantisation, dict) and quantisation:
            method = quantisation.get("quant_method") or "of an unnamed method"
            raise Unsupported(
                f"the base is quantised (config.json: quantization_config {method})",
                hint=_UNQUANTISED,
            )
    if name := next((t.name for t in base if _QUANTISED.fullmatch(t.name)), None):
        raise Unsupported(f"the base is quantised: it has {name}", hint=_UNQUANTISED)


class _Plan:
    """The changes of one adapter, as they are gathered; `result` gathers them all."""

    def __init__(
        self,
        base: Sequence[Tensor],
        config: Mapping[str, Any],
        parts: Parts,
        adapter_config: Mapping[str, Any],
        is_equal: IsEqual | None,
    ) -> None:
        self._config, self._parts, self._own_config = config, parts, adapter_config
        self._is_equal = is_equal
        self._scales = Scales.of(adapter_config)
        self._old = {t.name: t.shape for t in base}
        self._base = Base(base, config)
        self._tie = Tie.of(self._base, config)
        self._of: dict[str, list[Change]] = {}
        self._added: list[Tensor] = []
        self._shapes: dict[str, Shape] = {}
        self._settings: dict[str, Any] = {}
        self._lost: list[str] = []
        self._notes = list(rules.notes(adapter_config))
        trained_on = adapter_config.get("base_model_name_or_path")
        is_named = isinstance(trained_on, str) and trained_on
        self._hint = f"{OTHER_MODEL}: {trained_on}" if is_named else OTHER_MODEL

    def result(self) -> Changes:
        """Return everything; raises Unsupported, Incomplete or Corrupt."""
        new = self._add_replacements()
        removed = self._add_classifier(new)
        if self._shapes:  # the factors are of the new vocabulary
            old = self._base.tensors.values()
            sizes = self._shapes
            self._base = Base(
                (replace(t, shape=sizes.get(t.name, t.shape)) for t in old), self._config
            )
        self._add_factors()
        self._add_tokens()
        if self._lost:
            lost = sorted(set(self._lost))
            raise Corrupt(
                f"{len(lost)} modules of the adapter are not in the base: {first_names(lost)}",
                hint=self._hint,
            )
        self._add_tied()
        self._check_dtypes()
        self._set_vocabulary()
        if not self._of:
            raise Corrupt(
                "the adapter has no tensor that changes the base",
                hint="give the adapter of a training, as save_pretrained writes it",
            )
        return Changes(
            {name: tuple(own) for name, own in self._of.items()},
            tuple(self._added),
            self._shapes,
            self._settings,
            tuple(self._notes),
            tuple(dict.fromkeys((*self._doubts(), *self._scales.warnings))),
            removed,
            len(self._parts.pairs),
        )

    # Tensors that the adapter has whole

    def _add_replacements(self) -> dict[str, Tensor]:
        """Add what replaces tensors of the base; return what has no place there."""
        trains_biases = self._own_config.get("bias", "none") != "none"
        new: dict[str, Tensor] = {}
        both = [(n, t, True) for n, t in self._parts.base.items()]
        both += [(n, t, False) for n, t in self._parts.plain.items()]
        for name, tensor, is_inner in both:
            # peft saves a base layer's bias since it was trained, the weight since the vocabulary
            # may have been resized
            is_base = is_inner and not (trains_biases and name.endswith(".bias"))
            module = name.rpartition(".")[0]
            if self._tie and (side := self._tie.side(self._base, name)):
                change = Replacement(module, tensor, is_base)
                (side.base if is_base else side.own).append(change)
                continue
            slots = self._base.find(name)
            if not slots:
                new[name] = tensor
            for slot in slots:
                self._replace(module, slot, tensor, is_base=is_base)
        if self._tie:
            sides = (
                (self._tie.embedding_side, self._tie.tensor),
                (
                    self._tie.head_side,
                    self._tie.head or self._tie.tensor,
                ),
            )
            for side, own in sides:
                for item in side.all:
                    if isinstance(item, Replacement):
                        self._check_shape(own, item.tensor)
        return new

    def _replace(self, module: str, slot: Slot, tensor: Tensor, *, is_base: bool) -> None:
        """Add a replacement of a tensor of the base; raise Unsupported, or Corrupt by its shape."""
        if slot.own or slot.file.parts > 1:
            raise Unsupported(
                f"{tensor.name}: trained whole, and a part of {slot.tensor.name} in the base",
                hint="give a base as the version of transformers that trained it has it",
            )
        if not slot.file.is_whole:
            tensor = _piece(tensor, slot)
        self._check_shape(slot.tensor, tensor)
        self._of.setdefault(slot.tensor.name, []).append(Replacement(module, tensor, is_base))

    def _check_shape(self, own: Tensor, tensor: Tensor) -> None:
        """Record a resized vocabulary; raise Corrupt of every other difference."""
        if own.shape == tensor.shape and own.name not in self._shapes:
            return
        is_resized = ends_in(own.name, _VOCABULARY) and own.shape[1:] == tensor.shape[1:]
        if not is_resized or self._shapes.setdefault(own.name, tensor.shape) != tensor.shape:
            raise Corrupt(
                f"{tensor.name}: {tensor.shape}, and {own.name} of the base has {own.shape}",
                hint=self._hint,
            )

    def _add_classifier(self, new: Mapping[str, Tensor]) -> frozenset[str]:
        """Add a classifier that the base lacks, and return what of the base a classifier lacks.

        Anything else that is new matches nothing.
        """
        task = str(self._own_config.get("task_type"))
        kept = {*_OWN_HEADS, *rules.names(self._own_config, "modules_to_save")}
        own = {n: t for n, t in new.items() if any(f".{k}." in f".{n}" for k in kept)}
        if task not in _CLASSIFIERS or len(own) < len(new):
            self._lost += [name.rpartition(".")[0] for name in new]
            return frozenset()
        if not own:
            return frozenset()
        self._added += [replace(t, name=name, tied=None) for name, t in own.items()]
        modules = sorted({name.rpartition(".")[0] for name in own})
        text = f"{first_names(modules)}: the adapter's own, which the base does not have"
        classes = self._config.get("architectures")
        name = str(classes[0]) if isinstance(classes, list) and len(classes) == 1 else ""
        end = next((e for e in (*WITH_HEAD, "ForMaskedLM") if name.endswith(e)), "")
        if not end:
            self._notes.append(f"{text}: set the architectures in config.json to their class")
            return frozenset()
        kind = name.removesuffix(end) + _CLASSIFIERS[task]
        self._notes.append(f"{text}: the model is written as {kind}")
        self._settings["architectures"] = [kind]
        ends = tuple(f"{last}.weight" for last in _LAST)
        for count in (t.shape[0] for n, t in own.items() if n.endswith(ends) and t.shape):
            self._settings["id2label"] = {str(n): f"LABEL_{n}" for n in range(count)}
            self._settings["label2id"] = {f"LABEL_{n}": n for n in range(count)}
        return frozenset(n for n in self._old if n.startswith(_LEFT))

    # What is added

    def _add_factors(self) -> None:
        """Add products of factors, and biases; raise Corrupt, Incomplete or Unsupported."""
        pairs = self._parts.pairs
        magnitudes = [module for module, pair in pairs.items() if pair.magnitude]
        uses_dora = bool(self._own_config.get("use_dora"))
        if pairs and (len(magnitudes) if uses_dora else 0) != (
            len(pairs) if uses_dora else len(magnitudes)
        ):
            raise Corrupt(
                f"adapter_config.json: use_dora {str(uses_dora).lower()}, and {len(magnitudes)} of"
                f" {len(pairs)} modules have DoRA's magnitudes",
                hint="it is another adapter's configuration: give this one's directory",
            )
        base, tie = self._base, self._tie
        sides = {m: tie.side(base, f"{m}.weight") for m in pairs} if tie else {}
        # a tied head that the files do not have: a linear layer over the embedding's matrix
        heads = [m for m, s in sides.items() if tie and s is tie.head_side and not tie.head]
        if tie and heads:
            shared = base.tensors[tie.tensor.name]
            base = Base(
                (*base.tensors.values(), *(replace(shared, name=f"{m}.weight") for m in heads)),
                self._config,
            )
        changes, lost = plan_products(pairs, base, self._scales, self._config, self._own_config)
        self._lost += lost
        for module, own in changes.items():
            side = sides.get(module)
            for name, change in own:
                (side.own if side else self._of.setdefault(name, [])).append(change)
            self._add_bias(module)

    def _add_bias(self, module: str) -> None:
        pair = self._parts.pairs[module]
        if not pair.bias or not pair.a:
            return
        slots = self._base.find(f"{module}.bias")
        if len(slots) != 1 or not slots[0].file.is_whole or slots[0].own:
            raise Unsupported(
                f"{pair.bias.name}: the base has no bias there, so none can be added to",
                hint="serve the adapter beside its base",
            )
        own = slots[0].tensor
        self._check_shape(own, pair.bias)
        scale = self._scales.scale(module, pair.a.shape[0])
        self._of.setdefault(own.name, []).append(BiasDelta(module, pair.bias, scale))

    def _add_tokens(self) -> None:
        """Add the rows of trained tokens; raise Corrupt where rows and configuration differ."""
        indices = self._own_config.get("trainable_token_indices")
        for module, tensor in self._parts.tokens.items():
            rows = indices
            if isinstance(indices, dict):
                rows = next(
                    (own for key, own in indices.items() if f".{module}".endswith(f".{key}")),
                    next(iter(indices.values()), None) if len(indices) == 1 else None,
                )
            side = self._tie.side(self._base, f"{module}.weight") if self._tie else None
            slots = self._base.find(f"{module}.weight")
            if not slots and not (side and self._tie):
                self._lost.append(module)
                continue
            name = slots[0].tensor.name if slots or not self._tie else self._tie.tensor.name
            shape = self._base.tensors[name].shape
            if (
                not (isinstance(rows, list) and shape)
                or not all(type(row) is int and 0 <= row < shape[0] for row in rows)
                or len(set(rows)) != len(rows)
                or tensor.shape != (len(rows), *shape[1:])
            ):
                raise Corrupt(
                    f"{tensor.name}: {tensor.shape}, which contradicts trainable_token_indices or"
                    f" the base's {shape}",
                    hint=self._hint,
                )
            replaced = Rows(module, tensor, tuple(rows))
            (side.own if side else self._of.setdefault(name, [])).append(replaced)

    def _add_tied(self) -> None:
        """Add what becomes of tied embeddings, once it is known what both sides have."""
        if not self._tie:
            return
        outcome = self._tie.outcome(self._base, self._config, self._equal)
        for name, own in outcome.of.items():
            self._of[name] = [*self._of.get(name, ()), *own]
            for item in own:
                if isinstance(item, Replacement) and item.tensor.shape != self._old.get(name):
                    self._shapes |= {name: item.tensor.shape} if name in self._old else {}
        self._added += outcome.added
        self._settings |= outcome.settings
        self._notes += filter(None, (outcome.note,))

    def _equal(self, one: Tensor, other: Tensor, is_crossed: bool) -> bool:  # noqa: FBT001 - IsEqual
        if other.shape != (one.shape[::-1] if is_crossed else one.shape):
            return False
        if self._is_equal is None:
            return bool(self._own_config.get("ensure_weight_tying"))
        return self._is_equal(one, other, is_crossed)

    # What is checked at the end

    def _check_dtypes(self) -> None:
        """Raise Unsupported for a tensor, of the base or the adapter, that is not floating."""
        for name, own in self._of.items():
            tensor = self._base.tensors.get(name)
            if tensor and not is_castable(tensor.dtype):
                raise Unsupported(
                    f"{name}: {tensor.dtype} in the base, which cannot be added to",
                    hint=_UNQUANTISED,
                )
            if odd := next((t for t in _tensors(own) if not is_castable(t.dtype)), None):
                raise Unsupported(
                    f"{odd.name}: {odd.dtype}, a floating type is expected",
                    hint="save the adapter again, in bf16 or fp32",
                )

    def _doubts(self) -> Iterable[str]:
        """Yield a warning of layers of the base that lack what their siblings have adapted."""
        config, own = self._own_config, self._parts.pairs
        if not isinstance(config.get("target_modules"), list) or any(
            config.get(key) is not None for key in ("exclude_modules", "layers_to_transform")
        ):
            return
        kinds = {_NUMBER.sub("#", module) for module in own if _NUMBER.search(module)}
        modules = (name.removesuffix(".weight") for name in self._base.live_names())
        if lost := sorted(m for m in modules if m not in own and _NUMBER.sub("#", m) in kinds):
            yield (
                "the adapter may be incomplete: other layers are adapted, and not"
                f" {first_names(lost)}"
            )

    def _set_vocabulary(self) -> None:
        """Set ``vocab_size``; raise Corrupt if the embedding was resized, and the head was not."""
        if not self._shapes:
            return
        new = {shape[0] for shape in self._shapes.values()}
        old = {self._old[name][0] for name in self._shapes}
        starts = {(count,) for count in old}
        words = (n for n in self._old if ends_in(n, (*EMBEDDINGS, *HEADS)))
        left = sorted(n for n in words if self._old[n][:1] in starts and n not in self._shapes)
        if len(new) > 1 or left:
            raise Corrupt(
                f"a vocabulary of {', '.join(map(str, sorted(new)))} tokens in"
                f" {first_names(sorted(self._shapes))}, and of {', '.join(map(str, sorted(old)))}"
                f" in {first_names(left) or 'the base'}",
                hint="save the adapter with save_embedding_layers=True",
            )
        (count,) = new
        if "vocab_size" in self._config:
            self._settings["vocab_size"] = count
        for key, section in self._config.items():
            if isinstance(section, dict) and section.get("vocab_size") in old:
                self._settings[key] = {**self._settings.get(key, {}), "vocab_size": count}
        self._notes.append(
            f"the vocabulary has {count} tokens, {', '.join(map(str, sorted(old)))} in the base"
        )


def _tensors(changes: Iterable[Change]) -> list[Tensor]:
    """Return the adapter's tensors that changes are made of."""
    result: list[Tensor] = []
    for change in changes:
        if isinstance(change, LowRank):
            result += [change.a.tensor, change.b.tensor]
            result += [change.magnitude] if change.magnitude else []
        else:
            result.append(change.tensor)
    return result


def _piece(tensor: Tensor, slot: Slot) -> Tensor:
    """Return what one tensor of the base's files is of a whole one: rows of one expert.

    Raises Unsupported where the whole one is not stored in order.
    """
    own, place = slot.tensor.shape, slot.file
    lead = 0 if place.expert is None else 1
    count, rows = prod(own), tensor.shape[lead] // place.pieces if len(tensor.shape) > lead else 0
    at = (place.expert or 0) * prod(tensor.shape[1:]) if lead else 0
    at += place.piece * rows * prod(tensor.shape[lead + 1 :])
    copies = []
    for copy in tensor.copies:
        part = copy.parts[0] if len(copy.parts) == 1 else None
        if part is None or part.sizes != copy.grid or part.strides is not None:
            raise Unsupported(
                f"{tensor.name}: stored in {len(copy.parts)} parts, and the base has it in pieces",
                hint="merge the adapter's shards first, and sum what that writes",
            )
        size = ITEMSIZE[copy.dtype]
        extent = Extent(part.extent.file, part.extent.start + at * size, count * size)
        copies.append(Copy(copy.dtype, own, (Part((0,) * len(own), own, extent),)))
    if tensor.shape[lead + 1 :] != own[1:] or rows != own[0]:
        return tensor  # of another shape: that is said
    return replace(tensor, shape=own, copies=tuple(copies))
