"""What a trainer measured, read from its own file, and from nothing that is not what its node sent."""

from __future__ import annotations

import json

import pytest

from ckptsync.catalogue.reading import read
from ckptsync.catalogue.summary import Summary
from ckptsync.errors import Corrupt
from ckptsync.head.metrics import Measured, of_location, of_locations, parsed
from ckptsync.stores.memory import MemoryStore
from tests.retained import fill

HISTORY = [
    {"step": 10, "loss": 3.0},
    {"step": 10, "eval_loss": 2.5},
    {"step": 20, "loss": 1.0},
    {"step": 20, "eval_loss": float("nan")},
]


def test_the_last_value_up_to_its_step_counts() -> None:
    data = json.dumps({"log_history": HISTORY}).encode()
    assert parsed(data, 10) == {"eval_loss": 2.5, "loss": 3.0, "step": 10.0}
    assert parsed(data, 20)["loss"] == 1.0
    assert parsed(data, 20)["eval_loss"] == 2.5, "what is no number says nothing"
    assert parsed(data, None)["loss"] == 1.0


HUGE = b'{"log_history": [{"step": 1, "loss": %s}]}' % (b"9" * 400)


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b'{"log_history": [3]}', b'{"log_history": 3}', b"[" * 100_000, b"\xff", HUGE])
def test_what_is_no_trainers_state_is_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt):
        parsed(data, 1)


def summary(store: MemoryStore) -> Summary:
    (found,) = read(store).summaries
    return found


def test_bytes_that_are_not_what_the_node_sent_say_nothing() -> None:
    store = MemoryStore()
    fill(store, "checkpoint-1", loss=2.0)
    assert of_locations(store, [summary(store)], "eval_loss", Measured()) == {"checkpoint-1": 2.0}
    assert of_locations(store, [summary(store)], "eval_accuracy", Measured()) == {}
    store.write("run/checkpoint-1/trainer_state.json", [b'{"log_history": [{"step": 1, "eval_loss": 0.1}]}'])
    assert of_locations(store, [summary(store)], "eval_loss", Measured()) == {"checkpoint-1": None}


def test_it_is_read_once() -> None:
    store, memory = MemoryStore(), Measured()
    fill(store, "checkpoint-1", loss=2.0)
    seen = summary(store)
    of_location(store, seen, memory)
    store.delete("run/checkpoint-1/trainer_state.json")
    measured = of_location(store, seen, memory)
    assert measured is not None
    assert measured["eval_loss"] == 2.0
