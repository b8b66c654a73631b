"""The files that should be there, and their digests: by a store's records, or by a baseline.  Pure.

A baseline has the digests of all files of a directory as they once were.  It is a JSON file with
``format``, ``files`` (path, size, digest, block_size, blocks, as in a manifest) and ``digest``, the
BLAKE3 of the files' canonical JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from ckptsync.catalogue.location_summary import UnnamedFile
from ckptsync.digest import FileDigest, digest
from ckptsync.errors import Corrupt, Unsupported
from ckptsync.records.io import check_files
from ckptsync.records.location_status import LocationState
from ckptsync.records.manifest import FileEntry
from ckptsync.records.model_record import ModelTensor
from ckptsync.records.report import VerifyFinding
from ckptsync.records.save_decisions import fate
from ckptsync.records.store_paths import consolidated_prefix
from ckptsync.typed_json import Count, Decoder, FormatNumber, format_number

FORMAT = 1
LIMIT = 1 << 30  # bytes of a baseline


@dataclass(frozen=True, slots=True)
class ExpectedFile:
    """One file: ``name`` in the store, ``path`` in the checkpoint or model, ``shown`` in findings.

    ``recorded`` has no digest if none was recorded, and no blocks for a file of a consolidated
    model: its ``tensors`` narrow damage.  ``is_copy``: another node owns the path.
    """

    name: str
    path: str
    shown: str
    recorded: FileDigest
    tensors: tuple[ModelTensor, ...] = ()
    is_consolidated: bool = False
    is_copy: bool = False

    @property
    def size(self) -> int:
        """Bytes it should have."""
        return self.recorded.size

    @property
    def is_own(self) -> bool:
        """Whether it is a file of the checkpoint, under the checkpoint's own name for it."""
        return not self.is_consolidated and not self.is_copy


def expected_files(seen: LocationState) -> tuple[ExpectedFile, ...]:
    """Return all files of a location: the checkpoint's, unless deleted, then the model's."""
    found = []
    for path, where in {} if seen.conditions.shards else seen.files.items():
        for at in where:
            file = at.entry
            recorded = FileDigest(file.size, file.digest, file.block_size, file.blocks)
            shown = at.name.removeprefix(f"{seen.run}/")
            found.append(ExpectedFile(at.name, path, shown, recorded, is_copy=at is not where[0]))
    if seen.model_record is None:
        return tuple(found)
    prefix = consolidated_prefix(seen.model_record.run, seen.model_record.location)
    tensors: dict[str, list[ModelTensor]] = {}
    for tensor in seen.model_record.tensors:
        tensors.setdefault(tensor.file, []).append(tensor)
    for made in seen.model_record.files:
        name, recorded = prefix + made.path, FileDigest(made.size, made.digest, 0, ())
        shown, inside = name.removeprefix(f"{seen.run}/"), tuple(tensors.get(made.path, ()))
        found.append(ExpectedFile(name, made.path, shown, recorded, inside, is_consolidated=True))
    return tuple(found)


def directory_files(
    sizes: Mapping[str, int], baseline: Iterable[ExpectedFile]
) -> tuple[ExpectedFile, ...]:
    """Return the files of a baseline, then those of a directory that it does not name."""
    known = {file.path: file for file in baseline}
    others = ((path, size) for path, size in sizes.items() if path not in known)
    unknown = (directory_file(path, FileDigest(size, "", 0, ())) for path, size in others)
    return (*known.values(), *unknown)


def directory_file(path: str, recorded: FileDigest) -> ExpectedFile:
    """Return a file of a plain directory."""
    return ExpectedFile(path, path, path, recorded)


def check_sizes(files: Iterable[ExpectedFile], sizes: Mapping[str, int]) -> Iterator[VerifyFinding]:
    """Yield findings for files that are not there, or not with their size.  ``sizes``: by name."""
    for file in files:
        size = sizes.get(file.name)
        if size is None:
            yield VerifyFinding("missing", file.shown, f"not found; {file.size} bytes expected")
        elif size != file.size:
            lost = ((size, file.size),) if size < file.size else ()
            yield VerifyFinding("size", file.shown, f"{size} bytes, {file.size} expected", lost)


def check_records(seen: LocationState) -> Iterator[VerifyFinding]:
    """Yield damage if shards were deleted, and no model record describes the model that stays."""
    begun = fate(seen.records.tombstones, {k.name for k in seen.manifests}).is_begun
    is_whole = seen.demands.model.keys() <= seen.present().keys()
    if begun and seen.conditions.shards and seen.model_record is None and not is_whole:
        name = consolidated_prefix(seen.run, seen.location).rstrip("/").removeprefix(f"{seen.run}/")
        detail = "its shards were deleted, and no model record says what the model should be"
        yield VerifyFinding("missing", name, detail)


def note_gaps(seen: LocationState) -> Iterator[VerifyFinding]:
    """Yield notes: demanded files that no node has uploaded.  Nothing is damaged."""
    if seen.conditions.shards:
        detail = f"only the consolidated model is kept: {seen.conditions.shards}"
        yield VerifyFinding("note", seen.location, detail)
        return
    for use, demanded in (("consolidation", seen.demands.model), ("resuming", seen.demands.resume)):
        for path in sorted(demanded.keys() - seen.files.keys()):
            detail = f"not uploaded; the checkpoint's metadata demands it for {use}"
            yield VerifyFinding("note", f"{seen.location}/{path}", detail)
    if not seen.demands.model:
        yield VerifyFinding(
            "note", seen.location, "no uploaded file says which files the model needs"
        )


def note_unnamed(seen: LocationState, found: Sequence[UnnamedFile]) -> Iterator[VerifyFinding]:
    """Yield notes: files beside a location's that no record names.  They may be on their way."""
    for file in found[:_SHOWN]:
        what = "a link" if file.size is None else f"{file.size} bytes"
        runs = ": it may run code when somebody opens it" if file.runs else ""
        yield VerifyFinding("note", file.name, f"{what} that no record names{runs}")
    if len(found) > _SHOWN:
        detail = f"{len(found) - _SHOWN} more files that no record names"
        yield VerifyFinding("note", seen.location, detail)


@dataclass(frozen=True, slots=True)
class _BaselineEntry:
    path: str
    size: Count
    digest: str
    block_size: Count
    blocks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Baseline:
    format: FormatNumber
    digest: str
    files: tuple[_BaselineEntry, ...]


_SHOWN = 8  # files that no record names
_DECODER = Decoder(_Baseline, "a baseline", LIMIT)


def encode_baseline(files: Iterable[ExpectedFile]) -> bytes:
    """Return the JSON of a baseline with these files."""
    entries = []
    for file in sorted(files, key=lambda f: f.path):
        r = file.recorded
        entries.append(asdict(_BaselineEntry(file.path, r.size, r.digest, r.block_size, r.blocks)))
    made = {"format": FORMAT, "digest": _digest(entries), "files": entries}
    return json.dumps(made, sort_keys=True, indent=1).encode() + b"\n"


def decode_baseline(data: bytes, name: str) -> tuple[ExpectedFile, ...]:
    """Return the files of a baseline; ``name`` is for messages.

    Raises Corrupt, and Unsupported if a newer program wrote it.
    """
    number = format_number(data, name, "a baseline")
    if number > FORMAT:
        why = f"{name}: baseline format {number}; this ckptsync reads up to {FORMAT}"
        raise Unsupported(why, hint="upgrade ckptsync on this machine")
    found = _DECODER.decode(data, name)
    if _digest([asdict(entry) for entry in found.files]) != found.digest:
        why = f"{name}: its files do not match its checksum"
        raise Corrupt(why, hint="record it again, from files that are known to be good")
    files = [FileEntry(e.path, e.size, e.digest, e.block_size, e.blocks, 0) for e in found.files]
    try:
        check_files(files)
    except Corrupt as e:
        raise Corrupt(f"{name}: {e}") from e
    digests = ((f.path, FileDigest(f.size, f.digest, f.block_size, f.blocks)) for f in files)
    return tuple(directory_file(*one) for one in digests)


def _digest(entries: list[dict[str, object]]) -> str:
    return digest(json.dumps(entries, sort_keys=True, separators=(",", ":")).encode())
