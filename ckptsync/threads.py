"""Start threads where the system may refuse some.

Limits of memory (``ulimit -v``), of a user's processes and of a cgroup all make the start of a
thread raise the same RuntimeError. A `ThreadPool` then works with fewer threads; only without any
thread there is an error, which names the limits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ckptsync.errors import CkptsyncError

SCARCE = "can't start new thread"
"""The text of the RuntimeError of a thread that cannot be started."""
HINT = (
    "give it more memory or processes: `ulimit -v`, `ulimit -u`, the limits of its unit, container"
    " or job"
)


def refusal(purpose: str) -> CkptsyncError:
    """Return the error that the system starts no thread, or process, for ``purpose``."""
    return CkptsyncError(
        f"no thread can be started ({purpose}): the system gives no more", hint=HINT
    )


def start_thread(work: Callable[[], object], name: str) -> threading.Thread:
    """Return a started daemon thread that runs ``work``; raise CkptsyncError if it fails."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as e:
        raise refusal(name) from e
    return thread


class ThreadPool(ThreadPoolExecutor):
    """A pool that works with as many threads as can be started.

    `submit` raises CkptsyncError if none can be started.
    """

    def _adjust_thread_count(self) -> None:
        """Start a thread if needed; raise CkptsyncError if that fails and the pool has none."""
        try:
            super()._adjust_thread_count()
        except RuntimeError as e:
            if not self._threads:
                raise refusal(str(self._thread_name_prefix)) from e
