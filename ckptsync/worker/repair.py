"""Sends again the files that a report calls damaged, and this node's own damaged manifests.

The verifier cannot repair: only a node that still has the bytes can.  So a report that says DAMAGED
is the request.  A file is sent again if this node named it, or has a copy of it, and its bytes have
the digest that the manifest names.  A manifest that is damaged or gone is written again from the
copy in the spool.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

from ckptsync.errors import CkptsyncError, Incomplete, StoreError, without_frames
from ckptsync.records import manifest_groups
from ckptsync.records.location_status import LocationRecords, proof
from ckptsync.records.manifest import FileEntry
from ckptsync.records.progress import Progress
from ckptsync.records.report import DAMAGE, OF_BYTES
from ckptsync.records.save_decisions import fate
from ckptsync.records.store_paths import (
    checked_own,
    checkpoint_of,
    own_prefixes,
    records_prefix,
)
from ckptsync.records.upload_decision import KnownDigests
from ckptsync.spool.safe_files import list_paths
from ckptsync.stores import progress_signs
from ckptsync.stores.contract import About, Store
from ckptsync.walk import SPOOL, walk
from ckptsync.worker.file_selection import EVERYTHING
from ckptsync.worker.local_save import LocalFile, LocalFiles, LocalSave, read_manifest_copy
from ckptsync.worker.model_configs import outgoing_save
from ckptsync.worker.options import RunDir
from ckptsync.worker.queue import Name, QueueCapacity, UploadJob, UploadQueues
from ckptsync.worker.results import Failure, RepairedFile, describe_failure
from ckptsync.worker.store_view import StoreView
from ckptsync.worker.upload_sources import Transfer, UploadSource, is_stored


@dataclass(frozen=True, slots=True)
class RepairRequest:
    """One damaged file that this node has named, or has a copy of.

    ``finding``: its name in the report.  ``name``: its name in the store.  ``entry``: what its
    bytes should be.
    """

    report: str
    finding: str
    name: str
    entry: FileEntry
    kind: str


def list_requests(
    records: LocationRecords,
    node: str,
    location: str,
    manifests: Iterable[manifest_groups.StoredManifest],
    has_copy: Callable[[FileEntry], bool] = lambda _: False,
) -> tuple[RepairRequest, ...]:
    """Return the damaged files of a location that ``node`` should send again.  Pure.

    () if the location has no manifest, is retired, or has given up its shards. Reports that a later
    one answers do not count, nor names that several nodes claim.  Each file is listed once, by the
    newest report. ``manifests``: all of the checkpoint's name.  ``has_copy``: whether the node has
    a copy of a file that another node named.
    """
    manifests_here = [
        stored
        for stored in manifest_groups.live_manifests(manifests)
        if stored.manifest.location == location
    ]
    decision = fate(records.tombstones, {stored.name for stored in manifests_here})
    if not manifests_here or decision.retired or decision.shards:
        return ()
    run = manifests_here[0].manifest.run
    located = [
        stored_file
        for stored_files in manifest_groups.locate_files(
            stored.manifest for stored in manifests_here
        ).values()
        for stored_file in stored_files
        if node in stored_file.nodes or has_copy(stored_file.entry)
    ]
    # where two nodes name one stored file, the other's bytes may lie there: that node stores them
    # elsewhere first
    contested = manifest_groups.contested_names(stored.manifest for stored in manifests_here)
    own_files = {
        stored_file.name: stored_file
        for stored_file in located
        if stored_file.name not in contested
    }
    requested: dict[str, RepairRequest] = {}
    for report in proof(records.reports, {stored.name for stored in manifests_here}, "").damage:
        for finding in records.reports[report].findings:
            stored_file = own_files.get(f"{run}/{finding.name}")
            if stored_file is not None and finding.kind in DAMAGE:
                name = checked_own(stored_file.name, own_prefixes(run, location))
                requested[name] = RepairRequest(
                    report, finding.name, name, stored_file.entry, finding.kind
                )
    return tuple(requested[name] for name in sorted(requested))


def find_copies(
    local_saves: Sequence[LocalSave], digests_read: KnownDigests
) -> Callable[[FileEntry], bool]:
    """Return a predicate: whether one of the saves here has the bytes of a stored file.

    It goes by the file's time, if that has a fraction of a second, or by a digest that was read.
    """
    keys = {(f.path, f.size, f.mtime) for local_save in local_saves for f in local_save.files.stats}
    digests = {(key[0], digest) for key, digest in digests_read.items() if key in keys}

    def has(entry: FileEntry) -> bool:
        """Return whether a save here has this file."""
        is_same = entry.mtime % 10**9 != 0 and (entry.path, entry.size, entry.mtime) in keys
        return is_same or (entry.path, entry.digest) in digests

    return has


def send_again(
    request: RepairRequest,
    file_sets: Iterable[LocalFiles],
    store: Store,
    node: str,
    added_files: Iterable[LocalFile] = (),
    *,
    transfer: Transfer | None = None,
) -> str:
    """Send a damaged file again; return the reason why that was not possible, empty if it was.

    The stored file is overwritten by the first copy that has the digest of its entry.  If the
    report is not about bytes, the stored file is read first, and nothing is sent if it is as it was
    uploaded.  Raises StoreError of the store, or of this node's disk if no other copy is here.

    Args:
        request: the file.
        file_sets: the files of the saves here.
        store: the store.
        node: this node's id.
        added_files: files of the hook, which are read if no save has the file.
        transfer: counts what is sent.

    """
    entry, read_error = request.entry, None
    if request.kind not in OF_BYTES and is_stored(store, request.name, entry, _show_progress):
        return (
            "the store has exactly what this node uploaded: the file was damaged before the upload"
        )
    candidates = [files.by_path[entry.path] for files in file_sets if entry.path in files.by_path]
    candidates.sort(key=lambda local_file: local_file.stat.mtime != entry.mtime)
    for local_file in chain(candidates, added_files):
        if (local_file.stat.path, local_file.stat.size) != (entry.path, entry.size):
            continue
        source = UploadSource(local_file, node, entry, _show_progress)
        try:
            for _ in source:
                pass  # once for the digest alone: wrong bytes need not travel to be refused
        except Incomplete:  # other bytes by now: the next candidate may have the right ones
            continue
        except StoreError as e:  # of this node's disk: the next candidate may be well
            read_error = without_frames(e)
            continue
        transfer = transfer or Transfer(entry.size)
        try:
            with transfer.of(source):
                store.write(request.name, source, source.about)
        except Incomplete:  # changed since
            continue
        transfer.end(entry)
        return ""
    if read_error:  # it may pass
        raise read_error
    return "this node no longer has the file"


def _show_progress(_: int) -> None:
    """Signal to the watchdog that bytes were read."""
    progress_signs.sign()


def list_added_files(output_dir: Path) -> Iterator[LocalFile]:
    """Yield each file that the hook has added to any save, once for all of its links; lazy.

    Raises as `list_paths` and `walk`.
    """
    spool = output_dir / SPOOL
    inodes: set[tuple[str, int, int]] = set()
    pins = (pin / "added" for pin in list_paths(spool / "pins"))
    for folder in (*list_paths(spool / "added"), *pins):
        for stat in walk(folder).files:
            if (stat.path, stat.device, stat.inode) not in inodes:
                inodes.add((stat.path, stat.device, stat.inode))
                yield LocalFile(stat, folder, is_pinned=True, is_added=True)


class FileRepairs:
    """Plans which damaged files are sent again, and remembers what became of each.

    `plan` and `result` are for one thread; queues send in others.  ``_answered``: report and
    finding of each request that was tried, with the reason where the file could not be sent; kept
    until no report names it.
    """

    def __init__(self, run: RunDir, view: StoreView, queues: UploadQueues) -> None:
        """Begin without repairs; read nothing."""
        self._run, self._view, self._queues = run, view, queues
        self._answered: dict[tuple[str, str], str] = {}
        self._without_copy: tuple[str, ...] = ()
        self._news: deque[RepairedFile | Failure] = deque()
        self._done: list[RepairedFile | Failure] = []
        # what is queued or being sent, by run and location; times are monotonic
        self._pending: dict[Name, Progress] = {}
        self._transfers: dict[Name, Transfer] = {}

    def repair_manifests(self) -> list[Failure]:
        """Write this node's damaged or lost manifests again, where the spool has a copy.

        Return what the store refused; those without a copy are remembered for `lacking`.  After a
        write the view is refreshed, which may raise StoreError.
        """
        run, view, written = self._run, self._view, False
        failures: list[Failure] = []
        without_copy: list[str] = []
        for name in view.run_records.unusable_manifests(view.node):
            data = read_manifest_copy(run.path, name)
            if data is None:
                without_copy.append(str(name))
                continue
            try:
                full = checked_own(str(name), own_prefixes(name.run, name.location))
                view.store.write(full, [data], About(len(data)))
                written = True
            except CkptsyncError as e:
                failures.append(describe_failure(run.name, checkpoint_of(name.location), e))
        if written:
            view.refresh()
        self._without_copy = tuple(without_copy)
        return failures

    def running(self, offset: float) -> list[Progress]:
        """Return the repairs that wait or are being sent.  Thread-safe.

        ``offset``: seconds from the monotonic clock to the epoch's.
        """
        repairs = []
        for key, progress in list(self._pending.items()):
            if transfer := self._transfers.get(key):
                progress = replace(progress, state="repairing", done=transfer.done)  # noqa: PLW2901
            repairs.append(replace(progress, since=max(0.0, progress.since + offset)))
        return repairs

    def lacking(self) -> dict[str, tuple[str, ...]]:
        """Return findings that this node cannot repair, by report; manifests without a copy: ()."""
        findings: dict[str, list[str]] = {}
        for (report, finding), reason in sorted(dict(self._answered).items()):
            if reason:
                findings.setdefault(report, []).append(finding)
        lacking = {report: tuple(names) for report, names in findings.items()}
        return lacking | dict.fromkeys(self._without_copy, ())

    def plan(self, local_saves: Sequence[LocalSave] | None) -> None:
        """Decide anew which files are sent again, and queue them.

        ``local_saves``: the saves here; None where the store's records could not be read: then
        nothing is queued.
        """
        busy = {job.name for job in self._queues.withdraw(self)}
        self._done = []
        # a copy: threads that end take theirs out
        pending = list(self._pending.items())
        self._pending = {key: progress for key, progress in pending if key in self._transfers}
        self._queues.post(self, [] if local_saves is None else list(self._jobs(local_saves, busy)))

    def result(self) -> tuple[list[RepairedFile], list[Failure]]:
        """Return the repairs since the last plan, and the failures, which are tried again.

        What the queues' threads have ended meanwhile is added first.
        """
        while self._news:
            self._done.append(self._news.popleft())
        repairs = [result for result in self._done if isinstance(result, RepairedFile)]
        return repairs, [result for result in self._done if isinstance(result, Failure)]

    def _jobs(
        self, local_saves: Sequence[LocalSave], busy: Collection[Name]
    ) -> Iterator[UploadJob]:
        """Yield a job for each damaged location, and note it as pending.

        A location whose checkpoint is in hand waits, and requests that were answered yield nothing.
        At the end, answers that no report asks for any more are forgotten.
        """
        run, node, records = self._run, self._view.node, self._view.run_records
        requested: set[tuple[str, str]] = set()
        for location in records.damaged():
            name = (run.name, checkpoint_of(location))
            if name in busy:
                requested.update(
                    key
                    for key in tuple(self._answered)
                    if key[0].startswith(records_prefix(run.name, location))
                )
                continue
            saves_here = [s for s in local_saves if s.checkpoint == name[1]]
            has_copy = find_copies(saves_here, self._view.known_digests.get(name[1], {}))
            requests = list_requests(
                records.records_about(location),
                node,
                location,
                records.manifests(name[1]),
                has_copy,
            )
            requested.update((r.report, r.finding) for r in requests)
            due_requests = [r for r in requests if (r.report, r.finding) not in self._answered]
            if due_requests:
                file_sets = [outgoing_save(s, EVERYTHING).files for s in saves_here]
                size = sum(r.entry.size for r in due_requests)
                self._pending[run.name, location] = Progress(
                    kind="repair",
                    state="queued",
                    run=run.name,
                    checkpoint=name[1],
                    location=location,
                    since=time.monotonic(),
                    total=size,
                )
                yield UploadJob(
                    ("repaired", run.name, location),
                    name,
                    size,
                    partial(self._send, name, location, due_requests, file_sets),
                )
        for old in [key for key in tuple(self._answered) if key not in requested]:
            self._answered.pop(old, None)

    def _send(
        self,
        name: Name,
        location: str,
        requests: Sequence[RepairRequest],
        file_sets: Sequence[LocalFiles],
        _: QueueCapacity,
    ) -> None:
        """Send files again, and note the results.  Runs in a queue's thread.

        A request that ended with an error is not answered, so the next plan tries it again.
        """
        key, view = (self._run.name, location), self._view
        transfer = self._transfers[key] = Transfer(sum(request.entry.size for request in requests))
        for request in requests:
            try:
                added_files = list_added_files(self._run.path)
                reason = send_again(
                    request, file_sets, view.store, view.node, added_files, transfer=transfer
                )
            except CkptsyncError as e:
                self._news.append(describe_failure(*name, e))
                continue
            self._answered[request.report, request.finding] = reason
            self._news.append(RepairedFile(self._run.name, request.report, request.finding, reason))
        self._pending.pop(key, None)
        self._transfers.pop(key, None)
