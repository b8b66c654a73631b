"""The id of a node, and its clock beside the store's."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckptsync.records.store_paths import checked_node
from ckptsync.stores.contract import UNKNOWN, About, Chunk
from ckptsync.stores.memory import MemoryStore
from ckptsync.worker.node_identity import Clock, clock_jump, node_id, umask


def test_only_who_sets_a_clock_makes_it_jump() -> None:
    assert clock_jump(1000.0, 1001.5) == 0.0
    assert clock_jump(1000.0, 4600.0) == 3600.0
    assert clock_jump(4600.0, 1000.0) == -3600.0


class Counted(MemoryStore):
    """Counts measurements."""

    measured = 0

    def write(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        self.measured += 1
        time.sleep(0.01)  # so that threads meet
        super().write(name, chunks, about)


def test_a_clock_is_compared_once_an_hour_before_anybody_waits_and_not_while_idle() -> None:
    store = Counted()
    clock = Clock(store, "n0")
    clock.measure_in_time(is_idle=True)
    assert store.measured == 0
    clock.notice(1.0)
    clock.measure_in_time(is_idle=False)
    for now in (2.0, 3500.0):
        clock.notice(now)
        assert (clock.measure(), store.measured) == (clock.last, 1)
    clock.notice(3602.0)
    clock.measure()
    assert store.measured == 2


def test_a_clock_that_was_set_is_compared_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = Counted()
    clock = Clock(store, "n0")
    clock.measure()
    really = time.time
    monkeypatch.setattr(time, "time", lambda: really() - 3600)
    clock.notice(10.0)
    clock.measure()
    assert store.measured == 2


def test_threads_that_ask_at_once_or_late_have_one_measurement() -> None:
    store = Counted()
    clock = Clock(store, "n0")
    clock.notice(5000.0)
    clock.notice(10.0)  # of a thread that had to wait
    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(lambda _: clock.measure(), range(4)))) == 1
    clock.notice(5010.0)
    clock.measure()
    assert store.measured == 1


def test_the_id_is_the_host_and_a_hash_of_the_machine(tmp_path: Path) -> None:
    (tmp_path / "id").write_text("3d1219c7c4c5404aaa1f6d2a48adfda4\n")
    (tmp_path / "other").write_text("4d1219c7c4c5404aaa1f6d2a48adfda4\n")
    one, other = node_id("gpu-7", tmp_path / "id"), node_id("gpu-7", tmp_path / "other")
    assert one.startswith("gpu-7-")
    assert len(one) == len("gpu-7-") + 8
    assert one == node_id("gpu-7", tmp_path / "id") != other
    (tmp_path / "other").write_text("uninitialized\n")  # as systemd leaves it in an image
    assert node_id("gpu-7", tmp_path / "other") == node_id("gpu-7", tmp_path / "none")


@pytest.mark.parametrize("host", ["", "..", "a b/c", "ünï", "x" * 300, "-"])
def test_any_host_name_makes_a_valid_id(tmp_path: Path, host: str) -> None:
    assert checked_node(node_id(host, tmp_path / "none"))


def test_the_umask_is_as_the_process_has_it() -> None:
    before = os.umask(0o027)
    try:
        assert umask() == "0027"
    finally:
        os.umask(before)
