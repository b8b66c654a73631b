"""The worker: `look` scans and pins what is there, `plan` decides what is sent, moved or repaired, `told` says what was seen and done."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from ckptsync.errors import CkptsyncError, Incomplete, StoreError
from ckptsync.spool import pins as spool
from ckptsync.spool.sweeping import sweep
from ckptsync.stores.contract import Store
from ckptsync.worker import repair
from ckptsync.worker.cleanup import clean_up
from ckptsync.worker.clock import Clock
from ckptsync.worker.options import RunDir, WorkerOptions, checked_options
from ckptsync.worker.pinning import Pinner, SpoolRule, held
from ckptsync.worker.queue import AtOnce, Carrier, Job, Share, Turn, ordered, shares
from ckptsync.worker.remembering import Kept, kept_of, with_read
from ckptsync.worker.repair import restore
from ckptsync.worker.result import ON_THE_WAY, Failure, Phase, Progress, WorkerResult, failure
from ckptsync.worker.saving import Desk, Memory, begun, known_already, progress, save
from ckptsync.worker.scanner import Key, Scan, Scanned, Scanner, recorded
from ckptsync.worker.selecting import chosen
from ckptsync.worker.settle import Rule
from ckptsync.worker.snapshot import Seen
from ckptsync.worker.store_view import RunRecords, StoreView, standing
from ckptsync.worker.upload import Destination

DONE = ("stored", "elsewhere", "retired")
DOUBTFUL = 10  # times `unmarked`


@dataclass(slots=True)
class _Done:
    """What the last plan saw and did itself."""

    watched: Sequence[Scanned] = ()
    gone: list[Progress] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    def add(self, gone: Sequence[Progress], failures: Sequence[Failure]) -> None:
        self.gone += gone
        self.failures += failures


class Worker:
    """Finds, pins, settles, digests and sends; and sends again what a report calls damaged.

    It may be killed at any moment and keeps nothing that it needs: what it remembers saves time.  `look` is for any thread, and never asks the
    store; the rest is for one, and others may look meanwhile.  Raises ConfigError where a run and the store lie in each other.

    ``carrier``: who sends what is planned; without one, `plan` itself does.
    """

    def __init__(self, options: WorkerOptions, store: Store, carrier: Carrier | None = None) -> None:
        self._options, node = checked_options(options, store.url), options.node
        self._memory = Memory()
        self._clock = Clock(store, node)
        self._view = StoreView(store, node, chosen(options), lambda: self._clock.last)
        pinner = Pinner(node, self._view.is_proven, SpoolRule(options.spool_budget, options.spool_full))
        rule = Rule(options.quiet, options.unmarked, DOUBTFUL * options.unmarked)
        self._scanner = Scanner(options.runs, pinner, rule, self._view.is_done, self._view.has_mate)
        sender = carrier or AtOnce(options.threads)
        self._uploads = Uploads(options, self._view, self._scanner, self._clock, self._memory, carrier=sender)
        self._repairs = repair.Repairs(self._view, sender)
        self._broken: frozenset[str] = frozenset()
        self._unmendable: frozenset[str] = frozenset()
        self._done = _Done()
        for run in options.runs:
            sweep(run.path, node)
            self._view.recall(run)

    @property
    def lines(self) -> tuple[object, ...]:
        """What its saves, and what it mends, wait in, as its carrier is told."""
        return self._uploads, self._repairs

    @property
    def has_gone(self) -> bool:
        """Whether it has nothing to send, nor to say of what it had."""
        return self._uploads.has_gone

    def look(self, now: float) -> Scan:
        """Pin what has appeared, and judge it.  ``now`` in seconds on any clock that only grows."""
        self._clock.notice(now)
        found = self._scanner.scan(now)
        return replace(found, notes=(*found.notes, *self._clock.notes, *self._uploads.notes))

    def held(self) -> int:
        """Bytes of files that had no names but our pins' at the last look."""
        return held([w.seen.pin for w in self._scanner.saves() if w.seen.pin is not None])

    def tick(self, now: float) -> WorkerResult:
        """Look, have sent what is finished, and say what became of it.  Errors are in the result: one checkpoint's never keep another back."""
        self.plan(now)
        return self.told(now)

    def plan(self, now: float) -> None:
        """Look, and have sent what is finished."""
        found = self.look(now)
        watched = self._scanner.saves()
        ready, unread = self._read()
        self._uploads.plan(watched, now, {run.name for run in ready})
        for one in watched:
            if one.verdict.finished:  # what could not even be tried has to wait for the next tick, too
                self._scanner.mark_tried(one)
        self._forget(watched)
        self._done = _Done(watched, failures=[*found.failures, *unread])
        seen = {run: [w.seen for w in watched if w.seen.run == run.name] for run in ready}
        self._repairs.plan(seen)
        for run in ready:
            here = {s.spot.name for s in seen[run]} | {f.checkpoint for f in found.failures if f.run == run.name}
            gone, stuck = clean_up(run, here, self._options, self._view, self._scanner)
            self._done.add(gone, stuck)
        self._unmendable = self._unmended()
        told = [*self._uploads.told()[0], *self._done.gone]
        self._clock.measure_in_time(now, is_idle=bool(told) and all(p.phase in DONE for p in told))

    def told(self, now: float) -> WorkerResult:
        """What became by now of all that the last plan saw."""
        told, wrong = self._uploads.told()
        repairs, unmended = self._repairs.told()
        told, done = [*told, *self._done.gone], self._done
        waiting = {(p.run, p.checkpoint) for p in told if p.phase in ON_THE_WAY}
        since = {f"{w.seen.run}/{w.seen.spot.name}": w.first for w in reversed(done.watched) if w.key[:2] in waiting}
        sent = sum(p.size for p in told if p.phase == "sent")
        notes = (*self._clock.notes, *self._uploads.notes)
        failures = (*done.failures, *unmended, *wrong)
        lacks = repair.lacks(self._repairs.served, self._unmendable)
        return WorkerResult(
            self._options.node, tuple(told), tuple(repairs), failures, self._scanner.due(now), since, sent, notes, lacks
        )

    def _unmended(self) -> frozenset[str]:
        """Its manifests that are damaged, or gone, and were at the last tick, too: what could be written again, is."""
        known = [self._view.of(run.name) for run in self._options.runs]
        now = repair.broken_manifests(self._options.node, (name for k in known for name in (*k.broken, *k.lost)))
        before, self._broken = self._broken, now
        return now & before

    def _read(self) -> tuple[list[RunDir], list[Failure]]:
        """What the store says of each run; those that it said nothing of are failures."""
        ready: list[RunDir] = []
        wrong: list[Failure] = []
        for run in self._options.runs:
            try:
                self._view.refresh(run.name)
                ready.append(run)
            except CkptsyncError as e:  # noqa: PERF203 - a few runs, each for itself
                wrong.append(failure(run.name, "", e))
        return ready, wrong

    def _forget(self, watched: Sequence[Scanned]) -> None:
        """Forget what is remembered of saves that are gone; the mappings stay the same objects, since queues write to them meanwhile."""
        here = {w.key for w in watched}
        for run in self._options.runs:
            read = self._view.of(run.name).read
            for name in [name for name in tuple(read) if not any(key[:2] == (run.name, name) for key in here)]:
                read.pop(name, None)
        for memory in (self._memory.taken, self._memory.settled):
            for key in [key for key in tuple(memory) if key not in here]:
                memory.pop(key, None)


NOTES = 10  # of saves that were missed; the log has them all
OTHERS = "others are sent first"
FRESH = 1.0  # seconds for which what was read of a run need not be read again before a save of it begins


class Uploads:
    """Decides which saves are sent, and remembers what became of each.  `plan` and `told` are for one thread; queues send in others.

    ``notes``: what an operator should see though it is over.
    """

    def __init__(
        self, options: WorkerOptions, view: StoreView, scanner: Scanner, clock: Clock, memory: Memory, *, carrier: Carrier
    ) -> None:
        self._options, self._view, self._scanner = options, view, scanner
        self._clock, self._memory, self._carrier = clock, memory, carrier
        self._told: dict[Key, Progress] = {}
        self._wrong: dict[Key, Failure] = {}
        self._news: deque[tuple[Key, Progress, Failure | None]] = deque()
        self._planned = 0.0
        self._going: dict[Key, Scanned] = {}
        self.notes: tuple[str, ...] = ()

    def plan(self, watched: Sequence[Scanned], now: float, ready: Collection[str]) -> None:
        """Decide of each of them, and have sent what is due.

        ``ready``: runs of which the store's records were read just before; the others have to wait.
        """
        self._planned = time.monotonic()
        jobs = self._carrier.withdraw(self)
        in_hand, names = {job.save for job in jobs}, {job.name for job in jobs}
        wrong: dict[Key, Failure] = {}
        told: dict[Key, Progress | None] = {}
        for one in watched:
            meet = self._beside if one.key[:2] in names or one.seen.run not in ready else self._met
            told[one.key] = self._guarded(one, wrong, partial(meet, one, now))
        turns = [self._turn(w, is_begun=w.key in in_hand) for w in watched if told[w.key] is None and w.seen.run in ready]
        going = ordered(turns, self._options.order, self._options.superseded)
        for one in going.dropped:
            told[one.key] = self._guarded(one, wrong, partial(self._superseded, one))
        self._remember(told, wrong, in_hand)
        for one, why in self._lost(watched, in_hand, ready):
            self._told[one.key] = _progress(one, "lost", why)
            self.notes = (*self.notes, f"lost {one.seen.run}/{one.seen.spot.name}: {why}")[-NOTES:]
        self._going |= {one.key: one for one in watched if told[one.key] is None}
        first = [one for one in going.first if one.key not in in_hand]
        for one in first:
            self._scanner.mark_tried(one)
        self._carrier.post(self, [self._job(one, now, told) for one in first])

    @property
    def has_gone(self) -> bool:
        """Whether nothing is to be sent any more, nor to be said of what was."""
        return not self._going

    def told(self) -> tuple[list[Progress], list[Failure]]:
        """What became of each by now, in their order.  A failure is told until another try has ended, what was sent until the next plan."""
        while self._news:
            key, progress, failed = self._news.popleft()
            before = self._told.get(key)
            if before is None or before.phase == "lost" or (progress.phase, before.phase) == ("sending", "failed"):
                continue
            self._told[key] = progress
            self._wrong.pop(key, None)
            if failed is not None:
                self._wrong[key] = failed
        return list(self._told.values()), list(self._wrong.values())

    def _remember(self, told: Mapping[Key, Progress | None], wrong: Mapping[Key, Failure], in_hand: Collection[object]) -> None:
        """Of what waits its turn, and of what is in hand, what was told before if that was a failure."""
        before, failed = self._told, self._wrong
        self._told, self._wrong = {}, dict(wrong)
        for key, found in told.items():
            if found is None and key in failed:
                self._told[key], self._wrong[key] = before[key], failed[key]
            else:
                self._told[key] = found or (Progress(*key, "sending", "") if key in in_hand else Progress(*key, "waiting", OTHERS))

    def _job(self, one: Scanned, now: float, planned: Collection[Key]) -> Job:
        size = sum(stat.size for stat in one.seen.hold.stats)
        return Job(one.key, one.key[:2], size, partial(self._carry, one, now, planned))

    def _carry(self, one: Scanned, now: float, planned: Collection[Key], share: Share) -> None:
        """Send it, in whatever thread this is."""
        if self._is_overtaken(planned):
            self._news.append((one.key, _progress(one, "waiting", "a newer one goes first"), None))
            return
        self._news.append((one.key, _progress(one, "sending", ""), None))
        wrong: dict[Key, Failure] = {}
        told = self._guarded(one, wrong, partial(self._send, one, now, share))
        assert told is not None
        self._news.append((one.key, told, wrong.get(one.key)))

    def _beside(self, one: Scanned, _: float) -> Progress | None:
        """Of what has the name of one that is in hand, or cannot be asked for: what is known; ``None`` if that is nothing."""
        found = standing(one.seen, self._options.node, self._view.of(one.seen.run), self._view.selection)
        return progress(one.seen, found.phase, found.detail, found.other or found.mine) if found else None

    def _guarded(self, one: Scanned, wrong: dict[Key, Failure], work: Callable[[], Progress | None]) -> Progress | None:
        try:
            return work()
        except Incomplete as e:  # it changed, or others are at it: the next look may find it quiet
            return _progress(one, "waiting", str(e))
        except CkptsyncError as e:
            wrong[one.key] = failure(one.seen.run, one.seen.spot.name, e)
            return _progress(one, "failed", str(e))

    def _met(self, one: Scanned, now: float) -> Progress | None:
        """Why it need not, or cannot, be sent now; ``None`` if it is to be sent."""
        seen, desk = one.seen, self._desk(one, now, shares(self._options.threads)[-1])
        broken = desk.known.broken_location(seen.spot.name)
        is_wanted = broken is not None or desk.known.lost_of(desk.node, seen.spot.name)
        if is_wanted and restore(seen, desk, self._kept(seen)):
            return _progress(one, "waiting", "a manifest of this node, damaged or gone, was written again")
        if broken is not None:
            raise broken
        if seen.pin is not None and not seen.pin.node:
            return _progress(one, "waiting", "its pin is nobody's yet")
        done = known_already(seen, desk)
        if done is not None:
            self._mark(one, done)
            return done
        if one.is_lost and seen.pin is not None:
            return self._missed(one)
        return None if one.verdict.finished else _progress(one, "waiting", one.verdict.reason)

    def _send(self, one: Scanned, now: float, share: Share) -> Progress:
        latest = self._scanner.latest(one.key)
        if latest is None or latest.since != one.since:
            return _progress(one, "waiting", "it changed while others were sent")
        if not latest.verdict.finished:
            return _progress(one, "waiting", latest.verdict.reason)
        seen, desk = self._begun(latest), self._desk(latest, now, share)
        sent = save(seen, desk)
        if sent.phase in ("stored", "elsewhere"):
            self._note_read(seen, desk)
        self._mark(latest, sent)
        return sent

    def _note_read(self, seen: Seen, desk: Desk) -> None:
        """Write beside the pin what was read of files that the store had already, or the next start reads them again."""
        here = {(s.path, s.size, s.mtime) for s in seen.hold.stats}
        read = {key: digest for key, digest in desk.known.read.get(seen.spot.name, {}).items() if key in here}
        if seen.pin is not None and read:
            with contextlib.suppress(StoreError, Incomplete):  # a full disk: it costs reading again
                recorded(seen, with_read(seen.pin.took, read))

    def _kept(self, seen: Seen) -> tuple[Kept, ...]:
        return next((kept_of(run.path, seen.spot.name) for run in self._options.runs if run.name == seen.run), ())

    def _begun(self, one: Scanned) -> Seen:
        """With what its manifest will say written beside its pin first: whoever writes it again has to say the same."""
        seen = one.seen
        if seen.pin is None:
            return seen
        took = begun(seen, time.time_ns(), one.observation.save if one.observation else "")
        try:
            return seen if took == seen.pin.took else recorded(seen, took)
        except StoreError:  # a full disk: it is sent all the same, and its manifest says less
            return seen

    def _missed(self, one: Scanned) -> Progress:
        assert one.seen.pin is not None
        spool.drop(one.seen.pin, self._scanner.lock)
        note = f"missed {one.seen.run}/{one.seen.spot.name}: the trainer removed it, or gave it up, before it was known whole"
        self.notes = (*self.notes, note)[-NOTES:]
        return _progress(one, "missed", "given up or removed by the trainer before it was known whole")

    def _lost(
        self, watched: Sequence[Scanned], in_hand: Collection[object], ready: Collection[str]
    ) -> Iterator[tuple[Scanned, str]]:
        """What was to be sent, or was being sent, and is not here any more; each once, and how much of it the store has."""
        here = {one.key[:2] for one in watched}
        for key, one in list(self._going.items()):
            is_here = key[:2] in here
            if is_here or (key not in in_hand and one.seen.run in ready):
                self._going.pop(key)
                if not is_here and not self._view.is_done(one.seen):
                    yield one, f"its files were removed before all of them were stored; {self._what_is_stored(one.seen)}"

    def _what_is_stored(self, seen: Seen) -> str:
        sizes = {stat.path: stat.size for stat in seen.hold.stats}
        prefix = f"{seen.run}/{seen.spot.name}/"
        try:
            listed = {entry.name.removeprefix(prefix): entry.size for entry in self._view.store.names(prefix)}
        except StoreError as e:
            return f"what the store has of it cannot be listed: {e}"
        there = [path for path, size in sizes.items() if listed.get(path) == size]
        stored, size = sum(sizes[path] for path in there), sum(sizes.values())
        return f"the store has {len(there)} of {len(sizes)} files, {stored} of {size} bytes, and no manifest of them"

    def _superseded(self, one: Scanned) -> Progress:
        self._scanner.mark_tried(one)
        if one.seen.pin is not None and one.seen.hold.gone:
            spool.drop(one.seen.pin, self._scanner.lock)
        return _progress(one, "superseded", "a newer one was there before it was sent")

    def _mark(self, one: Scanned, done: Progress) -> None:
        """Tell the hook, which may be waiting for it."""
        if one.seen.pin is not None and done.location and done.phase in ("sent", "stored", "elsewhere"):
            with contextlib.suppress(CkptsyncError):  # the next tick says it again
                spool.mark_stored(one.seen.pin)

    def _turn(self, one: Scanned, *, is_begun: bool) -> Turn[Scanned]:
        seen = one.seen
        written = max((s.mtime for s in seen.hold.stats), default=0)
        return Turn(one, seen.run, (one.first, seen.spot.step or 0, seen.k), written, is_begun or self._view.is_begun(seen))

    def _is_overtaken(self, planned: Collection[Key]) -> bool:
        """Whether something was finished meanwhile that goes before the rest."""
        if self._options.order == "oldest":
            return False
        return any(w.verdict.finished and w.key not in planned for w in self._scanner.saves())

    def _desk(self, one: Scanned, now: float, share: Share) -> Desk:
        run, checkpoint = one.seen.run, one.seen.spot.name
        node, read = self._options.node, self._asking(run)
        to = Destination(
            self._view.store,
            node,
            lambda: read().manifests(checkpoint),
            lambda: self._view.refresh(run).is_contended(node, run, checkpoint),
            threads=share.threads,
            small=share.small,
            clock=time.time_ns,
        )
        return Desk(node, to, self._view.of(run), lambda: self._clock.offset(now), self._memory, self._view.selection)

    def _asking(self, run: str) -> Callable[[], RunRecords]:
        """As it is now: what was read a moment ago is, the first time."""
        is_fresh = time.monotonic() - self._planned < FRESH

        def ask() -> RunRecords:
            nonlocal is_fresh
            was, is_fresh = is_fresh, False
            return self._view.of(run) if was else self._view.refresh(run)

        return ask


def _progress(one: Scanned, phase: Phase, detail: str) -> Progress:
    return Progress(one.seen.run, one.seen.spot.name, one.seen.k, phase, detail)
