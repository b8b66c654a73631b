"""The catalogue of a store: records are listed each time, and read where a listing changed.

Every time it lists the names of all records, and the files of locations that wait for some.  It
does not list again the files that were there as named while no record changes: that they stay is
the verifier's to prove.  So nothing that deletes or overwrites may rest on what is said here; that
reads `uncached`.

Manifests of one checkpoint's name decide together over all of its locations
(`records.manifest_groups`), so a checkpoint with all its locations is what is read, and cached, at
once.  Where the listing of a run's records has not changed, only files of its open locations are
listed: so reading a store again costs little more than its listing.
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

    ``key`` is of its records' listing, ``data`` of that of the files below ``open``: the prefixes
    of locations that wait for files, or for their repair.  ``newest``: the newest mtime of files
    when they were listed.
    """

    key: str
    summaries: tuple[Summary, ...]
    open: tuple[str, ...] = ()
    data: str = ""
    newest: float = 0.0


@dataclass(slots=True)
class CachedRun:
    """What was read of a run: its checkpoints by name, in reading order.

    ``key``: of the listing of its records, empty while a checkpoint could not be cached.  ``cuts``:
    where its next listing is cut into slices.
    """

    key: str = ""
    cuts: tuple[str, ...] = ()
    checkpoints: dict[str, Checkpoint] = field(default_factory=dict)


@dataclass
class Cache:
    """What was read before, of one store.

    Records never change under a name; losing the cache costs reading again.  It is kept for the
    next process in a file of this user, which may be deleted at any time.  A run in it counts only
    if it is whole and of this version, and is decoded when it is needed.

    ``is_new``: something in it was not there before.
    """

    runs: dict[str, CachedRun] = field(default_factory=dict)
    is_new: bool = field(default=False, compare=False)
    _saved: dict[str, _Place] = field(default_factory=dict, compare=False)
    _descriptor: int = field(default=-1, compare=False)

    @classmethod
    def load(cls, url: str) -> Cache:
        """Return the saved cache of a store; an empty one where there is none that counts."""
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
        """Return what was read of a run before; it is empty if nothing was."""
        if place := self._saved.pop(name, None):
            with contextlib.suppress(OSError, *_UNDECODABLE):
                body = os.pread(self._descriptor, place.size, place.start)
                if digest(body) == place.digest:
                    self.runs[name] = _RUN.decode(body)
                    _share(self.runs[name])
        return self.runs.setdefault(name, CachedRun())

    def save(self, url: str) -> None:
        """Write the cache of a store, if it holds anything new.

        A disk that is full, or a home that cannot be written, is no error.
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
        """Have all of it in ``runs``."""
        for name in [*self._saved]:
            self.run(name)

    def forget_others(self, runs: Collection[str]) -> None:
        """Remove all runs but these."""
        for name in {**self._saved, **self.runs}.keys() - runs:
            self._saved.pop(name, None)
            self.runs.pop(name, None)
            self.is_new = True


def _share(run: CachedRun) -> None:
    """Have equal values of a run's summaries be one value: a third of their memory."""
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
    """Return where the cache of a store is.

    That is below ``CACHE_DIRECTORY`` (as systemd sets it), ``XDG_CACHE_HOME``, or ``~/.cache``.

    Raises RuntimeError for a user whom the system does not know, and who has no ``HOME``, as in a
    container.
    """
    own = os.environ.get("CACHE_DIRECTORY", "").partition(":")[0]
    base = (
        Path(own)
        if own
        else Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "ckptsync"
    )
    return base / f"catalogue-{digest(url.encode())[:16]}"


def read_catalogue(
    store: Store, cache: Cache | None = None, run: str = "", now: float | None = None
) -> Catalogue:
    """Return the catalogue of ``run``, or of the store.

    Raises StoreError; what is wrong with one record is a `Fault`.

    Whatever was read before an error is cached, so that the next call goes on there.  ``now``:
    seconds on the store's clock, by which a node that no longer says that it uploads has stopped;
    if not given, this machine's clock.
    """
    cache = cache or Cache()
    now = time.time() if now is None else now
    runs = [run] if run else sorted(name for name in store.dirs("") if name != RECORDS)
    sending: dict[Name, dict[str, float]] = {}
    keys: dict[str, str] = {}
    changed: dict[Name, list[Entry]] = {}
    unreadable: dict[Name, Checkpoint] = {}
    faults: list[Fault] = []
    clock = 0.0
    pool = ThreadPool(1 if _is_on_local_disk(store) else AT_ONCE, "catalogue")

    def renew(name: Name) -> tuple[Checkpoint, tuple[Fault, ...], bool]:
        # files of an upload come without a record
        old = None if name in sending else cache.run(name[0]).checkpoints.get(name[1])
        return _renewed(store, changed[name], old)

    try:
        with paused():
            for listed, entries in _listed(store, runs, cache, pool):
                clock = max(clock, max(map(attrgetter("mtime"), entries), default=0.0))
                records = [e for e in entries if "/sending/" not in e.name]
                if len(records) < len(entries):
                    sending.update(senders(entries, now))
                keys[listed] = listing_key(records)
                changed |= _list_changed(cache, listed, entries, keys[listed], sending)
        for name, (checkpoint, wrong, is_final) in zip(
            changed, pool.map(renew, changed), strict=True
        ):
            checkpoints = cache.run(name[0]).checkpoints
            if not is_final:
                unreadable[name] = checkpoint
            elif checkpoint is not checkpoints.get(name[1]):
                checkpoints[name[1]], cache.is_new = checkpoint, True
            faults += wrong
    finally:
        pool.shutdown(cancel_futures=True)  # after an error only running requests end
    if not run:
        cache.forget_others(runs)
    all_checkpoints: list[Checkpoint] = []
    for listed, key in keys.items():
        its = {name: checkpoint for (of, name), checkpoint in unreadable.items() if of == listed}
        all_checkpoints += _finish_run(cache, listed, key, its)
    summaries = [s for checkpoint in all_checkpoints for s in checkpoint.summaries]
    clock = max([clock, *(checkpoint.newest for checkpoint in all_checkpoints)])
    uploading = [
        replace(s, status="UPLOADING", uploading=tuple(sorted(sending[s.run, s.checkpoint])))
        if s.status == "INCOMPLETE" and (s.run, s.checkpoint) in sending
        else s
        for s in explain_missing(summaries)
    ]
    described = {(f.run, checkpoint_of(f.location)) for f in faults}
    described |= {(s.run, s.checkpoint) for s in summaries if (s.run, s.checkpoint) in sending}
    begun = [
        summarize_begun(*name, sending[name], store.names("/".join((*name, ""))))
        for name in sorted(sending.keys() - described)
    ]
    faults.sort(key=lambda fault: fault.name)
    shown = tuple(with_unnamed(store, uploading, sending))
    return Catalogue(shown, tuple(faults), clock, tuple(begun))


def _is_on_local_disk(store: Store) -> bool:
    """Return whether a store answers at once: threads would only wait for Python's lock."""
    directory = directory_of(store)
    return directory is not None and not mount_of(directory).is_remote


def _listed(
    store: Store, runs: Sequence[str], cache: Cache, pool: Executor
) -> Iterator[tuple[str, list[Entry]]]:
    """Yield each run with what lies below its records.

    Several runs are listed at once, a long one in slices.
    """
    waiting: deque[tuple[str, list[Future[list[Entry]]]]] = deque()

    def next_run() -> tuple[str, list[Entry]]:
        run, parts = waiting.popleft()
        entries = join_slices(part.result() for part in parts)
        if entries:
            cache.run(run).cuts = cuts_of(entries)
        return run, entries

    for run in runs:
        cuts = cache.run(run).cuts
        waiting.append((run, [pool.submit(p) for p in slices(store, f"{run}/{RECORDS}/", cuts)]))
        if len(waiting) > 2 * AT_ONCE:  # what is listed beforehand takes memory
            yield next_run()
    while waiting:
        yield next_run()


def _list_changed(
    cache: Cache, run: str, entries: list[Entry], key: str, sending: Container[Name]
) -> dict[Name, list[Entry]]:
    """Return the checkpoints of a run that must be read, or listed, with their records.

    Removes those that are gone from the cache.  ``key``: of the run's records; where it is that of
    the cache, only checkpoints that wait for files are returned.
    """
    cached = cache.run(run)
    if key and key == cached.key and not any((run, name) in sending for name in cached.checkpoints):
        waiting = {(run, name) for name, its in cached.checkpoints.items() if its.open}
        beginnings = tuple(f"{run}/{RECORDS}/{name}" for _, name in waiting)
        records = group_by_checkpoint(run, (e for e in entries if e.name.startswith(beginnings)))
        return {name: its for name, its in records.items() if name in waiting}
    cached.key = ""
    records = group_by_checkpoint(run, entries)
    for gone in [name for name in cached.checkpoints if (run, name) not in records]:
        del cached.checkpoints[gone]
        cache.is_new = True
    changed = {}
    for name, its in records.items():
        old = cached.checkpoints.get(name[1])
        if name in sending or not old or old.open or old.key != listing_key(its):
            changed[name] = its
    return changed


def _finish_run(
    cache: Cache, run: str, key: str, unreadable: Mapping[str, Checkpoint]
) -> Iterable[Checkpoint]:
    """Return a run's checkpoints in reading order, once what has changed is in the cache.

    ``unreadable``: those that may not be cached.
    """
    cached = cache.run(run)
    if cached.key != key or unreadable:
        ordered = {**cached.checkpoints, **unreadable}
        ordered = {name: ordered[name] for name in sorted(ordered, key=partial(reading_order, run))}
        cached.checkpoints = {name: its for name, its in ordered.items() if name not in unreadable}
        cached.key = "" if unreadable else key
        cache.is_new |= bool(cached.checkpoints)
        return ordered.values()
    return cached.checkpoints.values()


def group_by_checkpoint(run: str, entries: Iterable[Entry]) -> dict[Name, list[Entry]]:
    """Return what lies below a run's records, by checkpoint, without announcements of uploads."""
    groups: dict[Name, list[Entry]] = {}
    start = len(f"{run}/{RECORDS}/")
    for entry in entries:
        location, _, rest = entry.name[start:].partition("/")
        if rest and not rest.startswith("sending/"):
            groups.setdefault((run, checkpoint_of(location)), []).append(entry)
    return groups


def listing_key(entries: Iterable[Entry]) -> str:
    """Return a digest of a listing in any order: of its names, sizes and times."""
    ordered = sorted(entries)
    return digest(msgspec.msgpack.encode(ordered))[:32] if ordered else ""


def _renewed(
    store: Store, entries: list[Entry], old: Checkpoint | None
) -> tuple[Checkpoint, tuple[Fault, ...], bool]:
    """Return a checkpoint as it is now, or ``old``; its faults; and whether it may be cached.

    ``entries``: of its records.  It may not be cached if a record could not be read, or was deleted
    meanwhile.
    """
    key = listing_key(entries)
    if old and old.key == key and listing_key(_files(store, old.open)) == old.data:
        return old, (), True
    names = record_names(entry.name for entry in entries)
    records, faults = read_checkpoint_records(store, {e.name: e.size for e in entries})
    hidden = hidden_by(faults)
    sizes, unlisted = _without_listing(records, hidden)
    files = list(_files(store, unlisted))
    sizes.update((e.name, e.size) for e in (*entries, *files))
    seen = list_locations(records, sizes, hidden)
    mtimes = {e.name: e.mtime for e in (*entries, *files)}
    open_ = tuple(
        prefix for s in seen if s.status not in UNLISTED and waits(s) for prefix in _prefixes(s)
    )
    data = listing_key(e for e in files if e.name.startswith(open_))
    newest = max((e.mtime for e in files), default=0.0)
    checkpoint = Checkpoint(key, tuple(summarize(s, mtimes) for s in seen), open_, data, newest)
    return checkpoint, faults, not faults and len(records) == len(names)


def waits(seen: LocationState) -> bool:
    """Return whether new or repaired files of a location can arrive without a new record."""
    return seen.status == "DAMAGED" or any(
        seen.sizes.get(name) != size for name, size in seen.named_files().items()
    )


def _without_listing(
    records: Mapping[str, Record], hidden: Collection[tuple[str, str]]
) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return the sizes of finished locations' files, by records; the prefixes of all others."""
    bare = list_locations(records, {}, hidden)
    likely = [
        s for s in bare if s.conditions.proof.holds or s.conditions.retired or s.conditions.conflict
    ]
    sizes = {name: size for seen in likely for name, size in seen.named_files().items()}
    judged = list_locations(records, sizes, hidden) if sizes else bare
    finished = {s.location: s.named_files() for s in judged if s.status in UNLISTED}
    finished_sizes = {name: size for files in finished.values() for name, size in files.items()}
    others = [seen for seen in bare if seen.location not in finished]
    return finished_sizes, tuple(prefix for seen in others for prefix in _prefixes(seen))


def _prefixes(seen: LocationState) -> Iterator[str]:
    yield f"{seen.run}/{seen.location}/"
    if seen.model_record:
        yield consolidated_prefix(seen.run, seen.location)


def _files(store: Store, prefixes: Iterable[str]) -> Iterator[Entry]:
    for prefix in prefixes:
        yield from store.names(prefix)
