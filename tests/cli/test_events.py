"""``ckptsync events`` as a transcript."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from ckptsync.cli import events
from ckptsync.stores.opening import open_store
from tests.support.command_line import Cli
from tests.support.small_store import DATA, make
from tests.support.worker_in_process import push_now


def test_what_follows_is_printed_once(
    named: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, pauses = open_store(str(make(named))), list[float]()

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 1:
            push_now(DATA / "zero3" / "node1", store, "node1", "zero3")
        elif len(pauses) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(events, "time", SimpleNamespace(sleep=sleep))
    assert "nothing has happened yet" in cli("events", "zero3").out
    [line] = cli("events", "zero3", "--follow", code=130).out.splitlines()
    assert line.endswith("  zero3/checkpoint-4  complete")
    happened = cli("events", "fsdp2/checkpoint-4", "--json").json["events"]
    assert [row["event"] for row in happened] == ["complete", "consolidated", "verified"]
    assert happened == sorted(happened, key=lambda row: row["at"])
