"""A few SFTP sessions that threads take turns with.  The only place of this store's where something is done again."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TypeVar

from ckptsync.stores.limits import Limits
from ckptsync.stores.retry import Persistence
from ckptsync.stores.sftp.place import Place
from ckptsync.stores.sftp.session import Session
from ckptsync.stores.sftp.wire import Malformed

T = TypeVar("T")
LITTLE = 1 << 20  # bytes
_LEFT_ALONE: list[Session] = []  # a parent's connections: to end them here would be to end them there


class Sessions:
    """At most ``limits.threads`` connections, opened when needed and kept, and one more for what moves little: it would wait for whole parts.

    One that failed is thrown away.
    """

    def __init__(self, place: Place, limits: Limits) -> None:
        self.place, self._limits = place, limits
        self._persistence = Persistence(limits.patience)
        self._turns = threading.Semaphore(max(1, limits.threads))
        self._spare = threading.Semaphore(1) if limits.threads > 1 else self._turns
        self._idle: list[Session] = []
        self._lock = threading.Lock()
        self._process = os.getpid()
        weakref.finalize(self, _close, self._idle)

    def on(self, step: Callable[[Session], T], moves: int = 0) -> T:
        """What ``step`` gives; it is taken again, on another connection, while it fails transiently: it must be safe to take twice.

        ``moves``: bytes, where they are many.
        """
        return self._persistence.call(lambda: self.once(step, moves))

    def once(self, step: Callable[[Session], T], moves: int = 0) -> T:
        """What ``step`` gives, taken a single time; what is malformed in an answer, wherever it is read, is a StoreError."""
        with self._turn(moves), self._session() as session:
            try:
                return step(session)
            except Malformed as e:
                raise session.malformed(e) from e

    def close(self) -> None:
        """End the connections that nobody uses."""
        with self._lock:
            _close(self._idle)

    @contextlib.contextmanager
    def _turn(self, moves: int) -> Iterator[None]:
        turns = self._turns
        if moves > LITTLE:
            turns.acquire()
        elif not turns.acquire(blocking=False):
            turns = self._spare
            turns.acquire()
        try:
            yield
        finally:
            turns.release()

    @contextlib.contextmanager
    def _session(self) -> Iterator[Session]:
        session = self._kept() or Session(self.place, self._limits)
        try:
            yield session
        finally:
            if session.is_usable:
                with self._lock:
                    self._idle.append(session)
            else:
                session.close()

    def _kept(self) -> Session | None:
        with self._lock:
            if self._process != os.getpid():  # we are a fork: these connections are our parent's
                self._process = os.getpid()
                _LEFT_ALONE.extend(self._idle)
                self._idle.clear()
            while self._idle:
                session = self._idle.pop()
                if session.is_usable:
                    return session
                session.close()
        return None


def _close(sessions: list[Session]) -> None:
    while sessions:
        sessions.pop().close()
