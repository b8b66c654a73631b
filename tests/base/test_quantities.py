"""Durations and sizes as people write and read them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.quantities import backoff, clean, parse_duration, parse_size, show_duration, show_size


@given(st.integers(0, 10**9))
def test_a_shown_duration_reads_back_to_within_its_second_unit(seconds: int) -> None:
    back = parse_duration(show_duration(seconds))
    assert back <= seconds
    assert seconds - back < max(3600 if seconds >= 86400 else 60 if seconds >= 3600 else 1, 1)


SHOWN = {0.25: "0.2s", 59.0: "59s", 60.6: "1m1s", 3600.0: "1h", 90_061.0: "1d1h", -90.0: "-1m30s"}


def test_a_shown_duration_has_its_two_largest_units() -> None:
    assert {seconds: show_duration(seconds) for seconds in SHOWN} == SHOWN


@pytest.mark.parametrize(
    ("size", "shown"),
    [(0, "0 B"), (999, "999 B"), (5_000_000_000, "5 GB"), (262_144, "262 KB"), (999_999, "1 MB")],
)
def test_a_shown_size_has_three_figures(size: int, shown: str) -> None:
    assert show_size(size) == shown


DURATIONS = {"10s": 10, "5m": 300, "2h": 7200, "7d": 604800, "1h30m": 5400, "250ms": 0.25, "0": 0}
SIZES = {"5GB": 5 * 10**9, "512MiB": 512 << 20, "1000": 1000, "5 GB": 5 * 10**9, "1.5kb": 1500}
SIZES |= {"2T": 2 * 10**12, "3gib": 3 << 30}


def test_durations_are_seconds_and_sizes_are_bytes() -> None:
    assert {text: parse_duration(text) for text in DURATIONS} == pytest.approx(DURATIONS)
    assert parse_duration("1.5s") == 1.5
    assert {text: parse_size(text) for text in SIZES} == SIZES


@pytest.mark.parametrize(
    "text",
    ["", "10", "s", "-5s", "10 s", "5 minutes", "1y", "10s!", "nan", "1e3s", "9" * 400 + "d"],
)
def test_what_is_no_duration_is_refused_in_the_writers_words(text: str) -> None:
    with pytest.raises(ValueError, match="such as 10s, 5m, 2h or 7d"):
        parse_duration(text)


@pytest.mark.parametrize(
    "text", ["", "GB", "-1GB", "5XB", "5GBs", "1,000", "5 G B", "9" * 400 + "TB"]
)
def test_what_is_no_size_is_refused_in_the_writers_words(text: str) -> None:
    with pytest.raises(ValueError, match="such as 5GB or 512MiB"):
        parse_size(text)


def test_waits_double_up_to_the_longest() -> None:
    assert [backoff(tries, 0.5, 3.0) for tries in (1, 2, 3, 4, 5000)] == [0.5, 1, 2, 3, 3]


def test_printed_text_obeys_nobody_and_is_cut() -> None:
    assert clean("a\x1b[2J\u202eb\n") == "a\\x1b[2J\\u202eb\\n"
    assert [clean(text, 3) for text in ("abc", "abcd")] == ["abc", "ab…"]
