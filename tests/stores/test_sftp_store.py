from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptsync.errors import ConfigError, Corrupt, Exists, NotFound, StoreError, Transient
from ckptsync.safe_names import STORE_FILE
from ckptsync.stores import path_or_url
from ckptsync.stores.contract import Store
from ckptsync.stores.limits import Limits
from ckptsync.stores.opening import Access, NoParent, create_store, is_store, open_store
from ckptsync.stores.posix.store import PosixStore
from ckptsync.stores.sftp.connection import parse_address
from ckptsync.stores.urls import located
from tests.support.files_in_memory import write_files
from tests.support.sftp_stores import AT_ONCE, over_ssh, remote, served
from tests.support.sshd import another_sshd, sshd
from tests.support.store_contract import StoreContract, names


def inside(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())


class TestSftp(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return over_ssh(tmp_path)

    @pytest.fixture
    def again(self, tmp_path: Path) -> Store:
        return over_ssh(tmp_path)


def test_what_either_has_not_finished_neither_lists(tmp_path: Path) -> None:
    there, here = over_ssh(tmp_path), PosixStore(str(tmp_path))

    def watched() -> Iterator[bytes]:
        yield b"x" * 100
        assert names(there) == names(here) == []

    there.write("run/a", watched())
    (tmp_path / "run" / ".ckptsync-0123456789abcdef.part").write_bytes(b"half")
    here.create("run/b", [b"y"])
    assert names(there) == names(here) == ["run/a", "run/b"]
    for store in (there, here):
        with pytest.raises(Corrupt, match="unfinished"):
            store.size("run/.ckptsync-0123456789abcdef.part")


def test_a_store_is_made_and_found_over_ssh(tmp_path: Path) -> None:
    server = sshd()
    url = server.url(tmp_path / "new" / "store")
    with pytest.raises(NoParent, match=r"there is no directory .*/new on "):
        create_store(url, server.options)
    assert inside(tmp_path) == []
    (tmp_path / "new").mkdir()
    assert not is_store(url, server.options)
    with pytest.raises(ConfigError, match="no such directory"):
        open_store(url, server.options)
    create_store(url, server.options).write("a", [b"x"])
    assert is_store(url, server.options)
    assert names(open_store(url, server.options)) == [STORE_FILE, "a"]
    assert names(open_store(str(tmp_path / "new" / "store"))) == [STORE_FILE, "a"]


def test_times_are_a_trainers_outside_of_a_store_alone(tmp_path: Path) -> None:
    os.utime(write_files(tmp_path, {"run/a": b"1"}) / "run/a", (7, 7))
    access, place = Access(sshd().options), located(sshd().url(tmp_path / "run"))
    assert path_or_url.list_tree(place, access).written() == {"a": 7.0}
    write_files(tmp_path, {STORE_FILE: b"{}"})
    assert path_or_url.list_tree(place, access).written() == {}


def test_links_are_neither_listed_nor_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_bytes(b"private")
    root = tmp_path / "store"
    (root / "real").mkdir(parents=True)
    (root / "way").symlink_to(tmp_path / "secret")
    (root / "real" / "key").symlink_to(tmp_path / "secret" / "key")
    os.mkfifo(root / "pipe")
    store = over_ssh(root)
    assert names(store) == names(store, "way/") == []
    for name in ("way/key", "real/key", "pipe"):
        with pytest.raises(NotFound):
            store.size(name)
        with pytest.raises(NotFound):
            store.read_into(name, 0, memoryview(bytearray(3)))
    with pytest.raises(StoreError, match="way: not a directory"):
        store.write("way/new", [b"x"])
    assert inside(tmp_path / "secret") == ["key"]


def test_a_store_whose_disk_is_unmounted_is_no_empty_store(tmp_path: Path) -> None:
    server, root = sshd(), tmp_path / "store"
    store = create_store(server.url(root), server.options)
    store.write("run/a", [b"x"])
    assert names(store) == [STORE_FILE, "run/a"]
    root.rename(tmp_path / "elsewhere")
    for text in ("no such directory", "not the store that was opened"):
        for use in (
            lambda: names(store),
            lambda: store.size("run/a"),
            lambda: store.write("run/b", [b"y"]),
            lambda: store.write("another run/b", [b"y"]),
        ):
            with pytest.raises(StoreError, match=text) as caught:
                use()
            assert "mount" in caught.value.hint
            assert type(caught.value) is StoreError
        root.mkdir(exist_ok=True)  # the directory that it was mounted on
    assert inside(root) == []


def test_where_the_user_may_not_write_the_path_and_the_remedy_are_told(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=f"head:{tmp_path}/dir/a: permission denied") as caught:
        served(tmp_path, "denied").write("dir/a", [b"x"])
    assert "read, write and search" in caught.value.hint
    assert caught.value.exit_code == 4


def test_a_name_that_a_killed_writer_left_is_durable_before_it_is_said_to_be_there(
    tmp_path: Path,
) -> None:
    root, log = tmp_path / "store", tmp_path / "log"
    (root / "run" / "deep").mkdir(parents=True)
    store = served(root, f"log={log}")
    for name in ("a", "b"):  # each made by another writer, after the last one was settled
        (root / "run/deep" / name).write_bytes(b"its writer was killed between rename and fsync")
        with pytest.raises(Exists):
            store.create(f"run/deep/{name}", [b"x"])
    steps = [step for step in log.read_text().splitlines() if step.startswith("fsync")]
    # the first one tests whether directories can be synced
    assert steps == ["fsync store"] * 2 + ["fsync run", "fsync deep", "fsync deep"]


def test_connections_end_with_the_store(tmp_path: Path) -> None:
    store = over_ssh(tmp_path)
    store.write("a", [b"x"])
    (session,) = store._files.sessions._idle
    process = session._connection._process
    assert process.poll() is None
    del store
    assert process.poll() is not None


def test_a_connection_that_died_while_nobody_used_it_is_not_used(tmp_path: Path) -> None:
    store = over_ssh(tmp_path, AT_ONCE)
    store.write("a", [b"x"])
    (session,) = store._files.sessions._idle
    session._connection._process.kill()
    session._connection._process.wait()
    assert store.size("a") == 1


def test_the_sshd_config_that_is_recommended_serves_a_store_and_no_shell(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "configs" / "sshd-store.conf").read_text()
    text = text.replace("User ckptsync", f"User {sshd().user}")
    roots = ("ChrootDirectory", "AuthorizedKeysFile")  # which must be root's, as all above them
    mine = [line for line in text.splitlines() if not line.strip().startswith(roots)]
    with another_sshd("\n".join([*mine, ""])) as server:
        create_store(server.url(tmp_path / "store"), server.options).write("run/a", [b"x"])
        command = parse_address(remote(server.url(tmp_path)), server.options).command
        shell = subprocess.run(
            [*command[: command.index("-s")], "127.0.0.1", "id"],
            capture_output=True,
            check=False,
            timeout=60,
            stdin=subprocess.DEVNULL,
        )
    assert b"uid" not in shell.stdout
    assert (tmp_path / "store/run/a").stat().st_mode & 0o777 == 0o640


def test_directories_in_directories_have_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptsync.stores.sftp.store.MOST_NAMES", 300)
    with pytest.raises(StoreError, match="more than 300 files"):
        list(served(tmp_path, "branching").names(""))


def test_a_server_that_talks_and_does_not_answer_is_given_up(tmp_path: Path) -> None:
    with pytest.raises(Transient, match="not a byte came"):
        served(tmp_path, "noisy", limits=Limits(patience=0, stall=0.5)).size("a")
