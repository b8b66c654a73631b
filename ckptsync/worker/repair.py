"""Send again the files that a report calls damaged, and this node's own damaged manifests.

A report that says DAMAGED is the request.  A file is sent again if this node named it, or has a
copy of it, and still has the bytes whose digest the manifest names.  A manifest that is damaged or
gone is written again from the copy in the spool.
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
from ckptsync.worker.local_save import LocalFile, LocalFiles, LocalSave, kept_manifest
from ckptsync.worker.model_configs import outgoing_save
from ckptsync.worker.options import RunDir
from ckptsync.worker.queue import Name, QueueCapacity, UploadJob, UploadQueues
from ckptsync.worker.results import Failure, RepairedFile, describe_failure
from ckptsync.worker.store_view import StoreView
from ckptsync.worker.upload_sources import Transfer, UploadSource, is_stored


@dataclass(frozen=True, slots=True)
class RepairRequest:
    """One damaged file that this node has named, or has a copy of.

    ``finding``: its name in the report; ``name``: where it lies; ``entry``: what it should be.
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
    known: Iterable[manifest_groups.StoredManifest],
    has: Callable[[FileEntry], bool] = lambda _: False,
) -> tuple[RepairRequest, ...]:
    """Return the damaged files that the unanswered reports about a location request of ``node``.

    Pure. ``known``: all manifests of the checkpoint's name.  ``has``: whether the node has a copy
    of a file that another has named: pulled, or copied from that node.  A file is requested once,
    however many reports name it: by the newest.
    """
    here = [k for k in manifest_groups.live_manifests(known) if k.manifest.location == location]
    found = fate(records.tombstones, {k.name for k in here})
    if not here or found.retired or found.shards:
        return ()
    run = here[0].manifest.run
    located = [
        at
        for every in manifest_groups.locate_files(k.manifest for k in here).values()
        for at in every
        if node in at.nodes or has(at.entry)
    ]
    # where two nodes name one stored file, the other's bytes may lie there: that node stores them
    # elsewhere first
    contested = manifest_groups.contested_names(k.manifest for k in here)
    mine = {at.name: at for at in located if at.name not in contested}
    requested: dict[str, RepairRequest] = {}
    for report in proof(records.reports, {k.name for k in here}, "").damage:
        for finding in records.reports[report].findings:
            at = mine.get(f"{run}/{finding.name}")
            if at is not None and finding.kind in DAMAGE:
                name = checked_own(at.name, own_prefixes(run, location))
                requested[name] = RepairRequest(report, finding.name, name, at.entry, finding.kind)
    return tuple(requested[name] for name in sorted(requested))


def copies(seen: Sequence[LocalSave], read: KnownDigests) -> Callable[[FileEntry], bool]:
    """Return a function that says whether one of the saves here has a stored file.

    By its time (one without a fraction may be chance), or by a digest that was read.
    """
    keys = {(f.path, f.size, f.mtime) for one in seen for f in one.files.stats}
    digests = {(key[0], digest) for key, digest in read.items() if key in keys}

    def has(entry: FileEntry) -> bool:
        is_same = entry.mtime % 10**9 != 0 and (entry.path, entry.size, entry.mtime) in keys
        return is_same or (entry.path, entry.digest) in digests

    return has


def send_again(
    request: RepairRequest,
    holds: Iterable[LocalFiles],
    store: Store,
    node: str,
    added: Iterable[LocalFile] = (),
    *,
    transfer: Transfer | None = None,
) -> str:
    """Send a damaged file again; return the reason why this node could not, empty if it did.

    Raises StoreError, but not for a copy that this node's disk cannot read: that is a reason.
    ``added``: files of the hook that may be it, read when no save has it.  ``transfer``
    counts what is sent.
    """
    entry, unread = request.entry, None
    if request.kind not in OF_BYTES and is_stored(store, request.name, entry, _show_progress):
        return (
            "the store has exactly what this node uploaded: the file was damaged before the upload"
        )
    candidates = [h.by_path[entry.path] for h in holds if entry.path in h.by_path]
    candidates.sort(key=lambda held: held.stat.mtime != entry.mtime)
    for held in chain(candidates, added):
        if (held.stat.path, held.stat.size) != (entry.path, entry.size):
            continue
        source = UploadSource(held, node, entry, _show_progress)
        try:
            for _ in source:
                pass  # once for the digest alone: wrong bytes need not travel to be refused
        except Incomplete:  # other bytes by now: the next candidate may have the right ones
            continue
        except StoreError as e:  # of this node's disk: the next candidate may be well
            unread = without_frames(e)
            continue
        transfer = transfer or Transfer(entry.size)
        try:
            with transfer.of(source):
                store.write(request.name, source, source.about)
        except Incomplete:  # changed since
            continue
        transfer.end(entry)
        return ""
    if unread:  # it may pass
        raise unread
    return "this node no longer has the file"


def _show_progress(_: int) -> None:
    """Tell the watchdog that bytes were read."""
    progress_signs.sign()


def added_files(output_dir: Path) -> Iterator[LocalFile]:
    """Yield each file that the hook has added to any save, wherever the spool has it.

    The saves of a run have the same ones.
    """
    spool = output_dir / SPOOL
    seen: set[tuple[str, int, int]] = set()
    pins = (pin / "added" for pin in list_paths(spool / "pins"))
    for folder in (*list_paths(spool / "added"), *pins):
        for stat in walk(folder).files:
            if (stat.path, stat.device, stat.inode) not in seen:
                seen.add((stat.path, stat.device, stat.inode))
                yield LocalFile(stat, folder, is_pinned=True, is_added=True)


class FileRepairs:
    """Plans which damaged files are sent again, and remembers what became of each.

    `plan` and `result` are for one thread; queues send in others. ``_answered``: report and finding
    of each request, with the reason where the file could not be sent; kept until no report names
    it.
    """

    def __init__(self, run: RunDir, view: StoreView, queues: UploadQueues) -> None:
        self._run, self._view, self._queues = run, view, queues
        self._answered: dict[tuple[str, str], str] = {}
        self._without_copy: tuple[str, ...] = ()
        self._news: deque[RepairedFile | Failure] = deque()
        self._done: list[RepairedFile | Failure] = []
        # what is queued or being sent, by run and location; times are monotonic
        self._pending: dict[Name, Progress] = {}
        self._transfers: dict[Name, Transfer] = {}

    def repair_manifests(self) -> list[Failure]:
        """Write this node's manifests again that are damaged or gone, where the spool has a copy.

        Return what the store refused.  The view is read again after a write: raises StoreError.
        """
        run, view, written = self._run, self._view, False
        failures: list[Failure] = []
        without_copy: list[str] = []
        for name in view.known.unusable_manifests(view.node):
            data = kept_manifest(run.path, name)
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
        """Return what is to be sent again; any thread may ask.

        ``offset`` leads from the monotonic clock to seconds since the epoch.
        """
        found = []
        for key, progress in list(self._pending.items()):
            if transfer := self._transfers.get(key):
                progress = replace(progress, state="repairing", done=transfer.done)  # noqa: PLW2901
            found.append(replace(progress, since=max(0.0, progress.since + offset)))
        return found

    def lacking(self) -> dict[str, tuple[str, ...]]:
        """Return what this node cannot repair: findings by report, and manifests without copies."""
        found: dict[str, list[str]] = {}
        for (report, finding), reason in sorted(dict(self._answered).items()):
            if reason:
                found.setdefault(report, []).append(finding)
        lacking = {report: tuple(names) for report, names in found.items()}
        return lacking | dict.fromkeys(self._without_copy, ())

    def plan(self, seen: Sequence[LocalSave] | None) -> None:
        """Decide anew what is sent again, and queue it.

        ``seen``: the saves here; ``None`` where the store's records could not be read.
        """
        busy = {job.name for job in self._queues.withdraw(self)}
        self._done = []
        # a copy: threads that end take theirs out
        pending = list(self._pending.items())
        self._pending = {key: progress for key, progress in pending if key in self._transfers}
        self._queues.post(self, [] if seen is None else list(self._jobs(seen, busy)))

    def result(self) -> tuple[list[RepairedFile], list[Failure]]:
        """Return what has been sent again since the last plan, and what failed.

        The next plan tries again.
        """
        while self._news:
            self._done.append(self._news.popleft())
        repairs = [one for one in self._done if isinstance(one, RepairedFile)]
        return repairs, [one for one in self._done if isinstance(one, Failure)]

    def _jobs(self, seen: Sequence[LocalSave], busy: Collection[Name]) -> Iterator[UploadJob]:
        """Yield one for each damaged location.

        Those of checkpoints that are in hand have to wait.
        """
        run, node, known = self._run, self._view.node, self._view.known
        requested: set[tuple[str, str]] = set()
        for location in known.damaged():
            name = (run.name, checkpoint_of(location))
            if name in busy:
                requested.update(
                    key
                    for key in tuple(self._answered)
                    if key[0].startswith(records_prefix(run.name, location))
                )
                continue
            here = [s for s in seen if s.checkpoint == name[1]]
            has = copies(here, self._view.known_digests.get(name[1], {}))
            found = list_requests(
                known.location(location), node, location, known.manifests(name[1]), has
            )
            requested.update((r.report, r.finding) for r in found)
            due = [r for r in found if (r.report, r.finding) not in self._answered]
            if due:
                holds = [outgoing_save(s, EVERYTHING).files for s in here]
                size = sum(r.entry.size for r in due)
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
                    partial(self._send, name, location, due, holds),
                )
        for old in [key for key in tuple(self._answered) if key not in requested]:
            self._answered.pop(old, None)

    def _send(
        self,
        name: Name,
        location: str,
        due: Sequence[RepairRequest],
        holds: Sequence[LocalFiles],
        _: QueueCapacity,
    ) -> None:
        """Send files again, in whatever thread this is."""
        key, view = (self._run.name, location), self._view
        transfer = self._transfers[key] = Transfer(sum(request.entry.size for request in due))
        for request in due:
            try:
                added = added_files(self._run.path)
                reason = send_again(request, holds, view.store, view.node, added, transfer=transfer)
            except CkptsyncError as e:
                self._news.append(describe_failure(*name, e))
                continue
            self._answered[request.report, request.finding] = reason
            self._news.append(RepairedFile(self._run.name, request.report, request.finding, reason))
        self._pending.pop(key, None)
        self._transfers.pop(key, None)
