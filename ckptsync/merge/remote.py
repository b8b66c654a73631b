"""Merging into a store: files are written one by one, and a merge that was killed is gone on with by the next one that is the same.

Nothing is kept on this machine.  The first file that is written, `RECORD`, says which merge it is; until it goes away, or says so, the model is
not whole.  What opens a model (its configuration, the index of several files) is written last.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace

import msgspec

from ckptsync.decoding import Decoder
from ckptsync.digest import digest
from ckptsync.errors import ConfigError, Corrupt, Exists, NotFound, StoreError
from ckptsync.formats import zstd_items
from ckptsync.merge.consolidate import Chunk, Engine, Finished, Merged, Progress, carry_out
from ckptsync.merge.copies import Compared
from ckptsync.merge.copying import Work
from ckptsync.merge.looking import Prepared
from ckptsync.merge.one_save import check_unchanged
from ckptsync.merge.pipeline import one_at_a_time
from ckptsync.merge.plan import FORMAT, FilePlan
from ckptsync.merge.units import units
from ckptsync.model import Extent, Files
from ckptsync.stores.contract import About, Store, read_all
from ckptsync.stores.opening import Rooted, has_root
from ckptsync.stores.pieces import Pieces, foreseen
from ckptsync.stores.stream import checked, read_ahead
from ckptsync.stores.tree import MERGING as RECORD
from ckptsync.stores.tree import MERGING_LIMIT


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``plan`` binds everything that the output's bytes are a function of.  ``files``: those of weights that have all been made."""

    format: int
    plan: str
    files: dict[str, Finished] = {}
    ended: bool = False


_DECODER = Decoder(_Record, "a record of a merge", MERGING_LIMIT)


def check_free(store: Store) -> None:
    """Raise ConfigError if something is there that no merge has begun.  The rest is seen when it is known what is to be written."""
    if not has_root(store):
        return
    if RECORD not in (names := {entry.name for entry in store.names("")}) and names:
        raise _taken(store, min(names))


def carry_out_into(
    store: Store, prepared: Prepared, progress: Progress | None = None, work: Work | None = None, engine: Engine | None = None
) -> Merged:
    """Write the model below ``store``.

    Raises ConfigError if anything else is there than what the same merge has left, Incomplete if a source changed meanwhile: then what was
    written stays, without what would open it.
    """
    work = work or Work()
    job = prepared.job
    record = _begun(store, prepared)
    sizes = {entry.name: entry.size for entry in store.names("")}
    ledger = _Ledger(store, prepared, record)
    notes: list[str] = []
    for plan in job.plans if not work.statistics else ():
        if plan.name in record.files and sizes.get(plan.name) == plan.size:
            if _is_whole(store, plan.name, plan.size, record.files[plan.name].digest):
                ledger.finished[plan.name] = record.files[plan.name]
            else:
                notes.append(f"{plan.name}: an earlier merge left other bytes than it recorded: made again")
    foresee(prepared.files, job.plans)
    write = _Writing(store, prepared, record.plan, sizes).write
    merged = carry_out(job, prepared.files, write, progress, work, ledger=ledger, engine=engine)
    if ledger.finished:
        notes.append(
            f"{len(ledger.finished)} of {len(job.plans)} files were there from an earlier merge that was ended: checked, not made again"
        )
    return replace(merged, notes=(*merged.notes, *notes, *ledger.end()))


def foresee(files: Files, plans: Iterable[FilePlan]) -> None:
    """Tell files that lie far away what will be read, and when."""
    if not isinstance(files, Pieces):
        return
    reads: list[tuple[Extent, int]] = []
    at = 0
    for plan in plans:
        compared = Compared(files, plan)
        for unit in units(plan):
            for read in unit.reads:
                told = zstd_items.parse_name(read.file)
                reads.append((told.item if told else Extent(read.file, read.start, read.size), at))
                twins = compared.replicas(read.file, read.start, read.start + read.size)
                reads += [(Extent(twin.file, twin.start, twin.size), at) for replica, _ in twins for twin in replica.reads]
            at += unit.stored
    files.foresee(foreseen(reads))


class _Ledger:
    """The record as it grows.  Several threads finish files."""

    def __init__(self, store: Store, prepared: Prepared, record: _Record) -> None:
        self._store, self._prepared, self._record = store, prepared, record
        self._lock = one_at_a_time()
        self.finished: dict[str, Finished] = {}

    def at_last_end(self) -> None:
        """As `Ledger` says."""
        check_unchanged(self._prepared.trees)

    def at_end(self, name: str, finished: Finished) -> None:
        """As `Ledger` says: recorded before it is there, so that it is never there without."""
        with self._lock:
            self._record = msgspec.structs.replace(self._record, files={**self._record.files, name: finished})
            _write(self._store, self._record)

    def end(self) -> tuple[str, ...]:
        """The model is whole: take the record away, or at least say so in it."""
        try:
            self._store.delete(RECORD)
        except StoreError:  # who may write may not always delete
            _write(self._store, msgspec.structs.replace(self._record, ended=True))
            return (f"{RECORD} stays beside the model, as deleting was refused: it is not needed any more",)
        return ()


def origin(plan: str, name: str) -> str:
    """Where the bytes of an output file come from, as `About` has it."""
    return f"merge {plan} {name}"


class _Writing:
    """Writes files with what is known of them beforehand."""

    def __init__(self, store: Store, prepared: Prepared, plan: str, there: Mapping[str, int]) -> None:
        self._store, self._plan, self._there = store, plan, there
        self._sizes = {file.name: file.size for file in prepared.job.plans}

    def write(self, name: str, chunks: Iterable[Chunk]) -> None:
        """As `Write` says."""
        if name in self._sizes:
            self._store.write(name, chunks, About(self._sizes[name], origin(self._plan, name)))
            return
        data = b"".join(map(bytes, chunks))
        if self._there.get(name) != len(data) or read_all(self._store, name) != data:
            self._store.write(name, [data], About(len(data), f"merge {self._plan} {name}"))


def _begun(store: Store, prepared: Prepared) -> _Record:
    """The record that the same merge has left, or a new one."""
    own = _Record(FORMAT, bound(prepared))
    if isinstance(store, Rooted):
        store.make_root()
    names = {entry.name for entry in store.names("")}
    if RECORD not in names:
        if names:
            raise _taken(store, min(names))
        try:
            store.create(RECORD, [msgspec.json.encode(own)])
        except Exists:
            pass  # the answer to an earlier try was lost, or the same merge began elsewhere: what is there says which
        else:
            return own
    found = _read(store)
    hint = "nothing is ever overwritten: name another destination, or remove what is there yourself"
    if (found.format, found.plan) != (own.format, own.plan):
        raise ConfigError(f"{store.url}: an unfinished merge of other sources, or with other options", hint=hint)
    if strangers := names - {RECORD} - _outputs(prepared):
        raise ConfigError(f"{store.url}: {min(strangers)} is not of the merge that has begun here", hint=hint)
    if found.ended and not _outputs(prepared) <= names:
        found = msgspec.structs.replace(found, ended=False)  # the record could not be deleted then; something is missing now
        _write(store, found)
    return found


def _outputs(prepared: Prepared) -> set[str]:
    names = [plan.name for plan in prepared.job.plans]
    stem = names[0].rpartition("-of-")[0].rpartition("-")[0]
    return {*names, *(name for name, _ in prepared.job.beside), f"{stem}.safetensors.index.json"}


def bound(prepared: Prepared) -> str:
    """A digest of everything that the output's bytes are a function of."""
    job = prepared.job
    told = {
        "format": FORMAT,
        "options": asdict(prepared.asked.options),
        "sources": sorted((tree.root, tree.state()) for tree in prepared.trees),
        "source": job.source,
        "files": [(plan.name, plan.size, digest(plan.header)) for plan in job.plans],
        "beside": [(name, place.sizes()[name]) for name, place in job.beside],
        "held": {name: digest(data) for name, data in job.held.items()},
    }
    return digest(json.dumps(told).encode())  # a path may be no text, of which only this writes something


def _read(store: Store) -> _Record:
    try:
        return _DECODER.decode(read_all(store, RECORD, _DECODER.limit), f"{store.url}/{RECORD}", "name another destination")
    except NotFound:
        raise _taken(store, RECORD) from None  # it was there a moment ago: another merge has just ended


def _write(store: Store, record: _Record) -> None:
    data = msgspec.json.encode(record)
    store.write(RECORD, [data], About(len(data)))


def _is_whole(store: Store, name: str, size: int, wanted: str) -> bool:
    try:
        for _ in checked(read_ahead(store, name, size), name, wanted):
            pass
    except Corrupt:
        return False
    return True


def _taken(store: Store, name: str) -> ConfigError:
    return ConfigError(f"{store.url}: exists, with {name} in it", hint="name a new place: nothing is ever overwritten")
