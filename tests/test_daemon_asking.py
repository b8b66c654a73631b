"""A question aside."""

import threading

import pytest

from ckptsync.daemon.asking import Asking


def test_who_asks_is_not_held_up_by_a_question_without_an_answer() -> None:
    go = threading.Event()
    asking = Asking(go.wait)
    assert not asking.is_over(0.01)
    go.set()
    assert asking.is_over(10)
    assert asking.answer() is True


def test_what_the_answer_raises_is_raised_to_who_asked() -> None:
    asking = Asking(lambda: 1 // 0)
    assert asking.is_over(10)
    with pytest.raises(ZeroDivisionError):
        asking.answer()
