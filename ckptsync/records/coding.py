"""Records as bytes: canonical JSON, named by its own digest, refused when newer than this program."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TypeVar

import msgspec

from ckptsync.digest import digest
from ckptsync.errors import CkptsyncError, Corrupt, Unsupported
from ckptsync.records.checks import check
from ckptsync.records.keep import Keep
from ckptsync.records.manifest import Manifest
from ckptsync.records.names import RecordKind, RecordName, parse_record_name
from ckptsync.records.report import Report
from ckptsync.records.seal import Seal
from ckptsync.records.tombstone import LATER, Tombstone

Record = Manifest | Seal | Report | Tombstone | Keep
R = TypeVar("R", Manifest, Seal, Report, Tombstone, Keep)
FORMATS: dict[RecordKind, int] = {"manifest": 1, "seal": 1, "report": 1, "tombstone": LATER, "keep": 1}
"""The newest that this program knows of each kind."""
_KINDS: dict[RecordKind, type[Record]] = {
    "manifest": Manifest,
    "seal": Seal,
    "report": Report,
    "tombstone": Tombstone,
    "keep": Keep,
}
# msgspec looks at a type when it first meets it, and crashes (0.22: a segmentation fault) where two threads do so at once: a head and a verifier
_MET = tuple(msgspec.json.Decoder(kind) for kind in _KINDS.values())


def encode(record: Record) -> bytes:
    """Canonical: sorted keys, no spaces, one final newline."""
    return json.dumps(asdict(record), sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


def record_name(record: Record, data: bytes) -> str:
    """The name a record is stored under: it ends in its own digest's first 16 hex digits."""
    node = record.node if isinstance(record, Manifest) else ""
    kind = type(record).__name__.lower()
    return str(RecordName(record.run, record.place, kind, node, record.n, digest(data)[:16]))  # type: ignore[arg-type]


def decode(name: str, data: bytes, kind: type[R]) -> R:
    """The record that ``data`` is, if it is what its ``name`` says; raises Corrupt, or Unsupported if it is newer."""
    parsed = parse_record_name(name)
    if parsed is None or parsed.digest != digest(data)[:16]:
        raise Corrupt(f"{name}: bytes do not have the digest in the name")
    _refuse_newer(name, data, FORMATS[parsed.kind])
    try:
        record = msgspec.convert(msgspec.json.decode(data), kind, strict=True)
    except (msgspec.ValidationError, msgspec.DecodeError, RecursionError) as e:
        raise Corrupt(f"{name}: not a {kind.__name__.lower()}: {e}") from e
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
    """Whether a record that cannot be read keeps nobody from its place: a damaged seal or report follows from the rest, and is written again; a damaged word to keep keeps."""
    return isinstance(error, Corrupt) and name is not None and name.kind in ("seal", "report", "keep")


def _refuse_newer(name: str, data: bytes, known: int) -> None:
    try:
        number = msgspec.json.decode(data)["format"]
    except (msgspec.DecodeError, KeyError, TypeError, RecursionError) as e:
        raise Corrupt(f"{name}: no format number: {e}") from e
    if type(number) is not int or number < 1:
        raise Corrupt(f"{name}: {number!r:.80} is not a format number")
    if number > known:
        raise Unsupported(f"{name}: record format {number}, at most {known} is known here", hint="upgrade ckptsync on this machine")
