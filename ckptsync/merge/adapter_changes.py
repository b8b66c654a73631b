"""What a LoRA adapter changes in its base model, tensor by tensor.  Pure.

Follows peft 0.21.2 (``tuners/lora/layer.py``, ``utils/save_and_load.py``, ``utils/other.py``): only
names, shapes and configuration are read here; whoever sums looks at values.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from ckptsync.errors import Corrupt, Incomplete, Unsupported
from ckptsync.formats.dtypes import ITEMSIZE, is_castable
from ckptsync.merge import adapter_config as rules
from ckptsync.merge.adapter_config import Scales
from ckptsync.merge.adapter_factors import OTHER_MODEL, sums
from ckptsync.merge.adapter_names import Base, Parts, Slot, split
from ckptsync.merge.completeness import listed
from ckptsync.merge.low_rank import BiasDelta, Change, Changes, IsEqual, LowRank, Replacement, Rows
from ckptsync.merge.tensor_names import EMBEDDINGS, HEADS, is_tied
from ckptsync.tensors import Copy, Extent, Part, Shape, Tensor

_QUANTISED = re.compile(
    r".*(\.(absmax|qweight|qzeros|SCB|nested_absmax)|\.quant_state\..+|_scale_inv|_proj_blocks)"
)
_VOCABULARY = (*EMBEDDINGS, *HEADS, "lm_head.bias", "predictions.bias")
_WITH_HEAD = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_CLASSIFIERS = {
    "SEQ_CLS": "ForSequenceClassification",
    "TOKEN_CLS": "ForTokenClassification",
    "QUESTION_ANS": "ForQuestionAnswering",
}
_UNQUANTISED = "give the unquantised model that it was made from, or a dequantised copy"
_INPUT = "embed_tokens"  # what peft calls the input embedding where a configuration lists tokens


def changes(
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
    plan = _Plan(base, config, split(adapter), adapter_config, is_equal)
    return plan.result()


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


@dataclass(slots=True)
class _Side:
    """The changes of an embedding, or of a head: of its base layer, and what was trained."""

    base: list[Change] = field(default_factory=list)
    own: list[Change] = field(default_factory=list)

    @property
    def is_replaced(self) -> bool:
        return any(isinstance(c, Replacement) for c in self.own)

    @property
    def all(self) -> tuple[Change, ...]:
        return (*self.base, *self.own)


class _Plan:
    """One sum: what was found so far, and what is wrong with it."""

    def __init__(
        self,
        base: Sequence[Tensor],
        config: Mapping[str, Any],
        parts: Parts,
        adapter_config: Mapping[str, Any],
        is_equal: IsEqual | None,
    ) -> None:
        self.config, self.parts, self.adapter_config = config, parts, adapter_config
        self.is_equal = is_equal
        self.scales = Scales.of(adapter_config)
        self.names = {t.name for t in base}
        self.base = Base(base, config)
        self.old_shapes = {t.name: t.shape for t in base}
        self.of: dict[str, list[Change]] = {}
        self.added: list[Tensor] = []
        self.shapes: dict[str, Shape] = {}
        self.settings: dict[str, Any] = {}
        self.removed: set[str] = set()
        self.lost: list[str] = []
        self.warnings: list[str] = []
        self.notes = list(rules.notes(adapter_config))
        self.trained_on = adapter_config.get("base_model_name_or_path")
        self.embedding, self.head = self._tied()
        self.head_name = ""  # of a tied head that the base's files do not have
        self.sides = {"embedding": _Side(), "head": _Side()}

    def result(self) -> Changes:
        """Return everything; raises Unsupported, Incomplete or Corrupt."""
        self._add_replacements()
        if self.shapes:  # the factors are of the new vocabulary
            resized = [
                replace(t, shape=self.shapes.get(t.name, t.shape))
                for t in self.base.tensors.values()
            ]
            self.base = Base(resized, self.config)
        modules = self._add_factors()
        self._add_tokens()
        if self.lost:
            count = len(self.parts.pairs) + len(self.parts.plain) + len(self.parts.tokens)
            raise Corrupt(
                f"{len(self.lost)} of {count} modules of the adapter are not in the base:"
                f" {listed(sorted(self.lost))}",
                hint=self._other_model(),
            )
        self._add_tied()
        self._check_dtypes()
        self._check_targets()
        self._set_vocabulary()
        if not self.of:
            raise Corrupt(
                "the adapter has no tensor that changes the base",
                hint="give the adapter of a training, as save_pretrained writes it",
            )
        return Changes(
            {name: tuple(own) for name, own in self.of.items()},
            tuple(self.added),
            self.shapes,
            self.settings,
            tuple(self.notes),
            tuple(dict.fromkeys((*self.warnings, *self.scales.warnings))),
            frozenset(self.removed),
            modules,
        )

    # Tensors that the adapter has whole

    def _add_replacements(self) -> None:
        both = (
            *((n, t, True) for n, t in self.parts.base.items()),
            *((n, t, False) for n, t in self.parts.plain.items()),
        )
        for name, tensor, is_base in both:
            if not prod(tensor.shape):
                raise Incomplete(
                    f"{tensor.name}: empty, without values",
                    hint="ZeRO-3 leaves empty weights where it saves without gathering: merge"
                    " DeepSpeed's shards",
                )
            # peft saves the bias of a layer because it was trained, the weight because it may
            # have been resized
            own = is_base and not (name.endswith(".bias") and self._trains_biases())
            module = name.rpartition(".")[0]
            if side := self._side(name):
                change = Replacement(module, tensor, own)
                (side.base if own else side.own).append(change)
                self._check_shape(
                    self.embedding
                    if side is self.sides["embedding"]
                    else self.head or self.embedding,
                    tensor,
                )
                continue
            slots = self.base.find(name)
            if not slots:
                self._add_new(name, tensor)
            for slot in slots:
                self._replace(module, slot, tensor, is_base=own)

    def _replace(self, module: str, slot: Slot, tensor: Tensor, *, is_base: bool) -> None:
        if slot.own or slot.file.parts > 1:
            raise Unsupported(
                f"{tensor.name}: was trained whole, and is a part of {slot.tensor.name} in the base",
                hint="give a base as the version of transformers that trained it has it",
            )
        if not slot.file.is_whole:
            tensor = _piece(tensor, slot)
        self._check_shape(slot.tensor, tensor)
        self.of.setdefault(slot.tensor.name, []).append(Replacement(module, tensor, is_base))

    def _check_shape(self, own: Tensor | None, tensor: Tensor) -> None:
        """Record another number of rows of a vocabulary; raise Corrupt of every other difference."""
        if own is None or own.shape == tensor.shape:
            return
        if own.name.endswith(_VOCABULARY) and own.shape[1:] == tensor.shape[1:]:
            if self.shapes.setdefault(own.name, tensor.shape) == tensor.shape:
                return
        raise Corrupt(
            f"{tensor.name}: {tensor.shape}, and {own.name} of the base has {own.shape}",
            hint=self._other_model(),
        )

    def _add_new(self, name: str, tensor: Tensor) -> None:
        """Add a classifier that the base does not have; anything else matches nothing."""
        task = str(self.adapter_config.get("task_type"))
        saved = self.adapter_config.get("modules_to_save") or ()
        module = name.rpartition(".")[0]
        is_saved = any(
            isinstance(s, str) and f".{module}".endswith(f".{s}") for s in saved
        ) or f".{module}".endswith((".score", ".classifier", ".qa_outputs"))
        if task not in _CLASSIFIERS or not is_saved:
            self.lost.append(module)
            return
        self.added.append(replace(tensor, name=name, tied=None))
        self._set_classifier(task, tensor)

    def _set_classifier(self, task: str, tensor: Tensor) -> None:
        classes = self.config.get("architectures")
        own = classes[0] if isinstance(classes, list) and len(classes) == 1 else ""
        end = next((e for e in _WITH_HEAD if str(own).endswith(e)), "")
        if not end:
            self.warnings.append(
                f"{tensor.name}: the base has no such part, and config.json is as it was: set its"
                " architectures to the class that was trained"
            )
            return
        self.settings["architectures"] = [own.removesuffix(end) + _CLASSIFIERS[task]]
        if task != "QUESTION_ANS":
            count = tensor.shape[0]
            self.settings["id2label"] = {str(n): f"LABEL_{n}" for n in range(count)}
            self.settings["label2id"] = {f"LABEL_{n}": n for n in range(count)}
        self.removed |= {n for n in self.names if n in HEADS}
        self.notes.append(
            f"{tensor.name.rpartition('.')[0]}: the base has no such part: the model is written as"
            f" {self.settings['architectures'][0]}"
        )

    # What is added

    def _add_factors(self) -> int:
        ordinary = dict(self.parts.pairs)
        tied_head = None
        for module in list(ordinary):
            if self._side(f"{module}.weight") is self.sides["head"] and not self.head:
                tied_head = module
        magnitudes = [m for m, p in ordinary.items() if p.magnitude]
        uses_dora = bool(self.adapter_config.get("use_dora"))
        if bool(magnitudes) != uses_dora or len(magnitudes) not in (0, len(ordinary)):
            count = f"{len(magnitudes)} of {len(ordinary)} modules have DoRA's magnitudes"
            raise Corrupt(
                f"adapter_config.json: use_dora {str(uses_dora).lower()}, and {count}",
                hint="it is another adapter's configuration: give this one's directory",
            )
        if tied_head and self.embedding:
            # as if it were there: a linear layer over the embedding's own matrix
            name = f"{tied_head}.weight"
            shape = self.shapes.get(name) or self.shapes.get(self.embedding.name)
            own = replace(self.embedding, name=name, shape=shape or self.embedding.shape)
            base = Base((*self.base.tensors.values(), own), self.config)
        else:
            base = self.base
        found, lost = sums(ordinary, base, self.scales, self.config, self.adapter_config)
        self.lost += lost
        for module, own_sums in found.items():
            side = self._side(f"{module}.weight")
            for name, change in own_sums:
                if side:
                    side.own.append(change)
                else:
                    self.of.setdefault(name, []).append(change)
            self._add_bias(module)
        return len(ordinary) - len(lost)

    def _add_bias(self, module: str) -> None:
        pair = self.parts.pairs[module]
        if not pair.bias or not pair.a:
            return
        slots = self.base.find(f"{module}.bias")
        if len(slots) != 1 or not slots[0].file.is_whole or slots[0].own:
            raise Unsupported(
                f"{pair.bias.name}: the base has no bias of its own there, so none can be added to",
                hint="serve the adapter beside its base",
            )
        own = slots[0].tensor
        if own.shape != pair.bias.shape:
            self._check_shape(own, pair.bias)
        scale = self.scales.scale(module, pair.a.shape[0])
        self.of.setdefault(own.name, []).append(BiasDelta(module, pair.bias, scale))

    def _add_tokens(self) -> None:
        indices = self.adapter_config.get("trainable_token_indices")
        for module, tensor in self.parts.tokens.items():
            rows = indices
            if isinstance(indices, dict):
                rows = next(
                    (own for key, own in indices.items() if f".{module}".endswith(f".{key}")), None
                )
            name = f"{module}.weight"
            side = self._side(name)
            slots = self.base.find(name)
            if not slots and not side:
                self.lost.append(module)
                continue
            own = slots[0].tensor if slots else self.embedding
            assert own is not None
            count = own.shape[0]
            if (
                not isinstance(rows, list)
                or not all(type(row) is int and 0 <= row < count for row in rows)
                or len(set(rows)) != len(rows)
                or tensor.shape != (len(rows), *own.shape[1:])
            ):
                raise Corrupt(
                    f"{tensor.name}: {tensor.shape}, and trainable_token_indices and the base's"
                    f" {own.shape} say otherwise",
                    hint=self._other_model(),
                )
            change = Rows(module, tensor, tuple(rows))
            if side:
                side.own.append(change)
            else:
                self.of.setdefault(own.name, []).append(change)

    # Tied embeddings

    def _tied(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the embedding and the head that are tied; the head only if the files have it."""
        heads = [t for t in self.base.tensors.values() if _is_of(t.name, HEADS)]
        if not (is_tied(self.config) if self.config else not heads):
            return None, None
        embeddings = [t for t in self.base.tensors.values() if _is_of(t.name, EMBEDDINGS)]
        # positions and types are embeddings, too: the largest one is the vocabulary's
        words = [t for t in embeddings if len(t.shape) == 2]
        if heads:
            words = [t for t in words if t.shape == heads[0].shape]
        if not words or len(heads) > 1:
            return None, None
        first = max(words, key=lambda t: t.shape[0])
        return first, heads[0] if heads else None

    def _side(self, name: str) -> _Side | None:
        """Return the side of a tie that a weight is, None of all others."""
        if not self.embedding or not _is_of(name, (*HEADS, *EMBEDDINGS)):
            return None
        slots = self.base.find(name)
        if len(slots) == 1 and slots[0].file.is_whole:
            if slots[0].tensor.name == self.embedding.name:
                return self.sides["embedding"]
            if self.head and slots[0].tensor.name == self.head.name:
                return self.sides["head"]
            return None
        if not slots and not self.head and _is_of(name, HEADS):
            self.head_name = name
            return self.sides["head"]
        return None

    def _add_tied(self) -> None:
        """Add the changes of a tied embedding and head: once to both, or to each of them its own."""
        embedding, head = self.sides["embedding"], self.sides["head"]
        if not self.embedding or not (embedding.all or head.all):
            return
        if self._stays_tied(embedding, head):
            shared = embedding if embedding.own else head
            changes = (*(embedding.base or head.base)[:1], *shared.own)
            for name in filter(None, (self.embedding.name, self.head and self.head.name)):
                self.of[name] = [*self.of.get(name, ()), *changes]
                self._set_shape(name, changes)
            if any(isinstance(c, LowRank) for c in changes):
                self.notes.append(
                    f"{self.embedding.name} is the head, too: it is changed once, for both"
                )
            return
        self._untie(embedding, head)

    def _stays_tied(self, embedding: _Side, head: _Side) -> bool:
        if not embedding.own or not head.own:
            # of a low-rank sum both change, as in peft; a copy that was trained is another tensor
            return not (embedding.is_replaced or head.is_replaced) or (
                embedding.is_replaced and not self._has_head()
            )
        if [type(c) for c in embedding.own] != [type(c) for c in head.own]:
            return False
        return all(map(self._is_same, embedding.own, head.own))

    def _is_same(self, one: Change, other: Change) -> bool:
        if isinstance(one, Rows) and isinstance(other, Rows):
            return one.rows == other.rows and self._equal(one.tensor, other.tensor)
        if isinstance(one, Replacement) and isinstance(other, Replacement):
            return self._equal(one.tensor, other.tensor)
        if isinstance(one, LowRank) and isinstance(other, LowRank):
            if one.scale != other.scale or one.magnitude or other.magnitude:
                return False
            is_crossed = one.is_transposed != other.is_transposed
            first, second = (other.b, other.a) if is_crossed else (other.a, other.b)
            return self._equal(one.a.tensor, first.tensor, is_crossed=is_crossed) and self._equal(
                one.b.tensor, second.tensor, is_crossed=is_crossed
            )
        return False

    def _equal(self, one: Tensor, other: Tensor, *, is_crossed: bool = False) -> bool:
        if other.shape != (one.shape[::-1] if is_crossed else one.shape):
            return False
        if self.is_equal is None:
            return bool(self.adapter_config.get("ensure_weight_tying"))
        return self.is_equal(one, other, is_crossed)

    def _has_head(self) -> bool:
        classes = self.config.get("architectures")
        name = str(classes[0]) if isinstance(classes, list) and classes else ""
        return bool(self.head or self.head_name) or name.endswith(_WITH_HEAD)

    def _untie(self, embedding: _Side, head: _Side) -> None:
        """Let embedding and head differ, as they were trained."""
        first = self.embedding
        assert first is not None
        if embedding.all:
            self.of[first.name] = list(embedding.all)
            self._set_shape(first.name, embedding.all)
        name = self.head.name if self.head else _head_name(self.head_name, first.name)
        own = head.all
        if not self.head:
            if own and isinstance(own[-1], Replacement):  # all of it is the adapter's
                self.added.append(replace(own[-1].tensor, name=name, tied=None))
                own = ()
            else:
                self.added.append(replace(first, name=name, tied=None))
        if own:
            self.of[name] = list(own)
            self._set_shape(name, own)
        self.settings["tie_word_embeddings"] = False
        for key, section in self.config.items():
            if isinstance(section, dict) and "tie_word_embeddings" in section:
                self.settings.setdefault(key, {})["tie_word_embeddings"] = False
        self.notes.append(
            f"{first.name} and {name} were tied, and are not after this training:"
            " config.json says so"
        )

    def _set_shape(self, name: str, own: Sequence[Change]) -> None:
        for change in own:
            if isinstance(change, Replacement) and name in self.names:
                if change.tensor.shape != self.base.tensors[name].shape or name in self.shapes:
                    self.shapes[name] = change.tensor.shape

    # What is checked at the end

    def _trains_biases(self) -> bool:
        return self.adapter_config.get("bias", "none") != "none"

    def _check_dtypes(self) -> None:
        for name in self.of:
            own = self.base.tensors.get(name)
            if own and not is_castable(own.dtype):
                raise Unsupported(
                    f"{name}: {own.dtype} in the base, which cannot be added to", hint=_UNQUANTISED
                )
        changed = [c for own in self.of.values() for c in own]
        tensors = [t for c in changed for t in _tensors(c)]
        if odd := next((t for t in tensors if not is_castable(t.dtype)), None):
            raise Unsupported(f"{odd.name}: {odd.dtype}, a floating type is expected")

    def _check_targets(self) -> None:
        """Warn of modules that the configuration targets, and the adapter does not have."""
        targets = self.adapter_config.get("target_modules")
        if not isinstance(targets, list) or self.adapter_config.get("layers_to_transform"):
            return
        if self.adapter_config.get("exclude_modules"):
            return
        ends = {m.rpartition(".")[2] for m in self.parts.pairs}
        if absent := sorted(
            t for t in targets if isinstance(t, str) and t.rpartition(".")[2] not in ends
        ):
            if not self.parts.pairs or not self.adapter_config.get("target_parameters"):
                self.warnings.append(
                    f"adapter_config.json: target_modules has {listed(absent)}, and the adapter has"
                    " no tensor of it"
                )

    def _set_vocabulary(self) -> None:
        """Set ``vocab_size``, and refuse a vocabulary of which only one side was resized."""
        rows = {shape[0] for name, shape in self.shapes.items()}
        if not rows:
            return
        words = {
            n: self.shapes.get(n, t.shape)[0]
            for n, t in self.base.tensors.items()
            if _is_of(n, (*EMBEDDINGS, *HEADS)) and n in self.names
        }
        old = {t for t in self._old_rows()}
        left = sorted(n for n, count in words.items() if count in old and n not in self.shapes)
        if len(rows) > 1 or left:
            raise Corrupt(
                f"a vocabulary of {', '.join(map(str, sorted(rows)))} tokens in"
                f" {listed(sorted(self.shapes))}, and of {', '.join(map(str, sorted(old)))} in"
                f" {listed(left) or 'the base'}",
                hint="save the adapter with save_embedding_layers=True",
            )
        (count,) = rows
        if self.config.get("vocab_size") in old or "vocab_size" in self.config:
            self.settings["vocab_size"] = count
        for key, section in self.config.items():
            if isinstance(section, dict) and section.get("vocab_size") in old:
                self.settings.setdefault(key, {})["vocab_size"] = count
        self.notes.append(
            f"the vocabulary has {count} tokens, {listed(sorted(map(str, old)))} before"
        )

    def _old_rows(self) -> set[int]:
        return {self.old_shapes[n][0] for n in self.shapes if n in self.old_shapes}

    def _other_model(self) -> str:
        name = self.trained_on
        return f"{OTHER_MODEL}: {name}" if isinstance(name, str) and name else OTHER_MODEL


def _tensors(change: Change) -> tuple[Tensor, ...]:
    if isinstance(change, LowRank):
        return (change.a.tensor, change.b.tensor, *filter(None, (change.magnitude,)))
    return (change.tensor,)


def _is_of(name: str, ends: Collection[str]) -> bool:
    return any(name == end or name.endswith(f".{end}") for end in ends)


def _head_name(live: str, embedding: str) -> str:
    """Return the name in the base's files of a head that they do not have."""
    start = (
        embedding.partition("model.")[0] if embedding.startswith("language_model.model.") else ""
    )
    start = "language_model." if embedding.startswith("language_model.model.") else ""
    return f"{start}{live or 'lm_head.weight'}"


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
