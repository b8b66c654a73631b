"""The service's process: which one it is, how it is asked to end, what it holds alone, and how systemd hears of it."""

from __future__ import annotations

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
from ckptsync.fleet.heartbeat import Heartbeat
from ckptsync.spool import folders
from ckptsync.spool.marks import began, boot
from ckptsync.stores import ending
from ckptsync.walk import UnsafeSpool

ALONE = 10.0  # seconds without a change after which an output directory that somebody was removing is served again
HEARD = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def heartbeat(node: str, roles: tuple[str, ...]) -> Heartbeat:
    """Of this process, before its first beat."""
    pid = os.getpid()
    return Heartbeat(node, secrets.token_hex(8), boot(), pid, began(pid), time.time(), roles, __version__)


def is_running(other: Heartbeat) -> bool | None:
    """Whether the process of a heartbeat lives; ``None`` if it is of another machine.  This very process is no other."""
    if not boot() or other.machine != boot():
        return None
    return other.pid != os.getpid() and began(other.pid) == other.began != ""


class Stopping:
    """Set once, by a signal or by a fault: the first signal asks for a clean stop, the second ends the process at once; SIGHUP asks to reload.

    A pipe, since a signal handler may take no lock.
    """

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        self.asked = self.is_reload_asked = self._is_signalled = False
        self.code = 0

    def ask(self, code: int = 0) -> None:
        """Ask for a stop; the first one that is not 0 decides the exit code."""
        self.asked, self.code = True, self.code or code
        ending.announce()
        os.write(self._writer, b"!")

    def wait(self, seconds: float) -> bool:
        """Wait until it is asked for, at most ``seconds``; whether it was."""
        until = time.monotonic() + seconds
        while not self.asked and (left := until - time.monotonic()) > 0:
            self.rest(left)
        return self.asked

    def rest(self, seconds: float) -> bool:
        """As `wait`, but a wish to reload ends it too."""
        ready = select.poll()  # select(2) knows no descriptor above 1,023
        ready.register(self._reader, select.POLLIN)
        if not (self.asked or self.is_reload_asked) and ready.poll(seconds * 1000):
            os.read(self._reader, 4096)
        return self.asked

    def take_reload(self) -> bool:
        """Whether to reload was asked for; it is not asked for any more."""
        was, self.is_reload_asked = self.is_reload_asked, False
        return was

    def on_signal(self, number: int, _frame: object) -> None:
        """SIGTERM and SIGINT; SIGHUP too on a terminal, which is being closed."""
        if number == signal.SIGHUP and not sys.stderr.isatty():
            self.is_reload_asked = True
            os.write(self._writer, b"!")
            return
        if self._is_signalled:
            os._exit(128 + number)
        self._is_signalled = True
        self.ask()

    def leave(self) -> NoReturn:
        """End this process at once, threads and all."""
        logging.shutdown()
        sys.stderr.flush()
        os._exit(self.code)

    def close(self) -> None:
        """Close the pipe."""
        os.close(self._reader)
        os.close(self._writer)


@contextmanager
def stopping() -> Iterator[Stopping]:
    """Signals are taken over within the block, in the main thread; SIGHUP is not where it is ignored, as under nohup."""
    stop = Stopping()
    ending.begin()
    heard = [number for number in HEARD if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, stop.on_signal) for number in heard}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        stop.close()


class Locks:
    """One worker for an output directory and a node id: locks that are held until `close`, or until the process ends.

    The file's name has the node id in it: nodes that share an output directory do not exclude each other.
    """

    def __init__(self, node: str) -> None:
        self._node = node
        self._held: dict[str, int] = {}

    def hold(self, spool: Path) -> None:
        """Hold the lock of a spool directory (made if absent); raises ConfigError if another process has it, StoreError if it cannot be made."""
        key = os.path.realpath(spool)
        if key in self._held:
            if _is_of(self._held[key], spool / f"worker-{self._node}.lock"):
                return
            if any(_has_changed(path) for path in (spool.parent, spool)):
                return  # somebody may be removing the output directory at this moment: a new spool would be in the way
            os.close(self._held.pop(key))  # the output directory was removed, and is made again
        try:
            folders.make(spool)
            descriptor = folders.lock_file(spool / f"worker-{self._node}.lock")
        except UnsafeSpool:
            raise
        except OSError as e:
            raise StoreError(f"{spool}: {e.strerror}", hint="the worker must run as the user who trains") from e
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise ConfigError(
                f"{spool}: another worker of node {self._node} is at work here",
                hint="stop one of them, or give each its own `node` in the configuration",
            ) from None
        self._held[key] = descriptor

    def close(self) -> None:
        """Let go of them all; the files stay, since removing one would let two processes lock two files of one name."""
        while self._held:
            os.close(self._held.popitem()[1])


def _is_of(descriptor: int, path: Path) -> bool:
    """Whether it is the file that lies there now."""
    try:
        found = folders.status(path)
        return found is not None and os.path.samestat(os.fstat(descriptor), found)
    except OSError:
        return False  # gone, or not to be seen: to lock it again says why


def _has_changed(directory: Path) -> bool:
    """Whether a name was put into it, or taken out, within the last seconds."""
    try:
        return abs(time.time() - directory.stat().st_mtime) < ALONE
    except OSError:
        return False  # gone, or not to be seen


class Notifier:
    """sd_notify(3), a datagram of ``KEY=value`` lines.  Silent where nobody listens (``NOTIFY_SOCKET`` is not set)."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        path = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + path[1:] if path.startswith("@") else path
        is_ours = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        wanted = environment.get("WATCHDOG_USEC", "") if is_ours else ""
        self.watchdog = int(wanted) / 1e6 if wanted.isascii() and wanted.isdigit() and int(wanted) else None
        """Seconds within which systemd wants to hear of progress, or ``None``."""

    def send(self, *lines: str) -> None:
        """``send("READY=1", "STATUS=looking")``."""
        if not self._address:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as s:
            try:
                s.sendto("\n".join(line.replace("\n", " ") for line in lines).encode(errors="replace"), self._address)
            except OSError:
                return  # systemd is away or its queue is full: it asks again by its watchdog, and uploading is not to stop for it
