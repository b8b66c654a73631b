"""An order carried out: all of it appears at once, proven; killed at any moment, the next try makes the same of it."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from ckptsync.errors import ConfigError, Corrupt, NotFound
from ckptsync.pull.bringing import carry_out, foreseen
from ckptsync.pull.landing import Landing
from ckptsync.stores.contract import About, Chunk, Store, read_all
from ckptsync.stores.memory import MemoryStore
from tests.pulling import ALL, SHARD, lying, order, pull, store_of_two
from tests.verified import flip

FEW = ("fsdp/__1_0.distcp", "rng_state_0.pth")
CHANGES = ("open", "os.rename", "os.utime", "os.mkdir", "os.truncate", "os.remove")


def test_a_checkpoint_appears_whole_with_its_times(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    store = store_of_two()
    done = carry_out(store, Landing(tmp_path / "out", order(store)), lambda done, total: told.append((done, total)))
    assert lying(tmp_path / "out") == {f"checkpoint-4/{path}": data for path, data in ALL.items()}
    assert {p.stat().st_mtime_ns for p in (tmp_path / "out/checkpoint-4").rglob("*")} == {1000}
    assert (tmp_path / "out/checkpoint-4").stat().st_mtime_ns == 1000
    assert (done.files, done.there, done.failed, done.where) == (7, 0, {}, tmp_path / "out/checkpoint-4")
    assert told[-1] == (done.size, done.size) == (sum(map(len, ALL.values())),) * 2


def test_what_lies_there_already_is_proven_and_not_brought_again(tmp_path: Path) -> None:
    store = store_of_two()
    pull(store, tmp_path)
    store.delete(SHARD)  # it is not asked for it
    landing = Landing(tmp_path, order(store_of_two()))
    assert carry_out(store, landing).there == foreseen(landing).there == 7


@pytest.mark.parametrize("spoil", ["flip", "delete"])
def test_damage_is_never_in_place_and_the_next_try_brings_only_that(tmp_path: Path, spoil: str) -> None:
    store, good = store_of_two(), store_of_two()
    asked = order(good)
    flip(store, SHARD, 1000) if spoil == "flip" else store.delete(SHARD)
    failed = carry_out(store, Landing(tmp_path, asked)).failed
    assert {path: type(e) for path, e in failed.items()} == {"fsdp/__1_0.distcp": Corrupt if spoil == "flip" else NotFound}
    assert not (tmp_path / "checkpoint-4").exists()
    assert foreseen(Landing(tmp_path, asked)).there == 6
    for name in [e.name for e in good.names("run/checkpoint-4/") if e.name != SHARD]:
        good.delete(name)
    assert carry_out(good, Landing(tmp_path, asked)).there == 6
    assert lying(tmp_path / "checkpoint-4") == ALL


def test_what_rotted_here_since_the_last_try_is_brought_again(tmp_path: Path) -> None:
    store = store_of_two()
    data = read_all(store, SHARD)
    store.delete(SHARD)
    asked = order(store_of_two())
    carry_out(store, Landing(tmp_path, asked))
    (left,) = tmp_path.glob(".checkpoint-4.pull-*")
    (left / "rng_state_0.pth").write_bytes(b"r?")
    store.write(SHARD, [data])
    assert carry_out(store, Landing(tmp_path, asked)).there == 5
    assert lying(tmp_path / "checkpoint-4") == ALL


def test_other_bytes_under_the_checkpoints_name_are_left_alone(tmp_path: Path) -> None:
    pull(store_of_two(), tmp_path)
    path = tmp_path / "checkpoint-4/rng_state_0.pth"
    path.write_bytes(b"x0")
    with pytest.raises(ConfigError, match=r"rng_state_0\.pth with other bytes"):
        pull(store_of_two(), tmp_path)
    assert path.read_bytes() == b"x0"


class Deadly(MemoryStore):
    """Kills its process at the nth thing that happens: a read of it, or a change to a directory."""

    def __init__(self, other: Store, lives: int) -> None:
        super().__init__()
        for entry in other.names(""):
            self.write(entry.name, [read_all(other, entry.name)])
        self._lives, self._lock = lives, threading.Lock()
        sys.addaudithook(lambda event, _: self.happen() if event in CHANGES else None)

    def happen(self) -> None:
        with self._lock:
            self._lives -= 1
            if self._lives == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        self.happen()
        super().read_into(name, start, out)

    def write(self, name: str, chunks: object, about: About | None = None) -> None:
        data: list[Chunk] = list(chunks)  # type: ignore[call-overload]
        super().write(name, data)


def few(destination: Path) -> Landing:
    asked = order(store_of_two())
    kept = tuple(f for f in asked.files if f.under in FEW)
    return Landing(destination, dataclasses.replace(asked, files=kept, times=dict.fromkeys(FEW, 1000), pointers={"latest": b"4"}))


def dies(store: Store, destination: Path, lives: int) -> bool:
    child = os.fork()
    if child == 0:
        try:
            carry_out(Deadly(store, lives), few(destination))
        except BaseException:  # noqa: BLE001
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), status
    return status == signal.SIGKILL


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_killed_at_every_moment_it_is_not_there_or_whole_and_again_it_is_whole(tmp_path: Path) -> None:
    store, lives = store_of_two(), 1
    while dies(store, tmp_path / str(lives), lives):
        destination = tmp_path / str(lives)
        if (destination / "checkpoint-4").exists():
            assert lying(destination / "checkpoint-4") == {path: ALL[path] for path in FEW}
        carry_out(store, few(destination))
        assert lying(destination) == {f"checkpoint-4/{path}": ALL[path] for path in FEW} | {"latest": b"4"}
        assert (destination / "checkpoint-4").stat().st_mtime_ns == 1000
        lives += 1
    assert lives > 25
