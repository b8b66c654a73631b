"""From files to a model, through a function that writes."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptsync.errors import Corrupt, StoreError
from ckptsync.merger import engine, read_units
from ckptsync.merger.engine import Abandoned, Destination, write_model
from ckptsync.merger.plan import DTYPES, DType, MergeOptions, MergeResources
from ckptsync.merger.prepare import prepare
from ckptsync.merger.tensor_statistics import Statistics
from ckptsync.stores.contract import Chunk
from ckptsync.tensors import Extent
from tests.support.files_in_memory import Counting, MemoryFiles, safetensors_file, tree
from tests.support.merge_in_memory import FILES, Written, consolidate, run
from tests.support.vector import vector


def test_weights_come_first_the_configuration_late_and_the_index_last() -> None:
    written, merged = run(MemoryFiles(FILES), MergeOptions(max_shard_size=8))
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    assert list(written) == [
        *names,
        "tokenizer.json",
        "config.json",
        "model.safetensors.index.json",
    ]
    assert [f.path for f in merged.files] == list(written)
    assert merged.source == "whole:."


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_the_same_input_gives_the_same_bytes_whatever_else_lies_there(data: st.DataObject) -> None:
    of = vector(data.draw(st.sampled_from(["hf-fsdp2-2node", "hf-zero2", "raw-ds-zero3-tied"])))
    options = MergeOptions(
        data.draw(st.sampled_from(DTYPES)), data.draw(st.integers(1000, 100_000))
    )
    files, other = tree(*of.sources), tree(*of.sources[::-1])
    other.content = dict(sorted(other.content.items(), reverse=True)) | {
        "rng_state_99.pth": b"",
        "x/y": b"",
    }
    assert run(files, options) == run(other, options)


def test_progress_ends_at_the_whole() -> None:
    counts: list[tuple[int, int]] = []
    files, written = MemoryFiles(FILES), Destination(Written().write)
    job = prepare(files, MergeOptions())
    write_model(job, files, written, lambda done, total: counts.append((done, total)))
    assert counts == sorted(counts)
    assert {total for _, total in counts} == {job.size}
    assert counts[-1][0] == 16


VECTORS = ["hf-fsdp1", "hf-zero3-2node", "raw-ds-zero2-bf16-tied", "hf-fsdp2-2node"]


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """So that the small models of these tests have many; and no thread may be left."""
    monkeypatch.setattr(read_units, "WINDOW", 4096)
    before = threading.active_count()
    yield
    assert threading.active_count() <= before


@pytest.mark.usefixtures("small_units")
@pytest.mark.parametrize("dtype", ["auto", "fp16"])
@pytest.mark.parametrize("name", VECTORS)
def test_any_number_of_threads_writes_the_same(name: str, dtype: DType) -> None:
    files, options = tree(*vector(name).sources), MergeOptions(dtype, 20_000)
    alone = run(files, options, work=MergeResources(1, statistics=True))
    for jobs in (2, 5, 16):
        assert run(files, options, work=MergeResources(jobs, statistics=True)) == alone


@pytest.mark.usefixtures("small_units")
@pytest.mark.parametrize("jobs", [1, 4])
@pytest.mark.parametrize("name", ["hf-fsdp1", "raw-ds-zero2-bf16-tied"])
def test_next_to_nothing_is_read_that_is_not_wanted_and_every_record_is_summed_once(
    name: str, jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Counting(tree(*vector(name).sources).content)
    job = prepare(files, MergeOptions("keep"))
    summed: list[int] = []
    crc32 = zlib.crc32

    def counted(data: memoryview, before: int = 0) -> int:
        summed.append(len(data))
        return crc32(data, before)

    monkeypatch.setattr("ckptsync.merger.container_crcs.crc32", counted)
    files.reads.clear()
    write_model(job, files, Destination(Written().write), work=MergeResources(jobs))
    wanted = [part.extent for plan in job.plans for t in plan.tensors for part in t.copy.parts]
    read = bytes_of(Extent(*each) for each in files.reads if each[0] in job.reads)
    needed = bytes_of(wanted)
    assert needed <= read
    again = sum(size for n, _, size in files.reads if n in job.reads) - len(read)
    assert again == sum(e.size for e in wanted) - len(needed), (
        "what is written twice, under two names, is read twice"
    )
    assert sum(summed) == len(bytes_of(c.extent for c in job.checksums))


def bytes_of(extents: Iterable[Extent]) -> set[tuple[str, int]]:
    return {(e.file, at) for e in extents for at in range(e.start, e.start + e.size)}


@pytest.mark.usefixtures("small_units")
@pytest.mark.parametrize("jobs", [1, 8])
@pytest.mark.parametrize(
    "name", ["hf-zero3-2node", "hf-fsdp1", "raw-ds-zero2-bf16-tied", "acc-ranks-fsdp1"]
)
def test_a_flipped_bit_in_any_tensor_that_is_read_stops_a_merge(name: str, jobs: int) -> None:
    files = tree(*vector(name).sources)
    job = prepare(files, MergeOptions("keep", 20_000))
    extents = sorted({p.extent for plan in job.plans for t in plan.tensors for p in t.copy.parts})
    for extent in extents[:: max(1, len(extents) // 8)]:
        damaged = bytearray(files.content[extent.file])
        damaged[extent.start + extent.size - 1] ^= 0x80
        others = MemoryFiles({**files.content, extent.file: bytes(damaged)})
        with pytest.raises(Corrupt, match="CRC32"):
            write_model(job, others, Destination(Written().write), work=MergeResources(jobs))


@pytest.mark.usefixtures("small_units")
@pytest.mark.parametrize("error", [StoreError("full"), KeyboardInterrupt()])
@pytest.mark.parametrize("jobs", [1, 2, 8])
def test_an_error_of_one_files_write_is_raised_once_and_stops_the_others(
    jobs: int, error: BaseException
) -> None:
    files = tree(*vector("hf-fsdp1").sources)
    ended: list[str] = []

    def write(name: str, chunks: Iterable[Chunk]) -> None:
        try:
            for number, _ in enumerate(chunks):
                if "00002-of" in name and number == 1:
                    raise error
        finally:
            ended.append(name)

    with pytest.raises(type(error)) as raised:
        consolidate(files, write, MergeOptions("keep", 20_000), work=MergeResources(jobs))
    assert raised.value is error
    assert 2 <= len(ended) <= max(2, jobs // 2 + 1)


@pytest.mark.usefixtures("small_units")
def test_files_that_are_written_beside_one_that_failed_are_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(read_units, "WINDOW", 64)
    monkeypatch.setattr(engine, "ALIGN", 16)
    given_up: list[str] = []
    both = threading.Barrier(2)

    def write(name: str, chunks: Iterable[Chunk]) -> None:
        both.wait()
        if "00001-of" not in name:
            raise StoreError("full")
        with pytest.raises(Abandoned):  # noqa: PT012 - at one of hundreds of chunks
            for _ in chunks:
                time.sleep(0.2)
        given_up.append(name)
        raise Abandoned

    job = prepare(tree(*vector("hf-fsdp1").sources), MergeOptions("keep", 20_000))
    with pytest.raises(StoreError, match="full"):
        write_model(
            replace(job, plans=job.plans[:2]),
            tree(*vector("hf-fsdp1").sources),
            Destination(write),
            work=MergeResources(4),
        )
    assert len(given_up) == 1


def test_statistics_are_of_the_values_that_were_written_and_types_without_any_are_said() -> None:
    values = np.array([1.5, -2, np.nan, 1e9, 0], "<f4")
    content = {
        "w": ("F32", (5,), values.tobytes()),
        "q": ("F8_E4M3", (2,), b"ab"),
        "c": ("C64", (1,), bytes(8)),
        "n": ("I64", (), b"\x07" + bytes(7)),
        "z": ("F32", (3,), bytes(12)),
    }
    files = MemoryFiles({"model.safetensors": safetensors_file(content)})
    _, merged = run(files, MergeOptions("fp16"), work=MergeResources(statistics=True))
    assert merged.statistics == {
        "w": Statistics(5, -2.0, 1.5, 6.25, 1, 1, 1),
        "q": Statistics(2, 36.0, 40.0, 2896.0),
        "n": Statistics(1, 7, 7),
        "z": Statistics(3, 0.0, 0.0, 0.0, zeros=3),
    }
    assert "z: all 3 values are zero" in merged.notes
    assert [note for note in merged.notes if "have no statistics" in note] == [
        "1 tensors of C64 have no statistics: ckptsync does not support this type there"
    ]
    assert run(files)[1].statistics is None
