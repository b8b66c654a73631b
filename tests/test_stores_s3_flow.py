"""Bytes are paced, and hangs are told from waiting for the pace."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from ckptsync.stores.limits import Limits
from ckptsync.stores.s3.flow import Flow, wait_at_most
from tests.paced import Counted

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    mine, theirs = socket.socketpair()
    with mine, theirs:
        yield mine, theirs


class Slow(Counted):
    """Each piece has to wait."""

    def take(self, count: int) -> None:
        super().take(count)
        time.sleep(0.2)


def test_what_is_sent_is_asked_for_in_pieces_and_arrives(pair: Pair) -> None:
    mine, theirs = pair
    pace = Counted()
    data = bytes(range(256)) * 80  # what a socket holds
    Flow(mine, Limits(pace=pace)).send(data)
    Flow(mine, Limits(pace=pace)).send_together(b"head", b"body")
    got = b""
    while len(got) < len(data) + 8:
        got += theirs.recv(1 << 20)
    assert got == data + b"headbody"
    assert pace.taken == [len(data), 4], "a head is not paced"


def test_waiting_for_the_pace_is_no_stall(pair: Pair) -> None:
    mine, theirs = pair
    flow = Flow(mine, Limits(pace=Slow(), stall=0.15))
    for _ in range(3):
        theirs.sendall(b"x")
        assert flow.receive(mine.recv_into, memoryview(bytearray(10))) == 1


def test_a_silent_peer_is_given_up(pair: Pair) -> None:
    mine, theirs = pair
    flow = Flow(mine, Limits(stall=0.2))
    room = memoryview(bytearray(1 << 19))
    theirs.sendall(b"x")
    assert flow.receive(mine.recv_into, room) == 1
    with pytest.raises(TimeoutError):
        flow.receive(mine.recv_into, room)


def test_a_wait_that_is_nearly_right_is_left_alone(pair: Pair) -> None:
    mine, _ = pair
    for seconds, wanted in [(60.0, 60.0), (59.0, 60.0), (30.0, 30.0), (0.5, 0.5)]:
        wait_at_most(mine, seconds)
        assert mine.gettimeout() == wanted
