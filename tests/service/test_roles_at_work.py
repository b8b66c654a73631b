"""Roles from a configuration, over a real store."""

import shutil
from pathlib import Path

import pytest

import ckptsync
from ckptsync.catalogue.fresh import fresh
from ckptsync.config.loading import read
from ckptsync.config.schema import Config
from ckptsync.errors import ConfigError
from ckptsync.head.consolidate import HeadOptions
from ckptsync.service.periodic import DEBOUNCE
from ckptsync.service.process import Locks
from ckptsync.service.run import begun
from ckptsync.stores.contract import Store
from ckptsync.stores.opening import create_store
from ckptsync.worker.push import push_now
from tests.cli_store import make
from tests.heads import consolidate_due
from tests.ticks import until

# watchdog 7.1 warns, in its own thread, of a directory that is renamed while it begins to watch it, as pins are; it watches it all the same
pytestmark = pytest.mark.filterwarnings("ignore:Callback with id:RuntimeWarning")

DATA = Path(ckptsync.__file__).parent / "demo_data"


def configured(tmp_path: Path, text: str) -> tuple[Config, Store]:
    store = create_store(str(tmp_path / "store"))
    return read(text.format(tmp=tmp_path) + f"store: {{url: {store.url}}}\n", "c", {}), store


def fail(e: BaseException) -> None:
    raise e


BOTH = "roles: [worker, head, verifier]\nworker: {{runs: ['{tmp}/out/*'], quiet: 0, unmarked: 0}}\n"


def test_three_roles_bring_a_checkpoint_from_a_disk_to_verified(tmp_path: Path) -> None:
    config, store = configured(tmp_path, BOTH)
    with begun(config, "n0", store, fail) as working:
        assert [tick.name for tick in working.works] == ["look", "worker", "lane-1", "lane-2", "head", "verifier", "overview"]
        for node in ("node0", "node1"):  # one machine has it all, and the directory appears after the start
            shutil.copytree(DATA / "zero3" / node, tmp_path / "out" / "run", dirs_exist_ok=True)

        def is_verified() -> bool:
            for tick in working.works:
                tick()
            return [(s.run, s.status) for s in fresh(store).readable] == [("run", "VERIFIED")]

        assert until(is_verified, 60)
        assert working.errors() == ()


def test_while_locations_wait_to_be_proved_the_verifier_looks_again_at_once(tmp_path: Path) -> None:
    config, store = configured(tmp_path, "roles: [verifier]\n")
    make(tmp_path / "store")
    (next((tmp_path / "store" / "fsdp2" / ".ckptsync").rglob("report-*"))).unlink()
    push_now(DATA / "zero3" / "node1", store, "node1", "zero3")
    consolidate_due(store, HeadOptions())
    looks: list[str] = []
    with begun(config, "head", store, fail) as working:
        verifier = working.works[0]
        verifier.soon = lambda _: looks.append("soon")
        verifier()
        assert looks == []
        assert until(lambda: looks == ["soon"], 60), "the first one's child has ended"
        until(lambda: False, DEBOUNCE)
        verifier()
        assert until(lambda: len(looks) == 2, 60)
        verifier()
        assert working.jobs_of_children() == ()
    assert [snapshot.status for snapshot in fresh(store).readable] == ["VERIFIED", "VERIFIED"]


def test_a_new_file_hints_at_a_look(tmp_path: Path) -> None:
    (tmp_path / "out" / "run").mkdir(parents=True)
    config, store = configured(tmp_path, BOTH)
    looks: list[int] = []
    with begun(config, "n0", store, fail) as working:
        worker = working.works[0]
        worker.soon = lambda _: looks.append(1)
        (tmp_path / "out" / "run" / "checkpoint-1").mkdir()
        (tmp_path / "out" / "run" / "checkpoint-1" / "x").write_text("x")
        assert until(lambda: looks)


def test_an_idle_worker_gives_itself_no_hints(tmp_path: Path) -> None:
    shutil.copytree(DATA / "zero3" / "node0", tmp_path / "out" / "run")
    config, store = configured(tmp_path, BOTH)
    with begun(config, "n0", store, fail) as working:
        look, worker = working.works[:2]
        looks: list[int] = []
        look.soon = worker.soon = lambda _: looks.append(1)
        for _ in range(6):
            look()
            worker()
            until(lambda: False, 0.1)
        until(lambda: False, 0.5)
        for tick in (look, worker, look):
            looks.clear()
            tick()
        assert not until(lambda: looks, 0.5)


def test_an_output_directory_that_another_worker_serves_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out" / "run").mkdir(parents=True)
    config, store = configured(tmp_path, BOTH)
    locks = Locks("n0")
    locks.hold(tmp_path / "out" / "run" / "_ckptsync")
    with pytest.raises(ConfigError, match="another worker of node n0"), begun(config, "n0", store, fail):
        pass
    locks.close()
    with begun(config, "n0", store, fail):
        pass


def test_a_directory_that_appears_and_is_anothers_holds_up_no_other(tmp_path: Path) -> None:
    config, store = configured(tmp_path, BOTH)
    locks = Locks("n0")
    with begun(config, "n0", store, fail) as working:
        shutil.copytree(DATA / "zero3" / "node0", tmp_path / "out" / "good")
        (tmp_path / "out" / "taken").mkdir()
        locks.hold(tmp_path / "out" / "taken" / "_ckptsync")
        for tick in working.works[:4] * 2:
            tick()
        [error] = working.errors()
        assert "another worker of node n0" in error
        assert [snapshot.run for snapshot in fresh(store).readable] == ["good"]
    locks.close()


def test_an_output_directory_in_the_store_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "store" / "out").mkdir(parents=True)
    config, store = configured(tmp_path, "worker: {{runs: ['{tmp}/store/out']}}\n")
    with pytest.raises(ConfigError, match="inside the store"), begun(config, "n0", store, fail):
        pass


def test_a_directory_that_cannot_be_served_is_told_and_holds_up_no_other(tmp_path: Path) -> None:
    for job in ("one", "two"):
        (tmp_path / job / "out").mkdir(parents=True)
    config, store = configured(tmp_path, "worker: {{runs: ['{tmp}/one/out', '{tmp}/two/out']}}\n")
    with begun(config, "n0", store, fail) as working:
        working.works[0]()
        [error] = working.errors()
        assert "two/out: its run would be named 'out'" in error
