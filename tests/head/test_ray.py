"""Models made by tasks that reach the store by themselves: the same files, the same model record,
and the same care.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

import ckptsync
from ckptsync.errors import Corrupt
from ckptsync.head.consolidate import HeadOptions, RayCluster, consolidate_location
from ckptsync.merger import ray_engine
from ckptsync.merger.engine import Destination, Engine, WrittenFile
from ckptsync.merger.plan import MergeOptions, MergeResources
from ckptsync.merger.prepare import MergeJob
from ckptsync.records.location_status import LocationState
from ckptsync.stores.contract import About
from ckptsync.stores.opening import create_store
from ckptsync.tensors import Files
from tests.support.small_store import SHARD, flip
from tests.support.worker_in_process import push_now

DATA = Path(ckptsync.__file__).parent / "demo_data"
OPTIONS = MergeOptions("bf16", 4000)


class Here(RayCluster):
    """Its tasks, without a cluster: each opens the store anew."""

    def engine(self, seen: LocationState, prefix: str, abouts: Mapping[str, About]) -> Engine:  # type: ignore[override]
        reach = super().engine(seen, prefix, abouts)._reach

        def made(
            job: MergeJob, files: Files, into: Destination, *_: object
        ) -> dict[str, WrittenFile]:
            version, work = ckptsync.__version__, MergeResources()
            tasks = (
                (p.name, ray_engine.run_task(p, work, version, reach, lambda _: None))
                for p in job.plans
            )
            return ray_engine.collect(tasks, job, files, into)

        return made


@pytest.fixture(scope="module")
def arrived(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store")
    store = create_store(str(path))
    for node in ("node0", "node1"):
        push_now(DATA / "fsdp2" / node, store, node, "fsdp2")
    return path


def models(store: Path) -> dict[str, bytes]:
    """The model and its model record."""
    found = [*(store / "fsdp2/consolidated").rglob("*"), *store.rglob("model-*")]
    return {str(p.relative_to(store)): p.read_bytes() for p in found if p.is_file()}


def consolidated(
    arrived: Path, tmp_path: Path, where: type[RayCluster] | None, address: str = ""
) -> dict[str, bytes]:
    store = tmp_path / (where.__name__ if where else "plain")
    shutil.copytree(arrived, store)
    cluster = where(address, str(store)) if where else None
    consolidate_location(
        create_store(str(store)), "fsdp2", "checkpoint-4", HeadOptions(OPTIONS, cluster=cluster)
    )
    return models(store)


def test_the_model_and_its_model_record_are_those_of_one_process(
    arrived: Path, tmp_path: Path
) -> None:
    found = consolidated(arrived, tmp_path, Here)
    assert found == consolidated(arrived, tmp_path, None)
    (model_record,) = (json.loads(data) for name, data in found.items() if "/model-0-" in name)
    assert len(model_record["files"]) > 3
    assert all(t["digest"] for t in model_record["tensors"])


def test_bytes_that_no_node_has_sent_are_not_believed_by_a_task_either(
    arrived: Path, tmp_path: Path
) -> None:
    store = tmp_path / "damaged"
    shutil.copytree(arrived, store)
    flip(store / "fsdp2" / SHARD)
    with pytest.raises(Corrupt, match="not those that its node sent"):
        consolidate_location(
            create_store(str(store)),
            "fsdp2",
            "checkpoint-4",
            HeadOptions(OPTIONS, cluster=Here("", str(store))),
        )
    assert not [name for name in models(store) if "/model-" in name]


def test_what_lies_in_the_way_of_a_task_is_removed_where_nothing_binds_it(
    arrived: Path, tmp_path: Path
) -> None:
    wanted = consolidated(arrived, tmp_path, None)
    there = arrived / next(
        name
        for name in wanted
        if name.endswith("-00002-of-00006.safetensors") or "-00002-of-" in name
    )
    there.parent.mkdir(parents=True)
    there.write_bytes(b"somebody else's")
    try:
        assert consolidated(arrived, tmp_path, Here) == wanted
    finally:
        shutil.rmtree(arrived / "fsdp2/consolidated")


def test_on_a_real_cluster_it_is_the_same(arrived: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    assert consolidated(arrived, tmp_path, RayCluster, "local") == consolidated(
        arrived, tmp_path, None
    )


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    assert "s3cret" not in repr(RayCluster("auto", str(tmp_path), {"secret": "s3cret"}))
