from pathlib import Path

from ckptsync.doctor.pacing import mean, slow
from ckptsync.scan import Found
from ckptsync.stores.timetable import parse
from ckptsync.walk import Stat


def saved(step: int, size: int, at: float) -> Found:
    return Found(f"checkpoint-{step}", "trainer", Path("/o"), (Stat("m", size, int(at * 1e9), 1, 1),), (), ())


def test_the_mean_of_a_timetable_is_over_a_week() -> None:
    assert mean(parse("10MB/s")) == 10e6
    half = mean(parse("00:00,1MB 12:00,3MB"))
    assert half is not None
    assert round(half) == 2_000_000
    assert mean(parse("08:00,50M 19:00,off")) is mean(None) is None


def test_a_save_that_takes_longer_than_the_time_between_two_is_found() -> None:
    pair = saved(2, 1000, 20.0), saved(1, 900, 10.0)
    assert [f.kind for f in slow(*pair, 99.0, ("n0",), "/o")] == ["too-slow"]
    assert list(slow(*pair, 101.0, ("n0",), "/o")) == []
    assert list(slow(*pair, None, ("n0",), "/o")) == []
    assert list(slow(pair[0], pair[0], 1.0, ("n0",), "/o")) == []
