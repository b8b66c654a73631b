"""Records as bytes and in a store: encode, name, number, write, read and check them.

Several processes may write the same record, and anybody may damage one. So a record is canonical
JSON, and its name ends in its own digest: two writers of one record write one name, and a reader
sees damage. A record that cannot be read, that is newer than this program, or that would lead to
files outside its checkpoint becomes a `Fault`; the other records are read all the same.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import MappingProxyType

from ckptsync.digest import digest
from ckptsync.errors import CkptsyncError, Corrupt, Exists, NotFound, Unsupported, without_frames
from ckptsync.layouts.file_names import MOST_RANKS
from ckptsync.records.event_record import LONGEST_ERROR, LONGEST_NAME, MOST_METRICS, EventRecord
from ckptsync.records.manifest import FileEntry, Manifest
from ckptsync.records.model_record import ModelFile, ModelRecord
from ckptsync.records.report import Report, VerifyFinding
from ckptsync.records.save_decisions import Join, Keep, Tombstone, tombstones_in_force
from ckptsync.records.store_paths import (
    FORMAT,
    RecordKind,
    RecordName,
    checked_node,
    checked_own,
    checkpoint_of,
    has_records,
    node_file_name,
    own_prefixes,
    parse_record_name,
    records_prefix,
)
from ckptsync.records.weights_record import WeightsRecord
from ckptsync.safe_names import checked_path
from ckptsync.stores import progress_signs
from ckptsync.stores.contract import About, Store, read_all
from ckptsync.threads import ThreadPool
from ckptsync.typed_json import SHORT_RECORD, Decoder, format_number

_MISSING_HINT = (
    "its node writes it again if it still has the files; if you deleted it on purpose, delete the"
    " records that refer to it too"
)
AT_ONCE = 16
"""Records that are read at once: each costs a round trip, and no bandwidth."""
Record = Manifest | ModelRecord | WeightsRecord | Report | Tombstone | Keep | Join | EventRecord
_KINDS: dict[RecordKind, type[Record]] = {
    "manifest": Manifest,
    "model": ModelRecord,
    "weights": WeightsRecord,
    "report": Report,
    "tombstone": Tombstone,
    "keep": Keep,
    "join": Join,
    "event": EventRecord,
}
LIMITS = dict.fromkeys(_KINDS, SHORT_RECORD) | {
    "manifest": 32 << 20,
    "model": 32 << 20,
    "weights": 16 << 20,
}
"""Bytes that a record may have: a manifest of some 110,000 files, a model record of some 120,000
tensors, and the values of as many.  A reader needs at most fifteen times as many in memory.
"""
_DECODERS = {kind: Decoder(its, f"a {kind}", LIMITS[kind]) for kind, its in _KINDS.items()}
_TRAINER = 200  # characters: people read it
_DIGEST = re.compile(r"[0-9a-f]{64}")
_SMALLER = (
    "a checkpoint may have about 110,000 files a node, and 120,000 tensors: pack small files, or"
    " leave some out with worker.exclude"
)


def encode(record: Record) -> bytes:
    """Return a record as canonical JSON: sorted keys, no spaces, one final newline.

    Raise Unsupported if it is longer than `LIMITS` allows: no reader would read it.
    """
    text = json.dumps(asdict(record), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    data, kind = f"{text}\n".encode(), kind_of(record)
    if len(data) > LIMITS[kind]:
        raise Unsupported(
            f"{record.run}/{record.location}: its {kind} would have {len(data)} bytes, at most"
            f" {LIMITS[kind]} can be read",
            hint=_SMALLER,
        )
    return data


def kind_of(record: Record) -> RecordKind:
    """Return the kind of a record, the first word of its name in a store."""
    return next(kind for kind, record_type in _KINDS.items() if isinstance(record, record_type))


def record_name(record: Record, data: bytes) -> str:
    """Return a record's name in a store; it ends in 16 hex digits of the digest of ``data``."""
    node = record.node if isinstance(record, Manifest) else ""
    return str(
        RecordName(record.run, record.location, kind_of(record), node, record.n, digest(data)[:16])
    )


def decode(name: str, data: bytes) -> Record:
    """Return the record in ``data``, decoded as the kind that its ``name`` says.

    Raise Corrupt if the bytes do not match the digest in the name, are not such a record, belong
    under another name, or name something outside their checkpoint; also if ``name`` is no record's.
    Raise Unsupported if a newer program wrote them.
    """
    parsed = parse_record_name(name)
    if parsed is None or parsed.digest != digest(data)[:16]:
        raise Corrupt(f"{name}: checksum does not match the one in its name")
    number = format_number(data, name, f"a {parsed.kind}")
    if number > FORMAT:
        raise Unsupported(
            f"{name}: record format {number}, at most {FORMAT} is known here",
            hint="upgrade ckptsync on this machine",
        )
    record = _DECODERS[parsed.kind].decode(data, name)
    if record_name(record, data) != name:
        raise Corrupt(f"{name}: its contents belong under the name {record_name(record, data)}")
    try:
        _check(record)
    except Corrupt as e:
        raise Corrupt(f"{name}: {e}", hint=e.hint) from e
    return record


def is_made_anew(name: RecordName | None, error: CkptsyncError) -> bool:
    """Return whether a location can be used without this record, which cannot be read.

    It can if the record is damaged and of a kind that is written again (model, weights, report,
    event), that still protects its location (keep), or that then joins nothing (join). False for a
    manifest, a tombstone, a newer program's record, and without a ``name``.
    """
    return (
        isinstance(error, Corrupt)
        and name is not None
        and name.kind in ("model", "weights", "report", "keep", "join", "event")
    )


def create_record(store: Store, record: Record) -> tuple[str, bytes]:
    """Write a record unless its bytes are stored already; return its name and bytes.

    Other bytes under that name are damaged, and are overwritten. Raise StoreError, Unsupported if
    the record is too long, and Corrupt if its run or location is a name that no reader accepts.
    """
    data = encode(record)
    name = checked_own(record_name(record, data), own_prefixes(record.run, record.location))
    try:
        # The name is of these bytes alone: so it lets a store go on with what a killed try left.
        store.create(name, [data], About(len(data), name))
    except Exists:
        stored_data = None
        with contextlib.suppress(NotFound):  # deleted meanwhile
            stored_data = read_all(store, name)
        if stored_data != data:  # damaged: its name has the digest of these bytes
            store.write(name, [data])
    return name, data


def append_record(store: Store, record: Record) -> str:
    """List a location's records; write one with the next free number of its kind; return its name.

    ``record`` is no manifest; its ``n`` is ignored. Raise as `create_record` does. Two writers at
    once may choose the same number; both records are then stored.
    """
    names = [entry.name for entry in store.names(records_prefix(record.run, record.location))]
    number = next_number(names, record.location, kind_of(record))
    return create_record(store, replace(record, n=number))[0]


def next_number(names: Iterable[str], location: str, kind: RecordKind, node: str = "") -> int:
    """Return 1 + the highest number among ``names`` of this location, kind and node; 0 if none."""
    parsed = (parse_record_name(name) for name in names)
    numbers = (p.n for p in parsed if p and (p.location, p.kind, p.node) == (location, kind, node))
    return max(numbers, default=-1) + 1


class Missing(Corrupt):
    """A record that other records name, and that the store does not have."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A record that cannot be read, and why.

    `is_made_anew` says whether its location can be used all the same.
    """

    name: str
    record: RecordName
    error: CkptsyncError

    def __post_init__(self) -> None:
        """Drop the frames of the error's traceback, which hold what was read."""
        object.__setattr__(self, "error", without_frames(self.error))

    @property
    def text(self) -> str:
        """Return ``<name>: <error>``; a name at the beginning of the error is not repeated."""
        return f"{self.name}: {str(self.error).removeprefix(f'{self.name}: ')}"

    @property
    def run(self) -> str:
        """Return the run that the record's name says."""
        return self.record.run

    @property
    def location(self) -> str:
        """Return the location that the record's name says."""
        return self.record.location

    @property
    def finding(self) -> VerifyFinding:
        """Return the fault as a finding: `missing`, `digest` (damage), or a `note`.

        It is a note if a newer program wrote the record, and for reports, events and weights
        records: the next report replaces a report, and nothing rests on the others.
        """
        name = self.name.removeprefix(f"{self.record.run}/")
        if isinstance(self.error, Missing):
            return VerifyFinding("missing", name, str(self.error))
        is_damage = isinstance(self.error, Corrupt) and self.record.kind not in (
            "report",
            "weights",
            "event",
        )
        return VerifyFinding("digest" if is_damage else "note", name, str(self.error))


def hidden_by(faults: Iterable[Fault]) -> Collection[tuple[str, str]]:
    """Return the (run, location) pairs that an unreadable record (not `is_made_anew`) hides."""
    return {(f.run, f.location) for f in faults if not is_made_anew(f.record, f.error)}


def read_record(store: Store, parsed: RecordName, size: int | None = None) -> Record:
    """Return one record, from at most as many bytes as its kind may have (`LIMITS`).

    ``size`` is its length as listed; without it the store is asked. Raise StoreError, NotFound if
    it was deleted, and Corrupt or Unsupported as `decode` does; Corrupt also if it is too long.
    """
    name, limit = str(parsed), LIMITS[parsed.kind]
    size = store.size(name) if size is None else size
    if size > limit:
        raise Corrupt(f"{name}: {size} bytes, at most {limit} expected of a {parsed.kind}")
    out = bytearray(size)
    store.read_into(name, 0, memoryview(out))
    return decode(name, bytes(out))


def read_records(
    store: Store,
    names: Iterable[RecordName],
    sizes: Mapping[str, int] = MappingProxyType({}),
    cache: Mapping[str, Record] = MappingProxyType({}),
    threads: int = 1,
) -> tuple[dict[str, Record], tuple[Fault, ...]]:
    """Return the records by name, and a fault for each that cannot be read.

    A record that was deleted since it was listed is in neither. Raise StoreError.

    ``sizes``: the lengths of records as listed; the store is asked for others. ``cache``: records
    that were read before, which are not read again; it is not changed. ``threads``: how many are
    read at once, by a pool of threads that ends with the call.
    """

    def read_one(name: RecordName) -> Record | Fault | None:
        """Return a record, its fault, or None if it was deleted since it was listed."""
        if (cached := cache.get(str(name))) is not None:
            return cached
        try:
            return read_record(store, name, sizes.get(str(name)))
        except NotFound:
            return None  # removed since it was listed
        except (Corrupt, Unsupported) as e:
            return Fault(str(name), name, e)

    names = list(names)
    if threads > 1 and len(names) > 1:
        with ThreadPool(min(threads, len(names)), "ckptsync-record") as pool:
            calls = [progress_signs.keep_context(partial(read_one, name)) for name in names]
            results = list(pool.map(lambda call: call(), calls))
    else:
        results = [read_one(name) for name in names]
    records = {
        str(name): result
        for name, result in zip(names, results, strict=True)
        if result is not None and not isinstance(result, Fault)
    }
    return records, tuple(result for result in results if isinstance(result, Fault))


def find_missing_manifests(
    records: Mapping[str, Record], listed: Collection[str], size: Callable[[str], int]
) -> dict[str, Missing]:
    """Return an error for each manifest that a model record or report names and the store has not.

    No record is deleted while its save is kept, so such a manifest was lost. Manifests that were
    superseded, or whose save a tombstone gives up, may be missing. Raise StoreError.

    ``records``: all readable records of some checkpoints, in all their locations; ``listed``: the
    names of all records, also of those that cannot be read. ``size`` returns the bytes of a stored
    name, or raises NotFound; it is called for each name that is not listed, since a listing shows
    no single moment.
    """
    referrers: dict[str, str] = {}
    for referrer, record in sorted(records.items(), reverse=True):
        if isinstance(record, ModelRecord | Report):
            prefix = f"{referrer.rpartition('/')[0]}/manifest-"
            referrers.update(
                (name, referrer)
                for name in record.manifests
                if name not in listed and name.startswith(prefix)
            )
    missing: dict[str, Missing] = {}
    excused = _excused(records) if referrers else frozenset()
    for name, referrer in sorted(referrers.items()):
        parsed = parse_record_name(name)
        if parsed is None or parsed.kind != "manifest":
            continue
        checkpoint = parsed.run, checkpoint_of(parsed.location)
        if not excused.isdisjoint(
            {(*checkpoint, name), (*checkpoint, parsed.node), (*checkpoint, parsed.node, name)}
        ):
            continue
        try:
            size(name)
        except NotFound:
            missing[name] = Missing(
                f"{name}: missing, although {referrer.rpartition('/')[2]} refers to it",
                hint=_MISSING_HINT,
            )
    return missing


def _excused(records: Mapping[str, Record]) -> frozenset[tuple[str, ...]]:
    """Return which manifests may be missing: they were superseded, or their save is given up.

    Each entry is (run, checkpoint) and then a manifest's name, a node, or a node and a name. Only
    records of its own checkpoint excuse a manifest, so the answer does not depend on which other
    checkpoints were read.
    """
    locations: dict[tuple[str, str], dict[str, Tombstone]] = {}
    excused: set[tuple[str, ...]] = set()
    for name, record in records.items():
        if isinstance(record, Tombstone):
            locations.setdefault((record.run, record.location), {})[name] = record
        elif isinstance(record, Manifest):
            node_part = record.run, record.checkpoint, record.node
            excused.update((*node_part, replaced) for replaced in record.supersedes)
    for stones in locations.values():
        for stone in tombstones_in_force(stones).values():
            if stone.scope == "location":
                given_up = (*stone.manifests, *stone.ended)
                excused.update(
                    (stone.run, stone.checkpoint, name_or_node) for name_or_node in given_up
                )
    return frozenset(excused)


def _check(record: Record) -> None:
    """Raise Corrupt for values that the types allow and that no writer of ours writes.

    Paths, record names, nodes, numbers and byte ranges are checked: whatever becomes a path or an
    index later is checked here, once.
    """
    own_prefixes(record.run, record.location)
    if record.location != record.checkpoint and not record.location.startswith(
        f"{record.checkpoint}~"
    ):
        raise Corrupt(f"{record.location!r}: not a location of {record.checkpoint!r}")
    if isinstance(record, Manifest):
        _check_manifest(record)
    elif isinstance(record, EventRecord):
        _check_event(record)
    elif not isinstance(record, Keep | WeightsRecord):
        _check_names(record.manifests)
    if isinstance(record, Tombstone):
        for node in record.ended:
            checked_node(node)
    if isinstance(record, ModelRecord):
        check_files(record.files)
        sizes = {f.path: f.size for f in record.files}
        for tensor in record.tensors:
            end = tensor.start + tensor.size
            if not 0 <= tensor.start <= end <= sizes.get(tensor.file, -1):
                raise Corrupt(
                    f"{tensor.name}: bytes {tensor.start} to {end} are not in {tensor.file!r:.200}"
                )


def _check_manifest(manifest: Manifest) -> None:
    """Raise Corrupt if a manifest's paths, names, ranks, world size, times or trainer cannot be.

    ``stored_as`` may only be the name of `node_file_name`.
    """
    checked_node(manifest.node)
    _check_names(manifest.supersedes)
    check_files(manifest.files)
    for file in manifest.files:
        if file.stored_as not in (
            "",
            node_file_name(manifest.run, manifest.location, manifest.node, file.path),
        ):
            raise Corrupt(
                f"{file.path}: stored as {file.stored_as!r:.200}, which is no name for a file of"
                f" {manifest.node}"
            )
    for path in (*manifest.demands.model, *manifest.demands.resume):
        checked_path(path)
    if (
        not all(0 <= rank < MOST_RANKS for rank in manifest.ranks)
        or not 0 <= (manifest.demands.world or 0) <= MOST_RANKS
    ):
        raise Corrupt(
            f"{manifest.node}: ranks {manifest.ranks!r:.80} or world size"
            f" {manifest.demands.world!r:.80} out of range"
        )
    if manifest.started > manifest.ended:
        raise Corrupt(
            f"{manifest.node}: its files begin at {manifest.started} and end at {manifest.ended}"
        )
    if len(manifest.trainer) > _TRAINER or not manifest.trainer.isprintable():
        raise Corrupt(f"{manifest.trainer!r:.80}: not what names a trainer")


def _check_event(record: EventRecord) -> None:
    """Raise Corrupt for too many or infinite metrics, and for texts that are too long."""
    texts = (record.name, record.definition, record.event, record.of, *record.metrics)
    if len(record.metrics) > MOST_METRICS or not all(map(math.isfinite, record.metrics.values())):
        raise Corrupt(f"{record.name!r:.80}: more than {MOST_METRICS} metrics, or no numbers")
    if len(record.error) > LONGEST_ERROR or max(map(len, texts)) > 2 * LONGEST_NAME:
        raise Corrupt(f"{record.name!r:.80}: a text of an event is too long")


def _check_names(names: Iterable[str]) -> None:
    """Raise Corrupt for a name that is not a manifest's."""
    for name in names:
        parsed = parse_record_name(name)
        if parsed is None or parsed.kind != "manifest":
            raise Corrupt(f"{name!r}: not the name of a manifest")


def check_files(files: Iterable[FileEntry | ModelFile]) -> None:
    """Raise Corrupt for a repeated or unsafe path, one among records, or a bad size or digest.

    Of a `FileEntry` also if it has fewer or more blocks than its size needs.
    """
    paths: set[str] = set()
    for file in files:
        if checked_path(file.path) in paths:
            raise Corrupt(f"{file.path}: named twice")
        if has_records(file.path):
            raise Corrupt(f"{file.path}: would lie among a run's records")
        paths.add(file.path)
        if file.size < 0 or not _DIGEST.fullmatch(file.digest):
            raise Corrupt(
                f"{file.path}: invalid size or digest: {file.size} bytes, {file.digest!r:.80}"
            )
        if isinstance(file, FileEntry) and (
            file.block_size < 1 or len(file.blocks) != -(-file.size // file.block_size)
        ):
            raise Corrupt(
                f"{file.path}: {len(file.blocks)} blocks of {file.block_size} bytes do not make"
                f" {file.size} bytes"
            )
