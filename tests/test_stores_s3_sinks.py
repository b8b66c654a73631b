"""Where a ranged read's bytes go, also when it takes several answers."""

from __future__ import annotations

import pytest

from ckptsync.stores.s3.sinks import Into, Refused, Sink, Through


def feed(sink: Sink, data: bytes) -> None:
    """At most three bytes at a time."""
    while data:
        room = sink.room()
        count = min(3, len(room), len(data))
        room[:count], data = data[:count], data[count:]
        sink.took(count)


def test_memory_is_filled_from_front_to_back_and_again_after_a_restart() -> None:
    out = bytearray(7)
    sink = Into(memoryview(out))
    feed(sink, b"12345")
    assert (sink.done, len(sink.room())) == (5, 2)
    assert sink.restart()
    feed(sink, b"abcdefg")
    assert (sink.done, bytes(out)) == (7, b"abcdefg")


@pytest.mark.parametrize(("size", "wanted"), [(9, [b"0123", b"4567", b"8"]), (8, [b"0123", b"4567"]), (2, [b"01"])])
def test_full_buffers_go_on_and_the_rest_at_the_end(size: int, wanted: list[bytes]) -> None:
    got: list[bytes] = []
    sink = Through(size, memoryview(bytearray(4)), lambda view: got.append(bytes(view)))
    feed(sink, b"0123456789"[:size])
    assert got == wanted


def test_what_has_gone_on_cannot_be_taken_back() -> None:
    got: list[bytes] = []
    sink = Through(8, memoryview(bytearray(4)), lambda view: got.append(bytes(view)))
    feed(sink, b"xyz")
    assert sink.restart()
    feed(sink, b"0123")
    assert not sink.restart()
    assert got == [b"0123"]


def test_the_takers_error_is_told_from_the_networks() -> None:
    def full(_: memoryview) -> None:
        raise OSError("disk full")

    with pytest.raises(Refused) as e:
        feed(Through(3, memoryview(bytearray(3)), full), b"123")
    assert str(e.value.error) == "disk full"
