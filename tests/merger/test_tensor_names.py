"""Names without wrappers, and one name for tied weights."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest

from ckptsync.errors import Unsupported
from ckptsync.merger.plan import DType, MergeOptions
from ckptsync.merger.tensor_names import (
    EMBEDDINGS,
    HEADS,
    WRAPPERS,
    drop_tied,
    is_tied,
    strip_wrappers,
)
from ckptsync.tensors import Copy, Extent, Part, Shape, Tensor
from tests.support.files_in_memory import MemoryFiles


def tensors(*names: str, tied: str | None = None) -> list[Tensor]:
    return [Tensor(name, "F32", (), (Copy("F32", (), ()),), tied) for name in names]


def names(*stored: str, known: tuple[str, ...] = ()) -> list[str]:
    return [t.name for t in strip_wrappers(tensors(*stored), known)[0]]


@pytest.mark.parametrize("wrapper", sorted(WRAPPERS))
def test_a_wrapper_is_taken_out_wherever_it_stands(wrapper: str) -> None:
    stored = (
        f"{wrapper}.a.weight",
        f"a.{wrapper}.b",
        f"{wrapper}.{wrapper}.x.{wrapper}.y",
        "plain",
    )
    assert names(*stored) == ["a.weight", "a.b", "x.y", "plain"]


@pytest.mark.parametrize(
    "name",
    ["a_orig_mod.weight", "_orig_mod_.weight", "my._forward_modules.w", "_orig_mod", "a._orig_mod"],
)
def test_only_a_whole_component_above_the_last_is_a_wrapper(name: str) -> None:
    assert names(name) == [name]


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        (("module.a", "module.b.c"), ["a", "b.c"]),
        (("module.module.a", "module._orig_mod.module.b"), ["a", "b"]),
        (("_orig_mod.module.a", "module._orig_mod.b"), ["a", "b"]),
        (("module.module.a", "module.b"), ["module.a", "b"]),
        (("module.a", "b"), ["module.a", "b"]),
        (("a.module.b",), ["a.module.b"]),
        ((), []),
    ],
)
def test_module_is_a_wrapper_only_as_the_first_component_of_all_names(
    stored: tuple[str, ...], wanted: list[str]
) -> None:
    assert names(*stored) == wanted


def test_module_stays_where_the_base_model_has_a_part_of_that_name() -> None:
    assert names("module.a", known=("module.a",)) == ["module.a"]
    assert names("module.a", known=("a",)) == ["a"]


def test_it_is_said_once_with_an_example_and_the_count() -> None:
    _, notes = strip_wrappers(tensors("module._orig_mod.a", "module.b"))
    assert notes == (
        "_orig_mod and module taken out of 2 names, such as module._orig_mod.a: now a",
    )
    assert strip_wrappers(tensors("a", "b"))[1] == ()


def test_two_tensors_that_would_get_one_name_are_refused() -> None:
    with pytest.raises(
        Unsupported,
        match=r"^_orig_mod\.a: would be renamed to a, the name of another tensor$",
    ):
        strip_wrappers(tensors("_orig_mod.a", "a"))


def test_what_a_tensor_is_tied_to_is_renamed_with_it() -> None:
    found, _ = strip_wrappers(
        [
            *tensors("_orig_mod.e"),
            *tensors("_orig_mod.h", tied="_orig_mod.e"),
            *tensors("x", tied="not here"),
        ]
    )
    assert [(t.name, t.tied) for t in found] == [("e", None), ("h", "e"), ("x", "not here")]


TIED = {"tie_word_embeddings": True}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def tensor(
    name: str, file: str, shape: Shape = (2,), dtype: str = "F32", tied: str | None = None
) -> Tensor:
    part = Part((0,) * len(shape), shape, Extent(file, 0, 8))
    return Tensor(name, dtype, shape, (Copy(dtype, shape, (part,)),), tied)


def kept(
    tensors: list[Tensor],
    config: Mapping[str, object] | None = TIED,
    files: dict[str, bytes] | None = None,
    dtype: DType = "auto",
    base: dict[str, Tensor] | None = None,
) -> tuple[list[str], tuple[str, ...]]:
    content = (
        {"e": b"12345678", "same": b"12345678", "other": b"12345679"} if files is None else files
    )
    found, notes = drop_tied(tensors, MemoryFiles(content), MergeOptions(dtype), config, base)
    return [t.name for t in found], notes


UNTIED = {"tie_word_embeddings": False}


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (TIED, True),
        ({"text_config": TIED}, True),
        (TIED | {"text_config": TIED}, True),
        (UNTIED, False),
        (TIED | {"text_config": UNTIED}, False),
        (UNTIED | {"text_config": TIED}, False),
        ({}, False),
        ({"text_config": 5}, False),
        ({"tie_word_embeddings": "yes"}, False),
        ({"model_type": "gpt2"}, True),
        ({"model_type": "gpt2"} | UNTIED, False),
        ({"model_type": "llama"}, False),
        ({"model_type": ["gpt2"]}, False),
    ],
)
def test_the_configuration_says_whether_head_and_embedding_are_one(
    config: dict[str, object],
    wanted: bool,  # noqa: FBT001
) -> None:
    assert is_tied(config) is wanted


def test_equal_bytes_are_kept_once_under_the_embeddings_name() -> None:
    stored = [tensor(HEAD, "same"), tensor("x", "e"), tensor(EMBEDDING, "e")]
    for dtype in ("auto", "keep", "bf16"):
        assert kept(stored, dtype=dtype) == (
            ["x", EMBEDDING],
            (f"{HEAD} is tied to {EMBEDDING}: one copy is kept",),
        )


FOUR = ["shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", HEAD]
TIES: list[tuple[dict[str, str], list[str]]] = [
    (dict.fromkeys(FOUR, "e"), FOUR[:1]),
    (dict.fromkeys([*(f"model.{name}" for name in FOUR[:3]), HEAD], "e"), [f"model.{FOUR[0]}"]),
    ({"encoder.embed_tokens.weight": "e", "x": "e"}, ["encoder.embed_tokens.weight", "x"]),
    ({"cls.predictions.bias": "e", "cls.predictions.decoder.bias": "e"}, ["cls.predictions.bias"]),
    ({"my_lm_head.weight": "e", EMBEDDING: "same"}, ["my_lm_head.weight", EMBEDDING]),
    # of several embeddings the one with the head's bytes is meant, if it is only one
    ({"a.wte.weight": "other", "b.wte.weight": "e", HEAD: "e"}, ["a.wte.weight", "b.wte.weight"]),
    ({"a.wte.weight": "e", "b.wte.weight": "e", HEAD: "e"}, ["a.wte.weight", "b.wte.weight", HEAD]),
]


@pytest.mark.parametrize(("stored", "names"), TIES)
def test_of_equal_tensors_with_names_of_a_pair_one_is_kept(
    stored: dict[str, str], names: list[str]
) -> None:
    assert kept([tensor(name, file) for name, file in stored.items()])[0] == names


def test_what_differs_in_bytes_shape_or_type_is_kept_and_said_where_it_is_a_pair() -> None:
    differ = "are tied by the configuration, but differ: both are kept"
    assert kept([tensor(EMBEDDING, "e"), tensor(HEAD, "other")]) == (
        [EMBEDDING, HEAD],
        (f"{HEAD} and {EMBEDDING} {differ}",),
    )
    files = dict(zip(FOUR, ("e", "other", "same", "other"), strict=True))
    names, notes = kept([tensor(name, file) for name, file in files.items()])
    assert names == FOUR[:2]  # the head is as the encoder's
    assert notes[0] == f"{FOUR[1]} and {FOUR[0]} {differ}"
    others = [tensor("a.wte.weight", "e", (1, 2)), tensor("b.wte.weight", "e", dtype="I32")]
    assert kept([*others, tensor(HEAD, "same")]) == (["a.wte.weight", "b.wte.weight", HEAD], ())


def test_without_the_configurations_word_both_are_kept() -> None:
    two = [tensor(EMBEDDING, "e"), tensor(HEAD, "e", tied=EMBEDDING)]
    assert kept(two, {}) == kept(two, UNTIED) == ([EMBEDDING, HEAD], ())
    names, notes = kept(two, None)
    assert names == [EMBEDDING, HEAD]
    assert notes == (
        (
            f"{HEAD} is tied to {EMBEDDING} in the training: both are written, as no config.json"
            " ties them"
        ),
    )


@pytest.mark.parametrize(("head", "embedding"), [(EMBEDDING, None), (None, HEAD)])
def test_where_the_framework_ties_them_nothing_is_read(
    head: str | None, embedding: str | None
) -> None:
    names, _ = kept(
        [tensor(EMBEDDING, "e", tied=embedding), tensor(HEAD, "e", tied=head)], files={}
    )
    assert names == [EMBEDDING]


def test_the_names_of_any_of_transformers_models_are_known() -> None:
    for head, embedding in itertools.product(HEADS, EMBEDDINGS):
        both = [tensor(f"a.{embedding}", "e"), tensor(f"b.{head}", "same")]
        assert kept(both)[0] == [f"a.{embedding}"]


def test_a_head_that_stands_alone_gets_the_name_that_the_base_model_has() -> None:
    base = {EMBEDDING: tensor(EMBEDDING, "b")}
    names, notes = kept([tensor("x", "e"), tensor(HEAD, "e"), tensor("y", "e")], base=base)
    assert names == ["x", EMBEDDING, "y"]
    assert notes == (f"{HEAD} is written as {EMBEDDING}, which the base model has for the two",)


def test_without_proof_a_head_that_stands_alone_keeps_its_name() -> None:
    for base in (
        None,
        {HEAD: tensor(HEAD, "b"), EMBEDDING: tensor(EMBEDDING, "b")},
        {EMBEDDING: tensor(EMBEDDING, "b", (1, 2))},
    ):
        names, notes = kept([tensor(HEAD, "e")], base=base)
        assert (names, "no embedding with a name of its own" in notes[0]) == ([HEAD], True)
