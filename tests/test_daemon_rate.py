"""How fast bytes go."""

from ckptsync.daemon.rate import Rate


def test_a_rate_is_over_the_last_minute() -> None:
    rate = Rate()
    assert rate.read(0, 0) == 0
    assert rate.read(30, 300) == 10
    assert rate.read(60, 300) == 5
    assert rate.read(90, 300) == 0
    assert rate.read(120, 6300) == 100


def test_a_rest_that_is_longer_than_a_minute_counts_as_one() -> None:
    rate = Rate()
    rate.read(0, 0)
    assert rate.read(600, 600) == 1
