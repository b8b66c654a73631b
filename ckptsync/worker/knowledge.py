"""What this node knows of the store without asking it: which saves it has, whole and proven, and what other nodes have sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from ckptsync.records import saves
from ckptsync.records.fate import fate
from ckptsync.records.manifest import Manifest
from ckptsync.records.names import sending_prefix
from ckptsync.records.state import newest_model_record, proof
from ckptsync.stores.contract import Store
from ckptsync.walk import Stat
from ckptsync.worker import plan
from ckptsync.worker.known import Known, read_known
from ckptsync.worker.likeness import is_like_stored
from ckptsync.worker.looking import Seen
from ckptsync.worker.options import RunDir
from ckptsync.worker.remembering import read_before
from ckptsync.worker.saving import own, standing
from ckptsync.worker.selecting import Selection


@dataclass(slots=True)
class Knowledge:
    """`read` asks the store, nothing else does.  Any thread may read; others may ask meanwhile for what was read last.

    ``offset``: this node's clock minus the store's, ns, as far as it was measured.
    """

    store: Store
    node: str
    selection: Selection
    offset: Callable[[], int]
    _of: dict[str, Known] = field(default_factory=dict)
    _turns: Iterator[int] = field(default_factory=lambda: count(1))
    _read: dict[str, int] = field(default_factory=dict)

    def read(self, run: str) -> Known:
        """The records of a run as they are now.  Raises StoreError."""
        turn = next(self._turns)
        found = read_known(self.store, run, self.of(run))
        if turn > self._read.get(run, 0):  # what began earlier and ended later is no news
            self._read[run], self._of[run] = turn, found
        return found

    def recall(self, run: RunDir) -> None:
        """Take up what the spool has of digests that were read."""
        known = self._of.setdefault(run.name, Known())
        for checkpoint, read in read_before(run.path).items():
            known.remember(checkpoint, read)

    def of(self, run: str) -> Known:
        """As they were read last."""
        return self._of.get(run) or Known()

    def own(self, run: str, checkpoint: str, stats: Sequence[Stat]) -> Manifest | None:
        """A manifest of the save that has these files, but for those that are not sent by choice."""
        return own(stats, self.node, self.of(run), checkpoint, self.selection)

    def is_proven(self, run: str, checkpoint: str, stats: Sequence[Stat]) -> bool:
        """Whether the store has these very files, VERIFIED or given up: then they need no pin."""
        known = self.of(run)
        mine = self.own(run, checkpoint, stats)
        return mine is not None and is_safe(known, mine.location, saves.live(known.manifests(checkpoint)))

    def is_done(self, seen: Seen) -> bool:
        """Whether nothing is left to do here: it is stored, another's, or given up."""
        return standing(seen, self.node, self.of(seen.run), self.selection) is not None

    def has_mate(self, seen: Seen) -> bool:
        """Whether another node has stored its part of the same save."""
        live = [k.manifest for k in saves.live(self.of(seen.run).manifests(seen.spot.name))]
        if not any(m.node != self.node for m in live):
            return False
        return plan.has_mate(seen.hold.stats, self.node, self.offset(), live)

    def is_like_stored(self, seen: Seen) -> bool:
        """Whether somebody has stored another checkpoint of this run that holds files of the same names."""
        records = self.of(seen.run).records.values()
        return is_like_stored(seen, (r for r in records if isinstance(r, Manifest)), self.selection)

    def is_begun(self, seen: Seen) -> bool:
        """Whether part of it is in the store already: this node said that it was sending it, or another has sent its part."""
        said = sending_prefix(seen.run, seen.spot.name) + self.node
        return bool(self.of(seen.run).copies.get(said)) or self.has_mate(seen)


def is_safe(known: Known, location: str, live: Sequence[saves.Known], *, retired_too: bool = True) -> bool:
    """Whether a location's manifests are proven by a report of its model record, or given up; not where a newer program has said what is not known here."""
    if known.broken_location(location.partition("~")[0]) is not None:
        return False
    here = [k for k in live if k.manifest.location == location]
    records = known.location(location)
    model_record, _ = newest_model_record(records.model_records, here)
    names = {k.name for k in here}
    found = fate(records.tombstones, names)
    is_given_up = retired_too and bool(found.retired or found.shards)
    return is_given_up or (bool(model_record) and proof(records.reports, names, model_record).holds)
