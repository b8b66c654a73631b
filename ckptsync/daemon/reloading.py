"""SIGHUP: the process begins again in its own place, with the configuration as it is now.

Its number, its parent and what systemd knows of it stay; threads that hang do not.  What was being sent is ended as by a stop, and gone on with.  A
configuration that cannot be read, or begun with, is said and changes nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable

from ckptsync.config.values import Config
from ckptsync.daemon.phases import pairs
from ckptsync.daemon.rehearsing import rehearsed
from ckptsync.daemon.sdnotify import Notifier
from ckptsync.daemon.stopping import HEARD, Stopping
from ckptsync.errors import CkptsyncError

log = logging.getLogger(__name__)


class Reloading:
    """Heeds the wish to begin again; ``load`` reads the configuration anew and raises ConfigError."""

    def __init__(self, load: Callable[[], Config], stop: Stopping) -> None:
        self._load, self._stop = load, stop

    def heed(self) -> None:
        """If it was asked for and the configuration is well, ask for the stop that comes before it."""
        if not self._stop.taken():
            return
        try:
            rehearsed(self._load())
        except CkptsyncError as e:
            log.error("%s", pairs(phase="not-reloaded", error=e, hint=e.hint))  # noqa: TRY400 - the operator's error needs no traceback
            return
        log.info("phase=reloading")
        Notifier().send("RELOADING=1", "STATUS=reloading the configuration")
        self._stop.ask_again()


def leave(stop: Stopping) -> None:
    """End this process at once, threads and all; or replace it by itself, if that is what the stop was asked for.

    Signals wait until the new one listens.  Raises OSError if its program is gone.
    """
    logging.shutdown()
    sys.stderr.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
    if stop.again and not stop.code:
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - the very command that began this process
    os._exit(stop.code)


def reap() -> None:
    """Take leave of children of the process that this one was before it began again: nobody else will."""
    with contextlib.suppress(ChildProcessError):  # there is none
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
