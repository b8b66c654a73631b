"""Sending one take: each byte read once where that is enough, several files at once, and whoever else is at it."""

from __future__ import annotations

from pathlib import Path

from ckptsync.scan import found, spots
from ckptsync.stores.memory import MemoryStore
from ckptsync.worker.deciding import draft
from ckptsync.worker.hold import Hold, hold
from ckptsync.worker.known import Known, read_known
from ckptsync.worker.looking import Seen
from ckptsync.worker.saving import told
from ckptsync.worker.send import Road, send
from ckptsync.worker.take import take
from tests.test_worker_push import ONE, lay


def on_the_way(tmp_path: Path, store: MemoryStore) -> tuple[Hold, Seen, Road]:
    lay(tmp_path, ONE)
    (spot,) = spots(tmp_path)
    held = hold(found(spot), None, spot.family, spot.name)
    road = Road(store, "n0", lambda: read_known(store, "run", Known()).manifests("checkpoint-4"))
    return held, Seen("run", spot, held, None), road


def test_sending_twice_is_sending_once(tmp_path: Path) -> None:
    store = MemoryStore()
    held, seen, road = on_the_way(tmp_path, store)
    planned = draft(told(seen, "n0"), take(held))
    first, second = send(planned, held, road), send(planned, held, road)
    assert (first.files, first.size) == (len(ONE), sum(map(len, ONE.values())))
    assert (second.place, second.files) == (first.place, 0)
