"""Stores as workers would have filled them, without a worker: for tests of what reads them.

Bytes are the vectors' own; times are given, since git keeps none.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ckptsync.digest import digest, digest_stream
from ckptsync.layouts import file_names, registry
from ckptsync.records.io import Record, encode, record_name
from ckptsync.records.location_status import LocationState
from ckptsync.records.manifest import FileEntry, Manifest
from ckptsync.records.report import Level, Report, Verdict, VerifyFinding
from ckptsync.records.store_paths import checkpoint_of
from ckptsync.stores.checkpoint_files import DirectoryFiles
from ckptsync.stores.contract import Store, read_all
from ckptsync.tensors import read_whole

HERE = Path(__file__).parent.parent
DEMO = HERE.parent / "ckptsync" / "demo_data"
SECOND = 1_000_000_000
FIRST = 1_790_000_000 * SECOND


def send(
    store: Store,
    directory: Path,
    node: str,
    location: str = "checkpoint-4",
    *,
    run: str = "run",
    at: int = FIRST,
) -> str:
    """Store one node's files and its manifest; return the manifest's name."""
    files = DirectoryFiles(str(directory))
    for path in files.sizes():
        store.write(f"{run}/{location}/{path}", [read_whole(files, path)])
    return put(store, manifest_of(directory, node, location, run=run, at=at))


def manifest_of(
    directory: Path, node: str, location: str = "checkpoint-4", *, run: str = "run", at: int = FIRST
) -> Manifest:
    """Return a node's manifest of a directory; all files have the mtime ``at`` (ns)."""
    files = DirectoryFiles(str(directory))
    return Manifest(
        run=run,
        checkpoint=checkpoint_of(location),
        location=location,
        node=node,
        n=0,
        files=tuple(entry(path, read_whole(files, path), at) for path in sorted(files.sizes())),
        ranks=file_names.ranks(files.sizes()),
        started=at,
        ended=at,
        demands=registry.demands(files),
        sources=tuple(map(str, registry.sources(files))),
    )


def entry(path: str, data: bytes, at: int = 1000) -> FileEntry:
    """Return what a manifest says of a file."""
    digests = digest_stream([data], len(data))
    return FileEntry(path, digests.size, digests.digest, digests.block_size, digests.blocks, at)


def put(store: Store, record: Record) -> str:
    """Store a record; return its name."""
    data = encode(record)
    name = record_name(record, data)
    store.write(name, [data])
    return name


def report_on(
    snapshot: LocationState,
    n: int,
    verdict: Verdict,
    findings: Iterable[VerifyFinding] = (),
    level: Level = "digest",
) -> Report:
    names = tuple(k.name for k in snapshot.manifests)
    save = (snapshot.run, snapshot.checkpoint, snapshot.location)
    sources = (names, snapshot.model_record_name)
    return Report(*save, n, level, verdict, *sources, 1, tuple(findings), 0.0)


def two_nodes(store: Store, kind: str = "fsdp2", location: str = "checkpoint-4") -> None:
    """Store the demo's checkpoint, as both of its nodes."""
    for node in ("node0", "node1"):
        send(store, DEMO / kind / node / "checkpoint-4", node, location)


def contents(store: Store) -> dict[str, bytes]:
    """Return the content of every file of a store, by its name."""
    return {e.name: read_all(store, e.name) for e in store.names("")}


def flip(store: Store, name: str, at: int = 0, bit: int = 0) -> None:
    """Turn one bit of a stored file."""
    data = bytearray(read_all(store, name))
    data[at] ^= 1 << bit
    store.write(name, [data])


def newer(store: Store, kind: str, location: str = "checkpoint-5") -> str:
    """Store a record of a format that is not known yet; return its name."""
    data = b'{"format":99}'
    name = f"run/.ckptsync/{location}/{kind}-0-{digest(data)[:16]}.json"
    store.write(name, [data])
    return name
