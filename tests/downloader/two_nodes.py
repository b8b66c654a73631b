"""A checkpoint of two nodes in a store, and downloads of it."""

from __future__ import annotations

import os
from pathlib import Path

from ckptsync.catalogue.uncached import read_state
from ckptsync.downloader.download import Download, Result
from ckptsync.downloader.download_plan import PullPlan, plan_checkpoint
from ckptsync.stores.contract import Store
from ckptsync.stores.memory import MemoryStore
from ckptsync.tensors import Demands
from tests.support.verified_stores import RUN, arrive

FILES = {
    "n0": {
        "fsdp/meta.json": b"meta",
        "fsdp/__0_0.distcp": os.urandom(300_000),
        "rng_state_0.pth": b"r0",
        "trainer_state.json": b"{}",
    },
    "n1": {"fsdp/__1_0.distcp": os.urandom(500_000), "rng_state_1.pth": b"r1", "empty": b""},
}
ALL = FILES["n0"] | FILES["n1"]
SHARD = "run/checkpoint-4/fsdp/__1_0.distcp"


def store_of_two() -> MemoryStore:
    store = MemoryStore()
    for node, files in FILES.items():
        arrive(store, files, node, demands=Demands())
    return store


def plan(store: Store, node: str = "") -> PullPlan:
    return plan_checkpoint(read_state(store, RUN).locations[0], node)


def pull(store: Store, destination: Path, node: str = "") -> Result:
    return Download(destination, plan(store, node)).run(store, threads=3)


def files_below(directory: Path) -> dict[str, bytes]:
    """Every file below, hidden ones too."""
    return {
        str(p.relative_to(directory)): p.read_bytes()
        for p in sorted(directory.rglob("*"))
        if p.is_file()
    }
