"""``ckptsync push``: one checkpoint, or every one below a directory, now.  Nothing is waited for, but what changes is not sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from ckptsync import scan
from ckptsync.errors import CkptsyncError, ConfigError, Incomplete
from ckptsync.scan import Spot
from ckptsync.stores.contract import Store
from ckptsync.stores.limits import Limits
from ckptsync.worker import clock, deciding, rivals
from ckptsync.worker.evidence import gather
from ckptsync.worker.hold import hold
from ckptsync.worker.known import Known, read_known
from ckptsync.worker.looking import Seen
from ckptsync.worker.moving import tidy
from ckptsync.worker.node import node_id
from ckptsync.worker.options import checked_run, local_root, refuse_overlap
from ckptsync.worker.result import Progress
from ckptsync.worker.saving import is_given_up, sent_progress, told
from ckptsync.worker.send import Road, send
from ckptsync.worker.settle import Rule, Sighting, judge
from ckptsync.worker.take import Passed, nothing, take

NOW = Rule(quiet=0, unmarked=0, doubtful=0)
UNCLAIMED = "another node is sending files of this checkpoint, and this store may let two nodes write one name at once: push again when that node is done"


def to_push(directory: Path) -> tuple[str, tuple[Spot, ...]]:
    """The run's name by its directory, and the checkpoints; raises ConfigError if there are none."""
    if not directory.is_dir():
        raise ConfigError(
            f"{directory}: no such directory", hint="give a checkpoint's directory, or the one that holds checkpoints"
        )
    own = scan.spot_at(directory)
    if own is not None:
        above = own.path.parent
        return (above.parent if above.name in scan.NESTED else above).name, (own,)
    found = scan.spots(directory.resolve())
    if not found:
        raise ConfigError(
            f"{directory}: no checkpoint in it",
            hint="wanted: checkpoint-N, checkpoint_K, step-N, global_step_N, *.ckpt, a DeepSpeed save directory, or a model with its weights",
        )
    return directory.resolve().name, found


def push_now(
    directory: Path, store: Store, node: str = "", run: str = "", passed: Passed = nothing, *, threads: int = Limits().threads
) -> tuple[Progress, ...]:
    """Send all of them; of several errors the first is raised, after everything else has been tried.

    ``passed`` is told the bytes of each chunk that is read, each byte of a file once: what has to be read again is taken back.
    Raises ConfigError (no checkpoint; the store lies in it), Incomplete (it is being written), Corrupt, StoreError.
    """
    name, spots = to_push(directory)
    root = local_root(store.url)
    if root is not None:
        refuse_overlap(directory, root)
    name, node = checked_run(run or name), node or node_id()
    # measured once, and only where something is sent
    pusher = _Pusher(store, node, name, passed, threads, cache(lambda: clock.measure(store, node)))
    results: list[Progress] = []
    errors: list[CkptsyncError] = []
    for spot in spots:
        result = pusher.attempt(spot)
        (results if isinstance(result, Progress) else errors).append(result)  # type: ignore[arg-type]
    if errors:
        raise errors[0]
    return tuple(results)


@dataclass(slots=True)
class _Pusher:
    """What all checkpoints of one push have in common."""

    store: Store
    node: str
    run: str
    passed: Passed
    threads: int
    offset: Callable[[], int]
    known: Known = field(default_factory=Known)

    def attempt(self, spot: Spot) -> Progress | CkptsyncError:
        try:
            return self._push(spot)
        except CkptsyncError as e:  # raised by the caller, once the others have had their turn
            return e

    def _push(self, spot: Spot) -> Progress:
        seen = Seen(self.run, spot, hold(scan.found(spot), None, spot.family, spot.name), None)
        evidence = gather(seen.hold, spot, later=False, mates=False)
        found = judge(evidence, Sighting(evidence.files, 0.0), 0.0, NOW)
        if not found.settled:
            raise Incomplete(f"{spot.path}: {found.reason}", hint="push it when the trainer is done with it")
        broken = self._read().broken_place(spot.name)
        if broken is not None:
            raise broken
        if is_given_up(seen, self.node, self.known):
            return Progress(self.run, spot.name, 0, "retired", "given up in the store")
        return self._send(seen)

    def _send(self, seen: Seen) -> Progress:
        name = seen.spot.name
        road = Road(
            self.store,
            self.node,
            lambda: self._read().manifests(name),
            lambda: rivals.is_contended(self._read(), self.node, self.run, name),
            self.passed,
            self.threads,
        )
        taken = take(seen.hold)
        planned = replace(deciding.draft(told(seen, self.node), taken), clock_offset=self.offset())
        sent = send(planned, seen.hold, road, taken.read)
        if sent.waiting:
            raise Incomplete(
                f"{seen.spot.path}: another node is writing {sent.waiting[0]}", hint="push it again when that node is done"
            )
        place = tidy(self.node, sent.place, seen.hold, road, self._read().copies)
        progress = sent_progress(seen, taken, replace(sent, place=place))
        is_doubtful = not self.store.is_exclusive and road.is_contended()
        return replace(progress, notes=(*progress.notes, UNCLAIMED)) if is_doubtful else progress

    def _read(self) -> Known:
        self.known = read_known(self.store, self.run, self.known)
        return self.known
