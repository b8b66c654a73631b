from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckptsync.errors import Transient
from ckptsync.stores import liveness
from ckptsync.stores.limits import TokenBucket, Unlimited, parse_schedule
from ckptsync.stores.retry import Persistence


@pytest.mark.parametrize(
    "pace", [Unlimited(), TokenBucket(parse_schedule("1GB/s")), TokenBucket(parse_schedule("off"))]
)
def test_a_transfer_gives_signs_and_a_heartbeat_none(pace: Unlimited | TokenBucket) -> None:
    before = liveness.signs()
    pace.take(300)
    assert liveness.signs() == before
    pace.take(256 << 10)
    assert liveness.signs() == before + 1


def test_each_try_that_fails_is_a_sign_and_work_that_is_done_is_none() -> None:
    failures, before = iter([Transient("busy"), Transient("busy")]), liveness.signs()

    def busy() -> None:
        for failure in failures:
            raise failure

    Persistence(60, sleep=lambda _: None).call(busy)
    assert liveness.signs() == before + 2


def test_a_sign_is_of_whoever_asked_for_the_work_whichever_thread_does_it() -> None:
    before, all_ = liveness.signs_of("upload-queue-1"), liveness.signs()
    with ThreadPoolExecutor(1) as pool:
        with liveness.of("upload-queue-1"):
            pool.submit(liveness.carried(liveness.sign)).result()
        pool.submit(liveness.carried(liveness.sign)).result()
    liveness.sign()
    assert (
        liveness.signs_of("upload-queue-1") - before,
        liveness.signs() - all_,
    ) == (1, 3)


@pytest.fixture(autouse=True)
def life() -> Iterator[None]:
    liveness.clear_shutdown()
    yield
    liveness.clear_shutdown()


def test_when_the_end_is_near_nothing_is_tried_again() -> None:
    calls = []

    def busy() -> None:
        calls.append(1)
        raise Transient("busy")

    liveness.announce_shutdown()
    assert liveness.is_shutting_down()
    with pytest.raises(Transient):
        Persistence(3600).call(busy)
    assert len(calls) == 1


def test_a_thread_that_waits_for_the_next_try_is_woken_by_the_end() -> None:
    failed, over = threading.Event(), threading.Event()

    def busy() -> None:
        failed.set()
        raise Transient("busy", after=1000)

    def wait() -> None:
        with pytest.raises(Transient):
            Persistence(3600).call(busy)
        over.set()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    assert failed.wait(60)
    assert not over.is_set()
    liveness.announce_shutdown()
    assert over.wait(60)
    thread.join(60)
