"""Packets and sessions: bytes come back as they went in, whatever the server is like, and a lying
server is believed nothing.
"""

from __future__ import annotations

import random
import stat
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptsync.errors import StoreError, Transient
from ckptsync.stores.limits import Limits
from ckptsync.stores.sftp.connection import Connection
from ckptsync.stores.sftp.protocol import (
    FSYNC_PATIENCE,
    PIECE,
    Attributes,
    Fields,
    Flag,
    Malformed,
    PacketType,
    Request,
    Session,
    StatusError,
    text,
)
from ckptsync.stores.sftp.server_files import Sessions
from tests.support.rate_limits import Counted
from tests.support.sftp_stores import AT_ONCE, SOON, address_of


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (struct.pack(">IQ", 1, 5), "neither type nor size"),
        (struct.pack(">II", 4, stat.S_IFREG), "neither type nor size"),
        (struct.pack(">IQI", 5, 1 << 63, stat.S_IFREG), "a file of 9223372036854775808 bytes"),
    ],
)
def test_what_tells_no_file_from_a_link_is_refused(body: bytes, error: str) -> None:
    with pytest.raises(Malformed, match=error):
        Fields(body).attributes()


ATTRIBUTES = struct.pack(">IQIIIIII", 0x8000000F, 5, 1, 1, stat.S_IFREG, 1, 7, 1)
ATTRIBUTES += text(b"name") + text(b"value")


@pytest.mark.parametrize(
    ("parse", "body", "value"),
    [
        (Fields.u32, bytes([0, 0, 1, 2]), 258),
        (Fields.u64, bytes([0, 0, 0, 0, 0, 0, 1, 2]), 258),
        (Fields.text, text(b"abcde"), b"abcde"),
        (Fields.attributes, ATTRIBUTES, Attributes(5, stat.S_IFREG, 7)),
    ],
)
def test_a_packet_is_read_to_its_end_and_no_further(
    parse: Callable[[Fields], object], body: bytes, value: object
) -> None:
    fields = Fields(body)
    assert not fields.is_over
    assert parse(fields) == value
    assert fields.is_over
    for end in range(len(body)):
        with pytest.raises(Malformed):
            parse(Fields(body[:end]))


CONTENT = random.Random(1).randbytes(3_000_001)


def opened(session: Session, path: Path, flags: int = Flag.READ) -> bytes:
    request = Request(PacketType.OPEN, text(bytes(path)) + struct.pack(">II", flags, 0))
    return session.exchange(request)[0].handle()


def written(session: Session, handle: bytes, start: int, content: bytes) -> None:
    session.do(*session.write_requests(handle, start, memoryview(content)))


@pytest.mark.parametrize(
    ("fault", "size"),
    [
        ("plain", 32 << 10),
        ("reorder", 32 << 10),
        ("short", 32 << 10),
        ("limits=100000", 100_000),
        ("limits=1", 32 << 10),
        ("limits=999999999999", PIECE),
    ],
)
def test_bytes_come_back_as_they_went_in_whatever_the_server_is_like(
    tmp_path: Path, fault: str, size: int
) -> None:
    session = Session(address_of(tmp_path, fault), SOON)
    assert session.read_size == session.write_size == size
    content = CONTENT[: 200_000 if fault == "short" else None]
    written(session, opened(session, tmp_path / "a", Flag.WRITE | Flag.CREATE), 7, content)
    out = bytearray(len(content) + 100)
    assert (
        session.read_into(opened(session, tmp_path / "a"), 0, memoryview(out)) == len(content) + 7
    )
    assert bytes(out[7 : len(content) + 7]) == content
    end = memoryview(bytearray(4 * size))  # one piece, and three behind the end
    assert session.read_into(opened(session, tmp_path / "a"), len(content) + 7 - size, end) == size
    assert end[:size] == content[-size:]
    assert session.is_usable
    session.close()
    assert not session.is_usable


def test_every_piece_is_paced_and_small(tmp_path: Path) -> None:
    pace = Counted()
    session = Session(address_of(tmp_path, "limits=999999999"), Limits(pace=pace))
    written(session, opened(session, tmp_path / "a", Flag.WRITE | Flag.CREATE), 0, CONTENT)
    assert sum(pace.taken) == len(CONTENT)
    session.read_into(opened(session, tmp_path / "a"), 0, memoryview(bytearray(len(CONTENT))))
    assert sum(pace.taken) == 2 * len(CONTENT)
    assert max(pace.taken) <= 256 << 10
    session.close()


def test_the_server_has_longer_to_bring_a_file_to_its_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, patience = Session(address_of(tmp_path), SOON), list[float]()
    receive = Connection.receive_bytes

    def noted(connection: Connection, size: int, seconds: float = 0.0) -> bytes:
        patience.append(seconds)
        return receive(connection, size, seconds)

    monkeypatch.setattr(Connection, "receive_bytes", noted)
    handle = opened(session, tmp_path / "a", Flag.WRITE | Flag.CREATE)
    assert max(patience) == 0
    session.do(*session.fsync_requests(handle))
    assert max(patience) == FSYNC_PATIENCE
    session.close()


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("chatty", "it begins with b'Welco'"),
        ("old", "the server offers version 2"),
        ("size=4", "a packet of 4 bytes"),
        ("size=263169", "a packet of 263169 bytes"),
        ("strange", "which was not asked"),
        ("modeless", "neither type nor size"),
        ("answer=3=105=", "a packet of type 105 came, 102 was expected"),
        ("answer=3=102=00000000", "a handle of 0 bytes"),
        (f"answer=3=102={text(bytes(257)).hex()}", "a handle of 257 bytes"),
        ("answer=5=103=", "0 bytes in a packet of 0 came"),
        ("answer=5=103=00000000", "0 bytes in a packet of 4 came"),
        ("answer=5=103=00000001", "1 bytes in a packet of 4 came"),
        ("answer=5=103=000000017878", "1 bytes in a packet of 6 came"),
        ("answer=5=103=000000027878", "2 bytes in a packet of 6 came where up to 1"),
    ],
)
def test_a_lying_server_is_believed_nothing_and_asked_no_more(
    tmp_path: Path, fault: str, error: str
) -> None:
    (tmp_path / "a").write_bytes(b"x")
    sessions = Sessions(address_of(tmp_path, fault), AT_ONCE)

    def step(session: Session) -> None:
        handle = opened(session, tmp_path / "a")
        session.stat_paths([bytes(tmp_path / "a")])
        session.read_into(handle, 0, memoryview(bytearray(1)))

    with pytest.raises(StoreError, match=f"the answer is no SFTP: .*{error}") as caught:
        sessions.on(step)
    assert not isinstance(caught.value, Transient)
    assert sessions._idle == []


def test_after_a_refusal_the_session_goes_on(tmp_path: Path) -> None:
    session = Session(address_of(tmp_path, "full"), SOON)
    with pytest.raises(StatusError, match="status 2"):
        opened(session, tmp_path / "not there")
    handle = opened(session, tmp_path / "a", Flag.WRITE | Flag.CREATE)
    with pytest.raises(StatusError, match="status 4"):
        written(session, handle, 0, CONTENT)
    assert session.is_usable
    (root,) = session.stat_paths([b"/"])
    assert root
    assert root.is_directory
    session.close()
