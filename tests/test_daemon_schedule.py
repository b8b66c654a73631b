"""When ticks run."""

import subprocess
import sys
import time

from ckptsync.daemon.schedule import scheduled
from ckptsync.daemon.tick import Tick
from tests.ticks import most_at_once, until


def test_every_tick_runs_at_once_and_then_again_and_again() -> None:
    runs: list[float] = []
    with scheduled([Tick("a", 0.2, lambda: runs.append(time.monotonic()), print)]):
        begun = time.monotonic()
        assert until(lambda: len(runs) >= 3)
    assert runs[0] - begun < 1


def test_a_hint_hastens_a_tick_that_is_far_away() -> None:
    runs: list[int] = []
    tick = Tick("a", 3600, lambda: runs.append(1), print)
    with scheduled([tick]):
        assert until(lambda: len(runs) == 1)
        tick.hint()
        assert until(lambda: len(runs) == 2)
        time.sleep(0.1)
        tick.hint()
        assert until(lambda: len(runs) == 3)


def test_a_tick_never_runs_twice_at_a_time_and_does_not_hold_up_others() -> None:
    assert most_at_once(scheduled) == 1


def test_a_hint_after_the_end_is_no_fault() -> None:
    tick = Tick("a", 1, lambda: None, print)
    with scheduled([tick]):
        pass
    until(lambda: not tick.is_running)
    tick.hint()


def test_a_clock_that_was_set_back_is_told_and_silences_nobody() -> None:
    runs: list[int] = []
    with scheduled([Tick("a", 3600, lambda: runs.append(1), print), Tick("b", 3600, lambda: runs.append(2), print)]) as again:
        assert until(lambda: len(runs) == 2)
        again()
        assert until(lambda: sorted(runs) == [1, 1, 2, 2])


def test_without_ticks_nothing_is_scheduled_and_no_scheduler_is_imported() -> None:
    script = "import sys; from ckptsync.daemon.schedule import scheduled\nwith scheduled(()) as again: again()\nprint('apscheduler' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "False\n"
