"""One order of a head's, in a process of its own: ``python -m ckptsync.daemon.child``.

Reads a `Brief` from standard input; on standard output says a line whenever it has got on, and one at the end.  What libraries print goes to the log.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NoReturn

from ckptsync.daemon import orders
from ckptsync.daemon.orders import At, Brief, End, Failed, Message
from ckptsync.daemon.progress import mark, worked
from ckptsync.errors import CkptsyncError

BEAT = 1.0  # seconds between two looks at whether it has got on
NICER = 5  # than the head, which decides what is to be done
MEMORY = 2 << 30  # bytes of heap and stacks, beyond what transfers may hold: ten times of what any work needs
OOM_FIRST = 200
_PR_SET_PDEATHSIG = 1

log = logging.getLogger(__name__)


class Ended(BaseException):
    """SIGTERM: the work is left as it is, which is as it would be after SIGKILL, but for drafts that can be removed."""


def main() -> int:
    """Exit status 0 if there is an answer, also if it is a failure."""
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)
        brief = orders.brief(sys.stdin.buffer.readline())
        die_with(brief.parent)
        signal.signal(signal.SIGTERM, _on_term)
        os.nice(NICER)
        _limit(brief)
        said = _Said(out)
        said.say(_ended(brief, said))
    os._exit(0)  # threads of a work that has failed may wait for a store yet


def die_with(parent: int) -> None:
    """Where the system can: SIGKILL when the thread that started this process ends, however it does."""
    with contextlib.suppress(OSError, AttributeError):  # no Linux: a head that is killed leaves its children to their ends
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _on_term(_number: int, _frame: object) -> NoReturn:
    from ckptsync.stores import ending  # noqa: PLC0415 - loaded long since

    ending.announce()
    raise Ended


def _limit(brief: Brief) -> None:
    """What goes wrong in a large way ends here, and not with the head: where memory runs out, the system takes this process first."""
    with contextlib.suppress(OSError, ValueError):  # no Linux, or a system that lets nobody say so
        score = Path("/proc/self/oom_score_adj")
        score.write_text(str(min(1000, int(score.read_text()) + OOM_FIRST)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # its memory holds the store's keys
    if brief.order.kind != "verify":  # a loader of tensors limits itself
        most = MEMORY + 2 * brief.config.limits.memory
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def _ended(brief: Brief, said: _Said) -> End:
    from ckptsync.daemon.bodies import carry_out  # noqa: PLC0415 - after the limits
    from ckptsync.daemon.log import configure  # noqa: PLC0415

    configure(brief.config.log)
    try:
        with said.beating():
            return carry_out(brief.order, brief.config, said.at)
    except CkptsyncError as e:
        return orders.failure(e)
    except MemoryError:
        return Failed("it wanted more memory than a child process of the head may have", is_ours=True)
    except Ended:
        return Failed("the service is stopping", passes=True)
    except Exception as e:
        log.critical("%s %s", brief.order.kind, brief.order.subject, exc_info=e)
        return Failed(f"{type(e).__name__}: {e}", "this is a bug: the log has the traceback", is_ours=True)


class _Said:
    """Lines to the head, of several threads."""

    def __init__(self, out: BinaryIO) -> None:
        self._out, self._lock, self._at = out, threading.Lock(), At()

    def say(self, message: Message) -> None:
        with self._lock:
            self._out.write(orders.encode(message))
            self._out.flush()

    def at(self, done: int, total: int) -> None:
        """How far the work says that it is."""
        self._at = At(done, total)

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """Within the block, what has been got done is told; nothing while nothing is."""
        over = threading.Event()
        thread = threading.Thread(target=self._beat, args=(over.wait,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()

    def _beat(self, is_over: Callable[[float], bool]) -> None:
        before, told = mark(()), self._at
        while not is_over(BEAT):
            now, at = mark(()), self._at
            if at != told or worked(before, now):
                self.say(at)
                before, told = now, at


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Ended:  # before the work began, or after it has ended
        os._exit(128 + signal.SIGTERM)
