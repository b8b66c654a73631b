"""Lightning's checkpoint of one file, from the trainer's disk to a verified model and back."""

from __future__ import annotations

from pathlib import Path

import torch

from ckptsync.catalogue.location_summary import summarize
from ckptsync.catalogue.uncached import read_state
from ckptsync.head.consolidate import HeadOptions
from ckptsync.head.due_jobs import VerifyPolicy
from ckptsync.records.store_paths import file_name
from ckptsync.stores.contract import read_all
from ckptsync.stores.memory import MemoryStore
from ckptsync.worker.options import RunDir, WorkerOptions
from ckptsync.worker.worker import Worker
from tests.support.filled_stores import flip
from tests.support.head_in_process import consolidate_due, verify_next
from tests.support.torch_bytes import raw, saved
from tests.support.worker_in_process import tick

NAME, LOCATION = "epoch=0-step=10.ckpt", "epoch-0-step-10.ckpt"
WEIGHT = torch.arange(6.0)
DATA = saved(
    {
        "epoch": 0,
        "global_step": 10,
        "state_dict": {"layer.weight": WEIGHT},
        "hyper_parameters": {"data": Path("/data")},
    }
)


def location(store: MemoryStore) -> tuple[str, str]:
    """Its word, and the reason."""
    found = read_state(store)
    told = [
        (s.status, "; ".join(s.evidence))
        for s in (summarize(seen, found.mtimes) for seen in found.locations)
    ]
    return told[0] if told else ("", "")


def worker(out: Path, store: MemoryStore) -> Worker:
    return Worker(WorkerOptions("n0", RunDir("run", out)), store)


def test_its_state_dict_becomes_a_model_and_all_of_it_is_proven(tmp_path: Path) -> None:
    store = MemoryStore()
    (tmp_path / NAME).write_bytes(DATA)
    ours = worker(tmp_path, store)
    for now in (0.0, 11.0):
        tick(ours, now)
    consolidate_due(store, HeadOptions())
    report = verify_next(store, VerifyPolicy("parse", 1e-9), 0.0)
    assert (location(store)[0], report and report.level, report and report.findings) == (
        "VERIFIED",
        "parse",
        (),
    )
    assert read_all(store, f"run/consolidated/{LOCATION}/model.safetensors").endswith(raw(WEIGHT))
    assert read_all(store, file_name("run", LOCATION, NAME)) == DATA
    flip(store, file_name("run", LOCATION, NAME), DATA.index(raw(WEIGHT)))
    found = verify_next(store, VerifyPolicy("digest", 1e-9), 1e6)
    assert found is not None
    assert (found.verdict, found.findings[0].name) == ("damaged", f"{LOCATION}/{NAME}")


def test_one_of_which_nobody_knows_the_model_is_no_damage(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(saved({"generator": {"w": WEIGHT}, "critic": {"w": WEIGHT}}))
    store = MemoryStore()
    ours = worker(tmp_path, store)
    for now in (0.0, 11.0):
        tick(ours, now)
    failed = consolidate_due(store, HeadOptions()).failed
    assert [f.error.exit_code for f in failed] == [5]
    report = verify_next(store, VerifyPolicy("parse", 1e-9), 0.0)
    assert report is not None
    assert (location(store)[0], report.verdict, report.level) == ("COMPLETE", "ok", "digest")
