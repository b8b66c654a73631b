"""``ckptsync push``: one checkpoint, or every one below a directory, now.  Nothing is waited for, but what changes is not sent."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from ckptsync.errors import CkptsyncError, Incomplete
from ckptsync.records import saves
from ckptsync.scan import Spot
from ckptsync.spool import pins as spool
from ckptsync.spool.marks import Took, took_of
from ckptsync.stores.contract import Store
from ckptsync.stores.limits import Limits
from ckptsync.walk import OURS
from ckptsync.worker import clock, plan, remembering
from ckptsync.worker.looking import Seen
from ckptsync.worker.node import node_id
from ckptsync.worker.offering import Offer, evidence_of, is_proven, judged, left_behind, of_source, offered, spans
from ckptsync.worker.options import RunDir, checked_run, local_root, refuse_overlap
from ckptsync.worker.order_of_writing import Span
from ckptsync.worker.result import Progress
from ckptsync.worker.saving import (
    added_to,
    begun,
    instead_of,
    outgoing,
    send_late,
    sent_first,
    sent_progress,
    told,
    with_took,
)
from ckptsync.worker.selecting import EVERYTHING, Selection
from ckptsync.worker.store_view import RunRecords, is_given_up, own, read_records
from ckptsync.worker.take import Passed, nothing, take
from ckptsync.worker.upload import Destination, settle, upload

UNCLAIMED = "another node is sending files of this checkpoint, and this store may let two nodes write one name at once: push again when that node is done"
ASSUMED = "taken to be finished on your word"


def push_now(
    directory: Path,
    store: Store,
    node: str = "",
    run: str = "",
    passed: Passed = nothing,
    *,
    threads: int = Limits().threads,
    selection: Selection = EVERYTHING,
    runs: Iterable[RunDir] = (),
    name: str = "",
) -> tuple[Progress, ...]:
    """Send all of them; of several errors the first is raised, after everything else has been tried.

    ``passed`` is told the bytes of each chunk that is read, each byte of a file once: what has to be read again is taken back.
    ``runs`` and ``name``: see `offered`.
    Raises ConfigError (no checkpoint; the store lies in it), Incomplete (it is being written), Corrupt, StoreError.
    """
    offer = offered_to(store.url, directory, runs, name)
    offer = replace(offer, run=checked_run(run or offer.run))
    return push_offer(offer, store, node or node_id(), passed, threads=threads, selection=selection)


def offered_to(url: str, directory: Path, runs: Iterable[RunDir] = (), name: str = "") -> Offer:
    """Return what `offered` does; raises ConfigError also where the store at ``url`` lies in one of these checkpoints, or they in it."""
    offer = offered(directory, runs, name)
    root = local_root(url)
    if root is not None:
        refuse_overlap(directory, root, [spot.path for spot in offer.spots if spot.only is None])
    return offer


def push_offer(
    offer: Offer,
    store: Store,
    node: str,
    passed: Passed = nothing,
    *,
    threads: int = Limits().threads,
    selection: Selection = EVERYTHING,
) -> tuple[Progress, ...]:
    """The same of checkpoints that somebody else has found and named."""
    # measured once, and only where something is sent
    pusher = _Pusher(store, node, offer, selection, spans(offer), passed, threads, cache(lambda: clock.measure(store, node)))
    results: list[Progress] = []
    errors: list[CkptsyncError] = []
    every: list[Spot | Seen] = [*offer.spots, *left_behind(offer, node)]
    for one in every:
        result = pusher.attempt(one)
        (results if isinstance(result, Progress) else errors).append(result)  # type: ignore[arg-type]
    if errors:
        raise errors[0]
    return tuple(results)


def planned(offer: Offer, node: str, selection: Selection) -> list[Progress]:
    """Return what there is to send, without sending it: of each save its files, and what is left out.  Raises as `push_now` does."""
    seen = [*(of_source(offer, spot) for spot in offer.spots), *left_behind(offer, node)]
    return [_planned(outgoing(one, selection)) for one in seen]


def _planned(seen: Seen) -> Progress:
    sizes = [s.size for s in seen.hold.stats]
    return Progress(
        seen.run,
        seen.spot.name,
        0,
        "waiting",
        "",
        files=len(sizes),
        size=sum(sizes),
        left_out=seen.hold.left_out,
        added=added_to(seen.hold),
    )


@dataclass(slots=True)
class _Pusher:
    """What all checkpoints of one push have in common."""

    store: Store
    node: str
    offer: Offer
    selection: Selection
    beside: Sequence[Span]
    passed: Passed
    threads: int
    offset: Callable[[], int]
    known: RunRecords = field(default_factory=RunRecords)

    def attempt(self, one: Spot | Seen) -> Progress | CkptsyncError:
        try:
            done = self._push(of_source(self.offer, one) if isinstance(one, Spot) else one)
            return replace(done, notes=(*done.notes, *self.offer.notes))
        except CkptsyncError as e:  # raised by the caller, once the others have had their turn
            return e

    def _push(self, seen: Seen) -> Progress:
        evidence, marked = evidence_of(seen, self.offer.root, self.beside)
        found = judged(evidence)
        if not found.finished:
            raise Incomplete(f"{seen.spot.path}: {found.reason}", hint="push it when the trainer is done with it")
        broken = self._read().broken_location(seen.spot.name)
        if broken is not None:
            raise broken
        if is_given_up(seen, self.node, self.known):
            return Progress(seen.run, seen.spot.name, 0, "retired", "given up in the store")
        known = self.known.manifests(seen.spot.name)
        going = outgoing(seen, self.selection, lambda hold: sent_first(hold, seen.spot, self.node, known))
        done = self._send(going, marked or self.offer.save)
        if added := send_late(
            seen, done.location, self._destination(seen), self.selection, self._read().manifests(seen.spot.name), young=0.0
        ):
            done = replace(
                done, files=done.files + len(added), notes=(*done.notes, f"added to what was stored before: {', '.join(added)}")
            )
        if not done.files or is_proven(evidence) or self._has_mate(seen):
            return done
        return replace(done, notes=(*done.notes, f"{ASSUMED}: {found.reason}"))

    def _send(self, seen: Seen, marked: str) -> Progress:
        name, to = seen.spot.name, self._destination(seen)
        taken = take(seen.hold)
        manifest = replace(plan.draft(told(seen, self.node), taken), clock_offset=self.offset())
        manifest = replace(manifest, supersedes=instead_of(self.known, self.node, name))
        sent = upload(with_took(manifest, self._said(seen, marked)), seen.hold, to, taken.read)
        location = settle(self.node, sent.location, seen.hold, to)
        if seen.pin is not None and seen.pin.node in ("", self.node):
            with contextlib.suppress(CkptsyncError):  # who waits for it asks a worker, too
                spool.mark_stored(seen.pin)
        progress = sent_progress(seen, taken, replace(sent, location=location))
        is_doubtful = not self.store.is_exclusive and to.is_contended()
        return replace(progress, notes=(*progress.notes, UNCLAIMED)) if is_doubtful else progress

    def _destination(self, seen: Seen) -> Destination:
        name = seen.spot.name
        return Destination(
            self.store,
            self.node,
            lambda: self._read().manifests(name),
            lambda: self._read().is_contended(self.node, seen.run, name),
            self.passed,
            self.threads,
        )

    def _said(self, seen: Seen, marked: str) -> Took:
        """What the manifest says beside its files.  Where there is a spool a daemon may have to write it again, and say the same."""
        now = time.time_ns()
        took = begun(seen, now, marked)
        took = replace(took, finished=took.finished or now)
        if own(seen.hold.stats, self.node, self.known, seen.spot.name, EVERYTHING):
            return took  # nothing will be said
        with contextlib.suppress(CkptsyncError):  # a disk that is full or not ours: what was said cannot be said again
            if seen.pin is not None and seen.pin.node in ("", self.node):
                spool.record(seen.pin, took)
                return took_of(seen.pin.path)
            if (self.offer.root / OURS).is_dir():
                remembering.keep(self.offer.root, f"{seen.spot.name}.{now // 10**9}", took)
        return took

    def _has_mate(self, seen: Seen) -> bool:
        """Whether another node has stored its part of the same save, which it would not have done before its end."""
        live = [k.manifest for k in saves.live(self.known.manifests(seen.spot.name))]
        return plan.has_mate(seen.hold.stats, self.node, self.offset(), live)

    def _read(self) -> RunRecords:
        self.known = read_records(self.store, self.offer.run, self.known)
        return self.known
