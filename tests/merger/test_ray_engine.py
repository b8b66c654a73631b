"""Files of weights made by tasks: the same bytes, notes and errors as in one process."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ckptsync import __version__
from ckptsync.errors import ConfigError, Corrupt, Incomplete
from ckptsync.install_commands import install_extra
from ckptsync.merger import ray_engine
from ckptsync.merger.engine import Destination, MergeResult, WrittenFile, write_model
from ckptsync.merger.inputs import MergeRequest, open_sources
from ckptsync.merger.joined_files import FILL
from ckptsync.merger.plan import MergeOptions, MergeResources
from ckptsync.merger.prepare import MergeJob, prepare
from ckptsync.merger.ray_engine import TaskAccess, collect, run_task, task_access
from ckptsync.stores.limits import Limits, TokenBucket, parse_schedule
from ckptsync.stores.opening import Access
from ckptsync.tensors import Files
from tests.support.files_in_memory import MemoryFiles, tree, write_files
from tests.support.merge_in_memory import FILES, Written
from tests.support.vector import vector

NAMES = ("hf-zero3-2node", "hf-fsdp2-2node", "raw-ds-zero2-bf16-tied")
OPTIONS = MergeOptions("fp32", 4000)


def by_tasks(
    files: Files, options: MergeOptions = OPTIONS, tasks_files: Files | None = None
) -> tuple[Mapping[str, bytes], MergeResult]:
    """As the engine does, without a cluster: each part by itself, then what they say of it
    together.
    """
    job, written = prepare(files, options), Written()
    reached = TaskAccess(lambda: tasks_files or files, lambda: written.write)

    def engine(job: MergeJob, own: Files, into: Destination, *_: object) -> dict[str, WrittenFile]:
        tasks = (
            (p.name, run_task(p, MergeResources(), __version__, reached, lambda _: None))
            for p in reversed(job.plans)
        )
        return collect(tasks, job, own, into)

    return written, write_model(job, files, Destination(written.write), engine=engine)


@pytest.mark.parametrize("name", NAMES)
def test_what_tasks_make_is_what_one_process_makes(name: str) -> None:
    files = tree(*vector(name).sources)
    wanted = Written()
    merged = write_model(prepare(files, OPTIONS), files, Destination(wanted.write))
    assert by_tasks(files) == (wanted, merged)
    assert len(wanted) > 5


@pytest.mark.parametrize("name", NAMES)
def test_damage_in_records_that_several_tasks_read_is_found(name: str) -> None:
    files = tree(*vector(name).sources)
    extents = sorted(
        {
            part.extent
            for p in prepare(files, OPTIONS).plans
            for t in p.tensors
            for part in t.copy.parts
        }
    )
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

    write = lambda: Written().write  # noqa: E731

    def result(reach: TaskAccess, version: str = __version__) -> object:
        return run_task(job.plans[0], MergeResources(), version, reach, lambda _: None)

    assert str(result(TaskAccess(gone, write))) == "node1: gone"
    assert isinstance(result(TaskAccess(broken, write, (KeyError,))), KeyError)
    with pytest.raises(KeyError):
        result(TaskAccess(broken, write))
    other = result(TaskAccess(gone, write), "0.0.1")
    assert isinstance(other, ConfigError)
    assert "0.0.1 here" in str(other)
    with pytest.raises(Incomplete, match="gone"):
        collect([("a", Incomplete("gone"))], job, files, Destination(Written().write))


def test_without_a_cluster_it_is_said_what_to_do() -> None:
    with (
        pytest.raises(ConfigError, match=r"Ray (is not installed|cluster 127)") as e,
        ray_engine.connect("127.0.0.1:1"),
    ):
        pass
    assert install_extra("ray") in e.value.hint or "ray start" in e.value.hint


def handed(tmp_path: Path, target: Path, access: Access, **models: Any) -> TaskAccess:
    """Return what a task gets in another process."""
    source = write_files(tmp_path / "source", FILES)
    request = MergeRequest([source], tmp_path / "out", MergeOptions(), **models)
    made = task_access(open_sources(request, access), access, target)
    return pickle.loads(pickle.dumps(made))  # type: ignore[no-any-return]


def test_a_task_opens_what_was_planned_from_and_writes_where_it_was_told(tmp_path: Path) -> None:
    model = write_files(tmp_path / "model", {"model.safetensors": FILES["model.safetensors"]})
    reach = handed(tmp_path, tmp_path, Access(), fill_from=model)
    assert set(reach.files().sizes()) == {*FILES, f"{FILL}model.safetensors"}
    reach.write()("a", [b"12", b"3"])
    assert (tmp_path / "a").read_bytes() == b"123"


def test_other_files_under_the_same_path_are_refused(tmp_path: Path) -> None:
    reach = handed(tmp_path, tmp_path, Access())
    (tmp_path / "source/model.safetensors").write_bytes(FILES["model.safetensors"] + b" ")
    with pytest.raises(Incomplete, match="not the files that the merge was planned for"):
        reach.files()


def test_a_directory_of_another_machine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not on this node"):
        handed(tmp_path, tmp_path / "elsewhere", Access()).write()


def test_of_files_of_weights_the_size_is_known_before(tmp_path: Path) -> None:
    access = Access(limits=Limits(TokenBucket(parse_schedule("100MB/s"))))  # a pace cannot be sent
    with pytest.raises(Incomplete, match="or more, expected"):
        handed(tmp_path, tmp_path, access).write()("model.safetensors", [b"123"])
