"""What should be in the store: the files that manifests and a model record name, where they lie, with their digests.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ckptsync.digest import FileDigest
from ckptsync.records.model_record import ModelRecord, ModelTensor
from ckptsync.records.names import consolidated_prefix
from ckptsync.records.report import Finding
from ckptsync.records.state import Snapshot
from ckptsync.records.tombstone import fate
from ckptsync.verify.ranges import Ranges


@dataclass(frozen=True, slots=True)
class Expected:
    """One file.  ``name`` is the store's, ``path`` the checkpoint's or the consolidated model's, ``shown`` a report's.

    ``wanted`` has no blocks for a consolidated file: its ``tensors`` narrow damage.  ``is_copy``: a node's own copy of a name that another
    node owns.
    """

    name: str
    path: str
    shown: str
    wanted: FileDigest
    tensors: tuple[ModelTensor, ...] = ()
    is_consolidated: bool = False
    is_copy: bool = False

    @property
    def size(self) -> int:
        """Bytes it should have."""
        return self.wanted.size


def expected(seen: Snapshot) -> tuple[Expected, ...]:
    """All files of a location, the checkpoint's before the consolidated model's; not the former where they were let go."""
    return (
        *(() if seen.conditions.shards else _shards(seen)),
        *(_consolidated(seen.run, seen.model_record) if seen.model_record else ()),
    )


def missing_parts(seen: Snapshot) -> Iterator[Finding]:
    """What the checkpoint's own metadata demands and no manifest names: nothing is damaged, it has not arrived."""
    if seen.conditions.shards:
        yield Finding("note", seen.location, f"only the consolidated model is kept: {seen.conditions.shards}")
        return
    for use, demanded in (("consolidation", seen.demands.model), ("resuming", seen.demands.resume)):
        for path in sorted(demanded.keys() - seen.files.keys()):
            yield Finding("note", f"{seen.location}/{path}", f"has not arrived: the checkpoint's metadata demands it for {use}")
    if not seen.demands.model:
        yield Finding("note", seen.location, "nothing that has arrived says what a whole model is")


def stat(files: Iterable[Expected], sizes: Mapping[str, int]) -> Iterator[Finding]:
    """Level stat: every file is there with its size.  ``sizes``: store name → bytes."""
    for file in files:
        size = sizes.get(file.name)
        if size is None:
            yield Finding("missing", file.shown, f"{file.size} bytes were stored, and it is not there")
        elif size != file.size:
            yield Finding("size", file.shown, f"{size} bytes, {file.size} expected", _beyond(size, file.size))


def sealless(seen: Snapshot) -> Iterator[Finding]:
    """Shards have gone, since the consolidated model stays, and no model record is there that says what it is: then nothing can be compared."""
    begun = fate(seen.records.tombstones, {k.name for k in seen.manifests}).is_begun
    if begun and seen.conditions.shards and seen.model_record is None and not seen.demands.model.keys() <= seen.present().keys():
        name = consolidated_prefix(seen.run, seen.location).rstrip("/")
        yield Finding(
            "missing",
            _shown(seen.run, name),
            "its shards were let go, and no model record is there that says what the model should be",
        )


def unnamed(seen: Snapshot, files: Iterable[Expected]) -> Iterator[Finding]:
    """What lies with a location and no record names: nothing reads it, and it may be on its way, but people should know."""
    for name in sorted(seen.sizes.keys() - {file.name for file in files}):
        yield Finding("note", _shown(seen.run, name), f"{seen.sizes[name]} bytes that no record names")


def _beyond(size: int, wanted: int) -> Ranges:
    return ((size, wanted),) if size < wanted else ()


def _shards(seen: Snapshot) -> Iterator[Expected]:
    for path, where in seen.files.items():
        for at in where:
            entry = at.entry
            wanted = FileDigest(entry.size, entry.digest, entry.block_size, entry.blocks)
            yield Expected(at.name, path, _shown(seen.run, at.name), wanted, is_copy=at is not where[0])


def _consolidated(run: str, model_record: ModelRecord) -> Iterator[Expected]:
    prefix = consolidated_prefix(model_record.run, model_record.location)
    tensors: dict[str, list[ModelTensor]] = {}
    for tensor in model_record.tensors:
        tensors.setdefault(tensor.file, []).append(tensor)
    for file in model_record.files:
        name, wanted = prefix + file.path, FileDigest(file.size, file.digest, 0, ())
        yield Expected(name, file.path, _shown(run, name), wanted, tuple(tensors.get(file.path, ())), is_consolidated=True)


def _shown(run: str, name: str) -> str:
    return name.removeprefix(f"{run}/")
