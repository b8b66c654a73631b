"""Summaries as a catalogue makes them, and small stores of many checkpoints, for tests of what is kept."""

from __future__ import annotations

import json
from dataclasses import replace

from ckptsync.catalogue.summary import Proven, Summary
from ckptsync.digest import digest_stream
from ckptsync.model import Demands
from ckptsync.records.coding import encode, record_name
from ckptsync.records.manifest import FileEntry, Manifest
from ckptsync.records.report import Report
from ckptsync.records.seal import Seal, SealedFile
from ckptsync.records.state import Word
from ckptsync.stores.contract import Store

DAY = 86400.0
FIRST = 1_790_000_000


def seen(step: int | None, word: Word = "VERIFIED", *, at: float | None = None, size: int = 10, **told: object) -> Summary:
    """One that was written at ``at``: by default a day later for each step."""
    checkpoint = f"checkpoint-{step}" if step is not None else "final"
    when = at if at is not None else (step or 0) * DAY
    is_verified = word in ("VERIFIED", "RETIRED")
    found = Summary(
        run="run", checkpoint=checkpoint, place=checkpoint, step=step, word=word, evidence=(), lacks=(), nodes=("n0",),
        manifests=(f"run/.ckptsync/{checkpoint}/manifest-n0-0-0123456789abcdef.json",), seal="s" if is_verified else "",
        seals=1, reports=1, tombstones=0, files=2, size=size, model_files=1, model_size=5, ended=when, first=when, arrived=when,
        model=word not in ("ARRIVING", "AMBIGUOUS"), resume=is_verified, sealed=is_verified, proof=Proven(holds=is_verified),
        retired="old" if word == "RETIRED" else "",
    )  # fmt: skip
    return replace(found, **told)  # type: ignore[arg-type]


def put(store: Store, record: Manifest | Seal | Report) -> str:
    data = encode(record)
    name = record_name(record, data)
    store.write(name, [data])
    return name


def entry(path: str, content: bytes, at: int) -> FileEntry:
    found = digest_stream([content], len(content))
    return FileEntry(path, found.size, found.digest, found.block_size, found.blocks, at)


def fill(store: Store, place: str, at: int = FIRST, *, run: str = "run", loss: float = 1.0, is_verified: bool = True) -> str:
    """One node's save with two files and its trainer's state, consolidated, and verified; the manifest's name.  ``at`` in seconds."""
    checkpoint = place.partition("~")[0]
    step = int(checkpoint.rpartition("-")[2]) if "-" in checkpoint else 0
    state = json.dumps({"global_step": step, "log_history": [{"step": step, "eval_loss": loss}]}).encode()
    contents = {"a.bin": f"a of {place}".encode(), "b.bin": b"b" * 100, "trainer_state.json": state}
    for path, content in contents.items():
        store.write(f"{run}/{place}/{path}", [content])
    files = tuple(entry(path, content, at * 10**9) for path, content in contents.items())
    demands = Demands({"a.bin": None, "b.bin": 100}, {"trainer_state.json": None})
    name = put(store, Manifest(run, checkpoint, place, "n0", 0, files, (0,), at * 10**9, at * 10**9, demands, sources=("whole:.",)))
    if is_verified:
        verify(store, place, (name,), run)
    return name


def verify(store: Store, place: str, manifests: tuple[str, ...], run: str = "run") -> None:
    """Consolidate it, and report that all is well."""
    checkpoint, model = place.partition("~")[0], f"model of {place}".encode()
    store.write(f"{run}/consolidated/{place}/model.safetensors", [model])
    sealed = SealedFile("model.safetensors", len(model), digest_stream([model], len(model)).digest)
    seal = put(store, Seal(run, checkpoint, place, 0, manifests, {"dtype": "auto"}, (sealed,), ()))
    put(store, Report(run, checkpoint, place, 1, "digest", "ok", manifests, seal, 1, (), 0.0))
