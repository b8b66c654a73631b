"""When systemd's watchdog is fed."""

from dataclasses import replace
from pathlib import Path

from ckptsync.daemon.progress import LEAST_BYTES, Mark, advanced, mark
from ckptsync.daemon.tick import Tick

NAMES = ["heartbeat", "worker"]


def at(idle: set[str], finished: tuple[int, int], moved: int = 0, cpu: float = 0.0) -> Mark:
    return Mark(frozenset(idle), finished, moved, cpu)


def test_ticks_that_rest_are_progress() -> None:
    assert advanced(at({"worker", "heartbeat"}, (1, 1)), at({"worker", "heartbeat"}, (1, 1)), NAMES)


def test_a_long_tick_is_progress_while_bytes_or_cpu_move() -> None:
    before = at({"heartbeat"}, (1, 1))
    assert advanced(before, at({"heartbeat"}, (2, 1), LEAST_BYTES), NAMES)
    assert advanced(before, at({"heartbeat"}, (2, 1), 0, 1.0), NAMES)
    assert advanced(before, replace(before, signs=1), NAMES), "a transfer under a small bandwidth, or one that is tried again"


def test_a_tick_that_hangs_is_none_whatever_the_others_do() -> None:
    assert not advanced(at({"heartbeat"}, (1, 1)), at({"heartbeat"}, (9, 1), 1000, 0.01), NAMES)
    assert not advanced(at({"heartbeat"}, (1, 1)), at(set(), (9, 1)), NAMES)


def test_a_tick_that_ended_in_between_is_progress_though_it_runs_again() -> None:
    assert advanced(at({"heartbeat"}, (1, 1)), at({"heartbeat"}, (1, 2)), NAMES)


def test_a_mark_sees_work() -> None:
    tick = Tick("worker", 1, lambda: None, print)
    before = mark([tick])
    tick()
    with Path("/dev/zero").open("rb") as f:
        f.read(2 * LEAST_BYTES)
    after = mark([tick])
    assert (before.finished, after.finished) == ((0,), (1,))
    assert after.moved - before.moved >= LEAST_BYTES
