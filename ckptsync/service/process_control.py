"""The service's process: its identity, its signals, its locks, and its messages to systemd.

Two workers must never serve one output directory under one node id: locks exclude them on one
machine, and the process identity in heartbeats excludes them across machines.  Signals become one
stop request, for which the main loop waits.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from ckptsync import __version__
from ckptsync.errors import ConfigError, StoreError
from ckptsync.spool import safe_files
from ckptsync.spool.markers import boot_id, start_time
from ckptsync.status.heartbeat import Heartbeat
from ckptsync.stores import progress_signs
from ckptsync.walk import UnsafeSpool

# seconds without a change after which an output directory that somebody was removing is served
# again
ALONE = 10.0
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def heartbeat(node: str, roles: tuple[str, ...]) -> Heartbeat:
    """Return a new heartbeat of this process, with a random token; nothing is written."""
    pid = os.getpid()
    return Heartbeat(
        node, secrets.token_hex(8), boot_id(), pid, start_time(pid), time.time(), roles, __version__
    )


def is_running(heartbeat: Heartbeat) -> bool | None:
    """Return whether another process, which wrote a heartbeat, lives; False for this very process.

    None if it is on another machine, or this one's boot is unknown.
    """
    if not boot_id() or heartbeat.machine != boot_id():
        return None
    return heartbeat.pid != os.getpid() and start_time(heartbeat.pid) == heartbeat.began != ""


class Stopping:
    """The stop request of this process, with its exit code, and the wait of the main loop.

    The first signal asks for a clean stop, the second ends the process at once; SIGHUP asks for a
    reload.  The wait is on a pipe: a signal handler may take no lock, and `Event.wait` counts wall
    time where Python was built without sem_clockwait(3), as common standalone builds are.
    """

    def __init__(self) -> None:
        """Open the pipe on which `wait` waits; install no handler."""
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self.is_stopping = self.must_reload = self._is_signalled = False
        self.code = 0

    def ask(self, code: int = 0) -> None:
        """Request a stop and wake the main loop; the first code that is not 0 is the exit code.

        Reads of files and retries of the store end, too (`progress_signs`).
        """
        self.is_stopping, self.code = True, self.code or code
        progress_signs.announce_shutdown()
        self.wake()

    def wake(self) -> None:
        """End the main loop's wait."""
        with contextlib.suppress(BlockingIOError):  # the pipe is full of other wakes
            os.write(self._writer, b"!")

    def wait(self, seconds: float) -> bool:
        """Wait until `wake` is called, at most ``seconds``; return whether a stop is requested.

        Returns at once after a stop request.
        """
        ready = select.poll()  # select(2) knows no descriptor above 1,023
        ready.register(self._reader, select.POLLIN)
        if not self.is_stopping and ready.poll(max(0.0, seconds) * 1000):
            os.read(self._reader, 4096)
        return self.is_stopping

    def take_reload(self) -> bool:
        """Return whether a reload is requested, and clear that request."""
        is_requested, self.must_reload = self.must_reload, False
        return is_requested

    def on_signal(self, number: int, _frame: object) -> None:
        """Handle a signal: the first requests a stop, a second one ends the process at once.

        SIGHUP requests a reload; on a terminal, which is being closed, it is as the others.
        """
        if number == signal.SIGHUP and not sys.stderr.isatty():
            self.must_reload = True
            self.wake()
            return
        if self._is_signalled:
            os._exit(128 + number)
        self._is_signalled = True
        self.ask()

    def leave(self) -> NoReturn:
        """End this process at once with its exit code, without waiting for threads."""
        logging.shutdown()
        sys.stderr.flush()
        os._exit(self.code)


@contextmanager
def stopping() -> Iterator[Stopping]:
    """Handle `SIGNALS` within the block, by the yielded stop request; main thread only.

    SIGHUP stays ignored where it was, as under nohup.  The handlers before are restored at the end.
    """
    stop = Stopping()
    progress_signs.clear_shutdown()
    numbers = [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, stop.on_signal) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Locks:
    """Locks that allow one worker for an output directory and a node id, until `close`.

    The file's name has the node id in it: nodes that share an output directory do not exclude each
    other.
    """

    def __init__(self, node: str) -> None:
        self._node = node
        self._held: dict[str, int] = {}

    def hold(self, spool: Path) -> None:
        """Take the lock of a spool directory, which is made if absent, and keep it.

        Returns at once if it is held already.  If the output directory was made anew, its new lock
        is taken `ALONE` seconds after the last change there; until then the old one is kept.

        Raises:
            ConfigError: another process holds the lock.
            UnsafeSpool: the spool may not be used.
            StoreError: the lock's file cannot be made.

        """
        key = os.path.realpath(spool)
        if key in self._held:
            if _is_of(self._held[key], spool / f"worker-{self._node}.lock"):
                return
            if any(_has_changed(path) for path in (spool.parent, spool)):
                # somebody may be removing the output directory at this moment: a new spool would be
                # in the way
                return
            os.close(self._held.pop(key))  # the output directory was removed, and is made again
        try:
            safe_files.make_folders(spool)
            descriptor = safe_files.lock_file(spool / f"worker-{self._node}.lock")
        except UnsafeSpool:
            raise
        except OSError as e:
            hint = "the worker must run as the user who trains"
            raise StoreError(f"{spool}: {e.strerror}", hint=hint) from e
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            why = f"{spool}: another worker of node {self._node} is at work here"
            hint = "stop one of them, or give each its own `node` in the configuration"
            raise ConfigError(why, hint=hint) from None
        self._held[key] = descriptor

    def close(self) -> None:
        """Release all locks.

        The files stay: removing one would let two processes lock two files of one name.
        """
        while self._held:
            os.close(self._held.popitem()[1])


def _is_of(descriptor: int, path: Path) -> bool:
    """Return whether a descriptor is of the file that a path names now; False if it has none."""
    try:
        status = safe_files.status(path)
        return status is not None and os.path.samestat(os.fstat(descriptor), status)
    except OSError:
        return False  # gone, or not to be seen: to lock it again says why


def _has_changed(directory: Path) -> bool:
    """Return whether a name has come or gone in a directory within the last `ALONE` seconds.

    False if it cannot be read.  By the wall clock.
    """
    try:
        return abs(time.time() - directory.stat().st_mtime) < ALONE
    except OSError:
        return False  # gone, or not to be seen


class Notifier:
    """Sends systemd a datagram of ``KEY=value`` lines, as sd_notify(3) does.

    Sends nothing if ``NOTIFY_SOCKET`` is not set.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        """Read from the environment where systemd listens and how often it expects a sign.

        ``watchdog`` is None unless WATCHDOG_PID is this process.
        """
        path = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + path[1:] if path.startswith("@") else path
        is_ours = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        usec = environment.get("WATCHDOG_USEC", "") if is_ours else ""
        self.watchdog = int(usec) / 1e6 if usec.isascii() and usec.isdigit() and int(usec) else None
        """Seconds within which systemd expects a sign of life, or ``None``."""

    def send(self, *lines: str) -> None:
        """Send these lines, such as ``"READY=1"``, in one message; an OSError is ignored."""
        if not self._address:
            return
        message = "\n".join(line.replace("\n", " ") for line in lines).encode(errors="replace")
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as s,
            # systemd is away or its queue is full: uploads must not stop for that
            contextlib.suppress(OSError),
        ):
            s.sendto(message, self._address)
