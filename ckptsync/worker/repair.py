"""A report that says DAMAGED is the request: the files in it that this node named, or has a copy of, are sent again, if it still has their bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from ckptsync.errors import Incomplete
from ckptsync.records import saves
from ckptsync.records.fate import fate
from ckptsync.records.manifest import FileEntry
from ckptsync.records.names import parse_record_name
from ckptsync.records.state import Records, proof
from ckptsync.worker.content import Source, is_stored
from ckptsync.worker.hold import Held, Hold
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
    """What the unanswered reports about a location want from ``node``.  Pure.

    ``known``: all manifests of the checkpoint's name.  ``has``: whether the node has a copy of a file that another has named: pulled, or copied from that node.
    A file is asked for once, however many reports name it: by the newest.
    """
    here = [k for k in saves.live(known) if k.manifest.location == location]
    found = fate(records.tombstones, {k.name for k in here})
    if not here or found.retired or found.shards:
        return ()
    run = here[0].manifest.run
    located = [at for every in saves.locate(k.manifest for k in here).values() for at in every if node in at.nodes or has(at.entry)]
    contested = saves.contested(
        k.manifest for k in here
    )  # another node's bytes may lie there: who named them stores them elsewhere first
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
    """Those of a node."""
    parsed = ((name, parse_record_name(name)) for name in broken)
    return frozenset(name for name, p in parsed if p and (p.kind, p.node) == ("manifest", node))


def serve(request: Request, holds: Iterable[Hold], to: Destination, added: Added = tuple) -> str:
    """Send it again; empty, or the reason why it could not be.  Raises StoreError."""
    if request.kind in OF_MEANING and is_stored(to.store, request.name, request.entry, to.passed):
        return "the store has the very bytes that were taken: the file was damaged before"
    candidates = [h.held[request.entry.path] for h in holds if request.entry.path in h.held]
    candidates.sort(key=lambda held: held.stat.mtime != request.entry.mtime)
    for held in chain(candidates, _lazily(added)):
        if (held.stat.path, held.stat.size) == (request.entry.path, request.entry.size) and _written(request, held, to):
            return ""
    return "this node no longer has its bytes"


def _lazily(added: Added) -> Iterator[Held]:
    yield from added()


def _written(request: Request, held: Held, to: Destination) -> bool:
    """Only bytes of the digest that the manifest names are ever written under the name."""
    source = Source(held, to.node, request.entry, to.passed)
    try:
        for _ in source:
            pass  # once for the digest alone: wrong bytes need not travel to be refused
        to.store.write(request.name, source, source.about)
    except Incomplete:  # these are other bytes by now: the next candidate may have the right ones
        return False
    return True
