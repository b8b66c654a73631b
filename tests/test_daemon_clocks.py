"""A wall clock that jumps."""

from ckptsync.daemon.clocks import Clocks


def test_a_clock_that_runs_has_not_jumped() -> None:
    clocks = Clocks()
    assert (clocks.jumped(), clocks.jumped(), clocks.notes) == (0.0, 0.0, ())


def test_a_jump_is_seen_once_and_told() -> None:
    clocks = Clocks()
    clocks._apart += 3600  # as if the clock had been an hour ahead until now
    assert -3601 < clocks.jumped() < -3599
    assert clocks.jumped() == 0.0
    assert [note[:32] for note in clocks.notes] == ["the clock jumped by -3600 s at 2"]


def test_the_notes_of_a_clock_that_always_jumps_stay_few() -> None:
    clocks = Clocks()
    for _ in range(9):
        clocks._apart += 100
        clocks.jumped()
    assert len(clocks.notes) == 3
