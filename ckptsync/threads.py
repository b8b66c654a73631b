"""Threads, of which a system may give few: fewer are used then, and without any there is an error.

Limits of memory (``ulimit -v``), of a user's processes and of a cgroup all end a thread's start in
the same RuntimeError.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ckptsync.errors import CkptsyncError

SCARCE = "can't start new thread"
"""What the RuntimeError says of which a caller is told."""
HINT = (
    "give it more memory or processes: `ulimit -v`, `ulimit -u`, the limits of its unit, container"
    " or job"
)


def refusal(what: str) -> CkptsyncError:
    """Return the error that the system gives no thread, or process, for ``what``."""
    return CkptsyncError(f"no thread can be started ({what}): the system gives no more", hint=HINT)


def start_thread(work: Callable[[], object], name: str) -> threading.Thread:
    """Return a daemon thread that runs ``work``.  Raises CkptsyncError where there is none."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as e:
        raise refusal(name) from e
    return thread


class ThreadPool(ThreadPoolExecutor):
    """A pool that does with the threads that can be had; `submit` raises CkptsyncError for none."""

    def _adjust_thread_count(self) -> None:
        try:
            super()._adjust_thread_count()
        except RuntimeError as e:
            if not self._threads:
                raise refusal(str(self._thread_name_prefix)) from e
