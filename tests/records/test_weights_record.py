"""Which records are of a model's tensors, whoever wrote them."""

import msgspec
import pytest

from ckptsync.records.model_record import ModelTensor
from ckptsync.records.weights_record import (
    TensorValues,
    WeightsRecord,
    find_values,
    tensors_digest,
)

MOST = 2**63 - 1
PLAIN: TensorValues = (1, 1, 4, -1.0, 1.0, 2.0)


@pytest.mark.parametrize(
    ("shape", "values", "is_taken"),
    [
        ((2, 3), (PLAIN,), True),
        ((2, 3), (None,), True),
        ((), ((0, 0, 1, 0.0, 0.0, 0.0),), True),
        ((MOST, MOST, 0), ((0, 0, 0, None, None, None),), True),
        ((2, 2), (PLAIN,), False),  # more values than elements
        ((2, 3), (PLAIN, PLAIN), False),
        ((2, 3), ((MOST, MOST, MOST, None, None, None),), False),
        ((MOST, MOST), ((MOST, 0, 0, None, None, None),), False),
        ((MOST,) * 100_000, (PLAIN,), False),  # a product of 800 KB
    ],
)
def test_a_record_counts_no_more_values_than_a_tensor_has(
    shape: tuple[int, ...], values: tuple[TensorValues | None, ...], *, is_taken: bool
) -> None:
    tensors = [ModelTensor("lm_head.weight", "F32", shape, "model.safetensors", 0, 8, "")]
    key = ("run", "checkpoint-1", "checkpoint-1", 0, tensors_digest(tensors))
    found = find_values(tensors, {"name": WeightsRecord(*key, values)})
    assert (found is not None) == is_taken
    msgspec.msgpack.encode(found)  # as the cache does
