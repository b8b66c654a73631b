"""Files of weights made each for itself, as tasks of a cluster make them: the same bytes, the same notes, and damage that no single task sees is seen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from ckptsync.digest import digest
from ckptsync.errors import ConfigError, Corrupt, Incomplete
from ckptsync.merge import ray
from ckptsync.merge.consolidate import UNKEPT, Merged, carry_out
from ckptsync.merge.copying import Copied, Work
from ckptsync.merge.local import carry_out_local, prepare_local
from ckptsync.merge.plan import Options
from ckptsync.merge.prepare import prepare
from ckptsync.merge.ray import Done, RayEngine, Reach, make, part_of
from ckptsync.merge.reaching import reach
from ckptsync.merge.summed import SummedFiles
from ckptsync.model import Files
from ckptsync.stores.trees import Access
from tests.consolidated import Written
from tests.plain_files import MemoryFiles, tree
from tests.vector import vector

NAMES = ("hf-zero3-2node", "hf-fsdp2-2node", "raw-ds-zero2-bf16-tied")
OPTIONS = Options("fp32", 4000)


def by_tasks(files: Files, options: Options = OPTIONS, tasks_files: Files | None = None) -> tuple[Mapping[str, bytes], Merged]:
    """As the engine does, without a cluster: each part by itself, then what they say of it together."""
    job, written = prepare(files, options), Written()
    reached = Reach(lambda: tasks_files or files, lambda: written.write)

    def engine(_job: object, own: Files, _write: object, /, **_: object) -> dict[str, Copied]:
        summed = SummedFiles(own, job.checksums)
        made = {p.name: ray._taken(make(part_of(p, Work()), reached, lambda _: None), summed) for p in reversed(job.plans)}
        summed.finish()
        return made

    return written, carry_out(job, files, written.write, ledger=UNKEPT, engine=engine)


@pytest.mark.parametrize("name", NAMES)
def test_what_tasks_make_is_what_one_process_makes(name: str) -> None:
    files = tree(*vector(name).sources)
    wanted = Written()
    merged = carry_out(prepare(files, OPTIONS), files, wanted.write)
    assert by_tasks(files) == (wanted, merged)
    assert len(wanted) > 5


@pytest.mark.parametrize("name", NAMES)
def test_damage_in_records_that_several_tasks_read_is_found(name: str) -> None:
    files = tree(*vector(name).sources)
    extents = sorted({part.extent for p in prepare(files, OPTIONS).plans for t in p.tensors for part in t.copy.parts})
    for extent in extents[:: max(1, len(extents) // 8)]:
        damaged = bytearray(files.content[extent.file])
        damaged[extent.start + extent.size // 2] ^= 0x10
        with pytest.raises(Corrupt, match="CRC32"):
            by_tasks(files, tasks_files=MemoryFiles({**files.content, extent.file: bytes(damaged)}))


def test_a_task_says_what_went_wrong_and_does_not_raise() -> None:
    files = tree(*vector(NAMES[0]).sources)
    job = prepare(files, OPTIONS)

    def gone() -> Files:
        raise Incomplete("node1: gone")

    def broken() -> Files:
        raise KeyError("ours")

    part, write = part_of(job.plans[0], Work()), lambda: Written().write
    assert str(make(part, Reach(gone, write), lambda _: None).error) == "node1: gone"
    assert isinstance(make(part, Reach(broken, write, (KeyError,)), lambda _: None).error, KeyError)
    with pytest.raises(KeyError):
        make(part, Reach(broken, write), lambda _: None)
    other = make(replace(part, version="0.0.1"), Reach(gone, write), lambda _: None).error
    assert isinstance(other, ConfigError)
    assert "0.0.1 here" in str(other)
    with pytest.raises(Incomplete, match="gone"):
        ray._taken(Done(error=Incomplete("gone")), SummedFiles(files, ()))


def test_bytes_made_are_told_now_and_then() -> None:
    told: list[int] = []
    passed = ray._counted(told.append)
    for _ in range(100):
        passed(1 << 20)
    assert told == [32 << 20, 64 << 20, 96 << 20]


def test_how_far_each_task_is_stands_on_a_board() -> None:
    board = ray.Board()
    board.set("a", 5)
    board.set("b", 1)
    board.set("a", 2)  # begun again
    assert board.all() == {"a": 2, "b": 1}


def test_without_a_cluster_it_is_said_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"Ray (is not installed|cluster 127)") as e, ray.connected("127.0.0.1:1"):
        pass
    assert "ckptsync[ray]" in e.value.hint or "ray start" in e.value.hint


def test_on_a_real_cluster_the_files_are_the_same(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    sources = vector(NAMES[0]).sources
    carry_out_local(prepare_local(sources, tmp_path / "local", OPTIONS, judge=lambda *_: None))
    prepared = prepare_local(sources, tmp_path / "ray", OPTIONS, judge=lambda *_: None)
    told: list[tuple[int, int]] = []
    engine = lambda at: RayEngine("local", reach(prepared, Access(), at))  # noqa: E731
    carry_out_local(prepared, lambda *at: told.append(at), engine=engine)
    assert {p.name: digest(p.read_bytes()) for p in (tmp_path / "ray").iterdir()} == {
        p.name: digest(p.read_bytes()) for p in (tmp_path / "local").iterdir()
    }
    assert told
