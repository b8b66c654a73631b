from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptsync.errors import Corrupt, Exists, NotFound, StoreError
from ckptsync.stores import posix
from ckptsync.stores.contract import Store, read_all
from ckptsync.stores.posix import PosixStore
from tests.store_contract import StoreContract, dies_after, names


class TestPosixStore(StoreContract):
    @pytest.fixture(params=["plain", "with space/and ünïcödé"])
    def store(self, request: pytest.FixtureRequest, tmp_path: Path) -> Store:
        root = tmp_path / request.param
        root.mkdir(parents=True)
        return PosixStore(str(root))

    @pytest.fixture
    def again(self, store: PosixStore) -> Store:
        return PosixStore(store.root)


@pytest.fixture
def store(tmp_path: Path) -> PosixStore:
    (tmp_path / "store").mkdir()
    return PosixStore(str(tmp_path / "store"))


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield place
    subprocess.run(["umount", "-l", place], check=True)  # lazily: a store keeps files open for a while


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def target_of(fd: int) -> str:
    return str(Path(f"/proc/self/fd/{fd}").readlink())


def leftovers(root: str) -> list[str]:
    return [name for _, _, files in os.walk(root) for name in files if posix.is_unfinished(name)]


def test_a_root_that_is_not_there_is_no_empty_store(tmp_path: Path) -> None:
    store = PosixStore(str(tmp_path / "unmounted"))
    calls: list[Callable[[], object]] = [lambda: names(store), lambda: store.size("a"), lambda: store.delete("a")]
    for call in calls:
        with pytest.raises(StoreError) as caught:
            call()
        assert type(caught.value) is StoreError
        assert "mounted" in caught.value.hint
    with pytest.raises(StoreError):
        store.write("a", [b"x"])
    assert not (tmp_path / "unmounted").exists()


@pytest.mark.parametrize("name", ["link", "dir/link", "linked/file", "dangling"])
def test_links_in_the_store_are_not_there(store: PosixStore, tmp_path: Path, name: str) -> None:
    secret = tmp_path / "outside"
    secret.mkdir()
    (secret / "file").write_bytes(b"secret")
    root = Path(store.root)
    (root / "dir").mkdir()
    (root / "link").symlink_to(secret / "file")
    (root / "dir/link").symlink_to(secret / "file")
    (root / "linked").symlink_to(secret)
    (root / "dangling").symlink_to(root / "nowhere")
    assert names(store) == names(store, "linked/") == []
    with pytest.raises(NotFound):
        store.size(name)
    with pytest.raises(NotFound):
        store.read_into(name, 0, memoryview(bytearray(1)))
    store.delete(name)
    assert (root / name).is_symlink() or name == "linked/file"
    assert (secret / "file").read_bytes() == b"secret"


def test_writing_never_leaves_the_store_through_a_link(store: PosixStore, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"mine")
    (Path(store.root) / "linked").symlink_to(outside)
    (Path(store.root) / "link").symlink_to(outside / "file")
    with pytest.raises(StoreError, match="linked/new") as caught:
        store.write("linked/new", [b"x"])
    assert "links are not followed" in caught.value.hint
    store.write("link", [b"replaces the link, not what it points to"])
    assert {p.name: p.read_bytes() for p in outside.iterdir()} == {"file": b"mine"}
    assert names(store) == ["link"]


def test_the_root_itself_may_be_a_link(store: PosixStore, tmp_path: Path) -> None:
    (tmp_path / "way").symlink_to(store.root)
    PosixStore(str(tmp_path / "way")).write("a/b", [b"x"])
    assert names(store) == ["a/b"]


def test_pipes_and_strange_names_are_not_listed_nor_waited_for(store: PosixStore) -> None:
    os.mkfifo(f"{store.root}/pipe")
    Path(store.root, "back\\slash").write_bytes(b"x")
    Path(os.fsdecode(os.fsencode(store.root) + b"/not-utf8-\xff")).write_bytes(b"x")
    Path(store.root, ".nfs0000000012ab34cd00000001").write_bytes(b"deleted, still open on another client")
    assert names(store) == []
    with pytest.raises(NotFound):
        store.read_into("pipe", 0, memoryview(bytearray(1)))


def test_unfinished_writes_are_no_names_and_cannot_be_written_as_such(store: PosixStore) -> None:
    Path(store.root, ".ckptsync-00ff.part").write_bytes(b"half")
    assert names(store) == []
    with pytest.raises(Corrupt, match="unfinished"):
        store.write("run/.ckptsync-00ff.part", [b"x"])


def test_a_writer_killed_in_the_middle_leaves_the_old_file_and_no_name(store: PosixStore) -> None:
    store.write("run/a", [b"old"])
    program = (
        "import os, signal, sys\n"
        "from ckptsync.stores.posix import PosixStore\n"
        "def chunks():\n"
        "    yield b'half'\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "PosixStore(sys.argv[1]).write('run/a', chunks())\n"
    )
    assert subprocess.run([sys.executable, "-c", program, store.root], check=False).returncode == -signal.SIGKILL
    assert len(leftovers(store.root)) == 1, "else it was not killed in the middle"
    assert names(store) == ["run/a"]
    assert read_all(store, "run/a") == b"old"


def test_a_failed_write_cleans_up(store: PosixStore) -> None:
    for put in (store.write, store.create):
        with pytest.raises(RuntimeError):
            put("run/a", dies_after(b"x"))
    store.create("run/a", [b"x"])
    with pytest.raises(Exists):
        store.create("run/a", [b"x"])
    assert leftovers(store.root) == []


def test_bytes_are_synced_before_the_name_and_directories_after(store: PosixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def where(fd: int) -> str:
        path = target_of(fd).removeprefix(store.root)
        return "part" if path.endswith(".part") else path or "/"

    def logged(word: Callable[[int], str], call: Callable[..., None]) -> Callable[..., None]:
        def wrapped(*args: Any, **kwargs: Any) -> None:
            done.append(word(args[0]))
            call(*args, **kwargs)

        return wrapped

    monkeypatch.setattr(os, "fsync", logged(where, os.fsync))
    monkeypatch.setattr(os, "rename", logged(lambda _: "rename", os.rename))
    monkeypatch.setattr(os, "link", logged(lambda _: "link", os.link))
    store.write("run/dir/a", [b"x"])
    store.create("run/dir/b", [b"x"])
    store.delete("run/dir/b")
    assert done == ["/", "/run", "part", "rename", "/run/dir", "part", "link", "/run/dir", "/run/dir"]


@pytest.mark.parametrize(("call", "code"), [("fsync", errno.EIO), ("close", errno.EDQUOT), ("write", errno.ENOSPC)])
def test_an_error_at_any_step_of_writing_is_told_and_nothing_appears(
    store: PosixStore, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    """NFS tells that bytes were lost only at fsync or close."""
    real = getattr(os, call)

    def fails(fd: int, *rest: object) -> object:
        if target_of(fd).endswith(".part"):
            if call == "close":
                real(fd)
            raise OSError(code, os.strerror(code))
        return real(fd, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fails)
        with pytest.raises(StoreError, match="run/a: "):
            store.write("run/a", [b"x"])
    assert names(store) == leftovers(store.root) == []


def test_short_writes_are_continued(store: PosixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, view: write(fd, view[:3]))
    store.write("a", [b"0123456789"])
    assert read_all(store, "a") == b"0123456789"


def test_an_error_of_the_source_is_not_blamed_on_the_store(store: PosixStore) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"x"
        raise PermissionError(errno.EACCES, "the source")

    with pytest.raises(PermissionError, match="the source"):
        store.write("a", chunks())


def test_a_full_disk_is_told_with_a_hint_and_room_made_lets_it_go_on(small: Path) -> None:
    store = PosixStore(str(small))
    store.write("keep", [b"x" * 1000])
    with pytest.raises(StoreError, match="run/big: no space left") as caught:
        store.write("run/big", (b"x" * (1 << 18) for _ in range(8)))
    assert "make room" in caught.value.hint
    assert names(store) == ["keep"]
    assert leftovers(store.root) == []
    store.write("run/big", (b"x" * (1 << 17) for _ in range(6)))


def test_a_read_only_store_is_readable_and_says_so_when_written(small: Path) -> None:
    store = PosixStore(str(small))
    store.write("run/a", [b"x"])
    subprocess.run(["mount", "-o", "remount,ro", small], check=True)
    assert read_all(store, "run/a") == b"x"
    changes: list[Callable[[], None]] = [
        lambda: store.write("run/b", [b"x"]),
        lambda: store.create("new/b", [b"x"]),
        lambda: store.delete("run/a"),
    ]
    for change in changes:
        with pytest.raises(StoreError) as caught:
            change()
        assert "read-only" in caught.value.hint


def test_a_directory_without_permission_is_no_empty_one(store: PosixStore) -> None:
    store.write("run/a", [b"x"])
    program = (
        "import os, sys\n"
        "from ckptsync.stores.posix import PosixStore\n"
        "from ckptsync.errors import NotFound, StoreError\n"
        "if os.getuid() == 0: os.setgid(65534); os.setuid(65534)\n"
        "store = PosixStore(sys.argv[1])\n"
        "for call in (lambda: list(store.names('')), lambda: store.size('run/a'), lambda: store.write('run/b', [b''])):\n"
        "    try: call()\n"
        "    except StoreError as e: print(type(e).__name__, 'user that ckptsync runs as' in e.hint)\n"
    )
    for path in (Path(store.root), *Path(store.root).parents[:3]):
        path.chmod(0o755)
    Path(store.root, "run").chmod(0o000)
    done = subprocess.run([sys.executable, "-c", program, store.root], capture_output=True, text=True, check=True)
    Path(store.root, "run").chmod(0o755)
    assert done.stdout == "StoreError True\n" * 3, done.stderr


def test_modes_follow_the_umask(store: PosixStore) -> None:
    before = os.umask(0o027)
    try:
        store.write("run/w", [b"x"])
        store.create("run/c", [b"x"])
    finally:
        os.umask(before)
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in Path(store.root).rglob("*")}
    assert modes == {"run": 0o750, "w": 0o640, "c": 0o640}


def test_a_file_replaced_behind_the_stores_back_is_read_anew(store: PosixStore) -> None:
    store.write("a", [b"old"])
    assert read_all(store, "a") == b"old"
    Path(store.root, "b").write_bytes(b"new")
    Path(store.root, "b").rename(Path(store.root, "a"))
    assert read_all(store, "a") == b"new"
    Path(store.root, "a").unlink()
    with pytest.raises(NotFound):
        store.read_into("a", 0, memoryview(bytearray(3)))


def test_a_name_is_opened_again_after_a_while(store: PosixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write("a", [b"old"])
    os.link(f"{store.root}/a", f"{store.root}/backup")  # so that the link count of what is open does not fall to zero
    assert read_all(store, "a") == b"old"
    PosixStore(store.root).write("a", [b"new"])
    monkeypatch.setattr(posix, "TRUSTED_S", 0.0)
    assert read_all(store, "a") == b"new"


def test_deleting_the_last_file_takes_empty_directories_but_never_the_root(store: PosixStore) -> None:
    for name in ["run/checkpoint-1/a", "run/checkpoint-1/dir/b", "run/checkpoint-2/a"]:
        store.write(name, [b"x"])
    store.delete("run/checkpoint-1/a")
    store.delete("run/checkpoint-1/dir/b")
    assert [p.name for p in Path(store.root, "run").iterdir()] == ["checkpoint-2"]
    store.delete("run/checkpoint-2/a")
    assert list(Path(store.root).iterdir()) == []


def test_writers_outlive_deleters_of_the_directories_they_write_to(store: PosixStore) -> None:
    other = PosixStore(store.root)
    program = (
        "import sys\nfrom ckptsync.stores.posix import PosixStore\nstore = PosixStore(sys.argv[1])\n"
        "for n in range(300):\n    store.write('a/b/c/theirs', [b'x'])\n    store.delete('a/b/c/theirs')\n"
    )
    deleter = subprocess.Popen([sys.executable, "-c", program, store.root])
    while deleter.poll() is None:
        other.write("a/b/c/ours", [b"x"])
        other.delete("a/b/c/ours")
    assert deleter.returncode == 0
    assert names(store) == []


def test_where_links_are_refused_an_exclusive_rename_claims_the_name(store: PosixStore) -> None:
    at = os.open(store.root, os.O_RDONLY)
    try:
        Path(store.root, "part").write_bytes(b"x")
        posix._rename_if_free(at, "part", "a")
        Path(store.root, "part").write_bytes(b"y")
        with pytest.raises(FileExistsError):
            posix._rename_if_free(at, "part", "a")
    finally:
        os.close(at)
    assert read_all(store, "a") == b"x"


def test_a_link_whose_reply_was_lost_is_a_success(store: PosixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def lost(*args: object, **kwargs: object) -> None:
        link(*args, **kwargs)  # type: ignore[arg-type]
        raise FileExistsError(errno.EEXIST, "sent again by the NFS client")

    monkeypatch.setattr(os, "link", lost)
    store.create("a", [b"x"])
    assert read_all(store, "a") == b"x"
    assert leftovers(store.root) == []


def test_reading_keeps_few_files_open_and_lets_go_of_them(store: PosixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(300):
        Path(store.root, f"{n:03}").write_bytes(b"x")
    before = open_descriptors()
    for n in range(300):
        read_all(store, f"{n:03}")
    assert open_descriptors() - before <= 128
    monkeypatch.setattr(posix, "TRUSTED_S", 0.0)
    names(store)
    assert open_descriptors() - before <= 0
