from __future__ import annotations

import pytest

from ckptsync.errors import Transient
from ckptsync.stores import signs
from ckptsync.stores.limits import Unlimited
from ckptsync.stores.pace import Paces
from ckptsync.stores.retry import Persistence
from ckptsync.stores.timetable import parse


@pytest.mark.parametrize("pace", [Unlimited(), Paces(parse("1GB/s")), Paces(parse("off"))])
def test_a_transfer_gives_signs_and_a_heartbeat_none(pace: Unlimited | Paces) -> None:
    before = signs.given()
    pace.take(300)
    assert signs.given() == before
    pace.take(256 << 10)
    assert signs.given() == before + 1


def test_each_try_that_fails_is_a_sign_and_work_that_is_done_is_none() -> None:
    failures, before = iter([Transient("busy"), Transient("busy")]), signs.given()

    def busy() -> None:
        for failure in failures:
            raise failure

    Persistence(60, sleep=lambda _: None).call(busy)
    assert signs.given() == before + 2
