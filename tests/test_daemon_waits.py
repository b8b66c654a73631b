from ckptsync.daemon.orders import Done, Failed
from ckptsync.daemon.waits import LATE, SOON, Wait, after, may_begin

PASSES = Failed("away", passes=True)
STAYS = Failed("odd")


def test_what_passes_by_itself_is_tried_again_soon_and_then_less_often() -> None:
    wait, waited = None, []
    for _ in range(9):
        wait = after(wait, "k", PASSES, 0.0, lasts=False)
        assert wait
        waited.append(wait.until)
    assert waited[:3] == [SOON, 2 * SOON, 4 * SOON]
    assert waited[-1] == LATE


def test_anything_else_is_tried_again_late_or_when_something_has_changed() -> None:
    wait = after(None, "k", STAYS, 0.0, lasts=False)
    assert (may_begin(wait, "k", LATE - 1), may_begin(wait, "k", LATE), may_begin(wait, "other", 0.0)) == (False, True, True)


def test_a_change_begins_the_count_anew() -> None:
    third = Wait("k", 0.0, PASSES, 3)
    assert after(third, "other", PASSES, 0.0, lasts=False) == Wait("other", SOON, PASSES, 1)


def test_what_was_well_is_done_again_only_where_that_may_find_something() -> None:
    assert after(None, "k", Done(changed=True), 0.0, lasts=False) is None
    assert after(None, "k", Done(), 0.0, lasts=False) == Wait("k", SOON), "another head may have done it, and is not seen yet"
    lasting = after(None, "k", Done(changed=True), 0.0, lasts=True)
    assert not may_begin(lasting, "k", 1e12)
    assert may_begin(lasting, "other", 0.0)
