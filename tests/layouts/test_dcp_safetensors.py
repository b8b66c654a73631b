"""DCP in safetensors: shards that say nothing of the whole, and what does."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.errors import CkptsyncError, Corrupt, Incomplete, Unsupported
from ckptsync.layouts import registry
from ckptsync.layouts.dcp_safetensors import ExpectedModel
from ckptsync.layouts.registry import WeightsSource
from ckptsync.merger.plan import check_tiling
from ckptsync.tensors import Shape, Tensor
from tests.support.files_in_memory import MemoryFiles, raw_safetensors, tree
from tests.support.vector import vector

VECTORS = {"tf5-fsdp2": "", "tf5-hsdp": "", "hf-writer-mesh": "sharded"}
Rows = Mapping[str, tuple[str, Shape, Shape]]  # dtype, offsets, sizes
SIZES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "I64": 8, "BOOL": 1}
SPLIT: tuple[Rows, ...] = (
    {"w": ("F32", (0, 0), (2, 3)), "b": ("BF16", (0,), (2,)), "n": ("I64", (), ())},
    {"w": ("F32", (2, 0), (2, 3)), "b": ("BF16", (2,), (1,)), "mask": ("BOOL", (0,), (3,))},
    {"w": ("F32", (4, 0), (1, 3)), "b": ("BF16", (3,), (0,)), "table": ("F8_E4M3", (0, 0), (2, 2))},
)
SHAPES: dict[str, Shape] = {"w": (5, 3), "b": (3,), "mask": (3,), "table": (2, 2)}
BASE = ExpectedModel(SHAPES)


def shard(rows: Rows, **metadata: object) -> bytes:
    """A file as torch's writer lays it out."""
    header: dict[str, Any] = {}
    at = 0
    for name, (dtype, _, sizes) in rows.items():
        size = SIZES[dtype]
        for n in sizes:
            size *= n
        header[name] = {"dtype": dtype, "shape": list(sizes), "data_offsets": [at, at + size]}
        at += size
    info = {name: {"saved_offsets": list(offsets)} for name, (_, offsets, _) in rows.items()}
    own = {"DCP_SHARDING_INFO": json.dumps(info), "DCP_VERSION": "1.0", "format": "pt"} | metadata
    header["__metadata__"] = {key: value for key, value in own.items() if value is not None}
    return raw_safetensors(header, bytes(at))


def name(rank: int, index: int = 1, count: int = 1) -> str:
    return f"shard-{rank + 1:05d}-model-{index:05d}-of-{count:05d}.safetensors"


def saved(*ranks: Rows) -> MemoryFiles:
    return MemoryFiles({name(rank): shard(rows) for rank, rows in enumerate(ranks)})


def checked(files: MemoryFiles, outside: ExpectedModel = BASE, root: str = "") -> dict[str, Tensor]:
    """What a merge does before it writes."""
    found = registry.tensors(files, WeightsSource("dcp_safetensors", root), outside)
    for tensor in found:
        check_tiling(tensor, tensor.copies[0])
    return {tensor.name: tensor for tensor in found}


def real(of: str) -> tuple[MemoryFiles, str]:
    return tree(*vector(of).sources), VECTORS[of]


def shards(files: MemoryFiles) -> list[str]:
    return sorted(path for path in files.content if "shard-" in path)


def changed(files: MemoryFiles, path: str, data: bytes | None) -> MemoryFiles:
    rest = {other: content for other, content in files.content.items() if other != path}
    return MemoryFiles(rest if data is None else {**rest, path: data})


def test_boxes_of_all_ranks_tile_the_tensors_of_the_base_model() -> None:
    found = checked(saved(*SPLIT))
    assert {n: (t.dtype, t.shape) for n, t in found.items()} == {
        "w": ("F32", (5, 3)),
        "b": ("BF16", (3,)),
        "n": ("I64", ()),
        "mask": ("BOOL", (3,)),
        "table": ("F8_E4M3", (2, 2)),
    }
    assert [p.offsets for p in found["w"].copies[0].parts] == [(0, 0), (2, 0), (4, 0)]
    assert [p.sizes for p in found["b"].copies[0].parts] == [(2,), (1,)]


def test_without_a_proof_from_elsewhere_nothing_is_read_out_of_the_shards() -> None:
    files = saved(*SPLIT)
    for shape in ("rng_state", "random_states"):
        files.content |= {
            f"{shape}_{rank}.{'pth' if shape == 'rng_state' else 'pkl'}": b"" for rank in range(3)
        }
    with pytest.raises(Incomplete, match=r"b and 3 more: .* nothing says what shape it has") as e:
        checked(files, ExpectedModel())
    assert e.value.hint.startswith("give the model it was trained from with --base")
    with pytest.raises(Incomplete) as e:
        checked(files, ExpectedModel({"another": (1,)}))
    assert e.value.hint.startswith("check that --base is the model")
    with pytest.raises(Incomplete, match="nothing names the tensors"):
        checked(saved({"n": ("I64", (), ())}), ExpectedModel())
    assert registry.demands(files).model == {}


@pytest.mark.parametrize("of", VECTORS)
def test_the_shards_of_the_first_ranks_alone_are_incomplete_however_whole_they_look(
    of: str,
) -> None:
    files, root = real(of)
    ranks = max(int(path.rpartition("shard-")[2][:5]) for path in shards(files))
    for count in range(1, ranks):
        gone = [path for path in shards(files) if int(path.rpartition("shard-")[2][:5]) > count]
        some = MemoryFiles({path: data for path, data in files.content.items() if path not in gone})
        with pytest.raises(Incomplete):
            checked(some, ExpectedModel(), root)
        assert not registry.demands(some).model or set(gone) <= registry.demands(some).model.keys()


@pytest.mark.parametrize("of", VECTORS)
@given(data=st.data())
def test_one_changed_byte_of_a_header_gives_the_same_or_an_error_but_no_other_tensors(
    of: str, data: st.DataObject
) -> None:
    files, root = real(of)
    want = checked(files, ExpectedModel(), root)
    path = data.draw(st.sampled_from(shards(files)))
    good = files.content[path]
    at = data.draw(st.integers(0, 7 + int.from_bytes(good[:8], "little")))
    bad = good[:at] + bytes([good[at] ^ 1 << data.draw(st.integers(0, 7))]) + good[at + 1 :]
    with contextlib.suppress(CkptsyncError):
        found = checked(changed(files, path, bad), ExpectedModel(), root)
        assert {n: t.shape for n, t in found.items()} == {n: t.shape for n, t in want.items()}


@pytest.mark.parametrize("of", VECTORS)
def test_a_proof_is_demanded_with_the_shards(of: str) -> None:
    files, root = real(of)
    proof = {"hf-writer-mesh": "optim/.metadata"}.get(of, "config.json")
    found = registry.demands(files)
    assert found.model.keys() == {proof, *shards(files)}
    assert found.world == (3 if of == "tf5-fsdp2" else 4)
    del files.content[proof]
    if of == "tf5-fsdp2":
        assert registry.demands(files).model.keys() == {"optimizer/.metadata", *shards(files)}
        del files.content["optimizer/.metadata"]
    with pytest.raises(Incomplete):
        checked(files, ExpectedModel(), root)


def test_a_node_with_the_optimizers_metadata_demands_the_shards_of_all_ranks() -> None:
    files, _ = real("tf5-fsdp2")
    own = MemoryFiles(
        {
            path: data
            for path, data in files.content.items()
            if path not in {name(1), name(2), "config.json"}
        }
    )
    assert registry.demands(own).model.keys() >= {name(0), name(1), name(2), "optimizer/.metadata"}
    assert registry.demands(own).model[name(1)] is None
    other = MemoryFiles({name(1): files.content[name(1)]})
    assert registry.demands(other).model == {}


BAD: dict[str, tuple[type[CkptsyncError], Rows]] = {
    "another dtype": (Corrupt, {"w": ("BF16", (4, 0), (1, 3))}),
    "a box twice": (Corrupt, {"w": ("F32", (2, 0), (2, 3))}),
    "boxes that overlap": (Corrupt, {"w": ("F32", (3, 0), (1, 3))}),
    "a box outside": (Corrupt, {"w": ("F32", (5, 0), (1, 3))}),
    "a box too wide": (Corrupt, {"w": ("F32", (4, 0), (1, 4))}),
    "an axis too few": (Corrupt, {"w": ("F32", (4,), (3,))}),
    "a hole": (Incomplete, {"w": ("F32", (5, 0), (0, 3))}),
    "nothing": (Incomplete, {}),
    "a scalar twice": (Corrupt, {"w": ("F32", (4, 0), (1, 3)), "n": ("I64", (), ())}),
    "a tensor that the base has not": (
        Incomplete,
        {"w": ("F32", (4, 0), (1, 3)), "more": ("F32", (0,), (2,))},
    ),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_last_shard_that_does_not_fit_the_others_is_refused(bad: str) -> None:
    error, rows = BAD[bad]
    last = {n: r for n, r in SPLIT[2].items() if n != "w"} | dict(rows)
    with pytest.raises(error, match="outside of" if bad == "a box outside" else None):
        checked(saved(SPLIT[0], SPLIT[1], last))


INFO = "DCP_SHARDING_INFO"
METADATA: dict[str, tuple[type[CkptsyncError], dict[str, Any]]] = {
    "no offsets": (Unsupported, {INFO: None}),
    "another version": (Unsupported, {"DCP_VERSION": "2.0"}),
    "no version": (Unsupported, {"DCP_VERSION": None}),
    "not JSON": (Corrupt, {INFO: "{"}),
    "no text": (Corrupt, {INFO: 5}),
    "a list": (Corrupt, {INFO: "[]"}),
    "another tensor": (Corrupt, {INFO: '{"v": {"saved_offsets": [0]}}'}),
    "one more": (Corrupt, {INFO: '{"w": {"saved_offsets": [0]}, "v": {"saved_offsets": [0]}}'}),
    "one twice": (Corrupt, {INFO: '{"w": {"saved_offsets": [0]}, "w": {"saved_offsets": [0]}}'}),
    "no saved_offsets": (Corrupt, {INFO: '{"w": {}}'}),
    "depth": (Corrupt, {INFO: '{"w": ' + "[" * 100_000}),
    **{
        f"offsets {offsets}": (Corrupt, {INFO: f'{{"w": {{"saved_offsets": {offsets}}}}}'})
        for offsets in ("null", "[-1]", "[true]", "[0.0]", "[0, 0]", "[99999999999999999999]")
    },
}


@pytest.mark.parametrize("bad", METADATA)
def test_what_does_not_say_where_boxes_begin_is_refused(bad: str) -> None:
    error, metadata = METADATA[bad]
    rows: Rows = {"w": ("F32", (0,), (2,))}
    assert checked(MemoryFiles({name(0): shard(rows)}), ExpectedModel({"w": (2,)}))
    with pytest.raises(error, match="shard-00001"):
        checked(MemoryFiles({name(0): shard(rows, **metadata)}), ExpectedModel({"w": (2,)}))


@pytest.mark.parametrize(
    "odd", [name(-1), name(3, 0), name(3, 2, 1), name(0, 1, 2), name(1 << 17), name(10**30)]
)
def test_shards_of_several_sets_or_without_a_place_in_one_are_corrupt(odd: str) -> None:
    files = saved(*SPLIT)
    files.content[odd] = shard({"x": ("I64", (), ())})
    with pytest.raises(Corrupt, match=r"earlier|different sets|no shard has such a number"):
        checked(files)


def test_ranks_that_wrote_other_files_and_no_shard_are_missed() -> None:
    files = saved(*SPLIT)
    assert checked(files)
    files.content["rng_state_3.pth"] = b""
    with pytest.raises(Incomplete, match="no shard of rank 3 is here"):
        checked(files)
    del files.content["rng_state_3.pth"]
    files.content[name(4)] = shard({"m": ("I64", (), ())})
    with pytest.raises(Incomplete, match="no shard of rank 3 is here"):
        checked(files)


def test_a_rank_without_a_shard_is_not_missed_where_a_configuration_names_every_tensor() -> None:
    files, root = real("tf5-fsdp2")
    files.content["rng_state_3.pth"] = b""
    assert checked(files, ExpectedModel(), root)


def test_several_files_a_rank_are_joined_and_with_a_base_only_needed_ones_are_demanded() -> None:
    files = MemoryFiles({name(rank, 1, 2): shard(rows) for rank, rows in enumerate(SPLIT)})
    assert checked(files).keys() == {*SHAPES, "n"}
    files.content[name(1, 2, 2)] = shard({"late": ("I64", (), ())})
    assert checked(files).keys() == {*SHAPES, "n", "late"}


def test_an_optimizer_names_what_is_trained_so_every_file_of_every_rank_has_to_be_there() -> None:
    files, root = real("hf-writer-mesh")
    alone = changed(files, f"sharded/{name(0, 1, 3)}", shard({}))
    with pytest.raises(Incomplete, match="elements are in the shards"):
        checked(alone, ExpectedModel(), root)
    more = MemoryFiles(
        {path.replace("of-00003", "of-00004"): data for path, data in files.content.items()}
    )
    with pytest.raises(Incomplete, match="12 shards are here, 16 expected"):
        checked(more, ExpectedModel(), root)


def test_shards_are_claimed_by_their_names_wherever_they_lie_and_by_nobody_else() -> None:
    names = [name(0), f"sharded/{name(1)}", f"m/sharded/{name(2)}"]
    names += ["x/model-00001-of-00002.safetensors", "shard-1-model-1-of-1.safetensors"]
    roots = [str(s) for s in registry.sources(MemoryFiles(dict.fromkeys(names, b"")))]
    assert roots == [f"dcp_safetensors:{root}" for root in (".", "m/sharded", "sharded")]


def test_shards_of_as_many_ranks_as_the_caller_knows_of_are_all() -> None:
    files = saved(*SPLIT)
    for wanted in ("dcp_safetensors:.#world=3", "dcp_safetensors#world=3"):
        assert {
            t.name: t.shape for t in registry.tensors(files, registry.choose(files, wanted))
        } == {
            **SHAPES,
            "n": (),
        }
    with pytest.raises(
        Incomplete, match="3 shards are here, 5 expected of 5 ranks: none of rank 3 and 1 more"
    ):
        checked(files, ExpectedModel(), ".#world=5")
    with pytest.raises(Corrupt, match="a shard of rank 2, of 2 ranks"):
        checked(files, ExpectedModel(), ".#world=2")
    with pytest.raises(Incomplete, match="none of rank 0"):
        checked(changed(files, name(0), None), ExpectedModel(), ".#world=3")
    files.content[name(1)] = shard({**SPLIT[1], "w": ("F32", (3, 0), (1, 3))})
    with pytest.raises(Incomplete, match="w: 12 of 15 elements"):
        checked(files, ExpectedModel(), ".#world=3")


def test_a_rank_with_some_of_several_files_may_lack_others_whatever_the_caller_knows() -> None:
    files, root = real("hf-writer-mesh")
    del files.content["optim/.metadata"]
    assert checked(files, ExpectedModel(), f"{root}#world=4").keys() == {
        t.name for t in registry.tensors(*whole("hf-writer-mesh"))
    }
    for path in shards(files):
        with pytest.raises(Incomplete, match="11 shards are here, 12 expected of 4 ranks"):
            checked(changed(files, path, None), ExpectedModel(), f"{root}#world=4")


def whole(of: str) -> tuple[MemoryFiles, WeightsSource]:
    files, root = real(of)
    return files, WeightsSource("dcp_safetensors", root)


@pytest.mark.parametrize("said", ["0", "", "-1", "four", "9" * 50, "1e3", "ema"])
def test_a_number_of_ranks_that_is_none_is_unsupported(said: str) -> None:
    with pytest.raises(Unsupported, match="not a number of ranks"):
        checked(saved(*SPLIT), BASE, f".#world={said}")


def test_a_consolidated_model_wins_over_the_shards_and_proves_nothing_of_them() -> None:
    files = MemoryFiles(
        {f"sharded/{path}": data for path, data in saved(*SPLIT[:2]).content.items()}
    )
    files.content["model.safetensors"] = raw_safetensors(
        {
            "w": {"dtype": "F32", "shape": [4, 3], "data_offsets": [0, 48]},
            "b": {"dtype": "BF16", "shape": [3], "data_offsets": [48, 54]},
        },
        bytes(54),
    )
    assert str(registry.choose(files, None)) == "whole:."
    with pytest.raises(Incomplete, match="nothing says what shape it has"):
        checked(files, ExpectedModel(), "sharded")


def test_an_optimizer_in_the_directory_of_the_shards_is_no_rival() -> None:
    files, _ = real("tf5-fsdp2")
    files.content[".metadata"] = files.content.pop("optimizer/.metadata")
    assert str(registry.choose(files, None)) == "dcp_safetensors:."
    assert checked(files, ExpectedModel())
