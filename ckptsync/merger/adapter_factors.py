"""Decide which part of a pair of LoRA factors is added to which box of the base.  Pure.

The factors are of one linear layer, or of all experts of a layer (peft's ``target_parameters``:
the rows of A are grouped by expert, the columns of B by rank).  The base's files may have the
experts as one tensor, or one by one, with ``gate`` and ``up`` apart.  So each pair is matched with
the tensors that make up the adapted matrix, by names and shapes, and cut into one `LowRank` for
each of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import prod
from typing import Any

from ckptsync.errors import Corrupt, Incomplete, Unsupported
from ckptsync.merger.adapter_config import Scales, names
from ckptsync.merger.adapter_names import Base, Pair, Slot
from ckptsync.merger.change_types import Factor, LowRank
from ckptsync.tensors import Shape, Tensor

OTHER_MODEL = "give the model that this adapter was trained on"
NamedChange = tuple[str, LowRank]
"""The name of a tensor of the base, and what is added to it."""
_CONV1D = frozenset({"gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp"})
_CONV1D_LAYERS = frozenset({"c_attn", "c_proj", "c_fc", "q_attn"})
# Models whose experts are (experts, in, out) in memory (`is_transposed`, transformers 5.24)
_TRANSPOSED = frozenset({"gpt_oss", "aria", "aria_text", "openai_privacy_filter"})
_WITHOUT_BASE = re.compile(r"(\.base_layer)+(?=\.|$)")
_ORDER = ("gate_up_proj", "gate_proj", "up_proj", "down_proj")  # as classes register them
_MOST_PARAMETERS = 6  # of a module, that are tried in every order
_FIRST_STRAIGHT = (0, 19)  # peft from here on has (experts, out, in) as such


@dataclass(frozen=True, slots=True)
class _Factors:
    """Both factors of a module, whose ranks agree, and DoRA's magnitudes."""

    a: Tensor
    b: Tensor
    magnitude: Tensor | None
    is_embedding: bool


@dataclass(frozen=True, slots=True)
class _Box:
    """A box of a tensor, which holds rows of the adapted matrix (of one expert) from ``start``."""

    tensor: Tensor
    start: int
    offsets: Shape
    sizes: Shape
    expert: int | None = None


@dataclass(frozen=True, slots=True)
class _Matrix:
    """What is adapted: ``rows`` by ``columns``, times ``experts`` where it is of several."""

    boxes: tuple[_Box, ...]
    rows: int
    columns: int
    experts: int | None = None


def plan_products(
    pairs: Mapping[str, Pair],
    base: Base,
    scales: Scales,
    config: Mapping[str, Any],
    adapter_config: Mapping[str, Any],
) -> tuple[dict[str, list[NamedChange]], list[str]]:
    """Return module → what is added to the base, and the modules that the base does not have.

    Args:
        pairs: The adapter's factors by module.
        base: The tensors that are added to.
        scales: Ranks and scales by module; warnings are recorded there.
        config: The base's ``config.json``.
        adapter_config: The adapter's.

    Raises:
        Incomplete: A factor, or an expert of the base, is missing.
        Corrupt: Factors do not fit each other or the base.
        Unsupported: The base has the layer in a form that ckptsync does not know.

    """
    linear: dict[str, tuple[_Factors, _Matrix]] = {}
    factors = {module: _factors(module, pair) for module, pair in pairs.items()}
    experts: dict[str, list[str]] = {}
    missing_modules: list[str] = []
    for module, pair_factors in factors.items():
        inner = _WITHOUT_BASE.sub("", module)
        attention = inner if inner == module else inner.removesuffix(".out_proj")
        if module == inner and (slots := base.find(f"{module}.weight")):
            linear[module] = pair_factors, _find_matrix(module, slots)
        elif base.find(f"{attention}.in_proj_weight"):
            raise Unsupported(
                f"{inner}: LoRA of torch.nn.MultiheadAttention, whose output projection peft adds"
                " twice",
                hint="merge it with peft, and compare the model's answers before and after",
            )
        elif base.parameters(inner):
            experts.setdefault(inner, []).append(module)
        else:
            missing_modules.append(module)
    result = _linear_sums(linear, scales, set(_model_types(config)))
    is_transposed = _adds_transposed(config, adapter_config)
    targets = names(adapter_config, "target_parameters")
    for inner, modules in experts.items():
        levels = sorted(modules, key=len, reverse=True)  # the innermost first
        assigned = _assign_parameters(inner, [factors[m] for m in levels], base, targets)
        for module, (name, matrix) in zip(levels, assigned, strict=True):
            if pairs[module].magnitude or pairs[module].bias:
                raise Corrupt(
                    f"{module}: DoRA or a bias over experts, which peft does not have",
                    hint="the adapter is damaged: save it again",
                )
            result[module] = _expert_sums(
                f"{inner}.{name}", factors[module], matrix, scales, is_transposed=is_transposed
            )
    return result, missing_modules


def _factors(module: str, pair: Pair) -> _Factors:
    """Return a module's two factors.

    Raises Incomplete if one is missing, Corrupt if they have no product.
    """
    a, b = pair.a, pair.b
    if not a or not b:
        raise Incomplete(
            f"{module}: LoRA needs two factors, and one is missing",
            hint="give the directories of all nodes, or save the adapter again",
        )
    if len(a.shape) < 2 or len(b.shape) < 2 or a.shape[0] != b.shape[1]:
        raise Corrupt(
            f"{module}: factors of {a.shape} and {b.shape} have no product",
            hint="the adapter is damaged, or of two saves: save it again",
        )
    return _Factors(a, b, pair.magnitude, is_embedding=pair.is_embedding)


def _linear_sums(
    linear: Mapping[str, tuple[_Factors, _Matrix]], scales: Scales, kinds: set[str]
) -> dict[str, list[NamedChange]]:
    """Return module → what is added to linear layers and embeddings.

    ``kinds``: the base's model types, which decide for square layers that may be Conv1D, unless
    their siblings do.  Raises Corrupt if factors do not fit their matrix, or as `Scales.scale`.
    """
    orientations = {
        module: _find_orientations(pair, matrix) for module, (pair, matrix) in linear.items()
    }
    conv1d = {module for module in linear if module.rpartition(".")[2] in _CONV1D_LAYERS}
    # a square layer is stored as its siblings are
    siblings = {orientations[m] for m in conv1d if len(orientations[m]) == 1}
    result: dict[str, list[NamedChange]] = {}
    for module, (pair, matrix) in linear.items():
        fitting = orientations[module]
        if pair.is_embedding:
            fitting &= {True}
        elif module not in conv1d:
            fitting &= {False}
        elif len(fitting) > 1:
            fitting = (
                next(iter(siblings)) if len(siblings) == 1 else frozenset({bool(kinds & _CONV1D)})
            )
        if not fitting:
            raise _shape_error(module, pair, matrix)
        scale = scales.scale(module, pair.a.shape[0])
        result[module] = list(
            _low_ranks(module, pair, matrix, scale, is_transposed=next(iter(fitting)))
        )
    return result


def _find_matrix(module: str, slots: Sequence[Slot]) -> _Matrix:
    """Return the matrix that a ``weight`` is, or is a part of.

    Raises Unsupported for unknown forms, Corrupt if the base has fewer experts; else as
    `_join_pieces`.
    """
    if len(slots) > 1:
        return _join_pieces(module, slots)
    ((tensor, place, part),) = ((s.tensor, s.file, s.own) for s in slots)
    shape, rows = tensor.shape, tensor.shape[0] if tensor.shape else 0
    if part:  # one expert, or one half, of what the base has as one
        if len(shape) != (2 if part.expert is None else 3) or part.parts > 1:
            raise _unknown_form_error(module, tensor)
        if part.expert is not None and part.expert >= rows:
            raise Corrupt(f"{module}: the base has {rows} experts", hint=OTHER_MODEL)
        *first, rows, columns = shape
        size = rows // part.pieces
        offsets = (*(part.expert for _ in first if part.expert is not None), part.piece * size, 0)
        sizes = (*(1 for _ in first), size, columns)
        return _Matrix((_Box(tensor, 0, offsets, sizes),), size, columns)
    if place.parts > 1:  # the file has several layers as one
        if len(shape) != 2 or rows % place.parts:
            raise _unknown_form_error(module, tensor)
        size = rows // place.parts
        box = _Box(tensor, 0, (place.part * size, 0), (size, shape[1]))
        return _Matrix((box,), size, shape[1])
    if len(shape) < 2 or not place.is_whole:
        raise _unknown_form_error(module, tensor)
    return _Matrix((_Box(tensor, 0, (0,) * len(shape), shape),), rows, prod(shape[1:]))


def _join_pieces(name: str, slots: Sequence[Slot]) -> _Matrix:
    """Return the matrix, or those of experts, that several tensors of the base's files make up.

    Raises Unsupported for unknown forms, Incomplete if experts are missing or of several shapes.
    """
    by_expert: dict[int | None, list[Slot]] = {}
    for slot in slots:
        by_expert.setdefault(slot.file.expert, []).append(slot)
    boxes: list[_Box] = []
    shapes: set[tuple[int, int]] = set()
    for expert, expert_slots in by_expert.items():
        expert_slots.sort(key=lambda slot: slot.file.piece)
        start = 0
        for number, slot in enumerate(expert_slots):
            shape, place = slot.tensor.shape, slot.file
            if len(shape) != 2 or (place.piece, place.pieces) != (number, len(expert_slots)):
                raise _unknown_form_error(name, slot.tensor)
            boxes.append(_Box(slot.tensor, start, (0, 0), shape, expert))
            start += shape[0]
        shapes.add((start, expert_slots[0].tensor.shape[1]))
    count = len(by_expert)
    if len(shapes) != 1 or (None not in by_expert and set(by_expert) != set(range(count))):
        raise Incomplete(
            f"{name}: of its {count} experts some are missing in the base, or of another shape",
            hint="give all files of the base",
        )
    ((rows, columns),) = shapes
    return _Matrix(tuple(boxes), rows, columns, None if None in by_expert else count)


def _expert_matrix(name: str, slots: Sequence[Slot]) -> _Matrix | None:
    """Return the matrix of a parameter, or those of its experts; raise as `_join_pieces`.

    ``slots``: at least one.  None for a tensor that is not whole, or has neither 2 nor 3 axes.
    """
    if len(slots) > 1 or slots[0].file.expert is not None:
        return _join_pieces(name, slots)
    tensor = slots[0].tensor
    if not slots[0].file.is_whole or len(tensor.shape) not in (2, 3):
        return None
    if len(tensor.shape) == 2:
        return _Matrix((_Box(tensor, 0, (0, 0), tensor.shape),), *tensor.shape)
    count, rows, columns = tensor.shape
    boxes = (_Box(tensor, 0, (e, 0, 0), (1, rows, columns), e) for e in range(count))
    return _Matrix(tuple(boxes), rows, columns, count)


def _assign_parameters(
    module: str, levels: Sequence[_Factors], base: Base, targets: Sequence[str]
) -> tuple[tuple[str, _Matrix], ...]:
    """Return the parameter that each of the nested pairs adapts, the innermost first.

    ``targets``: ends of parameter names; empty for all.  peft nests pairs as the module registers
    its parameters, and so that order decides if there is a pair for each.  Raises Corrupt if the
    factors fit no parameters; Unsupported if fewer pairs than parameters fit in several ways, or
    for more than `_MOST_PARAMETERS`.
    """
    parameters = base.parameters(module)
    targeted = [
        name
        for name in parameters
        if not targets or any(f".{module}.{name}".endswith(f".{target}") for target in targets)
    ]
    targeted.sort(key=lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER))
    matrices = {n: m for n in targeted if (m := _expert_matrix(f"{module}.{n}", parameters[n]))}
    if len(matrices) > _MOST_PARAMETERS:
        raise Unsupported(f"{module}: {len(matrices)} parameters of one module may be adapted")
    orders = [
        order
        for order in permutations(matrices, len(levels))
        if all(_find_orientations(p, matrices[n]) for p, n in zip(levels, order, strict=True))
    ]
    if not orders:
        shapes = ", ".join(f"{p.a.shape} and {p.b.shape}" for p in levels)
        raise Corrupt(
            f"{module}: factors of {shapes} fit none of {', '.join(parameters)} in the base",
            hint=OTHER_MODEL,
        )
    if len(orders) > 1 and len(levels) < len(matrices):
        raise Unsupported(
            f"{module}: the adapter may be of {' or of '.join(o[0] for o in orders[:2])}",
            hint="adapter_config.json should say it in target_parameters",
        )
    return tuple((name, matrices[name]) for name in orders[0])


def _find_orientations(pair: _Factors, matrix: _Matrix) -> frozenset[bool]:
    """Return how a product fits a matrix: as it is (False), transposed (True), both, or neither."""
    a, b = pair.a.shape, pair.b.shape
    sizes = matrix.boxes[0].sizes
    if len(a) > 2 or len(b) > 2:  # of a convolution
        is_whole = len(matrix.boxes) == 1 and a[1:] == sizes[1:] and set(b[2:]) <= {1}
        return frozenset({False}) if is_whole and b[0] == matrix.rows else frozenset()
    if (matrix.experts and a[0] % matrix.experts) or prod(sizes[:-2]) != 1:
        return frozenset()
    product_shape, of_base = (b[0], a[1]), (matrix.rows, matrix.columns)
    fits = {False: product_shape == of_base, True: product_shape == of_base[::-1]}
    return frozenset(is_transposed for is_transposed, is_fit in fits.items() if is_fit)


def _expert_sums(
    name: str, pair: _Factors, matrix: _Matrix, scales: Scales, *, is_transposed: bool
) -> list[NamedChange]:
    """Return what is added to each expert; ``is_transposed`` decides for experts' square matrices.

    Raises as `_low_ranks` and `Scales.scale`.
    """
    scale = scales.scale(name, pair.a.shape[0] // (matrix.experts or 1))
    fits = _find_orientations(pair, matrix)
    is_product_transposed = (
        next(iter(fits)) if len(fits) == 1 else is_transposed and matrix.experts is not None
    )
    return list(_low_ranks(name, pair, matrix, scale, is_transposed=is_product_transposed))


def _low_ranks(
    module: str, pair: _Factors, matrix: _Matrix, scale: float, *, is_transposed: bool
) -> Iterator[NamedChange]:
    """Yield the name of each tensor of the matrix, and the product that is added to its box.

    Raises Unsupported for DoRA of a matrix in several tensors, Corrupt for another number of
    magnitudes.
    """
    a, b = pair.a, pair.b
    experts = matrix.experts or 1
    rank = a.shape[0] // experts
    for box in matrix.boxes:
        size = box.sizes[0] if len(a.shape) > 2 else box.sizes[-2]
        own_rows = range(box.start, box.start + size)
        expert = box.expert or 0
        a_columns, b_rows = range(prod(a.shape[1:])), range(b.shape[0])
        if pair.magnitude and size != matrix.rows:
            raise Unsupported(
                f"{module}: DoRA of a layer that the base has in several tensors",
                hint="merge it with peft",
            )
        sum_ = LowRank(
            module,
            Factor(
                a,
                range(expert * rank, (expert + 1) * rank),
                own_rows if is_transposed else a_columns,
            ),
            Factor(
                b, b_rows if is_transposed else own_rows, range(expert, rank * experts, experts)
            ),
            scale,
            box.offsets,
            box.sizes,
            is_transposed=is_transposed,
            magnitude=pair.magnitude,
        )
        if pair.magnitude:
            outputs = matrix.columns if is_transposed else matrix.rows
            if prod(pair.magnitude.shape) != outputs:
                raise Corrupt(
                    f"{pair.magnitude.name}: {pair.magnitude.shape}, {outputs} magnitudes expected",
                    hint=OTHER_MODEL,
                )
        yield box.tensor.name, sum_


def _adds_transposed(config: Mapping[str, Any], adapter_config: Mapping[str, Any]) -> bool:
    """Return whether the product over square experts is added transposed.

    True for model types of `_TRANSPOSED`, and for peft before 0.19 or of no known version, which
    took every parameter of experts as (experts, in, out).
    """
    match = re.match(r"([0-9]{1,4})\.([0-9]{1,4})", str(adapter_config.get("peft_version", "")))
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    return version < _FIRST_STRAIGHT or bool(_TRANSPOSED & set(_model_types(config)))


def _model_types(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the model types that a configuration and its sections name."""
    for section in (config, *(v for v in config.values() if isinstance(v, dict))):
        if isinstance(kind := section.get("model_type"), str):
            yield kind


def _unknown_form_error(module: str, tensor: Tensor) -> Unsupported:
    """Return the error of a form of the base that ckptsync does not know."""
    return Unsupported(
        f"{module}: ckptsync does not know how the base has it in {tensor.name} {tensor.shape}",
        hint="give a base as transformers writes it with save_pretrained",
    )


def _shape_error(module: str, pair: _Factors, matrix: _Matrix) -> Corrupt:
    """Return the error of factors that do not fit the base's matrix."""
    a, b = pair.a.shape, pair.b.shape
    tensor = matrix.boxes[0].tensor
    reason = "another vocabulary, or another model" if pair.is_embedding else "another model"
    if len(a) > 2:
        reason = "another model, or a convolution with groups"
    return Corrupt(
        f"{module}: factors of {a} and {b} do not fit {tensor.name} {tensor.shape}: {reason}",
        hint=OTHER_MODEL,
    )
