"""Who this machine is: its host name, and a hash of its machine id where two machines share a name."""

from __future__ import annotations

import contextlib
import re
import socket
import uuid
from pathlib import Path

from ckptsync.digest import digest
from ckptsync.records.names import checked_node

MACHINE_ID = Path("/etc/machine-id")


def node_id(hostname: str = "", machine_id: Path = MACHINE_ID) -> str:
    """``<host>-<8 hex>``, the same at every start.

    Without a machine id (containers often have none, or an empty one) the hash is of the first network card's address.
    Clones that share all of these need ``node`` set in their configuration.
    """
    host = re.sub(r"[^A-Za-z0-9_.-]", "-", hostname or socket.gethostname())[:80].strip(".-") or "node"
    return checked_node(f"{host}-{digest(_machine(machine_id).encode())[:8]}")


def umask() -> str:
    """The mask of file modes of this process, such as ``0022``; empty where the system does not tell.  (os.umask tells it only by setting it, for all threads.)"""
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/status").read_text("ascii", "replace").splitlines()
        return next((line.partition(":")[2].strip() for line in lines if line.startswith("Umask:")), "")
    return ""


def _machine(path: Path) -> str:
    try:
        known = path.read_text(errors="replace").strip()
    except OSError:  # no such file, or not for us: the network card is the documented second choice
        known = ""
    return known if known and known != "uninitialized" else f"mac {uuid.getnode():012x}"
