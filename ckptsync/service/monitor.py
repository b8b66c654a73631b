"""Read the overview of a whole store regularly, for metrics, alerts and `ckptsync status`.

An overview is computed from the store's catalogue and its nodes' files.  `OverviewReader` reads
these, and reads files again only if they have changed.  `Monitor` computes it at each tick of the
head, logs its alarms, and hands them to the channels of alerts.
"""

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
from ckptsync.spool.markers import boot_id
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
    """Return the times after which alarms are raised, from a configuration."""
    return Patience(node=config.head.patience_node, period=config.verify.period)


class OverviewReader:
    """Computes overviews of a store; files of nodes that have not changed are not read again.

    Args:
        store: the store, for the files of its nodes.
        catalogue: reads the store's catalogue, and may cache it.
        patience: the times after which alarms are raised.
        run: the only run that overviews show, or "" for all.

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
        """Read the store, and return the overview of now.

        Raises StoreError, or ConfigError if neither the store nor a node knows the run.
        """
        catalogue, now = self._read(with_facts=True)
        url, run = self._store.url, self._run
        result = overview(
            url, catalogue, self._files, now, room=room(url), patience=self._patience, run=run
        )
        self._check(result.catalogue)
        return result

    def read_live_catalogue(self) -> tuple[LiveCatalogue, float]:
        """Return the catalogue with what nodes do, and the time on the store's clock.

        Reads no facts of nodes, which an overview needs.  Raises as `read` does.
        """
        catalogue, now = self._read(with_facts=False)
        live_catalogue = add_node_progress(catalogue, list_nodes(self._files, now), now, self._run)
        self._check(live_catalogue.catalogue)
        return live_catalogue, now

    def _read(self, *, with_facts: bool) -> tuple[Catalogue, float]:
        """Read the catalogue and the nodes' files, and keep these for the next call.

        Return the catalogue, and the time on the store's clock: by heartbeats, or else the later of
        this clock and the catalogue's.  Raises StoreError.
        """
        catalogue = self._catalogue()
        with ThreadPool(AT_ONCE, "nodes") as pool:
            self._files = read_nodes(self._store, self._files, pool.map, with_facts=with_facts)
        if self._files.hearts:
            return catalogue, self._files.now(boot_id(), time.time())
        return catalogue, max(time.time(), catalogue.clock)

    def _check(self, catalogue: Catalogue) -> None:
        """Raise ConfigError if neither the store nor a node knows the run."""
        if self._run and not (catalogue.shown or catalogue.faults):
            raise not_found(self._store, self._run, "")


def room(url: str) -> Room | None:
    """Return the room in a store; None if it is no path of this machine, or cannot be read.

    Raises ConfigError if the URL is refused.
    """
    location = located(url)
    if isinstance(location, Remote):
        return None
    try:
        usage = shutil.disk_usage(location)
    except OSError:
        return None  # the next read of the store reports what is wrong with it
    return Room(usage.free, usage.total)


class Monitor:
    """Computes an overview at each `check`, and offers its alarms to the channels.

    Metrics show the last ``overview``.
    """

    def __init__(self, reader: OverviewReader, senders: Sequence[Sender] = ()) -> None:
        self.overview: Overview | None = None
        self.senders = tuple(senders)
        self._reader = reader
        self._well = time.monotonic()

    def check(self) -> Outcome:
        """Compute and keep the overview, offer its alarms to the channels, return its log lines.

        The channels' errors are in the outcome.  Raises StoreError, and then keeps the last
        overview; if the store could not be read for `AWAY` seconds, that is offered as an alarm
        beside those that were sent before.
        """
        now = time.time()
        try:
            current = self._reader.read()
        except StoreError as e:
            seconds_away = time.monotonic() - self._well
            if seconds_away >= AWAY:
                text = f"the store could not be read for {show_duration(round(seconds_away))}: {e}"
                keep = "workers keep their pinned checkpoints until then"
                todo = f"check that the head can reach the store; {keep}"
                alarm = Alarm("store-away", "store", "critical", now - seconds_away, text, todo)
                for sender in self.senders:  # what was sent holds still, as far as anybody knows
                    sender.offer([*sender.active(), alarm], now)
            raise
        self._well = time.monotonic()
        for sender in self.senders:
            sender.offer(current.alarms, now)
        before, self.overview = self.overview, current
        errors = tuple(sender.error for sender in self.senders if sender.error)
        return Outcome(tuple(_lines(before, current)), errors=errors)


def _lines(before: Overview | None, now: Overview) -> Iterator[Line]:
    """Yield a log line for each alarm that holds, and one for each that is over.

    The text of an alarm may count time, so its line counts as new only if another value changes.
    """
    for alarm in now.alarms:
        values = {"code": alarm.code, "subject": alarm.subject, "severity": alarm.severity}
        detail = alarm.text.removeprefix(f"{alarm.subject}: ")
        yield Line(
            f"alarm {alarm.key}",
            pairs(phase="alarm", **values, detail=detail, todo=alarm.todo),
            level="error" if alarm.severity == "critical" else "warning",
            state=pairs(phase="alarm", **values, todo=alarm.todo),
        )
    active = {alarm.key for alarm in now.alarms}
    for alarm in before.alarms if before else ():
        if alarm.key not in active:
            yield Line(
                f"over {alarm.key}",
                pairs(phase="alarm-over", code=alarm.code, subject=alarm.subject),
            )
