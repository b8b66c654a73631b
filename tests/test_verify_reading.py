"""What is read is counted, and comes in pieces."""

from __future__ import annotations

from blake3 import blake3

from ckptsync.digest import digest_stream
from ckptsync.model import Extent
from ckptsync.verify.reading import WINDOW, Counted, Watched, blocks_of, digest_of, pieces
from tests.plain_files import MemoryFiles

DATA = bytes(range(256)) * 20_000


def test_pieces_are_the_bytes_through_a_window() -> None:
    found = [bytes(p) for p in pieces(MemoryFiles({"f": DATA}), Extent("f", 7, len(DATA) - 9))]
    assert b"".join(found) == DATA[7:-2]
    assert {len(p) for p in found[:-1]} == {WINDOW}


def test_digests_are_those_of_the_bytes() -> None:
    files = MemoryFiles({"f": DATA, "empty": b""})
    assert digest_of(files, Extent("f", 3, 1000)) == blake3(DATA[3:1003]).hexdigest()
    assert blocks_of(files, "f", len(DATA)) == digest_stream([DATA], len(DATA))
    assert digest_of(files, Extent("empty", 0, 0)) == blake3(b"").hexdigest()


def test_every_byte_read_is_counted_also_twice() -> None:
    counted, watched = Counted(MemoryFiles({"f": DATA})), Watched(MemoryFiles({"f": DATA}))
    digest_of(counted, Extent("f", 0, len(DATA)))
    for _ in range(2):
        watched.read_into("f", 5, memoryview(bytearray(10)))
    assert counted.read == len(DATA)
    assert (watched.read, watched.last, watched.sizes()) == (20, "f", {"f": len(DATA)})
    assert watched.reads == [Extent("f", 5, 10)] * 2
