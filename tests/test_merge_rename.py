"""Names without wrappers, one to one."""

from __future__ import annotations

import pytest

from ckptsync.errors import Unsupported
from ckptsync.merge.rename import WRAPPERS, clean_names, unwrapped
from ckptsync.model import Copy, Tensor


def tensors(*names: str, tied: str | None = None) -> list[Tensor]:
    return [Tensor(name, "F32", (), (Copy("F32", (), ()),), tied) for name in names]


def names(*stored: str, known: tuple[str, ...] = ()) -> list[str]:
    return [t.name for t in unwrapped(tensors(*stored), known)[0]]


@pytest.mark.parametrize("wrapper", sorted(WRAPPERS))
def test_a_wrapper_is_taken_out_wherever_it_stands(wrapper: str) -> None:
    stored = (f"{wrapper}.a.weight", f"a.{wrapper}.b", f"{wrapper}.{wrapper}.x.{wrapper}.y", "plain")
    assert names(*stored) == ["a.weight", "a.b", "x.y", "plain"]


@pytest.mark.parametrize("name", ["a_orig_mod.weight", "_orig_mod_.weight", "my._forward_modules.w", "_orig_mod", "a._orig_mod"])
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
def test_module_is_a_wrapper_only_as_the_first_component_of_all_names(stored: tuple[str, ...], wanted: list[str]) -> None:
    assert names(*stored) == wanted


def test_module_stays_where_the_base_model_has_a_part_of_that_name() -> None:
    assert names("module.a", known=("module.a",)) == ["module.a"]
    assert names("module.a", known=("a",)) == ["a"]


def test_an_attribute_that_holds_the_model_is_taken_away_where_the_base_proves_it() -> None:
    known = ("model.w", "lm_head.weight")
    assert names("model.model.w", "model.lm_head.weight", known=known) == list(known)
    assert names("a.b.model.w", "a.b.lm_head.weight", "a.b.extra", known=known) == [*known, "extra"]
    for stored in (
        ("model.model.w", "model.lm_head.bias"),
        ("model.model.w", "model.lm_head.weight", "other.x"),
        ("model.w", "lm_head.weight"),
    ):
        assert names(*stored, known=known) == list(stored)
    assert names("model.model.w", "model.lm_head.weight") == ["model.model.w", "model.lm_head.weight"]
    assert names("w.w", "w.w.w", known=("w.w",)) == ["w.w", "w.w.w"]
    assert names("a.w", "w.x", known=("w",)) == ["a.w", "w.x"]


def test_it_is_said_once_with_an_example_and_the_count() -> None:
    _, notes = unwrapped(tensors("module._orig_mod.a", "module.b"))
    assert notes == ("_orig_mod and module taken out of 2 names, such as module._orig_mod.a: now a",)
    assert unwrapped(tensors("a", "b"))[1] == ()


def test_two_tensors_that_would_get_one_name_are_refused() -> None:
    with pytest.raises(Unsupported, match=r"^_orig_mod\.a: another tensor has the name that is left of it, a$"):
        unwrapped(tensors("_orig_mod.a", "a"))


def test_what_a_tensor_is_tied_to_is_renamed_with_it() -> None:
    found, _ = unwrapped([*tensors("_orig_mod.e"), *tensors("_orig_mod.h", tied="_orig_mod.e"), *tensors("x", tied="not here")])
    assert [(t.name, t.tied) for t in found] == [("e", None), ("h", "e"), ("x", "not here")]


def test_names_that_need_no_change_cost_no_new_tensor() -> None:
    given = tensors("a", "b")
    assert all(one is other for one, other in zip(unwrapped(given)[0], given, strict=True))
    assert clean_names(["a"]) == {"a": "a"}
