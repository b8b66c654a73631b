"""Which files are sent by choice, among those that real frameworks write."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ckptsync.catalogue.fresh import fresh
from ckptsync.head.consolidate import HeadOptions
from ckptsync.model import Demands
from ckptsync.stores.opening import create_store
from ckptsync.worker.options import Preset, RunDir, WorkerOptions
from ckptsync.worker.selecting import EVERYTHING, Selection, chosen, select
from ckptsync.worker.worker import Worker
from tests.heads import consolidate_due
from tests.vector import vector

DDP = (
    "config.json",
    "model.safetensors",
    "optimizer.pt",
    "rng_state_0.pth",
    "scheduler.pt",
    "trainer_state.json",
    "training_args.bin",
)
FSDP = ("optimizer_0/.metadata", "optimizer_0/__0_0.distcp", "pytorch_model_fsdp_0/.metadata", "pytorch_model_fsdp_0/__0_0.distcp")
ZERO = (
    "global_step4/zero_pp_rank_0_mp_rank_00_model_states.pt",
    "global_step4/zero_pp_rank_0_mp_rank_00_optim_states.pt",
    "latest",
)
WHOLE = Demands({"model.safetensors": None})


def test_everything_is_everything() -> None:
    assert select(DDP + FSDP + ZERO, EVERYTHING, WHOLE) == {*DDP, *FSDP, *ZERO}
    assert chosen(WorkerOptions("n0", ())) == EVERYTHING
    assert chosen(WorkerOptions("n0", (), send="weights", exclude=("x",))) == Selection("weights", (), ("x",))


@pytest.mark.parametrize(
    ("preset", "left_out"),
    [
        ("no-optimizer", {"optimizer.pt"}),
        ("weights", {"optimizer.pt", "rng_state_0.pth", "scheduler.pt", "training_args.bin"}),
    ],
)
def test_a_preset_leaves_out_what_the_model_does_not_need(preset: Preset, left_out: set[str]) -> None:
    assert select(DDP, Selection(preset), WHOLE) == {*DDP} - left_out


@pytest.mark.parametrize("preset", ["no-optimizer", "weights"])
def test_optimizer_states_that_the_model_is_made_of_are_weights(preset: Preset) -> None:
    assert select(ZERO, Selection(preset), Demands(dict.fromkeys(ZERO[:2]))) == {*ZERO}
    assert select(ZERO, Selection(preset), WHOLE) == ({ZERO[0], "latest"} if preset == "no-optimizer" else {"latest"})


def test_a_node_that_cannot_tell_sends_what_may_be_weights() -> None:
    shards = ("pytorch_model_fsdp_0/__1_0.distcp", "optimizer_0/__1_0.distcp", "rng_state_1.pth")
    assert select(shards, Selection("weights"), Demands()) == {"pytorch_model_fsdp_0/__1_0.distcp"}


def test_globs_choose_among_that_but_never_leave_out_what_describes_the_rest() -> None:
    assert select(DDP, Selection(include=("*.safetensors",)), WHOLE) == {"config.json", "model.safetensors", "trainer_state.json"}
    left = select(FSDP, Selection(exclude=("optimizer_0/*", "*.metadata")), Demands())
    assert left == {*FSDP} - {"optimizer_0/__0_0.distcp"}
    assert "rng_state_0.pth" not in select(DDP, Selection(exclude=("rng_state*",)), WHOLE)


@pytest.mark.parametrize("name", ["hf-fsdp2-2node", "hf-zero3-2node"])
def test_a_model_is_made_of_the_weights_of_two_nodes_alone(tmp_path: Path, name: str) -> None:
    store = create_store(str(tmp_path / "store"))
    for n, source in enumerate(vector(name).sources):
        shutil.copytree(source, tmp_path / f"n{n}" / "checkpoint-4", copy_function=shutil.copyfile)
        worker = Worker(WorkerOptions(f"n{n}", (RunDir("run", tmp_path / f"n{n}"),), 0.0, 0.0, send="weights"), store)
        assert [p.phase for p in (*worker.tick(0.0).progress, *worker.tick(1.0).progress)] == ["sent", "stored"]
    assert not list((tmp_path / "store" / "run" / "checkpoint-4").glob("rng_state_*"))
    assert consolidate_due(store, HeadOptions()).failed == ()
    (location,) = fresh(store).locations
    assert location.status == "CONSOLIDATED"
    assert {p for p in location.demands.resume if p.startswith("rng_state_")} == {
        f"rng_state_{n}.pth" for n in range(4)
    }  # and that is told
