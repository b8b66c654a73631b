"""Records as bytes: canonical JSON, named by its own digest; refused when newer than this program, or when it would lead somewhere else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict
from typing import TypeVar

from ckptsync.decoding import SMALL, Decoder, format_number
from ckptsync.digest import digest
from ckptsync.errors import CkptsyncError, Corrupt, Unsupported
from ckptsync.layouts.rank_names import MOST
from ckptsync.paths import checked_path
from ckptsync.records.join import Join
from ckptsync.records.keep import Keep
from ckptsync.records.manifest import FileEntry, Manifest
from ckptsync.records.model_record import ModelFile, ModelRecord
from ckptsync.records.names import RecordKind, RecordName, checked_node, node_file_name, parse_record_name
from ckptsync.records.report import Report
from ckptsync.records.tombstone import Tombstone

Record = Manifest | ModelRecord | Report | Tombstone | Keep | Join
R = TypeVar("R", Manifest, ModelRecord, Report, Tombstone, Keep, Join)
FORMATS: dict[RecordKind, int] = {"manifest": 1, "model": 1, "report": 1, "tombstone": 1, "keep": 1, "join": 1}
"""The newest that this program knows of each kind."""
_KINDS: dict[RecordKind, type[Record]] = {
    "manifest": Manifest,
    "model": ModelRecord,
    "report": Report,
    "tombstone": Tombstone,
    "keep": Keep,
    "join": Join,
}
LIMITS: dict[RecordKind, int] = {
    "manifest": 32 << 20,
    "model": 32 << 20,
    "report": SMALL,
    "tombstone": SMALL,
    "keep": SMALL,
    "join": SMALL,
}
"""Bytes that a record may have: a manifest of some 110,000 files, a model record of some 120,000 tensors.  A reader has at most fifteen times as many in memory."""
_DECODERS = {kind: Decoder(its, f"a {kind}", LIMITS[kind]) for kind, its in _KINDS.items()}
_TRAINER = 200  # characters: people read it
_DIGEST = re.compile(r"[0-9a-f]{64}")


def encode(record: Record) -> bytes:
    """Canonical: sorted keys, no spaces, one final newline.  Raises Unsupported for what would be too large for any reader."""
    data = json.dumps(asdict(record), sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"
    kind = kind_of(record)
    if len(data) > LIMITS[kind]:
        raise Unsupported(
            f"{record.run}/{record.location}: its {kind} would have {len(data)} bytes, at most {LIMITS[kind]} can be read",
            hint=_SMALLER,
        )
    return data


_SMALLER = (
    "a checkpoint may have about 110,000 files a node, and 120,000 tensors: pack small files, or leave some out with worker.exclude"
)


def kind_of(record: Record) -> RecordKind:
    """As names say it."""
    return next(kind for kind, its in _KINDS.items() if isinstance(record, its))


def record_name(record: Record, data: bytes) -> str:
    """The name a record is stored under: it ends in its own digest's first 16 hex digits."""
    node = record.node if isinstance(record, Manifest) else ""
    return str(RecordName(record.run, record.location, kind_of(record), node, record.n, digest(data)[:16]))


def decode(name: str, data: bytes, kind: type[R]) -> R:
    """The record that ``data`` is, if it is what its ``name`` says; raises Corrupt, or Unsupported if it is newer."""
    parsed = parse_record_name(name)
    if parsed is None or parsed.digest != digest(data)[:16]:
        raise Corrupt(f"{name}: bytes do not have the digest in the name")
    number, known = format_number(data, name, f"a {parsed.kind}"), FORMATS[parsed.kind]
    if number > known:
        raise Unsupported(f"{name}: record format {number}, at most {known} is known here", hint="upgrade ckptsync on this machine")
    record = _DECODERS[parsed.kind].decode(data, name)
    if not isinstance(record, kind):
        raise Corrupt(f"{name}: a {parsed.kind}, and no {kind.__name__.lower()}")
    if record_name(record, data) != name:
        raise Corrupt(f"{name}: speaks of {record_name(record, data)}")
    try:
        _check(record)
    except Corrupt as e:
        raise Corrupt(f"{name}: {e}") from e
    return record


def decode_any(name: RecordName, data: bytes) -> Record:
    """As `decode`, of the kind that the name says."""
    return decode(str(name), data, _KINDS[name.kind])  # type: ignore[type-var]


def is_made_anew(name: RecordName | None, error: CkptsyncError) -> bool:
    """Whether a record that cannot be read does not hide its location: a damaged model record or report follows from the rest, and is written again; a damaged word to keep keeps; a damaged join joins nothing."""
    return isinstance(error, Corrupt) and name is not None and name.kind in ("model", "report", "keep", "join")


def _check(record: Manifest | ModelRecord | Report | Tombstone | Keep | Join) -> None:
    """Raise Corrupt for what a record must not hold beyond its types: all that others join to a path, or index by, is checked here, once."""
    if record.location != record.checkpoint and not record.location.startswith(f"{record.checkpoint}~"):
        raise Corrupt(f"{record.location!r}: not a location of {record.checkpoint!r}")
    if isinstance(record, Manifest):
        _check_manifest(record)
        return
    if isinstance(record, Keep):
        return
    _check_names(record.manifests)
    if isinstance(record, Tombstone):
        _check_tombstone(record)
    if isinstance(record, ModelRecord):
        check_files(record.files)
        _check_tensors(record)


def _check_manifest(manifest: Manifest) -> None:
    checked_node(manifest.node)
    _check_names(manifest.supersedes)
    check_files(manifest.files)
    for file in manifest.files:
        if file.stored_as not in ("", node_file_name(manifest.run, manifest.location, manifest.node, file.path)):
            raise Corrupt(f"{file.path}: stored as {file.stored_as!r:.200}, which is no name for a file of {manifest.node}")
    for path in (*manifest.demands.model, *manifest.demands.resume):
        checked_path(path)
    if not all(0 <= rank < MOST for rank in manifest.ranks) or not 0 <= (manifest.demands.world or 0) <= MOST:
        raise Corrupt(f"{manifest.node}: ranks {manifest.ranks!r:.80} of {manifest.demands.world!r:.80} cannot be")
    if manifest.started > manifest.ended:
        raise Corrupt(f"{manifest.node}: its files begin at {manifest.started} and end at {manifest.ended}")
    if len(manifest.trainer) > _TRAINER or not manifest.trainer.isprintable():
        raise Corrupt(f"{manifest.trainer!r:.80}: not what names a trainer")


def _check_tombstone(stone: Tombstone) -> None:
    for node in stone.ended:
        checked_node(node)


def _check_names(names: Iterable[str]) -> None:
    for name in names:
        parsed = parse_record_name(name)
        if parsed is None or parsed.kind != "manifest":
            raise Corrupt(f"{name!r}: not the name of a manifest")


def check_files(files: Iterable[FileEntry | ModelFile]) -> None:
    """Raise Corrupt for a list of files that cannot be."""
    paths: set[str] = set()
    for file in files:
        if checked_path(file.path) in paths:
            raise Corrupt(f"{file.path}: named twice")
        paths.add(file.path)
        if file.size < 0 or not _DIGEST.fullmatch(file.digest):
            raise Corrupt(f"{file.path}: {file.size} bytes of digest {file.digest!r:.80} cannot be")
        if isinstance(file, FileEntry):
            _check_blocks(file)


def _check_blocks(file: FileEntry) -> None:
    if file.block_size < 1 or len(file.blocks) != -(-file.size // file.block_size):
        raise Corrupt(f"{file.path}: {len(file.blocks)} blocks of {file.block_size} bytes do not make {file.size} bytes")


def _check_tensors(model_record: ModelRecord) -> None:
    sizes = {f.path: f.size for f in model_record.files}
    for tensor in model_record.tensors:
        if not 0 <= tensor.start <= tensor.start + tensor.size <= sizes.get(tensor.file, -1):
            raise Corrupt(f"{tensor.name}: bytes {tensor.start} to {tensor.start + tensor.size} are not in {tensor.file!r:.200}")
