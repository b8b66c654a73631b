"""Which checkpoints a scan finds, under which names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ckptsync.paths import checked_path
from ckptsync.scan import Found, scan, spot_at, spots


def lay(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode())


def names(root: Path) -> dict[str, tuple[str, list[str]]]:
    return {f.name: (f.family, [s.path for s in f.files]) for f in scan(root)}


def test_every_family_is_found_and_nothing_else(tmp_path: Path) -> None:
    lay(tmp_path, "checkpoint-4/trainer_state.json", "checkpoint-12/.tmpabcdef", "checkpoints/checkpoint_0/model.safetensors")
    lay(tmp_path, "global_step7/zero_pp_rank_0_mp_rank_00_optim_states.pt", "latest", "checkpoint/step-3/.metadata")
    lay(
        tmp_path,
        "runs/events",
        "checkpoint-best/model.bin",
        "tmp-checkpoint-9/x",
        "_ckptsync/pins/checkpoint-4.0/files/x",
        "model.bin",
    )
    assert names(tmp_path) == {
        "checkpoint-12": ("trainer", []),
        "checkpoint-4": ("trainer", ["trainer_state.json"]),
        "checkpoint_0": ("accelerate", ["model.safetensors"]),
        "global_step7": ("deepspeed", ["zero_pp_rank_0_mp_rank_00_optim_states.pt"]),
        "step-3": ("dcp", [".metadata"]),
    }


def test_a_step_directory_is_a_checkpoint_only_with_something_of_one_in_it(tmp_path: Path) -> None:
    lay(tmp_path, "step-1/log.txt", "step-2/__0_0.distcp")
    assert list(names(tmp_path)) == ["step-2"]


def test_two_of_one_name_get_two_names(tmp_path: Path) -> None:
    lay(tmp_path, "checkpoint_0/a", "checkpoints/checkpoint_0/b")
    assert names(tmp_path) == {"checkpoint_0": ("accelerate", ["a"]), "checkpoints.checkpoint_0": ("accelerate", ["b"])}


@pytest.mark.parametrize("tag", ["my tag", "a\nb", "consolidated", "final", "x~y", "-", "ü" * 50])
def test_any_tag_becomes_one_plain_component_and_no_two_become_the_same(tmp_path: Path, tag: str) -> None:
    lay(tmp_path, f"{tag}/mp_rank_00_model_states.pt", f"{tag} /mp_rank_00_model_states.pt")
    found = list(names(tmp_path))
    assert len(found) == 2
    for name in found:
        assert checked_path(name) == name
        assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name)
        assert name not in ("consolidated", "final")


def test_links_to_checkpoints_are_not_followed(tmp_path: Path) -> None:
    lay(tmp_path, "elsewhere/real/trainer_state.json")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "checkpoint-1").symlink_to(tmp_path / "elsewhere" / "real")
    assert spots(tmp_path / "out") == ()


def test_a_directory_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    assert scan(tmp_path / "nothing") == ()


def test_a_checkpoint_is_known_by_itself(tmp_path: Path) -> None:
    lay(tmp_path, "out/checkpoint-4/a", "out/tag/mp_rank_00_model_states.pt")
    spot = spot_at(tmp_path / "out" / "checkpoint-4")
    assert spot is not None
    assert (spot.name, spot.family, spot.step) == ("checkpoint-4", "trainer", 4)
    assert spot_at(tmp_path / "out") is None


def test_what_vanishes_during_the_scan_was_not_there(tmp_path: Path) -> None:
    lay(tmp_path, "checkpoint-4/a")
    gone = spots(tmp_path)[0]
    (tmp_path / "checkpoint-4" / "a").unlink()
    (tmp_path / "checkpoint-4").rmdir()
    from ckptsync.scan import found

    assert found(gone) == Found("checkpoint-4", "trainer", gone.path, (), (), ())
