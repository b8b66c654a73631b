"""Listen on an address with uvicorn, in a thread, and close slow and idle connections.

uvicorn waits for ever for the head of a request, and for a client to read an answer, so a few open
sockets could keep everybody out. Here both have `SLOW` seconds. If more than `MANY` connections are
idle (without an answer being made), the oldest are closed, `SOON` after a new one: by then the
requests of connections that came together have been read. A client that hangs up is no error.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import stat
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ckptsync.config.value_parsers import UNIX
from ckptsync.errors import CkptsyncError, ConfigError
from ckptsync.threads import start_thread

SLOW = 10.0  # seconds for the whole head of a request, and for an answer to be taken
MANY = 16  # connections at once that send a head, or wait for the next request
SOON = 0.2  # seconds after which what a new connection sent has been read
HEAD = 16 << 10  # bytes of a request's head
TURNS = 10  # of a loop that ends
_PAUSE = 60.0  # seconds within which the thread of a server begins

Message = MutableMapping[str, Any]
App = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]],
    Awaitable[None],
]
"""An ASGI application."""


class HttpServer:
    """An HTTP server on one address, which listens from its construction until `close`.

    Args:
        address: ``host:port``, with an IPv6 address in brackets, port 0 for any; or ``unix:/path``.
        app: the ASGI application.
        key: the option that names the address, for errors.

    Raises ConfigError if the address cannot be listened on, CkptsyncError if no thread can be had.

    """

    def __init__(self, address: str, app: App, key: str) -> None:
        """Listen on the address, and start the thread that serves it."""
        self._path = Path(address.removeprefix(UNIX)) if address.startswith(UNIX) else None
        try:
            self._socket = _bound_path(self._path) if self._path else _bound(address)
        except (OSError, OverflowError) as e:
            reason = e.strerror if isinstance(e, OSError) else "no such port"
            hint = f"give each service of this machine a port of its own: see {key}"
            raise ConfigError(f"{key}: {address}: {reason}", hint=hint) from e
        self.port: int = 0 if self._path else self._socket.getsockname()[1]
        logging.getLogger("uvicorn.error").addFilter(_is_bug)
        config = uvicorn.Config(
            app,
            loop="asyncio",
            http=_Connection,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            headers=[("Server", "ckptsync")],
            timeout_keep_alive=int(SLOW),
            timeout_graceful_shutdown=0,
            h11_max_incomplete_event_size=HEAD,
        )
        self._server = _Server(config)
        self._loop = asyncio.new_event_loop()
        try:
            self._thread = start_thread(self._run, "web")
        except CkptsyncError:
            self._loop.close()
            self._socket.close()
            raise

    def _run(self) -> None:
        """Serve until the end, then close loop and socket; the thread's main function."""
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()
            self._socket.close()

    async def _serve(self) -> None:
        """Serve until `_end`, then cancel all tasks and close all connections."""
        await self._server.serve([self._socket])
        while len(asyncio.all_tasks()) > 1 or self.connections():
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            self._cut_all()
            await asyncio.sleep(0)

    def close(self) -> None:
        """Stop, free the port, and remove a Unix socket; open connections are aborted.

        Waits for the thread, at most `_PAUSE` seconds.
        """
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._end)
        self._thread.join(_PAUSE)
        if self._path:
            self._path.unlink(missing_ok=True)

    def connections(self) -> int:
        """Return how many clients are connected."""
        return len(self._server.server_state.connections)

    def _end(self, turns: int = TURNS) -> None:
        """Accept no more clients, and end the server after ``turns`` more turns of the loop.

        By then the clients that were being accepted are connected, and have been aborted.

        A server that is closed while it accepts a client leaves that one's socket open
        (`asyncio.base_events.Server._attach` asserts that the server is open).
        """
        self._loop.remove_reader(self._socket)
        self._cut_all()
        if turns:
            self._loop.call_soon(self._end, turns - 1)
        else:
            self._server.ended.set()

    def _cut_all(self) -> None:
        """Abort all connections."""
        for connection in [*self._server.server_state.connections]:
            connection.transport.abort()


def _is_bug(record: logging.LogRecord) -> bool:
    """Return whether a record of uvicorn's log is an exception; lines about clients are dropped."""
    error = record.exc_info[1] if record.exc_info else None
    return error is not None and not isinstance(error, asyncio.CancelledError)


def _bound(address: str) -> socket.socket:
    """Return a socket that listens on ``host:port``. Raises OSError or OverflowError."""
    host, _, port = address.rpartition(":")
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host.strip("[]"), int(port)))
        listener.listen()
    except BaseException:
        listener.close()
        raise
    return listener


def _bound_path(path: Path) -> socket.socket:
    """Return a Unix socket that listens, and to which only this user may connect.

    Replaces the socket of a process that has ended, nothing else. Raises OSError.
    """
    listener = socket.socket(socket.AF_UNIX)
    try:
        if path.is_socket() and not _is_served(path):
            path.unlink()
        listener.bind(str(path))
        path.chmod(stat.S_IRUSR | stat.S_IWUSR)
        listener.listen()
    except BaseException:
        listener.close()
        raise
    return listener


def _is_served(path: Path) -> bool:
    """Return whether a process listens on a Unix socket."""
    with socket.socket(socket.AF_UNIX) as asking:
        return asking.connect_ex(str(path)) == 0


class _Server(uvicorn.Server):
    """A uvicorn server that waits for ``ended``, instead of waking up ten times a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ended = asyncio.Event()

    async def main_loop(self) -> None:
        """Wait for ``ended``, instead of uvicorn's ticks."""
        await self.on_tick(0)  # sets the headers of all answers
        await self.ended.wait()


class _Connection(H11Protocol):
    """One connection of a client, which is aborted if it is too slow or idle for too long."""

    _head: asyncio.TimerHandle | None = None  # until a request's head is whole
    _answer: asyncio.TimerHandle | None = None  # until enough of an answer is taken

    @property
    def _is_idle(self) -> bool:
        """Return whether no answer is being made."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the head of a request; close the oldest idle connections soon."""
        super().connection_made(transport)
        self.server_state.__dict__.setdefault("idle", {})[self] = None
        self._head = self._limit()
        self.loop.call_later(SOON, self._cut_oldest)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers, and forget the connection."""
        _cancel(self._head)
        _cancel(self._answer)
        self._idle.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Begin to wait for the rest of a head, or stop waiting if a request is complete."""
        if self._is_idle and self._head is None:
            self._head = self._limit()
        super().data_received(data)
        if not self._is_idle:
            _cancel(self._head)
            self._head = None
            self._idle.pop(self, None)

    def on_response_complete(self) -> None:
        """Count the connection as idle; close the oldest idle ones soon."""
        super().on_response_complete()
        if self._is_idle and not self.transport.is_closing():
            self._idle[self] = None
            self.loop.call_later(SOON, self._cut_oldest)

    def timeout_keep_alive_handler(self) -> None:
        """Abort the idle connection."""
        self.transport.abort()  # a close would wait until the rest is taken

    def pause_writing(self) -> None:
        """Begin to wait for the client to read."""
        super().pause_writing()
        self._answer = self._answer or self._limit()

    def resume_writing(self) -> None:
        """Stop waiting for the client."""
        _cancel(self._answer)
        self._answer = None
        super().resume_writing()

    @property
    def _idle(self) -> dict[_Connection, None]:
        """Return all idle connections of the server, the oldest first."""
        idle: dict[_Connection, None] = self.server_state.__dict__["idle"]
        return idle

    def _cut_oldest(self) -> None:
        """Abort the oldest idle connections beyond `MANY`."""
        while len(self._idle) > MANY:
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            oldest.transport.abort()

    def _limit(self) -> asyncio.TimerHandle:
        """Return a timer that aborts this connection after `SLOW` seconds."""
        return self.loop.call_later(SLOW, self.transport.abort)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    """Cancel a timer; do nothing if there is none."""
    if timer:
        timer.cancel()


async def in_thread(work: Callable[[], Any], name: str) -> Any:
    """Run ``work`` in a new daemon thread; return its result, or raise its exception.

    A daemon thread that hangs delays no exit. Raises CkptsyncError if no thread can be had.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def finish(set_outcome: Callable[[Any], None], outcome: Any) -> None:
        """Set the outcome, unless the awaiting task was cancelled."""
        if not future.done():
            set_outcome(outcome)

    def run() -> None:
        """Do the work, and hand its result or error to the loop; drop it if the loop has ended."""
        try:
            outcome, set_outcome = work(), future.set_result
        except BaseException as e:  # noqa: BLE001 - raised where it is awaited
            outcome, set_outcome = e, future.set_exception
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(partial(finish, set_outcome, outcome))

    start_thread(run, name)
    return await future
