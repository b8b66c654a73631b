"""Level digest finds every changed bit, names the file and the tensors it overlaps, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.digest import SMALLEST_BLOCK, digest_stream
from ckptsync.errors import StoreError
from ckptsync.records.names import consolidated_prefix, file_name
from ckptsync.stores.contract import read_all
from ckptsync.stores.memory import MemoryStore
from tests.verified import (
    LOCATION,
    RUN,
    TENSORS,
    WHOLE,
    arrive,
    damage,
    entry,
    flip,
    location,
    manifest,
    put,
    verified,
    whole_store,
)

SEALED = consolidated_prefix(RUN, LOCATION) + "model.safetensors"
STORE = whole_store()
SPANS = {
    t.name: (t.start, t.start + t.size)
    for model_record in location(STORE).records.model_records.values()
    for t in model_record.tensors
}
SIZE = STORE.size(SEALED)


@given(st.integers(0, SIZE - 1), st.integers(0, 7))
def test_a_flipped_bit_anywhere_in_the_model_names_its_tensor_and_nothing_else(at: int, bit: int) -> None:
    flip(STORE, SEALED, at, bit)
    (found,) = verified(STORE).findings
    flip(STORE, SEALED, at, bit)
    owner = [name for name, (start, end) in SPANS.items() if start <= at < end]
    assert (found.kind, found.name) == ("digest", "consolidated/checkpoint-4/model.safetensors")
    assert list(found.tensors) == owner
    assert found.ranges == ((SPANS[owner[0]],) if owner else ((0, min(start for start, _ in SPANS.values())),))


def test_a_flipped_bit_in_every_byte_of_a_small_file_is_found() -> None:
    name = file_name(RUN, LOCATION, "config.json")
    for at in range(STORE.size(name)):
        flip(STORE, name, at, at % 8)
        assert damage(verified(STORE)) == [("digest", "checkpoint-4/config.json")]
        flip(STORE, name, at, at % 8)
    assert verified(STORE).verdict == "ok"


def test_a_zeroed_page_in_a_shard_names_the_tensors_of_its_block() -> None:
    store = whole_store()
    name = file_name(RUN, LOCATION, "model.safetensors")
    data = bytearray(read_all(store, name))
    page = 39_000 // SMALLEST_BLOCK * SMALLEST_BLOCK
    data[page : page + 4096] = bytes(4096)
    store.write(name, [data])
    (found,) = verified(store).findings
    assert found.ranges == ((page, page + SMALLEST_BLOCK),)
    assert found.tensors == ("a", "b")


def test_a_damaged_header_names_no_tensor_of_its_file() -> None:
    store = whole_store()
    flip(store, file_name(RUN, LOCATION, "model.safetensors"), 20)
    (found,) = verified(store).findings
    assert (found.kind, found.ranges, found.tensors) == ("digest", ((0, SMALLEST_BLOCK),), ())


def test_damage_in_two_tensors_is_told_of_both() -> None:
    store = whole_store()
    for name in ("a", "c"):
        flip(store, SEALED, SPANS[name][0])
    (found,) = verified(store).findings
    assert found.tensors == ("a", "c")
    assert len(found.ranges) == 2


def test_a_page_that_takes_the_header_and_a_tensor_is_told_of_both() -> None:
    store = whole_store()
    data = bytearray(read_all(store, SEALED))
    data[:SMALLEST_BLOCK] = bytes(SMALLEST_BLOCK)
    store.write(SEALED, [data])
    (found,) = verified(store).findings
    assert found.ranges[0][0] == 0
    assert "a" in found.tensors


def test_all_bytes_are_read_once_when_nothing_is_wrong() -> None:
    everything = sum(e.size for e in STORE.names("") if "/.ckptsync/" not in e.name)
    assert verified(STORE).read == everything > 2 * sum(len(data) for _, _, data in TENSORS.values())


class Flaky(MemoryStore):
    """A network that breaks while a file is read."""

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        if name.endswith("checkpoint-4/model.safetensors"):
            raise StoreError(f"{name}: input/output error")
        super().read_into(name, start, out)


def test_an_error_of_the_store_is_no_damage() -> None:
    store = Flaky()
    arrive(store, WHOLE)
    with pytest.raises(StoreError, match="input/output"):
        verified(store)


class Lying(MemoryStore):
    """Memory that flips a bit once."""

    lies = 1

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        super().read_into(name, start, out)
        if name.endswith("config.json") and self.lies:
            self.lies -= 1
            out[0] ^= 1


def test_a_file_that_reads_differently_twice_is_not_called_well() -> None:
    store = Lying()
    arrive(store, WHOLE)
    (found,) = verified(store).findings
    assert (found.kind, found.ranges) == ("digest", ())
    assert "twice" in found.detail


def test_damage_in_a_file_of_large_blocks_is_told_by_block() -> None:
    store, data = MemoryStore(), bytes(range(256)) * 256
    store.write(file_name(RUN, LOCATION, "model.bin"), [data])
    found = digest_stream([data], len(data), 16 << 10)
    file = replace(entry("model.bin", data), block_size=found.block_size, blocks=found.blocks)
    put(store, replace(manifest({"model.bin": data}), files=(file,)))
    flip(store, file_name(RUN, LOCATION, "model.bin"), 20_000, 3)
    assert [f.ranges for f in verified(store).findings if f.kind == "digest"] == [((16 << 10, 32 << 10),)]
