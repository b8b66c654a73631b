"""What looks wrong in a model beside those before it: each rule with what breaks it, and what does
not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf

import pytest

from ckptsync.records.model_record import ModelTensor
from ckptsync.records.weights_findings import CountedModel, CountedTensor, find_weights
from ckptsync.records.weights_record import (
    TensorValues,
    WeightsFinding,
    WeightsRecord,
    find_values,
    tensors_digest,
)

Tensors = dict[str, CountedTensor]
MATRIX, BIAS, MASK, COUNTER = "h.0.fc.weight", "h.0.fc.bias", "far", "steps"
A, B = "l.lora_A.weight", "l.lora_B.weight"


def tensor(
    digest: str, norm: float | None = 10.0, size: int = 100, dtype: str = "F32", **counts: int
) -> CountedTensor:
    zeros = counts.get("zeros", size if norm == 0 else 0)
    values: TensorValues = (
        counts.get("nans", 0), counts.get("infinities", 0), zeros, -1.0, 1.0, norm
    )  # fmt: skip
    return CountedTensor(dtype, digest, size, size > 10, values)


def training(saves: int, every: int = 10) -> list[CountedModel]:
    """Return the models of a healthy training, the first one first."""
    return [
        CountedModel(
            f"checkpoint-{k * every}",
            k * every,
            {
                MATRIX: tensor(f"m{k}", 10 + 0.5 * k),
                "h.1.fc.weight": tensor(f"n{k}", 10 - 0.5 * k),
                BIAS: tensor(f"b{k}", 0.001 * 3**k, 4),
                MASK: tensor("far", 1.0, 4, infinities=2),
                COUNTER: tensor(f"c{k}", None, 1, "I64"),
            },
        )
        for k in range(1, saves + 1)
    ]


def kinds(models: list[CountedModel], norm_jump: float = 2.0) -> list[str]:
    *before, own = models
    findings = find_weights(own, before[::-1][:3], lambda: before[0] if before else None, norm_jump)
    return [finding.kind for finding in findings]


def changed(models: list[CountedModel], **tensors: CountedTensor | None) -> list[CountedModel]:
    """Return the same, with other tensors in the last one."""
    names = {"matrix": MATRIX, "bias": BIAS, "mask": MASK, "counter": COUNTER, "a": A, "b": B}
    new = {names[key]: value for key, value in tensors.items()}
    its = {name: t for name, t in {**models[-1].tensors, **new}.items() if t}
    return [*models[:-1], replace(models[-1], tensors=its)]


def still(models: list[CountedModel]) -> list[CountedModel]:
    """Return the same, of which the last has the tensors of the one before."""
    return [*models[:-1], replace(models[-1], tensors=models[-2].tensors)]


def final(models: list[CountedModel]) -> list[CountedModel]:
    return [*models[:-1], replace(models[-1], location="final", step=inf)]


def shown(
    models: list[CountedModel], change: Callable[[CountedTensor], CountedTensor]
) -> list[CountedModel]:
    """Return the same, with the matrix of each changed."""
    return [replace(m, tensors={**m.tensors, MATRIX: change(m.tensors[MATRIX])}) for m in models]


def with_experts(*digests: str) -> list[CountedModel]:
    """Return a training with two experts; of the last model with these digests."""
    names = [f"h.0.experts.{n}.up_proj.weight" for n in range(2)]
    experts = [{name: tensor(f"{name}{k}") for name in names} for k in range(3)]
    experts.append({name: tensor(name + end) for name, end in zip(names, digests, strict=True)})
    models = zip(training(4), experts, strict=True)
    return [replace(m, tensors={**m.tensors, **its}) for m, its in models]


FEW = training(4)
TABLE: Mapping[str, tuple[list[CountedModel], list[str]]] = {
    "the first": (changed(training(1), mask=None), []),
    "healthy": (training(9), []),
    "the same state twice": (still(FEW), ["same"]),
    "a final model that is the last checkpoint": (final(still(FEW)), []),
    "a layer that stays": (changed(FEW, matrix=FEW[-2].tensors[MATRIX]), ["unchanged"]),
    "one that stayed before": (
        changed(
            [*FEW[:2], *changed(FEW[:3], matrix=FEW[1].tensors[MATRIX])[2:], FEW[3]],
            matrix=FEW[1].tensors[MATRIX],
        ),
        [],
    ),
    "an expert that no token came to": (with_experts("3", "2"), []),
    "all experts of a layer that stay": (with_experts("2", "2"), ["unchanged"]),
    "one of which too little is known": (
        changed(training(3), matrix=training(3)[-2].tensors[MATRIX]),
        [],
    ),
    "a small bias that stays": (changed(FEW, bias=FEW[-2].tensors[BIAS]), ["unchanged"]),
    "a small tensor of bf16 that stays": (
        changed(
            shown(FEW, lambda t: replace(t, dtype="BF16")),
            matrix=replace(FEW[-2].tensors[MATRIX], dtype="BF16"),
        ),
        [],
    ),
    "a counter that stays": (changed(FEW, counter=FEW[-2].tensors[COUNTER]), []),
    "NaN": (changed(FEW, matrix=tensor("x", nans=1)), ["nonfinite"]),
    "infinity that comes": (changed(FEW, matrix=tensor("x", infinities=1)), ["nonfinite"]),
    "infinity that is there first": (training(1), ["nonfinite"]),
    "NaN that stays": (changed(FEW, mask=tensor("far", 1.0, 4, nans=1)), ["nonfinite"]),
    "zero that was not": (changed(FEW, matrix=tensor("z", 0.0)), ["zero"]),
    "nothing that was something": (changed(FEW, matrix=tensor("e", 0.0, 0)), ["zero"]),
    "a scalar that is zero": (changed(FEW, bias=tensor("z", 0.0, 1)), []),
    "ten times": (changed(FEW, matrix=tensor("x", 110.0)), ["jump"]),
    "a tenth": (changed(FEW, matrix=tensor("x", 1.0)), ["jump"]),
    "ten times of one that the last model lacks": (
        changed(
            [*FEW[:-2], replace(FEW[-2], tensors={BIAS: FEW[-2].tensors[BIAS]}), FEW[-1]],
            matrix=tensor("x", 110.0),
        ),
        [],
    ),
    "less than twice": (changed(FEW, matrix=tensor("x", 20.0)), []),
    "ten times at the second save": (changed(training(2), matrix=tensor("x", 100.0)), []),
    "a hundred times at the second save": (
        changed(training(2), matrix=tensor("x", 1000.0)),
        ["jump"],
    ),
    "what always grows": (
        [
            replace(m, tensors={**m.tensors, MATRIX: tensor(f"g{k}", 3.0**k)})
            for k, m in enumerate(FEW)
        ],
        [],
    ),
    "a longer interval": (
        [
            *shown(FEW, lambda t: t)[:3],
            replace(changed(FEW, matrix=tensor("x", 40.0))[3], step=900),
        ],
        [],
    ),
    "an adapter at its first step": (
        changed(training(1, every=1), a=tensor("a"), b=tensor("b", 0.0), mask=None),
        [],
    ),
    "an adapter that changes nothing": (
        changed(training(2, every=1), a=tensor("a"), b=tensor("b", 0.0), mask=None),
        ["lora"],
    ),
    "an adapter": (changed(training(1), a=tensor("a"), b=tensor("b", 0.1), mask=None), []),
}


@pytest.mark.parametrize("case", TABLE)
def test_what_looks_wrong_beside_the_models_before(case: str) -> None:
    models, expected = TABLE[case]
    assert kinds(models) == expected


@pytest.mark.parametrize("norm", [1e300, 1e-300, -1.0, -1e300, None])
@pytest.mark.parametrize("place", range(4))
def test_no_norm_that_a_record_may_hold_ends_the_comparison(norm: float | None, place: int) -> None:
    models = training(4)
    models[place] = changed(models[: place + 1], matrix=tensor("x", norm))[-1]
    assert set(kinds(models)) <= {"jump"}


def test_the_factor_of_a_jump_is_the_users() -> None:
    models = changed(FEW, matrix=tensor("x", 110.0))
    assert [kinds(models, factor) for factor in (0, 5, 20)] == [[], ["jump"], []]


@pytest.mark.parametrize(
    ("name", "values", "is_told"),
    [
        ("m.weight", (1, 0, 0, 0.0, 0.0, 0.0), True),
        ("m.weight", (0, 1, 0, -1.0, 1.0, 1.0), True),
        ("m.bias", (0, 3, 3, 0.0, 0.0, 0.0), False),  # zero and infinity: added to numbers
        ("m.bias", (1, 2, 3, 0.0, 0.0, 0.0), True),
        ("attn.causal_mask", (0, 6, 0, None, None, 0.0), False),
        ("mask.weight", (0, 6, 0, None, None, 0.0), True),
    ],
)
def test_a_record_of_an_older_program_tells_nan_and_infinity_but_of_masks(
    name: str, values: TensorValues, *, is_told: bool
) -> None:
    tensors = [ModelTensor(name, "F32", (6,), "model.safetensors", 0, 24, "")]
    record = WeightsRecord(
        "r", "checkpoint-1", "checkpoint-1", 0, tensors_digest(tensors), (values,)
    )
    found = find_values(tensors, {"weights-0": record})
    assert found is not None
    assert [f.kind for f in found.findings] == (["nonfinite"] if is_told else [])


def test_the_last_record_that_looked_says_what_was_found() -> None:
    tensors = [ModelTensor("a", "F32", (6,), "model.safetensors", 0, 24, "")]
    of, same = tensors_digest(tensors), WeightsFinding("same", "as before")
    plain = WeightsRecord(
        "r", "checkpoint-1", "checkpoint-1", 0, of, ((0, 0, 0, -1.0, 1.0, 2.0),), (), ()
    )
    further = replace(plain, n=1, values=(), findings=(same,), compared=("checkpoint-0",))
    other = replace(further, n=2, of="", findings=())
    found = find_values(tensors, {"b": plain, "a": further, "c": other})
    assert found is not None
    assert (found.groups[0].norm, found.findings) == (2.0, (same,))


def test_no_record_says_more_than_can_be_shown() -> None:
    tensors = [ModelTensor("a", "F32", (6,), "model.safetensors", 0, 24, "")]
    long = WeightsFinding("same", "x" * 10**6, 9, ("n" * 10**6,) * 999)
    values: tuple[TensorValues, ...] = ((0, 0, 0, -1.0, 1.0, 2.0),)
    record = WeightsRecord(
        "r", "checkpoint-1", "checkpoint-1", 0, tensors_digest(tensors), values, (long,) * 999, ()
    )
    found = find_values(tensors, {"a": record})
    assert found is not None
    assert len(found.findings) == 20
    assert len(found.findings[0].line) < 10_000
