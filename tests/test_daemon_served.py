"""A store that has gone is waited for; one that never was is made, by a worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptsync.cli.demo_processes import running
from ckptsync.config.loading import read
from ckptsync.config.values import Config
from ckptsync.daemon.served import Absent, opened, remember, remembers
from ckptsync.daemon.watching import Watching
from ckptsync.errors import StoreError
from ckptsync.stores.opening import create_store, is_store
from tests.ticks import until


def config(home: Path, roles: str = "worker", store: str = "store") -> Config:
    (home / "out/_ckptsync").mkdir(parents=True, exist_ok=True)
    return read(f"node: n0\nroles: [{roles}]\nworker: {{runs: [{home}/out]}}\nstore: {{url: {home}/{store}}}", "c", {})


def test_a_worker_makes_its_first_store_and_no_other_role_does(tmp_path: Path) -> None:
    with pytest.raises(Absent, match="not a store") as caught:
        opened(config(tmp_path, "head, verifier"))
    assert "mounted" in caught.value.hint
    assert not (tmp_path / "store").exists()
    assert opened(config(tmp_path)).url == str(tmp_path / "store")
    assert opened(config(tmp_path, "head, verifier")).url == str(tmp_path / "store")


def test_a_store_that_was_served_is_not_made_again_where_its_directory_is_empty(tmp_path: Path) -> None:
    watching = Watching(config(tmp_path), "n0", opened(config(tmp_path)), print)
    watching.begin()
    watching.send()
    watching.close()
    (tmp_path / "store").rename(tmp_path / "unmounted")
    (tmp_path / "store").mkdir()
    with pytest.raises(Absent, match="was a store when") as caught:
        opened(config(tmp_path))
    assert f"{tmp_path}/out/_ckptsync/store" in caught.value.hint
    assert list((tmp_path / "store").iterdir()) == []
    (tmp_path / "out/_ckptsync/store").unlink()
    opened(config(tmp_path))
    assert is_store(str(tmp_path / "store"))


def test_a_service_waits_for_a_store_that_is_not_there_and_goes_on_when_it_comes(tmp_path: Path) -> None:
    given = {"node": "n", "roles": ["head"], "store": {"url": str(tmp_path / "store")}}
    with running(tmp_path / "etc", {"head": dict(given), "stopped": {**given, "node": "m"}}) as (head, stopped):
        for child in (head, stopped):
            until(lambda log=child.log: "phase=waiting" in log.read_text(), 20)  # type: ignore[misc]
        assert not (tmp_path / "store").exists()
        stopped.process.terminate()
        assert stopped.process.wait(5) == 0
        create_store(str(tmp_path / "store"))
        until(lambda: "phase=started" in head.log.read_text(), 20)
    assert head.process.returncode == 0


def test_another_store_is_another_matter(tmp_path: Path) -> None:
    opened(config(tmp_path))
    spool = tmp_path / "out/_ckptsync"
    remember(spool, f"file://{tmp_path}/store")
    assert remembers(spool, f"{tmp_path}/store")
    assert opened(config(tmp_path, store="another")).url == str(tmp_path / "another")
    remember(spool, str(tmp_path / "another"))
    assert not remembers(spool, str(tmp_path / "store"))


def test_a_spool_that_cannot_be_written_is_an_error_and_one_that_cannot_be_read_remembers_nothing(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="_ckptsync"):
        remember(tmp_path / "gone/_ckptsync", "/store")
    (tmp_path / "store").write_bytes(b"\xff")
    assert not remembers(tmp_path, "/store")


def test_a_store_elsewhere_is_remembered_however_its_url_is_spelt(tmp_path: Path) -> None:
    remember(tmp_path, "s3a://bucket/x/")
    assert remembers(tmp_path, "s3://bucket/x")
    assert not remembers(tmp_path, "s3://bucket/y")


def test_a_service_whose_store_cannot_be_reached_waits_for_it_and_can_be_stopped(tmp_path: Path) -> None:
    pytest.importorskip("botocore")
    options = {"endpoint_url": "http://127.0.0.1:9", "key": "k", "secret": "hunter2"}  # where nobody listens
    given: dict[str, object] = {"node": "n", "roles": ["head"], "store": {"url": "s3://bucket/x", "options": options}}
    with running(tmp_path / "etc", {"head": given}) as (head,):
        until(lambda: "phase=waiting" in head.log.read_text(), 30)
        assert head.process.poll() is None
        head.process.terminate()
        assert head.process.wait(10) == 0
    assert "hunter2" not in head.log.read_text()
