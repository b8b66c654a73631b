"""Wrapped tensors as their pickles rebuild them.

ShardedTensors: a list of all shards, and the rank's own.
"""

from __future__ import annotations

from typing import Any

import pytest

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.formats.pickles import Name
from ckptsync.formats.torch_pickle import TENSORS, RefusedTensor, Wrapped
from ckptsync.layouts.sharded_tensors import (
    ALLOWED,
    SHARDED_TENSOR,
    attributes,
    refuse_strangers,
    shape_of,
    sharded_share,
)
from tests.support.pickle_writer import made, stored

SUBCLASS = Name("torch._utils", "_rebuild_wrapper_subclass")
FROM_TYPE = Name("torch._tensor", "_rebuild_from_type_v2")
KIND, F32 = Name("a", "Kind"), Name("torch", "float32")
STRIDED = made("torch.serialization", "_get_layout", None, ("torch.strided",))
INNER = (KIND, F32, (2, 3), (3, 1), 0, STRIDED, None, False)


def rebuild(inner: Any, func: Name = SUBCLASS, kind: Any = KIND) -> Any:
    return TENSORS[FROM_TYPE](FROM_TYPE, (func, kind, inner, "state"))


def test_a_wrapped_tensor_keeps_its_class_and_its_global_shape() -> None:
    assert rebuild(INNER) == Wrapped(KIND, "F32", (2, 3), "state")


@pytest.mark.parametrize(
    "inner",
    [INNER[:5], [], (KIND, F32, (2, -3), (3, 1), 0, STRIDED), (KIND, KIND, (2,), (1,), 0, STRIDED)],
)
def test_one_without_shape_or_dtype_is_corrupt(inner: Any) -> None:
    with pytest.raises(Corrupt):
        rebuild(inner)
    with pytest.raises(Corrupt):
        rebuild(INNER, kind="Kind")


def test_one_that_is_not_dense_is_unsupported() -> None:
    for layout in (made("", "_get_layout", None, ("torch.sparse_coo",)), None):
        refused = rebuild((*INNER[:5], layout))
        assert isinstance(refused, RefusedTensor)
        assert "not strided" in str(refused.error())


def test_a_tensor_that_is_rebuilt_by_another_function_is_corrupt() -> None:
    with pytest.raises(Corrupt, match="something else"):
        rebuild((), func=Name("os", "system"))


def test_attributes_are_those_of_the_class_that_is_due_with_slots_or_without() -> None:
    assert (
        attributes(made("m", "K", {"a": 1}), "K", ("a",))
        == attributes(made("m", "K", (None, {"a": 1})), "K", ("a",))
        == {"a": 1}
    )
    for value in [
        made("m", "L", {"a": 1}),
        made("m", "K", {"b": 1}),
        made("m", "K"),
        {"a": 1},
        None,
    ]:
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


GROUP = {"local_rank": 1, "global_rank": 1, "local_world_size": 2, "global_world_size": 2}


def metadata(offsets: Any, sizes: Any) -> Any:
    return made("", "ShardMetadata", (None, {"shard_offsets": offsets, "shard_sizes": sizes}))


def own(offsets: Any = [3, 0], sizes: Any = [2, 4], tensor: Any = None) -> Any:  # noqa: B006  never changed
    return made(
        "",
        "Shard",
        (
            None,
            {
                "tensor": stored((2, 4)) if tensor is None else tensor,
                "metadata": metadata(offsets, sizes),
            },
        ),
    )


def sharded(
    shards: Any, *, size: Any = (5, 4), every: Any = None, group: Any = GROUP, fields: int = 5
) -> Wrapped:
    listed = [metadata([0, 0], [3, 4]), metadata([3, 0], [2, 4])] if every is None else every
    told = made("", "ShardedTensorMetadata", {"shards_metadata": listed, "size": size})
    state = (shards, told, made("", "ShardedTensor", group), None, False)
    return Wrapped(SHARDED_TENSOR, "F32", (5, 4), state[:fields])


def test_a_shard_is_where_its_own_metadata_says() -> None:
    found = sharded_share(sharded([own()]))
    assert [(at, stored.shape) for at, stored in found.pieces] == [((3, 0), (2, 4))]
    assert (found.world, found.rank, found.group) == (2, 1, 2)
    assert sharded_share(sharded([])).pieces == ()


@pytest.mark.parametrize(
    "tensor",
    [
        sharded([own([2, 0])]),
        sharded([own(sizes=[3, 4])]),
        sharded([own([-1, 0])]),
        sharded([own(tensor=stored((4, 2)))]),
        sharded([own(tensor=stored((2, 4), "BF16"))]),
        sharded([own(tensor=3)]),
        sharded([own()], size=(6, 4)),
        sharded([own()], every=[metadata([0, 0], [3, 4])]),
        sharded([own()], every={}),
        sharded([own()], group=GROUP | {"global_rank": 2}),
        sharded([own()], group=GROUP | {"local_world_size": 3}),
        sharded([own()], group=GROUP | {"global_world_size": 1 << 40}),
        sharded([own()], group={}),
        sharded((own(),)),
        sharded([own()], fields=4),
    ],
)
def test_what_does_not_fit_together_is_corrupt(tensor: Wrapped) -> None:
    with pytest.raises(Corrupt):
        sharded_share(tensor)


def test_getattr_reaches_one_class_and_nothing_else() -> None:
    reach = ALLOWED[Name("__builtin__", "getattr")]
    assert reach(Name("", ""), (SHARDED_TENSOR, "ProcessGroupState")) is SHARDED_TENSOR  # type: ignore[call-arg]
    for args in [
        (SHARDED_TENSOR, "__class__"),
        (Name("os", "x"), "ProcessGroupState"),
        (SHARDED_TENSOR,),
        (),
    ]:
        with pytest.raises(Corrupt, match="getattr"):
            reach(Name("", ""), args)  # type: ignore[call-arg]
