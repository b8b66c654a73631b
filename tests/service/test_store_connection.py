"""A store that has gone is waited for; one that never was is made, by a worker."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from shutil import copytree

import pytest

import ckptsync
from ckptsync import mounts
from ckptsync.catalogue.cached import cache_path
from ckptsync.cli.demo import running
from ckptsync.cli.main import main
from ckptsync.config.loading import read
from ckptsync.config.schema import Config
from ckptsync.errors import CkptsyncError, ConfigError, StoreError, Transient
from ckptsync.service.store_connection import (
    Absent,
    ServiceStore,
    check,
    open_configured,
    remember,
    remembers,
)
from ckptsync.service.worker_role import WorkerRole
from ckptsync.stores.contract import UNKNOWN, About, Chunk, Store, read_all
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.opening import create_store, is_store
from ckptsync.stores.posix.store import PosixStore
from tests.support.seaweedfs import weed
from tests.support.store_contract import StoreContract
from tests.support.waiting import until

DATA = Path(ckptsync.__file__).parent / "demo_data" / "fsdp2"


def config(home: Path, roles: str = "worker", store: str = "store") -> Config:
    (home / "out/_ckptsync").mkdir(parents=True, exist_ok=True)
    runs = f"worker: {{runs: [{home}/out]}}\n"
    text = f"node: n0\nroles: [{roles}]\n{runs}store: {{url: {home}/{store}}}"
    return read(text, "c", {})


def test_a_worker_makes_its_first_store_and_no_other_role_does(tmp_path: Path) -> None:
    with pytest.raises(Absent, match="not a store") as caught:
        open_configured(config(tmp_path, "head, verifier"))
    assert "mounted" in caught.value.hint
    assert not (tmp_path / "store").exists()
    assert open_configured(config(tmp_path)).url == str(tmp_path / "store")
    assert open_configured(config(tmp_path, "head, verifier")).url == str(tmp_path / "store")


def test_a_store_that_was_served_is_not_made_again_where_its_directory_is_empty(
    tmp_path: Path,
) -> None:
    watching = WorkerRole(config(tmp_path), "n0", open_configured(config(tmp_path)), print)
    watching.begin()
    watching.planning()
    watching.close()
    (tmp_path / "store").rename(tmp_path / "unmounted")
    (tmp_path / "store").mkdir()
    with pytest.raises(Absent, match="no store found, although") as caught:
        open_configured(config(tmp_path))
    assert f"{tmp_path}/out/_ckptsync/store" in caught.value.hint
    assert list((tmp_path / "store").iterdir()) == []
    (tmp_path / "out/_ckptsync/store").unlink()
    open_configured(config(tmp_path))
    assert is_store(str(tmp_path / "store"))


def test_a_worker_makes_no_directory_above_a_store(tmp_path: Path) -> None:
    with pytest.raises(Absent, match="mount"):
        open_configured(config(tmp_path, store="mount/store"))
    assert not (tmp_path / "mount").exists()
    (tmp_path / "mount").mkdir()
    open_configured(config(tmp_path, store="mount/store"))
    assert is_store(str(tmp_path / "mount/store"))


@pytest.mark.parametrize("kind", ["fstab", "unit"])
@pytest.mark.parametrize("below", ["", "/store"])
def test_no_store_is_made_where_a_file_system_should_be_mounted(
    kind: str,
    below: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nothing is left of it but its empty mount point."""
    point, table = tmp_path / "mnt", tmp_path / "etc/mnt.mount"
    point.mkdir()
    table.parent.mkdir()
    if kind == "fstab":
        table.write_text(f"head:/srv {point} nfs4 noauto 0 0\n")
        monkeypatch.setattr(mounts, "FSTAB", table)
    else:
        table.write_text(f"[Mount]\nWhat=head:/srv\nWhere={point}\n")
        monkeypatch.setattr(mounts, "UNITS", (table.parent,))
    with pytest.raises(Absent, match=f"{point} is in {table}, and nothing is mounted there"):
        open_configured(config(tmp_path, store=f"mnt{below}"))
    checkpoint = DATA / "node0/checkpoint-4"
    assert main(["push", str(checkpoint), "--store", f"{point}{below}", "--run", "r"]) == 2
    assert f"mount {point}" in capsys.readouterr().err
    assert list(point.iterdir()) == []
    monkeypatch.undo()
    assert main(["push", str(checkpoint), "--store", f"{point}{below}", "--run", "r"]) == 0
    monkeypatch.setattr(mounts, "FSTAB", table)  # what is a store stays one
    assert main(["push", str(checkpoint), "--store", f"{point}{below}", "--run", "r"]) == 0


@pytest.mark.parametrize("below", ["", "/store"])
def test_a_store_that_was_read_is_not_made_again_in_an_older_empty_directory(
    below: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it is where a file system was mounted by hand, and is not any more."""
    point, disk, url = tmp_path / "mnt", tmp_path / "disk", f"{tmp_path}/mnt{below}"
    point.mkdir()
    old = point.stat().st_mtime
    push = ["push", str(DATA / "node0/checkpoint-4"), "--store", url, "--run", "r"]
    assert main(push) == 0
    assert main(["ls", "--store", url]) == 0
    point.rename(disk)
    point.mkdir()
    os.utime(point, (old, old))
    capsys.readouterr()
    assert main(push) == 2
    said = capsys.readouterr().err
    assert "no store found, although this user has read it before" in said
    assert str(cache_path(url)) in said
    with pytest.raises(Absent, match="has read it before"):
        open_configured(config(tmp_path, store=f"mnt{below}"))
    assert list(point.iterdir()) == []
    os.utime(point)  # somebody emptied it since
    assert main(push) == 0


def test_push_makes_no_store_where_a_worker_uploaded_to_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copytree(DATA / "node0/checkpoint-4", tmp_path / "out/checkpoint-4")
    (tmp_path / "out/_ckptsync").mkdir(mode=0o700)
    remember(tmp_path / "out/_ckptsync", f"{tmp_path}/store")
    assert main(["push", str(tmp_path / "out"), "--store", f"{tmp_path}/store"]) == 2
    assert "out/_ckptsync/store" in capsys.readouterr().err
    assert not (tmp_path / "store").exists()


def test_another_store_is_another_matter(tmp_path: Path) -> None:
    open_configured(config(tmp_path))
    spool = tmp_path / "out/_ckptsync"
    remember(spool, f"file://{tmp_path}/store")
    assert remembers(spool, f"{tmp_path}/store")
    assert open_configured(config(tmp_path, store="another")).url == str(tmp_path / "another")
    remember(spool, str(tmp_path / "another"))
    assert not remembers(spool, str(tmp_path / "store"))


def test_a_spool_that_cannot_be_written_is_an_error_and_one_that_cannot_be_read_remembers_nothing(
    tmp_path: Path,
) -> None:
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


def test_a_service_whose_store_cannot_be_reached_waits_for_it_and_can_be_stopped(
    tmp_path: Path,
) -> None:
    pytest.importorskip("botocore")
    # where nobody listens
    options = {"endpoint_url": "http://127.0.0.1:9", "key": "k", "secret": "hunter2"}
    given: dict[str, object] = {"node": "n", "roles": ["head"]}
    given["store"] = {"url": "s3://bucket/x", "options": options}
    given["limits"] = {"patience": "1h"}  # for uploads
    with running(tmp_path / "etc", {"head": given}) as (head,):
        assert until(lambda: '"phase": "waiting"' in head.log.read_text())
        assert head.process.poll() is None
        head.process.terminate()
        assert head.process.wait(60) == 0
    assert "hunter2" not in head.log.read_text()


@pytest.mark.parametrize("role", ["worker", "head"])
def test_a_start_is_refused_for_good_only_where_the_store_never_let_this_machine_in(
    tmp_path: Path, role: str
) -> None:
    url = f"s3://{weed().bucket()}/store"
    create_store(url, weed().options())
    remembers = tmp_path / "out/_ckptsync/store" if role == "worker" else cache_path(url)

    def start(**more: object) -> None:
        told = {"url": url, "options": {**weed().options(secret="another"), **more}}
        runs = {"runs": [str(tmp_path / "out")]}
        text = json.dumps({"roles": [role], "worker": runs, "store": told})
        open_configured(read(text, "c", {}))

    with pytest.raises(ConfigError, match="SignatureDoesNotMatch"):
        start()
    remembers.parent.mkdir(parents=True, exist_ok=True)
    remembers.write_text(f"{url}\n")
    with pytest.raises(Absent, match="SignatureDoesNotMatch"):
        start()
    with pytest.raises(ConfigError, match="unknown storage_options"):
        start(unknown=1)


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


def test_what_can_never_be_a_store_and_directories_of_which_none_may_be_used_are_refused(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("")
    for one in (
        configured(tmp_path / "file"),
        configured("nonsense://x"),
        configured(tmp_path, more=", options: {a: b}"),
    ):
        with pytest.raises(CkptsyncError):
            check(one)
    (tmp_path / "out").mkdir()
    with pytest.raises(CkptsyncError, match="inside the store"):
        check(configured(tmp_path, str(tmp_path / "out")))


def served(store: Store, is_stopping: Callable[[], bool]) -> ServiceStore:
    """The service's, once it has come."""
    found = ServiceStore(store.url, is_stopping)
    found.connect(store)
    return found


class TestServiceStore(StoreContract):
    """Once it has come it is the store that came."""

    @pytest.fixture
    def store(self) -> Store:
        return served(MemoryStore(), lambda: False)

    @pytest.fixture
    def again(self, store: Store) -> Store:
        return store


def test_until_it_comes_every_question_is_one_that_may_be_asked_again() -> None:
    awaited = ServiceStore("s3://bucket/x", lambda: False)
    assert awaited.url == "s3://bucket/x"
    for ask in (
        lambda: list(awaited.names("")),
        lambda: awaited.size("a"),
        lambda: awaited.read_into("a", 0, memoryview(bytearray(1))),
        lambda: awaited.write("a", [b"x"]),
        lambda: awaited.create("a", [b"x"]),
        lambda: awaited.delete("a"),
    ):
        with pytest.raises(Transient, match="s3://bucket/x: not reached yet"):
            ask()


def test_what_is_known_of_the_store_is_known_when_it_comes() -> None:
    store = MemoryStore()
    store.write("a", [b"x"])
    store.late, store.is_exclusive = 3.0, True
    awaited = ServiceStore("memory://", lambda: False)
    awaited.connect(store)
    assert (awaited.late, awaited.is_exclusive, read_all(awaited, "a", 9)) == (3.0, True, b"x")


@pytest.mark.parametrize("verb", ["write", "create"])
def test_a_write_ends_between_two_chunks_and_leaves_nothing(tmp_path: Path, verb: str) -> None:
    asked = []

    def chunks() -> Iterator[bytes]:
        yield b"first"
        asked.append(True)
        yield b"second"
        raise AssertionError("asked for more after the stop")

    store = served(PosixStore(str(tmp_path)), lambda: bool(asked))
    with pytest.raises(Transient, match="stopping"):
        getattr(store, verb)("run/large", chunks())
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_what_a_stop_cuts_off_is_gone_on_with_by_the_next_start(tmp_path: Path) -> None:
    asked: list[bool] = []
    read: list[int] = []

    def chunks() -> Iterator[bytes]:
        for n in range(4):
            read.append(n)
            yield bytes([n]) * (1 << 20)
            asked.append(n == 2)

    store = served(PosixStore(str(tmp_path)), lambda: any(asked))
    about = About(4 << 20, "origin")
    with pytest.raises(Transient, match="stopping"):
        store.create("large", chunks(), about)
    [parked] = tmp_path.glob(".ckptsync-*.part")
    inode = parked.stat().st_ino
    assert parked.stat().st_size >= 2 << 20
    PosixStore(str(tmp_path)).create("large", [bytes([n]) * (1 << 20) for n in range(4)], about)
    assert (tmp_path / "large").stat().st_ino == inode


def test_chunks_that_can_be_had_again_still_can() -> None:
    class Twice(MemoryStore):
        def write(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
            for _ in range(2):
                super().write(name, chunks, about)

    store = served(Twice(), lambda: False)
    store.write("x", [b"a", b"b"])
    assert read_all(store, "x") == b"ab"
    store.write("x", iter([b"a", b"b"]))
    assert read_all(store, "x") == b""
