"""``ckptsync push``: one checkpoint, or every one below a directory, now.  Nothing is waited for, but what changes is not sent.

A push finds the saves that a daemon would see below the directory (`offered`), without pinning them, and judges whether they are finished.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from ckptsync import scan
from ckptsync.errors import CkptsyncError, ConfigError, Incomplete
from ckptsync.layouts import table
from ckptsync.records import saves
from ckptsync.scan import FINAL, Family, Found, Spot
from ckptsync.spool import pins as spool
from ckptsync.spool.marks import Took, took_of
from ckptsync.spool.pins import Pin
from ckptsync.stores.contract import Store
from ckptsync.stores.limits import Limits
from ckptsync.walk import OURS, UnsafeSpool
from ckptsync.worker import clock, plan, remembering
from ckptsync.worker.node import node_id
from ckptsync.worker.observation import Observation, Surroundings, observe, surroundings
from ckptsync.worker.options import RunDir, checked_run, local_root, refuse_overlap
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
from ckptsync.worker.selecting import EVERYTHING, Selection, is_of_states
from ckptsync.worker.settle import Rule, Verdict, judge
from ckptsync.worker.snapshot import Passed, Seen, hold, nothing, take
from ckptsync.worker.store_view import RunRecords, is_given_up, own, read_records
from ckptsync.worker.torn_saves import TRAINER_STATE
from ckptsync.worker.upload import Destination, settle, upload

UNCLAIMED = "another node is sending files of this checkpoint, and this store may let two nodes write one name at once: push again when that node is done"
ASSUMED = "taken to be finished on your word"
NOW = Rule(quiet=0, unmarked=0, doubtful=0)
_PROVEN = Rule(quiet=0, unmarked=1, doubtful=1)


@dataclass(frozen=True, slots=True)
class Offer:
    """``root``: the output directory, where a spool may be.  ``spots``: the checkpoints that were asked for; ``pins``: of the same, whoever made them.

    ``save``: the id of the save, where somebody agreed on one and no mark says it.  ``notes``: what was not looked at, and why.
    ``left_out``: what lies in the directory that was named, and in none of them.
    """

    run: str
    root: Path
    spots: tuple[Spot, ...]
    pins: tuple[Pin, ...] = ()
    save: str = ""
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


def offered(directory: Path, runs: Iterable[RunDir] = (), name: str = "") -> Offer:
    """Return the checkpoint ``directory``, or all that a worker finds below it; in one of ``runs`` under the names that a worker gives.

    ``name``: that of the checkpoint in the store, where all of ``directory`` is to be one.  A directory that no worker takes for a checkpoint is one here
    if a layout reads it; a link that the user names is followed.  Raises ConfigError if there is no checkpoint, or a store cannot keep its name.
    """
    if not directory.is_dir():
        raise ConfigError(
            f"{directory}: {'not a' if directory.exists() else 'no such'} directory",
            hint="give a checkpoint's directory, or the one that holds checkpoints",
        )
    here, given = directory.resolve(), Path(os.path.abspath(directory))  # noqa: PTH100  # no link is resolved
    configured = max((r for r in runs if r.path in (here, *here.parents, *given.parents)), key=_depth, default=None)
    own = None if configured else scan.spot_at(here)
    run = configured or (RunDir(here.name, here) if own is None else _above(here))
    spots = (own,) if own else tuple(s for s in scan.spots(run.path) if here in (run.path, s.path, *s.path.parents))
    is_watched = configured is not None and configured.path == here and bool(spots)
    one = None if is_watched and not name else _as_one(here, given.name, spots, name)
    if one:  # no worker knows it under this name, so that no pin and no mark is of it
        return Offer((configured or _above(here if own else given)).name, here, (one,))
    if not spots:
        raise _nothing_in(directory)
    names = {s.name for s in spots}
    try:
        pins = spool.pins(run.path, lambda name: here == run.path or name in names)
    except UnsafeSpool as e:  # the checkpoints are what they are
        return Offer(
            run.name, run.path, spots, (), "", (f"what is kept in the spool is not sent: {e}",), scan.uncovered(here, spots)
        )
    return Offer(run.name, run.path, spots, pins, left_out=scan.uncovered(here, spots))


def _as_one(here: Path, given: str, spots: Sequence[Spot], name: str) -> Spot | None:
    """Return all of a directory as one checkpoint: since the user names it so, or since it is one by what lies in it."""
    below = [s for s in spots if s.family != FINAL and (s.path != here or s.only is not None)]
    if any(s.family != "deepspeed" for s in below) or (name and len(below) > 1):
        if name:
            raise ConfigError(
                f"{here}: --as gives one checkpoint a name, and this directory holds {below[0].name}", hint="name its directory"
            )
        return None
    known = next((s for s in spots if s.path == here and s.only is None), None)
    if not name and known:
        return None
    entries = scan.uncovered(here, ())
    has_states = any(is_of_states(e) or e == ".metadata" or e.endswith(".distcp") for e in entries)
    if not (name or not spots or has_states or scan.is_named_like_one(given)):
        return None  # an output directory with a final model, or with DeepSpeed's tags
    told = Spot(name or given, known.family if known else _family(name or given, entries), here)
    if not (known or table.sources(hold(scan.found(told), None, told.family, told.name))):
        return None
    if not scan.is_plain(told.name):
        hint = "give it a name with --as NAME, such as --as checkpoint-4: letters, digits, '_', '.' and '-', at most 100"
        raise ConfigError(f"{here}: a store cannot keep a checkpoint under the name {told.name!r}", hint=hint)
    return told


def _family(name: str, entries: Sequence[str]) -> Family:
    """Return whose checkpoint it is, by its name, and else by what lies at its top."""
    found = scan.family_of(name)
    if found == "deepspeed" or name == FINAL:
        if ".metadata" in entries or any(e.endswith(".distcp") for e in entries):
            return "dcp"
        if TRAINER_STATE in entries:
            return "trainer"
    return found


def _nothing_in(directory: Path) -> ConfigError:
    links = [directory / name for name in scan.uncovered(directory, ()) if (directory / name).is_symlink()]
    folder = next((link for link in links if link.is_dir()), None)
    if folder:
        hint = f"a link is followed where you name it: ckptsync push {folder}"
        return ConfigError(f"{directory}: no checkpoint in it but behind a link, {folder.name}", hint=hint)
    hint = "checkpoints are directories that `ckptsync inspect` can read, such as checkpoint-N; name one, or the directory that holds them"
    return ConfigError(f"{directory}: no checkpoint in it", hint=hint)


def _depth(run: RunDir) -> int:
    return len(run.path.parts)


def _above(checkpoint: Path) -> RunDir:
    """The run that a checkpoint is in, by its path alone."""
    above = checkpoint.parent
    root = above.parent if above.name in scan.NESTED else above
    return RunDir(root.name, root)


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
    pusher = _Pusher(store, node, offer, selection, around(offer), passed, threads, cache(lambda: clock.measure(store, node)))
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
    around: Surroundings
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
        evidence = observe(seen, self.around)
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
        done = self._send(going, evidence.save or self.offer.save)
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


def of_source(offer: Offer, spot: Spot) -> Seen:
    """A checkpoint as the trainer's directory holds it now, beside what a pin of the same files says of it.

    What rotation has taken of one that the hook committed is read from the pin.
    """
    found = scan.found(spot)
    same = [p for p in offer.pins if p.checkpoint == spot.name and _is_of(p, found)]
    pin = same[-1] if same else None
    is_short = pin is not None and len(pin.files) > len(found.files)
    return Seen(offer.run, spot, hold(found, pin if is_short else None, spot.family, spot.name), pin)


def left_behind(offer: Offer, node: str) -> tuple[Seen, ...]:
    """Saves that the trainer has removed, or written over, and that a pin kept whole: the hook's word, or a daemon that looked in time.

    What another node's daemon pinned on a shared disk is its own to send.
    """
    there = {s.name: scan.found(s) for s in offer.spots}
    kept = [p for p in offer.pins if p.node in ("", node) and not p.stored and p.files]
    return tuple(_of_pin(offer.run, offer.root, p) for p in kept if _outlives(p, there.get(p.checkpoint)))


def around(offer: Offer) -> Surroundings:
    """Return what lies in the same output directory, as far as it can be looked at."""
    seen: list[Seen] = []
    with contextlib.suppress(CkptsyncError):  # what cannot be looked at proves nothing of the rest, and pushing it tells why
        for spot in scan.spots(offer.root):
            seen.append(Seen(offer.run, spot, hold(scan.found(spot), None, spot.family, spot.name), None))  # noqa: PERF401
    return replace(
        surroundings(offer.root, seen, {*(s.name for s in offer.spots), *(p.checkpoint for p in offer.pins)}), awaited=False
    )


def judged(seen: Observation) -> Verdict:
    """Return whether it may be sent at this moment: a user may know more than its files, but not what no waiting makes good."""
    return judge(seen, 0.0, NOW)


def is_proven(seen: Observation) -> bool:
    """Return whether something says that it is finished, so that a daemon, too, would only see to it that nothing moves."""
    return judge(seen, 0.0, _PROVEN).finished


def _is_of(pin: Pin, found: Found) -> bool:
    relation = spool.compare(pin.files, found.files)
    return not (relation.changed or relation.new) and (pin.is_committed or not relation.vanished)


def _outlives(pin: Pin, source: Found | None) -> bool:
    is_gone = source is None or not source.files or bool(spool.compare(pin.files, source.files).changed)
    return is_gone and (pin.is_committed or bool(pin.took.stable))


def _of_pin(run: str, root: Path, pin: Pin) -> Seen:
    spot = Spot(pin.checkpoint, scan.family_of(pin.checkpoint), root / pin.checkpoint)
    return Seen(run, spot, hold(None, pin, spot.family, spot.name), pin)
