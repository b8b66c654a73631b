"""What a directory store makes of kills, full disks, lost replies and refused permissions."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptsync.errors import Exists, StoreError
from ckptsync.stores.contract import read_all
from ckptsync.stores.posix.part_file import is_unfinished
from ckptsync.stores.posix.store import PosixStore
from tests.support.store_contract import dies_after, names


@pytest.fixture
def store(tmp_path: Path) -> PosixStore:
    (tmp_path / "store").mkdir()
    return PosixStore(str(tmp_path / "store"))


def on_a_small_disk(tmp_path: Path, program: str) -> None:
    """Run ``program`` with a file system of 1 MiB at ``sys.argv[1]``, which goes away with the
    process.
    """
    place = tmp_path / "small"
    place.mkdir()
    alone = ["unshare", "--map-root-user", "--mount", "sh", "-e", "-c"]
    mount = 'mount -t tmpfs -o size=1m tmpfs "$1"'
    try:
        if subprocess.run(
            [*alone, mount, "sh", str(place)], capture_output=True, check=False
        ).returncode:
            pytest.skip("mounting is not allowed here, not even in a namespace of its own")
    except FileNotFoundError:
        pytest.skip("unshare is not installed")
    run = [
        *alone,
        f'{mount}; exec "$2" -c "$3" "$1"',
        "sh",
        str(place),
        sys.executable,
        SMALL_DISK + textwrap.dedent(program),
    ]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


SMALL_DISK = """
import os, subprocess, sys
from pathlib import Path
from ckptsync.errors import StoreError
from ckptsync.stores.contract import read_all
from ckptsync.stores.posix.store import PosixStore

store = PosixStore(sys.argv[1])

def refusal(call):
    try:
        call()
    except StoreError as e:
        return f"{e}; {e.hint}"
    raise AssertionError("not refused")
"""


def target_of(fd: int) -> str:
    return str(Path(f"/proc/self/fd/{fd}").readlink())


def leftovers(root: str) -> list[str]:
    return [name for _, _, files in os.walk(root) for name in files if is_unfinished(name)]


def test_a_writer_killed_in_the_middle_leaves_the_old_file_and_no_name(store: PosixStore) -> None:
    store.write("run/a", [b"old"])
    program = (
        "import os, signal, sys\n"
        "from ckptsync.stores.posix.store import PosixStore\n"
        "def chunks():\n"
        "    yield b'half'\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "PosixStore(sys.argv[1]).write('run/a', chunks())\n"
    )
    assert (
        subprocess.run([sys.executable, "-c", program, store.root], check=False).returncode
        == -signal.SIGKILL
    )
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


def test_bytes_are_synced_before_the_name_and_directories_after(
    store: PosixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert done == [
        "/",
        "/run",
        "part",
        "rename",
        "/run/dir",
        "part",
        "link",
        "/run/dir",
        "/run/dir",
    ]


@pytest.mark.parametrize(
    ("call", "code"), [("fsync", errno.EIO), ("close", errno.EDQUOT), ("pwrite", errno.ENOSPC)]
)
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
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, view, start: write(fd, view[:3], start))
    store.write("a", [b"0123456789"])
    assert read_all(store, "a") == b"0123456789"


def test_an_error_of_the_source_is_not_blamed_on_the_store(store: PosixStore) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"x"
        raise PermissionError(errno.EACCES, "the source")

    with pytest.raises(PermissionError, match="the source"):
        store.write("a", chunks())


def test_a_full_disk_is_told_with_a_hint_and_leaves_room_for_what_fits(tmp_path: Path) -> None:
    on_a_small_disk(
        tmp_path,
        """
        store.write("keep", [b"x" * 1000])
        told = refusal(lambda: store.write("run/big", (b"x" * (1 << 18) for _ in range(8))))
        assert "run/big: no space left" in told and "make room" in told, told
        assert [e.name for e in store.names("")] == ["keep"]
        assert not list(Path(store.root, "run").iterdir()), "the unfinished file still takes up \
the room"
        store.write("run/big", (b"x" * (1 << 17) for _ in range(6)))
        """,
    )


def test_a_read_only_store_is_readable_and_says_so_when_written(tmp_path: Path) -> None:
    on_a_small_disk(
        tmp_path,
        """
        store.write("run/a", [b"x"])
        subprocess.run(["mount", "-o", "remount,ro", store.root], check=True)
        assert read_all(store, "run/a") == b"x"
        for change in (lambda: store.write("run/b", [b"x"]), lambda: store.create("new/b", \
[b"x"]), lambda: store.delete("run/a")):
            assert "mounted read-only" in refusal(change)
        """,
    )


def test_a_directory_without_permission_is_no_empty_one(store: PosixStore) -> None:
    store.write("run/a", [b"x"])
    program = (
        "import os, sys\n"
        "from ckptsync.stores.posix.store import PosixStore\n"
        "from ckptsync.errors import NotFound, StoreError\n"
        "os.chdir(sys.argv[1])\n"
        "if os.getuid() == 0: os.setgid(65534); os.setuid(65534)\n"
        "store = PosixStore('/proc/self/cwd')\n"
        "for call in (lambda: list(store.names('')), lambda: store.size('run/a'), lambda: "
        "store.write('run/b', [b''])):\n"
        "    try: call()\n"
        "    except StoreError as e: print(type(e).__name__, str(e)[:4], 'user that ckptsync "
        "runs as' in e.hint)\n"
    )
    Path(store.root).chmod(0o755)
    Path(store.root, "run").chmod(0o000)
    done = subprocess.run(
        [sys.executable, "-c", program, store.root], capture_output=True, text=True, check=True
    )
    Path(store.root, "run").chmod(0o755)
    assert done.stdout == "StoreError run/ True\n" * 3, done.stderr


def test_writers_outlive_deleters_of_the_directories_they_write_to(store: PosixStore) -> None:
    other = PosixStore(store.root)
    program = (
        "import sys\n"
        "from ckptsync.stores.posix.store import PosixStore\n"
        "store = PosixStore(sys.argv[1])\n"
        "for n in range(300):\n"
        "    store.write('a/b/c/theirs', [b'x'])\n"
        "    store.delete('a/b/c/theirs')\n"
    )
    deleter = subprocess.Popen([sys.executable, "-c", program, store.root])
    while deleter.poll() is None:
        other.write("a/b/c/ours", [b"x"])
        other.delete("a/b/c/ours")
    assert deleter.returncode == 0
    assert names(store) == []
