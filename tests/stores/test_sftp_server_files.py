"""Files, directories and listings on an SFTP server, the sessions that threads share, and what
refusals mean.
"""

from __future__ import annotations

import os
import stat
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckptsync.errors import ConfigError, NotFound, StoreError, Transient
from ckptsync.stores.contract import About, Entry
from ckptsync.stores.limits import Limits
from ckptsync.stores.posix.store import PosixStore
from ckptsync.stores.sftp import server_files
from ckptsync.stores.sftp.protocol import Code, PacketType, Request, Session, StatusError, text
from ckptsync.stores.sftp.server_files import Sessions
from ckptsync.stores.sftp.store import walk
from tests.support.files_in_memory import write_files
from tests.support.sftp_stores import AT_ONCE, SOON, address_of, files_of, over_ssh, served


def test_openssh_brings_names_to_the_disk_and_a_directory_that_is_gone_is_an_error(
    tmp_path: Path,
) -> None:
    files = over_ssh(tmp_path)._files
    files.sync_directory("")
    assert files._syncs_directories
    with pytest.raises(StoreError, match="not/there: no such file"):
        files.sync_directory("not/there")


def test_the_root_is_made_with_all_above_it_and_may_be_a_link(tmp_path: Path) -> None:
    log = tmp_path / "log"
    files = files_of(tmp_path / "a" / "b" / "c", f"log={log}")
    assert not files.has_root()
    files.make_root()
    steps = log.read_text().splitlines()
    assert steps[-4:] == ["mkdir b", "fsync a", "mkdir c", "fsync b"]
    files.make_root()
    assert files.has_root()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert files_of(tmp_path / "link").has_root()
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file", tmp_path / "file" / "x"):
        with pytest.raises(ConfigError, match="no store can be made here"):
            files_of(path).make_root()


def test_a_file_that_was_seen_is_not_looked_for_again_for_a_while_but_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    files, out = files_of(tmp_path), memoryview(bytearray(4))
    assert files.read_into("a", 8, out) == 2
    (tmp_path / "a").unlink()
    with pytest.raises(NotFound, match="a: not in sftp://head"):
        files.read_into("a", 0, out)
    (tmp_path / "a").symlink_to("b")
    with pytest.raises(NotFound):
        files.read_into("a", 0, out)
    (tmp_path / "b").write_bytes(b"0123456789")
    assert files.read_into("b", 0, out) == 4
    (tmp_path / "b").rename(tmp_path / "c")
    (tmp_path / "b").symlink_to("c")
    monkeypatch.setattr(server_files, "CHECKED_S", 0.0)  # much later
    with pytest.raises(NotFound):
        files.read_into("b", 0, out)


def test_what_is_known_of_a_directory_holds_for_reading_only(tmp_path: Path) -> None:
    for directory in ("real", "other"):
        (tmp_path / directory).mkdir()
        for name in "ab":
            (tmp_path / directory / name).write_bytes(b"x")
    files, out = files_of(tmp_path), memoryview(bytearray(1))
    assert files.read_into("real/a", 0, out) == 1
    (tmp_path / "real").rename(tmp_path / "moved")
    (tmp_path / "real").symlink_to("other")
    assert files.find("real/b") is None
    (tmp_path / "link").symlink_to("other")
    with pytest.raises(NotFound):
        files.read_into("link/b", 0, out)


def test_threads_share_a_few_connections_one_more_than_those_of_uploads(tmp_path: Path) -> None:
    sessions, at_once = Sessions(address_of(tmp_path), Limits(threads=2)), threading.Semaphore(3)
    seen: set[int] = set()

    def step(session: Session) -> None:
        assert at_once.acquire(blocking=False)
        seen.add(id(session))
        session.stat_paths([b"/"])
        at_once.release()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: sessions.on(step), range(40)))
    assert len(seen) <= 3
    assert len(sessions._idle) == len(seen)


def test_patience_ends_and_refusals_are_not_tried_again(tmp_path: Path) -> None:
    tries = []

    def step(session: Session) -> None:
        tries.append(session)
        raise Transient("no")

    with pytest.raises(Transient):
        Sessions(address_of(tmp_path), AT_ONCE).on(step)
    sessions = Sessions(address_of(tmp_path), SOON)
    with pytest.raises(StatusError):
        sessions.on(lambda s: s.do(Request(PacketType.REMOVE, text(bytes(tmp_path / "a")))))
    assert len(tries) == 1
    assert len(sessions._idle) == 1, "the connection is as good as before"


def test_a_step_that_is_broken_off_takes_its_connection_with_it(tmp_path: Path) -> None:
    sessions = Sessions(address_of(tmp_path), SOON)

    def step(session: Session) -> None:
        session._send([Request(PacketType.LSTAT, text(b"/"))])
        # with an answer under way, which must not be taken for another one's
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sessions.on(step)
    assert sessions._idle == []


def test_directories_are_made_once_and_again_when_they_went(tmp_path: Path) -> None:
    files = files_of(tmp_path)

    def step(session: Session) -> None:
        session.do(Request(PacketType.MKDIR, text(files.path("a/b/new")) + bytes(4)))

    files.in_directory("a/b", step)
    assert (tmp_path / "a/b/new").is_dir()
    for path in ("a/b/new", "a/b", "a"):
        (tmp_path / path).rmdir()
    files.in_directory("a/b", step)
    assert (tmp_path / "a/b/new").is_dir()
    with pytest.raises(StoreError, match="the server refused: words"):
        files.in_directory("a/b", step)  # it is there already: that is the caller's to judge


def test_where_something_is_deleted_again_and_again_the_patience_ends(tmp_path: Path) -> None:
    tries = []

    def step(session: Session) -> None:
        tries.append(session)
        raise StatusError(Code.NO_SUCH_FILE)

    with pytest.raises(StoreError, match="others deleted it 8 times"):
        files_of(tmp_path).in_directory("a", step)
    assert len(tries) == 8


def test_a_failure_says_where_to_look_for_a_full_disk(tmp_path: Path) -> None:
    for size in (3, 40 << 20):
        with pytest.raises(
            StoreError, match=f"head:{tmp_path}/run/a: the server refused: words"
        ) as caught:
            served(tmp_path, "full").write("run/a", [bytes(size)], About(size))
        assert "is its disk full" in caught.value.hint
        assert not isinstance(caught.value, Transient)
        assert list((tmp_path / "run").iterdir()) == []


def test_directories_are_listed_as_a_local_path_lists_them(tmp_path: Path) -> None:
    names = ("a", "sub/b", ".ckptsync-00.part", ".nfs000000001234")
    for n in range(12):
        checkpoint = tmp_path / f"run{n % 7}" / f"checkpoint-{n}"
        write_files(checkpoint, dict.fromkeys(names, b"x" * n))
        checkpoint.with_suffix(".txt").write_bytes(b"")
    for prefix in ("", "run3/", "run3/checkpoint-3/", "nowhere/", "run3/checkpoint-3/a/"):
        local = PosixStore(str(tmp_path)).names(prefix)
        wanted = [Entry(e.name, e.size, float(int(e.mtime))) for e in local]
        assert list(walk(files_of(tmp_path), prefix)) == wanted
    assert len(list(walk(files_of(tmp_path), ""))) == 3 * 12


def test_a_large_directory_comes_in_several_answers(tmp_path: Path) -> None:
    for n in range(950):
        (tmp_path / f"{n:04}").write_bytes(b"")
    assert [e.name for e in over_ssh(tmp_path).names("")] == [f"{n:04}" for n in range(950)]


def test_names_that_reach_elsewhere_are_left_out_and_told_of_but_a_directory_s_own(
    tmp_path: Path,
) -> None:
    (tmp_path / "good").write_bytes(b"x")
    told: list[tuple[str, str]] = []
    entries = walk(
        files_of(tmp_path, "names"), "", passed=lambda name, odd: told.append((name, odd))
    )
    assert [e.name for e in entries] == ["good"]
    assert {odd for _, odd in told} == {"name"}
    assert {name for name, _ in told} >= {"../x", "/etc/passwd", "a\nb", "nul\0"}
    assert not {name for name, _ in told} & {".", "..", ""}
    Path(os.fsdecode(bytes(tmp_path) + b"/\xff")).write_bytes(b"x")
    assert [e.name for e in walk(files_of(tmp_path), "")] == ["good"]


def test_a_directory_without_end_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_files, "MOST_FILES", 10_000)
    with pytest.raises(StoreError, match="more than 10000 files"):
        list(walk(files_of(tmp_path, "endless"), ""))
    for name in b".a":  # the same again and again
        answer = struct.pack(">IIBIIQI", 1, 1, name, 0, 5, 0, stat.S_IFREG).hex()
        with pytest.raises(StoreError, match="its listing does not end"):
            list(walk(files_of(tmp_path, f"answer=12=104={answer}"), ""))
    with pytest.raises(StoreError, match="directories 200 deep"):
        list(walk(files_of(tmp_path, "bottomless"), ""))


def test_what_vanished_meanwhile_was_never_there(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    listings = [files_of(tmp_path).list_directory(prefix) for prefix in ("a/", "b/", "")]
    assert listings == [{}, {}, {"a/": None}]


def test_a_directory_that_may_not_be_read_is_an_error_and_not_empty(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(StoreError, match=f"head:{tmp_path}/a: permission denied"):
        list(walk(files_of(tmp_path, "unreadable"), ""))


@pytest.mark.parametrize("code", [Code.NO_CONNECTION, Code.CONNECTION_LOST])
def test_a_server_that_has_lost_its_disks_for_a_moment_is_asked_again(
    tmp_path: Path, code: Code
) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    files, refused = files_of(tmp_path), [code]

    def look(session: Session) -> object:
        if refused:
            raise StatusError(refused.pop())
        return session.stat_paths([files.path("a")])

    assert files.sessions.on(look)
    losing = files_of(tmp_path, f"answer=200=101={code:08x}", limits=AT_ONCE)
    with pytest.raises(Transient, match="connection is lost"):
        losing.sync_directory("")
