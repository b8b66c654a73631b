"""Wrapped tensors, as their pickles rebuild them."""

from __future__ import annotations

from typing import Any

import pytest

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.formats.pickles import Name
from ckptsync.layouts.wrapped import FROM_TYPE, SUBCLASS, Wrapped, attributes, rebuilt, refuse_strangers, shape_of
from tests.made_pickles import made

KIND, F32 = Name("a", "Kind"), Name("torch", "float32")
STRIDED = made("torch.serialization", "_get_layout", None, ("torch.strided",))
INNER = (KIND, F32, (2, 3), (3, 1), 0, STRIDED, None, False)


def rebuild(inner: Any, func: Name = SUBCLASS, kind: Any = KIND) -> Any:
    return rebuilt(FROM_TYPE, (func, kind, inner, "state"))


def test_a_wrapped_tensor_keeps_its_class_and_its_global_shape() -> None:
    assert rebuild(INNER) == Wrapped(KIND, "F32", (2, 3), "state")


@pytest.mark.parametrize("inner", [INNER[:5], [], (KIND, F32, (2, -3), (3, 1), 0, STRIDED), (KIND, KIND, (2,), (1,), 0, STRIDED)])
def test_one_without_shape_or_dtype_is_corrupt(inner: Any) -> None:
    with pytest.raises(Corrupt):
        rebuild(inner)
    with pytest.raises(Corrupt):
        rebuild(INNER, kind="Kind")


def test_one_that_is_not_dense_is_unsupported() -> None:
    for layout in (made("", "_get_layout", None, ("torch.sparse_coo",)), None):
        with pytest.raises(Unsupported, match="not strided"):
            rebuild((*INNER[:5], layout))


def test_a_tensor_that_is_rebuilt_by_another_function_is_corrupt() -> None:
    with pytest.raises(Corrupt, match="something else"):
        rebuild((), func=Name("os", "system"))


def test_attributes_are_those_of_the_class_that_is_due_with_slots_or_without() -> None:
    assert (
        attributes(made("m", "K", {"a": 1}), "K", ("a",)) == attributes(made("m", "K", (None, {"a": 1})), "K", ("a",)) == {"a": 1}
    )
    for value in [made("m", "L", {"a": 1}), made("m", "K", {"b": 1}), made("m", "K"), {"a": 1}, None]:
        with pytest.raises(Corrupt, match="no K where one is due"):
            attributes(value, "K", ("a",))


def test_an_attribute_of_no_known_version_is_refused_by_name() -> None:
    refuse_strangers({"a": 1}, ("a", "b"), "K")
    with pytest.raises(Unsupported, match="K has an attribute 'c'"):
        refuse_strangers({"a": 1, "c": 2}, ("a", "b"), "K")


@pytest.mark.parametrize("value", [None, 3, "ab", (1, -1), (1.0,), (True,), (1,) * 40])
def test_shapes_are_natural_numbers_and_few(value: Any) -> None:
    with pytest.raises(Corrupt):
        shape_of(value)
