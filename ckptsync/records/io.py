"""Records as bytes, and in a store: encode, name, create, number, read and check them.

A record is canonical JSON and its name ends in its own digest. So two writers of one record write
the same name, and whoever finds it there already is done. A reader refuses a record that is newer
than this program, or that would lead to files outside its checkpoint; what is wrong with one record
is a `Fault`, and the others are read all the same.
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
    """Return canonical JSON: sorted keys, no spaces, one final newline.

    Raises Unsupported for what no reader would read.
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
    """Return the kind of a record, as its name has it."""
    return next(kind for kind, its in _KINDS.items() if isinstance(record, its))


def record_name(record: Record, data: bytes) -> str:
    """Return the name that a record is stored under.

    It ends in the first 16 hex digits of the record's digest.
    """
    node = record.node if isinstance(record, Manifest) else ""
    return str(
        RecordName(record.run, record.location, kind_of(record), node, record.n, digest(data)[:16])
    )


def decode(name: str, data: bytes) -> Record:
    """Return the record that ``data`` is, of the kind that its ``name`` says.

    Raises Corrupt, or Unsupported if a newer program wrote it.
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
    """Return whether a location is usable without a record that cannot be read.

    Damaged model records and reports are written again; a damaged keep still protects its location;
    a damaged join joins nothing; a damaged weights record only leaves weights without statistics;
    what a damaged event record says was done is done again.
    """
    return (
        isinstance(error, Corrupt)
        and name is not None
        and name.kind in ("model", "weights", "report", "keep", "join", "event")
    )


def create_record(store: Store, record: Record) -> tuple[str, bytes]:
    """Write a record, which may be there already; return its name and bytes.

    Raises StoreError, and Corrupt for a run or location that no reader would take.
    """
    data = encode(record)
    name = checked_own(record_name(record, data), own_prefixes(record.run, record.location))
    try:
        # The name is of these bytes alone: so it lets a store go on with what a killed try left.
        store.create(name, [data], About(len(data), name))
    except Exists:
        there = None
        with contextlib.suppress(NotFound):  # deleted meanwhile
            there = read_all(store, name)
        if there != data:  # damaged: its name has the digest of these bytes
            store.write(name, [data])
    return name, data


def append_record(store: Store, record: Record) -> str:
    """Write a record with the next number of its kind in its location; return its name.

    Raises StoreError.
    """
    names = [entry.name for entry in store.names(records_prefix(record.run, record.location))]
    number = next_number(names, record.location, kind_of(record))
    return create_record(store, replace(record, n=number))[0]


def next_number(names: Iterable[str], location: str, kind: RecordKind, node: str = "") -> int:
    """Return the number of the next record of a kind in a location, and of a node's next manifest.

    ``names``: of what is there.
    """
    parsed = (parse_record_name(name) for name in names)
    taken = (p.n for p in parsed if p and (p.location, p.kind, p.node) == (location, kind, node))
    return max(taken, default=-1) + 1


class Missing(Corrupt):
    """A record that others name is not there."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A record that cannot be read.

    A damaged model record or report hides nothing: its location is then only not consolidated, or
    not verified.
    """

    name: str
    record: RecordName
    error: CkptsyncError

    def __post_init__(self) -> None:
        """Keep the error, and not what it was read of."""
        object.__setattr__(self, "error", without_frames(self.error))

    @property
    def text(self) -> str:
        """Return the record's name, once, and what is wrong with it."""
        return f"{self.name}: {str(self.error).removeprefix(f'{self.name}: ')}"

    @property
    def run(self) -> str:
        """Return the run of its location."""
        return self.record.run

    @property
    def location(self) -> str:
        """Return its location, as its name says."""
        return self.record.location

    @property
    def finding(self) -> VerifyFinding:
        """Return the fault as a finding: damage, unless it is a newer program's.

        Of reports, events and statistics neither is: the next report replaces a report, and
        nothing rests on a weights record.
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
    """Return the (run, location) pairs that an unreadable record hides."""
    return {(f.run, f.location) for f in faults if not is_made_anew(f.record, f.error)}


def read_record(store: Store, parsed: RecordName, size: int | None = None) -> Record:
    """Return one record.

    Raise NotFound and StoreError, and Corrupt or Unsupported for what is wrong with the record
    itself.

    ``size``: as listed, where it is known. No more is fetched than a record of its kind may have.
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
    """Return those that are still there, by name, and those that cannot be read.

    Raises StoreError.

    ``sizes``: as listed; of others the store returns them. ``cache``: records that were read
    before, and need not be read again.
    """

    def read(name: RecordName) -> Record | Fault | None:
        if (known := cache.get(str(name))) is not None:
            return known
        try:
            return read_record(store, name, sizes.get(str(name)))
        except NotFound:
            return None  # removed since it was listed
        except (Corrupt, Unsupported) as e:
            return Fault(str(name), name, e)

    names = list(names)
    if threads > 1 and len(names) > 1:
        with ThreadPool(min(threads, len(names)), "ckptsync-record") as pool:
            works = [progress_signs.keep_context(partial(read, name)) for name in names]
            found = list(pool.map(lambda work: work(), works))
    else:
        found = [read(name) for name in names]
    records = {
        str(name): one
        for name, one in zip(names, found, strict=True)
        if one is not None and not isinstance(one, Fault)
    }
    return records, tuple(one for one in found if isinstance(one, Fault))


def find_missing_manifests(
    records: Mapping[str, Record], listed: Collection[str], size: Callable[[str], int]
) -> dict[str, Missing]:
    """Return the names of manifests that are gone, each with the record that names it.

    No record is deleted while its save is kept, so somebody, or a file system, lost what a model
    record or a report names.  Without this, nobody would miss a location whose manifests are all
    gone.

    ``records``: all that can be read of some checkpoints, in all their locations; ``listed``: the
    names of all, also of those that cannot be read.  ``size`` returns a stored name's bytes, or
    raises NotFound: a listing is no instant, and a missing name is asked for.
    """
    named: dict[str, str] = {}
    for by, record in sorted(records.items(), reverse=True):
        if isinstance(record, ModelRecord | Report):
            here = f"{by.rpartition('/')[0]}/manifest-"
            named.update(
                (name, by)
                for name in record.manifests
                if name not in listed and name.startswith(here)
            )
    found: dict[str, Missing] = {}
    excused = _excused(records) if named else frozenset()
    for name, by in sorted(named.items()):
        parsed = parse_record_name(name)
        if parsed is None or parsed.kind != "manifest":
            continue
        of = parsed.run, checkpoint_of(parsed.location)
        if not excused.isdisjoint({(*of, name), (*of, parsed.node), (*of, parsed.node, name)}):
            continue
        try:
            size(name)
        except NotFound:
            found[name] = Missing(
                f"{name}: missing, although {by.rpartition('/')[2]} refers to it",
                hint=_MISSING_HINT,
            )
    return found


def _excused(records: Mapping[str, Record]) -> frozenset[tuple[str, ...]]:
    """Return the manifests that may be missing: they were replaced, or their save is given up.

    Each is a run and a checkpoint with the manifest's name, its node, or both.  Only records of its
    own checkpoint excuse a manifest: what is said of a checkpoint must not change with how many
    others are read beside it.
    """
    locations: dict[tuple[str, str], dict[str, Tombstone]] = {}
    found: set[tuple[str, ...]] = set()
    for name, record in records.items():
        if isinstance(record, Tombstone):
            locations.setdefault((record.run, record.location), {})[name] = record
        elif isinstance(record, Manifest):
            here = record.run, record.checkpoint, record.node
            found.update((*here, replaced) for replaced in record.supersedes)
    for stones in locations.values():
        for stone in tombstones_in_force(stones).values():
            if stone.scope == "location":
                given_up = (*stone.manifests, *stone.ended)
                found.update((stone.run, stone.checkpoint, one) for one in given_up)
    return frozenset(found)


def _check(record: Record) -> None:
    """Raise Corrupt for what types do not exclude.

    Everything that others join to a path, or index by, is checked here, once.
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
    texts = (record.name, record.definition, record.event, record.of, *record.metrics)
    if len(record.metrics) > MOST_METRICS or not all(map(math.isfinite, record.metrics.values())):
        raise Corrupt(f"{record.name!r:.80}: more than {MOST_METRICS} metrics, or no numbers")
    if len(record.error) > LONGEST_ERROR or max(map(len, texts)) > 2 * LONGEST_NAME:
        raise Corrupt(f"{record.name!r:.80}: a text of an event is too long")


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
