"""Read the overview of a whole store regularly, for metrics, alerts and `ckptsync status`."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from ckptsync.catalogue.location_summary import Catalogue
from ckptsync.catalogue.uncached import not_found
from ckptsync.errors import StoreError
from ckptsync.quantities import show_duration
from ckptsync.service.log import Line, pairs
from ckptsync.service.tasks import Outcome
from ckptsync.spool.markers import boot
from ckptsync.status.alarms import Alarm, Patience
from ckptsync.status.live_catalogue import LiveCatalogue, add_node_progress
from ckptsync.status.nodes import NodeFiles, list_nodes, read_nodes
from ckptsync.status.overview import Overview, Room, overview
from ckptsync.stores.contract import Store
from ckptsync.stores.urls import Remote, located
from ckptsync.threads import ThreadPool

if TYPE_CHECKING:  # `ckptsync status` does without them
    from ckptsync.config.schema import Config
    from ckptsync.service.alert_channels import Sender

AT_ONCE = 8  # requests
AWAY = 300.0  # seconds for which a store may be away before that is an alarm


def patience(config: Config) -> Patience:
    """Return how long a configuration waits before it raises an alarm."""
    return Patience(node=config.head.patience_node, period=config.verify.period)


class OverviewReader:
    """Makes overviews of a store; files of nodes that have not changed are not read again.

    ``catalogue`` reads the store's catalogue, and may cache it; of one ``run``, if that is given.
    """

    def __init__(
        self,
        store: Store,
        catalogue: Callable[[], Catalogue],
        patience: Patience | None = None,
        run: str = "",
    ) -> None:
        self._store, self._catalogue, self._run = store, catalogue, run
        self._patience = patience or Patience()
        self._files = NodeFiles()

    def read(self) -> Overview:
        """Return the present overview; raises StoreError, or ConfigError for an unknown run."""
        catalogue, now = self._read(with_facts=True)
        url, run = self._store.url, self._run
        seen = overview(
            url, catalogue, self._files, now, room=room(url), patience=self._patience, run=run
        )
        self._check(seen.catalogue)
        return seen

    def read_live_catalogue(self) -> tuple[LiveCatalogue, float]:
        """Return the catalogue with what nodes do, and the time on the store's clock; see `read`.

        It reads less than an overview needs.
        """
        catalogue, now = self._read(with_facts=False)
        seen = add_node_progress(catalogue, list_nodes(self._files, now), now, self._run)
        self._check(seen.catalogue)
        return seen, now

    def _read(self, *, with_facts: bool) -> tuple[Catalogue, float]:
        catalogue = self._catalogue()
        with ThreadPool(AT_ONCE, "nodes") as pool:
            self._files = read_nodes(self._store, self._files, pool.map, with_facts=with_facts)
        if self._files.hearts:
            return catalogue, self._files.now(boot(), time.time())
        return catalogue, max(time.time(), catalogue.clock)

    def _check(self, catalogue: Catalogue) -> None:
        """Raise ConfigError if neither the store nor a node knows the run."""
        if self._run and not (catalogue.shown or catalogue.faults):
            raise not_found(self._store, self._run, "")


def room(url: str) -> Room | None:
    """Return the room in a store.

    ``None`` where it is no path of this machine, or does not answer.
    """
    location = located(url)
    if isinstance(location, Remote):
        return None
    try:
        there = shutil.disk_usage(location)
    except OSError:
        return None  # the next read of the store reports what is wrong with it
    return Room(there.free, there.total)


class Monitor:
    """Makes an overview now and then, and gives its alarms to the channels.

    Metrics show what it has ``seen`` last.
    """

    def __init__(self, reader: OverviewReader, senders: Sequence[Sender] = ()) -> None:
        self.seen: Overview | None = None
        self.senders = tuple(senders)
        self._reader = reader
        self._well = time.monotonic()

    def check(self) -> Outcome:
        """Read the overview once.  Raises StoreError; a store that stays away is an alarm, too."""
        now = time.time()
        try:
            seen = self._reader.read()
        except StoreError as e:
            away = time.monotonic() - self._well
            if away >= AWAY:
                text = f"the store could not be read for {show_duration(round(away))}: {e}"
                keep = "workers keep their pinned checkpoints until then"
                todo = f"check that the head can reach the store; {keep}"
                alarm = Alarm("store-away", "store", "critical", now - away, text, todo)
                for sender in self.senders:  # what was sent holds still, as far as anybody knows
                    sender.offer([*sender.active(), alarm], now)
            raise
        self._well = time.monotonic()
        for sender in self.senders:
            sender.offer(seen.alarms, now)
        before, self.seen = self.seen, seen
        errors = tuple(sender.error for sender in self.senders if sender.error)
        return Outcome(tuple(_lines(before, seen)), errors=errors)


def _lines(before: Overview | None, now: Overview) -> Iterator[Line]:
    """Yield a line for each alarm that holds, and one for each that is over.

    What an alarm's text says may count time: a line is new when anything else of it is.
    """
    for a in now.alarms:
        what = {"code": a.code, "subject": a.subject, "severity": a.severity}
        said = a.text.removeprefix(f"{a.subject}: ")
        yield Line(
            f"alarm {a.key}",
            pairs(phase="alarm", **what, detail=said, todo=a.todo),
            level="error" if a.severity == "critical" else "warning",
            state=pairs(phase="alarm", **what, todo=a.todo),
        )
    active = {a.key for a in now.alarms}
    for a in before.alarms if before else ():
        if a.key not in active:
            yield Line(f"over {a.key}", pairs(phase="alarm-over", code=a.code, subject=a.subject))
