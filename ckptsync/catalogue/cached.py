"""The catalogue of a store: records are listed each time, and read only where the listing changed.

Reading all records of a large store takes minutes, but a record never changes under its name. So
what was made of a checkpoint's records is cached by a digest of their listing. Manifests of one
checkpoint's name decide together over all of its locations (`records.manifest_groups`), so a
checkpoint with all its locations is read, and cached, at once. Files are listed only of locations
that wait for some: that finished files stay is the verifier's to prove. So nothing that deletes or
overwrites may rest on a cached summary; that reads `uncached`.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections import deque
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, fields, replace
from functools import partial
from operator import attrgetter
from pathlib import Path

import msgspec

from ckptsync import __version__
from ckptsync.catalogue.location_summary import (
    Catalogue,
    DamagedFile,
    Gap,
    Handled,
    Proven,
    Summary,
    explain_missing,
    summarize,
    summarize_begun,
)
from ckptsync.catalogue.uncached import read_checkpoint_records
from ckptsync.catalogue.unnamed_files import with_unnamed
from ckptsync.digest import digest
from ckptsync.gc_pause import paused
from ckptsync.mounts import mount_of
from ckptsync.records.io import Fault, Record, hidden_by
from ckptsync.records.location_status import (
    LocationState,
    Status,
    list_locations,
    reading_order,
    record_names,
)
from ckptsync.records.manifest_groups import Sibling
from ckptsync.records.report import LEVELS
from ckptsync.records.store_paths import checkpoint_of, consolidated_prefix, senders
from ckptsync.records.weights_record import GroupValues, ModelValues, WeightsFinding
from ckptsync.safe_names import RECORDS
from ckptsync.stores.contract import Entry, Store, cuts_of, join_slices, slices
from ckptsync.stores.opening import directory_of
from ckptsync.threads import ThreadPool

AT_ONCE = 8  # requests: a distant server is waited for
Name = tuple[str, str]
"""A run and a checkpoint's name."""
UNLISTED: frozenset[Status] = frozenset({"VERIFIED", "RETIRED", "CONFLICT"})
"""Statuses of locations whose files need not be listed: the verifier reads them, if anybody."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What was read of a checkpoint's locations.

    ``key``: the `listing_key` of its records. ``open_prefixes``: those of the locations that wait
    for files or for their repair. ``files_key``: the `listing_key` of the files below them.
    ``newest``: the newest mtime of files when they were listed.
    """

    key: str
    summaries: tuple[Summary, ...]
    open_prefixes: tuple[str, ...] = ()
    files_key: str = ""
    newest: float = 0.0


@dataclass(slots=True)
class CachedRun:
    """What was read of a run: its checkpoints by name, in reading order.

    ``key``: of the listing of its records, empty while a checkpoint could not be cached. ``cuts``:
    names at which its next listing is cut into slices.
    """

    key: str = ""
    cuts: tuple[str, ...] = ()
    checkpoints: dict[str, Checkpoint] = field(default_factory=dict)


@dataclass
class Cache:
    """The summaries of one store that were read before.

    Records never change under a name; losing the cache costs reading again. It is saved for the
    next process in a file of this user, which may be deleted at any time. A run in that file counts
    only if it is whole and of this version, and is decoded when it is needed. ``is_new``: something
    was added since it was loaded or saved.
    """

    runs: dict[str, CachedRun] = field(default_factory=dict)
    is_new: bool = field(default=False, compare=False)
    _saved: dict[str, _Place] = field(default_factory=dict, compare=False)
    _descriptor: int = field(default=-1, compare=False)

    @classmethod
    def load(cls, url: str) -> Cache:
        """Return the saved cache of a store, with its file open until the cache is garbage.

        It is empty, without an error, if the file is missing, damaged, a link, or of another
        version. Only the index is read now; `run` reads each run.
        """
        try:
            descriptor = os.open(cache_path(url), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except (OSError, RuntimeError):
            return cls()
        cache = cls(_descriptor=descriptor)
        weakref.finalize(cache, os.close, descriptor)
        try:
            end = os.fstat(descriptor).st_size - _TAIL
            tail = os.pread(descriptor, _TAIL, end)
            size = int(tail[64:])
            index = os.pread(descriptor, size, end - size)
            is_whole = digest(index).encode() == tail[:64]
            if is_whole and os.pread(descriptor, len(_HEAD), 0) == _HEAD:
                content = _CONTENT.decode(index)
                cache._saved = content.runs if content.url == url else {}
        except (OSError, *_UNDECODABLE):
            return cache
        return cache

    def run(self, name: str) -> CachedRun:
        """Return the `CachedRun` of a run in ``runs``; a new empty one is added if there is none.

        A run of the saved file is read and decoded at its first use; a damaged one counts as new.
        """
        if place := self._saved.pop(name, None):
            with contextlib.suppress(OSError, *_UNDECODABLE):
                body = os.pread(self._descriptor, place.size, place.start)
                if digest(body) == place.digest:
                    self.runs[name] = _RUN.decode(body)
                    _share_values(self.runs[name])
        return self.runs.setdefault(name, CachedRun())

    def save(self, url: str) -> None:
        """Write all runs to the store's file, by a rename, if ``is_new``; then clear ``is_new``.

        Saved runs are decoded first. If the disk is full, or the user's home is missing or
        read-only, no file is written, ``is_new`` stays, and nothing is raised or logged.
        """
        if not self.is_new:
            return
        try:
            target = cache_path(url)
        except RuntimeError:
            return  # a user without a home
        self.unpack()
        draft = target.with_name(f"{target.name}.{os.getpid()}.part")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        places: dict[str, _Place] = {}
        try:
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with os.fdopen(os.open(draft, flags, 0o600), "wb") as file:
                file.write(_HEAD)
                for name, run in self.runs.items():
                    body = msgspec.msgpack.encode(run)
                    places[name] = _Place(file.tell(), len(body), digest(body))
                    file.write(body)
                index = msgspec.msgpack.encode(_Content(url, places))
                file.write(index + digest(index).encode() + b"%016d" % len(index))
            draft.replace(target)
            self.is_new = False
        except OSError:
            with contextlib.suppress(OSError):
                draft.unlink()

    def unpack(self) -> None:
        """Read and decode into ``runs`` all runs of the saved file that are not decoded yet."""
        for name in [*self._saved]:
            self.run(name)

    def forget_others(self, names: Collection[str]) -> None:
        """Remove all runs but those of these ``names``; set ``is_new`` if there were any."""
        for name in {**self._saved, **self.runs}.keys() - names:
            self._saved.pop(name, None)
            self.runs.pop(name, None)
            self.is_new = True


def _share_values(run: CachedRun) -> None:
    """Replace equal values of a run's frozen summaries by one object: a third of their memory."""
    values: dict[object, object] = {}
    for checkpoint in run.checkpoints.values():
        for summary in checkpoint.summaries:
            for name in _OFTEN_EQUAL:
                value = getattr(summary, name)
                object.__setattr__(summary, name, values.setdefault(value, value))


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a run lies in the file, and the digest of its bytes."""

    start: int
    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class _Content:
    """The index of the cache's file: the store, and where each run lies."""

    url: str
    runs: dict[str, _Place]


_SHAPE = repr(
    [
        (kind.__name__, f.name, str(f.type))
        for kind in (
            *(CachedRun, Checkpoint, Summary, Proven, DamagedFile, Gap, Sibling, Handled),
            *(ModelValues, GroupValues, WeightsFinding),
        )
        for f in fields(kind)
    ]
)
_HEAD = f"ckptsync catalogue {__version__} {digest(f'{LEVELS} {_SHAPE}'.encode())[:16]}\n".encode()
_OFTEN_EQUAL = ("run", "checkpoint", "location", "nodes", "ranks", "lacks", "to_open")
_TAIL = 64 + 16
"""Bytes at the end of the file: the digest of the index before them, and its size."""
_UNDECODABLE = (ValueError, RecursionError, MemoryError)  # of another program of the same version
_CONTENT = msgspec.msgpack.Decoder(_Content)
_RUN = msgspec.msgpack.Decoder(CachedRun)


def cache_path(url: str) -> Path:
    """Return the path of a store's cache file, which need not exist.

    It is below the first of ``CACHE_DIRECTORY`` (as systemd sets it), ``XDG_CACHE_HOME`` and
    ``~/.cache`` that is set. Raise RuntimeError if neither variable is, and the user has no home.
    """
    systemd_dir = os.environ.get("CACHE_DIRECTORY", "").partition(":")[0]
    base = (
        Path(systemd_dir)
        if systemd_dir
        else Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "ckptsync"
    )
    return base / f"catalogue-{digest(url.encode())[:16]}"


@dataclass(slots=True)
class _Listing:
    """What the listing of some runs' records shows.

    ``keys``: run → key of its records.  ``changed``: checkpoints to read, with their records.
    ``sending``: see `senders`.  ``clock``: the newest mtime.
    """

    keys: dict[str, str] = field(default_factory=dict)
    changed: dict[Name, list[Entry]] = field(default_factory=dict)
    sending: dict[Name, dict[str, float]] = field(default_factory=dict)
    clock: float = 0.0


def read_catalogue(
    store: Store, cache: Cache | None = None, run: str = "", now: float | None = None
) -> Catalogue:
    """Return the catalogue of ``run``, or of the whole store if it is empty.

    All records are listed; changed checkpoints are read, in threads unless the store is a local
    disk. What is read is added to ``cache``, also before an error, so that the next call continues.
    Reading the whole store removes runs from it that are gone. The caller saves it. Raise
    StoreError; a record that cannot be read is a `Fault`. ``now``: seconds on the store's clock
    (default: this machine's), by which a node that no longer announces its upload has stopped.
    """
    cache = cache or Cache()
    runs = [run] if run else sorted(name for name in store.dirs("") if name != RECORDS)
    pool = ThreadPool(1 if _is_on_local_disk(store) else AT_ONCE, "catalogue")
    try:
        with paused():
            listing = _list_store(store, runs, cache, pool, time.time() if now is None else now)
        unreadable, faults = _renew_changed(store, listing, cache, pool)
    finally:
        pool.shutdown(cancel_futures=True)  # after an error only running requests end
    if not run:
        cache.forget_others(runs)
    checkpoints: list[Checkpoint] = []
    for listed_run, key in listing.keys.items():
        uncached = {name: c for (of_run, name), c in unreadable.items() if of_run == listed_run}
        checkpoints += _finish_run(cache, listed_run, key, uncached)
    summaries = [s for checkpoint in checkpoints for s in checkpoint.summaries]
    faults.sort(key=lambda fault: fault.name)
    uploading = _mark_uploading(summaries, listing.sending)
    return Catalogue(
        tuple(with_unnamed(store, uploading, listing.sending)),
        tuple(faults),
        max([listing.clock, *(checkpoint.newest for checkpoint in checkpoints)]),
        _summarize_begun_uploads(store, listing.sending, summaries, faults),
    )


def _list_store(
    store: Store, runs: Sequence[str], cache: Cache, pool: Executor, now: float
) -> _Listing:
    """List the records of runs; return their keys and the checkpoints to read; raise StoreError.

    In ``cache``, a changed run loses its key and its deleted checkpoints (then ``is_new`` is set),
    and each run gets the cuts of its next listing. ``now``: see `senders`.
    """
    listing = _Listing()
    for run, entries in _list_runs(store, runs, cache, pool):
        newest = max(map(attrgetter("mtime"), entries), default=0.0)
        listing.clock = max(listing.clock, newest)
        records = [e for e in entries if "/sending/" not in e.name]
        if len(records) < len(entries):
            listing.sending.update(senders(entries, now))
        listing.keys[run] = listing_key(records)
        listing.changed |= _list_changed(cache, run, entries, listing.keys[run], listing.sending)
    return listing


def _renew_changed(
    store: Store, listing: _Listing, cache: Cache, pool: Executor
) -> tuple[dict[Name, Checkpoint], list[Fault]]:
    """Read the changed checkpoints into ``cache``; return those that it may not hold, and faults.

    Sets ``cache.is_new`` if a checkpoint differs from the cached one. One that a node is sending is
    read even if its records did not change. Raise StoreError; what was read before it stays in the
    cache.
    """

    def renew(name: Name) -> tuple[Checkpoint, tuple[Fault, ...], bool]:
        """Return a changed checkpoint, by its cached state unless a node is sending it."""
        # files of an upload come without a record
        is_sending = name in listing.sending
        cached = None if is_sending else cache.run(name[0]).checkpoints.get(name[1])
        return _renew_checkpoint(store, listing.changed[name], cached)

    unreadable: dict[Name, Checkpoint] = {}
    faults: list[Fault] = []
    renewed = pool.map(renew, listing.changed)
    for name, (checkpoint, own_faults, is_final) in zip(listing.changed, renewed, strict=True):
        checkpoints = cache.run(name[0]).checkpoints
        if not is_final:
            unreadable[name] = checkpoint
        elif checkpoint is not checkpoints.get(name[1]):
            checkpoints[name[1]], cache.is_new = checkpoint, True
        faults += own_faults
    return unreadable, faults


def _mark_uploading(
    summaries: Sequence[Summary], sending: Mapping[Name, Mapping[str, float]]
) -> list[Summary]:
    """Return the summaries in their order, INCOMPLETE ones with what they lack (`explain_missing`).

    Those that a node is sending become UPLOADING, with the nodes in ``uploading``.
    """
    return [
        replace(s, status="UPLOADING", uploading=tuple(sorted(sending[s.run, s.checkpoint])))
        if s.status == "INCOMPLETE" and (s.run, s.checkpoint) in sending
        else s
        for s in explain_missing(summaries)
    ]


def _summarize_begun_uploads(
    store: Store,
    sending: Mapping[Name, Mapping[str, float]],
    summaries: Iterable[Summary],
    faults: Iterable[Fault],
) -> tuple[Summary, ...]:
    """Return a summary of each checkpoint that nodes send and that has no summary and no fault.

    Lists the files of each. Raise StoreError.
    """
    described = {(f.run, checkpoint_of(f.location)) for f in faults}
    described |= {(s.run, s.checkpoint) for s in summaries if (s.run, s.checkpoint) in sending}
    return tuple(
        summarize_begun(*name, sending[name], store.names("/".join((*name, ""))))
        for name in sorted(sending.keys() - described)
    )


def _is_on_local_disk(store: Store) -> bool:
    """Return whether a store is a directory that is not mounted from a server.

    Threads do not make its listing faster.
    """
    directory = directory_of(store)
    return directory is not None and not mount_of(directory).is_remote


def _list_runs(
    store: Store, runs: Sequence[str], cache: Cache, pool: Executor
) -> Iterator[tuple[str, list[Entry]]]:
    """Yield each run with the entries below its records, in the order of ``runs``.

    At most about `2 * AT_ONCE` runs are listed ahead in ``pool``, a long one in slices. The cuts of
    each run's next listing are noted in ``cache``; a run without entries keeps its own. Raise
    StoreError.
    """
    pending: deque[tuple[str, list[Future[list[Entry]]]]] = deque()

    def next_run() -> tuple[str, list[Entry]]:
        """Return the first pending run with its entries, once all its slices are listed."""
        run, parts = pending.popleft()
        entries = join_slices(part.result() for part in parts)
        if entries:
            cache.run(run).cuts = cuts_of(entries)
        return run, entries

    for run in runs:
        cuts = cache.run(run).cuts
        pending.append((run, [pool.submit(p) for p in slices(store, f"{run}/{RECORDS}/", cuts)]))
        if len(pending) > 2 * AT_ONCE:  # what is listed beforehand takes memory
            yield next_run()
    while pending:
        yield next_run()


def _list_changed(
    cache: Cache, run: str, entries: list[Entry], key: str, sending: Container[Name]
) -> dict[Name, list[Entry]]:
    """Return the checkpoints of a run that must be read, or listed, with their records.

    ``key``: of the run's records now. If it is that of the cache, and none is being sent, only
    checkpoints that wait for files are returned. Otherwise also new and changed ones and those in
    ``sending``; the cached run loses its key until `_finish_run`, and its deleted checkpoints.
    Sets ``cache.is_new`` if any was deleted.
    """
    cached = cache.run(run)
    if key and key == cached.key and not any((run, name) in sending for name in cached.checkpoints):
        waiting = {(run, name) for name, old in cached.checkpoints.items() if old.open_prefixes}
        beginnings = tuple(f"{run}/{RECORDS}/{name}" for _, name in waiting)
        records = group_by_checkpoint(run, (e for e in entries if e.name.startswith(beginnings)))
        return {name: records_of for name, records_of in records.items() if name in waiting}
    cached.key = ""
    records = group_by_checkpoint(run, entries)
    for deleted in [name for name in cached.checkpoints if (run, name) not in records]:
        del cached.checkpoints[deleted]
        cache.is_new = True
    changed = {}
    for name, records_of in records.items():
        old = cached.checkpoints.get(name[1])
        if name in sending or not old or old.open_prefixes or old.key != listing_key(records_of):
            changed[name] = records_of
    return changed


def _finish_run(
    cache: Cache, run: str, key: str, unreadable: Mapping[str, Checkpoint]
) -> Iterable[Checkpoint]:
    """Return a run's checkpoints in reading order, and sort them so in the cache under ``key``.

    If there are ``unreadable`` ones, which may not be cached, they are returned as well; the cached
    run then has no key, so it is examined again. Sets ``cache.is_new`` if anything was sorted.
    """
    cached = cache.run(run)
    if cached.key != key or unreadable:
        ordered = {**cached.checkpoints, **unreadable}
        ordered = {name: ordered[name] for name in sorted(ordered, key=partial(reading_order, run))}
        cached.checkpoints = {
            name: checkpoint for name, checkpoint in ordered.items() if name not in unreadable
        }
        cached.key = "" if unreadable else key
        cache.is_new |= bool(cached.checkpoints)
        return ordered.values()
    return cached.checkpoints.values()


def group_by_checkpoint(run: str, entries: Iterable[Entry]) -> dict[Name, list[Entry]]:
    """Return the entries below a run's records by checkpoint, without announcements of uploads.

    All ``entries`` must be of ``run``; all locations of a checkpoint's name are one group.
    """
    groups: dict[Name, list[Entry]] = {}
    start = len(f"{run}/{RECORDS}/")
    for entry in entries:
        location, _, path = entry.name[start:].partition("/")
        if path and not path.startswith("sending/"):
            groups.setdefault((run, checkpoint_of(location)), []).append(entry)
    return groups


def listing_key(entries: Iterable[Entry]) -> str:
    """Return a digest of names, sizes and times in any order; empty for no entries."""
    ordered = sorted(entries)
    return digest(msgspec.msgpack.encode(ordered))[:32] if ordered else ""


def _renew_checkpoint(
    store: Store, entries: list[Entry], old: Checkpoint | None
) -> tuple[Checkpoint, tuple[Fault, ...], bool]:
    """Return a checkpoint as it is now, its faults, and whether it may be cached.

    It is ``old`` itself if neither its records (``entries``) nor the files that it waits for have
    changed. Otherwise its records are read, and the files of its unfinished locations listed. It
    may not be cached if a record could not be read, or was deleted meanwhile. Raise StoreError.
    """
    key = listing_key(entries)
    if (
        old
        and old.key == key
        and listing_key(_list_files(store, old.open_prefixes)) == old.files_key
    ):
        return old, (), True
    names = record_names(entry.name for entry in entries)
    records, faults = read_checkpoint_records(store, {e.name: e.size for e in entries})
    hidden = hidden_by(faults)
    sizes, unlisted = _split_by_finished(records, hidden)
    files = list(_list_files(store, unlisted))
    sizes.update((e.name, e.size) for e in (*entries, *files))
    states = list_locations(records, sizes, hidden)
    mtimes = {e.name: e.mtime for e in (*entries, *files)}
    open_prefixes = tuple(
        prefix
        for s in states
        if s.status not in UNLISTED and awaits_files(s)
        for prefix in _prefixes(s)
    )
    files_key = listing_key(e for e in files if e.name.startswith(open_prefixes))
    newest = max((e.mtime for e in files), default=0.0)
    checkpoint = Checkpoint(
        key, tuple(summarize(s, mtimes) for s in states), open_prefixes, files_key, newest
    )
    return checkpoint, faults, not faults and len(records) == len(names)


def awaits_files(state: LocationState) -> bool:
    """Return whether files of a location can arrive, or be repaired, without a new record.

    They can if it is DAMAGED, or if a file that its records name is not listed with its size.
    """
    return state.status == "DAMAGED" or any(
        state.sizes.get(name) != size for name, size in state.named_files().items()
    )


def _split_by_finished(
    records: Mapping[str, Record], hidden: Collection[tuple[str, str]]
) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return the files of finished locations (name → bytes), and the prefixes of the others.

    ``records``: of one checkpoint. A location is finished if its status is in `UNLISTED` once all
    files that its records name are taken as present. Only the files below the returned prefixes
    must be listed.
    """
    unlisted = list_locations(records, {}, hidden)
    likely_finished = [
        s
        for s in unlisted
        if s.conditions.proof.holds or s.conditions.retired or s.conditions.conflict
    ]
    sizes = {name: size for state in likely_finished for name, size in state.named_files().items()}
    judged = list_locations(records, sizes, hidden) if sizes else unlisted
    finished = {s.location: s.named_files() for s in judged if s.status in UNLISTED}
    finished_sizes = {name: size for files in finished.values() for name, size in files.items()}
    unfinished = [state for state in unlisted if state.location not in finished]
    return finished_sizes, tuple(prefix for state in unfinished for prefix in _prefixes(state))


def _prefixes(state: LocationState) -> Iterator[str]:
    """Yield the prefix of a location's own files, then its model's if a model record counts."""
    yield f"{state.run}/{state.location}/"
    if state.model_record:
        yield consolidated_prefix(state.run, state.location)


def _list_files(store: Store, prefixes: Iterable[str]) -> Iterator[Entry]:
    """Yield all files below these prefixes, listing each when it is reached; raise StoreError."""
    for prefix in prefixes:
        yield from store.names(prefix)
