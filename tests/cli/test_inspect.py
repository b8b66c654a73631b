"""``ckptsync inspect`` as a transcript, on the demo's real shards."""

import shutil
from pathlib import Path

import pytest

from ckptsync.cli.main import main
from tests.support.command_line import Cli
from tests.support.exhaustive import sampled
from tests.support.small_store import DATA
from tests.support.vector import ROOT, vector

FSDP = [str(DATA / "fsdp2" / node / "checkpoint-4") for node in ("node0", "node1")]
ZERO = [str(DATA / "zero3" / node / "checkpoint-4") for node in ("node0", "node1")]


def whole(sources: list[str], to: Path) -> Path:
    for source in sources:
        shutil.copytree(source, to, dirs_exist_ok=True)
    return to


@pytest.mark.parametrize(
    ("sources", "source"),
    [(FSDP, "dcp:pytorch_model_fsdp_0"), (ZERO, "zero:global_step4")],
    ids=["fsdp2", "zero3"],
)
def test_a_complete_checkpoint_shows_first_tensors(
    sources: list[str], source: str, cli: Cli
) -> None:
    said = cli("inspect", *sources).out
    assert f"source      {source}  complete\n" in said
    assert "world size  2\n" in said
    assert "ranks seen  0, 1\n" in said
    assert "21 tensors in" in said
    assert "… and 13 more" in said
    assert "missing" not in said
    said = cli("inspect", *sources, "--tensors").out
    assert sum("  model." in line for line in said.splitlines()) >= 20
    assert "more (" not in said


def test_one_nodes_part_is_incomplete_and_says_what_is_missing(cli: Cli) -> None:
    result = cli("inspect", ZERO[0], "--json", code=3).json
    assert result["missing"] == [
        f"global_step4/zero_pp_rank_1_mp_rank_00_{kind}_states.pt" for kind in ("model", "optim")
    ]
    assert result["missing_for_resume"] == ["rng_state_1.pth"]
    assert result["sources"][0]["state"] == "incomplete"


def test_a_shard_cut_short_is_10(tmp_path: Path, cli: Cli) -> None:
    location = whole(FSDP, tmp_path / "checkpoint-4")
    shard = location / "pytorch_model_fsdp_0" / "__1_0.distcp"
    shard.write_bytes(shard.read_bytes()[:1000])
    assert "dcp:pytorch_model_fsdp_0  corrupt: " in cli("inspect", location, code=10).out


def test_sources_are_listed_and_damage_in_any_is_10(tmp_path: Path, cli: Cli) -> None:
    location = whole(ZERO, tmp_path / "checkpoint-4")
    cli("merge", location, tmp_path / "out")
    shutil.copy(tmp_path / "out" / "model.safetensors", location)
    shard = location / "global_step4" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    for code, state in ((0, "complete\n"), (10, "corrupt: ")):
        said = cli("inspect", location, code=code).out
        assert "whole:.  complete  (preferred)\n" in said
        assert f"zero:global_step4  {state}" in said
        shard.write_bytes(shard.read_bytes()[:1000])


def test_directories_of_different_saves_are_not_one_checkpoint(tmp_path: Path, cli: Cli) -> None:
    location = whole(FSDP[:1], tmp_path / "checkpoint-4")
    (location / "trainer_state.json").write_text("{}")
    said = cli("inspect", FSDP[0], location, code=10).err
    assert "trainer_state.json: has another size in each directory" in said


@pytest.mark.parametrize(
    ("target", "code"), [(str(DATA / "base"), 5), ("/nonexistent", 2), ("s3://", 2)]
)
def test_what_is_no_checkpoint_has_its_code(target: str, code: int, cli: Cli) -> None:
    assert cli("inspect", target, code=code).err.startswith("ckptsync: error: ")


def test_an_adapter_in_shards_is_called_one(cli: Cli) -> None:
    for name in ("hf-fsdp2-lora/out/checkpoint-4", "acc-zero2-peft/out/checkpoints/checkpoint_0"):
        assert "complete, a PEFT adapter\n" in cli("inspect", ROOT / name).out
    assert "PEFT" not in cli("inspect", *FSDP).out


def test_of_two_checkpoints_neither_is_preferred_and_it_is_said(tmp_path: Path, cli: Cli) -> None:
    for step in ("4", "8"):
        whole(FSDP, tmp_path / "run" / f"checkpoint-{step}")
    said = cli("inspect", tmp_path / "run").out
    assert "(preferred)" not in said
    assert "choose one: --source dcp:checkpoint-4/pytorch_model_fsdp_0 or " in said


NAMES = sorted(path.parent.name for path in ROOT.glob("*/vector.json"))


@pytest.mark.parametrize("name", sampled(NAMES, 6))
def test_a_directory_of_checkpoints_of_any_layout_asks_whether_one_of_them_was_meant(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    for step in (4, 12):
        shutil.copytree(vector(name).sources[0], out / f"checkpoint-{step}")
    main(["inspect", str(out)])
    assert f"did you mean {out}/checkpoint-12?" in "".join(capsys.readouterr())
    assert main(["inspect", str(out / "checkpoint-5")]) == 2
    assert f"did you mean {out}/checkpoint-4?" in capsys.readouterr().err
