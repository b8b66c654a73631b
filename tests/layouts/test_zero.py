"""ZeRO checkpoints of any stage and world size against the slow obvious way."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from ckptsync.errors import CkptsyncError, Corrupt, Incomplete, Unsupported
from ckptsync.layouts import registry, zero
from ckptsync.merger.plan import DType, MergeOptions
from ckptsync.merger.prepare import prepare
from tests.support.deepspeed_in_memory import TAG, changed, held
from tests.support.files_in_memory import MemoryFiles
from tests.support.torch_bytes import raw, saved
from tests.support.zero_writer import (
    Tensors,
    Zero,
    expected,
    files,
    merged,
    model,
    optimizer,
    values,
    zeros,
)

WEIGHT = {"w": values((3, 4), 0), "b": values((5,), 50)}


def same(found: Tensors, wanted: Tensors) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name].dtype, found[name].shape, raw(found[name])) == (
            tensor.dtype,
            tensor.shape,
            raw(tensor),
        ), name


@pytest.mark.parametrize("dtype", ["keep", "auto"])
@given(zeros())
def test_any_checkpoint_is_merged_as_by_hand(dtype: DType, of: Zero) -> None:
    same(merged(files(of), dtype), expected(of, dtype))


@given(zeros())
@settings(max_examples=20, deadline=None)
def test_every_ranks_files_are_demanded_and_each_is_named_when_it_is_missing(of: Zero) -> None:
    held = files(of)
    assert registry.demands(held).model.keys() == held.sizes().keys()
    assert registry.demands(held).world == zero.world(held, of.root) == of.world
    for name in list(held.content):
        data = held.content.pop(name)
        with pytest.raises(
            CkptsyncError, match=name if of.world > 1 else None
        ) as e:  # of one rank nothing else tells its name
            merged(held, "keep")
        assert isinstance(e.value, Incomplete) == bool(held.content)
        held.content[name] = data


def test_a_node_without_optimizer_files_demands_nothing_at_stage_three() -> None:
    held = files(Zero(3, 2, [WEIGHT], prefix="fp16_"))
    models = {n: d for n, d in held.content.items() if "model_states" in n}
    assert registry.demands(MemoryFiles(models)).model == {}
    with pytest.raises(Incomplete, match="optim_states"):
        merged(MemoryFiles(models), "keep")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_files_that_a_larger_world_left_behind_are_left_out_and_it_is_said(stage: int) -> None:
    of, old = (
        Zero(stage, 2, [WEIGHT]),
        Zero(stage, 3, [{"w": values((3, 4), 99), "b": values((5,), 9)}]),
    )
    held = MemoryFiles({**files(old).content, **files(of).content})
    same(merged(held, "keep"), expected(of, "keep"))
    assert len(registry.demands(held).model) == (4 if stage == 3 else 3)
    assert "is left out" in prepare(held, MergeOptions("keep")).notes[0]


@pytest.mark.parametrize(
    ("stage", "name"),
    [
        (1, "mp_rank_01_model_states.pt"),
        (2, "mp_rank_01_model_states.pt"),
        (3, "zero_pp_rank_0_mp_rank_01_model_states.pt"),
        *((stage, "zero_pp_rank_0_mp_rank_01_optim_states.pt") for stage in (1, 2, 3)),
        *((stage, "expp_rank_0_mp_rank_00_optim_states.pt") for stage in (1, 2, 3)),
        (2, "layer_1_expert_0_mp_rank_00_model_states.pt"),
        (2, "expert_0_mp_rank_00_model_states.pt"),
        (1, "layer_00-model_00-model_states.pt"),
        (1, "mp_rank_00_000_model_states.pt"),
    ],
)
def test_files_of_parallel_ranks_that_the_model_does_not_have_are_never_passed_over(
    stage: int, name: str
) -> None:
    held = files(Zero(stage, 2, [WEIGHT]))
    held.content[f"global_step2/{name}"] = b""
    with pytest.raises((Unsupported, Corrupt), match=r"parallel ranks|experts|layers|not known"):
        merged(held, "keep")


@pytest.mark.parametrize("stage", [1, 2])
def test_the_models_own_weights_are_read_from_the_model_file_alone(stage: int) -> None:
    of = Zero(
        stage, 3, [{"w": values((2000, 1000), 0)}], buffers={"n": values((3,), 1, torch.int64)}
    )
    held, optim = (
        files(of),
        [f"global_step2/zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in range(3)],
    )
    for dtype in ("auto", "bf16"):
        assert prepare(held, MergeOptions(dtype)).reads == {
            "global_step2/mp_rank_00_model_states.pt"
        }
        before = held.read
        same(merged(held, dtype), expected(of, "auto"))
        # two bytes a parameter, pickles, and samples of the masters
        assert held.read - before < 2 * 2000 * 1000 + 2_000_000
    assert prepare(held, MergeOptions("keep")).reads == {
        "global_step2/mp_rank_00_model_states.pt",
        *optim,
    }


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("gone", [[0], [1], [0, 1]])
def test_an_optimizer_file_that_is_missing_is_reported_every_time(
    stage: int, gone: list[int]
) -> None:
    of = Zero(stage, 2, [WEIGHT], buffers={"n": values((3,), 1, torch.int64)}, tied={"head": "w"})
    held = files(of)
    names = [f"global_step2/zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in gone]
    for name in names:
        del held.content[name]
    same(merged(held, "auto"), expected(of, "auto"))
    assert f"{names[0]} is missing" in prepare(held, MergeOptions("auto")).notes[0]
    for dtype in ("keep", "fp32"):
        with pytest.raises(Incomplete, match=names[0]):
            merged(held, dtype)


def test_a_model_without_zero_is_read_from_its_model_file() -> None:
    held = MemoryFiles(
        {"global_step2/mp_rank_00_model_states.pt": saved(model(Zero(0, 4, [WEIGHT]), 0))}
    )
    same(merged(held, "keep"), {n: t.to(torch.bfloat16) for n, t in WEIGHT.items()})


def test_masters_without_names_are_left_out_and_it_is_said() -> None:
    told = model(Zero(0, 1, [WEIGHT]), 0) | {"optimizer": {"fp32_groups_flat": [torch.ones(17)]}}
    held = MemoryFiles({"mp_rank_00_model_states.pt": saved(told)})
    assert "have no names" in prepare(held, MergeOptions("keep")).notes[0]


def test_a_checkpoint_without_weights_is_unsupported() -> None:
    held = MemoryFiles({"global_step2/mp_rank_00_model_states.pt": saved(model(Zero(0, 1, []), 0))})
    with pytest.raises(Unsupported, match="without weights"):
        merged(held, "keep")


def test_a_tied_name_may_be_stored_too_and_is_said_to_be_tied() -> None:
    held = files(Zero(2, 2, [WEIGHT], tied={"head": "w"}))
    found = {t.name: t for t in zero.tensors(held, "global_step2")}
    assert found["head"].tied == "w"
    assert found["head"].copies == found["w"].copies


def test_a_name_that_is_tied_to_nothing_is_corrupt() -> None:
    of = Zero(3, 1, [WEIGHT])
    held = files(of)
    held.content["global_step2/zero_pp_rank_0_mp_rank_00_model_states.pt"] = saved(
        model(of, 0) | {"shared_params": {"head": "none"}}
    )
    with pytest.raises(Corrupt, match="shares its values with 'none'"):
        merged(held, "keep")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_names_tied_to_excluded_frozen_parameters_are_left_out(stage: int) -> None:
    """As Trainer saves LoRA of a model with tied embeddings: the head is mentioned, and its values
    are nowhere.
    """
    of = Zero(stage, 2, [WEIGHT])
    held = files(of)
    for name in [n for n in held.content if n.endswith("model_states.pt")]:
        rank = int(name.split("_rank_")[1][0])
        excluded = {
            "frozen_param_shapes": None,
            "frozen_param_fragments": None,
            "shared_params": {"head": "excluded"},
        }
        held.content[name] = saved(model(of, rank) | excluded)
    same(merged(held, "keep"), expected(of, "keep"))
    remark = zero.tensors(held, of.root)[0].remark
    assert (zero.WITHOUT_FROZEN in remark) == (stage > 1)  # stage 1 lists none in any save


def test_a_rank_of_another_save_is_corrupt() -> None:
    of = Zero(2, 2, [WEIGHT])
    held = files(of)
    for rank in range(2):
        state = optimizer(of, rank) | {"base_optimizer_state_step": 4 + rank}
        name = f"global_step2/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        held.content[name] = saved({"optimizer_state_dict": state})
    with pytest.raises(Corrupt, match=r"rank_1_.* is 5, 4 in "):
        merged(held, "auto")


def test_a_placeholder_that_no_rank_holds_is_incomplete() -> None:
    of = Zero(3, 1, [WEIGHT])
    held, told = files(of), model(of, 0)
    told["module"]["lost"] = torch.empty(0)
    held.content["global_step2/zero_pp_rank_0_mp_rank_00_model_states.pt"] = saved(told)
    with pytest.raises(Incomplete, match="lost is an empty placeholder"):
        merged(held, "keep")


FROZEN = {"f": values((6,), 3)}


@pytest.mark.parametrize(
    ("stage", "change", "said"),
    [
        (3, {"frozen_param_fragments": {}}, "f has no fragment"),
        (
            3,
            {"frozen_param_fragments": {"f": torch.ones(3).half()}},
            "f has fragments of different",
        ),
        (2, {"frozen_param_shapes": {"f": (7,)}}, r"f has the shape \(6,\), \(7,\) expected"),
        (2, {"frozen_param_shapes": {"g": (6,)}}, "g is missing"),
    ],
)
def test_a_frozen_parameter_that_is_not_as_it_is_listed_is_corrupt(
    stage: int, change: dict[str, object], said: str
) -> None:
    of = Zero(stage, 2, [WEIGHT], frozen=FROZEN)
    held = files(of)
    name = max(name for name in held.content if "model_states" in name)
    held.content[name] = saved(model(of, stage - 2) | change)
    with pytest.raises(Corrupt, match=f"frozen {said}"):
        merged(held, "keep")


@pytest.mark.parametrize("latest", [b"", b"\xff\xfe", b"../global_step2", b"a" * 5000])
def test_a_latest_that_says_nothing_of_use_chooses_nothing(latest: bytes) -> None:
    held = MemoryFiles(
        {"a/mp_rank_00_model_states.pt": b"", "b/mp_rank_00_model_states.pt": b"", "latest": latest}
    )
    with pytest.raises((Corrupt, Unsupported)):
        registry.choose(held, None)


def test_a_model_of_another_shape_than_the_optimizers_is_corrupt() -> None:
    of = Zero(2, 2, [WEIGHT])
    told = model(of, 0)
    told["module"] = {**told["module"], "w": told["module"]["w"].T}
    held = MemoryFiles(
        {**files(of).content, "global_step2/mp_rank_00_model_states.pt": saved(told)}
    )
    with pytest.raises(Corrupt, match="w has the shape"):
        merged(held, "keep")


@pytest.mark.parametrize(
    ("name", "said"), [("hf-zero3-lora", 1), ("raw-ds-zero2-frozen", 0), ("raw-ds-zero1-frozen", 0)]
)
def test_frozen_parameters_that_were_left_out_of_a_save_are_said_to_be(
    name: str, said: int
) -> None:
    files = held(name)
    (root,) = zero.roots(files.sizes())
    assert zero.tensors(files, root)[0].remark.count("the save left out frozen parameters") == said


@pytest.mark.parametrize("dtype", ["keep", "auto"])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(
    "odd",
    [
        "mp_rank_00_model_states.pt",
        *(f"zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in range(3)),
    ],
)
def test_a_file_of_another_run_is_refused_by_its_name(dtype: DType, stage: int, odd: str) -> None:
    of, other = (
        Zero(stage, 3, [{"w": values((7, 9), n)}, {"b": values((40,), n + 5)}]) for n in (0, 8)
    )
    held = MemoryFiles(
        {**files(of).content, f"global_step2/{odd}": files(other).content[f"global_step2/{odd}"]}
    )
    with pytest.raises(
        Corrupt, match=f"^global_step2/{odd}: values of [wb] differ from those in global_step2/"
    ) as e:
        merged(held, dtype)
    assert "different saves" in (e.value.hint or "")


@pytest.mark.parametrize("odd", [0, 3])
def test_a_rank_of_another_run_shows_in_samples_of_a_large_model(odd: int) -> None:
    noise = torch.Generator().manual_seed(1)
    one = {f"layer{n}": torch.randn(300, 700, generator=noise) for n in range(9)} | {
        "tiny": torch.ones(3)
    }
    other = {
        name: tensor + 1e-5 * torch.randn(tensor.shape, generator=noise)
        for name, tensor in one.items()
    }
    name = f"global_step2/zero_pp_rank_{odd}_mp_rank_00_optim_states.pt"
    held = files(Zero(2, 4, [one]))
    prepare(held, MergeOptions("keep"))
    held.content[name] = files(Zero(2, 4, [other])).content[name]
    before = held.read
    with pytest.raises(Corrupt, match=name):
        prepare(held, MergeOptions("keep"))
    assert held.read - before < 3_000_000  # of 11 MB


ROUNDED = [torch.nan, -torch.nan, torch.inf, -0.0, 1e38, 3.4e38, 1e-7, 6e-8, -1e-45, 1 + 2**-8]
ROUNDED += [1 + 3 * 2**-8, 65519.0, 65520.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_that_round_to_infinity_zero_or_nan_are_those_of_the_model(
    dtype: torch.dtype,
) -> None:
    odd = torch.tensor(ROUNDED)
    of = Zero(2, 2, [{"w": odd}])
    state = model(of, 0)
    state["module"]["w"] = odd.to(dtype)
    held = files(of)
    held.content["global_step2/mp_rank_00_model_states.pt"] = saved(state)
    prepare(held, MergeOptions("keep"))


@pytest.mark.parametrize(
    "key", ["quantize_training", "compression_training", "zenflow", "zero_quantized_weights"]
)
def test_weights_that_training_changes_beside_their_masters_are_not_compared_and_it_is_said(
    key: str,
) -> None:
    of = Zero(2, 2, [WEIGHT])
    state = model(of, 0)
    state["module"] = {name: tensor * 2 for name, tensor in state["module"].items()}
    of_zero = {"zero_optimization": {"stage": 2, key: {"topk_ratio": 0.1}}}
    state["ds_config"] = of_zero if key.startswith("ze") else {key: {"enabled": True}}
    held = files(of)
    held.content["global_step2/mp_rank_00_model_states.pt"] = saved(state)
    same(merged(held, "keep"), expected(of, "keep"))
    assert any(
        f"trained with {key}" in note and "not compared" in note
        for note in prepare(held, MergeOptions("keep")).notes
    )


@pytest.mark.parametrize(
    "name", ["raw-ds-zero1-bf16-fp32acc", "raw-ds-zero2-dealt", "raw-ds-experts"]
)
def test_without_param_shapes_the_models_own_weights_are_read_and_masters_are_not(
    name: str,
) -> None:
    file = f"{TAG}/mp_rank_00_model_states.pt"
    old = changed(held(name), file, lambda m: m.update(param_shapes=None, ds_config=None))
    wanted, found = merged(held(name), "auto"), merged(old, "auto")
    assert wanted.keys() == found.keys()
    assert all(torch.equal(found[n], wanted[n]) for n in wanted)
    assert f"param_shapes of {file} is missing" in prepare(old, MergeOptions("auto")).notes[0]
    with pytest.raises(Incomplete, match="param_shapes"):
        merged(old, "keep")
