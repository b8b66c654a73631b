"""The files that should be there, and their digests: by a store's records, or by a baseline. Pure.

Verification of a location and of a plain directory differ only in where the expectation comes from,
so both become a list of `ExpectedFile`. A baseline is the digests of all files of a directory as
they once were: a JSON file with ``format``, ``files`` (path, size, digest, block_size, blocks, as
in a manifest) and ``digest``, the BLAKE3 of the files' canonical JSON.
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
    """A file that should be there.

    ``name`` is its name in the store, ``path`` in the checkpoint or model, ``shown`` in findings.
    ``recorded`` has no digest if none was recorded, and no blocks for a file of a consolidated
    model: its ``tensors`` tell where damage lies. ``is_copy``: another node's content has the plain
    name.
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
        """Return the bytes that the file should have."""
        return self.recorded.size

    @property
    def is_own(self) -> bool:
        """Return whether this is the first copy of a path, and not of the consolidated model."""
        return not self.is_consolidated and not self.is_copy


def expected_files(state: LocationState) -> tuple[ExpectedFile, ...]:
    """Return the files of a location's checkpoint, then of its model.

    A path of several contents has each node's copy. None of the checkpoint if retention deletes its
    shards; none of a model without a model record.
    """
    files = []
    for path, copies in {} if state.conditions.shards else state.files.items():
        for copy in copies:
            file = copy.entry
            recorded = FileDigest(file.size, file.digest, file.block_size, file.blocks)
            shown = copy.name.removeprefix(f"{state.run}/")
            files.append(
                ExpectedFile(copy.name, path, shown, recorded, is_copy=copy is not copies[0])
            )
    if state.model_record is None:
        return tuple(files)
    prefix = consolidated_prefix(state.model_record.run, state.model_record.location)
    tensors: dict[str, list[ModelTensor]] = {}
    for tensor in state.model_record.tensors:
        tensors.setdefault(tensor.file, []).append(tensor)
    for model_file in state.model_record.files:
        name = prefix + model_file.path
        recorded = FileDigest(model_file.size, model_file.digest, 0, ())
        shown = name.removeprefix(f"{state.run}/")
        own_tensors = tuple(tensors.get(model_file.path, ()))
        files.append(
            ExpectedFile(name, model_file.path, shown, recorded, own_tensors, is_consolidated=True)
        )
    return tuple(files)


def directory_files(
    sizes: Mapping[str, int], baseline: Iterable[ExpectedFile]
) -> tuple[ExpectedFile, ...]:
    """Return the files of a baseline, then those of a directory that it does not name.

    The latter have no digest. ``sizes``: of the directory's files, by path.
    """
    by_path = {file.path: file for file in baseline}
    unnamed = ((path, size) for path, size in sizes.items() if path not in by_path)
    without_digest = (directory_file(path, FileDigest(size, "", 0, ())) for path, size in unnamed)
    return (*by_path.values(), *without_digest)


def directory_file(path: str, recorded: FileDigest) -> ExpectedFile:
    """Return a file of a plain directory as an expected one, with this digest."""
    return ExpectedFile(path, path, path, recorded)


def check_sizes(files: Iterable[ExpectedFile], sizes: Mapping[str, int]) -> Iterator[VerifyFinding]:
    """Yield damage: files that are missing, or of another size; a short one with its lost range.

    ``sizes``: of what is stored, by name.
    """
    for file in files:
        size = sizes.get(file.name)
        if size is None:
            yield VerifyFinding("missing", file.shown, f"not found; {file.size} bytes expected")
        elif size != file.size:
            missing_range = ((size, file.size),) if size < file.size else ()
            yield VerifyFinding(
                "size", file.shown, f"{size} bytes, {file.size} expected", missing_range
            )


def check_records(state: LocationState) -> Iterator[VerifyFinding]:
    """Yield damage ("missing") if deleting shards has begun, and no model record can be read.

    Nothing is yielded while the shards that a model needs are all present.
    """
    is_begun = fate(state.records.tombstones, {k.name for k in state.manifests}).is_begun
    is_whole = state.demands.model.keys() <= state.present().keys()
    if is_begun and state.conditions.shards and state.model_record is None and not is_whole:
        name = (
            consolidated_prefix(state.run, state.location).rstrip("/").removeprefix(f"{state.run}/")
        )
        detail = "its shards were deleted, and no model record says what the model should be"
        yield VerifyFinding("missing", name, detail)


def note_gaps(state: LocationState) -> Iterator[VerifyFinding]:
    """Yield a note for each demanded file that no node has uploaded; that is no damage.

    Yield a single note if only the model is kept; another if no file says what the model needs.
    """
    if state.conditions.shards:
        detail = f"only the consolidated model is kept: {state.conditions.shards}"
        yield VerifyFinding("note", state.location, detail)
        return
    for use, demanded in (
        ("consolidation", state.demands.model),
        ("resuming", state.demands.resume),
    ):
        for path in sorted(demanded.keys() - state.files.keys()):
            detail = f"not uploaded; the checkpoint's metadata demands it for {use}"
            yield VerifyFinding("note", f"{state.location}/{path}", detail)
    if not state.demands.model:
        yield VerifyFinding(
            "note", state.location, "no uploaded file says which files the model needs"
        )


def note_unnamed(state: LocationState, unnamed: Sequence[UnnamedFile]) -> Iterator[VerifyFinding]:
    """Yield notes for files that no record names, which may be on their way.

    After `_SHOWN` of them one note counts the others.
    """
    for file in unnamed[:_SHOWN]:
        size_text = "a link" if file.size is None else f"{file.size} bytes"
        runs = ": it may run code when somebody opens it" if file.runs else ""
        yield VerifyFinding("note", file.name, f"{size_text} that no record names{runs}")
    if len(unnamed) > _SHOWN:
        detail = f"{len(unnamed) - _SHOWN} more files that no record names"
        yield VerifyFinding("note", state.location, detail)


@dataclass(frozen=True, slots=True)
class _BaselineEntry:
    """A file of a baseline, as it is stored."""

    path: str
    size: Count
    digest: str
    block_size: Count
    blocks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Baseline:
    """A baseline, as it is stored."""

    format: FormatNumber
    digest: str
    files: tuple[_BaselineEntry, ...]


_SHOWN = 8  # files that no record names
_DECODER = Decoder(_Baseline, "a baseline", LIMIT)


def encode_baseline(files: Iterable[ExpectedFile]) -> bytes:
    """Return the JSON of a baseline with these files, sorted by path."""
    entries = []
    for file in sorted(files, key=lambda f: f.path):
        r = file.recorded
        entries.append(asdict(_BaselineEntry(file.path, r.size, r.digest, r.block_size, r.blocks)))
    baseline = {"format": FORMAT, "digest": _digest(entries), "files": entries}
    return json.dumps(baseline, sort_keys=True, indent=1).encode() + b"\n"


def decode_baseline(data: bytes, name: str) -> tuple[ExpectedFile, ...]:
    """Return the files of a baseline; ``name`` is for messages.

    Raise Corrupt if it is damaged or has bad paths, and Unsupported if a newer program wrote it.
    """
    number = format_number(data, name, "a baseline")
    if number > FORMAT:
        text = f"{name}: baseline format {number}; this ckptsync reads up to {FORMAT}"
        raise Unsupported(text, hint="upgrade ckptsync on this machine")
    baseline = _DECODER.decode(data, name)
    if _digest([asdict(entry) for entry in baseline.files]) != baseline.digest:
        text = f"{name}: its files do not match its checksum"
        raise Corrupt(text, hint="record it again, from files that are known to be good")
    files = [FileEntry(e.path, e.size, e.digest, e.block_size, e.blocks, 0) for e in baseline.files]
    try:
        check_files(files)
    except Corrupt as e:
        raise Corrupt(f"{name}: {e}") from e
    digests = ((f.path, FileDigest(f.size, f.digest, f.block_size, f.blocks)) for f in files)
    return tuple(directory_file(*path_and_digest) for path_and_digest in digests)


def _digest(entries: list[dict[str, object]]) -> str:
    """Return the digest of a baseline's entries."""
    return digest(json.dumps(entries, sort_keys=True, separators=(",", ":")).encode())
