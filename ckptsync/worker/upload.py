"""Sends a node's part of a save: files first, its manifest last.

A node may be killed at any moment, others write into the same location, and a store has no locks.
So every step looks at what the store has and adds what is missing: killed anywhere and called
again, with or without memory, it finishes the job.

A file lies under its plain name if this node could create that name, or if the name has the same
bytes already; else under this node's name (`FileEntry.stored_as`).  The manifest says where it
lies, and it stays there: nothing moves when another node sends its part.

A file that no manifest names is digested while it is sent.  A file that some manifest names is read
first, and mostly need not be sent.

Writers cannot lock a store, so a location, or the name of a file, may turn out to be another save's
once all manifests are known.  Then `correct_location` moves the save: it stores files, then a
further manifest of this node, and deletes nothing, since a worker may not be allowed to.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from ckptsync.digest import BLOCK_HEX
from ckptsync.errors import Exists, Incomplete, StoreError, Unsupported
from ckptsync.records import io, manifest_groups
from ckptsync.records.io import next_number
from ckptsync.records.manifest import FileEntry, Manifest
from ckptsync.records.manifest_groups import StoredManifest
from ckptsync.records.store_paths import (
    checked_own,
    file_name,
    node_file_name,
    own_prefixes,
    records_prefix,
    sending_prefix,
)
from ckptsync.records.upload_decision import (
    Reading,
    Unsent,
    UploadDecision,
    decide,
    list_doubtful_names,
    list_left_behind,
    list_unsent,
    part_of,
)
from ckptsync.spool.markers import PinNotes
from ckptsync.stores.contract import About, Store
from ckptsync.stores.limits import Limits
from ckptsync.walk import SPOOL
from ckptsync.worker.local_save import (
    AGAIN,
    AfterChunk,
    LocalFile,
    LocalFiles,
    LocalSave,
    ReadFiles,
    check_unchanged,
    draft_manifest,
    ignore_chunk,
    write_manifest_copy,
)
from ckptsync.worker.results import UploadProgress
from ckptsync.worker.store_view import StoreView
from ckptsync.worker.upload_sources import (
    FilePool,
    Guarded,
    StoreSource,
    Transfer,
    UploadSource,
    is_stored,
)

# times that a save is sent: other nodes write manifests meanwhile, and each may show that the save
# belongs in another location
ROUNDS = 5
SMALL_FILE = 1 << 20  # bytes of a file that costs a round trip rather than bandwidth
SMALL_AT_ONCE = 4  # times as many as large ones
ANNOUNCE_EVERY = 60.0  # seconds
_LEAST_ENTRY = 200  # bytes of a file in a manifest


@dataclass(frozen=True, slots=True)
class UploadContext:
    """Where a checkpoint is uploaded to, and how.

    ``after_chunk``: called from one thread at a time.  ``threads``: large files sent at once;
    ``small``: files at once that cost a round trip rather than bandwidth, 0: `small_at_once` of
    ``threads``.  ``may_wait``: the caller tries again and again, so an upload may wait for proof.
    ``output_dir``: its spool keeps copies of the manifests.  ``transfer``: counts what is sent.
    """

    view: StoreView
    checkpoint: str
    after_chunk: AfterChunk = ignore_chunk
    threads: int = Limits().threads
    small: int = 0
    may_wait: bool = False
    output_dir: Path | None = None
    transfer: Transfer = field(default_factory=partial(Transfer, 0))

    @property
    def store(self) -> Store:
        """Return the store."""
        return self.view.store

    @property
    def run(self) -> str:
        """Return the run's name."""
        return self.view.run

    @property
    def node(self) -> str:
        """Return the id of the node that uploads."""
        return self.view.node

    def read(self) -> Reading:
        """Refresh the view; return the records of the checkpoint's name.  Raises StoreError."""
        records = self.view.refresh()
        return records.reading(self.node, self.run, self.checkpoint, time.time_ns())

    def commit(self, manifest: Manifest) -> None:
        """Write a manifest into the store, and a copy into the spool of ``output_dir``, if given.

        Raises StoreError; a spool that refuses the copy is ignored.
        """
        name, data = io.create_record(self.store, manifest)
        if self.output_dir is not None:
            write_manifest_copy(self.output_dir, name, data)


def small_at_once(threads: int) -> int:
    """Return how many small files are sent beside ``threads`` large ones; 1 if that is 1."""
    return SMALL_AT_ONCE * threads if threads > 1 else 1


@dataclass(frozen=True, slots=True)
class Sent:
    """The result of an upload.

    ``location``: of the save.  ``files`` and ``size``: what this call stored.  ``stored_before``: a
    manifest that already has all of the save; then nothing was written.  ``notes``: on its layout.
    """

    location: str
    files: int = 0
    size: int = 0
    stored_before: Manifest | None = None
    notes: tuple[str, ...] = ()


def send_save(
    local_save: LocalSave, pin_notes: PinNotes, context: UploadContext, read_files: ReadFiles
) -> Sent:
    """Store a save's files and then its manifest, and move it if it belongs in another location.

    Return what was sent, with the final location.  ``pin_notes``: the save's times and id.  What is
    read is added to ``read_files``, for a later try.  Raises Changed, Incomplete, Corrupt (a name
    that cannot be stored), Unsupported, StoreError.
    """
    lost_manifests = context.view.run_records.lost_of(context.node, local_save.checkpoint)
    spool = context.output_dir / SPOOL if context.output_dir else None
    draft, notes = draft_manifest(
        local_save,
        context.node,
        pin_notes,
        read_files,
        clock_offset=context.view.offset(),
        lost_manifests=lost_manifests,
        spool=spool,
    )
    result = upload(draft, local_save.files, context, read_files.entries)
    location = correct_location(context.node, result.location, local_save.files, context)
    return replace(result, location=location, notes=notes)


def sent_progress(local_save: LocalSave, result: Sent) -> UploadProgress:
    """Return the progress, phase ``sent``, of an upload that has ended."""
    files, files_around = local_save.files, local_save.files.files_around
    around_note = (
        (f"not in the checkpoint, and sent with it: {', '.join(files_around)}",)
        if files_around
        else ()
    )
    notes = (*result.notes, *files.notes, *around_note)
    return UploadProgress(
        local_save.run,
        local_save.checkpoint,
        local_save.k,
        "sent",
        "sent",
        result.location,
        result.files,
        result.size,
        notes,
        files.left_out,
        files_around,
    )


def upload(
    draft: Manifest,
    files: LocalFiles,
    context: UploadContext,
    read_entries: dict[str, FileEntry] | None = None,
) -> Sent:
    """Store the files that ``draft`` names, then the manifest; return what was sent.

    It reads the records, decides, sends, and repeats that until the decision stays the same, at
    most `ROUNDS` times.  If a manifest has all files already, nothing is written.

    Args:
        draft: of its ``supersedes``, the manifest keeps those of its own location.
        files: the files here.
        context: where and how.
        read_entries: entries of files that have been read, by path; entries that are read here are
            added.

    Raises:
        Incomplete: a file has changed, another node's part may belong to the same save, or other
            nodes keep moving it.  No manifest was written.
        Unsupported, StoreError: a manifest cannot say this, or the store refuses.

    """
    _check_recordable(draft)
    sender = FileSender(files, context, read_entries)
    last_decision: UploadDecision | None = None
    entries: tuple[FileEntry, ...] = ()
    with contextlib.ExitStack() as announcement:
        for round_number in range(ROUNDS + 2):
            reading = context.read()
            draft = sender.digest_named(draft, reading.manifests)
            decision = decide(draft, reading)
            # files may have taken hours, and the manifest must fit what others say by now
            if last_decision is not None and decision.is_same(last_decision):
                return sender.commit(decision.part, entries, reading.manifests)
            if decision.recorded is not None:
                return Sent(decision.recorded.location, stored_before=decision.recorded)
            if round_number > ROUNDS:  # no round is left to commit what would be sent
                break
            if round_number:
                last_decision, entries = decision, sender.send(decision.part, decision.unsent)
                continue
            # Before the announcement: what is stored needs none, and two nodes that have announced
            # themselves would wait for each other.
            if context.may_wait and decision.is_early:
                raise Incomplete(
                    f"{draft.checkpoint}: ckptsync cannot prove yet that another node's part"
                    " belongs to the same save",
                    hint="it is tried again",
                )
            # the next reading: whoever announced itself before this node has its manifest there,
            # or is seen
            announcement.enter_context(sender.announce())
    raise Incomplete(
        f"{draft.checkpoint}: other nodes kept moving the save to another location",
        hint="it is tried again",
    )


def _check_recordable(draft: Manifest) -> None:
    """Raise Unsupported for an mtime before 1677 or after 2262, or if the manifest is too long."""
    for file in draft.files:
        if not -(2**63) <= file.mtime < 2**63:
            raise Unsupported(
                f"{file.path}: its time is after the year 2262",
                hint="`touch` it: a trainer's clock was wrong",
            )
    if len(draft.files) * _LEAST_ENTRY > io.LIMITS["manifest"]:
        longest = tuple(replace(f, digest="0" * 64, blocks=("0" * BLOCK_HEX,)) for f in draft.files)
        io.encode(replace(draft, files=longest))


class FileSender:
    """Sends the files of one upload.

    ``files``: the files here.  ``read_entries``: entries of files that have been read, by path; the
    caller's own dict, which is added to, for a later try.  ``stored_entries``: entries of what it
    has stored, by name in the store.  ``overwrote_orphan``: it has replaced a file that no manifest
    names.  ``source_manifests``: of stored files, from which it reads what is not here any more.
    """

    def __init__(
        self,
        files: LocalFiles,
        context: UploadContext,
        read_entries: dict[str, FileEntry] | None = None,
    ) -> None:
        """Begin without files sent; the context's ``after_chunk`` runs within the sender's pool."""
        self.files, self.read_entries = files, {} if read_entries is None else read_entries
        self.pool = FilePool(context.threads, context.after_chunk)
        self.context = replace(context, after_chunk=self.pool.end_chunk)
        self.source_manifests: Sequence[Manifest] = ()
        self.stored_entries: dict[str, FileEntry] = {}
        self.overwrote_orphan = False

    def digest_named(self, draft: Manifest, manifests: Sequence[StoredManifest]) -> Manifest:
        """Read the files that one of ``manifests`` names; return the draft with their digests.

        Files with a digest are not read again.  Raises as `UploadSource.__iter__` does.
        """
        named_paths = {f.path for stored in manifests for f in stored.manifest.files}
        unread_files = [f for f in draft.files if f.path in named_paths and not f.digest]
        self.pool.each(lambda file: self._record_digest(self._source(file)), unread_files)
        return replace(draft, files=tuple(self.read_entries.get(f.path, f) for f in draft.files))

    @contextlib.contextmanager
    def announce(self) -> Iterator[None]:
        """Announce in the store, until the block ends, that this node is sending.

        The announcement is renewed every minute, between chunks.  Without it, other nodes would
        take files that no manifest names yet for orphans.  Raises StoreError if the announcement
        cannot be written, and in the thread of a chunk if it cannot be renewed; one that cannot be
        ended is ignored.
        """
        context, before, last = self.context, self.pool.after_chunk, 0.0
        name = sending_prefix(context.run, context.checkpoint) + context.node

        def write(content: bytes) -> None:
            """Write the announcement; an empty one ends it."""
            nonlocal last
            context.store.write(name, [content], About(len(content)))
            last = time.monotonic()

        def renew(count: int) -> None:
            """Write the announcement again if the last one is a minute old; count the chunk."""
            if time.monotonic() - last > ANNOUNCE_EVERY:
                write(b"sending\n")
            before(count)

        write(b"sending\n")
        self.pool.after_chunk = renew
        try:
            yield
        finally:
            self.pool.after_chunk = before
            # if it fails, other nodes only wait longer than they need
            with contextlib.suppress(StoreError):
                write(b"")

    def send(self, draft: Manifest, unsent: Sequence[Unsent]) -> tuple[FileEntry, ...]:
        """Store the files of ``draft.location`` that are not there yet, small files first.

        Return their entries, which say under which names they lie; begin to count the transfer
        anew.  Raises the first error of a file: Changed, Incomplete, StoreError or Transient.
        """
        # nothing else needs the listing, and the first byte waits
        is_listed = any(u.plain == "same" for u in unsent)
        stored_sizes = (
            {e.name: e.size for e in self.context.store.names(f"{draft.run}/{draft.location}/")}
            if is_listed
            else {}
        )

        unsent_size = sum(u.entry.size for u in unsent)
        self.context.transfer.restart(sum(f.size for f in draft.files), unsent_size)

        def put(file: Unsent) -> FileEntry:
            """Store a file, count it, and return its entry."""
            entry = put_file(file)
            self.context.transfer.end(entry)
            return entry

        def put_file(file: Unsent) -> FileEntry:
            """Store under the plain name, or the node's if that holds others; return the entry."""
            plain = file_name(draft.run, draft.location, file.entry.path)
            name = checked_own(plain, own_prefixes(draft.run, draft.location))
            has_plain_name = file.plain != "other" and (
                name in self.stored_entries
                or (file.plain == "same" and stored_sizes.get(name) == file.entry.size)
                or self._put_plain(draft, file.entry, name)
            )
            entry = self.read_entries.get(file.entry.path, file.entry)
            return (
                replace(entry, stored_as="")
                if has_plain_name
                else self.put_under_own_name(draft, entry)
            )

        small = [u for u in unsent if u.entry.size <= SMALL_FILE]
        large = [u for u in unsent if u.entry.size > SMALL_FILE]
        small_threads = self.context.small or small_at_once(self.context.threads)
        return (*self.pool.each(put, small, small_threads), *self.pool.each(put, large))

    def commit(
        self, part: Manifest, entries: Sequence[FileEntry], manifests: Sequence[StoredManifest]
    ) -> Sent:
        """Write the manifest of ``entries``; return how many files and bytes this sender stored.

        It supersedes lost manifests of its location (unless an orphan was overwritten) and this
        node's manifests elsewhere that name only its files.  Raises Changed or Incomplete, and
        writes nothing, if a file has changed since the scan; ConfigError, StoreError.
        """
        check_unchanged(self.files)
        prefix = records_prefix(part.run, part.location)
        # An orphan lay under a name: the lost manifest was another save's, so it is not superseded.
        lost = () if self.overwrote_orphan else part.supersedes
        supersedes = {n for n in lost if n.startswith(prefix)}
        supersedes.update(list_left_behind(part, manifest_groups.live_manifests(manifests)))
        n = next_number((stored.name for stored in manifests), part.location, "manifest", part.node)
        self.context.commit(
            replace(part_of(part, entries), n=n, supersedes=tuple(sorted(supersedes)))
        )
        sizes = [f.size for f in self.stored_entries.values()]
        return Sent(part.location, len(sizes), sum(sizes))

    def _put_plain(self, draft: Manifest, file: FileEntry, name: str) -> bool:
        """Store a file under its plain name; return whether the name has its bytes now.

        If the name exists, the file is read, and so is the stored one if the store cannot tell
        whether they are the same.  An orphan of other bytes is replaced.  Raises as `send`.
        """
        source, store = self._source(file), self.context.store
        try:
            with self.context.transfer.of(source):
                store.create(name, source, source.about)
        except Exists as e:
            file = self._record_digest(source)
            if e.is_same or (
                e.is_same is None and is_stored(store, name, file, self.context.after_chunk)
            ):
                return True
            return self._overwrite_orphan(draft, name, source)
        self.stored_entries[name] = self._record_digest(source)
        return True

    def _overwrite_orphan(
        self, draft: Manifest, name: str, source: UploadSource | StoreSource
    ) -> bool:
        """Replace an orphaned file; return False if another node is sending, or has named it.

        The records are read before, and again before the new bytes get the name.  If it was
        replaced, sets ``overwrote_orphan`` and records its digest in ``stored_entries``.
        """
        file = source.entry

        def check() -> None:
            """Raise _NameClaimed if a manifest names the file with other bytes."""
            manifests = manifest_groups.manifests_in(draft.location, self.context.read().manifests)
            if any(
                m.stored_name(f) == name and f.digest != file.digest
                for m in manifests
                for f in m.files
            ):
                raise _NameClaimed(f"{name}: another node has claimed this name")

        if self.context.read().is_contended:
            return False
        try:
            # after that: a node that has ended meanwhile has its manifest among those read now
            check()
            with self.context.transfer.of(source):
                self.context.store.write(name, Guarded(source, check), source.about)
        except _NameClaimed:
            return False
        self.overwrote_orphan = True
        self.stored_entries[name] = self._record_digest(source)
        return True

    def put_under_own_name(self, draft: Manifest, file: FileEntry) -> FileEntry:
        """Store a file under this node's own name; return its entry, which says so.

        Sends nothing if this sender has stored it there, or the name has the bytes of the file's
        known digest, for which the stored file is read; else overwrites.  Adds what it sends to
        ``stored_entries``.  Raises as `send`.
        """
        own_name = node_file_name(draft.run, draft.location, draft.node, file.path)
        name = checked_own(own_name, own_prefixes(draft.run, draft.location))
        if name not in self.stored_entries and not (
            file.digest and is_stored(self.context.store, name, file, self.context.after_chunk)
        ):
            source = self._source(file)
            with self.context.transfer.of(source):
                self.context.store.write(name, source, source.about)
            self.stored_entries[name] = self._record_digest(source)
        return replace(self.read_entries.get(file.path, file), stored_as=name)

    def _record_digest(self, source: UploadSource | StoreSource) -> FileEntry:
        """Return a source's entry with its digest, and remember it; read the file if need be."""
        entry = source.digested()
        self.read_entries[entry.path] = entry
        return entry

    def _source(self, file: FileEntry) -> UploadSource | StoreSource:
        """Return where a file's bytes are read: on this node, else in the store under another name.

        Reads a whole file to compare it if its time differs, or if it is the store's.  Raises
        Incomplete if neither has the bytes any more.
        """
        file = self.read_entries.get(file.path, file)
        local_file = self.files.by_path.get(file.path)
        if local_file is not None and self._has(local_file, file):
            return UploadSource(
                local_file,
                self.context.node,
                file,
                self.context.after_chunk,
                len(self.files.by_path),
            )
        for name in dict.fromkeys(
            m.stored_name(f) for m in self.source_manifests for f in m.files if f.path == file.path
        ):
            if is_stored(self.context.store, name, file, self.context.after_chunk):
                return StoreSource(
                    self.context.store, name, file, self.context.node, self.context.after_chunk
                )
        raise Incomplete(
            f"{file.path}: neither this node nor the store has the file any more", hint=AGAIN
        )

    def _has(self, local_file: LocalFile, file: FileEntry) -> bool:
        """Return whether a local file has the bytes of an entry.

        False if sizes differ.  True, without reading, if the mtimes do not.  Else the whole file is
        read: the entry may be another node's, with the same bytes and another time.  Raises as
        `UploadSource.__iter__`.
        """
        if (local_file.stat.size, local_file.stat.mtime) == (file.size, file.mtime):
            return True
        source = UploadSource(
            local_file, self.context.node, after_chunk=lambda _: self.context.after_chunk(0)
        )
        return local_file.stat.size == file.size and source.digested().digest == file.digest


class _NameClaimed(Incomplete):
    """Another node has named what was about to be replaced."""


def correct_location(node: str, location: str, files: LocalFiles, context: UploadContext) -> str:
    """Move a stored save to where all manifests known now put it; return its location afterwards.

    ``node``: whose part it is; ``context.node`` moves it, mostly the same.  Nothing moves while
    another node sends files of that checkpoint: a later call does it.  A file is stored again,
    under this node's own name, if another save may have its name.  Raises Changed or Incomplete if
    the bytes are nowhere any more, StoreError.
    """
    # of most saves nothing has to move, and nothing is announced for them
    manifests = context.read().manifests
    home = manifest_groups.better_location(node, location, manifests)
    is_exclusive = context.store.is_exclusive
    if home == location and not list_doubtful_names(
        node, location, manifests, is_exclusive=is_exclusive
    ):
        return location
    sender = FileSender(files, context)
    with sender.announce():
        # once this node has announced itself, either it sees that another node sends, or that node
        # sees this one
        is_contended = context.read().is_contended
        # after that: a node that has ended meanwhile has its manifest among those read now
        manifests = context.read().manifests
        home = manifest_groups.better_location(node, location, manifests)
        if home != location and not is_contended:
            _move_save(node, location, home, manifests, sender)
            location, manifests = home, context.read().manifests  # with the manifest written there
        _store_beside(node, location, manifests, sender)
    return location


def _move_save(
    node: str, location: str, home: str, manifests: Sequence[StoredManifest], sender: FileSender
) -> None:
    """Store at ``home`` what a node has in another location, and write a manifest there.

    Nothing is deleted.  The manifest is of this ``node``, and sets ``sender.source_manifests``.
    Raises as `FileSender.send`.
    """
    own_manifests, manifests_at_home = (
        _own_manifests(node, location, manifests),
        manifest_groups.manifests_in(home, manifests),
    )
    number = next_number((stored.name for stored in manifests), home, "manifest", node)
    manifest = manifest_groups.moved_manifest(own_manifests, home, number)
    sender.source_manifests = [
        *manifest_groups.manifests_in(location, manifests),
        *manifests_at_home,
    ]
    entries = {f.path: f for m in manifests_at_home if m.node == node for f in m.files}
    entries |= {f.path: f for f in sender.send(manifest, list_unsent(manifest, manifests_at_home))}
    files = tuple(replace(f, stored_as=entries[f.path].stored_as) for f in manifest.files)
    sender.context.commit(replace(manifest, files=files))


def _store_beside(
    node: str, location: str, manifests: Sequence[StoredManifest], sender: FileSender
) -> None:
    """Store files under the node's own names if another node has overwritten, or claims, theirs.

    Only files of `list_doubtful_names` are checked, by reading the stored file.  The smallest node
    id keeps a name that several nodes claim, if its bytes are there.  If a name changes, a further
    manifest of the node says so.  Raises as `correct_location`.
    """
    is_exclusive = sender.context.store.is_exclusive
    names = list_doubtful_names(node, location, manifests, is_exclusive=is_exclusive)
    if not names:
        return
    manifests_here = manifest_groups.manifests_in(location, manifests)
    own_manifests = _own_manifests(node, location, manifests)
    digests = {
        stored_file.name: stored_file.entry.digest
        for stored_files in manifest_groups.locate_files(manifests_here).values()
        for stored_file in stored_files
    }
    number = next_number((stored.name for stored in manifests), location, "manifest", node)
    manifest = manifest_groups.moved_manifest(own_manifests, location, number)
    sender.source_manifests = manifests_here

    def is_well(file: FileEntry) -> bool:
        """Return whether a file's name is not doubtful, or, read, holds the file's bytes."""
        name = manifest.stored_name(file)
        return name not in names or (
            digests[name] == file.digest
            and bool(is_stored(sender.context.store, name, file, sender.context.after_chunk))
        )

    files = tuple(
        f if is_well(f) else sender.put_under_own_name(manifest, f) for f in manifest.files
    )
    if files != manifest.files:
        sender.context.commit(replace(manifest, files=files))


def _own_manifests(
    node: str, location: str, manifests: Iterable[StoredManifest]
) -> list[StoredManifest]:
    """Return a node's manifests of a location that are not superseded."""
    return [
        stored
        for stored in manifest_groups.live_manifests(manifests)
        if (stored.manifest.node, stored.manifest.location) == (node, location)
    ]
