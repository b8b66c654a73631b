"""Durations and sizes as people read them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.config.units import parse_duration
from ckptsync.units import show_duration, show_size


@given(st.integers(0, 10**9))
def test_a_shown_duration_reads_back_to_within_its_second_unit(seconds: int) -> None:
    back = parse_duration(show_duration(seconds))
    assert back <= seconds
    assert seconds - back < max(3600 if seconds >= 86400 else 60 if seconds >= 3600 else 1, 1)


@pytest.mark.parametrize(
    ("size", "shown"), [(0, "0 B"), (999, "999 B"), (5_000_000_000, "5 GB"), (262_144, "262 KB"), (999_999, "1 MB")]
)
def test_a_shown_size_has_three_figures(size: int, shown: str) -> None:
    assert show_size(size) == shown
