from __future__ import annotations

import stat
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.stores.sftp.wire import Attributes, Fields, Flag, Kind, Malformed, cut_to, head, opening, reading, text


def test_requests_are_as_the_draft_has_them() -> None:
    assert text(b"abc") == b"\0\0\0\3abc"
    assert head(Kind.OPEN, 7, 100) == b"\0\0\0\x69\3\0\0\0\7"
    assert reading(b"h", 1 << 33, 9) == b"\0\0\0\1h" + struct.pack(">QI", 1 << 33, 9)
    assert opening(b"/a", Flag.WRITE | Flag.CREATE) == b"\0\0\0\2/a" + struct.pack(">II", 0x0A, 0)
    assert cut_to(b"h", 5) == b"\0\0\0\1h" + struct.pack(">IQ", 1, 5)


def test_attributes_are_read_whichever_of_them_come() -> None:
    body = struct.pack(">IQIIIII", 0x80000001 | 2 | 4 | 8, 9, 1, 2, stat.S_IFREG | 0o644, 3, 4)
    found = Fields(body + struct.pack(">I", 1) + text(b"more") + text(b"")).attributes()
    assert found == Attributes(9, stat.S_IFREG | 0o644, 4)
    assert found.is_file
    assert not found.is_directory
    assert Fields(struct.pack(">II", 4, stat.S_IFDIR)).attributes().is_directory
    assert not Fields(struct.pack(">II", 4, stat.S_IFLNK)).attributes().is_file


@pytest.mark.parametrize("body", [struct.pack(">IQ", 1, 5), struct.pack(">II", 4, stat.S_IFREG), struct.pack(">I", 0)])
def test_what_tells_no_file_from_a_link_is_refused(body: bytes) -> None:
    with pytest.raises(Malformed, match="neither type nor size"):
        Fields(body).attributes()


@given(st.binary(max_size=60))
def test_a_lying_packet_is_malformed_and_nothing_else(body: bytes) -> None:
    for parse in (Fields.text, Fields.u32, Fields.u64, Fields.attributes):
        fields = Fields(body)
        try:
            while not fields.is_over:
                parse(fields)
        except Malformed:
            pass  # the only error there may be
