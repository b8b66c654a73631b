"""Who else is sending, by their heartbeats."""

from __future__ import annotations

import json

import pytest

from ckptsync.stores.memory import MemoryStore
from ckptsync.worker.rivals import GRACE, is_contended


def store(**hearts: object) -> MemoryStore:
    made = MemoryStore()
    for node, told in hearts.items():
        made.write(f".ckptsync/nodes/{node}.json", [told if isinstance(told, bytes) else json.dumps(told).encode()])
    return made


QUEUE = {"queue": ["run/checkpoint-4"]}


def test_another_node_with_the_checkpoint_in_its_queue_is_a_rival() -> None:
    assert is_contended(store(n0={}, n1=QUEUE), "n0", "run", "checkpoint-4")
    assert not is_contended(store(n0={}, n1=QUEUE), "n0", "run", "checkpoint-8")
    assert not is_contended(store(n0=QUEUE), "n0", "run", "checkpoint-4")
    assert not is_contended(store(), "n0", "run", "checkpoint-4")


@pytest.mark.parametrize("heart", [QUEUE | {"stopped": True}, {"queue": 5}, {}, [], b"", b"\xff", b"{"])
def test_one_that_has_stopped_or_says_nothing_is_none(heart: object) -> None:
    assert not is_contended(store(n1=heart), "n0", "run", "checkpoint-4")


def test_one_whose_heart_has_not_beaten_for_long_is_none() -> None:
    made = store(n1=QUEUE)
    for _ in range(int(GRACE) + 1):  # each write is a second on this store's clock
        made.write(".ckptsync/nodes/n0.json", [b"{}"])
    assert not is_contended(made, "n0", "run", "checkpoint-4")
