"""With `push_to_hub` the Trainer copies each save to where the final model will lie: no copy is one
while the training goes on.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from ckptsync.spool.markers import TrainingProcess, process_path, write_mark
from ckptsync.stores.memory import MemoryStore
from ckptsync.walk import Stat
from ckptsync.worker.finished import Rule, judge
from ckptsync.worker.observation import Observation, UnendedTraining
from ckptsync.worker.options import RunDir, WorkerOptions
from ckptsync.worker.worker import Worker
from tests.support.worker_in_process import T, manifests, tick

APART = 1000
"""Seconds between two saves: more than after which a final model is finished."""


def weights(step: int) -> bytes:
    header = json.dumps({"__metadata__": {"step": f"{step:03}"}}).encode()
    return len(header).to_bytes(8, "little") + header


def write(file: Path, content: bytes, at: float) -> None:
    """Write in place, as `shutil.copy` does."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    os.utime(file, ns=(T + int(at * 1e9),) * 2)


def save(out: Path, step: int, last: int, *, copied: bool = True) -> None:
    """A save as the Trainer makes it, a second after which the copy is there."""
    at = float(step * APART)
    state = json.dumps({"global_step": step, "max_steps": last}).encode()
    write(out / f"checkpoint-{step}/model.safetensors", weights(step), at)
    write(out / f"checkpoint-{step}/trainer_state.json", state, at + 1)
    if copied:
        write(out / "model.safetensors", weights(step), at + 2)
        write(out / "config.json", b"{}", at + 2)


def stored(store: MemoryStore) -> list[str]:
    return sorted({k.manifest.location for k in manifests(store)})


def watch(w: Worker, start: float, seconds: float) -> None:
    """Scan and plan every two minutes for so long."""
    for now in range(int(start), int(start + seconds), 120):
        tick(w, float(now))


def worker(out: Path, store: MemoryStore) -> Worker:
    return Worker(WorkerOptions("n0", RunDir("run", out)), store)


@pytest.mark.parametrize("every", [1, 2, 3])
def test_a_copy_of_a_save_is_no_final_model_while_saves_follow(tmp_path: Path, every: int) -> None:
    store = MemoryStore()
    w = worker(tmp_path, store)
    for step in range(1, 7):
        save(tmp_path, step, 6, copied=step % every == 0)
        if step < 6:
            watch(w, step * APART, APART)
            tick(w, step * APART + APART - 1.0)
    assert not [name for name in stored(store) if name.startswith("final")]
    watch(w, 6 * APART, 300)
    tick(w, 6 * APART + 301.0)
    assert stored(store) == [*(f"checkpoint-{n}" for n in range(1, 7)), "final"]
    [final] = [k.manifest for k in manifests(store) if k.manifest.location == "final"]
    assert final.ended == T + (6 * APART + 2) * 10**9, "the last save's weights"


@pytest.mark.parametrize("is_told", [False, True])
def test_a_training_that_stops_early_has_a_final_model(tmp_path: Path, *, is_told: bool) -> None:
    store = MemoryStore()
    w = worker(tmp_path, store)
    for step in (1, 2, 3):
        save(tmp_path, step, 100)
        watch(w, step * APART, APART)
    if is_told:
        state = json.dumps({"global_step": 3, "max_steps": 100}).encode()
        write(tmp_path / "trainer_state.json", state, 3 * APART + 900.0)
        watch(w, 4 * APART, 240)
    else:
        watch(w, 4 * APART, 1800)
        assert "final" not in stored(store)
        watch(w, 4 * APART + 1800, 600)
    assert "final" in stored(store)


def test_a_lone_save_that_is_not_the_last_makes_no_final_model_for_a_day(tmp_path: Path) -> None:
    store = MemoryStore()
    w = worker(tmp_path, store)
    save(tmp_path, 1, 100)
    watch(w, APART, 7200)
    assert stored(store) == ["checkpoint-1"]
    why = "perhaps not the final model: checkpoint-1 before it is of step 1 of 100"
    assert w.scan(APART + 7200.0).notes == (f"run/final: not uploaded: {why}",)
    watch(w, APART + 86400, 180)
    assert stored(store) == ["checkpoint-1", "final"]


@pytest.mark.parametrize(
    ("trainings", "is_final"),
    [
        ([(-10.0, 5.0)], True),
        ([(-10.0, 0.0)], False),
        ([(-20.0, 0.0), (-10.0, 5.0)], True),  # the first was killed
        ([(600.0, 605.0)], False),  # it did not write the model
    ],
)
def test_the_hook_of_the_training_that_wrote_it_says_that_it_has_ended(
    tmp_path: Path, trainings: list[tuple[float, float]], *, is_final: bool
) -> None:
    store = MemoryStore()
    save(tmp_path, 1, 100)
    for n, (began, ended) in enumerate(trainings):
        at = T / 1e9 + APART
        process = TrainingProcess(f"t{n}", 0, 1, 1, "h", 1, "1", "b", at + began)
        process = replace(process, ended=ended and at + ended)
        write_mark(process_path(tmp_path / "_ckptsync", f"p{n}"), process)
    watch(worker(tmp_path, store), APART, 900)
    assert ("final" in stored(store)) == is_final


@pytest.mark.parametrize("saves", [(500,), (500, 1000)])
def test_a_model_long_after_the_last_save_is_final_at_once(
    tmp_path: Path, saves: tuple[int, ...]
) -> None:
    """transformers before 4.43 saves no checkpoint at the last step, here 1,200."""
    store = MemoryStore()
    w = worker(tmp_path, store)
    for step in saves:
        save(tmp_path, step, 1200, copied=False)
    end = saves[-1] * APART + 61.0
    watch(w, end - 60, 60)
    write(tmp_path / "config.json", b"{}", end + 1)
    write(tmp_path / "model.safetensors", weights(1200), end + 3)
    watch(w, end + 4, 240)
    assert "final" in stored(store)


def test_what_a_person_or_the_hook_calls_final_is_final() -> None:
    training = UnendedTraining("checkpoint-2", 2, 12, 1, 30.0, is_followed=True)
    files = (Stat("model.safetensors", 1, 1, 1, 1),)
    final = Observation("final", None, files, unended=training)
    refused = judge(final, 1e9, Rule())
    assert (refused.finished, refused.remaining) == (False, None)
    assert "checkpoint-2 before it is of step 2 of 12" in refused.reason
    assert judge(final, 0.0, Rule(doubtful=0, quiet=0, unmarked=0)).finished
    told = Observation("final", None, files, unended=training, hook="marked")
    assert judge(told, 1.0, Rule()).finished
