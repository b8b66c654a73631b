"""Records as bytes: canonical JSON, named by its own digest, refused when newer than this program."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TypeVar

from ckptsync.decoding import SMALL, Decoder, format_number
from ckptsync.digest import digest
from ckptsync.errors import CkptsyncError, Corrupt, Unsupported
from ckptsync.records.checks import check
from ckptsync.records.join import Join
from ckptsync.records.keep import Keep
from ckptsync.records.manifest import Manifest
from ckptsync.records.model_record import ModelRecord
from ckptsync.records.names import RecordKind, RecordName, parse_record_name
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
        check(record)
    except Corrupt as e:
        raise Corrupt(f"{name}: {e}") from e
    return record


def decode_any(name: RecordName, data: bytes) -> Record:
    """As `decode`, of the kind that the name says."""
    return decode(str(name), data, _KINDS[name.kind])  # type: ignore[type-var]


def is_made_anew(name: RecordName | None, error: CkptsyncError) -> bool:
    """Whether a record that cannot be read keeps nobody from its location: a damaged model record or report follows from the rest, and is written again; a damaged word to keep keeps; a damaged join joins nothing."""
    return isinstance(error, Corrupt) and name is not None and name.kind in ("model", "report", "keep", "join")
