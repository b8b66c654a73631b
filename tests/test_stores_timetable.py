from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.stores.timetable import DAYS, Timetable, parse

MON, SAT, SUN = 0, 5, 6
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
        ("off", None),
        ("OFF", None),
    ],
)
def test_a_single_rate_holds_always(text: str, rate: float | None) -> None:
    table = parse(text)
    assert {table.rate(day, hour, 30) for day in range(7) for hour in range(24)} == {rate}
    assert table.is_unlimited == (rate is None)


def test_a_time_of_day_is_one_of_every_day_and_holds_until_the_next() -> None:
    table = parse("08:00,50M 19:00,off 12:30,1M")
    for day in range(7):
        assert table.rate(day, 7, 59) is None, "what the evening before said"
        assert table.rate(day, 8, 0) == table.rate(day, 12, 29) == 50 * MIB
        assert table.rate(day, 12, 30) == table.rate(day, 18, 59) == MIB
        assert table.rate(day, 19, 0) is table.rate(day, 23, 59) is None
    assert not table.is_unlimited


def test_a_day_and_a_time_begin_what_holds_for_the_rest_of_the_week_and_into_the_next() -> None:
    table = parse("Mon-08:00,10M Sat-00:00,off")
    assert table.rate(MON, 7, 59) is None
    assert table.rate(MON, 8, 0) == table.rate(4, 23, 59) == 10 * MIB
    assert table.rate(SAT, 0, 0) is table.rate(SUN, 23, 59) is None


@pytest.mark.parametrize("name", ["Sun", "sun", "SUNDAY", "Sunday"])
def test_days_may_be_written_out(name: str) -> None:
    assert parse(f"Mon-00:00,off {name}-12:00,1M").rate(SUN, 12, 0) == MIB


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
        ("Fun-08:00,50M", "no such day"),
        ("08:00,50M 08:00,off", "twice"),
        ("08:00,50M Mon-08:00,off", "twice"),
        ("08:00,10M:1M", "not a bandwidth"),
        ("08:00,50M,19:00,off", "not a bandwidth"),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse(text)


TIMES = st.tuples(st.integers(0, 6), st.integers(0, 23), st.integers(0, 59))


@given(st.dictionaries(TIMES, st.integers(1, 99), min_size=1, max_size=9), TIMES)
def test_what_holds_is_what_was_said_last(slots: dict[tuple[int, int, int], int], now: tuple[int, int, int]) -> None:
    table: Timetable = parse(" ".join(f"{DAYS[d][:3]}-{h:02}:{m:02},{rate}B/s" for (d, h, m), rate in slots.items()))
    before = max((time for time in slots if time <= now), default=max(slots))
    assert table.rate(*now) == slots[before]
