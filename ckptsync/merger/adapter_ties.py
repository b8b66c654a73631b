"""Decide what a LoRA adapter changes in an embedding and a head that are one tensor.  Pure.

In training, an adapter may change such a tensor once for both, or each for itself, and a sum must
give the model that was trained.  If both sides have the same changes, the tensor is changed once;
if they were trained apart, the two are untied.  peft 0.21 adds both changes to the one tensor
instead, also where they are the same change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ckptsync.merger.adapter_names import Base
from ckptsync.merger.change_types import Change, IsEqual, LowRank, Replacement, Rows
from ckptsync.merger.tensor_names import EMBEDDINGS, HEADS, ends_in, is_tied, tied_pairs
from ckptsync.tensors import Tensor

WITH_HEAD = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


@dataclass(slots=True)
class TiedLayer:
    """The changes of an embedding, or of a head: of its base layer, and what was trained."""

    base: list[Change] = field(default_factory=list)
    own: list[Change] = field(default_factory=list)

    @property
    def all(self) -> tuple[Change, ...]:
        """All of them, in order of application."""
        return (*self.base, *self.own)

    @property
    def is_replaced(self) -> bool:
        """Whether a copy of the tensor was trained, beside the tied one."""
        return any(isinstance(change, Replacement) for change in self.own)


@dataclass(slots=True)
class Outcome:
    """What becomes of the two: their changes, a head of its own, settings of ``config.json``."""

    of: dict[str, tuple[Change, ...]] = field(default_factory=dict)
    added: tuple[Tensor, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    note: str = ""


class Tie:
    """An embedding that is the head, too; ``tensor`` holds both.

    ``head``: the head's own tensor, where the base's files have the bytes twice.
    """

    def __init__(self, tensor: Tensor, head: Tensor | None) -> None:
        self.tensor, self.head = tensor, head
        self.embedding_side, self.head_side = TiedLayer(), TiedLayer()
        self._head_name = ""  # as the adapter has it

    @classmethod
    def of(cls, base: Base, config: Mapping[str, Any]) -> Tie | None:
        """Return the tie of a base; None if it is untied, or has several heads or no embedding.

        An empty ``config`` ties a base that has no head, and no other.
        """
        heads = [t for t in base.tensors.values() if ends_in(t.name, HEADS)]
        if not (is_tied(config) if config else not heads) or len(heads) > 1:
            return None
        embeddings = [
            t
            for t in base.tensors.values()
            if ends_in(t.name, EMBEDDINGS)
            and len(t.shape) == 2
            and (not heads or t.shape == heads[0].shape)
        ]
        # those of positions and types have the same names, and fewer rows
        first = max(embeddings, key=lambda t: t.shape[0], default=None)
        return cls(first, heads[0] if heads else None) if first else None

    def side(self, base: Base, name: str) -> TiedLayer | None:
        """Return the layer, embedding or head, that an adapter's weight changes; None for others.

        Others have another name, or are not exactly one whole tensor of the base. If the base's
        files have no tensor of the head, ``name`` is recorded as the head's name.
        """
        if not ends_in(name, (*HEADS, *EMBEDDINGS)):
            return None
        slots = base.find(name)
        if not slots and not self.head and ends_in(name, HEADS):
            self._head_name = name
            return self.head_side
        if len(slots) == 1 and slots[0].file.is_whole:
            if slots[0].tensor.name == self.tensor.name:
                return self.embedding_side
            if self.head and slots[0].tensor.name == self.head.name:
                return self.head_side
        return None

    def outcome(self, base: Base, config: Mapping[str, Any], equal: IsEqual) -> Outcome:
        """Return what becomes of the two: nothing, one change for both, or two tensors.

        ``equal``: compares two tensors of the adapter, see `IsEqual`.
        """
        first, second = self.embedding_side, self.head_side
        if not (first.all or second.all):
            return Outcome()
        if not self._stays_tied(config, equal):
            return self._untie(config)
        changes = (*(first.base or second.base)[:1], *(first.own or second.own))
        names = [self.tensor.name, *((self.head.name,) if self.head else ())]
        names += [
            n
            for n, tied_name in tied_pairs(base.tensors)
            if tied_name == self.tensor.name and n not in names
        ]
        is_sum = any(isinstance(change, LowRank) for change in changes)
        note = f"{self.tensor.name} is the head, too: it is changed once, for both"
        if not (first.own and second.own):
            trained = "embedding" if first.own else "head"
            note += f", as in peft; in the training only the {trained} had the change"
        return Outcome(dict.fromkeys(names, changes), note=note if is_sum else "")

    def _stays_tied(self, config: Mapping[str, Any], equal: IsEqual) -> bool:
        """Return whether embedding and head stay one tensor after their changes.

        If both were trained: whether all their changes are the same.  Else: whether no copy of the
        head, nor of an embedding beside a head, was trained.
        """
        first, second = self.embedding_side, self.head_side
        if first.own and second.own:
            return len(first.own) == len(second.own) and all(
                _is_same(embedding_change, head_change, equal)
                for embedding_change, head_change in zip(first.own, second.own, strict=True)
            )
        # of a sum both change, as in peft; a copy that was trained is a tensor of its own
        return not second.is_replaced and not (first.is_replaced and self._has_head(config))

    def _has_head(self, config: Mapping[str, Any]) -> bool:
        """Return whether the model has a head, by its tensors or its class."""
        classes = config.get("architectures")
        name = str(classes[0]) if isinstance(classes, list) and classes else ""
        return bool(self.head or self._head_name) or name.endswith(WITH_HEAD)

    def _untie(self, config: Mapping[str, Any]) -> Outcome:
        """Return the outcome of sides that were trained apart: a head of its own, and settings."""
        name = self.head.name if self.head else self._head_name or HEADS[0]
        head_changes = self.head_side.all
        new_tensors: tuple[Tensor, ...] = ()
        changes = {self.tensor.name: self.embedding_side.all} if self.embedding_side.all else {}
        if not self.head:
            last = head_changes[-1] if head_changes else None
            if isinstance(last, Replacement):  # all of it is the adapter's
                whole, head_changes = last.tensor, ()
            else:
                whole = self.tensor
            new_tensors = (replace(whole, name=name, tied=None),)
        if head_changes:
            changes[name] = head_changes
        settings: dict[str, Any] = {"tie_word_embeddings": False}
        for key, section in config.items():
            if isinstance(section, dict) and "tie_word_embeddings" in section:
                settings[key] = {"tie_word_embeddings": False}
        note = (
            f"{self.tensor.name} and {name} were tied, and were trained apart: config.json says so"
        )
        return Outcome(changes, new_tensors, settings, note)


def _is_same(first: Change, second: Change, equal: IsEqual) -> bool:
    """Return whether two changes are the same, though one may be stored transposed.

    False for changes of different classes, and for low-rank ones with a magnitude.
    """
    if isinstance(first, Rows) and isinstance(second, Rows):
        return first.rows == second.rows and equal(first.tensor, second.tensor, False)  # noqa: FBT003
    if isinstance(first, Replacement) and isinstance(second, Replacement):
        return equal(first.tensor, second.tensor, False)  # noqa: FBT003
    if isinstance(first, LowRank) and isinstance(second, LowRank):
        if first.scale != second.scale or first.magnitude or second.magnitude:
            return False
        # an embedding's, and a linear head's
        is_crossed = first.is_transposed != second.is_transposed
        a, b = (second.b, second.a) if is_crossed else (second.a, second.b)
        return equal(first.a.tensor, a.tensor, is_crossed) and equal(
            first.b.tensor, b.tensor, is_crossed
        )
    return False
