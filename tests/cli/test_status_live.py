"""``ckptsync status --watch`` on a terminal."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from ckptsync.catalogue.reading import Cache, read
from ckptsync.cli.status import LATE, Reading, drawn
from ckptsync.errors import StoreError, Transient
from ckptsync.fleet.alarms import Patience
from ckptsync.service.overview import Overseer
from ckptsync.stores.contract import Entry
from ckptsync.stores.memory import MemoryStore
from tests.cli_store import make


class Away(MemoryStore):
    """Answers until it is told not to."""

    error: StoreError | None = None

    def names(self, prefix: str) -> Iterator[Entry]:
        if self.error:
            raise self.error
        return super().names(prefix)


def begun(store: Away) -> Reading:
    return Reading(Overseer(store, partial(read, store, Cache()), Patience()), 0.0)


def test_it_draws_over_in_location_until_it_is_interrupted(tmp_path: Path) -> None:
    leader, follower = os.openpty()
    command = [sys.executable, "-m", "ckptsync", "status", str(make(tmp_path / "store")), "--watch"]
    with subprocess.Popen(command, stdout=follower, env={**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}) as child:
        os.close(follower)
        seen = b""
        while seen.count(b"\x1b[H") < 3 or b"VERIFIED" not in seen:
            seen += os.read(leader, 65536)
        child.terminate()
        child.wait(10)
    os.close(leader)
    assert child.returncode == 143
    assert b"\x1b[2J" not in seen.partition(b"VERIFIED")[2], "what is cleared before it is drawn flickers"


def test_a_store_that_no_longer_answers_leaves_the_last_picture_with_the_reason() -> None:
    store = Away("memory://there")
    reading = begun(store)
    reading._look()
    assert "memory://there" in drawn(reading, store.url, 60.0).plain
    store.error = Transient("memory: 503")
    reading._look()
    shown = drawn(reading, store.url, -1.0 / LATE).plain
    assert shown.startswith("WARNING the store has not answered for 0s: memory: 503")
    assert "no checkpoints yet" in shown
    store.error = None
    reading._look()
    assert reading.said == ""


def test_a_store_that_was_never_read_ends_it() -> None:
    store = Away()
    store.error = StoreError("memory: refused")
    reading = begun(store)
    thread = threading.Thread(target=reading.run)
    thread.start()
    thread.join(5)
    assert isinstance(reading.fault, StoreError)
    assert reading.changed.is_set()


def test_no_more_is_drawn_than_there_are_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINES", "5")
    monkeypatch.setenv("COLUMNS", "80")
    store = Away()
    reading = begun(store)
    reading._look()
    shown = drawn(reading, store.url, 60.0).plain.splitlines()
    assert len(shown) == 5
    assert re.fullmatch(r"\(\d+ more lines: .*", shown[-1])
