"""The quick check each second: what it sees, and what it costs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptsync.service.directory_changes import directories_to_check, directory_states

LIGHTNING = "lightning_logs"


def lay(root: Path) -> None:
    for n in range(8):
        (root / f"checkpoint-{n}").mkdir(parents=True)
    for folder in (
        "checkpoints/checkpoint_0",
        f"{LIGHTNING}/version_0/checkpoints/last.ckpt",
        "run-0/checkpoint-5",
        "_ckptsync/pins",
    ):
        (root / folder).mkdir(parents=True)
    for path in root.iterdir():
        if not path.name.startswith("checkpoint-"):
            os.utime(path, ns=(0, 0))


def made_again(root: Path) -> None:
    root.rename(root.with_name("old"))
    lay(root)


CHANGES: dict[str, Callable[[Path], object]] = {
    "a checkpoint": lambda root: (root / "checkpoint-8").mkdir(),
    "rotation": lambda root: shutil.rmtree(root / "checkpoint-0"),
    "a file in the newest checkpoint": lambda root: (root / "checkpoint-7/state.json").touch(),
    "a checkpoint of accelerate's": lambda root: (root / "checkpoints/checkpoint_1").mkdir(),
    "a file of it": lambda root: (root / "checkpoints/checkpoint_0/model.safetensors").touch(),
    "Lightning's": lambda root: (root / f"{LIGHTNING}/version_0/checkpoints/e.ckpt").touch(),
    "a version of Lightning's": lambda root: (root / f"{LIGHTNING}/version_1").mkdir(),
    "a checkpoint of a search": lambda root: (root / "run-0/checkpoint-6").mkdir(),
    "the final model": lambda root: (root / "model.safetensors").touch(),
    "a pin of the hook's": lambda root: (root / "_ckptsync/pins/checkpoint-7.0").mkdir(),
    "the directory made again": made_again,
    "the directory gone": shutil.rmtree,
}


def test_a_glance_sees_a_tag_of_openrlhf_s_in_a_directory_with_an_underscore(
    tmp_path: Path,
) -> None:
    (tmp_path / "_actor/global_step4").mkdir(parents=True)
    directories = directories_to_check(tmp_path)
    before = directory_states(directories)
    (tmp_path / "_actor/global_step8").mkdir()
    assert directory_states(directories) != before


@pytest.mark.parametrize("change", CHANGES)
def test_a_glance_sees(tmp_path: Path, change: str) -> None:
    root = tmp_path / "out"
    lay(root)
    at = directories_to_check(root)
    before = directory_states(at)
    assert directory_states(at) == before
    CHANGES[change](root)
    assert directory_states(at) != before


def test_looking_pinning_and_writing_on_is_nothing_new(tmp_path: Path) -> None:
    lay(tmp_path)
    (tmp_path / "checkpoint-7" / "model").write_bytes(b"a")
    before = directory_states(directories_to_check(tmp_path))
    os.link(tmp_path / "checkpoint-7" / "model", tmp_path / "_ckptsync" / "model")
    with (tmp_path / "checkpoint-7" / "model").open("ab") as file:
        file.write(b"b")
    assert directory_states(directories_to_check(tmp_path)) == before


def test_there_are_never_many_locations_to_glance_at(tmp_path: Path) -> None:
    for n in range(5):
        for m in range(5):
            for k in range(5):
                (tmp_path / f"run-{n}" / f"a-{m}" / f"b-{k}" / "c").mkdir(parents=True)
    assert len(directories_to_check(tmp_path)) <= 64


def test_what_is_not_there_is_no_error(tmp_path: Path) -> None:
    assert directory_states([tmp_path / "none"]) == ((),)
    assert directories_to_check(tmp_path / "none") == (
        str(tmp_path / "none"),
        str(tmp_path / "none" / "_ckptsync" / "pins"),
    )
