"""Limits of transfers: schedules of a bandwidth, the token bucket that follows them, signs of life,
and the end of the process.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.errors import Transient
from ckptsync.stores import progress_signs
from ckptsync.stores.contract import About
from ckptsync.stores.limits import (
    DAYS,
    GATHER,
    LEAST_PIECE,
    MOST_PIECE,
    Schedule,
    TokenBucket,
    Unlimited,
    parse_schedule,
    urgent,
)
from ckptsync.stores.posix.store import PosixStore
from ckptsync.stores.retry import Persistence
from tests.support.rate_limits import Counted


class Clock:
    """Time that passes only where somebody sleeps; the week begins at 0 s, on Monday."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self.sleeps = 0

    def sleep(self, seconds: float) -> None:
        self.sleeps += 1
        assert seconds <= 0.25, "else a new rate, or the end, is felt late"
        self.now += seconds

    def wall(self) -> time.struct_time:
        minutes = int(self.now // 60)
        time_of_day = (minutes // 60 % 24, minutes % 60, 0)
        return time.struct_time((2024, 1, 1, *time_of_day, minutes // 1440 % 7, 1, 0))

    def paces(self, text: str) -> TokenBucket:
        return TokenBucket(
            parse_schedule(text), clock=lambda: self.now, sleep=self.sleep, wall=self.wall
        )


@pytest.mark.parametrize("rate", [100_000, 1_000_000, 50_000_000])
@pytest.mark.parametrize("ask", [1000, LEAST_PIECE])
def test_bytes_take_as_long_as_the_rate_says(rate: int, ask: int) -> None:
    clock, count = Clock(), 3 * rate // ask + 1
    paces = clock.paces(f"{rate}B/s")
    for _ in range(count):
        paces.take(ask)
    exact = count * ask / rate
    assert exact * (1 - 1e-6) <= clock.now <= exact * (1 + 1e-6) + GATHER, (
        "what was waited too long is saved up"
    )


def test_a_heartbeat_goes_at_once_though_much_waits_and_its_bytes_count() -> None:
    clock = Clock()
    paces = clock.paces("15KB/s")
    paces.take(LEAST_PIECE)
    before = clock.now
    with urgent():
        paces.take(1000)
    assert clock.now == before
    paces.take(1000)
    assert clock.now == pytest.approx(before + 2000 / 15000), "twice as long, after `urgent`"
    paces.take(LEAST_PIECE)
    assert clock.now - before == pytest.approx((LEAST_PIECE + 2000) / 15000, abs=GATHER)


def test_who_sends_much_is_woken_twenty_times_a_second_and_not_for_each_piece() -> None:
    """So often a training on all cores is disturbed."""
    clock = Clock()
    paces = clock.paces("50000000B/s")
    for _ in range(1000):
        paces.take(LEAST_PIECE)
    assert clock.sleeps <= clock.now / GATHER + 1


def test_after_an_idle_hour_no_more_than_a_quarter_of_a_second_goes_at_once() -> None:
    clock = Clock()
    paces = clock.paces("1000000B/s")
    clock.now += 3600
    for _ in range(10):
        paces.take(100_000)
    assert clock.now - 3600 == pytest.approx(0.75)


def test_a_new_rate_is_felt_by_who_waits_and_the_night_saves_nothing_for_the_morning() -> None:
    clock = Clock(now=19 * 3600 - 5)
    paces = clock.paces("08:00,1KiB/s 19:00,off")
    paces.take(1 << 20)
    assert clock.now == pytest.approx(19 * 3600, abs=1)
    paces.take(100 << 20)
    assert clock.now == pytest.approx(19 * 3600, abs=1)
    clock.now = morning = (24 + 8) * 3600 + 1.0
    paces.take(2048)
    assert morning + 1 <= clock.now <= morning + 3, "nor does it leave a debt"


class Shared(Clock):
    """Time that passes only where all threads sleep: until the first of them wakes."""

    def __init__(self) -> None:
        super().__init__()
        self._awake, self._wakes, self._changed = 0, list[float](), threading.Condition()

    def run(self, *works: Callable[[], object]) -> None:
        self._awake = len(works)
        with ThreadPoolExecutor(len(works)) as pool:
            for running in [pool.submit(self._run, work) for work in works]:
                running.result(60)

    def sleep(self, seconds: float) -> None:
        assert seconds <= 0.25, "else a new rate, or the end, is felt late"
        with self._changed:
            wake = self.now + seconds
            self._wakes.append(wake)
            self._rest()
            assert self._changed.wait_for(lambda: wake not in self._wakes, 60)

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        finally:
            with self._changed:
                self._rest()

    def _rest(self) -> None:
        self._awake -= 1
        if not self._awake and self._wakes:
            self.now = min(self._wakes)
            self._awake = self._wakes.count(self.now)
            self._wakes = [wake for wake in self._wakes if wake > self.now]
            self._changed.notify_all()


def test_who_asks_for_much_is_not_starved_by_those_who_ask_for_little() -> None:
    clock, ended = Shared(), list[float]()
    paces = clock.paces("1000000B/s")

    def little() -> None:
        for _ in range(400):
            paces.take(10_000)

    def much() -> None:
        for _ in range(10):
            paces.take(200_000)
        ended.append(clock.now)

    clock.run(little, little, little, much)
    assert ended[0] < 5, "it had half of the rate"
    assert clock.now == pytest.approx(14, rel=0.001), "and nobody more than was there"


def order_of(asks: list[int]) -> list[int]:
    """In which order asks go that came one after the other."""
    clock, went = Shared(), list[int]()
    paces = clock.paces("1000000B/s")

    def ask(n: int, count: int) -> None:
        clock.sleep(n * 1e-6)
        paces.take(count)
        went.append(count)

    clock.run(*(partial(ask, n, count) for n, count in enumerate(asks)))
    return went


def test_what_is_little_goes_before_what_is_much_and_otherwise_who_came_first() -> None:
    much = [LEAST_PIECE + 1, LEAST_PIECE, LEAST_PIECE - 1]
    assert order_of([*much, 10, 20]) == [10, 20, *much]


def test_what_is_much_does_not_wait_for_what_is_little_and_came_later() -> None:
    little = list(range(1000, 50_000, 1000))
    went = order_of([LEAST_PIECE, *little])
    assert sum(went[: went.index(LEAST_PIECE)]) < LEAST_PIECE


def test_when_the_end_is_near_nobody_waits_any_longer() -> None:
    clock = Clock()
    progress_signs.announce_shutdown()
    with pytest.raises(Transient, match="while a transfer waited for bandwidth"):
        clock.paces("1000B/s").take(1 << 20)
    assert clock.now == 0


def test_who_waits_for_many_bytes_gives_signs_of_life() -> None:
    clock, before = Clock(), progress_signs.signs()
    clock.paces("1000B/s").take(progress_signs.LEAST)
    assert progress_signs.signs() - before >= clock.now


@pytest.mark.parametrize(
    ("rate", "piece"),
    [("1MB/s", LEAST_PIECE), ("10MB/s", 500_000), ("50MB/s", MOST_PIECE), ("off", MOST_PIECE)],
)
def test_a_piece_is_what_goes_while_one_waits_and_neither_tiny_nor_huge(
    rate: str, piece: int
) -> None:
    assert Clock().paces(rate).piece == piece
    assert Clock(now=20 * 3600).paces(f"08:00,3MB/s 19:00,{rate}").piece == piece


def test_what_a_killed_writer_has_written_to_a_directory_is_not_paced_again(tmp_path: Path) -> None:
    """Else one that is restarted sooner than the bandwidth lets it read never gets on."""
    content, about = random.Random(1).randbytes(3 << 20), About(3 << 20, "origin")

    def killed() -> Iterator[bytes]:
        yield content[: 2 << 20]
        raise Transient("killed")

    with pytest.raises(Transient):
        PosixStore(str(tmp_path)).create("a", killed(), about)
    pace = Counted()
    PosixStore(str(tmp_path), pace=pace).create("a", [content], about)
    assert sum(pace.taken) == 1 << 20
    assert (tmp_path / "a").read_bytes() == content


SUN = 6
MIB = 1 << 20


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("50MB/s", 50e6),
        ("50MB", 50e6),
        ("8MiB/s", 8 * MIB),
        ("50M", 50 * MIB),
        ("512k", 512 << 10),
        ("1.5G", 1.5 * (1 << 30)),
        ("100B", 100),
        ("1Mi", MIB),
        ("1 MiB/s", MIB),
        (" 100  B ", 100),
        ("off", None),
        ("OFF", None),
    ],
)
def test_a_single_rate_holds_always(text: str, rate: float | None) -> None:
    table = parse_schedule(text)
    assert {table.rate(day, hour, 30) for day in range(7) for hour in range(24)} == {rate}
    assert table.is_unlimited == (rate is None)


def test_a_time_of_day_is_one_of_every_day_and_holds_until_the_next() -> None:
    table = parse_schedule("08:00,50 M 19:00,off 12:30,1M")
    for day in range(7):
        assert table.rate(day, 7, 59) is None, "what the evening before said"
        assert table.rate(day, 8, 0) == table.rate(day, 12, 29) == 50 * MIB
        assert table.rate(day, 12, 30) == table.rate(day, 18, 59) == MIB
        assert table.rate(day, 19, 0) is table.rate(day, 23, 59) is None
    assert not table.is_unlimited


@pytest.mark.parametrize("name", ["Sun", "sun", "SUNDAY", "Sunday"])
def test_days_may_be_written_out(name: str) -> None:
    assert parse_schedule(f"Mon-00:00,off {name}-12:00,1M").rate(SUN, 12, 0) == MIB


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty bandwidth"),
        ("50", "with its unit"),
        ("fast", "not a bandwidth"),
        ("0MB/s", "off means no limit"),
        ("-1M", "not a bandwidth"),
        ("08:00", "not a bandwidth"),
        ("08:00,50M 19:00", "not a time and a rate"),
        ("24:00,50M", "no such time"),
        ("08:60,50M", "no such time"),
        ("Mo-08:00,50M", "no such day"),
        ("08:00,50M 08:00,off", "twice"),
        ("08:00,50M Mon-08:00,off", "twice"),
        ("08:00,50M,19:00,off", "not a bandwidth"),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_schedule(text)


TIMES = st.tuples(st.integers(0, 6), st.integers(0, 23), st.integers(0, 59))


@given(st.dictionaries(TIMES, st.integers(1, 99), min_size=1, max_size=9), TIMES)
def test_what_holds_is_what_was_said_last(
    slots: dict[tuple[int, int, int], int], now: tuple[int, int, int]
) -> None:
    table: Schedule = parse_schedule(
        " ".join(f"{DAYS[d][:3]}-{h:02}:{m:02},{rate}B/s" for (d, h, m), rate in slots.items())
    )
    before = max((time for time in slots if time <= now), default=max(slots))
    assert table.rate(*now) == slots[before]


@pytest.mark.parametrize(
    "pace", [Unlimited(), TokenBucket(parse_schedule("1GB/s")), TokenBucket(parse_schedule("off"))]
)
def test_a_transfer_gives_signs_and_a_heartbeat_none(pace: Unlimited | TokenBucket) -> None:
    before = progress_signs.signs()
    pace.take(300)
    assert progress_signs.signs() == before
    pace.take(256 << 10)
    assert progress_signs.signs() == before + 1


def test_each_try_that_fails_is_a_sign_and_work_that_is_done_is_none() -> None:
    failures, before = iter([Transient("busy"), Transient("busy")]), progress_signs.signs()

    def busy() -> None:
        for failure in failures:
            raise failure

    Persistence(60, sleep=lambda _: None).call(busy)
    assert progress_signs.signs() == before + 2


def test_a_sign_is_of_whoever_asked_for_the_work_whichever_thread_does_it() -> None:
    before, all_ = progress_signs.signs_of("upload-queue-1"), progress_signs.signs()
    with ThreadPoolExecutor(1) as pool:
        with progress_signs.attributed_to("upload-queue-1"):
            pool.submit(progress_signs.keep_context(progress_signs.sign)).result()
        pool.submit(progress_signs.keep_context(progress_signs.sign)).result()
    progress_signs.sign()
    assert (
        progress_signs.signs_of("upload-queue-1") - before,
        progress_signs.signs() - all_,
    ) == (1, 3)


def test_when_the_end_is_near_nothing_is_tried_again() -> None:
    calls = []

    def busy() -> None:
        calls.append(1)
        raise Transient("busy")

    progress_signs.announce_shutdown()
    assert progress_signs.is_shutting_down()
    with pytest.raises(Transient):
        Persistence(3600).call(busy)
    assert len(calls) == 1


def test_a_thread_that_waits_for_the_next_try_is_woken_by_the_end() -> None:
    failed = threading.Event()

    def busy() -> None:
        failed.set()
        raise Transient("busy", after=1000)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(Persistence(3600).call, busy)
        assert failed.wait(60)
        assert not waiting.done()
        progress_signs.announce_shutdown()
        assert type(waiting.exception(60)) is Transient
