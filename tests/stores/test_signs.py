from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from ckptsync.errors import Transient
from ckptsync.stores import signs
from ckptsync.stores.limits import TokenBucket, Unlimited, parse_schedule
from ckptsync.stores.retry import Persistence


@pytest.mark.parametrize("pace", [Unlimited(), TokenBucket(parse_schedule("1GB/s")), TokenBucket(parse_schedule("off"))])
def test_a_transfer_gives_signs_and_a_heartbeat_none(pace: Unlimited | TokenBucket) -> None:
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


def test_a_sign_is_of_whoever_asked_for_the_work_whichever_thread_does_it() -> None:
    before, all_ = signs.given_by("lane-1"), signs.given()
    with ThreadPoolExecutor(1) as pool:
        with signs.of("lane-1"):
            pool.submit(signs.carried(signs.give)).result()
        pool.submit(signs.carried(signs.give)).result()
    signs.give()
    assert (signs.given_by("lane-1") - before, signs.given() - all_) == (1, 3)
