"""The HTTP addresses of a service: ``metrics.listen`` and ``web.listen``.

Each address gets one server; if both options name the same one, it answers /metrics, /healthz and
the page.  A port that is taken is tried again, so it never stops uploads.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from ckptsync import __version__
from ckptsync.config.schema import Config
from ckptsync.errors import ConfigError
from ckptsync.service.process_status import Roles
from ckptsync.stores.contract import Store

if TYPE_CHECKING:  # imported where something listens
    from ckptsync.web.app import Page, Text
    from ckptsync.web.server import HttpServer

CONTENT = "text/plain; version=0.0.4; charset=utf-8"
PLAIN = "text/plain; charset=utf-8"
AGAIN = 30.0  # seconds until a port that was taken is tried again


class Listeners:
    """The HTTP servers of one service, by their addresses; ``roles`` is what they report on."""

    def __init__(self, config: Config, node: str, store: Store, roles: Roles) -> None:
        self._config, self._node, self._store, self._roles = config, node, store, roles
        self._servers: dict[str, HttpServer] = {}

    def port(self, address: str) -> int:
        """Return the port of a configured address, which matters where that says port 0."""
        return self._servers[address].port

    def listen(self) -> None:
        """Start the servers that are configured and do not run yet.

        Raises ConfigError, after all were tried, if a port is taken or a package is missing.
        """
        error: ConfigError | None = None
        metrics, web = self._config.metrics.listen, self._config.web.listen
        addresses = {metrics: "metrics.listen", web: "web.listen"}
        for address, key in addresses.items():
            if address and address not in self._servers:
                try:
                    self._servers[address] = self._begin(address, key)
                except ConfigError as e:
                    error = e
        if error:
            raise error

    def _begin(self, address: str, key: str) -> HttpServer:
        """Start the server of an address; ``key`` is the option that names it, for errors.

        Raises ConfigError if the port is taken, or a package that the server needs is missing;
        CkptsyncError without a thread.
        """
        try:
            from ckptsync.status.metrics import exposition  # noqa: F401, PLC0415
            from ckptsync.web.app import make_app  # noqa: PLC0415
            from ckptsync.web.server import HttpServer  # noqa: PLC0415
        except ModuleNotFoundError as e:
            why = f"{key}: the package {e.name} is missing"
            raise ConfigError(why, hint="install ckptsync again, with its dependencies") from e
        is_metrics = address == self._config.metrics.listen
        texts = {"/metrics": self.metrics, "/healthz": self.health} if is_metrics else {}
        page = self._page() if address == self._config.web.listen else None
        return HttpServer(address, make_app(texts, page), key)

    def _page(self) -> Page | None:
        """Return the page of the store; None without the role head or verifier, which reads it."""
        head = self._roles.head
        if head is None:
            return None
        from ckptsync.service.monitor import OverviewReader, patience  # noqa: PLC0415
        from ckptsync.web.app import Guard, Page  # noqa: PLC0415
        from ckptsync.web.documents import Documents  # noqa: PLC0415
        from ckptsync.web.overview_cache import EVERY, OverviewCache  # noqa: PLC0415

        catalogue = partial(head.catalogues.read, EVERY)
        reader = OverviewReader(self._store, catalogue, patience(self._config))
        guard = Guard(self._config.web.listen, self._config.web.token)
        return Page(OverviewCache(reader.read), Documents(self._store), guard)

    def close(self) -> None:
        """Stop all servers and free their ports."""
        for server in self._servers.values():
            server.close()
        self._servers.clear()

    def metrics(self) -> Text:
        """Return the answer to /metrics: the last overview, and this process's state."""
        from ckptsync.status.metrics import Loop, Process, exposition  # noqa: PLC0415

        roles, now, head = self._roles, time.monotonic(), self._roles.head
        outcome, running = roles.outcome(), roles.running()
        uploads = [p.since for p in running if p.kind == "upload"]
        process = Process(
            node=self._node,
            version=__version__,
            roles=tuple(self._config.roles),
            is_healthy=not self._hung(),
            loops=[Loop(t.name, t.finished, t.failures, t.busy(now)) for t in roles.all],
            queue=len({p.subject for p in running if p.state != "failed" or p.kind == "upload"}),
            oldest=max(0.0, time.time() - min(uploads)) if uploads else 0.0,
            sent_bytes=roles.sent_bytes(),
            errors=len(outcome.errors),
            disks=roles.disks,
            running=[p for p in running if p.is_moving],
            channels=[sender.channel for sender in head.monitor.senders] if head else (),
        )
        return 200, exposition(process, head.monitor.overview if head else None), CONTENT

    def health(self) -> Text:
        """Return the answer to /healthz: 200, or 503 if a task or the main loop hangs."""
        now, hung = time.monotonic(), self._hung()
        lines = [hung or "ok"]
        for task in self._roles.all:
            state = f"at work for {task.busy(now):.0f} s" if task.is_running else "idle"
            lines.append(f"{task.name}: {state}")
        return 503 if hung else 200, "\n".join([*lines, ""]).encode(), PLAIN

    def _hung(self) -> str:
        """Return a sentence with the tasks that hang, or the watchdog itself; "" if none does."""
        watchdog = self._roles.watchdog
        if seconds := watchdog.unchecked():
            return f"hangs: the watchdog has not run for {seconds:.0f} s"
        return f"hangs: {', '.join(watchdog.hung)}" if watchdog.hung else ""
