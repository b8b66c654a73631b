"""When systemd's watchdog is fed."""

import threading
from dataclasses import replace
from pathlib import Path

from ckptsync.service.periodic import Periodic
from ckptsync.service.watchdog import HUNG, LEAST_BYTES, LEAST_OWN_BYTES, Mark, Silences, Work, advanced, mark
from ckptsync.stores import signs
from ckptsync.worker.together import Together

NAMES = ["heartbeat", "look", "worker"]
STILL = {"look": Work(0, 0.0)}


def at(idle: set[str], finished: tuple[int, int, int], moved: int = 0, cpu: float = 0.0) -> Mark:
    return Mark(frozenset(idle), finished, Work(moved, cpu), 0, STILL)


def test_ticks_that_rest_are_progress() -> None:
    assert advanced(at(set(NAMES), (1, 1, 1)), at(set(NAMES), (1, 1, 1)), NAMES)


def test_a_long_tick_is_progress_while_bytes_or_cpu_move() -> None:
    before = at({"heartbeat", "look"}, (1, 1, 1))
    assert advanced(before, at({"heartbeat", "look"}, (2, 1, 1), LEAST_BYTES), NAMES)
    assert advanced(before, at({"heartbeat", "look"}, (2, 1, 1), 0, 1.0), NAMES)
    assert advanced(before, replace(before, signs=1), NAMES), "a transfer under a small bandwidth, or one that is tried again"


def test_a_tick_that_hangs_is_none_whatever_the_others_do() -> None:
    assert not advanced(at({"heartbeat", "look"}, (1, 1, 1)), at({"heartbeat", "look"}, (9, 9, 1), 1000, 0.01), NAMES)
    assert not advanced(at({"heartbeat", "look"}, (1, 1, 1)), at(set(), (9, 9, 1)), NAMES)


def test_a_look_that_hangs_is_none_though_a_send_goes_on() -> None:
    before, now = at({"heartbeat"}, (1, 1, 1)), at({"heartbeat"}, (1, 1, 1), 100 * LEAST_BYTES, 9.0)
    assert not advanced(before, replace(now, signs=5), NAMES)
    assert advanced(before, replace(now, apart={"look": Work(LEAST_OWN_BYTES, 0.0)}), NAMES), "it reads"
    assert advanced(before, replace(now, apart={"look": Work(0, 0.1)}), NAMES), "it computes"


def test_a_look_that_works_is_no_sign_of_life_of_a_send() -> None:
    before, now = at({"heartbeat"}, (1, 1, 1)), at({"heartbeat"}, (1, 9, 1))
    assert not advanced(before, replace(now, apart={"look": Work(LEAST_BYTES, 2.0)}), NAMES)


def test_a_tick_that_ended_in_between_is_progress_though_it_runs_again() -> None:
    assert advanced(at({"heartbeat"}, (1, 1, 1)), at({"heartbeat"}, (1, 2, 2)), NAMES)


def read_zeros() -> None:
    with Path("/dev/zero").open("rb") as f:
        for _ in range(200):
            f.read(LEAST_BYTES)


def test_a_mark_sees_work_and_whose_it_is() -> None:
    look, worker = Periodic("look", 1, lambda: None, print), Periodic("worker", 1, read_zeros, print)
    threads = [threading.Thread(target=tick) for tick in (look, worker)]
    before = mark([look, worker])
    for thread in threads:
        thread.start()
        thread.join()
    after = mark([look, worker])
    assert (before.finished, after.finished) == ((0, 0), (1, 1))
    assert after.work.moved - before.work.moved >= 200 * LEAST_BYTES


def test_the_work_of_a_look_is_its_own() -> None:
    seen: list[Mark] = []

    def body() -> None:
        read_zeros()
        seen.append(mark([look]))

    look = Periodic("look", 1, body, print)
    before = mark([look])
    look()
    assert seen[0].apart["look"].moved >= 200 * LEAST_BYTES
    assert seen[0].work.moved - before.work.moved < LEAST_BYTES
    assert seen[0].apart["look"].cpu > 0


def at_work(name: str) -> Periodic:
    tick = Periodic(name, 1, lambda: None, print)
    tick.is_running = True
    return tick


def test_a_lane_that_hangs_is_noticed_though_the_other_one_works() -> None:
    now = [0.0]
    silences, ticks, together = Silences(lambda: now[0]), [at_work("lane-1"), at_work("lane-2"), at_work("look")], Together(2)
    for _ in range(4):
        assert silences.hung(ticks) == ()
        now[0] += HUNG / 4
        with signs.of("lane-2"):
            together.each(together.passed, [1, 2])
    now[0] += 1
    assert silences.hung(ticks) == ("lane-1",)


def test_a_lane_that_rests_or_ends_something_does_not_hang() -> None:
    now = [0.0]
    lane = at_work("lane-1")
    silences = Silences(lambda: now[0])
    for rests in (True, False):
        assert silences.hung([lane]) == ()
        now[0] += 2 * HUNG
        lane.is_running, lane.finished = not rests, lane.finished + (not rests)
        assert silences.hung([lane]) == ()
