"""What is streamed is what numpy would have gathered and cast, whatever the window."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptsync.errors import Corrupt
from ckptsync.merge import making, units
from ckptsync.merge.copying import Copying
from ckptsync.merge.plan import DType, FilePlan, Options, plan
from ckptsync.model import Copy, Extent, Files, Part, Tensor
from tests.boxes import stored
from tests.plain_files import MemoryFiles

Stored = tuple[npt.NDArray[Any], Copy, MemoryFiles]


@pytest.fixture(params=[2, 6, 64, 2 << 20])
def window(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(units, "WINDOW", request.param)
    monkeypatch.setattr(units, "MOST", 2 * request.param)
    monkeypatch.setattr(making, "CAST_ELEMENTS", max(1, request.param // 4))
    return int(request.param)


def planned(copy: Copy, dtype: DType = "keep", own: str = "BF16") -> FilePlan:
    (found,) = plan([Tensor("w", own, copy.grid, (copy,))], Options(dtype))
    return found


def streamed(plan: FilePlan, files: Files) -> tuple[bytes, Copying, list[int]]:
    done: list[int] = []
    copying = Copying(plan, files, done.append)
    return b"".join(map(bytes, copying.chunks())), copying, done


FIXED = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)  # the window stays for all examples


@FIXED
@given(stored())
def test_bytes_are_those_that_numpy_gathers(window: int, held: Stored) -> None:
    values, copy, files = held
    plan = planned(copy)
    data, copied, done = streamed(plan, files)
    assert data == plan.header + values.tobytes()
    assert copied.result().digest == blake3(data).hexdigest()
    assert [(t.name, t.digest) for t in copied.result().tensors] == [("w", blake3(values.tobytes()).hexdigest())]
    assert sum(done) == values.nbytes
    assert max(done, default=0) <= 2 * window


@FIXED
@given(stored())
def test_a_cast_is_the_cast_of_the_whole(window: int, held: Stored) -> None:
    values, copy, files = held
    plan = planned(copy, "fp32")
    with np.errstate(invalid="ignore"):
        wanted = values.view(ml_dtypes.bfloat16).astype("<f4")
    assert streamed(plan, files)[0] == plan.header + wanted.tobytes()


@FIXED
@given(stored())
def test_no_more_is_read_of_row_major_parts_than_is_wanted(window: int, held: Stored) -> None:
    values, copy, files = held
    streamed(planned(copy), files)
    if all(part.strides is None for part in copy.parts):
        assert files.read == values.nbytes


@pytest.mark.parametrize("strides", [(0, 1), (1, 0), (0, 0), (1, 2), (2, 1), (1, 1)])
def test_expanded_and_overlapping_views_are_written_out(strides: tuple[int, int]) -> None:
    data = np.arange(12, dtype="<u2")
    part = Part((0, 0), (3, 2), Extent("f", 4, 2 * (1 + 2 * strides[0] + strides[1])), strides)
    wanted = [data[2 + r * strides[0] + c * strides[1]] for r in range(3) for c in range(2)]
    plan = planned(Copy("BF16", (3, 2), (part,)))
    assert streamed(plan, MemoryFiles({"f": data.tobytes()}))[0][len(plan.header) :] == np.array(wanted, "<u2").tobytes()


def test_finite_values_that_become_infinite_are_counted_by_tensor(window: int) -> None:
    data = np.array([1e5, 2, -1e30, np.inf, np.nan], "<f4").tobytes()
    copy = Copy("F32", (5,), (Part((0,), (5,), Extent("f", 0, 20)),))
    (plan_,) = plan([Tensor(n, "F32", (5,), (copy,)) for n in "ab"], Options("fp16"))
    _, copied, _ = streamed(plan_, MemoryFiles({"f": data}))
    assert [t.overflows for t in copied.result().tensors] == [2, 2]


def test_a_file_that_became_shorter_is_corrupt() -> None:
    copy = Copy("F32", (5,), (Part((0,), (5,), Extent("f", 0, 20)),))
    with pytest.raises(Corrupt, match="too short"):
        streamed(planned(copy, own="F32"), MemoryFiles({"f": bytes(19)}))


@given(st.integers(1, 5))
def test_several_tensors_follow_each_other_without_holes(count: int) -> None:
    copies = [Copy("U8", (n,), (Part((0,), (n,), Extent("f", n, n)),)) for n in range(count)]
    (plan_,) = plan([Tensor(str(n), "U8", c.grid, (c,)) for n, c in enumerate(copies)], Options())
    data, _, _ = streamed(plan_, MemoryFiles({"f": bytes(range(50))}))
    assert data[len(plan_.header) :] == b"".join(bytes(range(n, 2 * n)) for n in range(count))
    assert len(data) == plan_.size
