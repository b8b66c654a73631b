"""A store that has gone is waited for; one that never was is made, by a worker."""

from __future__ import annotations

import json
import os
from pathlib import Path
from shutil import copytree

import pytest

import ckptsync
from ckptsync.catalogue import kept
from ckptsync.cli.demo_nodes import running
from ckptsync.config.loading import read
from ckptsync.config.schema import Config
from ckptsync.errors import CkptsyncError, ConfigError, StoreError
from ckptsync.fleet.heartbeat import Heartbeat, listed
from ckptsync.service.store import Absent, check, opened, remember, remembers
from ckptsync.service.worker import WorkerRole
from ckptsync.stores.opening import create_store, is_store, open_store
from tests.ticks import until
from tests.weed import weed

DATA = Path(ckptsync.__file__).parent / "demo_data" / "fsdp2"


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
    watching = WorkerRole(config(tmp_path), "n0", opened(config(tmp_path)), print)
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


def test_a_worker_makes_no_directory_above_a_store_but_waits_for_it_and_tells_which_runs_match_nothing(tmp_path: Path) -> None:
    worker = {"runs": [f"{tmp_path}/none/*", f"{tmp_path}/out"]}
    given: dict[str, object] = {"node": "n", "roles": ["worker"], "store": {"url": f"{tmp_path}/mount/store"}, "worker": worker}
    (tmp_path / "out").mkdir()
    with running(tmp_path / "etc", {"worker": given}) as (child,):
        until(lambda: "phase=waiting" in child.log.read_text(), 20)
        said = [line for line in child.log.read_text().splitlines() if "phase=no-match" in line]
        assert [json.loads(line)["detail"] for line in said] == [f"worker.runs: no directory {tmp_path}/none/* is there yet"]
        assert json.loads(said[0])["level"] == "warning"
        assert not (tmp_path / "mount").exists()
        (tmp_path / "mount").mkdir()
        until(lambda: "phase=started" in child.log.read_text(), 20)
        told = f"worker.runs: no directory {tmp_path}/none/* is there yet"
        store = open_store(str(tmp_path / "mount/store"))
        assert until(lambda: any(told in heart.notes for _, heart in listed(store) if isinstance(heart, Heartbeat)), 60)


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


def test_a_store_elsewhere_is_remembered_however_its_url_is_spelt(spool: Path) -> None:
    remember(spool, "s3a://bucket/x/")
    assert remembers(spool, "s3://bucket/x")
    assert not remembers(spool, "s3://bucket/y")
    (spool / "store").unlink()
    os.mkfifo(spool / "store")
    assert not remembers(spool, "s3://bucket/x")


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


@pytest.mark.parametrize("role", ["worker", "head"])
def test_a_start_is_refused_for_good_only_where_the_store_never_let_this_machine_in(tmp_path: Path, role: str) -> None:
    url = f"s3://{weed().bucket()}/store"
    create_store(url, weed().options())
    remembers = tmp_path / "out/_ckptsync/store" if role == "worker" else kept.path(url)

    def start(**more: object) -> None:
        told = {"url": url, "options": {**weed().options(secret="another"), **more}}
        opened(read(json.dumps({"roles": [role], "worker": {"runs": [str(tmp_path / "out")]}, "store": told}), "c", {}))

    with pytest.raises(ConfigError, match="SignatureDoesNotMatch"):
        start()
    remembers.parent.mkdir(parents=True, exist_ok=True)
    remembers.write_text(f"{url}\n")
    with pytest.raises(Absent, match="SignatureDoesNotMatch"):
        start()
    with pytest.raises(ConfigError, match="which s3fs has not"):
        start(unknown=1)


def test_services_whose_key_is_refused_go_on_with_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key is changed in the server first, and in the file of credentials a while later."""
    server = weed()
    url, key = f"s3://{server.bucket()}/store", server.identity({"Action": "s3:*", "Resource": "*"})
    keys = tmp_path / "credentials"

    def tell(secret: str) -> None:
        keys.write_text(f"[default]\naws_access_key_id = {key['key']}\naws_secret_access_key = {secret}\n")

    tell(key["secret"])
    for name, value in {"SHARED_CREDENTIALS_FILE": str(keys), "ENDPOINT_URL": server.endpoint, "REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    common: dict[str, object] = {"store": {"url": url}, "log": {"format": "text"}, "limits": {"patience": "1s"}}

    def save(name: str) -> None:
        for node in ("node0", "node1"):
            copytree(DATA / node / "checkpoint-4", tmp_path / "out" / name, dirs_exist_ok=True)

    save("checkpoint-4")
    given: dict[str, dict[str, object]] = {
        "worker": {
            **common,
            "node": "w",
            "roles": ["worker"],
            "worker": {"runs": [str(tmp_path / "out")], "scan_every": "1s", "quiet": 0, "unmarked": 0},
        },
        "head": {**common, "node": "h", "roles": ["head", "verifier"], "head": {"every": "1s"}, "verify": {"tick": "1s"}},
    }
    with running(tmp_path / "etc", given) as services:
        for service in services:
            assert until(lambda log=service.log: "phase=started" in log.read_text(), 60)  # type: ignore[misc]
        server.rekey(key["key"], "another")
        save("checkpoint-5")
        for service in services:
            assert until(lambda log=service.log: "SignatureDoesNotMatch" in log.read_text(), 90)  # type: ignore[misc]
            assert service.process.poll() is None
        tell("another")
        worker, head = services
        assert until(lambda: "phase=sent run=out checkpoint=checkpoint-5" in worker.log.read_text(), 90)
        assert until(lambda: "tick=head phase=recovered" in head.log.read_text(), 90)
        assert until(lambda: "phase=verified run=out location=checkpoint-5" in head.log.read_text(), 90)
    assert [service.process.returncode for service in services] == [0, 0]


def configured(store: Path | str, runs: str = "/data/out", more: str = "") -> Config:
    return read(f"store: {{url: '{store}'{more}}}\nworker: {{runs: ['{runs}']}}\n", "c.yaml", {})


def test_what_may_come_is_no_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    for one in (
        configured(tmp_path),
        configured(tmp_path / "not-mounted"),
        configured("s3://bucket/x"),
        configured("sftp://host/x"),
    ):
        check(one)


def test_what_can_never_be_a_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for one in (configured(tmp_path / "file"), configured("nonsense://x"), configured(tmp_path, more=", options: {a: b}")):
        with pytest.raises(CkptsyncError):
            check(one)


def test_output_directories_of_which_none_may_be_used_are_refused(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(CkptsyncError, match="inside the store"):
        check(configured(tmp_path, str(tmp_path / "out")))
