"""Wrapped tensors as their pickles rebuild them.

ShardedTensors: a list of all shards, and the rank's own.
"""

from __future__ import annotations

from typing import Any

import pytest

from ckptsync.errors import Corrupt
from ckptsync.formats.torch_pickle import Wrapped
from ckptsync.layouts.sharded_tensors import SHARDED_TENSOR, sharded_share
from tests.support.pickle_writer import made, stored

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
