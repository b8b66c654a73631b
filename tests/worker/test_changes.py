"""Whatever happens to a file while it is read and sent: what was seen of it is never committed, and
the next try stores what is there then.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptsync.errors import Incomplete
from ckptsync.stores.contract import Store
from ckptsync.worker.local_save import CHUNK
from tests.support.worker_in_process import (
    in_memory,
    kept,
    lay,
    manifests,
    on_disk,
    push_now,
)

BEFORE = {
    "trainer_state.json": b'{"global_step": 4}',
    "shard": bytes(range(256)) * (2 * CHUNK // 256) + b"end",
    "z": b"last",
}


def grows(path: Path) -> None:
    with path.open("ab") as f:
        f.write(b"more")


def shrinks(path: Path) -> None:
    os.truncate(path, CHUNK + 1)


def ends_early_and_is_filled_up_again(path: Path) -> None:
    size, times = path.stat().st_size, (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    os.truncate(path, CHUNK + 1)
    os.truncate(path, size)
    os.utime(path, ns=times)


def is_written_in_location(path: Path) -> None:
    with path.open("r+b") as f:
        f.write(b"changed")


def is_written_in_location_and_its_time_set_back(path: Path) -> None:
    times = (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    is_written_in_location(path)
    os.utime(path, ns=times)


def is_renamed_over(path: Path) -> None:
    shutil.copy2(path, path.with_name("fresh"))
    path.with_name("fresh").rename(path)


vanishes = Path.unlink


def vanishes_with_its_directory(path: Path) -> None:
    shutil.rmtree(path.parent)


CHANGES = (
    grows,
    shrinks,
    ends_early_and_is_filled_up_again,
    is_written_in_location,
    is_written_in_location_and_its_time_set_back,
    is_renamed_over,
    vanishes,
    vanishes_with_its_directory,
)


def pushed(source: Path, store: Store, strike: Callable[[], object], after: int) -> None:
    """Push, and do something once so many bytes have been read."""
    read = 0

    def passed(count: int) -> None:
        nonlocal read
        is_before, read = read < after, read + count
        if is_before and read >= after:
            strike()

    push_now(source, store, "n0", "run", passed)


MIDWAY, READ = CHUNK, sum(map(len, BEFORE.values()))
CASES = [
    *((change, on_disk, after) for change in CHANGES for after in (MIDWAY, READ)),
    (ends_early_and_is_filled_up_again, in_memory, MIDWAY),
]


@pytest.mark.parametrize(("change", "made", "after"), CASES)
def test_a_source_that(
    tmp_path: Path, made: Callable[[Path], Store], change: Callable[[Path], None], after: int
) -> None:
    store, source = made(tmp_path), lay(tmp_path / "out", BEFORE)
    with pytest.raises(Incomplete) as caught:
        pushed(source, store, lambda: change(source / "shard"), after)
    is_gone = change in (vanishes, vanishes_with_its_directory)
    assert ("push a later" if is_gone else "push it again") in caught.value.hint.lower()
    assert manifests(store) == []
    if source.exists():
        push_now(source, store, "n0", "run")
        now = {p.name: p.read_bytes() for p in source.iterdir()}
        assert kept(store) == {"checkpoint-4": {"n0": now}}


def test_a_pin_that_comes_and_a_name_that_rotation_takes_are_no_change(tmp_path: Path) -> None:
    store, source = on_disk(tmp_path), lay(tmp_path / "out", BEFORE)
    pushed(source, store, lambda: os.link(source / "shard", tmp_path / "pin"), CHUNK)
    assert kept(store) == {"checkpoint-4": {"n0": BEFORE}}
