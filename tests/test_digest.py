from __future__ import annotations

import itertools
import random
import zlib

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.digest import BLOCK_HEX, MOST_BLOCKS, MOST_OF_ALL, SMALLEST_BLOCK, Digester, block_size, crc32, digest, digest_stream

CONTENT = random.Random(1).randbytes(5 * SMALLEST_BLOCK + 7)


@given(st.integers(0, 1 << 50))
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
    assert (found.size, found.digest, found.block_size) == (size, blake3(content).hexdigest(), SMALLEST_BLOCK)
    assert found.blocks == tuple(blake3(block).hexdigest()[:BLOCK_HEX] for block in blocks)


@pytest.mark.parametrize("at", [0, SMALLEST_BLOCK - 1, SMALLEST_BLOCK, 3 * SMALLEST_BLOCK + 5, len(CONTENT) - 1])
def test_a_flipped_bit_changes_its_own_block_and_the_file(at: int) -> None:
    damaged = bytearray(CONTENT)
    damaged[at] ^= 1
    good, bad = (digest_stream([c], len(CONTENT)) for c in (CONTENT, damaged))
    assert good.digest != bad.digest
    assert [n for n, (a, b) in enumerate(zip(good.blocks, bad.blocks, strict=True)) if a != b] == [at // SMALLEST_BLOCK]


def test_an_empty_file_has_no_blocks() -> None:
    found = Digester(0).result()
    assert (found.size, found.blocks) == (0, ())
    assert found.digest == digest(b"")


def test_a_stream_of_another_length_than_was_said_tells_the_length_it_had() -> None:
    assert digest_stream([b"xxx"], 2).size == 3
    assert digest_stream([b"xxx"], 1 << 30).size == 3


def test_chunks_may_be_views_of_wider_elements() -> None:
    assert digest_stream([memoryview(b"12345678").cast("I")], 8) == digest_stream([b"12345678"], 8)


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
    assert all(files * (250 + 35 * (1 << 36) // block_size(1 << 36, files)) < 32 << 20 for files in range(1, 110_000, 77))
    data = bytes(range(256)) * 64
    assert digest_stream([data], len(data), 8192).blocks == tuple(digest(data[i : i + 8192])[:32] for i in (0, 8192))
