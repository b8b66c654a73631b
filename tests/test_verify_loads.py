"""Level load over the files of a location: findings, and what was loaded with what."""

from __future__ import annotations

import pytest

from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.tree import LocalFiles
from ckptsync.verify.loads import Part, loads
from ckptsync.verify.structure import UNLOADED
from tests.plain_files import MemoryFiles, safetensors_file
from tests.vector import vector

NAN = safetensors_file({"a": ("F32", (2,), b"\0\0\x80\x7f\0\0\xc0\x7f"), "b": ("U8", (1,), b"x")})


def store(**files: bytes) -> tuple[MemoryStore, list[Part]]:
    found = MemoryStore()
    for name, data in files.items():
        found.write(f"{name}.safetensors", [data])
    return found, [Part(f"{name}.safetensors", f"shown/{name}", len(data)) for name, data in files.items()]


def test_values_that_are_not_finite_are_told_of_their_tensor() -> None:
    findings, reading = loads(*store(good=NAN), "checkpoint-4", MemoryFiles({}))
    assert [(f.kind, f.name, f.tensors) for f in findings[:-1]] == [("nonfinite", "shown/good", ("a",))]
    assert "2 values" in findings[0].detail
    assert "2 tensors of 1 files loaded with safetensors" in findings[-1].detail
    assert (reading.size, reading.tensors, reading.files, reading.of_files) == (9, 2, 1, 1)


def test_a_file_that_does_not_load_is_named_and_the_others_are_loaded() -> None:
    findings, reading = loads(*store(bad=NAN[:-1], good=NAN), "checkpoint-4", MemoryFiles({}))
    assert [(f.kind, f.name) for f in findings] == [("load", "shown/bad"), ("nonfinite", "shown/good"), ("note", "checkpoint-4")]
    assert (reading.files, reading.of_files) == (1, 2)


def test_what_has_no_tensors_is_not_loaded() -> None:
    findings, reading = loads(MemoryStore(), [Part("x.json", "x.json", 5)], "checkpoint-4", MemoryFiles({}))
    assert ([f.kind for f in findings], reading.size) == (["note"], 0)
    assert "nothing to load" in findings[0].detail


def real(name: str) -> tuple[LocalFiles, list[Part]]:
    files = LocalFiles(str(vector(name).sources[0]))
    return files, [Part(path, path, size, path) for path, size in files.sizes().items()]


@pytest.mark.parametrize(
    ("name", "least"), [("hf-fsdp1", 40), ("hf-zero3-2node", 60), ("verl-fsdp2", 40), ("bin-legacy", 23), ("hf-ddp", 60)]
)
def test_shards_of_every_kind_are_loaded_by_torch_itself(name: str, least: int) -> None:
    pytest.importorskip("torch")
    files, parts = real(name)
    findings, reading = loads(files, parts, "c", files)
    assert [f for f in findings if f.kind not in ("note", "nonfinite") or f.detail.startswith(UNLOADED)] == []
    assert reading.files == reading.of_files > 1 - (name == "bin-legacy")
    assert reading.tensors >= least


def test_what_is_compressed_or_has_no_metadata_is_said_not_to_be_loaded() -> None:
    files = LocalFiles(str(vector("dcp-zstd").sources[0]))
    parts = [Part(path, path, size, path) for path, size in files.sizes().items()]
    for checkpoint, why in ((files, "compressed"), (MemoryFiles({}), "no .metadata")):
        findings, reading = loads(files, parts, "c", checkpoint)
        notes = [f for f in findings if f.detail.startswith(UNLOADED)]
        assert len(notes) == reading.of_files > reading.files == 0
        assert all(why in f.detail for f in notes)
