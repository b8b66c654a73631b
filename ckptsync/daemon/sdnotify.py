"""What systemd is told: sd_notify(3), a datagram of ``KEY=value`` lines."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping


class Notifier:
    """Silent where nobody listens (``NOTIFY_SOCKET`` is not set)."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        path = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + path[1:] if path.startswith("@") else path
        wanted = (
            environment.get("WATCHDOG_USEC", "") if environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid()) else ""
        )
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
