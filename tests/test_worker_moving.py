"""How a save that lies in the wrong place goes home."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ckptsync.records.coding import encode, record_name
from ckptsync.stores.memory import MemoryStore
from ckptsync.worker.deciding import draft
from ckptsync.worker.hold import Hold
from ckptsync.worker.moving import tidy
from ckptsync.worker.saving import told
from ckptsync.worker.send import send
from ckptsync.worker.take import take
from tests.test_worker_push import ONE, kept, manifests
from tests.test_worker_send import on_the_way


@pytest.mark.parametrize("is_held", [True, False])
def test_a_save_that_lies_in_a_place_taken_before_it_moves_and_its_bytes_with_it(tmp_path: Path, *, is_held: bool) -> None:
    store = MemoryStore()
    held, seen, road = on_the_way(tmp_path, store)
    planned = draft(told(seen, "n0"), take(held))
    send(planned, held, road)
    early = replace(planned, node="m", files=(), started=0, ended=1, place="checkpoint-4", ranks=(7,))
    store.write(record_name(early, encode(early)), [encode(early)])

    place = tidy("n0", "checkpoint-4", held if is_held else Hold("checkpoint-4", "trainer", {}), road, {})

    assert place.startswith("checkpoint-4~")
    assert kept(store)[place] == {"n0": ONE}
    assert [k.manifest.place for k in manifests(store) if k.manifest.node == "n0"] == [place]
