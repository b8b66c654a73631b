"""Distributed checkpoints: what `.metadata` may say, and what it may not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.layouts import dcp, table
from ckptsync.merge.plan import Options, plan
from ckptsync.model import Shape, Tensor, read
from tests.boxes import tilings
from tests.dcp_files import DATA, WHOLE, Chunk, checkpoint, found, item, metadata, one
from tests.plain_files import MemoryFiles, tree
from tests.vector import vector


def rebuilt(files: MemoryFiles, tensor: Tensor) -> bytes:
    out = np.zeros(tensor.shape, "<u4")
    for part in tensor.copies[0].parts:
        where = tuple(slice(o, o + n) for o, n in zip(part.offsets, part.sizes, strict=True))
        out[where] = np.frombuffer(read(files, part.extent), "<u4").reshape(part.sizes)
    return out.tobytes()


@given(tilings(), st.sampled_from(["", "pytorch_model_fsdp_0"]))
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


def test_every_file_is_demanded_with_the_size_that_its_last_item_gives_it() -> None:
    chunks = (Chunk((0,), (2,), "__0_0.distcp", 100, 50), Chunk((2,), (2,), "__1_0.distcp", 0, 70))
    more = (Chunk((0,), (4,), "__0_0.distcp", 10, 60),)
    data = metadata({"w": ("float32", (4,), chunks), "v": ("float32", (4,), more)})
    files = MemoryFiles({"m/.metadata": data})
    assert dcp.demands(files, "m") == {"m/.metadata": len(data), "m/__0_0.distcp": 150, "m/__1_0.distcp": 70}


@pytest.mark.parametrize(
    "name", ["hf-fsdp1", "hf-fsdp2-2node", "dcp-dress", "dcp-mesh", "dcp-zstd", "dcp-local", "titan", "lightning", "megatron"]
)
def test_real_shards_have_the_demanded_sizes(name: str) -> None:
    files = tree(*vector(name).sources)
    (root,) = [r for r in dcp.roots(files.sizes()) if dcp.holds_weights(r)]
    demanded = dcp.demands(files, root)
    assert {n: files.sizes()[n] for n in demanded} == demanded


@pytest.mark.parametrize("name", ["a.b.c", "with space", "ünï.cödé", "model.model.x", "a/b", "..", "x\ny"])
def test_names_are_kept_letter_by_letter(name: str) -> None:
    assert found(one(name)).keys() == {name}
    assert found(one(f"model.{name}", paths={f"model.{name}": ("model", name)})).keys() == {name}


@pytest.mark.parametrize("wrapper", ["optimizer", "optim"])
def test_an_optimizer_alone_is_no_model(wrapper: str) -> None:
    files = one(f"{wrapper}.state.w.exp_avg", paths={f"{wrapper}.state.w.exp_avg": (wrapper, "state", "w", "exp_avg")})
    with pytest.raises(Unsupported, match="without model tensors"):
        found(files)


def test_items_that_are_no_tensors_are_passed_over() -> None:
    assert found(one(blobs=("step", "model.extra"))).keys() == {"w"}


def test_a_checkpoint_of_nothing_but_other_things_is_unsupported() -> None:
    with pytest.raises(Unsupported, match="without model tensors"):
        dcp.tensors(MemoryFiles({".metadata": metadata({}, blobs=("step",))}), "")


def test_optimizer_states_alone_are_not_taken_for_a_model() -> None:
    files = one(root="optimizer_0")
    assert table.sources(files) == ()
    with pytest.raises(Unsupported, match="no layout claims"):
        table.choose(files, None)


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


def test_tensors_in_one_block_of_safetensors_are_refused_by_name() -> None:
    chunk = Chunk((0,), (4,), "__0_0.distcp", 0, 16)
    head = b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
    block = len(head).to_bytes(8, "little") + head + DATA
    files = MemoryFiles({".metadata": metadata({"w": ("float32", (4,), (chunk,))}), "__0_0.distcp": block})
    with pytest.raises(Unsupported, match=r"__0_0\.distcp: .*SerializationFormat\.SAFETENSORS"):
        dcp.demands(files, "")


def test_a_section_may_be_asked_for_by_its_name() -> None:
    paths = {"a.w": ("a", "w"), "b.w": ("b", "w")}
    files = MemoryFiles(checkpoint("x", {"a.w": ((4,), WHOLE), "b.w": ((4,), {(0,): ((4,), DATA[::-1])})}, paths=paths))
    with pytest.raises(Unsupported, match="2 sets of weights") as refused:
        table.tensors(files, table.choose(files, None))
    assert refused.value.hint == "--source 'dcp:x#a' or --source 'dcp:x#b'"
    chosen = table.choose(files, "dcp:x#b")
    assert str(chosen) == "dcp:x#b"
    (tensor,) = table.tensors(files, chosen)
    assert (tensor.name, read(files, tensor.copies[0].parts[0].extent)) == ("w", DATA[::-1])


def test_a_directory_whose_name_has_the_mark_of_a_section_is_a_directory() -> None:
    assert found(one(root="run#a"), "run#a").keys() == {"w"}


def test_an_average_beside_the_model_is_left_out_and_said() -> None:
    paths = {"model.w": ("model", "w"), "ema.w": ("ema", "w")}
    files = MemoryFiles(checkpoint("", {"model.w": ((4,), WHOLE), "ema.w": ((4,), {(0,): ((4,), DATA[::-1])})}, paths=paths))
    (tensor,) = dcp.tensors(files, "")
    assert tensor.remark == "'ema' beside the weights is left out: --source 'dcp:.#ema' takes it"
    assert read(files, tensor.copies[0].parts[0].extent) == DATA
    (average,) = dcp.tensors(files, ".#ema")
    assert (read(files, average.copies[0].parts[0].extent), average.remark) == (DATA[::-1], "")
