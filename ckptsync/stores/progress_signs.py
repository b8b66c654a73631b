"""Signs that the transfers of this process move, and that the process is about to end.

A watchdog has to tell a slow network, or a store that is tried again, from a thread that hangs for
ever, and the kernel counts no bytes of sockets for a process. So whatever moves bytes counts a sign
here, for the thread's owner (`attributed_to`). After `announce_shutdown` nothing is tried again, so
that threads which wait for a store end soon.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import partial
from typing import TypeVar

from ckptsync.errors import Transient

R = TypeVar("R")

# bytes of a request that is a sign: a heartbeat's few hundred are none, since it is sent even while
# everything else hangs
LEAST = 64 << 10
_lock = threading.Lock()
_signs: dict[str, int] = {}
_owner: ContextVar[str] = ContextVar("owner", default="")
_counter: ContextVar[Callable[[int], None] | None] = ContextVar("counter", default=None)
_sent = 0  # bytes
_is_shutting_down = False  # a plain flag, since signal handlers may take no lock


def sign() -> None:
    """Count a sign: something moved, or failed and is tried again."""
    with _lock:
        _signs[_owner.get()] = _signs.get(_owner.get(), 0) + 1


def signs() -> int:
    """Return how many signs this process has counted."""
    with _lock:
        return sum(_signs.values())


def signs_of(owner: str) -> int:
    """Return how many signs were counted within `attributed_to` this owner."""
    with _lock:
        return _signs.get(owner, 0)


def count_sent(count: int) -> None:
    """Count bytes of files as uploaded, and call the block's counter (`counted_by`).

    A store calls this where bytes leave for its disk or server: bytes that wait in a part do not
    count.
    """
    global _sent  # noqa: PLW0603 - of the whole process
    with _lock:
        _sent += count
    count_kept(count)


def count_kept(count: int) -> None:
    """Call the block's counter (`counted_by`) for bytes that an earlier try had uploaded."""
    if counter := _counter.get():
        counter(count)


@contextmanager
def counted_by(counter: Callable[[int], None]) -> Iterator[None]:
    """Call ``counter`` with the bytes that this block uploads, also in threads (`keep_context`)."""
    before = _counter.set(counter)
    try:
        yield
    finally:
        _counter.reset(before)


def sent_bytes() -> int:
    """Return how many bytes of files this process has uploaded, failed tries included."""
    with _lock:
        return _sent


@contextmanager
def attributed_to(owner: str) -> Iterator[None]:
    """Attribute the signs of this block to ``owner``."""
    before = _owner.set(owner)
    try:
        yield
    finally:
        _owner.reset(before)


def keep_context(work: Callable[..., R]) -> Callable[..., R]:
    """Return ``work`` bound to a copy of this thread's context, to be run by another thread.

    So what ``work`` does counts for the same owner and counter.
    """
    return partial(copy_context().run, work)


def announce_shutdown() -> None:
    """Announce that the process ends: retries stop, and reads of files stop before their end."""
    global _is_shutting_down  # noqa: PLW0603 - of the whole process
    _is_shutting_down = True


def clear_shutdown() -> None:
    """Take the announcement back: another command begins in this process."""
    global _is_shutting_down  # noqa: PLW0603 - of the whole process
    _is_shutting_down = False


def is_shutting_down() -> bool:
    """Return whether a shutdown was announced."""
    return _is_shutting_down


def check_shutdown(name: str) -> None:
    """Raise Transient if a shutdown was announced; ``name`` is the file that is not read then."""
    if _is_shutting_down:
        raise Transient(
            f"{name}: not read, the process is about to end", hint="the next start continues"
        )
