"""Processes on a terminal of their own."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any


@contextlib.contextmanager
def on_terminal(
    command: Sequence[str], streams: Sequence[str], **options: Any
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run a command with ``streams`` on a terminal; give it, and the terminal's other end."""
    leader, follower = os.openpty()
    options.update(dict.fromkeys(streams, follower))
    child = subprocess.Popen(command, **options)
    os.close(follower)
    try:
        yield child, leader
    finally:
        child.kill()
        child.wait()
        os.close(leader)


def read_until(leader: int, is_enough: Callable[[bytes], object]) -> bytes:
    """Return what a terminal shows once that is enough; fails after five minutes."""
    shown, end = b"", time.monotonic() + 300
    while not is_enough(shown):
        ready = select.select([leader], [], [], max(0, end - time.monotonic()))[0]
        assert ready, f"not enough in five minutes: {shown[-2000:]!r}"
        shown += os.read(leader, 65536)
    return shown
