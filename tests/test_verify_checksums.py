"""CRC32s of torch's archives: what they cover is compared, and said."""

from __future__ import annotations

import pytest

from ckptsync.formats import torch_zip
from ckptsync.model import Extent
from ckptsync.verify.archives import items
from ckptsync.verify.checksums import checksums
from tests.plain_files import MemoryFiles, safetensors_file, torch_zip_file, tree
from tests.vector import vector

FSDP = tree(*vector("hf-fsdp2-2node").sources).content
ZERO = tree(*vector("hf-zero3-2node").sources).content
OPTIMIZER = "optimizer_0/__1_0.distcp"
STATES = next(path for path in ZERO if path.endswith("optim_states.pt"))


def tensor_byte(files: dict[str, bytes], path: str) -> int:
    """A byte in the middle of a tensor."""
    tree = MemoryFiles(files)
    inside = items(tree).get(path)
    locations = [(start, size) for start, size, _ in inside.items] if inside else [(0, len(files[path]))]
    archives = [torch_zip.open_archive(tree, Extent(path, start, size)) for start, size in locations]
    archive = next(archive for archive in archives if "data/0" in archive.records)
    where = torch_zip.extent(tree, archive, "data/0")
    return where.start + where.size // 2


@pytest.mark.parametrize("files", [FSDP, ZERO], ids=["fsdp2", "zero3"])
def test_real_files_have_their_checksums(files: dict[str, bytes]) -> None:
    found, reading = checksums(MemoryFiles(files))
    assert found == []
    assert 0 < reading.size < reading.of_size == sum(map(len, files.values()))
    assert reading.files == sum(path.endswith((".distcp", ".pt", ".pth", ".bin")) for path in files)


@pytest.mark.parametrize(("files", "path"), [(FSDP, OPTIMIZER), (ZERO, STATES)], ids=["fsdp2", "zero3"])
def test_a_flipped_bit_in_an_optimizers_shard_is_found(files: dict[str, bytes], path: str) -> None:
    data = bytearray(files[path])
    data[tensor_byte(files, path)] ^= 4
    found, _ = checksums(MemoryFiles({**files, path: bytes(data)}))
    assert [(f.kind, f.name) for f in found] == [("digest", path)]
    assert "CRC32" in found[0].detail


def test_what_has_none_is_not_claimed() -> None:
    found, reading = checksums(MemoryFiles({"m.safetensors": safetensors_file({"a": ("U8", (3,), b"abc")}), "a.json": b"{}"}))
    assert (found, reading.files, reading.size, reading.of_files) == ([], 0, 0, 2)


def test_an_archive_of_a_version_that_torch_does_not_open_is_found() -> None:
    data = torch_zip_file({"data.pkl": b"\x80\x02N.", "byteorder": b"little", "version": b"0"})
    found, _ = checksums(MemoryFiles({"rng_state_0.pth": data}))
    assert ["version is b'0'" in str(one) for one in found] == [True]
