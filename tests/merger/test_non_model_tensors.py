"""What lies beside weights is left out and named."""

from __future__ import annotations

import pytest

from ckptsync.layouts.registry import WeightsSource
from ckptsync.merger.non_model_tensors import drop_states, notes_on_files
from ckptsync.tensors import Tensor
from tests.support.files_in_memory import MemoryFiles

WEIGHTS = ("lm_head.weight", "model.layers.0.w.weight")
FLAT: dict[str, list[str]] = {
    "torch's state dict": [
        *(f"optimizer.state.{w}.{kind}" for w in WEIGHTS for kind in ("exp_avg", "step")),
        "optimizer.param_groups.lm_head.weight.lr",
    ],
    "torch's state dict at the top": [
        *(f"state.{w}.exp_avg_sq" for w in WEIGHTS),
        "param_groups.lm_head.weight.lr",
    ],
    "no state": [f"optim.{w}.momentum_buffer" for w in WEIGHTS],
    "behind the weight": [f"{w}.exp_avg" for w in WEIGHTS],
    "numbers": [f"optimizer.state.{n}.exp_avg" for n in range(2)],
    "without a wrapper": ["optimizer.state.layers.0.w.weight.exp_avg"],
    "a kind that is not known": [f"optimizer_state.{w}.master" for w in WEIGHTS],
    "momentum alone": [f"state.{w}.momentum" for w in WEIGHTS],
    "torch's averaged model": [
        *(f"ema_model.module.{w}" for w in WEIGHTS),
        "ema_model.n_averaged",
    ],
    "an average called shadow": [f"shadow.{w}" for w in WEIGHTS],
    "an average": [f"ema.{w}" for w in WEIGHTS],
    "an average with a counter": [*(f"model_ema.{w}" for w in WEIGHTS), "model_ema.decay"],
}
MODELS = (
    ["ema_net.0.weight", "ema_net.1.weight", "head.weight"],  # an average of nothing here
    ["model.quantizer.ema_count", "model.quantizer.step"],
    ["state.weight", "optimizer_net.weight"],
)


def tensors(names: list[str]) -> list[Tensor]:
    return [Tensor(name, "F32", (3, 2), ()) for name in names]


@pytest.mark.parametrize("others", FLAT.values(), ids=FLAT)
def test_states_of_other_objects_are_left_out_and_named(others: list[str]) -> None:
    found, notes = drop_states(tensors([*others, *WEIGHTS]))
    assert [t.name for t in found] == [*WEIGHTS]
    assert len(notes) == 1
    assert notes[0].startswith(f"{len(others)} tensors of an ")
    assert min(others) in notes[0]


@pytest.mark.parametrize("names", MODELS)
def test_a_models_own_names_are_kept(names: list[str]) -> None:
    assert drop_states(tensors([*names, *WEIGHTS])) == (tuple(tensors([*names, *WEIGHTS])), ())


def test_tensor_files_beside_the_weights_are_named_but_for_the_trainers() -> None:
    trainers = ["optimizer.pt", "scheduler.pt", "rng_state_0.pth", "training_args.bin", "scaler.pt"]
    shards = ["global_step4/mp_rank_00_model_states.pt", "optimizer_0/__0_0.distcp", "common.pt"]
    others = ["consolidated.00.pth", "ema_model.safetensors", "mm_projector.bin"]
    others.append("policy/adapter_model.safetensors")
    names = ["model.safetensors", "config.json", *trainers, *shards, *others]
    files = MemoryFiles(dict.fromkeys(names, b""))
    (note,) = notes_on_files(files, WeightsSource("whole", ""), ["model.safetensors"])
    assert note == f"left out, since nothing says that they are of whole:.: {', '.join(others)}"
