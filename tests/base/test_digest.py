from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Iterator

import pytest
from blake3 import blake3
from hypothesis import example, given
from hypothesis import strategies as st

from ckptsync.digest import (
    BLOCK_HEX,
    MOST_BLOCKS,
    MOST_OF_ALL,
    SMALLEST_BLOCK,
    Checker,
    Digests,
    FileDigest,
    RangeDigests,
    block_size,
    crc32,
    crc32_combine,
    digest,
    digest_stream,
    digested_ranges,
)
from ckptsync.errors import Corrupt

CONTENT = random.Random(1).randbytes(5 * SMALLEST_BLOCK + 7)


@given(st.integers(0, 1 << 50))
@example(MOST_BLOCKS * SMALLEST_BLOCK)
def test_a_file_has_at_most_1024_blocks_of_a_power_of_two_and_not_many_fewer(size: int) -> None:
    block = block_size(size)
    assert block >= SMALLEST_BLOCK
    assert block & (block - 1) == 0
    assert -(-size // block) <= MOST_BLOCKS
    assert block == SMALLEST_BLOCK or -(-size // block) > MOST_BLOCKS // 2


def test_the_digest_is_what_b3sum_prints() -> None:
    assert digest(b"") == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    assert digest(b"abc") == "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85"


@given(st.lists(st.integers(0, len(CONTENT)), max_size=12), st.integers(0, len(CONTENT)))
def test_cuts_between_chunks_do_not_matter(cuts: list[int], size: int) -> None:
    content = CONTENT[:size]
    edges = [0, *sorted(min(c, size) for c in cuts), size]
    found = digest_stream([content[a:b] for a, b in itertools.pairwise(edges)], size)
    blocks = [content[n : n + SMALLEST_BLOCK] for n in range(0, size, SMALLEST_BLOCK)]
    assert (found.size, found.digest, found.block_size) == (
        size,
        blake3(content).hexdigest(),
        SMALLEST_BLOCK,
    )
    assert found.blocks == tuple(blake3(block).hexdigest()[:BLOCK_HEX] for block in blocks)


def test_a_stream_of_another_length_than_was_said_tells_the_length_it_had() -> None:
    assert digest_stream([b"xxx"], 2).size == 3
    assert digest_stream([b"xxx"], 1 << 30).size == 3
    assert digest_stream([memoryview(bytearray(8)).cast("I")], 8).size == 8


def test_sums_are_zlibs_whoever_makes_them() -> None:
    for size in (0, 1, 63, 1 << 16):
        data = bytes(range(256)) * (size // 256) + bytes(size % 256)
        assert crc32(memoryview(data), 7) == zlib.crc32(data, 7)


def test_the_blocks_of_many_files_are_few_enough_for_one_manifest() -> None:
    for files in (1, 512, 2048, 100_000, 10**9):
        block = block_size(1 << 36, files)
        count = -(-(1 << 36) // block)
        assert count * min(files, MOST_OF_ALL) <= max(MOST_OF_ALL, 1024)
        assert count > 1 or files > MOST_OF_ALL // 6
    assert block_size(1 << 36, 500) == block_size(1 << 36)
    assert all(
        files * (250 + 35 * (1 << 36) // block_size(1 << 36, files)) < 32 << 20
        for files in range(1, 110_000, 77)
    )
    data = bytes(range(256)) * 64
    assert digest_stream([data], len(data), 8192).blocks == tuple(
        digest(data[i : i + 8192])[:32] for i in (0, 8192)
    )


BLOCKS = bytes(range(251)) * 50  # four blocks, the last one shorter
DIGEST = digest_stream([BLOCKS], len(BLOCKS))
ENDS = (100, 101, 9000, 12550)
RANGES = RangeDigests(
    len(BLOCKS),
    DIGEST.digest,
    ENDS,
    tuple(digest(BLOCKS[a:b]) for a, b in zip((0, *ENDS), ENDS, strict=False)),
)
SPANS: list[tuple[Digests, tuple[int, int]]] = [
    (DIGEST, span) for span in ((0, 12550), (4096, 8192), (8192, 12550), (0, 8192))
]
SPANS += [(RANGES, span) for span in ((0, 12550), (0, 100), (100, 9000), (101, 12550))]


def check(data: bytes, start: int, end: int, step: int, digests: Digests | None = DIGEST) -> None:
    found = Checker("a", digests, start, end)
    for at in range(0, len(data), step):
        found.add(memoryview(data)[at : at + step])
    found.end()


def test_a_digest_without_digits_matches_nothing() -> None:
    with pytest.raises(Corrupt, match="bytes 0 to 1 differ"):
        check(b"a", 0, 1, 1, FileDigest(2, "", 1, ("", "")))


def changed(at: int) -> bytes:
    return BLOCKS[:at] + bytes([BLOCKS[at] ^ 1]) + BLOCKS[at + 1 :]


def wrong_bits(span: tuple[int, int]) -> Iterator[int]:
    yield from (
        at for at in (0, 4095, 4096, 8191, 8192, span[0], span[1] - 1) if span[0] <= at < span[1]
    )


@pytest.mark.parametrize("step", [1, 1000, 4096, 5000, 20000])
@pytest.mark.parametrize(("digests", "span"), SPANS)
def test_the_right_bytes_pass_in_whatever_pieces_and_one_wrong_bit_does_not(
    digests: Digests, span: tuple[int, int], step: int
) -> None:
    check(BLOCKS[slice(*span)], *span, step, digests)
    for at in wrong_bits(span):
        start, end, _ = next(r for r in digested_ranges(digests, *span) if r[0] <= at < r[1])
        where = "0 to 12550" if span == (0, 12550) else f"{start} to {end}"
        with pytest.raises(Corrupt, match=f"a: bytes {where} differ"):
            check(changed(at)[slice(*span)], *span, step, digests)


def test_bytes_without_a_digest_pass_and_a_range_that_did_not_come_whole_does_not() -> None:
    assert [r[:2] for r in digested_ranges(DIGEST, 8192, 12550)] == [(8192, 12288), (12288, 12550)]
    check(b"whatever", 0, 8, 3, None)
    check(b"", 0, 0, 3, digest_stream([], 0))
    for digests, start in ((DIGEST, 4096), (RANGES, 101), (DIGEST, 0)):
        for end in (start, 8191, 8192):
            with pytest.raises(Corrupt, match="differ"):
                check(BLOCKS[start:end], start, 12550, 1000, digests)


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_two_sums_make_the_sum_of_the_whole(first: bytes, second: bytes) -> None:
    assert crc32_combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(
        first + second
    )


@pytest.mark.parametrize("size", [1 << 20, (2 << 20) + 3, 5_000_001])
def test_long_stretches_too(size: int) -> None:
    second = bytes(range(251)) * (size // 251 + 1)
    assert crc32_combine(zlib.crc32(b"before"), zlib.crc32(second[:size]), size) == zlib.crc32(
        b"before" + second[:size]
    )
