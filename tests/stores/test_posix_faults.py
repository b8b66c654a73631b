"""What a directory store makes of kills, full disks, lost replies and refused permissions."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ckptsync.errors import Exists, NotFound, StoreError, Transient
from ckptsync.stores.oserrors import HINTS, StoreErrors
from ckptsync.stores.posix.draft import is_unfinished
from ckptsync.stores.posix.store import PosixStore
from tests.support import cloning_disk
from tests.support.store_contract import dies_after, names


@pytest.fixture
def store(tmp_path: Path) -> PosixStore:
    (tmp_path / "store").mkdir()
    return PosixStore(str(tmp_path / "store"))


def leftovers(root: str) -> list[str]:
    return [name for _, _, files in os.walk(root) for name in files if is_unfinished(name)]


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

    def log(name: str, call: Callable[..., None]) -> None:
        def logged(*args: Any, **kwargs: Any) -> None:
            target = str(Path(f"/proc/self/fd/{args[0]}").readlink()) if name == "fsync" else name
            path = target.removeprefix(store.root)
            done.append("part" if path.endswith(".part") else path or "/")
            call(*args, **kwargs)

        monkeypatch.setattr(os, name, logged)

    for name in ("fsync", "rename", "link"):
        log(name, getattr(os, name))
    store.write("run/dir/a", [b"x"])
    store.create("run/dir/b", [b"x"])
    store.delete("run/dir/b")
    with pytest.raises(Exists):
        store.create("run/dir/a", [b"of a writer that may have been killed before its last fsync"])
    assert done[:5] == ["/", "/run", "part", "rename", "/run/dir"]
    assert done[5:] == ["part", "link", *["/run/dir"] * 3]


def test_an_error_of_the_source_is_not_blamed_on_the_store(store: PosixStore) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"x"
        raise PermissionError(errno.EACCES, "the source")

    with pytest.raises(PermissionError, match="the source"):
        store.write("a", chunks())


def test_writers_outlive_deleters_of_the_directories_they_write_to(store: PosixStore) -> None:
    def write_and_delete(name: str) -> None:
        own = PosixStore(store.root)
        for _ in range(200):
            own.write(f"a/b/c/{name}", [b"x"])
            own.delete(f"a/b/c/{name}")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write_and_delete, ["ours", "theirs"]))
    assert names(store) == []


def test_a_store_shares_the_bytes_of_what_is_pushed_where_the_file_system_can(
    tmp_path: Path,
) -> None:
    """`tests/support/cloning_disk.py`, where an XFS is mounted."""
    if not shutil.which("mkfs.xfs") or os.geteuid() != 0:
        pytest.skip("no mkfs.xfs here, or this user may mount nothing")
    image, place = tmp_path / "image", tmp_path / "shared"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(512 << 20)  # with holes: it takes up what is written
    subprocess.run(["mkfs.xfs", "-qm", "reflink=1", str(image)], capture_output=True, check=True)
    mounted = ["unshare", "--mount", "sh", "-ec", 'mount -o loop "$1" "$2"; shift 2; "$@"', "sh"]
    mounted += [str(image), str(place)]
    if subprocess.run([*mounted, "true"], capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here, not even in a namespace of its own")
    inside = ["pytest", "-p", "no:cacheprovider", f"--basetemp={tmp_path}/inside"]
    done = subprocess.run(
        [*mounted, sys.executable, "-m", *inside, str(cloning_disk.__file__)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"CKPTSYNC_TEST_MOUNTED": str(place)},
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]


PASSING = (
    "EAGAIN EINTR EBUSY ENOMEM ENOBUFS EMFILE ENFILE ENOLCK ESTALE ETIMEDOUT ECONNRESET ENOTCONN"
    " ECONNREFUSED ECONNABORTED EPIPE EHOSTDOWN EHOSTUNREACH ENETDOWN ENETUNREACH"
)


@pytest.mark.parametrize("is_remote", [False, True])
def test_an_error_of_the_system_is_one_of_the_store_which_names_path_and_remedy(
    *, is_remote: bool
) -> None:
    errors = StoreErrors("/store", is_remote=is_remote)
    passing = {getattr(errno, name) for name in PASSING.split()}
    for code in passing | HINTS.keys() - {errno.EIO}:
        found = errors.error("run/a", OSError(code, os.strerror(code)))
        assert type(found) is (Transient if code in passing else StoreError)
        assert str(found) == f"run/a: {os.strerror(code).lower()}, in the store /store"
        assert found.hint == HINTS.get(code, "")
    with pytest.raises(Exists, match="run/a: already there"), errors.about("run/a"):
        raise FileExistsError(errno.EEXIST, "File exists")
    with pytest.raises(StoreError) as caught, errors.about("run/a"):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")
    assert not isinstance(caught.value, NotFound), "the caller knows what is missing"
