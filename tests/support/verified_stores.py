"""Stores with a checkpoint in them, as workers and a head would leave them, written without their
code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ckptsync.catalogue.uncached import read_state
from ckptsync.layouts import file_names, registry
from ckptsync.merger.plan import MergeOptions
from ckptsync.records.location_status import LocationState
from ckptsync.records.manifest import Manifest
from ckptsync.records.model_record import ModelRecord
from ckptsync.records.report import Level, Report
from ckptsync.records.save_decisions import Scope, Stage, Tombstone
from ckptsync.records.store_paths import consolidated_prefix, file_name, node_file_name
from ckptsync.stores.contract import Store, read_all
from ckptsync.stores.memory import MemoryStore
from ckptsync.tensors import Files
from ckptsync.verifier.verification import VerifyOptions, verify_location
from tests.support.files_in_memory import MemoryFiles, safetensors_file
from tests.support.filled_stores import entry, put
from tests.support.merge_in_memory import consolidate

RUN, LOCATION = "run", "checkpoint-4"
TENSORS = {
    "a": ("F32", (100, 100), bytes(range(200)) * 200),
    "b": ("BF16", (20_000,), bytes(range(1, 201)) * 200),
    "c": ("I8", (3,), b"xyz"),
}
WHOLE = {"model.safetensors": safetensors_file(TENSORS), "config.json": b'{"model_type": "llama"}'}


def manifest(files: Mapping[str, bytes], node: str = "n0", **more: object) -> Manifest:
    tree = MemoryFiles(files)
    entries = tuple(entry(path, data) for path, data in sorted(files.items()))
    save, demands = (RUN, LOCATION, LOCATION), registry.demands(tree)
    ranks = file_names.ranks(files)
    plain = Manifest(*save, node, 0, entries, ranks, 1000, 1000, demands)
    return replace(plain, **more)  # type: ignore[arg-type]


def arrive(store: Store, files: Mapping[str, bytes], node: str = "n0", **more: object) -> str:
    """Store files and their manifest as a worker does; return the manifest's name.

    A file whose name is taken by other bytes lies beside.
    """
    names = {e.name for e in store.names(f"{RUN}/{LOCATION}/")}
    plain = {path: file_name(RUN, LOCATION, path) for path in files}
    beside = {
        p: node_file_name(RUN, LOCATION, node, p)
        for p, n in plain.items()
        if n in names and read_all(store, n) != files[p]
    }
    for path, data in files.items():
        store.write({**plain, **beside}[path], [data])
    draft = manifest(files, node, **more)
    entries = tuple(replace(f, stored_as=beside.get(f.path, "")) for f in draft.files)
    return put(store, replace(draft, files=entries))


def model_record(store: Store, files: Files, manifests: Iterable[str]) -> str:
    """Store the consolidated model and its record as a head does; return the record's name."""
    prefix = consolidated_prefix(RUN, LOCATION)
    merged = consolidate(
        files, lambda name, chunks: store.write(prefix + name, chunks), MergeOptions()
    )
    save, of = (RUN, LOCATION, LOCATION), tuple(manifests)
    return put(store, ModelRecord(*save, 0, of, {}, merged.files, merged.tensors))


def whole_store() -> MemoryStore:
    """Return a store with one node's whole model, consolidated."""
    store = MemoryStore()
    model_record(store, MemoryFiles(WHOLE), [arrive(store, WHOLE)])
    return store


def retire(store: Store, reason: str, scope: Scope = "location", stage: Stage = "marked") -> str:
    """Write a tombstone of the only location; return its name."""
    names = tuple(k.name for k in location(store).manifests)
    return put(store, Tombstone(RUN, LOCATION, LOCATION, 0, names, reason, scope, stage))


def location(store: Store) -> LocationState:
    (state,) = read_state(store).locations
    return state


def verified(store: Store, level: Level = "digest") -> Report:
    state = read_state(store)
    return verify_location(store, state.locations[0], VerifyOptions(level), state.faults)


def damage(report: Report) -> list[tuple[str, str]]:
    return [(f.kind, f.name) for f in report.findings if f.kind not in ("note", "nonfinite")]
