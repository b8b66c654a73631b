"""The id of this node, and how far its clock is from the store's.

Nodes know each other by what they write in the store only.  So a node's id must be the same after
every restart and never another node's: it is the host name with a hash of the machine id.  Times of
one save are compared between nodes, so each node measures its clock against the store's,
at most once an hour and again after somebody has set it.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
import uuid
from pathlib import Path

from ckptsync.digest import digest
from ckptsync.errors import CkptsyncError
from ckptsync.records.store_paths import checked_node, clock_name
from ckptsync.stores.clock import measure_offset
from ckptsync.stores.contract import Store

MACHINE_ID = Path("/etc/machine-id")
HOUR = 3600.0  # seconds between measurements
JUMP = 2.0  # seconds: NTP slews less between two scans


def node_id(hostname: str = "", machine_id: Path = MACHINE_ID) -> str:
    """Return ``<host>-<8 hex>``: the host's name, and a hash of the machine id.

    ``hostname``: this host's, if empty.  Without a readable machine id (containers often have none,
    or an empty one) the hash is of a network card's address.  It is the same at every start, except
    without either.  Such nodes, and clones that share all of these, need ``node`` set in their
    configuration.
    """
    host = (
        re.sub(r"[^A-Za-z0-9_.-]", "-", hostname or socket.gethostname())[:80].strip(".-") or "node"
    )
    try:
        machine = machine_id.read_text(errors="replace").strip()
    except OSError:  # missing, or not readable
        machine = ""
    if machine in ("", "uninitialized"):
        machine = f"mac {uuid.getnode():012x}"
    return checked_node(f"{host}-{digest(machine.encode())[:8]}")


def umask() -> str:
    """Return the mask of file modes of this process, such as ``0022``; empty if it is unknown.

    os.umask returns it only by setting it, for all threads.
    """
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/status").read_text("ascii", "replace").splitlines()
        return next(
            (line.partition(":")[2].strip() for line in lines if line.startswith("Umask:")), ""
        )
    return ""


class Clock:
    """Measures this node's clock minus the store's; ``last`` has the result in ns, 0 before."""

    def __init__(self, store: Store, node: str) -> None:
        """Measure nothing yet: `last` is 0 until `measure` is called."""
        self._store, self._node = store, node
        self.last = 0
        self._measured: float | None = None
        self._lock = threading.Lock()
        self._now = 0.0
        self._skew = wall_minus_monotonic()

    def notice(self, now: float) -> None:
        """Discard the last measurement if somebody has set the clock since the last call.

        ``now``: seconds on a clock that only grows.
        """
        self._now = max(now, self._now)
        before, self._skew = self._skew, wall_minus_monotonic()
        if clock_jump(before, self._skew):
            self._measured = None

    def measure(self) -> int:
        """Return the offset in ns, measured anew if the last measurement is an hour old.

        That writes a small file into the store.  The age is that at the last `notice`.  Other
        threads wait while one measures.  Raises StoreError.
        """
        with self._lock:
            if not self._is_measured():
                now = self._now
                self.last, self._measured = measure_offset(self._store, clock_name(self._node)), now
            return self.last

    def measure_in_time(self, *, is_idle: bool) -> None:
        """Measure ahead of the next save, unless ``is_idle``; errors are left to that save."""
        if not is_idle and not self._is_measured():
            # whoever needs it measures, and reports what is wrong
            with contextlib.suppress(CkptsyncError):
                self.measure()

    def _is_measured(self) -> bool:
        """Return whether the last measurement is less than an hour old."""
        measured = self._measured
        return measured is not None and self._now - measured < HOUR


def wall_minus_monotonic() -> float:
    """Return the system's clock minus one that nobody sets, in seconds."""
    return time.time() - time.monotonic()


def clock_jump(before: float, after: float) -> float:
    """Return the seconds by which the clock was set between two readings; 0 if by at most 2 s.

    NTP adjusts it by less.  Readings are those of `wall_minus_monotonic`.
    """
    return after - before if abs(after - before) > JUMP else 0.0
