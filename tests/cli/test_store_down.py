"""A worker whose store is away for a while goes on by itself when it is back."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ckptsync.stores.opening import bare
from tests.campaigns.cluster import Service
from tests.cli.test_store_errors import FSDP
from tests.weed import weed

PATIENCE = 60.0


@contextmanager
def away(pid: int) -> Iterator[None]:
    """The server is there, and says nothing: as where a network is cut, or a machine hangs."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def until(question: Callable[[], bool]) -> bool:
    end = time.monotonic() + PATIENCE
    while not question() and time.monotonic() < end:
        time.sleep(0.1)
    return question()


def test_a_worker_goes_on_by_itself_when_its_store_is_back(tmp_path: Path) -> None:
    url, options = f"s3://{weed().bucket()}/store", weed().options()
    store = bare(url, options)
    worker = Service(
        tmp_path,
        "n0",
        {
            "node": "n0",
            "store": {"url": url, "options": options},
            "limits": {"patience": "1s", "stall": "1s"},
            "worker": {"runs": [{"path": str(tmp_path / "out")}], "quiet": "200ms", "unmarked": "200ms", "scan_every": "500ms"},
        },
    )
    (tmp_path / "out").mkdir()
    worker.start()
    try:
        assert until(lambda: "phase=started" in worker.log.read_text()), worker.log.read_text()
        with away(weed().pid):
            shutil.copytree(FSDP / "node0" / "checkpoint-4", tmp_path / "out" / "checkpoint-4")
            assert until(lambda: "trying again" in worker.log.read_text()), worker.log.read_text()
            time.sleep(2 * 1.0)  # longer than it has patience
            assert worker.ended() is None, worker.log.read_text()
        assert until(lambda: any("/manifest-n0-" in e.name for e in store.names("out/"))), worker.log.read_text()
        assert options["secret"] not in worker.log.read_text()
        assert worker.stop() in (0, 143)
    finally:
        worker.kill()
    wanted = {str(p.relative_to(tmp_path)) for p in (tmp_path / "out" / "checkpoint-4").rglob("*") if p.is_file()}
    assert wanted <= {e.name for e in store.names("")}, json.dumps(sorted(wanted))
