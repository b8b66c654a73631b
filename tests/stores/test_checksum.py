"""The right bytes pass a checker, in whatever pieces they come; it names the range of a wrong one."""

from __future__ import annotations

import pytest

from ckptsync.digest import digest, digest_stream
from ckptsync.errors import Corrupt
from ckptsync.stores.checksum import Digests, RangeDigests, checkable_ranges, checker

CONTENT = bytes(range(251)) * 50  # four blocks, the last one shorter
DIGEST = digest_stream([CONTENT], len(CONTENT))
ENDS = (100, 101, 9000, 12550)
RANGES = RangeDigests(
    len(CONTENT), DIGEST.digest, ENDS, tuple(digest(CONTENT[a:b]) for a, b in zip((0, *ENDS), ENDS, strict=False))
)


def check(data: bytes, start: int, end: int, step: int, wanted: Digests | None = DIGEST) -> None:
    found = checker("a", wanted, start, end)
    for at in range(0, len(data), step):
        found.add(memoryview(data)[at : at + step])
    found.end()


def changed(at: int) -> bytes:
    return CONTENT[:at] + bytes([CONTENT[at] ^ 1]) + CONTENT[at + 1 :]


@pytest.mark.parametrize("step", [1000, 4096, 5000, 20000])
@pytest.mark.parametrize("span", [(0, 12550), (4096, 8192), (8192, 12550), (0, 8192)])
def test_the_right_bytes_pass_in_whatever_pieces_they_come(span: tuple[int, int], step: int) -> None:
    check(CONTENT[slice(*span)], *span, step)


@pytest.mark.parametrize("at", [0, 4095, 4096, 8191, 8192, 12549])
def test_one_wrong_bit_is_found_in_the_whole_and_in_its_block(at: int) -> None:
    with pytest.raises(Corrupt, match="a: digest"):
        check(changed(at), 0, len(CONTENT), 1000)
    start, end = (0, 8192) if at < 8192 else (8192, 12550)
    first = at // 4096 * 4096
    with pytest.raises(Corrupt, match=f"a: bytes {first} to {min(first + 4096, 12550)} differ"):
        check(changed(at)[start:end], start, end, 1000)


def test_bytes_without_a_digest_pass() -> None:
    check(b"whatever", 0, 8, 3, None)
    with pytest.raises(Corrupt):
        check(b"whatever", 0, len(CONTENT), 3)


@pytest.mark.parametrize("step", [1, 1000, 20000])
@pytest.mark.parametrize("span", [(0, 12550), (0, 100), (100, 9000), (101, 12550)])
def test_ranges_of_any_length_are_checked_as_blocks_are(span: tuple[int, int], step: int) -> None:
    check(CONTENT[slice(*span)], *span, step, RANGES)
    for at in (span[0], span[1] - 1):
        with pytest.raises(Corrupt):
            check(changed(at)[slice(*span)], *span, step, RANGES)


def test_a_range_that_did_not_come_whole_is_wrong() -> None:
    for wanted in (DIGEST, RANGES):
        with pytest.raises(Corrupt, match="differ"):
            check(CONTENT[101:8191], 101 if wanted is RANGES else 4096, 12550, 1000, wanted)


def test_checkable_ranges_are_the_blocks_or_the_ranges() -> None:
    assert list(checkable_ranges(DIGEST, 4096, 12550)) == [(4096, 8192), (8192, 12288), (12288, 12550)]
    assert list(checkable_ranges(RANGES, 100, 12550)) == [(100, 101), (101, 9000), (9000, 12550)]
    assert not list(checkable_ranges(DIGEST, 0, 0))
