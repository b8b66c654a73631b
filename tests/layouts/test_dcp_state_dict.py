"""Which tensors are the model's: every way in which frameworks put them beside other things."""

from __future__ import annotations

from typing import Any

import pytest

from ckptsync.errors import Unsupported
from ckptsync.layouts.dcp import TOP, weights
from ckptsync.layouts.dcp_metadata import ChunkedTensor

Path = tuple[Any, ...]


def names(
    *paths: Path,
    blobs: tuple[Path, ...] = (),
    section: str | None = None,
    shape: tuple[int, ...] = (4,),
) -> set[str]:
    tensors = [ChunkedTensor(tuple(map(str, path)), "F32", shape, ()) for path in paths]
    told = {".".join(map(str, path)): path for path in (*paths, *blobs)}
    return {name for name, _ in weights(tensors, {"planner_data": told}, section, "x")}


def flat(*names: str, **fields: Any) -> set[str]:
    return {
        name
        for name, _ in weights(
            [ChunkedTensor((n,), "F32", (4,), ()) for n in names],
            {"planner_data": {}, **fields},
            None,
            "x",
        )
    }


@pytest.mark.parametrize(
    ("paths", "wanted"),
    [
        ([("model", "w"), ("model", "v")], {"w", "v"}),
        ([("model", "model.w"), ("model", "v")], {"model.w", "v"}),
        ([("model.w",), ("model.v",)], {"model.w", "model.v"}),
        ([("state", "model.w"), ("state", "model.v")], {"model.w", "model.v"}),
        ([("model", "w"), ("optim", "state", "v")], {"w"}),
        ([("model", "layers", 0, "w"), ("model", "v")], {"layers.0.w", "v"}),
        ([("app", "model", "model.w"), ("app", "optim", "state", "v", "exp_avg")], {"model.w"}),
        ([("app", "layers", "w"), ("app", "layers", "v")], {"layers.w", "layers.v"}),
        (
            [
                ("state_dict", "model.w"),
                ("optimizer_0", "state", "model.w", "exp_avg"),
                ("optimizer_1", "state", "v", "step"),
            ],
            {"model.w"},
        ),
        ([("model", "w"), ("model_ema", "w")], {"w"}),
        ([("ema", "w"), ("optimizer", "state.w.exp_avg")], {"w"}),
        ([("w._extra_state", "scale"), ("w",)], {"w", "w._extra_state.scale"}),
    ],
)
def test_a_section_is_the_first_of_the_path_and_never_a_prefix_of_a_name(
    paths: list[Path], wanted: set[str]
) -> None:
    assert names(*paths) == wanted


def test_an_optimizer_of_any_name_is_known_by_its_groups() -> None:
    states: tuple[Path, ...] = (
        ("anything", "state", "w", "exp_avg"),
        ("anything", "state", "w", "step"),
    )
    assert names(("generator", "w"), *states, blobs=(("anything", "param_groups", 0, "lr"),)) == {
        "w"
    }
    assert names(
        ("generator", "w"), ("flat", "state.w.exp_avg"), blobs=(("flat", "param_groups.w.lr"),)
    ) == {"w"}
    assert names(*states, blobs=(("anything", "param_groups", 0, "lr"),)) == set()
    assert names(("own", "w"), blobs=(("own", "param_groups", 0, "lr"),)) == {"w"}
    with pytest.raises(Unsupported, match="2 sets of weights"):
        names(("generator", "w"), *states)


@pytest.mark.parametrize(
    "tensors",
    [
        [(("model", "w"), "F32", (4,)), (("loss",), "F32", ())],
        [(("net", "w"), "BF16", (4,)), (("seen", "i"), "I64", (9,))],
        [(("net", "w"), "BF16", (4,)), (("net", "n"), "I64", (4,)), (("seen", "i"), "I64", (9,))],
    ],
)
def test_numbers_and_sections_without_a_floating_tensor_are_no_rivals(
    tensors: list[tuple[Path, str, tuple[int, ...]]],
) -> None:
    chunked = [ChunkedTensor(path, dtype, shape, ()) for path, dtype, shape in tensors]
    paths = {".".join(path): path for path, *_ in tensors}
    found = weights(chunked, {"planner_data": paths}, None, "x")
    assert [name for name, _ in found] == [path[1] for path, *_ in tensors[:-1]]


@pytest.mark.parametrize(
    ("paths", "wanted"),
    [
        ([("x",), ("nested", "x")], {"x", "nested.x"}),
        (
            [("x",), ("nested", "x"), ("blocks", 0, "w"), ("blocks", 1, "w")],
            {"x", "nested.x", "blocks.0.w", "blocks.1.w"},
        ),
        ([("x",), ("y",), ("nested", "x"), ("nested", "z")], {"x", "y", "nested.x", "nested.z"}),
        ([("x",), ("ema", "x"), ("nested", "x")], {"x", "nested.x"}),
        ([("x",), ("nested", "x"), ("dataloader", "seen")], {"x", "nested.x"}),
    ],
)
def test_a_nested_state_dict_is_one_model(paths: list[Path], wanted: set[str]) -> None:
    assert names(*paths) == wanted


@pytest.mark.parametrize(
    ("paths", "blobs"),
    [
        ([("x",), ("nested", "x"), ("optimizer", "state", "x", "exp_avg")], ()),
        ([("x",), ("nested", "x"), ("app", "optim", "step")], ()),
        ([("x",), ("nested", "x"), ("states", "x.exp_avg")], ()),
        ([("x",), ("nested", "x")], (("inner", "param_groups", 0, "lr"),)),
        ([("x",), ("y",), ("nested", "x"), ("nested", "y")], ()),
        ([("x",), ("y",), ("z",), ("nested", "x"), ("nested", "y")], ()),
        ([("x",), ("model", "v")], ()),
        ([("x",), ("teacher_model", "v")], ()),
    ],
)
def test_a_section_beside_an_optimizer_or_with_the_tensors_of_the_top_again_is_not_taken_for_a_part(
    paths: list[Path], blobs: tuple[Path, ...]
) -> None:
    with pytest.raises(Unsupported, match="sets of weights in one checkpoint") as refused:
        names(*paths, blobs=blobs)
    assert "--source 'dcp:x#'" in refused.value.hint


@pytest.mark.parametrize(
    "paths",
    [
        [("generator", "w"), ("discriminator", "w")],
        [("model", "w"), ("critic", "w")],
        [("w",), ("teacher", "w")],
    ],
)
def test_several_models_are_refused_with_their_names(paths: list[Path]) -> None:
    with pytest.raises(Unsupported, match="2 sets of weights in one checkpoint") as refused:
        names(*paths)
    assert refused.value.hint.count("--source 'dcp:x#") == 2
    assert names(*paths, section=str(paths[1][0])) == {"w"}


def test_the_top_and_any_section_can_be_asked_for() -> None:
    paths = [("w",), ("teacher", "v"), ("optimizer", "state", "w")]
    assert names(*paths, section=TOP) == {"w"}
    assert names(*paths, section="optimizer") == {"state.w"}
    with pytest.raises(Unsupported, match="no section 'nix'") as refused:
        names(*paths, section="nix")
    assert "'teacher'" in refused.value.hint


@pytest.mark.parametrize(
    "wrapper",
    ["optimizer", "optim", "optimizer_0", "lr_scheduler", "dataloader", "train_state", "rng_state"],
)
def test_other_states_alone_are_no_model(wrapper: str) -> None:
    assert names((wrapper, "state", "w", "exp_avg")) == set()


def test_megatrons_optimizer_is_known_by_its_name_where_the_plans_say_that_it_is_megatrons() -> (
    None
):
    stored = (
        "decoder.w",
        "optimizer.state.exp_avg.decoder.w",
        "chained_0.optimizer.state.exp_avg.v",
        "optimizer_like.w",
    )
    for field in ("all_local_plans", "mcore_data"):
        assert flat(*stored, **{field: None}) == {"decoder.w", "optimizer_like.w"}
    with pytest.raises(Unsupported, match="without a path"):
        flat(*stored)


def test_without_paths_every_name_is_the_models() -> None:
    assert flat("model.w", "model.v") == {"model.w", "model.v"}
    assert flat("model.w", planner_data=None) == {"model.w"}


def test_a_weight_that_megatron_stored_flattened_is_refused_and_an_optimizer_state_is_not() -> None:
    told = {"nd_reformulated_orig_global_shape": (2, 2)}
    assert flat(
        "w", "optimizer.state.exp_avg.w", mcore_data={"optimizer.state.exp_avg.w": told, "w": {}}
    ) == {"w"}
    with pytest.raises(Unsupported, match="'w' is stored flattened"):
        flat("w", mcore_data={"w": told})
