"""Publish a merged model: as a new directory, which appears by rename, or in a store.

A model that is not whole must never be taken for one.  A directory is written under another name.
In a store the first file, `RECORD`, says which merge it is, and until that file is deleted, or says
that the merge has ended, the model is not whole.  So a killed merge into a store continues, and
keeps no state on this machine.  What opens a model (its configuration, the index of several files)
comes last.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import msgspec

from ckptsync.digest import digest
from ckptsync.errors import ConfigError, Exists, NotFound, StoreError
from ckptsync.merger.adapter_sums import ChangeTotals
from ckptsync.merger.engine import (
    Destination,
    Engine,
    MergeResult,
    Progress,
    Write,
    WrittenFile,
    describe_tensor,
    write_model,
)
from ckptsync.merger.inputs import MergeRequest, PreparedMerge, check_unchanged
from ckptsync.merger.joined_files import FILL
from ckptsync.merger.model_files import index_name
from ckptsync.merger.plan import FORMAT, MergeResources
from ckptsync.stores.checkpoint_files import MERGING as RECORD
from ckptsync.stores.checkpoint_files import MERGING_LIMIT
from ckptsync.stores.contract import About, Chunk, Rooted, Store, has_root, read_all
from ckptsync.stores.opening import Access
from ckptsync.stores.path_or_url import PathOrUrl
from ckptsync.stores.posix.publish import sync_path
from ckptsync.stores.posix.store import PosixStore
from ckptsync.stores.stream import has_same_bytes
from ckptsync.stores.urls import Remote
from ckptsync.typed_json import Decoder

EngineAt = Callable[[PathOrUrl], Engine]
"""Makes an engine whose tasks write below a directory or URL by themselves."""
_OCCUPIED = "ckptsync never overwrites: choose another destination, or delete its files"


def check_free(request: MergeRequest, access: Access) -> None:
    """Raise ConfigError if the destination is anything but absent or an empty directory.

    In a store an unfinished merge may be there: whether it is the same one is known when this one
    is planned.  Raises StoreError if the store cannot be listed.
    """
    destination = request.destination
    if isinstance(destination, Remote):
        store = access.store(destination)
        names = {entry.name for entry in store.names("")} if has_root(store) else set()
        if names and RECORD not in names:
            raise _occupied_error(store, min(names))
        return
    if destination.is_symlink() or (
        destination.exists() and (not destination.is_dir() or any(destination.iterdir()))
    ):
        raise ConfigError(
            f"{destination}: exists", hint="choose a new directory: ckptsync never overwrites"
        )


def merge(
    prepared: PreparedMerge,
    access: Access,
    progress: Progress | None = None,
    work: MergeResources | None = None,
    engine_at: EngineAt | None = None,
) -> MergeResult:
    """Write the model of a planned merge, and return what was written.

    A directory appears by a rename at the end, and not after an error.  In a store the same merge
    is continued if it was killed there: finished files are read back, and kept if their bytes
    match; with ``work.statistics`` all are made again.  After an error a store keeps what was
    written, without what would open it.

    Args:
        prepared: The merge, with its destination.
        access: How stores are opened.
        progress: See `write_model`.
        work: Threads and memory.
        engine_at: Makes the engine for a directory or URL; threads of this process without it.

    Raises:
        ConfigError: Something else is at the destination.
        Incomplete: A source changed while it was read.
        Corrupt: A source is damaged.
        StoreError: The destination cannot be written.

    """
    work, target = work or MergeResources(), prepared.request.destination
    if isinstance(target, Path):
        with _new_directory(target) as (directory, write):
            engine = engine_at(directory) if engine_at else None
            merged = write_model(
                prepared.job, prepared.files, Destination(write), progress, work, engine=engine
            )
            check_unchanged((*prepared.trees, *prepared.fill))
        return replace(merged, notes=(*merged.notes, *_list_leftovers(target)))
    destination = _StoreDestination(access.store(target), prepared)
    # with statistics each file is made again, since its values are not stored
    notes = [] if work.statistics else destination.resume()
    finished_count = len(destination.finished)
    engine = engine_at(target) if engine_at else None
    merged = write_model(prepared.job, prepared.files, destination, progress, work, engine=engine)
    if finished_count:
        notes.append(
            f"{finished_count} of {len(prepared.job.plans)} files were there from an earlier merge:"
            " checked, not made again"
        )
    return replace(merged, notes=(*merged.notes, *notes, *destination.end()))


@contextlib.contextmanager
def _new_directory(destination: Path) -> Iterator[tuple[Path, Write]]:
    """Give a temporary directory beside ``destination``, and a function that writes there.

    Directories above that are missing are made. The directory is renamed to ``destination`` at the
    end, and the one above is synced; after any exception it is deleted. It is held open: whoever
    owns the one above may put another in its place. Raises StoreError for an OSError, here or in
    the block.
    """
    temporary = destination.parent / f"{_temporary_prefix(destination)}{secrets.token_hex(4)}"

    def write(name: str, chunks: Iterable[Chunk]) -> None:
        """Write a file of the model; raise StoreError, with a hint if the disk is full."""
        try:
            store.write(name, chunks)
        except StoreError as e:
            if not isinstance(e.__cause__, OSError) or e.__cause__.errno not in (
                errno.ENOSPC,
                errno.EDQUOT,
                errno.EFBIG,
            ):
                raise
            hint = "make room, or name a directory elsewhere; nothing was left behind"
            raise StoreError(f"{destination}/{e}", hint=hint) from e.__cause__

    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        try:
            with _open_directory(temporary, os.O_NOFOLLOW) as descriptor:
                store = PosixStore(str(temporary), root_fd=descriptor)
                yield temporary, write
            temporary.rename(destination)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        sync_path(destination.parent)
    except OSError as e:
        why = (e.strerror or str(e)).lower()
        raise StoreError(
            f"{destination}: {why}", hint="check the free space and the permissions there"
        ) from e


def _temporary_prefix(destination: Path) -> str:
    """Return how the names of temporary directories begin."""
    return f".{destination.name}.ckptsync-"


def _list_leftovers(destination: Path) -> list[str]:
    """Return a note for each temporary directory of a merge to the same destination, by name.

    [] if the directory above cannot be listed.
    """
    prefix = _temporary_prefix(destination)
    with contextlib.suppress(OSError):
        return [
            f"{path}: left by a merge that was killed; delete it, unless that merge still runs"
            for path in sorted(destination.parent.iterdir())
            if path.name.startswith(prefix)
        ]
    return []


@contextlib.contextmanager
def _open_directory(directory: Path, flags: int = 0) -> Iterator[int]:
    """Give a descriptor of a directory, which is closed at the end."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class _Finished(msgspec.Struct, frozen=True):
    """A file of weights that an unfinished merge has written: its BLAKE3, and notes on it.

    ``changes``: what adapters have changed, by tensor.
    """

    digest: str
    notes: tuple[str, ...] = ()
    changes: dict[str, ChangeTotals] = {}


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The record of an unfinished merge.

    ``plan`` is its `fingerprint`; ``files``: the finished files of weights.
    """

    format: int
    plan: str
    files: dict[str, _Finished] = {}
    ended: bool = False


_DECODER = Decoder(_Record, "a record of a merge", MERGING_LIMIT)


def fingerprint(prepared: PreparedMerge) -> str:
    """Return a digest of everything that decides the output's bytes; no tensor is read for it."""
    job = prepared.job
    facts = {
        "format": FORMAT,
        "options": asdict(prepared.request.options),
        "sources": sorted((tree.root, tree.state()) for tree in prepared.trees),
        "source": job.source,
        "files": [(plan.name, plan.size, digest(plan.header)) for plan in job.plans],
        "beside": [(name, directory.sizes()[name]) for name, directory in job.beside],
        "contents": {name: digest(data) for name, data in job.contents.items()},
    }
    if filled := [n for n in job.reads if n.startswith(FILL)]:
        place, sizes = prepared.request.fill_from, prepared.files.sizes()
        facts["fill_from"] = [str(place), sorted((name, sizes[name]) for name in filled)]
        facts["fill_stamps"] = [sorted(tree.stamps.items()) for tree in prepared.fill]
    # a path may be no text, of which only this writes something
    return digest(json.dumps(facts).encode())


def abouts(prepared: PreparedMerge) -> dict[str, About]:
    """Return the size and the identity of each file of weights, by name, before it is written.

    The identity names the merge, so that a killed upload of the same bytes continues.
    """
    plan = fingerprint(prepared)
    return {file.name: About(file.size, f"merge {plan} {file.name}") for file in prepared.job.plans}


class _StoreDestination(Destination):
    """A store and the record in it.  Several threads may finish files.

    The constructor lists the store, and reads or writes the record, as `_begin_record` says.
    """

    def __init__(self, store: Store, prepared: PreparedMerge) -> None:
        super().__init__(self._write)
        self._store, self._prepared, self._lock = store, prepared, threading.Lock()
        plans = prepared.job.plans
        self._outputs = {*(p.name for p in plans), *(name for name, _ in prepared.job.beside)}
        if index := index_name(plans):
            self._outputs.add(index)
        self._abouts = abouts(prepared)
        self._record = self._begin_record(_Record(FORMAT, fingerprint(prepared)))
        self._stored_sizes: Mapping[str, int] = {
            entry.name: entry.size for entry in store.names("")
        }

    def _begin_record(self, new_record: _Record) -> _Record:
        """Return the record that the same merge has left, or write a new one and return that.

        Makes the store's directory.  A record that says "ended" is written again without that if an
        output is missing.  Raises ConfigError if the store holds anything else, Corrupt if the
        record cannot be read, StoreError.
        """
        store = self._store
        if isinstance(store, Rooted):
            store.make_root()
        names = {entry.name for entry in store.names("")}
        if RECORD not in names:
            if names:
                raise _occupied_error(store, min(names))
            try:
                store.create(RECORD, [msgspec.json.encode(new_record)])
            except Exists:
                # the answer to an earlier try was lost, or the same merge began elsewhere: read
                # which
                pass
            else:
                return new_record
        try:
            data = read_all(store, RECORD, _DECODER.limit)
        except NotFound:
            raise _occupied_error(
                store, RECORD
            ) from None  # it was there a moment ago: another merge has just ended
        record = _DECODER.decode(data, f"{store.url}/{RECORD}", "name another destination")
        if (record.format, record.plan) != (new_record.format, new_record.plan):
            raise ConfigError(
                f"{store.url}: an unfinished merge of other sources, or with other options",
                hint=_OCCUPIED,
            )
        if strangers := names - {RECORD} - self._outputs:
            raise ConfigError(
                f"{store.url}: {min(strangers)} does not belong to the merge that began here",
                hint=_OCCUPIED,
            )
        # the record could not be deleted; something is missing now
        if record.ended and not self._outputs <= names:
            record = msgspec.structs.replace(record, ended=False)
            self._write_record(record)
        return record

    def resume(self) -> list[str]:
        """Read back all that an earlier merge has finished; return notes on files that differ.

        Sets `finished` to the files whose bytes are those that were recorded.  Raises StoreError.
        """
        notes, finished_files = [], {}
        for plan in self._prepared.job.plans:
            finished = self._record.files.get(plan.name)
            if finished is None or self._stored_sizes.get(plan.name) != plan.size:
                continue
            if has_same_bytes(self._store, plan.name, plan.size, finished.digest):
                tensors = tuple(describe_tensor(plan, tensor) for tensor in plan.tensors)
                finished_files[plan.name] = WrittenFile(
                    finished.digest, finished.notes, tensors, changes=finished.changes
                )
            else:
                notes.append(
                    f"{plan.name}: does not match the checksum that an earlier merge recorded;"
                    " ckptsync writes it again"
                )
        self.finished = finished_files
        return notes

    def _write(self, name: str, chunks: Iterable[Chunk]) -> None:
        """Write a file of the model; a killed upload of the same weights continues.

        A file that is no weights is collected in memory, and not written if its bytes are there.
        """
        if name in self._abouts:
            self._store.write(name, chunks, self._abouts[name])
            return
        data = b"".join(map(bytes, chunks))
        if self._stored_sizes.get(name) != len(data) or read_all(self._store, name) != data:
            self._store.write(name, [data], About(len(data), f"merge {self._record.plan} {name}"))

    def check_sources(self) -> None:
        """Raise Incomplete if a source changed since it was opened."""
        check_unchanged((*self._prepared.trees, *self._prepared.fill))

    def record_file(self, name: str, written: WrittenFile) -> None:
        """Add a file to the record, and replace that in the store, under the lock.

        A file without its record is written again by the next merge.  Raises StoreError.
        """
        with self._lock:
            files = {
                **self._record.files,
                name: _Finished(written.digest, written.notes, {**written.changes}),
            }
            self._record = msgspec.structs.replace(self._record, files=files)
            self._write_record(self._record)

    def end(self) -> tuple[str, ...]:
        """Delete the record, since the model is whole; return ().

        If the record cannot be deleted, write there that the merge has ended, and return a note.
        """
        try:
            self._store.delete(RECORD)
        except StoreError:  # who may write may not always delete
            self._write_record(msgspec.structs.replace(self._record, ended=True))
            return ((f"{RECORD} could not be deleted; it is no longer needed"),)
        return ()

    def _write_record(self, record: _Record) -> None:
        """Replace the record in the store."""
        data = msgspec.json.encode(record)
        self._store.write(RECORD, [data], About(len(data)))


def _occupied_error(store: Store, name: str) -> ConfigError:
    """Return the error of a store that holds ``name``."""
    return ConfigError(
        f"{store.url}: exists, with {name} in it",
        hint="choose another destination: ckptsync never overwrites",
    )
