"""Files beside a checkpoint that name it: each trainer's own, and none where a trainer looks at names."""

from __future__ import annotations

import pytest

from ckptsync.pull.pointers import pointers

ZERO = ("mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")


@pytest.mark.parametrize(
    ("checkpoint", "paths", "wanted"),
    [
        ("global_step40", ZERO[:1], {"latest": b"global_step40"}),
        ("mytag", ZERO[1:], {"latest": b"mytag"}),
        ("global_step_40", ("actor/model_world_size_2_rank_0.pt",), {"latest_checkpointed_iteration.txt": b"40"}),
        ("iter_0000500", (".metadata",), {"latest_checkpointed_iteration.txt": b"500"}),
        ("checkpoint-40", (f"global_step40/{ZERO[0]}", "latest"), {}),
        ("global_step40", ("model.safetensors",), {}),
        ("final", ("model.safetensors",), {}),
    ],
)
def test_a_pointer_names_the_checkpoint_as_its_trainer_reads_it(
    checkpoint: str, paths: tuple[str, ...], wanted: dict[str, bytes]
) -> None:
    assert pointers(checkpoint, paths) == wanted
