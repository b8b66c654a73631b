"""What reports call damaged is sent again by whoever carries saves: a large file keeps no new save waiting for a decision."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

from ckptsync.errors import CkptsyncError
from ckptsync.records.manifest import FileEntry
from ckptsync.records.names import OURS, records_prefix
from ckptsync.stores import signs
from ckptsync.worker import repair
from ckptsync.worker.hold import Hold
from ckptsync.worker.knowledge import Knowledge
from ckptsync.worker.lanes import Carrier
from ckptsync.worker.looking import Seen
from ckptsync.worker.options import RunDir
from ckptsync.worker.plan import Read
from ckptsync.worker.remembering import added_here
from ckptsync.worker.result import Failure, Repaired, failure
from ckptsync.worker.saving import outgoing
from ckptsync.worker.selecting import EVERYTHING
from ckptsync.worker.sharing import Job, Name, Share
from ckptsync.worker.upload import Destination


class Mending:
    """`plan` and `told` are for one thread; who carries what is planned may be others.

    ``served``: report and finding of what was served, with the reason where it could not be; kept as long as the report is not answered.
    """

    def __init__(self, knowledge: Knowledge, carrier: Carrier) -> None:
        self._knowledge, self._carrier = knowledge, carrier
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
        known, node = self._knowledge.of(run.name), self._knowledge.node
        asked: set[tuple[str, str]] = set()
        for location in known.damaged():
            name = (run.name, location.partition("~")[0])
            if name in busy:
                asked.update(key for key in tuple(self._served) if key[0].startswith(records_prefix(run.name, location)))
                continue
            here = [s for s in seen if s.spot.name == name[1]]
            requests = repair.wanted(
                known.location(location), node, location, known.manifests(name[1]), copies(here, known.read.get(name[1], {}))
            )
            asked.update((r.report, r.finding) for r in requests)
            due = [r for r in requests if (r.report, r.finding) not in self._served]
            holds = [outgoing(s, EVERYTHING).hold for s in here if due]
            if due:
                size = sum(r.entry.size for r in due)
                yield Job(("mended", run.name, location), name, size, partial(self._serve, run, name, due, holds))
        for old in [key for key in tuple(self._served) if key[0].startswith(f"{run.name}/{OURS}/") and key not in asked]:
            self._served.pop(old, None)

    def _serve(self, run: RunDir, name: Name, requests: Sequence[repair.Request], holds: Sequence[Hold], _: Share) -> None:
        """In whatever thread this is."""
        to = Destination(self._knowledge.store, self._knowledge.node, tuple, passed=lambda _: signs.give())
        for request in requests:
            try:
                reason = repair.serve(request, holds, to, partial(added_here, run.path))
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
