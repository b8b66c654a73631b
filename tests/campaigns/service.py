"""One of ckptsync's services as a process that can be killed, and started again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import yaml

from tests.campaigns.campaign import CKPTSYNC, CLEAN
from tests.campaigns.nodes import is_alive, start


class Service:
    """One ``ckptsync run`` process, started again as often as it is killed.

    ``configuration``: what its file says beside its node's name and its ``roles``.
    """

    def __init__(self, home: Path, name: str, *roles: str, **configuration: object) -> None:
        self.name, self.log = name, home / f"{name}.log"
        self.config = home / f"{name}.yaml"
        told = {"node": name, "roles": [*roles], **configuration}
        self.config.write_text(yaml.safe_dump(told))
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, before: Sequence[str] = ()) -> None:
        """Start it; ``before``: words to put before the command, such as those of a namespace."""
        self._process = start(
            [*before, *CKPTSYNC, "run", "-c", str(self.config)], self.log, env=CLEAN
        )

    def ended(self) -> int | None:
        """Return its exit code, None if it has not ended."""
        return self._process.poll() if self._process else None

    def kill(self) -> None:
        """Send SIGKILL to it and to whatever watches it; both are dead then."""
        assert self._process
        group = self._process.pid
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        self._process.wait()
        while any(is_alive(int(path.name), group) for path in Path("/proc").glob("[0-9]*")):
            time.sleep(0.01)
