"""A range goes through a small buffer: from a store that can send on while it receives, and from any other."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ckptsync.errors import Corrupt, StoreError
from ckptsync.model import Extent
from ckptsync.stores.contract import Store
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.opening import bare
from ckptsync.stores.pouring import pour
from tests.s3_script import Asked, Say, scripted
from tests.weed import weed

CONTENT = bytes(range(251)) * 20


def poured(store: Store, extent: Extent, buffer: int = 100) -> list[bytes]:
    got: list[bytes] = []
    pour(store, extent, memoryview(bytearray(buffer)), lambda view: got.append(bytes(view)))
    return got


def memory() -> Store:
    return MemoryStore()


def s3() -> Store:
    server = weed()
    return bare(f"s3://{server.bucket()}", server.options())


@pytest.mark.parametrize("made", [memory, s3])
def test_a_range_comes_in_full_buffers_and_a_rest(made: Callable[[], Store]) -> None:
    store = made()
    store.write("a", [CONTENT])
    got = poured(store, Extent("a", 7, 1050))
    assert b"".join(got) == CONTENT[7:1057]
    assert [len(each) for each in got] == [100] * 10 + [50]
    assert poured(store, Extent("a", 5, 0)) == []
    with pytest.raises(Corrupt):
        poured(store, Extent("a", 5000, 100))


@pytest.mark.parametrize("made", [memory, s3])
def test_what_the_taker_raises_is_raised_as_it_is_and_nothing_is_tried_again(made: Callable[[], Store]) -> None:
    store = made()
    store.write("a", [CONTENT])
    taken: list[int] = []

    def full(view: memoryview) -> None:
        taken.append(len(view))
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        pour(store, Extent("a", 0, 1000), memoryview(bytearray(100)), full)
    assert taken == [100]
    assert poured(store, Extent("a", 0, 10)) == [CONTENT[:10]], "the connection that was left is not used again"


def part(asked: Asked) -> Say:
    """The range, of which not all comes."""
    start, end = map(int, asked.headers["range"].removeprefix("bytes=").split("-"))
    data = CONTENT[start : min(end + 1, start + 400)]
    return Say(206, data, {"ETag": '"1"', "Content-Range": f"bytes {start}-{end}/{len(CONTENT)}"}, length=end - start + 1)


def test_what_broke_off_goes_on_and_no_byte_comes_twice() -> None:
    with scripted(*[part] * 20) as script:
        assert b"".join(poured(script.store(), Extent("a", 3, 1000))) == CONTENT[3:1003]
    assert [a.headers.get("if-match") for a in script.asked[:2]] == [None, '"1"']


def test_bytes_of_two_versions_are_never_put_together() -> None:
    with scripted(part, Say(412)) as script, pytest.raises(StoreError, match="replaced while it was read"):
        poured(script.store(), Extent("a", 0, 1000))


def test_an_answer_to_another_question_is_not_passed_on() -> None:
    got: list[bytes] = []
    with scripted(Say(200, CONTENT, {"ETag": '"1"'})) as script, pytest.raises(StoreError, match="ignores ranges"):
        pour(script.store(), Extent("a", 7, 100), memoryview(bytearray(10)), lambda view: got.append(bytes(view)))
    assert not got
