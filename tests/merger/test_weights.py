"""What is streamed is what numpy would have gathered and cast, whatever the window."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from blake3 import blake3
from hypothesis import HealthCheck, given, settings

from ckptsync.merger import cast, engine, read_units
from ckptsync.merger.engine import ALIGN, WeightsFile
from ckptsync.merger.plan import DType, FilePlan, MergeOptions, MergeResources, plan
from ckptsync.tensors import Copy, Extent, Files, Part, Tensor
from tests.support.files_in_memory import MemoryFiles
from tests.support.random_boxes import stored

Stored = tuple[npt.NDArray[Any], Copy, MemoryFiles]


@pytest.fixture(params=[2, 6, 64, 2 << 20])
def window(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(read_units, "WINDOW", request.param)
    monkeypatch.setattr(cast, "CAST_ELEMENTS", max(1, request.param // 4))
    monkeypatch.setattr(engine, "CAST_ELEMENTS", max(1, request.param // 4))
    return int(request.param)


def planned(copy: Copy, dtype: DType = "keep", own: str = "BF16") -> FilePlan:
    (found,) = plan([Tensor("w", own, copy.grid, (copy,))], MergeOptions(dtype))
    return found


def streamed(
    plan: FilePlan, files: Files, work: MergeResources | None = None
) -> tuple[bytes, WeightsFile, list[int]]:
    done: list[int] = []
    file = WeightsFile(plan, files, done.append, work or MergeResources())
    return b"".join(map(bytes, file.chunks())), file, done


# the window stays for all examples
FIXED = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@FIXED
@given(stored())
def test_bytes_are_those_that_numpy_gathers_and_a_cast_is_the_cast_of_the_whole(
    window: int, held: Stored
) -> None:
    values, copy, files = held
    plan = planned(copy)
    data, copied, done = streamed(plan, files)
    assert data == plan.header + values.tobytes()
    assert copied.result().digest == blake3(data).hexdigest()
    assert [(t.name, t.digest) for t in copied.result().tensors] == [
        ("w", blake3(values.tobytes()).hexdigest())
    ]
    assert sum(done) == values.nbytes
    assert max(done, default=0) <= 2 * window
    plan = planned(copy, "fp32")
    with np.errstate(invalid="ignore"):
        wanted = values.view(ml_dtypes.bfloat16).astype("<f4")
    assert streamed(plan, files)[0] == plan.header + wanted.tobytes()


@pytest.mark.parametrize("strides", [(0, 1), (1, 0), (0, 0), (1, 2), (2, 1), (1, 1)])
def test_expanded_and_overlapping_views_are_written_out(strides: tuple[int, int]) -> None:
    data = np.arange(12, dtype="<u2")
    part = Part((0, 0), (3, 2), Extent("f", 4, 2 * (1 + 2 * strides[0] + strides[1])), strides)
    wanted = [data[2 + r * strides[0] + c * strides[1]] for r in range(3) for c in range(2)]
    plan = planned(Copy("BF16", (3, 2), (part,)))
    assert (
        streamed(plan, MemoryFiles({"f": data.tobytes()}))[0][len(plan.header) :]
        == np.array(wanted, "<u2").tobytes()
    )


FLOATS = np.arange(1, 25, dtype="<f4") * 1e4  # the later half is too large for F16
JOBS = [1, 2, 3, 8]


def flat(dtype: DType, *sizes: int) -> FilePlan:
    """Tensors of F32 that follow each other in one file."""
    starts = np.cumsum((0, *sizes))
    copies = [
        Copy("F32", (n,), (Part((0,), (n,), Extent("f", 4 * int(at), 4 * n)),))
        for n, at in zip(sizes, starts, strict=False)
    ]
    (found,) = plan(
        [Tensor(f"t{n}", "F32", copy.grid, (copy,)) for n, copy in enumerate(copies)],
        MergeOptions(dtype),
    )
    return found


def test_overflows_and_statistics_are_each_tensors_own_where_neighbours_are_cast_at_once() -> None:
    files = MemoryFiles({"f": FLOATS.tobytes()})
    data, file, _ = streamed(flat("fp16", 5, 0, 4, 15), files, MergeResources(statistics=True))
    found = file.result()
    became = "finite values became infinite in the cast"
    assert found.notes == (f"t2: 3 {became}", f"t3: 15 {became}")
    counted = {name: one.infinities for name, one in found.statistics.items()}
    assert counted == {"t0": 0, "t2": 3, "t3": 15}
    with np.errstate(over="ignore"):
        narrow = FLOATS.astype("<f2")
    assert data.endswith(narrow.tobytes())
    pieces = (narrow[:5], narrow[:0], narrow[5:9], narrow[9:])
    assert [t.digest for t in found.tensors] == [
        blake3(piece.tobytes()).hexdigest() for piece in pieces
    ]
    assert {
        t.digest
        for t in streamed(flat("fp16", 24), files, MergeResources(tensor_digests=False))[1]
        .result()
        .tensors
    } == {""}


@pytest.mark.parametrize("jobs", JOBS)
def test_chunks_begin_and_end_where_a_disk_can_write_from_and_memory_is_used_again(
    jobs: int,
) -> None:
    plan_, places, at = flat("keep", 5 << 20), set(), 0
    file = WeightsFile(
        plan_, MemoryFiles({"f": bytes(20 << 20)}), lambda _: None, MergeResources(jobs)
    )
    for chunk in file.chunks():
        address = np.frombuffer(chunk, "u1").ctypes.data
        places.add(address)
        assert at % ALIGN == address % ALIGN == 0
        at += len(chunk)
    assert at == plan_.size
    assert len(places) < 5 or jobs > 2


class Watched(MemoryFiles):
    """Files that count the reads, and raise at one of them."""

    def __init__(
        self, content: dict[str, bytes], wrong: int = 0, error: BaseException | None = None
    ) -> None:
        super().__init__(content)
        self.count, self._wrong, self._error = 0, wrong, error

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        self.count += 1
        if self._error and self.count == self._wrong:
            raise self._error
        super().read_into(name, start, out)


@pytest.fixture
def many_units(monkeypatch: pytest.MonkeyPatch) -> Iterator[FilePlan]:
    """A file of 100 units; whatever happens, no thread may be left."""
    monkeypatch.setattr(read_units, "WINDOW", 64)
    monkeypatch.setattr(engine, "ALIGN", 16)
    before = threading.active_count()
    yield flat("keep", 1600)
    assert threading.active_count() <= before


@pytest.mark.parametrize("jobs", JOBS)
def test_no_more_is_read_than_the_windows_allow(jobs: int, many_units: FilePlan) -> None:
    files = Watched({"f": bytes(6400)})
    for window, most in ((128, jobs), (64, max(1, jobs // 2)), (1, 1)):
        files.count = written = 0
        file = WeightsFile(many_units, files, lambda _: None, MergeResources(jobs, window=window))
        for chunk in file.chunks():
            written += len(chunk)
            assert files.count <= most + 2 + (written - len(many_units.header)) // 64
    assert files.count == 100


@pytest.mark.parametrize("jobs", JOBS)
def test_units_of_few_bytes_count_as_the_windows_that_they_lie_in(
    jobs: int, many_units: FilePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_units, "MOST_READS", 1)
    plan_, files, written = flat("keep", *[1] * 100), Watched({"f": bytes(400)}), 0
    file = WeightsFile(plan_, files, lambda _: None, MergeResources(jobs, window=128))
    for chunk in file.chunks():
        written += len(chunk)
        made = max(0, written - len(plan_.header)) // 4
        assert files.count <= jobs + 2 + engine.ALIGN // 4 + made
    assert files.count == 100


@pytest.mark.parametrize("error", [OSError(5, "x"), KeyboardInterrupt(), SystemExit(3)])
@pytest.mark.parametrize("jobs", JOBS)
def test_an_error_in_any_thread_is_raised_as_it_is(
    jobs: int, error: BaseException, many_units: FilePlan
) -> None:
    with pytest.raises(type(error)) as raised:
        streamed(many_units, Watched({"f": bytes(6400)}, 50, error), MergeResources(jobs))
    assert raised.value is error


@pytest.mark.parametrize("jobs", JOBS)
def test_who_stops_early_leaves_no_thread(jobs: int, many_units: FilePlan) -> None:
    files = Watched({"f": bytes(6400)})
    chunks = WeightsFile(
        many_units, files, lambda _: None, MergeResources(jobs, window=128)
    ).chunks()
    next(chunks)
    chunks.close()
    assert files.count < 90
