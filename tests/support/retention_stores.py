"""Summaries as a catalogue makes them, and small stores of many checkpoints, for tests of what is
kept.
"""

from __future__ import annotations

import json
from dataclasses import replace

from ckptsync.catalogue.location_summary import Proven, Summary
from ckptsync.digest import digest_stream
from ckptsync.head.gc import read_manifests
from ckptsync.head.removal import write_tombstone
from ckptsync.records.location_status import Status
from ckptsync.records.manifest import Manifest
from ckptsync.records.model_record import ModelFile, ModelRecord
from ckptsync.records.report import Report
from ckptsync.records.save_decisions import Scope, Stage
from ckptsync.records.store_paths import checkpoint_of
from ckptsync.stores.contract import Store
from ckptsync.tensors import Demands
from tests.support.filled_stores import entry, put

DAY = 86400.0
FIRST = 1_790_000_000


def seen(
    step: int | None,
    word: Status = "VERIFIED",
    *,
    at: float | None = None,
    size: int = 10,
    **told: object,
) -> Summary:
    """Return the summary of a location written ``at`` (s): by default a day later for each step."""
    checkpoint = f"checkpoint-{step}" if step is not None else "final"
    when = at if at is not None else (step or 0) * DAY
    is_verified = word in ("VERIFIED", "RETIRED")
    summary = Summary(
        run="run", checkpoint=checkpoint, location=checkpoint, step=step, status=word, evidence=(),
        lacks=(), nodes=("n0",),
        manifests=(f"run/.ckptsync/{checkpoint}/manifest-n0-0-0123456789abcdef.json",),
        model_record="s" if is_verified else "",
        model_records=1, reports=1, tombstones=0, files=2, size=size, model_files=1, model_size=5,
        ended=when, first_arrival=when, arrived=when,
        model=word not in ("INCOMPLETE", "CONFLICT"), resume=is_verified, consolidated=is_verified,
        proof=Proven(holds=is_verified),
        retired="old" if word == "RETIRED" else "",
    )  # fmt: skip
    return replace(summary, **told)  # type: ignore[arg-type]


def fill(
    store: Store,
    location: str,
    at: int = FIRST,
    *,
    run: str = "run",
    loss: float = 1.0,
    is_verified: bool = True,
) -> str:
    """Store one node's save with two files and its trainer's state; return its manifest's name.

    It is consolidated and verified, unless ``is_verified`` is false.  ``at``: seconds.
    """
    checkpoint = checkpoint_of(location)
    step = int(checkpoint.rpartition("-")[2]) if "-" in checkpoint else 0
    state = {"global_step": step, "log_history": [{"step": step, "eval_loss": loss}]}
    contents = {
        "a.bin": f"a of {location}".encode(),
        "b.bin": b"b" * 100,
        "trainer_state.json": json.dumps(state).encode(),
    }
    for path, content in contents.items():
        store.write(f"{run}/{location}/{path}", [content])
    files = tuple(entry(path, content, at * 10**9) for path, content in contents.items())
    demands = Demands({"a.bin": None, "b.bin": 100}, {"trainer_state.json": None})
    save, when = (run, checkpoint, location), at * 10**9
    manifest = Manifest(*save, "n0", 0, files, (0,), when, when, demands, sources=("whole:.",))
    name = put(store, manifest)
    if is_verified:
        verify(store, location, (name,), run)
    return name


def manifest_name(store: Store, location: str) -> str:
    """Return the name of the only manifest of a location."""
    records = [e.name for e in store.names(f"run/.ckptsync/{location}/")]
    (name,) = [name for name in records if "/manifest-" in name]
    return name


def mark(store: Store, location: str, stage: Stage = "marked", scope: Scope = "location") -> None:
    """Write a tombstone of a location with one manifest."""
    manifests = read_manifests(store, [manifest_name(store, location)])
    write_tombstone(store, manifests, scope, stage, reason="old")


def verify(store: Store, location: str, manifests: tuple[str, ...], run: str = "run") -> None:
    """Store a model of a location, its record, and a report without damage."""
    checkpoint, data = checkpoint_of(location), f"model of {location}".encode()
    store.write(f"{run}/consolidated/{location}/model.safetensors", [data])
    digest = digest_stream([data], len(data)).digest
    consolidated = ModelFile("model.safetensors", len(data), digest)
    save, options = (run, checkpoint, location), {"dtype": "auto"}
    model = put(store, ModelRecord(*save, 0, manifests, options, (consolidated,), ()))
    put(store, Report(*save, 1, "digest", "ok", manifests, model, 1, (), 0.0))
