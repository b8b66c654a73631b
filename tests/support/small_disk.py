"""The conformance suite, and what a disk that fills up adds to it: run by
`tests/stores/test_posix_faults.py`, where such a disk is mounted; and a smaller one for a program.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptsync.errors import StoreError
from ckptsync.stores.contract import About, Chunk, read_all
from ckptsync.stores.posix.store import PosixStore
from tests.support.store_contract import names

SIZE = 64 << 20
MOUNTED = os.environ.get("CKPTSYNC_TEST_MOUNTED", "")
Put = Callable[..., None]


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
        "import sys\nfrom pathlib import Path\n" + textwrap.dedent(program),
    ]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def store() -> Iterator[PosixStore]:
    root = Path(MOUNTED, "store")
    root.mkdir()
    made = PosixStore(str(root))
    yield made
    for name in names(made):
        made.delete(name)  # and lets go of it: what is still open still takes up room
    shutil.rmtree(root)


def megabytes(count: int) -> Iterator[bytes]:
    return (bytes([n]) * (1 << 20) for n in range(count))


def free(store: PosixStore) -> int:
    found = os.statvfs(store.root)
    return found.f_bavail * found.f_frsize


def fill(store: PosixStore) -> dict[str, bytes]:
    """Write until nothing more fits; what was acknowledged."""
    kept: dict[str, bytes] = {}
    while True:
        name, content = f"run/{len(kept)}", b"%d" % len(kept) * (3 << 20)
        try:
            store.write(name, [content])
        except StoreError:
            return kept
        kept[name] = content


@pytest.mark.parametrize("method", ["write", "create"])
@pytest.mark.parametrize("about", [About(), About(16 << 20, "node/file/1")])
def test_a_write_that_does_not_fit_leaves_what_was_there_and_succeeds_once_there_is_room(
    store: PosixStore, method: str, about: About
) -> None:
    put: Put = getattr(store, method)
    kept = fill(store)
    before = free(store)
    with pytest.raises(
        StoreError, match=f"run/big: no space left on device, in the store {store.root}"
    ) as caught:
        put("run/big", megabytes(16), about)
    assert (type(caught.value), "make room" in caught.value.hint) == (StoreError, True)
    assert free(store) == before, "what did not fit still takes up room"
    assert {name: read_all(store, name) for name in names(store)} == kept
    for name in [*kept][:6]:
        store.delete(name)
    put("run/big", megabytes(16), about)
    assert read_all(store, "run/big") == b"".join(megabytes(16))


def test_on_a_full_disk_a_file_is_not_replaced_by_half_of_another(store: PosixStore) -> None:
    store.write("run/precious", [b"p" * 1000])
    fill(store)
    with pytest.raises(StoreError, match="no space left"):
        store.write("run/precious", megabytes(16))
    assert read_all(store, "run/precious") == b"p" * 1000


def test_on_a_full_disk_everything_can_still_be_read_listed_and_deleted(store: PosixStore) -> None:
    kept = fill(store)
    assert sorted(kept) == names(store)
    for name in kept:
        store.delete(name)
    assert names(store) == []
    assert free(store) > SIZE - (1 << 20)


def test_a_disk_that_is_filled_by_somebody_else_between_two_chunks(store: PosixStore) -> None:
    def chunks() -> Iterator[Chunk]:
        yield b"x" * (1 << 20)
        with (
            Path(MOUNTED, "ballast").open("wb", buffering=0) as ballast,
            contextlib.suppress(OSError),
        ):
            while True:
                ballast.write(bytes(1 << 20))
        yield b"y" * (1 << 20)

    try:
        with pytest.raises(StoreError, match="no space left"):
            store.write("run/a", chunks())
        assert names(store) == []
    finally:
        Path(MOUNTED, "ballast").unlink()
