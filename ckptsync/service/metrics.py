"""``metrics.listen``: what /metrics and /healthz say of this process, from memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from ckptsync import __version__
from ckptsync.config.schema import Config
from ckptsync.errors import ConfigError
from ckptsync.fleet.overview import Overview
from ckptsync.service.periodic import Periodic
from ckptsync.service.roles import Roles
from ckptsync.web.measured import Loop, Process
from ckptsync.web.serving import Listener, Page

CONTENT = "text/plain; version=0.0.4; charset=utf-8"
AGAIN = 30.0
"""s until a port that was taken is tried again."""
HANGS = 110.0
"""s without getting anywhere, as systemd's WatchdogSec in our units; more where limits.stall is, as there."""
MORE = 50.0
BEATS = 600.0
"""s that a heartbeat may take: all its tries of a store that answers with errors are over long before."""


class Metrics:
    """Listens, or tries to.  ``roles``: all that this process does, this look among it."""

    def __init__(self, config: Config, node: str, roles: Roles) -> None:
        self._config, self._node, self._roles = config, node, roles
        self._listener: Listener | None = None
        self._hangs = max(HANGS, config.limits.stall + MORE)

    def look(self) -> None:
        """Listen, if it does not yet; raises ConfigError while the port cannot be had."""
        if self._listener is None:
            _exposition()
            self._listener = Listener(self._config.metrics.listen, {"/metrics": self.metrics, "/healthz": self.health})

    def close(self) -> None:
        """The port is free again."""
        if self._listener:
            self._listener.close()
            self._listener = None

    def metrics(self) -> Page:
        """What Prometheus reads."""
        roles, now = self._roles, time.monotonic()
        oldest = roles.oldest()
        process = Process(
            node=self._node,
            version=__version__,
            roles=tuple(self._config.roles),
            is_healthy=not any(self._ills(now)),
            loops=[Loop(work.name, work.finished, work.failures, work.busy(now)) for work in self._works()],
            queue=len(roles.queue()),
            oldest=0.0 if oldest is None else max(0.0, now - oldest),
            sent_bytes=roles.handed(),
            errors=len(roles.errors()),
            disks=roles.disks,
            jobs=roles.jobs_of_children(),
            told=[sender.told for sender in roles.head.monitor.senders] if roles.head else (),
        )
        return Page(200, _exposition()(process, roles.head.monitor.seen if roles.head else None), CONTENT)

    def health(self) -> Page:
        """503 where another start would help."""
        now = time.monotonic()
        ills = list(self._ills(now))
        loops = [f"{w.name}: {f'at work for {w.busy(now):.0f} s' if w.is_running else 'rests'}" for w in self._works()]
        return Page(503 if ills else 200, "\n".join([*(ills or ["ok"]), *loops, ""]).encode())

    def _works(self) -> tuple[Periodic, ...]:
        return (*([self._roles.beat] if self._roles.beat else []), *self._roles.works)

    def _ills(self, now: float) -> Iterator[str]:
        still, beat = now - self._roles.advanced, self._roles.beat
        if still > self._hangs:
            yield f"hangs: nothing has got any further for {still:.0f} s"
        if beat and beat.busy(now) > BEATS:
            yield f"hangs: a heartbeat has been under way for {beat.busy(now):.0f} s"


def _exposition() -> Callable[[Process, Overview | None], bytes]:
    """A program that was brought up to date without its dependencies goes on; raises ConfigError."""
    try:
        from ckptsync.web.metrics import exposition  # noqa: PLC0415
    except ModuleNotFoundError as e:
        raise ConfigError(
            f"metrics.listen: the package {e.name} is missing", hint="install ckptsync again, with its dependencies"
        ) from e
    return exposition
