"""Checkpoints, stores and workers of the tests: a worker without a service plans, sends all that is
due, and says what became of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from ckptsync.digest import digest
from ckptsync.records.io import decode
from ckptsync.records.manifest import Manifest
from ckptsync.records.manifest_groups import (
    StoredManifest,
    explain_conflict,
    live_manifests,
    locate_files,
)
from ckptsync.records.model_record import ModelRecord
from ckptsync.records.report import Report, VerifyFinding
from ckptsync.records.store_paths import parse_record_name
from ckptsync.stores.contract import Entry, Store, read_all
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.opening import create_store
from ckptsync.worker.file_selection import EVERYTHING, Selection
from ckptsync.worker.local_save import (
    AfterChunk,
    LocalSave,
    ReadFiles,
    draft_manifest,
    ignore_chunk,
    notes_at_sending,
)
from ckptsync.worker.model_configs import outgoing_save
from ckptsync.worker.node_identity import node_id
from ckptsync.worker.options import RunDir, WorkerOptions, checked_run
from ckptsync.worker.pinning import Pinner
from ckptsync.worker.push import find_offer, push
from ckptsync.worker.queue import UploadQueues
from ckptsync.worker.results import UploadProgress, WorkerResult
from ckptsync.worker.scanner import list_and_pin_saves
from ckptsync.worker.store_view import StoreView
from ckptsync.worker.upload import Sent, UploadContext, upload
from ckptsync.worker.worker import Worker
from tests.support.crashing_store import Watched
from tests.support.filled_stores import put

R = TypeVar("R")
T = 1_700_000_000 * 10**9
ONE = {
    "trainer_state.json": b'{"global_step": 4}',
    "m/__0_0.distcp": b"shard 0",
    "m/meta.txt": b"meta",
    "empty": b"",
    "x": b"A",
}
TWO = {"m/__1_0.distcp": b"shard 1", "x": b"B", "rng_state_1.pth": b"random"}
EIGHT = ONE | {"trainer_state.json": b'{"global_step": 8}'}


def lay(root: Path, files: dict[str, bytes], at: float = 0.0) -> Path:
    """Write a checkpoint-4 whose files have the mtime ``at`` (s), in place; return its path."""
    for name, content in files.items():
        path = root / "checkpoint-4" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        os.utime(path, ns=(T + int(at * 1e9), T + int(at * 1e9) + len(name)))
        for folder in (path.parent, root / "checkpoint-4"):
            os.utime(folder, ns=(T + int(at * 1e9),) * 2)
    return root / "checkpoint-4"


def other(files: dict[str, bytes]) -> dict[str, bytes]:
    """Return the files of another save: the same names and sizes, other bytes."""
    return {
        name: bytes(b ^ 1 if b != 10 else b for b in content) if "json" not in name else content
        for name, content in files.items()
    }


def seen(out: Path) -> LocalSave:
    """Return the only save of an output directory, pinned."""
    (save,) = list_and_pin_saves(RunDir("run", out), Pinner("n0", lambda *_: False)).saves
    return save


def context(store: Store, node: str = "n0") -> UploadContext:
    """Return what an upload of checkpoint-4 needs."""
    return UploadContext(StoreView(store, node, "run"), "checkpoint-4")


def draft_of(one: LocalSave, node: str = "n0") -> Manifest:
    """Return the manifest of a save, still without a location."""
    return draft_manifest(one, node, notes_at_sending(one, 0), ReadFiles(), clock_offset=0)[0]


def store_save(one: LocalSave, store: Store, selection: Selection = EVERYTHING) -> Sent:
    """Upload one save; return what was sent."""
    going = outgoing_save(one, selection)
    return upload(draft_of(going), going.files, context(store))


def manifests(store: Store) -> list[StoredManifest]:
    names = [
        e.name
        for e in store.names("")
        if (parsed := parse_record_name(e.name)) and parsed.kind == "manifest"
    ]
    records = {n: decode(n, read_all(store, n)) for n in names}
    return list(
        live_manifests(StoredManifest(n, m) for n, m in records.items() if isinstance(m, Manifest))
    )


def kept(store: Store) -> dict[str, dict[str, dict[str, bytes]]]:
    """Return location → node → path → bytes, as the manifests say.

    Fails if a file that a manifest names is missing, or has other bytes.
    """
    stored: dict[str, dict[str, dict[str, bytes]]] = {}
    for location in {k.manifest.location for k in manifests(store)}:
        assert explain_conflict(location, manifests(store)) == ""
        for path, every in locate_files(
            k.manifest for k in manifests(store) if k.manifest.location == location
        ).items():
            for copy in every:
                data = read_all(store, copy.name)
                assert digest(data) == copy.entry.digest, copy.name
                for node in copy.nodes:
                    stored.setdefault(location, {}).setdefault(node, {})[path] = data
    return stored


def damaged(store: Store, n: int, *names: str) -> str:
    """Report files as damaged; return the report's name."""
    manifest_names = tuple(k.name for k in manifests(store))
    findings = tuple(VerifyFinding("digest", name, "") for name in names)
    return put(
        store,
        Report(
            "run",
            "checkpoint-4",
            "checkpoint-4",
            n,
            "digest",
            "damaged",
            manifest_names,
            "",
            0,
            findings,
        ),
    )


def verify(store: Store, location: str = "checkpoint-4") -> None:
    """Store a model record of a location, and a report that makes it VERIFIED."""
    names = tuple(k.name for k in manifests(store) if k.manifest.location == location)
    model_record = put(store, ModelRecord("run", location, location, 0, names, {}, (), ()))
    put(store, Report("run", location, location, 0, "digest", "ok", names, model_record, 1, ()))


def worker(out: Path, store: Store, node: str = "n0", *, keep: int = 2, threads: int = 4) -> Worker:
    return Worker(WorkerOptions(node, RunDir("run", out), keep_pins=keep, threads=threads), store)


def push_now(
    directory: Path,
    store: Store,
    node: str = "",
    run: str = "",
    after_chunk: AfterChunk = ignore_chunk,
    *,
    threads: int = 4,
    selection: Selection = EVERYTHING,
    runs: Iterable[RunDir] = (),
    name: str = "",
) -> tuple[UploadProgress, ...]:
    """Push a directory, as `ckptsync push` does; return the progress."""
    offer = find_offer(directory, runs, name, store.url)
    offer = replace(offer, run=checked_run(run or offer.run))
    return push(offer, store, node or node_id(), after_chunk, threads=threads, selection=selection)


def is_drained(queues: UploadQueues) -> bool:
    """Return whether nothing waits."""
    with queues._lock:
        return not any(queues._waiting.values())


def send_all(queues: UploadQueues) -> None:
    """Send all that waits, one after the other."""
    while not is_drained(queues):
        for queue in queues.queues:
            queue.run_next()


def tick(worker: Worker, now: float) -> WorkerResult:
    """Scan, plan, send, and return the result."""
    worker.scan(now)
    worker.plan(now)
    send_all(worker.queues)
    return worker.result()


def settle(w: Worker, start: float = 0.0) -> WorkerResult:
    """Tick until everything that can be finished is; return the last result, after all waiting."""
    for after in (0.0, 10.0, 60.0, 600.0):
        result = tick(w, start + after)
    return result


def progress(result: WorkerResult) -> dict[str, UploadProgress]:
    assert result.failures == ()
    return {f"{p.checkpoint}.{p.k}": p for p in result.progress}


def pinned(out: Path) -> list[str]:
    return sorted(p.name for p in (out / "_ckptsync" / "pins").iterdir())


class Interrupted(Watched):
    """A store in front of another: something happens just before the ``nth`` change through it."""

    def __init__(self, store: Store, nth: int, meddle: Callable[[], object]) -> None:
        super().__init__(store)
        self._left, self._meddle = nth, meddle

    def around_change(self, call: Callable[[], R]) -> R:
        self._left -= 1
        if self._left == -1:
            self._meddle()
        return call()


class Overtaken(MemoryStore):
    """While it is listed for the ``nth`` time, something else happens."""

    nth = 1
    meanwhile: Callable[[], object] = staticmethod(lambda: None)

    def names(self, prefix: str) -> Iterator[Entry]:
        entries = list(super().names(prefix))
        self.nth -= 1
        if self.nth == 0:
            self.meanwhile()
        return iter(entries)


def in_memory(_: Path) -> Store:
    return MemoryStore()


def on_disk(path: Path) -> Store:
    return create_store(str(path / "store"))
