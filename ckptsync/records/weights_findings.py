"""What looks wrong in the weights of a model, by itself and compared with the models before it.

A training can go wrong without an error: weights that are NaN, that no longer change, or that jump.
A merge counts the values of each tensor and digests it, so digests tell what has changed and the
counts how. Each rule is one that healthy trainings do not break (docs/head.md lists them), so a
finding is worth a look at the training. Pure.
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
"""How many earlier models of its run a model is compared with.

The last one shows what has changed; those before it show which changes are usual."""
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
    """A tensor's digest, and what a merge counted of its values; None if nothing was counted.

    ``size``: its elements; ``is_matrix``: two or more axes are longer than 1.
    """

    dtype: str
    digest: str
    size: int
    is_matrix: bool
    values: TensorValues | None

    @property
    def norm(self) -> float:
        """Return the L2 norm; 0 if there is none, or if the record's number is negative."""
        return max(0.0, (self.values[5] if self.values else None) or 0.0)

    @property
    def is_zero(self) -> bool:
        """Return whether the tensor has over one value, of a floating type, and all are zero."""
        values = self.values
        return values is not None and values[5] is not None and values[2] == self.size > 1


@dataclass(frozen=True, slots=True)
class CountedModel:
    """A model's tensors by name.

    ``step`` is infinite for the model that a training leaves at its end.
    """

    location: str
    step: float
    tensors: Mapping[str, CountedTensor]


def counted_model(
    location: str,
    step: float,
    tensors: Sequence[ModelTensor],
    records: Iterable[WeightsRecord],
) -> CountedModel | None:
    """Return a model with the values of the first of its records that has any; None if none has."""
    values = first_values(tensors, records)
    return None if values is None else with_values(location, step, tensors, values)


def with_values(
    location: str,
    step: float,
    tensors: Sequence[ModelTensor],
    values: Sequence[TensorValues | None],
) -> CountedModel:
    """Return a model with ``values``, which are in the order of ``tensors``."""
    counted = {
        t.name: CountedTensor(
            t.dtype, t.digest, elements(t), sum(length > 1 for length in t.shape) > 1, tensor_values
        )
        for t, tensor_values in zip(tensors, values, strict=True)
    }
    return CountedModel(location, step, counted)


def find_weights(
    own: CountedModel,
    earlier: Sequence[CountedModel],
    read_first: Callable[[], CountedModel | None],
    norm_jump: float = NORM_JUMP,
) -> tuple[WeightsFinding, ...]:
    """Return what looks wrong in a model; () if nothing.

    If its weights equal the last model's, and it is not the model at the end, it is not compared
    further: the findings are those about the model alone, then `same`.

    ``earlier``: at most `EARLIER` models before it in its run, the last one first; empty to look at
    the model alone. ``read_first`` returns the run's first model, or None if ``own`` is it; it may
    read the store, and is called only if a tensor holds infinity without NaN. ``norm_jump``: the
    factor by which a norm must change at least to be a finding; 0 for never.
    """
    findings = [*_find_nonfinite(own, read_first), *_find_idle_adapter(own)]
    if earlier:
        last = earlier[0]
        if own.step < inf and _digests(own) == _digests(last):
            text = (
                f"its weights are bit-identical to those of {last.location}: the same state was"
                " saved twice, or no step between changed them, as with a learning rate near 0"
            )
            return (*findings, WeightsFinding("same", text))
        findings += [*_find_unchanged(own, earlier), *_find_emptied(own, last)]
        findings += _find_jumps(own, earlier, norm_jump) if norm_jump else ()
    return tuple(findings)


def _digests(model: CountedModel) -> dict[str, str]:
    """Return the digest of each tensor, by its name."""
    return {name: tensor.digest for name, tensor in model.tensors.items()}


def _find_nonfinite(
    own: CountedModel, read_first: Callable[[], CountedModel | None]
) -> Iterator[WeightsFinding]:
    """Yield at most one finding for all tensors with NaN or infinity that may be unwanted.

    Masks, and a tensor without NaN that has not changed since the run's first model, are not named:
    a buffer may hold infinity on purpose. ``read_first`` is called only if there may be such a
    tensor.
    """
    nonfinite = [n for n, t in own.tensors.items() if t.values and holds_nonfinite(n, t.values)]
    if any(not values[0] for n in nonfinite if (values := own.tensors[n].values)) and (
        first_model := read_first()
    ):
        nonfinite = [
            n for n in nonfinite if not _is_constant(own.tensors[n], first_model.tensors.get(n))
        ]
    if nonfinite:
        yield nonfinite_finding(nonfinite)


def _is_constant(tensor: CountedTensor, first_tensor: CountedTensor | None) -> bool:
    """Return whether a tensor has no NaN, and the digest that it had in the run's first model."""
    has_nan = tensor.values is not None and tensor.values[0] > 0
    return not has_nan and first_tensor is not None and first_tensor.digest == tensor.digest


def _find_idle_adapter(own: CountedModel) -> Iterator[WeightsFinding]:
    """Yield a finding if, after step 1, in every pair of LoRA's factors one is zero."""
    pairs = [
        (tensor, own.tensors.get(_FACTOR_B.sub(r"lora_\1A", name)))
        for name, tensor in own.tensors.items()
        if _FACTOR_B.search(name) and not name.endswith(".bias")
    ]
    if own.step > 1 and pairs and all(b.is_zero or (a and a.is_zero) for b, a in pairs):
        text = f"the adapter changes nothing: B A is zero in all of its {len(pairs)} modules"
        yield WeightsFinding("lora", text, len(pairs))


def _find_unchanged(own: CountedModel, earlier: Sequence[CountedModel]) -> Iterator[WeightsFinding]:
    """Yield one finding for tensors that did not change, and changed between all models before.

    ``earlier``: the last model first. Yields nothing for fewer than `EARLIER`, for the model at the
    end, or if they are less than `_SHARE` of the changing elements. Small tensors of types with few
    digits do not count, since a small step may leave them; nor an expert that no token reached, if
    others of its layer changed.
    """
    if len(earlier) < EARLIER or own.step == inf:
        return
    changing = {
        name: tensor
        for name, tensor in own.tensors.items()
        if (tensor.dtype in _FINE or tensor.size >= _MANY) and _is_moving(name, earlier)
    }
    equal = [n for n, t in changing.items() if t.digest == earlier[0].tensors[n].digest]
    digests_before = _digests(earlier[0])
    changed = {_of_layer(n) for n, t in own.tensors.items() if t.digest != digests_before.get(n)}
    unchanged = [name for name in equal if _of_layer(name) not in changed]
    size = sum(changing[name].size for name in unchanged)
    if unchanged and size >= _SHARE * sum(t.size for t in changing.values()):
        counts = Counter[LayerGroup](map(layer_group, unchanged))
        groups = ", ".join(group for group in LAYER_GROUPS if group in counts)
        text = (
            f"{_tensors(unchanged)} bit-identical to those of {earlier[0].location} ({groups}), and"
            " changed from save to save before"
        )
        yield WeightsFinding("unchanged", text, len(unchanged), tuple(unchanged[:MOST_NAMES]))


def _of_layer(name: str) -> str:
    """Return a tensor's name with `experts` instead of an expert's number."""
    return _EXPERT.sub("experts", name)


def _is_moving(name: str, earlier: Sequence[CountedModel]) -> bool:
    """Return whether a floating tensor without NaN is in all these models and always changed."""
    tensors = [model.tensors.get(name) for model in earlier]
    digests = [tensor.digest if tensor else "" for tensor in tensors]
    are_numbers = all(
        t and t.values and t.values[5] is not None and not t.values[0] for t in tensors
    )
    return are_numbers and all(a != b for a, b in pairwise(digests))


def _find_emptied(own: CountedModel, last: CountedModel) -> Iterator[WeightsFinding]:
    """Yield up to two findings: tensors with other values in ``last``, now zero or empty."""
    pairs = [(n, t, last.tensors[n]) for n, t in own.tensors.items() if n in last.tensors]
    zero = [n for n, t, before in pairs if t.is_zero and before.values and not before.is_zero]
    empty = [n for n, t, before in pairs if t.size == 0 < before.size]
    for names, state in ((zero, "all zero"), (empty, "empty, without values")):
        if names:
            text = f"{_tensors(names)} {state}, and had other values in {last.location}"
            yield WeightsFinding("zero", text, len(names), tuple(names[:MOST_NAMES]))


def _find_jumps(
    own: CountedModel, earlier: Sequence[CountedModel], factor: float
) -> Iterator[WeightsFinding]:
    """Yield at most one finding for tensors whose norm changed by far more than is usual for them.

    ``earlier``: at least one model, the last first. ``factor``: the least change of a norm that
    counts. The tensor with the largest change comes first. Only matrices, and tensors with a part
    of the model's norm, count: a bias may be nearly 0 and grow by any factor. A tensor with a norm
    of 0 in any of the models is passed over.
    """
    least_norm = sqrt(_SHARE) * hypot(*(tensor.norm for tensor in own.tensors.values()))
    moves: dict[str, float] = {}
    for name, tensor in own.tensors.items():
        if name not in earlier[0].tensors or not (tensor.is_matrix or tensor.norm >= least_norm):
            continue
        norms = [(m.step, m.tensors[name].norm) for m in (own, *earlier) if name in m.tensors]
        if all(norm for _, norm in norms):
            move = abs(log(norms[0][1]) - log(norms[1][1]))
            if move > _usual_move(name, norms, factor):
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


def _usual_move(name: str, norms: Sequence[tuple[float, float]], factor: float) -> float:
    """Return how far the logarithm of a tensor's norm may move to the first of ``norms``, at most.

    ``norms``: (step, norm) pairs, the last first, at least two, none 0. It is the greatest earlier
    move times `_TIMES_USUAL`, but at least the logarithm of ``factor``. A move over more steps than
    an earlier one may be larger in proportion. Without earlier moves it is the logarithm of
    ``factor`` times `_AT_FIRST`, and infinite for LoRA's B, which grows from zero.
    """
    steps = norms[0][0] - norms[1][0]
    moves = [
        abs(log(norm) - log(old_norm))
        * (max(1.0, steps / (step - old_step)) if old_step < step else 1.0)
        for (step, norm), (old_step, old_norm) in pairwise(norms[1:])
        if step < inf
    ]
    if not moves:
        return inf if layer_group(name) == "lora_b" else log(factor * _AT_FIRST)
    return max(log(factor), _TIMES_USUAL * max(moves))


def _tensors(names: Sequence[str]) -> str:
    """Return a count of tensors as the subject of a sentence."""
    return "1 tensor is" if len(names) == 1 else f"{len(names)} tensors are"
