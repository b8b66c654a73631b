"""The head's look at everything: what it sees is what /metrics tells, and what alerts are made of."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence

from ckptsync.config.schema import Config
from ckptsync.daemon.alerting import From, Postman, kept_in
from ckptsync.daemon.channels import Channel, Command, Webhook
from ckptsync.daemon.overseeing import Overseer
from ckptsync.daemon.phases import Line, pairs
from ckptsync.daemon.working import Outcome, Posted
from ckptsync.errors import StoreError
from ckptsync.fleet.alarms import Alarm
from ckptsync.fleet.alerting import Terms
from ckptsync.fleet.overview import Overview
from ckptsync.units import show_duration

AWAY = 300.0
"""s for which a store may be away before anybody is told."""


class Outlook:
    """``seen`` is the last; readers in other threads never wait for the next."""

    def __init__(self, overseer: Overseer, postmen: Sequence[Postman] = ()) -> None:
        self.seen: Overview | None = None
        self._overseer, self._postmen = overseer, tuple(postmen)
        self._well = time.monotonic()

    def look(self) -> Outcome:
        """One tick.  Raises StoreError, and tells of a store that stays away."""
        try:
            seen = self._overseer.look()
        except StoreError as e:
            self._tell_away(str(e), time.monotonic() - self._well)
            raise
        self._well = time.monotonic()
        for postman in self._postmen:
            postman.offer(seen.alarms, time.time())
        lines = tuple(_lines(self.seen, seen))
        self.seen = seen
        return Outcome(lines, errors=tuple(p.error for p in self._postmen if p.error))

    def posted(self) -> tuple[Posted, ...]:
        """What alerts have come to."""
        return tuple(postman.posted for postman in self._postmen)

    def _tell_away(self, why: str, away: float) -> None:
        if away < AWAY:
            return
        now = time.time()
        text = f"the store could not be read for {show_duration(round(away))}: {why}"
        todo = "see whether it can be reached from the head; workers keep what they have pinned"
        for postman in self._postmen:
            postman.more(Alarm("store-away", "store", "critical", now - away, text, todo), now)


def outlook(config: Config, node: str, overseer: Overseer, fatal: Callable[[BaseException], None]) -> Outlook:
    """As a configuration has it; raises ConfigError."""
    terms, source = Terms(config.alerts.on, config.alerts.repeat), From(config.store.url, node)
    return Outlook(overseer, [Postman(c, terms, source, kept_in(os.environ), fatal) for c in _channels(config)])


def _channels(config: Config) -> Iterator[Channel]:
    if config.alerts.webhook:
        yield Webhook(config.alerts.webhook)
    if config.alerts.command:
        yield Command(config.alerts.command)


def _lines(before: Overview | None, now: Overview) -> Iterator[Line]:
    """Each alarm once as long as it holds, and once when it is over; nothing in it counts time."""
    holding = {a.key for a in now.alarms}
    for a in now.alarms:
        text = pairs(phase="alarm", code=a.code, subject=a.subject, severity=a.severity, todo=a.todo)
        yield Line(f"alarm {a.key}", text, is_error=a.severity == "critical")
    for a in before.alarms if before else ():
        if a.key not in holding:
            yield Line(f"over {a.key}", pairs(phase="alarm-over", code=a.code, subject=a.subject))
