"""What a directory store makes of kills, full disks, lost replies and refused permissions."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptsync.errors import Exists
from ckptsync.stores.contract import read_all
from ckptsync.stores.posix.part_file import is_unfinished
from ckptsync.stores.posix.store import PosixStore
from tests.support.store_contract import dies_after, names


@pytest.fixture
def store(tmp_path: Path) -> PosixStore:
    (tmp_path / "store").mkdir()
    return PosixStore(str(tmp_path / "store"))


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


def test_an_error_of_the_source_is_not_blamed_on_the_store(store: PosixStore) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"x"
        raise PermissionError(errno.EACCES, "the source")

    with pytest.raises(PermissionError, match="the source"):
        store.write("a", chunks())


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
