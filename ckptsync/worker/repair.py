"""Send again what is damaged in the store: files that a report calls damaged, and this node's own manifests.

A report that says DAMAGED is the request.  A file is sent again if this node named it, or has a copy of it, and still has the bytes whose digest
the manifest names.  A manifest that is damaged or gone is written again: from the same files the same record follows, byte for byte.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, product

from ckptsync.errors import CkptsyncError, Corrupt, Incomplete
from ckptsync.merge.output import is_beside
from ckptsync.records import coding, saves
from ckptsync.records.manifest import FileEntry, Manifest
from ckptsync.records.names import OURS, RecordName, node_file_name, parse_record_name, records_prefix
from ckptsync.records.state import Records, proof
from ckptsync.records.tombstone import fate
from ckptsync.spool.marks import Took
from ckptsync.stores import signs
from ckptsync.stores.contract import About
from ckptsync.worker.content import Source, is_stored
from ckptsync.worker.options import RunDir
from ckptsync.worker.plan import Read, draft, part, without_copies
from ckptsync.worker.queue import Carrier, Job, Name, Share
from ckptsync.worker.remembering import Kept, added_here
from ckptsync.worker.result import Failure, Repaired, failure
from ckptsync.worker.saving import Desk, outgoing, read_whole, told, with_took
from ckptsync.worker.selecting import EVERYTHING
from ckptsync.worker.snapshot import Held, Hold, Seen
from ckptsync.worker.store_view import StoreView
from ckptsync.worker.upload import Destination

OF_BYTES = ("missing", "size", "digest")  # damage that other bytes than the named ones make
OF_MEANING = ("parse", "load")  # damage that may have been taken with the file
Added = Callable[[], Iterable[Held]]


@dataclass(frozen=True, slots=True)
class Request:
    """One damaged file that this node has named: the report, the file as the report calls it, where it lies, what it should be."""

    report: str
    finding: str
    name: str
    entry: FileEntry
    kind: str


def wanted(
    records: Records, node: str, location: str, known: Iterable[saves.Known], has: Callable[[FileEntry], bool] = lambda _: False
) -> tuple[Request, ...]:
    """Return what the unanswered reports about a location want from ``node``.  Pure.

    ``known``: all manifests of the checkpoint's name.  ``has``: whether the node has a copy of a file that another has named: pulled, or copied from that node.
    A file is asked for once, however many reports name it: by the newest.
    """
    here = [k for k in saves.live(known) if k.manifest.location == location]
    found = fate(records.tombstones, {k.name for k in here})
    if not here or found.retired or found.shards:
        return ()
    run = here[0].manifest.run
    located = [at for every in saves.locate(k.manifest for k in here).values() for at in every if node in at.nodes or has(at.entry)]
    # where two nodes name one stored file, the other's bytes may lie there: that node stores them elsewhere first
    contested = saves.contested(k.manifest for k in here)
    mine = {at.name: at for at in located if at.name not in contested}
    requests: dict[str, Request] = {}
    for report in proof(records.reports, {k.name for k in here}, "").damage:
        for finding in records.reports[report].findings:
            at = mine.get(f"{run}/{finding.name}")
            if at is not None and finding.kind in (*OF_BYTES, *OF_MEANING):
                requests[at.name] = Request(report, finding.name, at.name, at.entry, finding.kind)
    return tuple(requests[name] for name in sorted(requests))


def lacks(served: Mapping[tuple[str, str], str], broken: Iterable[str] = ()) -> dict[str, tuple[str, ...]]:
    """What this node cannot give: by report the findings as they name it, and each of its own damaged manifests that it could not write again."""
    found: dict[str, list[str]] = {}
    for (report, finding), reason in sorted(served.items()):
        if reason:
            found.setdefault(report, []).append(finding)
    return {report: tuple(names) for report, names in found.items()} | dict.fromkeys(broken, ())


def broken_manifests(node: str, broken: Iterable[str]) -> frozenset[str]:
    """Return the names of those that are a node's manifests."""
    parsed = ((name, parse_record_name(name)) for name in broken)
    return frozenset(name for name, p in parsed if p and (p.kind, p.node) == ("manifest", node))


def serve(request: Request, holds: Iterable[Hold], to: Destination, added: Added = tuple) -> str:
    """Send a damaged file again; return the reason why this node could not, empty if it did.  Raises StoreError."""
    if request.kind in OF_MEANING and is_stored(to.store, request.name, request.entry, to.passed):
        return "the store has the very bytes that were taken: the file was damaged before"
    candidates = [h.held[request.entry.path] for h in holds if request.entry.path in h.held]
    candidates.sort(key=lambda held: held.stat.mtime != request.entry.mtime)
    for held in chain(candidates, _lazily(added)):
        if (held.stat.path, held.stat.size) == (request.entry.path, request.entry.size) and _rewritten(request, held, to):
            return ""
    return "this node no longer has its bytes"


def _lazily(added: Added) -> Iterator[Held]:
    yield from added()


def _rewritten(request: Request, held: Held, to: Destination) -> bool:
    """Write a file again if its bytes still have the digest that the manifest names; return whether they had."""
    source = Source(held, to.node, request.entry, to.passed)
    try:
        for _ in source:
            pass  # once for the digest alone: wrong bytes need not travel to be refused
        to.store.write(request.name, source, source.about)
    except Incomplete:  # these are other bytes by now: the next candidate may have the right ones
        return False
    return True


class Repairs:
    """Plans which damaged files are sent again, and remembers what became of each.  `plan` and `told` are for one thread; queues send in others.

    ``served``: report and finding of what was served, with the reason where it could not be; kept as long as the report is not answered.
    """

    def __init__(self, view: StoreView, carrier: Carrier) -> None:
        self._view, self._carrier = view, carrier
        self._served: dict[tuple[str, str], str] = {}
        self._news: deque[Repaired | Failure] = deque()
        self._told: list[Repaired | Failure] = []

    @property
    def served(self) -> Mapping[tuple[str, str], str]:
        """As it is now."""
        return dict(self._served)

    def plan(self, seen: Mapping[RunDir, Sequence[Seen]]) -> None:
        """Decide anew what is to be sent again, and have it sent.  ``seen``: of the runs of which the store's records were read just before."""
        busy = {job.name for job in self._carrier.withdraw(self)}
        self._told = []
        self._carrier.post(self, [job for run, its in seen.items() for job in self._jobs(run, its, busy)])

    def told(self) -> tuple[list[Repaired], list[Failure]]:
        """What has been served since the last plan, and what could not be for now: the next plan tries again."""
        while self._news:
            self._told.append(self._news.popleft())
        repairs = [one for one in self._told if isinstance(one, Repaired)]
        return repairs, [one for one in self._told if isinstance(one, Failure)]

    def _jobs(self, run: RunDir, seen: Sequence[Seen], busy: Collection[Name]) -> Iterator[Job]:
        """One for each damaged location; those of checkpoints that are in hand have to wait."""
        known, node = self._view.of(run.name), self._view.node
        asked: set[tuple[str, str]] = set()
        for location in known.damaged():
            name = (run.name, location.partition("~")[0])
            if name in busy:
                asked.update(key for key in tuple(self._served) if key[0].startswith(records_prefix(run.name, location)))
                continue
            here = [s for s in seen if s.spot.name == name[1]]
            requests = wanted(
                known.location(location), node, location, known.manifests(name[1]), copies(here, known.read.get(name[1], {}))
            )
            asked.update((r.report, r.finding) for r in requests)
            due = [r for r in requests if (r.report, r.finding) not in self._served]
            holds = [outgoing(s, EVERYTHING).hold for s in here if due]
            if due:
                size = sum(r.entry.size for r in due)
                yield Job(("repaired", run.name, location), name, size, partial(self._serve, run, name, due, holds))
        for old in [key for key in tuple(self._served) if key[0].startswith(f"{run.name}/{OURS}/") and key not in asked]:
            self._served.pop(old, None)

    def _serve(self, run: RunDir, name: Name, requests: Sequence[Request], holds: Sequence[Hold], _: Share) -> None:
        """In whatever thread this is."""
        to = Destination(self._view.store, self._view.node, tuple, passed=lambda _: signs.give())
        for request in requests:
            try:
                reason = serve(request, holds, to, partial(added_here, run.path))
            except CkptsyncError as e:
                self._news.append(failure(*name, e))
                continue
            self._served[request.report, request.finding] = reason
            self._news.append(Repaired(run.name, request.report, request.finding, reason))


def copies(seen: Sequence[Seen], read: Read) -> Callable[[FileEntry], bool]:
    """Return the question whether one of the saves here has a stored file, by its time (one without a fraction may be chance) or by a digest that was read."""
    keys = {(f.path, f.size, f.mtime) for one in seen for f in one.hold.stats}
    digests = {(key[0], digest) for key, digest in read.items() if key in keys}

    def has(entry: FileEntry) -> bool:
        is_same = entry.mtime % 10**9 != 0 and (entry.path, entry.size, entry.mtime) in keys
        return is_same or (entry.path, entry.digest) in digests

    return has


def restore(seen: Seen, desk: Desk, kept: Sequence[Kept] = ()) -> tuple[str, ...]:
    """The names of those that were written again.  ``kept``: what was said and added beside pins that are gone.  Raises as `read_whole` and the store do.

    The digest in a record's name proves the bytes that are written.  What cannot be told from the files any more stays as it is:
    which files an earlier manifest of several had named, one that had moved, or one of another version of this program.
    """
    damaged = tuple(_damaged(seen, desk))
    if not damaged:
        return ()
    seen = outgoing(_rejoined(seen, kept), desk.selection)
    whole = draft(told(seen, desk.node), read_whole(seen, desk))
    beside = {path for path, held in seen.hold.held.items() if held.is_added and not held.is_pinned}
    done = []
    for parsed in damaged:
        for manifest in _candidates(parsed, whole, beside, desk, [k.took for k in kept]):
            data = coding.encode(manifest)
            if coding.record_name(manifest, data) == str(parsed):
                desk.to.store.write(str(parsed), [data], About(len(data)))
                done.append(str(parsed))
                break
    return tuple(done)


def _rejoined(seen: Seen, kept: Iterable[Kept]) -> Seen:
    """The same save with what the hook added to it, where its pin has gone."""
    files = {f.path: (f.size, f.mtime) for f in seen.hold.stats}
    hold = seen.hold
    for its in kept:
        if its.commit is not None and its.commit.files == files:
            hold = hold.with_added(its.root, (s for s in its.added if is_beside(s.path)))
    return replace(seen, hold=hold)


def _damaged(seen: Seen, desk: Desk) -> Iterator[RecordName]:
    """Those that are gone, too; not those of a newer program: they are well."""
    yield from desk.known.lost_of(desk.node, seen.spot.name)
    for name, error in desk.known.broken.items():
        parsed = parse_record_name(name)
        is_ours = parsed is not None and (parsed.kind, parsed.node) == ("manifest", desk.node)
        if parsed and is_ours and isinstance(error, Corrupt) and parsed.location.partition("~")[0] == seen.spot.name:
            yield parsed


def _candidates(
    parsed: RecordName, whole: Manifest, beside: Collection[str], desk: Desk, kept: Iterable[Took]
) -> Iterator[Manifest]:
    """All that it may have said: every file, or those that no other manifest of this node there names; by our clock, or by none.

    ``beside``: files that were found around the checkpoint, which may have come later.
    """
    live = saves.live(desk.known.manifests(whole.checkpoint))
    others = {
        f.path for k in live if (k.manifest.node, k.manifest.location) == (parsed.node, parsed.location) for f in k.manifest.files
    }
    said = [
        whole,
        *(with_took(whole, took) for took in (Took(), *kept)),
    ]  # a push says nothing, since it has no pin to remember it beside
    rest = tuple(f for f in whole.files if f.path not in others)
    written = without_copies(whole, [k.manifest for k in live]).files
    alone = tuple(f for f in whole.files if f.path not in beside)
    added = tuple(f for f in whole.files if f.path in beside)
    for files in dict.fromkeys((whole.files, rest, written, alone, added)):
        for offset, remembered in product(dict.fromkeys((0, desk.offset())), said) if files else ():
            manifest = part(replace(remembered, location=parsed.location, n=parsed.n, clock_offset=offset), files)
            yield manifest
            yield _with_names(manifest, desk.known.sizes)


def _with_names(manifest: Manifest, sizes: Mapping[str, int]) -> Manifest:
    """The same with the files beside the checkpoint that the store has of this node; ``sizes``: what lies there."""
    names = {f.path: node_file_name(manifest.run, manifest.location, manifest.node, f.path) for f in manifest.files}
    files = tuple(replace(f, stored_as=names[f.path] if names[f.path] in sizes else "") for f in manifest.files)
    return replace(manifest, files=files)
