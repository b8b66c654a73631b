"""A real pipeline, whole in ``tests/merger/test_vectors.py``; here what must not pass for one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ckptsync.errors import Corrupt, Incomplete, Unsupported
from ckptsync.layouts import registry, zero
from ckptsync.merger.plan import MergeOptions
from ckptsync.merger.prepare import prepare
from tests.support.deepspeed_in_memory import TAG, changed, held, without
from tests.support.files_in_memory import MemoryFiles
from tests.support.torch_bytes import saved
from tests.support.zero_writer import merged

TIED = "tied_modules.embed.weight"
LAYERS = [f"{TAG}/layer_{n:02d}-model_states.pt" for n in (0, 1, 3, 4)]
STAGES = [f"{TAG}/mp_rank_{n:02d}_model_states.pt" for n in (0, 1)]


def files() -> MemoryFiles:
    return held("raw-ds-pipeline")


def test_a_tied_module_is_written_once_under_its_own_name_with_its_master() -> None:
    found = merged(files(), "keep")
    assert found[TIED].dtype == torch.float32
    assert not any(name.startswith("0.") for name in found)
    assert torch.equal(found[TIED].bfloat16(), merged(files(), "auto")[TIED])


def test_where_the_names_come_from_and_which_layers_have_no_file_is_said() -> None:
    note = prepare(files(), MergeOptions("auto")).notes[0]
    assert "PipelineModule" in note
    assert "layers 2 have no file" in note


def test_every_file_of_every_stage_is_demanded_and_each_is_reported_when_it_is_missing() -> None:
    assert registry.demands(files()).model.keys() == files().sizes().keys() - {"latest"}
    for name in [*LAYERS[1:], *STAGES]:
        assert name in registry.demands(without(files(), name)).model
    for name in [n for n in files().sizes() if "optim" in n]:
        with pytest.raises(Incomplete, match=name):
            merged(without(files(), name), "keep")
        assert name in prepare(without(files(), name), MergeOptions("auto")).notes[0]


def test_two_tied_modules_of_the_same_shapes_are_not_told_apart() -> None:
    def another(model: dict[str, Any]) -> None:
        model["param_shapes"][0]["tied_modules.other.weight"] = model["param_shapes"][0][TIED]

    with pytest.raises(Unsupported, match="tied modules embed, other have the same shapes"):
        merged(changed(files(), STAGES[0], another), "auto")


def test_a_layer_that_looks_like_a_tied_module_and_has_other_values_is_not_taken_for_it() -> None:
    weight = torch.ones(37, 10, dtype=torch.bfloat16)
    other = MemoryFiles(
        {**files().content, f"{TAG}/layer_05-model_states.pt": saved({"weight": weight})}
    )
    with pytest.raises(Unsupported, match="other values"):
        merged(other, "auto")
    same = MemoryFiles(
        {**files().content, f"{TAG}/layer_05-model_states.pt": files().content[LAYERS[0]]}
    )
    assert merged(same, "auto").keys() == merged(files(), "auto").keys()


def test_a_layer_of_another_shape_than_its_stage_says_is_corrupt() -> None:
    with pytest.raises(Corrupt, match=r"4\.weight"):
        merged(
            changed(files(), LAYERS[3], lambda layer: layer.update(weight=torch.ones(11))), "keep"
        )


def test_a_pipeline_whose_files_name_no_parameters_is_refused() -> None:
    of = files()
    for path in STAGES:
        of = changed(of, path, lambda model: model.update(param_shapes=None))
    with pytest.raises(Unsupported, match="name no parameters"):
        merged(of, "auto")


@pytest.mark.parametrize("junk", [[1], 5, "a", {"a": 1}, {5: torch.ones(1)}])
def test_a_layers_file_with_something_else_in_it_is_refused(junk: object) -> None:
    with pytest.raises((Unsupported, Corrupt)):
        merged(MemoryFiles({**files().content, LAYERS[1]: saved(junk)}), "auto")


def test_layers_cut_over_tensor_parallel_ranks_are_refused() -> None:
    content = {
        name.replace("layer_01-", "layer_01-model_01-"): data
        for name, data in files().content.items()
    }
    with pytest.raises(Unsupported, match="tensor-parallel"):
        zero.tensors(MemoryFiles(content), TAG)


def test_layers_beside_a_model_file_with_weights_are_not_mixed() -> None:
    whole = held("raw-ds-zero2-odd")
    with pytest.raises(Corrupt, match="beside files of layers"):
        merged(MemoryFiles({**whole.content, LAYERS[0]: files().content[LAYERS[0]]}), "auto")
