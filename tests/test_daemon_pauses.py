"""How long a store that went away is left alone."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from ckptsync.daemon.pauses import FIRST, LONGEST, LONGEST_REST, SHARE, Pauses, rest_after


def test_pauses_double_and_are_never_long() -> None:
    pauses = Pauses(lambda: 1.0)
    assert [pauses.after(n) for n in range(6)] == [2, 4, 8, 15, 15, 15]


def test_there_is_one_pause_for_one_attempt_and_none_where_all_is_well() -> None:
    pauses = Pauses(lambda: 1.0)
    assert [pauses.after(1), pauses.after(1)] == [FIRST, math.inf]
    pauses.forget()
    assert pauses.after(2) == FIRST


@given(st.floats(0, 1), st.integers(1, 2000))
def test_each_is_drawn_from_its_upper_half(chance: float, tries: int) -> None:
    pauses = Pauses(lambda: chance)
    *_, last = (pauses.after(n) for n in range(tries))
    assert FIRST / 2 <= last <= LONGEST
    assert tries < 4 or last >= LONGEST / 2


@given(st.floats(0, 1e6), st.floats(0, 300))
def test_what_looks_in_vain_takes_its_share_of_a_core_and_comes_all_the_same(cost: float, least: float) -> None:
    rest = rest_after(cost, least)
    assert rest >= least
    assert rest <= max(least, LONGEST_REST)
    assert rest >= LONGEST_REST or cost / rest <= SHARE * 1.001 if rest else not cost
