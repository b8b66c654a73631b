from __future__ import annotations

import gc

from ckptsync.gc_pause import paused


def test_the_collector_is_off_within_and_as_it_was_behind() -> None:
    for is_on in (True, False):
        (gc.enable if is_on else gc.disable)()
        try:
            with paused(), paused():
                assert not gc.isenabled()
            assert gc.isenabled() == is_on
        finally:
            gc.enable()


def test_two_that_overlap_leave_it_on() -> None:
    one, other = paused(), paused()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    other.__exit__(None, None, None)
    assert gc.isenabled()
