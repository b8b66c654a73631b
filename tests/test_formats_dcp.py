"""Distributed checkpoints: what `.metadata` may say, and what it may not."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptsync.errors import CkptsyncError, Corrupt, Incomplete, Unsupported
from ckptsync.formats import dcp, layouts
from ckptsync.merge.plan import Options, plan
from ckptsync.model import Shape, Tensor, read
from tests.boxes import tilings
from tests.dcp_files import Built, Chunk, checkpoint, described, item, metadata
from tests.plain_files import Global, MemoryFiles, torch_pickle, tree
from tests.vector import vector

DATA = bytes(range(16))
WHOLE: dict[Shape, tuple[Shape, bytes]] = {(0,): ((4,), DATA)}


def one(name: str = "w", root: str = "", **options: Any) -> MemoryFiles:
    return MemoryFiles(checkpoint(root, {name: ((4,), WHOLE)}, **options))


def found(files: MemoryFiles, root: str = "") -> dict[str, Tensor]:
    return {t.name: t for t in dcp.tensors(files, root)}


def rebuilt(files: MemoryFiles, tensor: Tensor) -> bytes:
    out = np.zeros(tensor.shape, "<u4")
    for part in tensor.copies[0].parts:
        where = tuple(slice(o, o + n) for o, n in zip(part.offsets, part.sizes, strict=True))
        out[where] = np.frombuffer(read(files, part.extent), "<u4").reshape(part.sizes)
    return out.tobytes()


@given(tilings(), st.sampled_from(["", "pytorch_model_fsdp_0"]))
@settings(max_examples=60)
def test_any_boxes_are_found_where_they_lie(tiling: tuple[Shape, tuple[tuple[Shape, Shape], ...]], root: str) -> None:
    shape, boxes = tiling
    values = np.arange(int(np.prod(shape)), dtype="<u4").reshape(shape)
    filled = {o: (n, values[tuple(slice(a, a + b) for a, b in zip(o, n, strict=True))].tobytes()) for o, n in boxes if 0 not in n}
    files = MemoryFiles(checkpoint(root, {"w": (shape, filled)}))
    assert rebuilt(files, found(files, root)["w"]) == values.tobytes()
    plan(dcp.tensors(files, root), Options())


def test_a_root_is_a_directory_with_shards_or_their_metadata() -> None:
    names = ["a/.metadata", "b/__0_0.distcp", "c/__0_0.pt", "d/x.distcp", "__3_12.distcp", ".metadata.json", "e/f/.metadata"]
    assert dcp.roots(names) == ("", "a", "b", "e/f")
    assert [dcp.holds_weights(r) for r in ("", "pytorch_model_fsdp_0", "optimizer_0", "optimizers/x", "a/optimizer")] == [
        *(True, True, False, True, False)
    ]


def test_a_node_without_metadata_cannot_say_what_is_demanded() -> None:
    files = MemoryFiles({"m/__2_0.distcp": b"x"})
    for ask in (dcp.demands, dcp.tensors):
        with pytest.raises(Incomplete, match=r"m/\.metadata: not there") as e:
            ask(files, "m")
        assert "rank 0" in e.value.hint
    assert not layouts.demands(files).model


def test_every_file_is_demanded_with_the_size_that_its_last_item_gives_it() -> None:
    chunks = (Chunk((0,), (2,), "__0_0.distcp", 100, 50), Chunk((2,), (2,), "__1_0.distcp", 0, 70))
    more = (Chunk((0,), (4,), "__0_0.distcp", 10, 60),)
    data = metadata({"w": ("float32", (4,), chunks), "v": ("float32", (4,), more)})
    files = MemoryFiles({"m/.metadata": data})
    assert dcp.demands(files, "m") == {"m/.metadata": len(data), "m/__0_0.distcp": 150, "m/__1_0.distcp": 70}


@pytest.mark.parametrize("name", ["hf-fsdp1", "hf-fsdp2-2node", "dcp-dress", "dcp-mesh"])
def test_real_shards_have_the_demanded_sizes(name: str) -> None:
    files = tree(*vector(name).sources)
    (root,) = [r for r in dcp.roots(files.sizes()) if dcp.holds_weights(r)]
    demanded = dcp.demands(files, root)
    assert {n: files.sizes()[n] for n in demanded} == demanded


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", "", ".", "a//b", "a\0b", "a\\b", "x\ud800"])
def test_a_path_that_leaves_the_directory_is_corrupt(path: str) -> None:
    files = MemoryFiles({".metadata": metadata({"w": ("float32", (1,), (Chunk((0,), (1,), path, 0, 9),))})})
    for ask in (dcp.demands, dcp.tensors):
        with pytest.raises(Corrupt):
            ask(files, "")


@pytest.mark.parametrize(
    ("paths", "wanted"),
    [
        ({"model.w": ("model", "w"), "model.v": ("model", "v")}, {"w", "v"}),
        ({"model.w": ("model", "model.w"), "model.v": ("model", "v")}, {"model.w", "v"}),
        ({"model.w": ("model.w",), "model.v": ("model.v",)}, {"model.w", "model.v"}),
        ({"model.w": ("model.w",), "model.v": ("model", "v")}, {"model.w", "model.v"}),
        ({"model.w": ("state", "model.w"), "model.v": ("state", "model.v")}, {"model.w", "model.v"}),
        ({"model.w": ("model", "w"), "model.v": ("optim", "state", "v")}, {"w"}),
        ({"model.w": ("model", "layers", 0, "w"), "model.v": ("model", "v")}, {"layers.0.w", "v"}),
        ({"model.w": ("a", "w"), "model.v": ("b", "v")}, {"a.w", "b.v"}),
        ({"model.w": ("app", "model", "model.w"), "model.v": ("app", "optim", "state", "v", "exp_avg")}, {"model.w"}),
        ({"model.w": ("app", "layers", "w"), "model.v": ("app", "layers", "v")}, {"layers.w", "layers.v"}),
        (None, {"model.w", "model.v"}),
        ({}, {"model.w", "model.v"}),
    ],
)
def test_the_wrapper_is_the_first_of_the_path_and_never_a_prefix_of_a_name(paths: Any, wanted: set[str]) -> None:
    files = MemoryFiles(checkpoint("", {"model.w": ((4,), WHOLE), "model.v": ((4,), WHOLE)}, paths=paths))
    assert found(files).keys() == wanted


@pytest.mark.parametrize("name", ["a.b.c", "with space", "ünï.cödé", "model.model.x", "a/b", "..", "x\ny"])
def test_names_are_kept_letter_by_letter(name: str) -> None:
    assert found(one(name)).keys() == {name}
    assert found(one(f"model.{name}", paths={f"model.{name}": ("model", name)})).keys() == {name}


@pytest.mark.parametrize("wrapper", ["optimizer", "optim"])
def test_an_optimizer_alone_is_no_model(wrapper: str) -> None:
    files = one(f"{wrapper}.state.w.exp_avg", paths={f"{wrapper}.state.w.exp_avg": (wrapper, "state", "w", "exp_avg")})
    with pytest.raises(Unsupported, match="without model tensors"):
        found(files)


def test_a_chunk_that_lies_in_no_file_is_corrupt_unless_it_is_empty() -> None:
    for sizes, refused in [((4,), True), ((0,), False)]:
        whole = Built("metadata", "Metadata", _content("w", sizes))
        files = MemoryFiles({".metadata": torch_pickle(whole)})
        with pytest.raises(Corrupt, match="in no file") if refused else contextlib.nullcontext():
            assert dcp.tensors(files, "")[0].copies[0].parts == ()


def _content(name: str, sizes: Shape) -> dict[str, object]:
    box = Built("metadata", "ChunkStorageMetadata", {"offsets": (0,), "sizes": sizes})
    properties = Built("metadata", "TensorProperties", (Global("torch", "float32"),))
    tensor = Built("metadata", "TensorStorageMetadata", {"properties": properties, "size": sizes, "chunks": [box]})
    return {"state_dict_metadata": {name: tensor}, "planner_data": None, "storage_data": {}}


def test_items_that_are_no_tensors_are_passed_over() -> None:
    assert found(one(blobs=("step", "model.extra"))).keys() == {"w"}


def test_a_checkpoint_of_nothing_but_other_things_is_unsupported() -> None:
    with pytest.raises(Unsupported, match="without model tensors"):
        dcp.tensors(MemoryFiles({".metadata": metadata({}, blobs=("step",))}), "")


def test_optimizer_states_alone_are_not_taken_for_a_model() -> None:
    files = one(root="optimizer_0")
    assert layouts.sources(files) == ()
    with pytest.raises(Unsupported, match="no layout claims"):
        layouts.choose(files, None)


def test_transformed_items_are_refused() -> None:
    chunk = Chunk((0,), (4,), "__0_0.distcp", 0, 9, ("stream.zstd/1",))
    with pytest.raises(Unsupported, match=r"stream\.zstd"):
        dcp.tensors(MemoryFiles({".metadata": metadata({"w": ("float32", (4,), (chunk,))}), "__0_0.distcp": bytes(9)}), "")


@pytest.mark.parametrize(("shape", "dtype"), [((5,), "float32"), ((2, 2), "float32"), ((4,), "int32"), ((4,), "bfloat16")])
def test_an_item_that_is_another_tensor_is_corrupt(shape: Shape, dtype: str) -> None:
    held = item(DATA, (4,))
    chunk = Chunk((0,) * len(shape), shape, "__0_0.distcp", 0, len(held))
    with pytest.raises(Corrupt, match="is not the"):
        dcp.tensors(MemoryFiles({".metadata": metadata({"w": (dtype, shape, (chunk,))}), "__0_0.distcp": held}), "")


def test_a_chunk_of_another_rank_is_corrupt() -> None:
    chunk = Chunk((0, 0), (4, 1), "__0_0.distcp", 0, 9)
    with pytest.raises(Corrupt, match="has a chunk at"):
        dcp.tensors(MemoryFiles({".metadata": metadata({"w": ("float32", (4,), (chunk,))})}), "")


def test_the_strides_of_an_item_are_kept() -> None:
    held = item(DATA, (2, 2), (1, 2))
    chunk = Chunk((0, 0), (2, 2), "__0_0.distcp", 0, len(held))
    files = MemoryFiles({".metadata": metadata({"w": ("float32", (2, 2), (chunk,))}), "__0_0.distcp": held})
    assert found(files)["w"].copies[0].parts[0].strides == (1, 2)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_one_changed_byte_is_read_or_refused_and_never_crashes(name: str) -> None:
    files = MemoryFiles(checkpoint("", {"w": ((4,), {(0,): ((3,), DATA[:12]), (3,): ((1,), DATA[:4])})}, paths={"w": ("m", "w")}))
    good = files.content[name]
    for at in range(len(good)):
        for value in (0, 41, 255, good[at] ^ 1):
            files.content[name] = good[:at] + bytes([value]) + good[at + 1 :]
            with contextlib.suppress(CkptsyncError):
                dcp.demands(files, "")
                dcp.tensors(files, "")


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


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("junk", [*JUNK, "absent"], ids=repr)
def test_junk_in_a_field_is_read_or_refused_and_never_crashes(field: str, junk: object) -> None:
    content = _content("w", (0,)) | {field: junk}
    if junk == "absent":
        del content[field]
    files = MemoryFiles({".metadata": torch_pickle(Built("metadata", "Metadata", content))})
    with contextlib.suppress(CkptsyncError):
        dcp.demands(files, "")
    with contextlib.suppress(CkptsyncError):
        dcp.tensors(files, "")


INNER = {
    "TensorStorageMetadata": ("size", "chunks", "properties"),
    "ChunkStorageMetadata": ("offsets", "sizes"),
    "MetadataIndex": ("fqn", "offset"),
    "_StorageInfo": ("relative_path", "offset", "length"),
}


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
