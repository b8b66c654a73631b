"""What a record must be beyond its types: everything in it that others will join to a path, or index by, is checked here, once."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ckptsync.errors import Corrupt
from ckptsync.layouts.rank_names import MOST
from ckptsync.paths import checked_path
from ckptsync.records.join import Join
from ckptsync.records.keep import Keep
from ckptsync.records.manifest import FileEntry, Manifest
from ckptsync.records.model_record import ModelFile, ModelRecord
from ckptsync.records.names import checked_node, node_file_name, parse_record_name
from ckptsync.records.report import Report
from ckptsync.records.tombstone import Tombstone

_TRAINER = 200  # characters: people read it
_DIGEST = re.compile(r"[0-9a-f]{64}")


def check(record: Manifest | ModelRecord | Report | Tombstone | Keep | Join) -> None:
    """Raises Corrupt."""
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
