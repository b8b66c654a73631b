"""Questions that are asked of any checkpoint without knowing which layout it has."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckptsync
from ckptsync.errors import CkptsyncError, Corrupt, Incomplete, Unsupported
from ckptsync.layouts import file_names, registry
from ckptsync.layouts.registry import LAYOUTS, WeightsSource, layout
from ckptsync.merger.plan import MergeOptions
from ckptsync.merger.prepare import prepare
from ckptsync.tensors import Demands
from tests.support.exhaustive import sampled
from tests.support.files_in_memory import MemoryFiles, safetensors_file, tree
from tests.support.vector import Vector, vector, vectors

DEMO = Path(ckptsync.__file__).parent / "demo_data"
MODEL = safetensors_file({"w": ("U8", (1,), b"x")})
HOLLOW = safetensors_file({"w": ("F32", (0,), b""), "v": ("U8", (1,), b"x")})
ADAPTER = {"adapter_model.safetensors": MODEL, "adapter_config.json": b"{}"}
TAG = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
NODES = [
    path.parent
    for kind in ("fsdp2", "zero3")
    for path in sorted((DEMO / kind).glob("*/checkpoint-4"))
]


def named(files: MemoryFiles) -> list[str]:
    return [str(source) for source in registry.sources(files)]


@pytest.mark.parametrize("of", vectors(), ids=lambda v: v.name)
def test_a_real_checkpoint_has_every_file_that_it_demands(of: Vector) -> None:
    files = tree(*of.sources)
    found = registry.demands(files)
    assert found.model
    assert all(
        size in (None, files.sizes()[name])
        for name, size in (found.model | found.resume).items()
        if name in files.sizes()
    )
    assert found.model.keys() <= files.sizes().keys()
    assert ("meta.pt" in found.resume) == ("meta.pt" in files.sizes())  # Lightning's
    shards = {name for name in files.sizes() if name.endswith(("_states.pt", ".distcp"))}
    assert shards <= found.model.keys() | found.resume.keys()
    assert found.world in (None, len(file_names.ranks(files.sizes())))
    # no layout is left out because of its files' names
    bases = [name.rpartition("/")[2] for name in files.sizes()]
    for name, row in LAYOUTS.items():
        if layout(name).roots(files.sizes()):
            assert any(map(row.files.fullmatch, bases)), name


@pytest.mark.parametrize(
    "of",
    [v for v in vectors() if v.name not in ("lightning-file", "llamafactory-v1")],
    ids=lambda v: v.name,
)
def test_a_checkpoint_that_ray_train_has_reported_is_the_same_one_directory_below(
    of: Vector,
) -> None:
    files = tree(*of.sources)
    nested = MemoryFiles({f"checkpoint/{name}": data for name, data in files.content.items()})
    here, below = registry.choose(files, None), registry.choose(nested, None)
    assert (below.layout, below.root) == (here.layout, f"checkpoint/{here.root}".rstrip("/"))
    told, expected = registry.demands(nested), registry.demands(files)
    assert told.model == {f"checkpoint/{name}": size for name, size in expected.model.items()}
    assert told.resume == {f"checkpoint/{name}": size for name, size in expected.resume.items()}
    one, other = (prepare(f, MergeOptions("keep")).plans for f in (files, nested))
    assert [(p.name, p.header) for p in one] == [(p.name, p.header) for p in other]


@pytest.mark.parametrize("of", sampled(vectors(), 2), ids=lambda v: v.name)
def test_real_files_are_closed_and_cut_ones_are_not(of: Vector) -> None:
    files = tree(*of.sources)
    for name, data in list(files.content.items()):
        assert registry.closed(name, files), name
        if name.endswith((".safetensors", ".pt", ".pth", ".bin", ".pkl", ".json")):
            for cut in (data[:-1] if not data.endswith(b"\n") else data[:-3], b""):
                files.content[name] = cut
                assert not registry.closed(name, files), name


def test_files_of_torchs_older_format_have_no_end_and_are_taken_as_they_are() -> None:
    closed = {"a.pt": b"\x80\x02more", "d.txt": b"", "d.pkl": b"", "e.safetensors": MODEL}
    closed["f.safetensors"] = safetensors_file({})
    cut = {"b.pt": b"\x80", "c.bin": b"PK\x03", "f.json": b"[1"}
    files = MemoryFiles({**closed, **cut})
    assert [name for name in files.content if registry.closed(name, files)] == [*closed]


def test_whole_weights_win_over_shards_and_shards_that_latest_names_over_others() -> None:
    files = MemoryFiles({"model.safetensors": MODEL, **ADAPTER, "m/.metadata": b""})
    files.content |= {f"global_step{n}/{TAG}": b"" for n in (2, 10)}
    files.content["latest"] = b"global_step10\n"
    assert named(files) == ["whole:.", "peft:.", "dcp:m", "zero:global_step10", "zero:global_step2"]
    assert str(registry.choose(files, None)) == "whole:."


def test_whole_weights_that_are_placeholders_do_not_win() -> None:
    files = MemoryFiles({"model.safetensors": HOLLOW, f"global_step2/{TAG}": b""})
    assert named(files) == ["zero:global_step2", "whole:."]
    files.content["model.safetensors"] = HOLLOW[:-1]
    assert named(files)[0] == "whole:."


@pytest.mark.parametrize("wanted", ["zero", "zero:global_step2", "global_step2"])
def test_a_source_is_chosen_by_its_name_its_layout_or_its_directory(wanted: str) -> None:
    files = MemoryFiles({"model.safetensors": MODEL, f"global_step2/{TAG}": b""})
    assert registry.choose(files, wanted) == WeightsSource("zero", "global_step2")


@pytest.mark.parametrize("wanted", ["dcp", "zero", "global_step3", "whole:x"])
def test_a_source_that_is_not_there_or_not_the_only_one_is_refused_with_what_there_is(
    wanted: str,
) -> None:
    files = MemoryFiles(
        {f"global_step{n}/{TAG}": b"" for n in (2, 4)} | {"model.safetensors": MODEL}
    )
    with pytest.raises(Unsupported, match=wanted) as e:
        registry.choose(files, wanted)
    assert e.value.hint == "there are: whole:., zero:global_step2, zero:global_step4"


def test_two_sets_of_shards_are_never_guessed_between() -> None:
    files = MemoryFiles({f"global_step{n}/{TAG}": b"" for n in (2, 4)})
    with pytest.raises(Unsupported, match="2 sets of weights") as e:
        registry.choose(files, None)
    assert e.value.hint == "--source zero:global_step2 or zero:global_step4"
    files.content["latest"] = b"global_step4"
    assert str(registry.choose(files, None)) == "zero:global_step4"
    files.content["latest"] = b"global_step6"
    with pytest.raises(Unsupported, match="2 sets"):
        registry.choose(files, None)
    with pytest.raises(Unsupported, match="2 sets"):
        registry.choose(MemoryFiles({"a/.metadata": b"", "b/.metadata": b""}), None)


def test_what_nobody_claims_is_unsupported() -> None:
    with pytest.raises(Unsupported, match="no known checkpoint among") as raised:
        registry.choose(MemoryFiles({"pytorch_model.txt": b""}), None)
    assert "lightning; point" in raised.value.hint
    assert registry.demands(MemoryFiles({"a": b""})) == Demands()


@pytest.mark.parametrize("node", NODES, ids=lambda p: f"{p.parent.name}-{p.name}")
def test_a_node_demands_what_its_own_metadata_tells_and_never_raises(node: Path) -> None:
    found = registry.demands(tree(node / "checkpoint-4"))
    if node.parent.name == "fsdp2" and node.name == "node1":
        assert not found.model  # .metadata is on the node of rank 0
    else:
        assert found.world == 2
        assert {r for name in found.model for r in file_names.ranks([name])} == {0, 1}
    assert not found.model.keys() & found.resume.keys()


@pytest.mark.parametrize("kind", ["fsdp2", "zero3"])
def test_resuming_demands_every_ranks_optimizer_and_random_states(kind: str) -> None:
    files = tree(*(DEMO / kind / node / "checkpoint-4" for node in ("node0", "node1")))
    found = registry.demands(files)
    assert {f"rng_state_{n}.pth" for n in range(2)} <= found.resume.keys()
    assert (found.model | found.resume).keys() <= files.sizes().keys()


STATES = {
    "optimizer.pt": b"o",
    "scheduler.pt": b"s",
    "rng_state_0.pth": b"",
    "rng_state_1.pth": b"",
}
MANY = {**STATES, "rng_state_4000000000.pth": b""}


@pytest.mark.parametrize(
    ("states", "demanded"),
    [
        (
            {**STATES, "trainer_state.json": b"{}", "training_args.bin": b""},
            {*STATES, "trainer_state.json"},
        ),
        (
            {"optimizer.bin": b"", "random_states_0.pkl": b""},
            {"optimizer.bin", "random_states_0.pkl"},
        ),
        ({**STATES, "rng_state_3.pth": b""}, {*STATES, "rng_state_2.pth", "rng_state_3.pth"}),
        # no training has so many ranks
        (MANY, {*MANY}),
        ({"trainer_state.json": b"{}", "training_args.bin": b""}, set()),  # save_only_model
        ({"trainer_state.json": b"{}", "optimizer.pt": b"", "rng_state.pth": b""}, set()),
        ({"trainer_state.json": b"{}", "scheduler.pt": b"", "rng_state.pth": b""}, set()),
    ],
)
def test_resuming_demands_the_states_beside_a_whole_model(
    states: dict[str, bytes], demanded: set[str]
) -> None:
    for weights in ({"model.safetensors": MODEL}, ADAPTER):
        found = registry.demands(MemoryFiles({**weights, **states}))
        assert set(found.resume) == demanded
        assert found.model.keys() == weights.keys()


def test_the_random_states_of_as_many_ranks_as_the_hook_says_are_demanded_for_resuming() -> None:
    files = MemoryFiles({"model.safetensors": MODEL, **STATES})
    found = registry.demands(files, ranks=4)
    assert set(found.resume) == {*STATES, "rng_state_2.pth", "rng_state_3.pth"}
    assert registry.demands(files, ranks=1) == registry.demands(files)


def test_missing_files_are_told_before_wrong_sizes_and_wrong_sizes_are_corrupt() -> None:
    files = MemoryFiles({"a": b"12", "b": b"3"})
    registry.require(files, {"a": 2, "b": None})
    with pytest.raises(Incomplete, match="c and 1 more: not found, of 3 files"):
        registry.require(files, {"a": 5, "d": None, "c": 1})
    for size in (1, 5):
        with pytest.raises(Corrupt, match=f"a: 2 bytes, {size} expected"):
            registry.require(files, {"a": size})


@pytest.mark.parametrize("of", vectors(), ids=lambda v: v.name)
def test_one_missing_file_is_named_and_incomplete(of: Vector) -> None:
    files = tree(*of.sources)
    source = registry.choose(files, None)
    for name in layout(source.layout).demands(files, source.root):
        if name in (
            "model.safetensors.index.json",
            "pytorch_model.bin.index.json",
            "config.json",
            "adapter_model.bin",
        ):
            # the numbers of the files, or the optimizer's metadata, say as much, or a newer file
            # would do
            continue
        data = files.content.pop(name)
        # whose shards number none that are not here
        said = name.rpartition("/")[2] if source.layout != "dcp_safetensors" else None
        # a tied module, whose names do not tell the number
        said = None if "layer_00-" in name else said
        if source.layout == "zero" and "optim" in name and "zero3" not in of.name:
            # the model's own weights are all here, and it is said
            (first, *_) = registry.tensors(files, source)
            assert name in first.remark
        else:
            with pytest.raises(Incomplete, match=said):
                registry.tensors(files, source)
        files.content[name] = data


@pytest.mark.parametrize(
    "name", ["hf-fsdp1", "hf-zero2", "raw-ds-zero3-tied", "hf-sharded", "peft-adapter"]
)
@given(data=st.data())
def test_a_checkpoint_with_one_changed_byte_is_read_or_refused_and_never_crashes(
    name: str, data: st.DataObject
) -> None:
    files = tree(*vector(name).sources)
    source = registry.choose(files, "zero" if name == "hf-zero2" else None)
    spoilt = data.draw(st.sampled_from(sorted(layout(source.layout).demands(files, source.root))))
    good = files.content[spoilt]
    at = data.draw(st.integers(0, len(good) - 1) | st.integers(0, min(4000, len(good) - 1)))
    files.content[spoilt] = good[:at] + bytes([data.draw(st.integers(0, 255))]) + good[at + 1 :]
    with contextlib.suppress(CkptsyncError):
        registry.tensors(files, source)


def test_the_layouts_are_ordered_by_preference() -> None:
    names = "whole peft bin dcp_safetensors dcp universal zero per_rank lightning refused"
    assert list(LAYOUTS) == names.split()
    with pytest.raises(Unsupported, match="no layout"):
        layout("other")


LOST = ("trainer_state.json", "adapter_config.json", "rng_state_1.pth")


@pytest.mark.parametrize("name", [*LOST, "model.safetensors.index.json"])
def test_a_checkpoint_that_has_lost_its_weights_is_incomplete(name: str) -> None:
    index = b'{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'
    files = MemoryFiles({name: index, "config.json": b"{}"})
    with pytest.raises(Incomplete):
        registry.tensors(files, registry.choose(files, None))


def test_several_checkpoints_in_one_directory_are_never_guessed_between() -> None:
    content = {
        f"checkpoint-{n}/{name}": data
        for n in (500, 1000)
        for name, data in {f"global_step{n}/{TAG}": b"", "latest": b"global_step%d" % n}.items()
    }
    with pytest.raises(Unsupported, match="2 sets of weights") as e:
        registry.choose(MemoryFiles(content), None)
    first, other = "zero:checkpoint-1000/global_step1000", "zero:checkpoint-500/global_step500"
    assert e.value.hint == f"--source {first} or {other}"
    one = {name: data for name, data in content.items() if "-500/" in name}
    assert str(registry.choose(MemoryFiles(one), None)) == other
    own = {**one, f"global_step8/{TAG}": b"", "latest": b"global_step8"}
    assert registry.deepspeed_tags(MemoryFiles(own), WeightsSource("whole", "")) == (
        "global_step8",
        (),
    )


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "model.safetensors"])
def test_checkpoints_of_different_layouts_in_one_directory_are_never_guessed_between(
    name: str,
) -> None:
    content = {f"checkpoint-2/{name}": MODEL, f"checkpoint-4/global_step4/{TAG}": b""}
    with pytest.raises(Unsupported, match="weights of other layouts are in checkpoint-"):
        registry.choose(MemoryFiles(content), None)
    named = {f"policy/{name}": MODEL, f"global_step4/{TAG}": b""}
    assert registry.choose(MemoryFiles(named), None)


def test_a_directory_of_whole_checkpoints_names_them() -> None:
    files = {f"checkpoint-{n}/model.safetensors": MODEL for n in (4, 8)}
    with pytest.raises(Unsupported, match="2 in directories of it: checkpoint-4, checkpoint-8"):
        registry.choose(MemoryFiles({**files, "optimizer_0/.metadata": b""}), None)


@pytest.mark.parametrize(
    ("source", "names", "is_silent"),
    [
        ("dcp_safetensors:.", ["shard-00001-model-00001-of-00001.safetensors"], True),
        ("dcp:x", ["x/.metadata", "x/__0_0.distcp"], False),
        ("dcp:x", ["x/__0.metadata", "x/__0_0.distcp"], True),
        ("dcp:x#world=2", ["x/__0.metadata", "x/__0_0.distcp"], False),
        ("zero:t", ["t/mp_rank_00_model_states.pt", f"t/{TAG}"], False),
        ("zero:t", ["t/mp_rank_00_model_states.pt", "t/layer_00-model_states.pt"], True),
        ("zero:t", ["t/layer_0_expert_1_mp_rank_00_model_states.pt"], False),
        ("whole:.", ["model.safetensors"], False),
    ],
)
def test_a_lost_file_takes_names_with_it_only_where_no_metadata_has_them(
    source: str,
    names: list[str],
    is_silent: bool,  # noqa: FBT001
) -> None:
    files = MemoryFiles(dict.fromkeys(names, b""))
    found = WeightsSource.named(source)
    assert registry.is_silent_on_missing(files, found) == is_silent
