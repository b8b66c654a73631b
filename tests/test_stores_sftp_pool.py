from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckptsync.errors import Transient
from ckptsync.stores.limits import Limits
from ckptsync.stores.sftp.pool import LITTLE, Sessions
from ckptsync.stores.sftp.session import Session
from ckptsync.stores.sftp.wire import Kind, Refused, text
from tests.sftp_stores import AT_ONCE, SOON, place_of


def test_threads_share_a_few_connections(tmp_path: Path) -> None:
    sessions, seen, at_once = Sessions(place_of(tmp_path), Limits(threads=2)), set(), threading.Semaphore(2)

    def step(session: Session) -> None:
        assert at_once.acquire(blocking=False)
        seen.add(id(session))
        session.answer(Kind.LSTAT, text(b"/"), Kind.ATTRS)
        at_once.release()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: sessions.on(step, LITTLE + 1), range(40)))
    assert len(seen) <= 2
    assert len(sessions._idle) == len(seen)
    sessions.close()
    assert sessions._idle == []


def test_what_moves_little_has_a_connection_while_all_others_move_much(tmp_path: Path) -> None:
    sessions, busy, go_on = Sessions(place_of(tmp_path), Limits(threads=2)), threading.Semaphore(0), threading.Event()

    def much(_: Session) -> None:
        busy.release()
        assert go_on.wait(20)

    with ThreadPoolExecutor(3) as pool:
        for _ in range(3):
            pool.submit(sessions.on, much, LITTLE + 1)
        assert all(busy.acquire(timeout=20) for _ in range(2))
        sessions.on(lambda session: session.answer(Kind.LSTAT, text(b"/"), Kind.ATTRS))
        assert not busy.acquire(blocking=False)
        go_on.set()
    assert len(sessions._idle) == 3
    sessions.close()


def test_who_asks_for_one_connection_gets_one(tmp_path: Path) -> None:
    sessions, at_once = Sessions(place_of(tmp_path), Limits(threads=1)), threading.Semaphore(1)

    def step(session: Session) -> None:
        assert at_once.acquire(blocking=False)
        session.answer(Kind.LSTAT, text(b"/"), Kind.ATTRS)
        at_once.release()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: sessions.on(step, LITTLE + n % 2), range(12)))
    sessions.close()


def test_what_fails_transiently_is_done_again_on_another_connection(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    sessions, tries = Sessions(place_of(tmp_path, f"lose=14={marker}"), SOON), []

    def step(session: Session) -> None:
        tries.append(session)
        session.answer(Kind.MKDIR, text(bytes(tmp_path / f"new{len(tries)}")) + bytes(4))

    sessions.on(step)
    assert len(set(tries)) == 2
    assert not tries[0].is_usable
    assert (tmp_path / "new2").is_dir()
    sessions.close()


def test_patience_ends_and_refusals_are_not_tried_again(tmp_path: Path) -> None:
    tries = []

    def step(session: Session) -> None:
        tries.append(session)
        raise Transient("no")

    with pytest.raises(Transient):
        Sessions(place_of(tmp_path), AT_ONCE).on(step)
    sessions = Sessions(place_of(tmp_path), SOON)
    with pytest.raises(Refused):
        sessions.on(lambda s: s.answer(Kind.REMOVE, text(bytes(tmp_path / "a"))))
    assert len(tries) == 1
    assert len(sessions._idle) == 1, "the connection is as good as before"
    sessions.close()


def test_a_step_that_is_broken_off_takes_its_connection_with_it(tmp_path: Path) -> None:
    sessions = Sessions(place_of(tmp_path), SOON)

    def step(session: Session) -> None:
        session._send(Kind.LSTAT, text(b"/"))
        raise KeyboardInterrupt  # with an answer under way, which must not be taken for another one's

    with pytest.raises(KeyboardInterrupt):
        sessions.on(step)
    assert sessions._idle == []


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of Python 3.12 and later, where the tests' runner has threads
def test_a_fork_uses_no_connection_of_its_parent(tmp_path: Path) -> None:
    sessions = Sessions(place_of(tmp_path), SOON)
    sessions.on(lambda s: s.answer(Kind.LSTAT, text(b"/"), Kind.ATTRS))
    (ours,) = sessions._idle
    child = os.fork()
    if not child:
        try:
            sessions.on(lambda s: os._exit(ours is s))
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    sessions.on(lambda s: s.answer(Kind.LSTAT, text(b"/"), Kind.ATTRS))
    assert sessions._idle == [ours]
    sessions.close()
