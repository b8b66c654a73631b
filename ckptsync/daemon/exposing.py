"""``metrics.listen``: what /metrics and /healthz say of this process, from memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from ckptsync import __version__
from ckptsync.config.schema import Config
from ckptsync.daemon.tick import Tick
from ckptsync.daemon.working import Outcome, Working
from ckptsync.errors import ConfigError
from ckptsync.fleet.overview import Overview
from ckptsync.web.measured import Loop, Process, Told
from ckptsync.web.serving import Listener, Page

CONTENT = "text/plain; version=0.0.4; charset=utf-8"
AGAIN = 30.0
"""s until a port that was taken is tried again."""
HANGS = 110.0
"""s without getting anywhere, as systemd's WatchdogSec in our units; more where limits.stall is, as there."""
MORE = 50.0
BEATS = 600.0
"""s that a heartbeat may take: all its tries of a store that answers with errors are over long before."""


class Exposing:
    """Listens, or tries to.  ``working``: all that this process does, this look among it; asked for when there is somebody to tell."""

    def __init__(self, config: Config, node: str, working: Callable[[], Working]) -> None:
        self._config, self._node, self._working = config, node, working
        self._listener: Listener | None = None
        self._hangs = max(HANGS, config.limits.stall + MORE)

    def look(self) -> Outcome:
        """One tick; raises ConfigError while the port cannot be had."""
        if self._listener is None:
            _exposition()
            self._listener = Listener(self._config.metrics.listen, {"/metrics": self.metrics, "/healthz": self.health})
        return Outcome()

    def close(self) -> None:
        """The port is free again."""
        if self._listener:
            self._listener.close()
            self._listener = None

    def metrics(self) -> Page:
        """What Prometheus reads."""
        working, now = self._working(), time.monotonic()
        oldest = working.oldest()
        process = Process(
            node=self._node,
            version=__version__,
            roles=tuple(self._config.roles),
            is_healthy=not any(_ills(working, now, self._hangs)),
            loops=[Loop(t.name, t.finished, t.failures, _busy(t, now)) for t in _ticks(working)],
            queue=len(working.queue()),
            oldest=0.0 if oldest is None else max(0.0, now - oldest),
            sent_bytes=working.vitals.handed(),
            errors=len(working.errors()),
            disks=working.vitals.disks,
            jobs=working.ground.children(),
            told=[Told(p.channel, p.delivered, p.failed) for p in working.ground.posted()],
        )
        return Page(200, _exposition()(process, working.ground.seen()), CONTENT)

    def health(self) -> Page:
        """503 where another start would help."""
        working, now = self._working(), time.monotonic()
        ills = list(_ills(working, now, self._hangs))
        loops = [f"{t.name}: {f'at work for {_busy(t, now):.0f} s' if t.is_running else 'rests'}" for t in _ticks(working)]
        return Page(503 if ills else 200, "\n".join([*(ills or ["ok"]), *loops, ""]).encode())


def _exposition() -> Callable[[Process, Overview | None], bytes]:
    """A program that was brought up to date without its dependencies goes on; raises ConfigError."""
    try:
        from ckptsync.web.metrics import exposition  # noqa: PLC0415
    except ModuleNotFoundError as e:
        raise ConfigError(
            f"metrics.listen: the package {e.name} is missing", hint="install ckptsync again, with its dependencies"
        ) from e
    return exposition


def _ticks(working: Working) -> tuple[Tick, ...]:
    beat = working.vitals.beat
    return (*([beat] if beat else []), *working.ticks)


def _ills(working: Working, now: float, hangs: float) -> Iterator[str]:
    still, beat = now - working.vitals.advanced, working.vitals.beat
    if still > hangs:
        yield f"hangs: nothing has got any further for {still:.0f} s"
    if beat and _busy(beat, now) > BEATS:
        yield f"hangs: a heartbeat has been under way for {_busy(beat, now):.0f} s"


def _busy(tick: Tick, now: float) -> float:
    return max(0.0, now - tick.began) if tick.is_running else 0.0
