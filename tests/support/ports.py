"""Ports for servers that tests start as processes of their own."""

from __future__ import annotations

import contextlib
import random
import socket

_SYSTEM = random.SystemRandom()  # no seed: processes of tests must not agree


def free_port(first: int = 20_000, last: int = 32_000) -> int:
    """Return a free port below those that the kernel gives to clients, and to who asks for any."""
    while True:
        port = _SYSTEM.randrange(first, last)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def unused_port() -> int:
    """Return a free port that no server of a test takes meanwhile."""
    return free_port(10_000, 20_000)


def free_ports(count: int) -> list[int]:
    """Return so many of them."""
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return [*ports]
