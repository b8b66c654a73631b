"""What a model file says beside its masters. Whole checkpoints: ``test_zero``."""

from __future__ import annotations

import pytest
import torch

from ckptsync.errors import Incomplete
from ckptsync.merger.plan import MergeOptions
from ckptsync.merger.prepare import prepare
from tests.support.deepspeed_in_memory import TAG, changed, held
from tests.support.zero_writer import merged


@pytest.mark.parametrize("name", ["raw-ds-zero1-bf16-fp32acc", "raw-ds-zero2-dealt"])
def test_without_param_shapes_the_models_own_weights_are_read_and_masters_are_not(
    name: str,
) -> None:
    model = f"{TAG}/mp_rank_00_model_states.pt"
    old = changed(held(name), model, lambda m: m.update(param_shapes=None, ds_config=None))
    wanted, found = merged(held(name), "auto"), merged(old, "auto")
    assert wanted.keys() == found.keys()
    assert all(torch.equal(found[n], wanted[n]) for n in wanted)
    assert f"param_shapes of {model} is missing" in prepare(old, MergeOptions("auto")).notes[0]
    with pytest.raises(Incomplete, match="param_shapes"):
        merged(old, "keep")
