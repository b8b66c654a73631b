"""Stretches are read at once, from near and far, and what differs is found wherever it lies."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptsync.digest import FileDigest, digest_stream
from ckptsync.errors import StoreError
from ckptsync.model import Extent
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.opening import bare
from ckptsync.verify import sweep, units
from ckptsync.verify.expected import Expected
from ckptsync.verify.reading import Counted
from ckptsync.verify.sweep import is_far, suspects
from tests.plain_files import MemoryFiles

SIZES = {"empty": 0, "one": 1, "small": 70_000, "large": (5 << 20) + 3}
DATA = {name: bytes(range(1, 252)) * (size // 251 + 1) for name, size in SIZES.items()}


def expected(name: str, *, has_blocks: bool = True) -> Expected:
    data = DATA[name][: SIZES[name]]
    found = digest_stream([data], len(data))
    return Expected(name, name, name, found if has_blocks else FileDigest(found.size, found.digest, 0, ()))


FILES = [expected(name) for name in SIZES]


@pytest.fixture(params=["near", "near, from a disk", "far"])
def counted(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counted:
    for module in (units, sweep):
        monkeypatch.setattr(module, "LARGE", 1 << 20)
    monkeypatch.setattr(units, "RANGE", 300_000)
    monkeypatch.setattr(sweep, "_LEAST", 1 << 20)
    if request.param == "near, from a disk":
        monkeypatch.setattr(sweep, "_is_in_memory", lambda root, unit: False)
    store = MemoryStore() if request.param == "far" else bare(str(tmp_path))
    for name, size in SIZES.items():
        store.write(name, [DATA[name][:size]])
    return Counted(store)


def everything(source: Counted) -> list[units.Unit]:
    return [u for f in [*FILES, expected("large", has_blocks=False)] for u in units.units(f, in_ranges=is_far(source))]


def test_what_is_well_is_no_suspect_and_each_byte_is_read_once(counted: Counted) -> None:
    assert suspects(counted, everything(counted)) == frozenset()
    assert counted.read == sum(SIZES.values()) + SIZES["large"]


@pytest.mark.parametrize(("name", "at"), [(name, at) for name, n in SIZES.items() for at in {0, n // 2, n - 1} if 0 <= at < n])
def test_a_flipped_bit_makes_its_file_a_suspect_and_no_other(counted: Counted, name: str, at: int) -> None:
    data = bytearray(DATA[name][: SIZES[name]])
    data[at] ^= 0x10
    counted.source.write(name, [data])  # type: ignore[attr-defined]
    assert suspects(counted, everything(counted)) == {name}
    if name == "large":  # and each of the two ways in which it is recorded finds it
        assert suspects(counted, [units.whole(expected(name, has_blocks=False))]) == {name}
        assert suspects(counted, units.units(expected(name), in_ranges=True)) == {name}


@pytest.mark.parametrize("at", [99, 100, (3 << 20) + 99, (3 << 20) + 100])
def test_a_long_stretch_in_the_middle_with_one_digest_is_compared_alone(counted: Counted, at: int) -> None:
    """As a sample takes a consolidated model's tensors."""
    file = expected("large")
    wanted = digest_stream([DATA["large"][100 : (3 << 20) + 100]], 3 << 20).digest
    unit = units.Unit(file, 100, (3 << 20) + 100, 3 << 20, (wanted,))
    assert suspects(counted, [unit]) == frozenset()
    data = bytearray(DATA["large"][: SIZES["large"]])
    data[at] ^= 1
    counted.source.write("large", [data])  # type: ignore[attr-defined]
    assert (suspects(counted, [unit]) == {"large"}) is (100 <= at < (3 << 20) + 100)


def test_what_is_gone_or_short_is_a_suspect(counted: Counted) -> None:
    counted.source.delete("one")  # type: ignore[attr-defined]
    counted.source.write("large", [DATA["large"][: SIZES["large"] - 1]])  # type: ignore[attr-defined]
    assert suspects(counted, everything(counted)) == {"one", "large"}


class Watching(MemoryFiles):
    """Says how many threads were in it at once, and waits for the next one."""

    def __init__(self, content: dict[str, bytes], wait_for: int) -> None:
        super().__init__(content)
        self.barrier = threading.Barrier(wait_for)

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        self.barrier.wait(20)
        super().read_into(name, start, out)


def test_ranges_of_one_file_are_read_at_once_from_far_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "LARGE", 1 << 20)
    monkeypatch.setattr(units, "RANGE", 1 << 20)
    data = DATA["large"][: 4 << 20]
    file = Expected("f", "f", "f", digest_stream([data], len(data)))
    assert suspects(Counted(Watching({"f": data}, 4)), units.units(file, in_ranges=True)) == frozenset()


@pytest.mark.parametrize("count", [1, 40])
def test_an_error_of_the_store_ends_it_and_damages_nothing(count: int) -> None:
    class Broken(MemoryStore):
        def read_into(self, name: str, start: int, out: memoryview) -> None:
            raise StoreError("input/output error")

    with pytest.raises(StoreError, match="input/output"):
        suspects(Counted(Broken()), [units.whole(expected("one"))] * count)


def test_bytes_are_told_as_they_are_read(counted: Counted) -> None:
    told: list[int] = []
    source = Counted(counted.source, told.append)
    suspects(source, everything(source))
    assert sum(told) == source.read


def test_a_store_that_pours_is_let_pour() -> None:
    class Pouring(MemoryStore):
        def stream(self, extent: Extent, buffer: memoryview, take: Callable[[memoryview], None]) -> None:
            for at in range(extent.start, extent.start + extent.size, 1000):
                take(memoryview(DATA[extent.file])[at : min(at + 1000, extent.start + extent.size)])

    source = Counted(Pouring())
    assert suspects(source, [units.whole(expected("small"))]) == frozenset()
    assert source.read == SIZES["small"]


def test_what_is_in_memory_is_read_by_several_and_what_is_not_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "_cores", lambda: 3)
    store = bare(str(tmp_path))
    for name, size in SIZES.items():
        store.write(name, [DATA[name][:size]])
        (tmp_path / name).read_bytes()
    todo = [units.whole(file) for file in FILES]
    monkeypatch.setattr(sweep, "_is_in_memory", lambda root, unit: (Path(root) / unit.file.name).is_file())
    assert sweep._streams(store, todo) == 3
    (tmp_path / "one").unlink()
    assert sweep._streams(store, todo) == 1


def test_a_file_that_is_not_there_is_not_in_memory(tmp_path: Path) -> None:
    assert not sweep._is_in_memory(str(tmp_path), units.whole(expected("one")))
