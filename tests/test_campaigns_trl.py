"""The judge of `make campaign-trl`, and one training where this Python, or another, has TRL."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from ckptsync.stores.opening import create_store
from tests.campaigns import trl_trainers
from tests.support.worker_in_process import push_now

PYTHON = os.environ.get("CKPTSYNC_TEST_TRL", sys.executable)
WANTED = {"checkpoint-1", "final"}


def weights(value: int) -> bytes:
    header = json.dumps({"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes([value])


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A training as it should be: the store has its step and its final model."""
    for name in WANTED:
        folder = tmp_path / "truth" / name
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(weights(7))
        (folder / "config.json").write_text("{}")
    held = tmp_path / "truth" / "held" / "1"
    held.mkdir(parents=True)
    (held / "model.safetensors").write_bytes(weights(7))
    (tmp_path / "truth" / "checkpoint-1" / "trainer_state.json").write_text('{"global_step": 1}')
    (tmp_path / "truth" / "final" / "README.md").touch()
    shutil.copytree(tmp_path / "truth" / "checkpoint-1", tmp_path / "out" / "checkpoint-1")
    for name in ("model.safetensors", "config.json"):
        shutil.copy(tmp_path / "truth" / "final" / name, tmp_path / "out")
    store = create_store(str(tmp_path / "store"))
    push_now(tmp_path / "out", store, "node0", "out")
    return tmp_path


def wrong(home: Path) -> list[str]:
    return [*trl_trainers.judged(home, WANTED)]


def test_a_training_whose_every_save_is_stored_as_it_was_is_right(home: Path) -> None:
    assert wrong(home) == []


def test_other_bytes_and_other_weights_are_seen(home: Path) -> None:
    (home / "truth" / "held" / "1" / "model.safetensors").write_bytes(weights(8))
    assert wrong(home) == [
        "checkpoint-1: model: merged, it has not the weights that the trainer held"
    ]
    (home / "truth" / "checkpoint-1" / "config.json").write_text("[]")
    assert "checkpoint-1/config.json: not the bytes that the trainer wrote" in wrong(home)


def test_files_and_saves_that_lack_or_are_too_many_are_seen(home: Path) -> None:
    ref = home / "truth" / "final" / "ref"
    ref.mkdir()
    (ref / "adapter_config.json").write_text("{}")
    (home / "truth" / "checkpoint-1" / "trainer_state.json").unlink()
    store = create_store(str(home / "store"))
    push_now(home / "out" / "checkpoint-1", store, "node0", "out", name="copy")
    assert wrong(home) == [
        "copy: nobody wrote that",
        "checkpoint-1/trainer_state.json: nobody wrote that",
        "final/ref/adapter_config.json: not in the store",
    ]


@pytest.mark.skipif(
    not trl_trainers.can_train(PYTHON),
    reason="CKPTSYNC_TEST_TRL names no Python with TRL, and this one has it not",
)
def test_trl_as_it_was_released_trains_with_the_hook_and_nothing_is_lost(tmp_path: Path) -> None:
    words = ["--modes", "sft", "--hooks", "hook", "--steps", "2"]
    assert trl_trainers.main([*words, "--python", PYTHON, "--home", str(tmp_path)]) == 0
