"""A save as this node can read it, and the draft of its manifest.

The trainer may delete or overwrite a file while it is uploaded.  So files are read from the pin
where they are pinned, else where the trainer left them, and each is compared with what the scan
saw: a file that has changed meanwhile is not sent.

The spool keeps a copy of each manifest in `_ckptsync/manifests/<location>/<record>`, to write a
damaged one again.  The copies may be deleted at any moment, and the record's digest checks them.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

from ckptsync import __version__
from ckptsync.checkpoint_dirs import CheckpointDir, Family, ListedCheckpoint
from ckptsync.digest import digest
from ckptsync.errors import CkptsyncError, Corrupt, Incomplete, StoreError, Unsupported
from ckptsync.layouts import file_names, registry
from ckptsync.merger.prepare import check_complete
from ckptsync.records.manifest import FileEntry, Manifest
from ckptsync.records.store_paths import RecordName, checkpoint_of
from ckptsync.safe_names import checked_path, find_alike
from ckptsync.spool import safe_files
from ckptsync.spool.markers import PinNotes, count_ranks_at
from ckptsync.spool.pins import Pin
from ckptsync.spool.safe_files import translate_errors
from ckptsync.stores import progress_signs
from ckptsync.stores.stream import chunk_room
from ckptsync.tensors import Demands
from ckptsync.walk import SPOOL, Stat, open_checkpoint_file, open_in, opened_parent, stat_open

AGAIN = "push it again when the trainer has finished; a worker service does so automatically"
LATER = (
    "the trainer may have deleted it: push a later checkpoint, or run a worker, which pins"
    " checkpoints before rotation deletes them"
)
RENAME = (
    "rename or remove the file; or leave it out by worker.exclude (? stands for one character), and"
    " reload the worker"
)
_DISK = "look at the disk that the trainer writes to"
CHUNK = 4 << 20
AfterChunk = Callable[[int], None]
"""Called after each chunk with its bytes; with a negative number where bytes are read again.

An upload calls four in a chain.  A source calls `FilePool.end_chunk`, which ends this file if
another failed, and signs for the watchdog.  That calls `renew` of `FileSender.announce`, which
renews the announcement.  That calls what the caller gave: a worker's `UploadQueues.give_way` waits
for a scan, and `ckptsync push` counts bytes for its progress.
"""


@dataclass(frozen=True, slots=True)
class LocalFile:
    """One file and the directory it is read from.

    ``is_added``: the hook put it there, before the trainer wrote the checkpoint.
    """

    stat: Stat
    root: Path
    is_pinned: bool
    is_added: bool = False

    def open(self) -> int:
        """Return an open descriptor; raise Incomplete if gone, ConfigError, StoreError."""
        with _add_later_hint():
            return open_checkpoint_file(self.root, self.stat.path)


@dataclass(frozen=True, slots=True)
class LocalFiles:
    """The files of a save; an implementation of `ckptsync.tensors.Files`.

    ``by_path``: the files to send.  ``withheld``: files that are not sent by choice; layouts read
    them, too.  ``partial`` (unfinished files) and ``special_paths`` (links, special files) are the
    source's. ``is_gone``: the source does not exist any more.
    """

    name: str
    family: Family
    by_path: Mapping[str, LocalFile]
    partial: tuple[Stat, ...] = ()
    special_paths: tuple[str, ...] = ()
    is_gone: bool = False
    withheld: Mapping[str, LocalFile] = field(default_factory=dict)
    _sizes: Mapping[str, int] = field(init=False, repr=False, compare=False)
    _stats: tuple[Stat, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Compute what `sizes` and `stats` return: both are read once for each file."""
        object.__setattr__(
            self,
            "_sizes",
            {path: file.stat.size for path, file in {**self.withheld, **self.by_path}.items()},
        )
        object.__setattr__(
            self, "_stats", tuple(self.by_path[path].stat for path in sorted(self.by_path))
        )

    @property
    def stats(self) -> tuple[Stat, ...]:
        """Return what `lstat` said of each file to send, by path."""
        return self._stats

    @property
    def left_out(self) -> tuple[str, ...]:
        """Return the paths that are not sent: by choice, unfinished, links, and special files."""
        return tuple(sorted({*self.withheld, *self.special_paths, *(s.path for s in self.partial)}))

    @property
    def unpinned(self) -> tuple[str, ...]:
        """Return the paths without a pin: only the trainer's own directory holds them."""
        return tuple(sorted(p for p, file in self.by_path.items() if not file.is_pinned))

    @property
    def files_around(self) -> tuple[str, ...]:
        """Return the full paths of files from around the checkpoint that are sent with it."""
        added = (file for file in self.by_path.values() if file.is_added and not file.is_pinned)
        return tuple(sorted(f"{file.root}/{file.stat.path}" for file in added))

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what an operator should know of the files, a sentence each."""
        notes = []
        if self.special_paths:
            what = "links, special files or names of ckptsync's own"
            notes.append(f"{len(self.special_paths)} {what} are not sent: {self.special_paths[0]}")
        if similar := find_alike(self.by_path):
            first, second = similar[0]
            more = f" (and {len(similar) - 1} more)" if len(similar) > 1 else ""
            what = "can be pulled only to file systems that tell them apart"
            notes.append(f"{first} and {second}{more}: names that {what}")
        return tuple(notes)

    @property
    def unpinned_warning(self) -> tuple[str, ...]:
        """Return a warning if files of an existing checkpoint are not pinned, as with ``push``."""
        count = 0 if self.is_gone else len(self.unpinned)
        return (f"{count} files are not pinned, rotation may delete them",) if count else ()

    def with_added(self, root: Path, files: Iterable[Stat]) -> LocalFiles:
        """Return a copy with pinned files of ``root`` added, except under its own names."""
        added_files = {
            f.path: LocalFile(f, root, is_pinned=True, is_added=True)
            for f in files
            if f.path not in self.by_path
        }
        return replace(self, by_path=added_files | dict(self.by_path))

    def only(self, paths: Collection[str]) -> LocalFiles:
        """Return a copy that sends only these paths; its ``withheld`` are the others to send."""
        chosen = {path: file for path, file in self.by_path.items() if path in paths}
        return replace(
            self,
            by_path=chosen,
            withheld={path: file for path, file in self.by_path.items() if path not in paths},
        )

    def sizes(self) -> Mapping[str, int]:
        """Return path → bytes at the time of the scan, of withheld files, too."""
        return self._sizes

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill ``out`` with a file's bytes from ``start`` on.

        Raises Incomplete for a file that is not here, Corrupt for one that is too short, StoreError
        where the disk refuses.
        """
        file = self.by_path.get(name) or self.withheld.get(name)
        if file is None:
            raise Incomplete(f"{name}: not in {self.name}")
        fd = file.open()
        try:
            OpenLocalFile(self, fd).read_into(name, start, out)
        finally:
            os.close(fd)


@dataclass(frozen=True, slots=True)
class OpenLocalFile:
    """One open file of ``files``; an implementation of `ckptsync.tensors.Files`."""

    files: LocalFiles
    descriptor: int

    def sizes(self) -> Mapping[str, int]:
        """Return path → bytes, as `LocalFiles.sizes` does."""
        return self.files.sizes()

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill ``out`` with the open file's bytes from ``start`` on; ``name`` is its name.

        Raises Corrupt for a file that is too short, StoreError where the disk refuses.
        """
        name_for_errors, bytes_read = f"{self.files.name}/{name}", 0
        while bytes_read < len(out):
            try:
                count = os.preadv(self.descriptor, [out[bytes_read:]], start + bytes_read)
            except OSError as e:
                raise StoreError(f"{name_for_errors}: {e.strerror}", hint=_DISK) from e
            if count == 0:
                raise Corrupt(
                    f"{name_for_errors}: ends at byte {start + bytes_read},"
                    f" {start + len(out)} expected"
                )
            bytes_read += count


def open_each(files: Iterable[LocalFile]) -> Iterator[tuple[LocalFile, int]]:
    """Open the files one after another; yield each with its descriptor, valid until the next.

    A directory is opened once for its files in a row.  Raises Incomplete if a file is gone,
    ConfigError if it may not be read, StoreError.
    """
    for (root, _), several in groupby(
        files, lambda file: (file.root, file.stat.path.rpartition("/")[0])
    ):
        row = list(several)
        with _add_later_hint(), opened_parent(root, row[0].stat.path) as (parent, _):
            for file in row:
                fd = open_in(parent, file.stat.path.rpartition("/")[2], root, file.stat.path)
                try:
                    yield file, fd
                finally:
                    os.close(fd)


@contextlib.contextmanager
def _add_later_hint() -> Iterator[None]:
    """Raise an Incomplete of the block again, with the hint to send a later checkpoint."""
    try:
        yield
    except Incomplete as e:
        raise Incomplete(str(e), hint=LATER) from e


Key = tuple[str, str, int]
"""Run, checkpoint and number of the pin: one save on this node."""


@dataclass(frozen=True, slots=True)
class LocalSave:
    """One save of a checkpoint: its readable files, and its pin (``None``: it is not pinned)."""

    run: str
    checkpoint_dir: CheckpointDir
    files: LocalFiles
    pin: Pin | None

    @property
    def checkpoint(self) -> str:
        """Return the checkpoint's name."""
        return self.checkpoint_dir.name

    @property
    def k(self) -> int:
        """Return the pin's number; 0 without a pin."""
        return self.pin.k if self.pin else 0

    @property
    def key(self) -> Key:
        """Return what names the save on this node."""
        return self.run, self.checkpoint, self.k


def build_local_save(
    run: str,
    checkpoint_dir: CheckpointDir,
    listing: ListedCheckpoint | None,
    pin: Pin | None = None,
) -> LocalSave:
    """Return the save that lies in a source, in a pin, or in both.

    Pinned files are read from the pin.  Names of the pin that the source has lost stay: rotation
    deletes files one by one.
    """
    by_path = (
        {f.path: LocalFile(f, listing.path, is_pinned=False) for f in listing.files}
        if listing
        else {}
    )
    if pin is not None:
        root = pin.root  # a Path costs more than a LocalFile
        by_path |= {f.path: LocalFile(f, root, is_pinned=True) for f in pin.files}
    files = LocalFiles(
        checkpoint_dir.name,
        checkpoint_dir.family,
        by_path,
        listing.partial if listing else (),
        listing.others if listing else (),
        is_gone=listing is None or not (listing.files or listing.partial),
    )
    return LocalSave(run, checkpoint_dir, files, pin)


class Changed(Incomplete):
    """A file is not the one of the scan any more, so what was read of it must not be used."""


def ignore_chunk(_: int) -> None:
    """Do nothing with the number of bytes of a chunk."""


def notes_at_sending(local_save: LocalSave, time_ns: int, save_id: str = "") -> PinNotes:
    """Return a save's pin notes as they are when its sending begins at ``time_ns``.

    Times and an id that were noted before stay.  ``save_id``: used where no commit has an id.
    """
    pin_notes = local_save.pin.notes if local_save.pin else PinNotes()
    commit = local_save.pin.commit if local_save.pin and local_save.pin.is_committed else None
    return replace(
        pin_notes,
        sending=pin_notes.sending or time_ns,
        save=pin_notes.save or (commit.save if commit else save_id),
    )


Layout = tuple[Demands, tuple[str, ...], tuple[str, ...]]
"""What a save's layout demands, its weights sources, and notes for an operator."""


@dataclass(slots=True)
class ReadFiles:
    """What has been read of a save's files, for a later try to send the same ones.

    ``entries``: by path, of the files that were read whole.  ``layout``: ``None`` until the save's
    metadata was read.
    """

    entries: dict[str, FileEntry] = field(default_factory=dict)
    layout: Layout | None = None


def _read_layout(files: LocalFiles, ranks: int | None) -> Layout:
    """Return what a save's layout demands, its weights sources, and notes for an operator.

    An unknown or broken layout becomes the only note, without demands and sources.  Reads metadata
    of the files.  Raises Corrupt for a name that cannot be stored, Incomplete for a file that is
    gone, StoreError.
    """
    try:
        for path in files.by_path:
            checked_path(path)
    except Corrupt as e:
        raise Corrupt(f"not uploaded, since a name cannot be stored: {e}", hint=RENAME) from e
    try:
        demands = _check_model(files, registry.demands(files, files.by_path, ranks))
        return demands, tuple(str(s) for s in registry.sources(files)), demands.remarks
    except (Corrupt, Unsupported) as e:
        # an unknown or broken layout is stored as it is: a note here, the head says it again
        return Demands(), (), (str(e),)


def _check_model(files: LocalFiles, demands: Demands) -> Demands:
    """Return the demands with remarks on what the model lacks, if all of its files are here.

    If it is incomplete, the demands name no model, and the remark is the reason.  Else, and if its
    files are corrupt or unsupported, they are returned as they are.
    """
    if not demands.model or not demands.model.keys() <= files.sizes().keys():
        return demands
    try:
        return replace(demands, remarks=check_complete(files))
    except Incomplete as e:
        return replace(demands, model={}, remarks=(str(e),))
    except (Corrupt, Unsupported):
        return demands  # the head says it


def count_ranks(local_save: LocalSave, spool: Path | None) -> int | None:
    """Return how many ranks wrote a save, or None if no hook has said so.

    The pin's commit says it, else a marker in ``spool``, if given, of the training that ran when
    the last file was written.  At most `file_names.MOST_RANKS`.
    """
    if local_save.pin and local_save.pin.commit and local_save.pin.is_committed:
        ranks: int | None = local_save.pin.commit.world
    else:
        times = (file.stat.mtime for file in local_save.files.by_path.values() if not file.is_added)
        ranks = None if spool is None else count_ranks_at(spool, max(times, default=0) / 1e9)
    return None if ranks is None else min(ranks, file_names.MOST_RANKS)


def draft_manifest(
    local_save: LocalSave,
    node: str,
    pin_notes: PinNotes,
    read_files: ReadFiles,
    *,
    clock_offset: int,
    lost_manifests: tuple[str, ...] = (),
    spool: Path | None = None,
) -> tuple[Manifest, tuple[str, ...]]:
    """Return the manifest of a complete save, and notes on its layout.  Reads metadata only.

    Location and number are still open, and so are the digests of files that are not in
    ``read_files``, which gets the layout.

    Args:
        local_save: the save.
        node: this node's id.
        pin_notes: times and id of the save.
        read_files: what earlier tries have read.
        clock_offset: this node's clock minus the store's, ns.
        lost_manifests: the node's lost manifests of the checkpoint's name.  The draft supersedes
            all of them; `upload.upload` leaves out those of other saves.
        spool: its markers say how many ranks trained, if the training was killed before the hook
            marked the save itself.

    Raises:
        Incomplete: a file has changed meanwhile.
        Corrupt: a file's name cannot be stored.

    """
    files = local_save.files
    demands, sources, notes = _layout_of(local_save, read_files, spool)
    first_written, last_written = _written_between(files)
    manifest = Manifest(
        local_save.run,
        local_save.checkpoint,
        "",
        node,
        0,
        tuple(read_files.entries.get(s.path) or undigested_entry(s) for s in files.stats),
        file_names.ranks(sorted(files.by_path)),
        first_written,
        last_written,
        demands,
        sources,
        save=pin_notes.save,
        clock_offset=clock_offset,
        supersedes=lost_manifests,
        version=__version__,
        trainer=_trainer_of(local_save),
        times={
            key: time_ns
            for key, time_ns in (("finished", pin_notes.finished), ("sending", pin_notes.sending))
            if time_ns
        },
    )
    return manifest, notes


def _layout_of(local_save: LocalSave, read_files: ReadFiles, spool: Path | None) -> Layout:
    """Return ``read_files.layout``; if it is None, read the save's metadata and set it.

    Raises Incomplete for a file that has changed since the scan, and then sets nothing; Corrupt for
    a name that cannot be stored.
    """
    if read_files.layout is None:
        layout = _read_layout(local_save.files, count_ranks(local_save, spool))
        check_unchanged(local_save.files)
        read_files.layout = layout
    return read_files.layout


def _written_between(files: LocalFiles) -> tuple[int, int]:
    """Return the mtimes (ns) of the oldest and the newest file; zeros without any.

    Files that the hook added do not count: they are as old as the training.
    """
    mtimes = [file.stat.mtime for file in files.by_path.values() if not file.is_added]
    return min(mtimes, default=0), max(mtimes, default=0)


def _trainer_of(local_save: LocalSave) -> str:
    """Return the trainer as the pin's commit says it (200 characters at most), else the family."""
    commit = local_save.pin.commit if local_save.pin and local_save.pin.is_committed else None
    trainer = "".join(c for c in commit.trainer if c.isprintable())[:200] if commit else ""
    return trainer or local_save.checkpoint_dir.family


def undigested_entry(stat: Stat) -> FileEntry:
    """Return the manifest's entry of a file whose digest is still open."""
    return FileEntry(stat.path, stat.size, "", 0, (), stat.mtime)


def check_unchanged(files: LocalFiles) -> None:
    """Raise Changed, or Incomplete, unless every file is still the one of the scan."""
    for file, fd in open_each(files.by_path.values()):
        _check_same(file.stat, stat_open(fd, file.stat.path))


def read_chunks(
    file: LocalFile, after_chunk: AfterChunk, clone: int | None = None
) -> Iterator[memoryview]:
    """Yield a file's bytes, a chunk at a time, in one buffer that the next chunk overwrites.

    ``after_chunk`` is called when the next chunk is requested.  At the end the file's pages leave
    the page cache.  ``clone``: a descriptor of a reflink of the file, which is read instead.
    Raises Changed, perhaps after the last chunk only, if it is not the file of the scan;
    Incomplete if it is gone, Transient once the process is about to end, StoreError.
    """
    size, path = file.stat.size, file.stat.path
    buffer = chunk_room(min(CHUNK, size))
    fd = file.open()
    try:
        _check_same(file.stat, stat_open(fd, path))
        remaining = size  # a file that grows is read no further than it was at the scan
        while remaining:
            try:
                count = os.preadv(
                    fd if clone is None else clone, [buffer[:remaining]], size - remaining
                )
            except OSError as e:
                if e.errno == errno.ESTALE:
                    raise Changed(f"{path}: deleted while it was read", hint=LATER) from e
                raise StoreError(f"{file.root}/{path}: {e.strerror}", hint=_DISK) from e
            if not count:
                break
            progress_signs.check_shutdown(path)
            remaining -= count
            yield buffer[:count]
            after_chunk(count)
        _check_same(file.stat, stat_open(fd, path))
        # training wants the memory more than we do
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _check_same(before: Stat, after: Stat) -> None:
    """Raise Changed if a file was written between two stats."""
    if before.was_touched(after):
        raise Changed(f"{before.path}: changed while it was read", hint=AGAIN)


# Copies of this node's manifests in the spool.


def write_manifest_copy(output_dir: Path, name: str, data: bytes) -> None:
    """Write a copy of a manifest into the spool, if there is one; ignore a disk that refuses it."""
    path = _copy_path(output_dir, name)
    if not (output_dir / SPOOL).is_dir():
        return
    with contextlib.suppress(CkptsyncError), translate_errors(output_dir):
        safe_files.make_folders(path.parent)
        safe_files.write(path, data)


def read_manifest_copy(output_dir: Path, name: RecordName) -> bytes | None:
    """Return the copy of one of this node's manifests.

    None without one that can be read and has the record's digest.
    """
    with contextlib.suppress(CkptsyncError, OSError), translate_errors(output_dir):
        data = safe_files.read(_copy_path(output_dir, str(name)))
        return data if data is not None and digest(data)[:16] == name.digest else None
    return None


def remove_manifest_copies(output_dir: Path, checkpoints: Collection[str]) -> None:
    """Remove the copies of manifests of checkpoints that are not in ``checkpoints``.

    Raises StoreError or ConfigError where the disk refuses.
    """
    for path in safe_files.list_paths(output_dir / SPOOL / "manifests"):
        if checkpoint_of(path.name) not in checkpoints:
            with contextlib.suppress(Incomplete), translate_errors(path):
                safe_files.remove(path)


def _copy_path(output_dir: Path, name: str) -> Path:
    """Return the path of a record's copy; its name ends in ``<location>/<record>``."""
    return output_dir.joinpath(SPOOL, "manifests", *name.split("/")[-2:])
