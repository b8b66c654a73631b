"""Decide what a LoRA adapter changes in its base model, tensor by tensor.  Pure.

An adapter replaces, adds to or extends tensors of its base, and its names are those of a model in
memory.  This module finds the base's tensor for each tensor of the adapter, as peft 0.21.2 does
(``tuners/lora/layer.py``, ``utils/save_and_load.py``, ``utils/other.py``), and refuses what has no
place there.  Only names, shapes and configurations are read; `adapter_sums` reads values.
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
_LABEL_LAYERS = ("score", "classifier", "out_proj")  # modules with a row for each label
# a language model has one of them, a classifier has none
_LANGUAGE_HEADS = ("lm_head.", "cls.", "embed_out.")
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

    Args:
        base: The tensors of the base's files.
        base_config: Its ``config.json``; None without one.
        adapter: The adapter's tensors, under the names that peft saves.
        adapter_config: Its ``adapter_config.json``.
        is_changed_base: The base is the one that an initialisation such as PiSSA left for the
            training.
        is_equal: Compares two tensors' values; called only where an adapter adapts both of two tied
            embeddings.  Without it ``ensure_weight_tying`` decides.

    Raises:
        Unsupported: The base is quantised, or the adapter is no sum of low-rank products.
        Incomplete: The adapter lacks one of two factors.
        Corrupt: The adapter does not fit the base, or its configuration.

    """
    config = base_config or {}
    rules.check_kind(adapter_config, is_changed_base=is_changed_base)
    check_unquantised(base, config)
    check_adapter(adapter, adapter_config)
    return _Plan(base, config, split(adapter), adapter_config, is_equal).result()


def check_unquantised(base: Sequence[Tensor], config: Mapping[str, Any]) -> None:
    """Raise Unsupported if ``config`` or the names of ``base`` show that it is quantised."""
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
        self._changes: dict[str, list[Change]] = {}
        self._added: list[Tensor] = []
        self._shapes: dict[str, Shape] = {}
        self._settings: dict[str, Any] = {}
        self._unmatched: list[str] = []
        self._notes = list(rules.notes(adapter_config))
        trained_on = adapter_config.get("base_model_name_or_path")
        is_named = isinstance(trained_on, str) and trained_on
        self._hint = f"{OTHER_MODEL}: {trained_on}" if is_named else OTHER_MODEL

    def result(self) -> Changes:
        """Return all changes of the adapter.

        Called once: each step below adds to what this plan has gathered.  Raises Unsupported,
        Incomplete or Corrupt.
        """
        new_tensors = self._add_replacements()
        removed = self._add_classifier(new_tensors)
        if self._shapes:  # the factors are of the new vocabulary
            base_tensors = self._base.tensors.values()
            sizes = self._shapes
            self._base = Base(
                (replace(t, shape=sizes.get(t.name, t.shape)) for t in base_tensors), self._config
            )
        self._add_factors()
        self._add_tokens()
        if self._unmatched:
            modules = sorted(set(self._unmatched))
            raise Corrupt(
                f"{len(modules)} modules of the adapter are not in the base:"
                f" {first_names(modules)}",
                hint=self._hint,
            )
        self._add_tied()
        self._check_dtypes()
        self._set_vocabulary()
        if not self._changes:
            raise Corrupt(
                "the adapter has no tensor that changes the base",
                hint="give the adapter of a training, as save_pretrained writes it",
            )
        return Changes(
            {name: tuple(tensor_changes) for name, tensor_changes in self._changes.items()},
            tuple(self._added),
            self._shapes,
            self._settings,
            tuple(self._notes),
            tuple(dict.fromkeys((*self._warnings(), *self._scales.warnings))),
            removed,
            len(self._parts.pairs),
        )

    # Tensors that the adapter has whole

    def _add_replacements(self) -> dict[str, Tensor]:
        """Record replacements of the base's tensors; return the tensors that the base lacks.

        Those of a tied embedding or head go to its side of the tie.  Raises Unsupported or Corrupt
        where a replacement does not fit.
        """
        new_tensors: dict[str, Tensor] = {}
        candidates = [(n, t, True) for n, t in self._parts.base.items()]
        candidates += [(n, t, False) for n, t in self._parts.plain.items()]
        for name, tensor, is_inner in candidates:
            module = name.rpartition(".")[0]
            if self._tie and (side := self._tie.side(self._base, name)):
                # peft saves a base layer's weight since the vocabulary may have been resized
                (side.base if is_inner else side.own).append(Replacement(module, tensor))
                continue
            slots = self._base.find(name)
            if not slots:
                new_tensors[name] = tensor
            for slot in slots:
                self._replace(module, slot, tensor)
        if self._tie:
            sides = (
                (self._tie.embedding_side, self._tie.tensor),
                (
                    self._tie.head_side,
                    self._tie.head or self._tie.tensor,
                ),
            )
            for side, tied_tensor in sides:
                for item in side.all:
                    if isinstance(item, Replacement):
                        self._check_shape(tied_tensor, item.tensor)
        return new_tensors

    def _replace(self, module: str, slot: Slot, tensor: Tensor) -> None:
        """Record that ``tensor``, or its rows for ``slot``, replaces the base's tensor there.

        Raises Unsupported if the base has it only as a part of a tensor, or as `_rows_of_slot`;
        Corrupt as `_check_shape`.
        """
        if slot.own or slot.file.parts > 1:
            raise Unsupported(
                f"{tensor.name}: trained whole, and a part of {slot.tensor.name} in the base",
                hint="give a base as the version of transformers that trained it has it",
            )
        if not slot.file.is_whole:
            tensor = _rows_of_slot(tensor, slot)
        self._check_shape(slot.tensor, tensor)
        self._changes.setdefault(slot.tensor.name, []).append(Replacement(module, tensor))

    def _check_shape(self, base: Tensor, tensor: Tensor) -> None:
        """Record a resized vocabulary; raise Corrupt for another difference, or a second size."""
        if base.shape == tensor.shape and base.name not in self._shapes:
            return
        is_resized = ends_in(base.name, _VOCABULARY) and base.shape[1:] == tensor.shape[1:]
        if not is_resized or self._shapes.setdefault(base.name, tensor.shape) != tensor.shape:
            raise Corrupt(
                f"{tensor.name}: {tensor.shape}, and {base.name} of the base has {base.shape}",
                hint=self._hint,
            )

    def _add_classifier(self, new_tensors: Mapping[str, Tensor]) -> frozenset[str]:
        """Record a classifier that the base lacks; return the base's tensors that it replaces.

        Those are the output layer of a language model; none unless the class in ``config.json`` is
        changed.  If the task has no classifier, or any of ``new_tensors`` is no classifier's, all
        are recorded as unmatched.
        """
        task = str(self._own_config.get("task_type"))
        head_names = {*_OWN_HEADS, *rules.names(self._own_config, "modules_to_save")}
        classifier = {
            n: t for n, t in new_tensors.items() if any(f".{k}." in f".{n}" for k in head_names)
        }
        if task not in _CLASSIFIERS or len(classifier) < len(new_tensors):
            self._unmatched += [name.rpartition(".")[0] for name in new_tensors]
            return frozenset()
        if not classifier:
            return frozenset()
        self._added += [replace(t, name=name, tied=None) for name, t in classifier.items()]
        modules = sorted({name.rpartition(".")[0] for name in classifier})
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
        ends = tuple(f"{last}.weight" for last in _LABEL_LAYERS)
        for count in (t.shape[0] for n, t in classifier.items() if n.endswith(ends) and t.shape):
            self._settings["id2label"] = {str(n): f"LABEL_{n}" for n in range(count)}
            self._settings["label2id"] = {f"LABEL_{n}": n for n in range(count)}
        return frozenset(n for n in self._old if n.startswith(_LANGUAGE_HEADS))

    # What is added

    def _add_factors(self) -> None:
        """Record products of factors, and biases; modules that the base lacks as unmatched.

        Raises Corrupt if DoRA's magnitudes contradict the configuration; Incomplete, Corrupt or
        Unsupported where factors do not fit the base.
        """
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
        changes, missing_modules = plan_products(
            pairs, base, self._scales, self._config, self._own_config
        )
        self._unmatched += missing_modules
        for module, low_ranks in changes.items():
            side = sides.get(module)
            for name, change in low_ranks:
                (side.own if side else self._changes.setdefault(name, [])).append(change)
            self._add_bias(module)

    def _add_bias(self, module: str) -> None:
        """Record the bias of a module's second factor, if it has one.

        Raises Unsupported if the base has no bias there, Corrupt for another shape.
        """
        pair = self._parts.pairs[module]
        if not pair.bias or not pair.a:
            return
        slots = self._base.find(f"{module}.bias")
        if len(slots) != 1 or not slots[0].file.is_whole or slots[0].own:
            raise Unsupported(
                f"{pair.bias.name}: the base has no bias there, so none can be added to",
                hint="serve the adapter beside its base",
            )
        bias = slots[0].tensor
        self._check_shape(bias, pair.bias)
        scale = self._scales.scale(module, pair.a.shape[0])
        self._changes.setdefault(bias.name, []).append(BiasDelta(module, pair.bias, scale))

    def _add_tokens(self) -> None:
        """Record the rows of trained tokens; modules that the base lacks as unmatched.

        Raises Corrupt where rows contradict the configuration or the base's shape.
        """
        indices = self._own_config.get("trainable_token_indices")
        for module, tensor in self._parts.tokens.items():
            rows = indices
            if isinstance(indices, dict):
                rows = next(
                    (
                        token_ids
                        for key, token_ids in indices.items()
                        if f".{module}".endswith(f".{key}")
                    ),
                    next(iter(indices.values()), None) if len(indices) == 1 else None,
                )
            side = self._tie.side(self._base, f"{module}.weight") if self._tie else None
            slots = self._base.find(f"{module}.weight")
            if not slots and not (side and self._tie):
                self._unmatched.append(module)
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
            (side.own if side else self._changes.setdefault(name, [])).append(replaced)

    def _add_tied(self) -> None:
        """Record what becomes of tied embeddings, from all changes that both sides have."""
        if not self._tie:
            return
        outcome = self._tie.outcome(self._base, self._config, self._is_equal_pair)
        for name, changes in outcome.of.items():
            self._changes[name] = [*self._changes.get(name, ()), *changes]
            for change in changes:
                if isinstance(change, Replacement) and change.tensor.shape != self._old.get(name):
                    self._shapes |= {name: change.tensor.shape} if name in self._old else {}
        self._added += outcome.added
        self._settings |= outcome.settings
        self._notes += filter(None, (outcome.note,))

    def _is_equal_pair(self, first: Tensor, second: Tensor, is_crossed: bool) -> bool:  # noqa: FBT001 - IsEqual
        """Return whether two tensors of the adapter have the same values, as `IsEqual` says.

        Without a function that compares them, return whether their shapes fit and the adapter's
        configuration has ``ensure_weight_tying``.
        """
        if second.shape != (first.shape[::-1] if is_crossed else first.shape):
            return False
        if self._is_equal is None:
            return bool(self._own_config.get("ensure_weight_tying"))
        return self._is_equal(first, second, is_crossed)

    # What is checked at the end

    def _check_dtypes(self) -> None:
        """Raise Unsupported if a changed tensor, or one of its changes, has no castable dtype."""
        for name, changes in self._changes.items():
            tensor = self._base.tensors.get(name)
            if tensor and not is_castable(tensor.dtype):
                raise Unsupported(
                    f"{name}: {tensor.dtype} in the base, which cannot be added to",
                    hint=_UNQUANTISED,
                )
            if integer := next((t for t in _tensors(changes) if not is_castable(t.dtype)), None):
                raise Unsupported(
                    f"{integer.name}: {integer.dtype}, a floating type is expected",
                    hint="save the adapter again, in bf16 or fp32",
                )

    def _warnings(self) -> Iterable[str]:
        """Yield a warning if layers of the base lack adapters that their siblings have.

        Nothing unless ``target_modules`` is a list, without exceptions or chosen layers.
        """
        config, pairs = self._own_config, self._parts.pairs
        if not isinstance(config.get("target_modules"), list) or any(
            config.get(key) is not None for key in ("exclude_modules", "layers_to_transform")
        ):
            return
        kinds = {_NUMBER.sub("#", module) for module in pairs if _NUMBER.search(module)}
        modules = (name.removesuffix(".weight") for name in self._base.live_names())
        if missing_modules := sorted(
            m for m in modules if m not in pairs and _NUMBER.sub("#", m) in kinds
        ):
            yield (
                "the adapter may be incomplete: other layers are adapted, and not"
                f" {first_names(missing_modules)}"
            )

    def _set_vocabulary(self) -> None:
        """Record a new ``vocab_size`` and a note, if a shape has changed.

        Raises Corrupt if an embedding or a head with the old size stays, or new sizes differ.
        """
        if not self._shapes:
            return
        new_counts = {shape[0] for shape in self._shapes.values()}
        old_counts = {self._old[name][0] for name in self._shapes}
        starts = {(count,) for count in old_counts}
        words = (n for n in self._old if ends_in(n, (*EMBEDDINGS, *HEADS)))
        unresized = sorted(n for n in words if self._old[n][:1] in starts and n not in self._shapes)
        if len(new_counts) > 1 or unresized:
            raise Corrupt(
                f"a vocabulary of {', '.join(map(str, sorted(new_counts)))} tokens in"
                f" {first_names(sorted(self._shapes))}, and of"
                f" {', '.join(map(str, sorted(old_counts)))}"
                f" in {first_names(unresized) or 'the base'}",
                hint="save the adapter with save_embedding_layers=True",
            )
        (count,) = new_counts
        if "vocab_size" in self._config:
            self._settings["vocab_size"] = count
        for key, section in self._config.items():
            if isinstance(section, dict) and section.get("vocab_size") in old_counts:
                self._settings[key] = {**self._settings.get(key, {}), "vocab_size": count}
        self._notes.append(
            f"the vocabulary has {count} tokens,"
            f" {', '.join(map(str, sorted(old_counts)))} in the base"
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


def _rows_of_slot(tensor: Tensor, slot: Slot) -> Tensor:
    """Return the rows of ``tensor`` that the base's tensor in ``slot`` holds, such as one expert's.

    Returns ``tensor`` itself if the shapes do not fit, which the caller reports.  Raises
    Unsupported if ``tensor`` is not stored in one piece.
    """
    shape, place = slot.tensor.shape, slot.file
    lead = 0 if place.expert is None else 1
    count, rows = prod(shape), tensor.shape[lead] // place.pieces if len(tensor.shape) > lead else 0
    first_element = (place.expert or 0) * prod(tensor.shape[1:]) if lead else 0
    first_element += place.piece * rows * prod(tensor.shape[lead + 1 :])
    copies = []
    for copy in tensor.copies:
        part = copy.parts[0] if len(copy.parts) == 1 else None
        if part is None or part.sizes != copy.grid or part.strides is not None:
            raise Unsupported(
                f"{tensor.name}: stored in {len(copy.parts)} parts, and the base has it in pieces",
                hint="merge the adapter's shards first, and sum what that writes",
            )
        size = ITEMSIZE[copy.dtype]
        extent = Extent(part.extent.file, part.extent.start + first_element * size, count * size)
        copies.append(Copy(copy.dtype, shape, (Part((0,) * len(shape), shape, extent),)))
    if tensor.shape[lead + 1 :] != shape[1:] or rows != shape[0]:
        return tensor  # of another shape: that is said
    return replace(tensor, shape=shape, copies=tuple(copies))
