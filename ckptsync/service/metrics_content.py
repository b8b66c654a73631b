"""``metrics.listen``: what /metrics and /healthz say of this process, from memory."""

from __future__ import annotations

import time
from collections.abc import Callable

from ckptsync import __version__
from ckptsync.config.schema import Config
from ckptsync.errors import ConfigError
from ckptsync.service.roles import Roles
from ckptsync.status.http_server import Loop, Page, PageListener, Process
from ckptsync.status.overview import Overview

CONTENT = "text/plain; version=0.0.4; charset=utf-8"
AGAIN = 30.0  # seconds until a port that was taken is tried again


class Metrics:
    """Listens, or tries to.  ``roles``: all that this process does."""

    def __init__(self, config: Config, node: str, roles: Roles) -> None:
        self._config, self._node, self._roles = config, node, roles
        self._listener: PageListener | None = None

    def listen(self) -> None:
        """Listen, if this does not yet; raises ConfigError while the port cannot be had."""
        if self._listener is None:
            _exposition()
            pages = {"/metrics": self.metrics, "/healthz": self.health}
            self._listener = PageListener(self._config.metrics.listen, pages)

    def close(self) -> None:
        """Free the port."""
        if self._listener:
            self._listener.close()
            self._listener = None

    def metrics(self) -> Page:
        """Return what Prometheus reads."""
        roles, now, head = self._roles, time.monotonic(), self._roles.head
        outcome = roles.outcome()
        process = Process(
            node=self._node,
            version=__version__,
            roles=tuple(self._config.roles),
            is_healthy=not self._hung(),
            loops=[Loop(t.name, t.finished, t.failures, t.busy(now)) for t in roles.all],
            queue=len(outcome.queue),
            oldest=outcome.waited(now),
            sent_bytes=roles.sent_bytes(),
            errors=len(outcome.errors),
            disks=roles.disks,
            jobs=head.jobs.running() if head else (),
            channels=[sender.channel for sender in head.monitor.senders] if head else (),
        )
        return Page(200, _exposition()(process, head.monitor.seen if head else None), CONTENT)

    def health(self) -> Page:
        """Return 503 where another start would help."""
        now, hung = time.monotonic(), self._hung()
        lines = [hung or "ok"]
        for task in self._roles.all:
            state = f"at work for {task.busy(now):.0f} s" if task.is_running else "idle"
            lines.append(f"{task.name}: {state}")
        return Page(503 if hung else 200, "\n".join([*lines, ""]).encode())

    def _hung(self) -> str:
        """Return what hangs by the rule of the service's watchdog, or whether that does itself."""
        watchdog = self._roles.watchdog
        if still := watchdog.still():
            return f"hangs: the watchdog has not run for {still:.0f} s"
        return f"hangs: {', '.join(watchdog.found)}" if watchdog.found else ""


def _exposition() -> Callable[[Process, Overview | None], bytes]:
    """A program that was brought up to date without its dependencies goes on.

    Raises ConfigError.
    """
    try:
        from ckptsync.status.metrics import exposition  # noqa: PLC0415
    except ModuleNotFoundError as e:
        why = f"metrics.listen: the package {e.name} is missing"
        raise ConfigError(why, hint="install ckptsync again, with its dependencies") from e
    return exposition
