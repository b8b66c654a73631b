"""The hook in a training script: every save is kept although rotation deletes it at once, and
training never notices.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.scenarios.world import VECTORS, World, files_below
from tests.support.hook_pins import commit

MARKED = """
import shutil, sys
from pathlib import Path
from ckptsync import mark_saved

out, source = Path(sys.argv[1]), Path(sys.argv[2])
for step in range(1, 5):
    saved = out / f"checkpoint-{step}"
    shutil.copytree(source, saved, copy_function=shutil.copyfile)
    state = saved / "trainer_state.json"
    state.write_text(state.read_text().replace('"global_step": 4', f'"global_step": {step}'))
    mark_saved(saved, part="all")
    if step > 1:
        shutil.rmtree(out / f"checkpoint-{step - 1}")
print("trained")
"""

TRAINED = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from ckptsync.hooks.hf import CkptSyncCallback

torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, \
num_attention_heads=2, num_key_value_heads=2)
data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 16
args = TrainingArguments(sys.argv[1], max_steps=3, save_steps=1, save_total_limit=1, \
per_device_train_batch_size=2, report_to=[], use_cpu=True, disable_tqdm=True)
Trainer(LlamaForCausalLM(config), args, train_dataset=data, callbacks=[CkptSyncCallback()]).train()
print("trained")
"""


def train(world: World, script: str, *words: object) -> str:
    """A training to its end; its log."""
    path = world.home / "train.py"
    path.write_text(script)
    environment = {**world.environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, path, *map(str, words)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert "trained" in done.stdout
    return done.stderr


@pytest.mark.stores("path", "s3")
def test_marked_saves_survive_rotation_with_no_worker_there(world: World) -> None:
    source = VECTORS / "hf-ddp/out/checkpoint-4"
    train(world, MARKED, world.output("sft"), source)
    world.worker()
    for step in range(1, 5):
        world.wait(f"sft/checkpoint-{step}", "COMPLETE")
        stored = world.stored("sft", f"checkpoint-{step}")
        assert {n: d for n, d in stored.items() if n != "trainer_state.json"} == {
            n: d for n, d in files_below(source).items() if n != "trainer_state.json"
        }


@pytest.mark.stores("path")
def test_what_a_killed_attempt_stored_is_no_part_of_the_same_save_written_again(
    world: World,
) -> None:
    """Node 1's part has the same bytes in both attempts: random states."""
    parts = [world.output("sft", f"node{n}") / "checkpoint-4" for n in (0, 1)]

    def write(part: Path, name: str, at: float) -> None:
        part.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(VECTORS / "hf-ddp/out/checkpoint-4" / name, part / name)
        os.utime(part / name, (at, at))

    now = time.time()
    write(parts[1], "rng_state_1.pth", now - 100)
    world.push(parts[1], node="node1")  # node 0 was killed in the middle of its part
    write(parts[1], "rng_state_1.pth", now)
    for name in files_below(VECTORS / "hf-ddp/out/checkpoint-4"):
        if name != "rng_state_1.pth":
            write(parts[0], name, now)
    for part in parts:
        commit(part, save="a" * 16, world=2)
    again = "sft/checkpoint-4~aaaaaaaa"
    world.worker("node0")
    world.wait(again, "COMPLETE")
    assert world.ls()[again]["missing_for_resume"]  # rank 1 would go on with other random numbers
    world.worker("node1")
    world.until_told(
        lambda: not world.ls()[again]["missing_for_resume"], "both nodes' parts in one location"
    )
    assert world.stored(*again.split("/")) == {**files_below(parts[0]), **files_below(parts[1])}


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.stores("path")
def test_every_save_of_a_trainer_that_keeps_one_is_stored(world: World) -> None:
    train(world, TRAINED, world.output("sft"))
    assert sorted(p.name for p in world.output("sft").glob("checkpoint-*")) == ["checkpoint-3"]
    world.worker()
    world.head(head={"config_from": {}})
    for step in range(1, 4):
        world.wait(f"sft/checkpoint-{step}", "VERIFIED")
    assert world.model("sft/checkpoint-1") != world.model("sft/checkpoint-3")


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.stores("path")
def test_a_training_says_that_its_store_is_not_there_and_all_is_sent_once_it_is(
    world: World,
) -> None:
    store = world.home / "mistyped" / "store"
    awaits = """
import time
from pathlib import Path
while "waiting" not in Path(sys.argv[1], "_ckptsync/embedded.log").read_text():
    time.sleep(0.1)
"""
    script = (
        TRAINED.replace("CkptSyncCallback()", f"CkptSyncCallback(store={str(store)!r}, wait='1s')")
        + awaits
    )
    said = train(world, script, world.output("sft"))
    assert str(store.parent) in said
    store.parent.mkdir()
    stored = [store / f"sft/.ckptsync/checkpoint-{step}" for step in range(1, 4)]
    world.until(
        lambda: all([*location.glob("manifest-*")] for location in stored),
        "the store to have what the training left",
    )


@pytest.mark.stores("path")
def test_training_goes_on_where_the_hook_cannot_work(world: World) -> None:
    out = world.output("sft")
    out.mkdir(parents=True)
    (out / "_ckptsync").write_text("a file where a directory should be")
    train(world, MARKED, out, VECTORS / "hf-ddp/out/checkpoint-4")
    assert sorted(p.name for p in out.glob("checkpoint-*")) == ["checkpoint-4"]


@pytest.mark.stores("path")
def test_nothing_is_written_into_a_checkpoint(world: World, tmp_path: Path) -> None:
    saved = world.save("sft")
    before, times = files_below(saved), {p: p.stat().st_mtime_ns for p in saved.rglob("*")}
    world.worker()
    world.wait("sft/checkpoint-4", "COMPLETE")
    assert files_below(saved) == before
    assert {p: p.stat().st_mtime_ns for p in saved.rglob("*")} == times
    assert sorted(p.name for p in world.output("sft").iterdir()) == ["_ckptsync", "checkpoint-4"]
    assert tmp_path.exists()
