"""What looks wrong in the weights of a model, alone and beside the models before it.  Pure.

Digests tell what has changed, and the counted values how.  Each rule is one that healthy trainings
do not break (docs/head.md has all of them): so a finding is worth a look at the training.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import hypot, inf, log, sqrt

from ckptsync.records.layer_groups import LAYER_GROUPS, LayerGroup, layer_group
from ckptsync.records.model_record import ModelTensor
from ckptsync.records.weights_record import (
    MOST_NAMES,
    TensorValues,
    WeightsFinding,
    WeightsRecord,
    elements,
    first_values,
    holds_nonfinite,
    nonfinite_finding,
)

EARLIER = 3
"""Models of a run that one is compared with: the last one, and what was usual before it."""
NORM_JUMP = 2.0
_TIMES_USUAL = 4.0  # that a norm moves more than it did before
_AT_FIRST = 5.0  # times the factor, where nothing says what is usual
_SHARE = 0.01  # of a model, by squared norm or by elements, that is worth a word
_FINE = frozenset({"F32", "F64"})  # types in which each step of an optimizer shows
_MANY = 1 << 22  # elements of which some change in any type, also at the end of a decay
_EXPERT = re.compile(r"\bexperts\.\d+\b")
_FACTOR_B = re.compile(r"\blora_(embedding_)?B\b")


@dataclass(frozen=True, slots=True)
class CountedTensor:
    """A tensor's digest, and what was counted of it; ``values``: None where nothing was.

    ``size``: its elements; ``is_matrix``: several axes are longer than 1.
    """

    dtype: str
    digest: str
    size: int
    is_matrix: bool
    values: TensorValues | None

    @property
    def norm(self) -> float:
        """L2; 0 if it has none, also of a record with a number that is no norm."""
        return max(0.0, (self.values[5] if self.values else None) or 0.0)

    @property
    def is_zero(self) -> bool:
        """Whether all of several values of a floating type are zero."""
        values = self.values
        return values is not None and values[5] is not None and values[2] == self.size > 1


@dataclass(frozen=True, slots=True)
class CountedModel:
    """A model's tensors by name; ``step``: infinite of what a training leaves at its end."""

    location: str
    step: float
    tensors: Mapping[str, CountedTensor]


def counted_model(
    location: str,
    step: float,
    tensors: Sequence[ModelTensor],
    records: Iterable[WeightsRecord],
) -> CountedModel | None:
    """Return a model with what the first of its records counted; None if none did."""
    values = first_values(tensors, records)
    return None if values is None else with_values(location, step, tensors, values)


def with_values(
    location: str,
    step: float,
    tensors: Sequence[ModelTensor],
    values: Sequence[TensorValues | None],
) -> CountedModel:
    """Return a model with the values of its tensors, in their order."""
    counted = {
        t.name: CountedTensor(
            t.dtype, t.digest, elements(t), sum(length > 1 for length in t.shape) > 1, its
        )
        for t, its in zip(tensors, values, strict=True)
    }
    return CountedModel(location, step, counted)


def find_weights(
    own: CountedModel,
    earlier: Sequence[CountedModel],
    first: Callable[[], CountedModel | None],
    norm_jump: float = NORM_JUMP,
) -> tuple[WeightsFinding, ...]:
    """Return what looks wrong in a model.

    ``earlier``: at most `EARLIER` models before it in its run, the last one first.  ``first``
    returns the run's first model, if that is another one; it is called where it matters.
    ``norm_jump``: by which factor a norm must change to be a finding; 0 for never.
    """
    found = [*_nonfinite(own, first), *_without_effect(own)]
    if earlier:
        last = earlier[0]
        if own.step < inf and _digests(own) == _digests(last):
            text = (
                f"its weights are bit-identical to those of {last.location}: the same state was"
                " saved twice, or no step between changed them, as with a learning rate near 0"
            )
            return (*found, WeightsFinding("same", text))
        found += [*_unchanged(own, earlier), *_emptied(own, last)]
        found += _jumps(own, earlier, norm_jump) if norm_jump else ()
    return tuple(found)


def _digests(model: CountedModel) -> dict[str, str]:
    return {name: tensor.digest for name, tensor in model.tensors.items()}


def _nonfinite(
    own: CountedModel, first: Callable[[], CountedModel | None]
) -> Iterator[WeightsFinding]:
    """Yield NaN and infinity that is not there on purpose.

    A buffer may hold infinity from the run's first model on, without NaN, and never change.
    """
    odd = [n for n, t in own.tensors.items() if t.values and holds_nonfinite(n, t.values)]
    if any(not its[0] for n in odd if (its := own.tensors[n].values)) and (start := first()):
        odd = [n for n in odd if not _is_constant(own.tensors[n], start.tensors.get(n))]
    if odd:
        yield nonfinite_finding(odd)


def _is_constant(tensor: CountedTensor, at_first: CountedTensor | None) -> bool:
    """Whether a tensor without NaN is what it was in the run's first model."""
    has_nan = tensor.values is not None and tensor.values[0] > 0
    return not has_nan and at_first is not None and at_first.digest == tensor.digest


def _without_effect(own: CountedModel) -> Iterator[WeightsFinding]:
    """Yield that each pair of LoRA's factors has one that is zero, after the first step."""
    pairs = [
        (tensor, own.tensors.get(_FACTOR_B.sub(r"lora_\1A", name)))
        for name, tensor in own.tensors.items()
        if _FACTOR_B.search(name) and not name.endswith(".bias")
    ]
    if own.step > 1 and pairs and all(b.is_zero or (a and a.is_zero) for b, a in pairs):
        text = f"the adapter changes nothing: B A is zero in all of its {len(pairs)} modules"
        yield WeightsFinding("lora", text, len(pairs))


def _unchanged(own: CountedModel, earlier: Sequence[CountedModel]) -> Iterator[WeightsFinding]:
    """Yield tensors that stay as they were, and changed from each model to the next before.

    In types of few digits a small tensor may stay through small steps, and an end is no step.  An
    expert may stay that no token came to, if others of its layer change.
    """
    if len(earlier) < EARLIER or own.step == inf:
        return
    moving = {
        name: tensor
        for name, tensor in own.tensors.items()
        if (tensor.dtype in _FINE or tensor.size >= _MANY) and _is_moving(name, earlier)
    }
    same = [n for n, t in moving.items() if t.digest == earlier[0].tensors[n].digest]
    before = _digests(earlier[0])
    changed = {_of_layer(n) for n, t in own.tensors.items() if t.digest != before.get(n)}
    still = [name for name in same if _of_layer(name) not in changed]
    size = sum(moving[name].size for name in still)
    if still and size >= _SHARE * sum(t.size for t in moving.values()):
        counts = Counter[LayerGroup](map(layer_group, still))
        groups = ", ".join(group for group in LAYER_GROUPS if group in counts)
        text = (
            f"{_tensors(still)} bit-identical to those of {earlier[0].location} ({groups}), and"
            " changed from save to save before"
        )
        yield WeightsFinding("unchanged", text, len(still), tuple(still[:MOST_NAMES]))


def _of_layer(name: str) -> str:
    """Return a tensor's name, of an expert's one for all experts of its layer."""
    return _EXPERT.sub("experts", name)


def _is_moving(name: str, earlier: Sequence[CountedModel]) -> bool:
    """Whether a tensor of a floating type, without NaN, changed from each model to the next."""
    its = [model.tensors.get(name) for model in earlier]
    digests = [tensor.digest if tensor else "" for tensor in its]
    are_numbers = all(t and t.values and t.values[5] is not None and not t.values[0] for t in its)
    return are_numbers and all(a != b for a, b in pairwise(digests))


def _emptied(own: CountedModel, last: CountedModel) -> Iterator[WeightsFinding]:
    """Yield tensors that are all zero, or have no elements, and had other values."""
    both = [(n, t, last.tensors[n]) for n, t in own.tensors.items() if n in last.tensors]
    zero = [n for n, t, before in both if t.is_zero and before.values and not before.is_zero]
    empty = [n for n, t, before in both if t.size == 0 < before.size]
    for names, what in ((zero, "all zero"), (empty, "empty, without values")):
        if names:
            text = f"{_tensors(names)} {what}, and had other values in {last.location}"
            yield WeightsFinding("zero", text, len(names), tuple(names[:MOST_NAMES]))


def _jumps(
    own: CountedModel, earlier: Sequence[CountedModel], factor: float
) -> Iterator[WeightsFinding]:
    """Yield tensors whose norm moved by more than a factor, and by far more than is usual for them.

    A bias may be next to nothing, and grow by any factor: only matrices count, and what has a part
    in the model's norm.
    """
    least = sqrt(_SHARE) * hypot(*(tensor.norm for tensor in own.tensors.values()))
    moves: dict[str, float] = {}
    for name, tensor in own.tensors.items():
        if not (tensor.is_matrix or tensor.norm >= least):
            continue
        its = [(m.step, m.tensors[name].norm) for m in (own, *earlier) if name in m.tensors]
        if len(its) > 1 and all(norm for _, norm in its):
            move = abs(log(its[0][1]) - log(its[1][1]))
            if move > _usual_move(name, its, factor):
                moves[name] = move
    if moves:
        names = sorted(moves, key=lambda name: -moves[name])
        before, after = earlier[0].tensors[names[0]].norm, own.tensors[names[0]].norm
        whose = "the norm of 1 tensor" if len(names) == 1 else f"the norms of {len(names)} tensors"
        text = (
            f"{whose} jumped since {earlier[0].location}, that of {names[0]} from {before:.4g} to"
            f" {after:.4g}"
        )
        yield WeightsFinding("jump", text, len(names), tuple(names[:MOST_NAMES]))


def _usual_move(name: str, its: Sequence[tuple[float, float]], factor: float) -> float:
    """Return how far the logarithm of a tensor's norm may move to the first of these norms.

    ``its``: steps and norms, the last first.  What grows from zero, as LoRA's B does, or is saved
    more rarely now, moves further.
    """
    steps = its[0][0] - its[1][0]
    usual = [
        abs(log(norm) - log(older)) * (max(1.0, steps / (step - before)) if before < step else 1.0)
        for (step, norm), (before, older) in pairwise(its[1:])
        if step < inf
    ]
    if not usual:
        return inf if layer_group(name) == "lora_b" else log(factor * _AT_FIRST)
    return max(log(factor), _TIMES_USUAL * max(usual))


def _tensors(names: Sequence[str]) -> str:
    return "1 tensor is" if len(names) == 1 else f"{len(names)} tensors are"
