"""What .metadata says, and what it may not say."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from ckptsync.errors import CkptsyncError, Corrupt, Incomplete, Unsupported
from ckptsync.layouts import dcp, table
from tests.dcp_files import DATA, Built, Chunk, checkpoint, described, fields_of, found, item, metadata, one
from tests.plain_files import MemoryFiles, torch_pickle

FIELDS = ["state_dict_metadata", "planner_data", "storage_data"]
JUNK: list[object] = [
    None,
    5,
    "text",
    [],
    {},
    {"w": 5},
    {"w": None},
    {5: 5},
    {"w": []},
    [[]],
    {"w": ("m",)},
    {"w": ()},
    {"w": [["m"], "w"]},
    {"w": (), "v": ("m", "v")},
]


INNER = {
    "TensorStorageMetadata": ("size", "chunks", "properties"),
    "ChunkStorageMetadata": ("offsets", "sizes"),
    "MetadataIndex": ("fqn", "offset"),
    "_StorageInfo": ("relative_path", "offset", "length"),
}


def test_a_node_without_metadata_cannot_say_what_is_demanded() -> None:
    files = MemoryFiles({"m/__2_0.distcp": b"x"})
    for ask in (dcp.demands, dcp.tensors):
        with pytest.raises(Incomplete, match=r"m/\.metadata: not there") as e:
            ask(files, "m")
        assert "rank 0" in e.value.hint
    assert not table.demands(files).model


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", "", ".", "a//b", "a\0b", "a\\b", "x\ud800"])
def test_a_path_that_leaves_the_directory_is_corrupt(path: str) -> None:
    files = MemoryFiles({".metadata": metadata({"w": ("float32", (1,), (Chunk((0,), (1,), path, 0, 9),))})})
    for ask in (dcp.demands, dcp.tensors):
        with pytest.raises(Corrupt):
            ask(files, "")


def test_a_chunk_that_lies_in_no_file_is_corrupt_unless_it_is_empty() -> None:
    for sizes, refused in [((4,), True), ((0,), False)]:
        whole = Built("metadata", "Metadata", fields_of("w", sizes))
        files = MemoryFiles({".metadata": torch_pickle(whole)})
        with pytest.raises(Corrupt, match="in no file") if refused else contextlib.nullcontext():
            assert dcp.tensors(files, "")[0].copies[0].parts == ()


@pytest.mark.parametrize("transforms", [("stream.brotli/1",), ("stream.zstd/2",), ("stream.zstd/1", "stream.zstd/1"), ("aes",)])
def test_items_that_went_through_an_unknown_transform_are_refused_by_its_name(transforms: tuple[str, ...]) -> None:
    chunk = Chunk((0,), (4,), "__0_0.distcp", 0, 9, transforms)
    with pytest.raises(Unsupported, match=transforms[0].replace(".", r"\.")):
        found(MemoryFiles({".metadata": metadata({"w": ("float32", (4,), (chunk,))}), "__0_0.distcp": bytes(9)}))


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_one_changed_byte_is_read_or_refused_and_never_crashes(name: str) -> None:
    files = MemoryFiles(checkpoint("", {"w": ((4,), {(0,): ((3,), DATA[:12]), (3,): ((1,), DATA[:4])})}, paths={"w": ("w",)}))
    good = files.content[name]
    for at in range(len(good)):
        for value in (0, 41, 255, good[at] ^ 1):
            files.content[name] = good[:at] + bytes([value]) + good[at + 1 :]
            with contextlib.suppress(CkptsyncError):
                dcp.demands(files, "")
                dcp.tensors(files, "")


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("junk", [*JUNK, "absent"], ids=repr)
def test_junk_in_a_field_is_read_or_refused_and_never_crashes(field: str, junk: object) -> None:
    fields = fields_of("w", (0,)) | {field: junk}
    if junk == "absent":
        del fields[field]
    files = MemoryFiles({".metadata": torch_pickle(Built("metadata", "Metadata", fields))})
    with contextlib.suppress(CkptsyncError):
        dcp.demands(files, "")
    with contextlib.suppress(CkptsyncError):
        dcp.tensors(files, "")


@pytest.mark.parametrize(("kind", "field"), [(k, f) for k, fields in INNER.items() for f in fields])
@pytest.mark.parametrize("junk", [*JUNK, -1, 2.5, "absent"], ids=repr)
def test_junk_in_an_inner_field_is_read_or_refused_and_never_crashes(kind: str, field: str, junk: object) -> None:
    def spoilt(value: Any) -> Any:
        if isinstance(value, Built):
            state = spoilt(value.state)
            if value.call.name.name == kind:
                state = {k: v for k, v in state.items() if k != field} | ({} if junk == "absent" else {field: junk})
            return value.with_state(state)
        if isinstance(value, dict):
            return {spoilt(k): spoilt(v) for k, v in value.items()}
        return [spoilt(v) for v in value] if isinstance(value, list) else value

    full = described({"w": ("float32", (4,), (Chunk((0,), (4,), "__0_0.distcp", 0, 9),))})
    files = MemoryFiles({".metadata": torch_pickle(spoilt(full))})
    with contextlib.suppress(CkptsyncError):
        dcp.demands(files, "")
    with contextlib.suppress(CkptsyncError):
        dcp.tensors(files, "")


@pytest.mark.parametrize("content", [bytes(300), b"\x80\x04.", b""])
def test_metadata_that_is_no_pickle_is_corrupt_and_named(content: bytes) -> None:
    files = one(root="pytorch_model_fsdp_0")
    damaged = MemoryFiles({**files.content, "pytorch_model_fsdp_0/.metadata": content})
    with pytest.raises(Corrupt, match=r"^pytorch_model_fsdp_0/\.metadata: pickle"):
        found(damaged, "pytorch_model_fsdp_0")


def test_metadata_with_bytes_behind_its_pickle_is_corrupt() -> None:
    content = one().content
    with pytest.raises(Corrupt, match=r"^\.metadata: pickle: ends at byte \d+, the file at \d+"):
        found(MemoryFiles({**content, ".metadata": content[".metadata"] + b"x"}))


@pytest.mark.parametrize("path", [("model", "v"), ("mpdel", "w"), ("w",)])
def test_a_name_that_its_own_path_does_not_spell_is_corrupt(path: tuple[str, ...]) -> None:
    with pytest.raises(Corrupt, match=r"'model\.w' is"):
        found(one("model.w", paths={"model.w": path}))


def test_a_name_without_a_path_is_corrupt_where_others_have_theirs() -> None:
    with pytest.raises(Corrupt, match=r"'model\.w' has no path"):
        found(one("model.w", paths={"model.v": ("model", "v")}))


def test_metadata_that_does_not_even_say_that_there_are_no_paths_is_corrupt() -> None:
    fields = fields_of("w", (0,))
    del fields["planner_data"]
    with pytest.raises(Corrupt, match="no planner_data"):
        dcp.tensors(MemoryFiles({".metadata": torch_pickle(Built("metadata", "Metadata", fields))}), "")


@pytest.mark.parametrize("module", ["distributed._shard.sharded_tensor.metadata", "distributed.checkpoint.metadata"])
def test_properties_of_torch_2_1_and_2_2_are_those_of_sharded_tensors(module: str) -> None:
    files = one()
    own = b"torch.distributed.checkpoint.metadata"
    held = files.content[".metadata"]
    at = held.index(own + b"\nTensorProperties") if own + b"\nTensorProperties" in held else -1
    assert at >= 0, "the helper writes names in lines"
    changed = held[:at] + b"torch." + module.encode() + held[at + len(own) :]
    assert found(MemoryFiles({**files.content, ".metadata": changed})).keys() == {"w"}


def test_plans_of_megatron_beside_the_metadata_are_passed_over() -> None:
    whole = described({"w": ("float32", (4,), (Chunk((0,), (4,), "__0_0.distcp", 0, len(item(DATA, (4,)))),))})
    plans = [Built("planner", "SavePlan", {"items": [Built("planner", "WriteItem", {"index": 0})], "planner_data": {}})]
    state = {**whole.state, "planner_data": {}, "all_local_plans": plans} if isinstance(whole.state, dict) else {}
    files = MemoryFiles({".metadata": torch_pickle(whole.with_state(state)), "__0_0.distcp": item(DATA, (4,))})
    assert found(files).keys() == {"w"}
