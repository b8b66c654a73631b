"""Level load over the files of a place: findings, and what was loaded with what."""

from __future__ import annotations

from ckptsync.stores.memory import MemoryStore
from ckptsync.verify.loads import Part, loads
from tests.plain_files import safetensors_file

NAN = safetensors_file({"a": ("F32", (2,), b"\0\0\x80\x7f\0\0\xc0\x7f"), "b": ("U8", (1,), b"x")})


def store(**files: bytes) -> tuple[MemoryStore, list[Part]]:
    found = MemoryStore()
    for name, data in files.items():
        found.write(f"{name}.safetensors", [data])
    return found, [Part(f"{name}.safetensors", f"shown/{name}", len(data)) for name, data in files.items()]


def test_values_that_are_not_finite_are_told_of_their_tensor() -> None:
    findings, read = loads(*store(good=NAN), "checkpoint-4")
    assert [(f.kind, f.name, f.tensors) for f in findings[:-1]] == [("nonfinite", "shown/good", ("a",))]
    assert "2 values" in findings[0].detail
    assert "2 tensors of 1 files loaded with safetensors" in findings[-1].detail
    assert read == 9


def test_a_file_that_does_not_load_is_named_and_the_others_are_loaded() -> None:
    findings, read = loads(*store(bad=NAN[:-1], good=NAN), "checkpoint-4")
    assert [(f.kind, f.name) for f in findings] == [("load", "shown/bad"), ("nonfinite", "shown/good"), ("note", "checkpoint-4")]
    assert read == 9


def test_only_safetensors_are_loaded_and_that_is_said() -> None:
    findings, read = loads(MemoryStore(), [Part("x.distcp", "x.distcp", 5)], "checkpoint-4")
    assert ([f.kind for f in findings], read) == (["note"], 0)
    assert "nothing to load" in findings[0].detail
