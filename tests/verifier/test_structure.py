"""Level parse: what digests cannot see, because it was wrong when it was stored."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptsync.records.model_record import ModelRecord
from ckptsync.records.report import VerifyFinding
from ckptsync.records.store_paths import consolidated_prefix
from ckptsync.stores.contract import read_all
from ckptsync.stores.memory import MemoryStore
from ckptsync.verifier import level_parse
from ckptsync.verifier.tracked_files import TrackedFiles
from tests.hostile import pickles
from tests.support.files_in_memory import MemoryFiles, safetensors_file, tree
from tests.support.vector import vector, vectors
from tests.support.verified_stores import LOCATION, RUN, WHOLE, location, whole_store

HOLE = b'\x3f\0\0\0\0\0\0\0{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,2]}}          '


def checked(files: dict[str, bytes]) -> list[VerifyFinding]:
    return list(
        level_parse.check_checkpoint(
            TrackedFiles(MemoryFiles(files), "c", {p: f"c/{p}" for p in files})
        )
    )


@pytest.mark.parametrize("name", [v.name for v in vectors()])
def test_real_checkpoints_are_well(name: str) -> None:
    assert checked(tree(*vector(name).sources).content) == []


@pytest.mark.parametrize(
    ("path", "data"),
    [
        ("model.safetensors", HOLE),
        ("trainer_state.json", b"{"),
        ("scheduler.pt", b"PK\x03\x04" + b"x" * 100),
    ],
)
def test_a_file_without_its_end_is_named(path: str, data: bytes) -> None:
    found = [f for f in checked({**WHOLE, path: data}) if f.kind == "parse"]
    assert {f.name for f in found} == {f"c/{path}"}


def test_an_empty_file_is_named_and_not_the_one_before_it() -> None:
    (found,) = checked(
        {**WHOLE, "a.safetensors": b"", "optimizer.pt": b"", "trainer_state.json": b""}
    )[:1]
    assert (found.kind, found.name) == ("parse", "c/a.safetensors")


def test_an_index_that_disagrees_is_damage() -> None:
    part = WHOLE["model.safetensors"]
    index = b'{"weight_map": {"z": "model-00001-of-00001.safetensors"}}'
    found = checked(
        {"model-00001-of-00001.safetensors": part, "model.safetensors.index.json": index}
    )
    assert [f.kind for f in found] == ["parse"]
    assert "not where it says" in found[0].detail


def test_a_shard_of_another_size_than_its_metadata_demands_is_damage() -> None:
    files = dict(tree(*vector("hf-fsdp1").sources).content)
    path = next(p for p in files if p.endswith("/__0_0.distcp"))
    found = checked({**files, path: files[path] + b"x"})
    assert {f.kind for f in found} == {"parse"}
    assert all(path in f.detail for f in found)


def test_chunks_that_do_not_tile_their_tensor_are_damage() -> None:
    item = pickles.item()
    whole = {".metadata": pickles.metadata(len(item)), "__0_0.distcp": item}
    half = {
        ".metadata": pickles.metadata(len(item), size=pickles.shape(8), sizes=pickles.shape(4)),
        "__0_0.distcp": item,
    }
    assert checked(whole) == []
    (found,) = checked(half)
    assert found.kind == "parse"
    assert "4 elements found, 8 expected" in found.detail


def test_what_is_not_here_or_not_known_is_a_note() -> None:
    files = dict(tree(*vector("hf-fsdp1").sources).content)
    path = next(p for p in files if p.endswith("/__0_0.distcp") and "optimizer" not in p)
    del files[path]
    assert [f.detail.startswith(level_parse.INCOMPLETE) for f in checked(files)] == [True]
    assert [f.detail.startswith(level_parse.UNPARSED) for f in checked({"x.bin": b"abc"})] == [True]


def test_a_level_that_was_not_reached_is_not_claimed() -> None:
    unparsed = VerifyFinding("note", "c", f"{level_parse.UNPARSED}because")
    assert (
        level_parse.reached_level("load", [unparsed])
        == level_parse.reached_level("parse", [unparsed])
        == "digest"
    )
    assert level_parse.reached_level("stat", [unparsed]) == "stat"
    assert level_parse.reached_level("load", [VerifyFinding("note", "c", "loaded")]) == "load"


def consolidated(store: MemoryStore) -> tuple[TrackedFiles, ModelRecord]:
    model_record = location(store).model_record
    assert model_record is not None
    prefix = consolidated_prefix(RUN, LOCATION)
    return TrackedFiles(
        MemoryFiles({f.path: read_all(store, prefix + f.path) for f in model_record.files})
    ), model_record


def test_a_model_is_well_or_damaged_by_what_its_model_record_says() -> None:
    files, model_record = consolidated(whole_store())
    first, *others = model_record.tensors
    assert list(level_parse.check_model(files, model_record.tensors)) == []
    for tensors in ((replace(first, name="other"), *others), others):
        (found,) = level_parse.check_model(files, tensors)
        assert (found.kind, found.name) == ("parse", "model.safetensors")
    cut = safetensors_file({"a": ("U8", (1,), b"x")})[:-1]
    damaged = TrackedFiles(MemoryFiles({"model.safetensors": cut, "config.json": b"{}"}))
    assert {f.kind for f in level_parse.check_model(damaged, model_record.tensors)} == {"parse"}
    # which files are missing is said by level stat
    assert list(level_parse.check_model(TrackedFiles(MemoryFiles({})), model_record.tensors)) == []
