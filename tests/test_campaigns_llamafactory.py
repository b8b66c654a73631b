from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ckptsync.stores.opening import create_store
from tests.campaigns import llamafactory
from tests.campaigns.llamafactory import Bench, Run, can_train
from tests.campaigns.two_nodes import default_python
from tests.support.worker_in_process import push_now

PYTHON = default_python("LLAMAFACTORY")
PLAIN, RUN = Run("single", "sft", ""), Run("single", "sft", "autoload")
STATE = {
    "global_step": 1,
    "max_steps": 2,
    "log_history": [{"step": 1, "loss": 2.5}, {"train_runtime": 3.0}],
}


def model(text: str) -> bytes:
    header = json.dumps({"__metadata__": {"of": text}}).encode()
    return len(header).to_bytes(8, "little") + header


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """Two trainings that are as they should be: the store has every step, the disk the last one."""
    bench = Bench(tmp_path, "python", 2, None)
    root = bench.out(PLAIN)
    for folder in (root, root / "checkpoint-1", root / "checkpoint-2"):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(model(folder.name))
        (folder / "config.json").write_text("{}")
        (folder / "trainer_state.json").write_text(
            json.dumps({**STATE, "global_step": int(folder.name[-1]) if folder != root else 2})
        )
    shutil.copytree(root, bench.out(RUN))
    store = create_store(str(bench.store(RUN)))
    for path in (bench.out(RUN) / "checkpoint-1", bench.out(RUN)):
        push_now(path, store, "node0", "out")
    shutil.rmtree(bench.out(RUN) / "checkpoint-1")
    return bench


def wrong(bench: Bench) -> list[str]:
    truth = bench.out(PLAIN)
    return [*llamafactory._in_store(bench, RUN, truth), *llamafactory._on_disk(bench, RUN, truth)]


def test_a_training_that_left_all_as_without_us_is_right(bench: Bench) -> None:
    assert wrong(bench) == []


def test_a_flipped_bit_in_the_store_is_seen(bench: Bench) -> None:
    (bench.store(RUN) / "out" / "checkpoint-1" / "model.safetensors").write_bytes(
        model("checkpoint-0")
    )
    assert wrong(bench) == ["checkpoint-1/model.safetensors: not the bytes that the trainer wrote"]


def test_other_losses_are_seen_and_another_runtime_is_not(bench: Bench) -> None:
    path = bench.out(RUN) / "checkpoint-2" / "trainer_state.json"
    path.write_text(path.read_text().replace("3.0", "4.0"))
    assert wrong(bench) == []
    path.write_text(path.read_text().replace("2.5", "2.25"))
    assert wrong(bench) == [
        "checkpoint-2/trainer_state.json: on the disk it is another one than without us"
    ]


def test_files_that_lack_or_are_too_many_are_seen(bench: Bench) -> None:
    (bench.out(RUN) / "left-by-us").touch()
    (bench.out(RUN) / "config.json").unlink()
    (bench.out(PLAIN) / "checkpoint-2" / "optimizer.pt").touch()
    assert sorted(wrong(bench)) == [
        "checkpoint-2/optimizer.pt: not in the store",
        "checkpoint-2/optimizer.pt: not on the disk",
        "config.json: not on the disk",
        "left-by-us: only there with us",
    ]


def test_a_step_that_is_not_in_the_store_is_missed(bench: Bench) -> None:
    shutil.rmtree(bench.store(RUN))
    assert wrong(bench) == [
        f"{location}: not in the store" for location in ("checkpoint-1", "checkpoint-2", "final")
    ]


@pytest.mark.skipif(
    not can_train(PYTHON, "single"),
    reason="CKPTSYNC_TEST_LLAMAFACTORY names no Python with LLaMA-Factory, and this one has it not",
)
def test_llamafactory_as_it_was_released_trains_with_the_hook_and_nothing_is_lost(
    tmp_path: Path,
) -> None:
    words = ["--ways", "single", "--hooks", "autoload", "--stages", "sft", "--steps", "2"]
    assert llamafactory.main([*words, "--python", PYTHON, "--home", str(tmp_path)]) == 0
