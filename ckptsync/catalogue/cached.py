"""The catalogue of a store: records are listed each time, and read where a listing changed.

Every time it lists the names of all records, and the files of locations that wait for some.  It
does not list again the files that were there as named while no record changes: that they stay is
the verifier's to prove.  So nothing that deletes or overwrites may rest on what is said here; that
reads `uncached`.

Manifests of one checkpoint's name decide together over all of its locations
(`records.save_groups`), so a checkpoint with all its locations is what is read, and cached, at
once.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import msgspec

from ckptsync import __version__
from ckptsync.catalogue.location_summary import (
    Catalogue,
    DamagedFile,
    Gap,
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
from ckptsync.records.io import Fault, Record, hidden_by
from ckptsync.records.location_status import (
    LocationState,
    Status,
    list_locations,
    reading_order,
    record_names,
)
from ckptsync.records.report import LEVELS
from ckptsync.records.save_groups import Sibling
from ckptsync.records.store_paths import checkpoint_of, consolidated_prefix, senders
from ckptsync.safe_names import RECORDS
from ckptsync.stores.contract import Entry, Store, cuts_of, join_slices, slices
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
class Cache:
    """What was read before, of one store.

    Records never change under a name; losing the cache costs reading again.  It is kept for the
    next process in a file of this user, which may be deleted at any time, and counts only if it is
    whole and of this version.

    ``is_new``: something in it was not there before.  ``packed`` returns checkpoints that are not
    among ``checkpoints`` yet: unpacking takes as long as a server needs to list, and is done
    meanwhile.
    """

    checkpoints: dict[Name, Checkpoint] = field(default_factory=dict)
    cuts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    is_new: bool = field(default=False, compare=False)
    packed: Callable[[], Mapping[Name, Checkpoint]] | None = field(default=None, compare=False)

    @classmethod
    def load(cls, url: str) -> Cache:
        """Return the saved cache of a store; an empty one where there is none that counts."""
        try:
            data = cache_path(url).read_bytes()
        except (OSError, RuntimeError):
            return cls()
        body = data[len(_HEAD) + 64 :]
        if data[: len(_HEAD) + 64] != _HEAD + digest(body).encode():
            return cls()
        try:
            content = _CONTENT.decode(body)
        except _UNDECODABLE:
            return cls()

        def unpack() -> dict[Name, Checkpoint]:
            try:
                found = _CHECKPOINTS.decode(content.checkpoints)
            except _UNDECODABLE:
                return {}
            return {(run, name): checkpoint for run, name, checkpoint in found}

        return cls(cuts=content.cuts, packed=unpack) if content.url == url else cls()

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
        checkpoints = msgspec.msgpack.encode(
            tuple((*name, found) for name, found in self.checkpoints.items())
        )
        body = msgspec.msgpack.encode(_Content(url, self.cuts, msgspec.Raw(checkpoints)))
        draft = target.with_name(f"{target.name}.{os.getpid()}.part")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        try:
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with os.fdopen(os.open(draft, flags, 0o600), "wb") as file:
                file.write(_HEAD + digest(body).encode() + body)
            draft.replace(target)
            self.is_new = False
        except OSError:
            with contextlib.suppress(OSError):
                draft.unlink()

    def unpack(self) -> None:
        """Have all of it in ``checkpoints``."""
        if self.packed:
            self.checkpoints = {**self.packed(), **self.checkpoints}
            self.packed = None

    def forget(self, name: Name) -> None:
        """Remove a checkpoint that is no more, or cannot be read."""
        self.is_new |= self.checkpoints.pop(name, None) is not None


_SHAPE = repr(
    [
        (kind.__name__, f.name, str(f.type))
        for kind in (Checkpoint, Summary, Proven, DamagedFile, Gap, Sibling)
        for f in fields(kind)
    ]
)
_HEAD = f"ckptsync catalogue {__version__} {digest(f'{LEVELS} {_SHAPE}'.encode())[:16]}\n".encode()
_UNDECODABLE = (ValueError, RecursionError, MemoryError)  # of another program of the same version


@dataclass(frozen=True, slots=True)
class _Content:
    url: str
    cuts: dict[str, tuple[str, ...]]
    checkpoints: msgspec.Raw


_CONTENT = msgspec.msgpack.Decoder(_Content)
_CHECKPOINTS = msgspec.msgpack.Decoder(tuple[tuple[str, str, Checkpoint], ...])


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
    sending: dict[Name, dict[str, float]] = {}
    runs = [run] if run else [found for found in store.dirs("") if found != RECORDS]
    known: dict[Name, Checkpoint] = {}
    changed: dict[Name, list[Entry]] = {}
    faults: list[Fault] = []
    clock = 0.0
    pool = ThreadPool(AT_ONCE, "catalogue")

    def usable(name: Name) -> Checkpoint | None:
        # files of an upload come without a record
        return cache.checkpoints.get(name) if name not in sending else None

    try:
        with paused():
            for listed, entries in _listed(store, runs, cache, pool):
                clock = max(clock, max((e.mtime for e in entries), default=0.0))
                sending.update(senders(entries, now))
                for name, its in group_by_checkpoint(listed, entries).items():
                    old = usable(name)
                    if old and not old.open and old.key == listing_key(its):
                        known[name] = old
                    else:
                        changed[name] = its
        listed_names = known.keys() | changed.keys()
        for name in [n for n in cache.checkpoints if run in ("", n[0])]:
            if name not in listed_names:
                cache.forget(name)

        def renew(name: Name) -> tuple[Checkpoint, tuple[Fault, ...], bool]:
            return _renewed(store, changed[name], usable(name))

        for name, (found, wrong, is_final) in zip(changed, pool.map(renew, changed), strict=True):
            if not is_final:
                cache.forget(name)
            elif found is not cache.checkpoints.get(name):
                cache.checkpoints[name], cache.is_new = found, True
            known[name] = found
            faults += wrong
    finally:
        pool.shutdown(cancel_futures=True)  # after an error only running requests end
    summaries = sorted(
        (s for found in known.values() for s in found.summaries),
        key=lambda s: reading_order(s.run, s.location),
    )
    clock = max([clock, *(found.newest for found in known.values())])
    uploading = [
        replace(s, status="UPLOADING", uploading=tuple(sorted(sending[s.run, s.checkpoint])))
        if s.status == "INCOMPLETE" and (s.run, s.checkpoint) in sending
        else s
        for s in explain_missing(summaries)
    ]
    described = {(s.run, s.checkpoint) for s in summaries}
    described |= {(f.run, checkpoint_of(f.location)) for f in faults}
    begun = [
        summarize_begun(*name, sending[name], store.names("/".join((*name, ""))))
        for name in sorted(sending.keys() - described)
    ]
    faults.sort(key=lambda fault: fault.name)
    shown = tuple(with_unnamed(store, uploading, sending))
    return Catalogue(shown, tuple(faults), clock, tuple(begun))


def _listed(
    store: Store, runs: Sequence[str], cache: Cache, pool: Executor
) -> Iterator[tuple[str, list[Entry]]]:
    """Yield each run with what lies below its records.

    All runs are listed at once, a long one in slices.
    """
    requests = {
        run: [pool.submit(p) for p in slices(store, f"{run}/{RECORDS}/", cache.cuts.get(run, ()))]
        for run in runs
    }
    cache.unpack()
    for run, parts in requests.items():
        entries = join_slices(part.result() for part in parts)
        if entries:
            cache.cuts[run] = cuts_of(entries)
        yield run, entries


def group_by_checkpoint(run: str, entries: Iterable[Entry]) -> dict[Name, list[Entry]]:
    """Return what lies below a run's records, by checkpoint, without announcements of uploads."""
    found: dict[Name, list[Entry]] = {}
    start = len(f"{run}/{RECORDS}/")
    for entry in entries:
        location, _, rest = entry.name[start:].partition("/")
        if rest and not rest.startswith("sending/"):
            found.setdefault((run, checkpoint_of(location)), []).append(entry)
    return found


def listing_key(entries: Iterable[Entry]) -> str:
    """Return a digest of a listing in any order: of its names, sizes and times."""
    return digest("".join(sorted([f"{e.name}\n{e.size} {e.mtime}\n" for e in entries])).encode())


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
    found = Checkpoint(key, tuple(summarize(s, mtimes) for s in seen), open_, data, newest)
    return found, faults, not faults and len(records) == len(names)


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
    found = {name: size for files in finished.values() for name, size in files.items()}
    others = [seen for seen in bare if seen.location not in finished]
    return found, tuple(prefix for seen in others for prefix in _prefixes(seen))


def _prefixes(seen: LocationState) -> Iterator[str]:
    yield f"{seen.run}/{seen.location}/"
    if seen.model_record:
        yield consolidated_prefix(seen.run, seen.location)


def _files(store: Store, prefixes: Iterable[str]) -> Iterator[Entry]:
    for prefix in prefixes:
        yield from store.names(prefix)
