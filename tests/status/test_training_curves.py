"""Curves from what a trainer wrote, or from what somebody else did."""

import json
import math
import random
from typing import Any

import pytest

from ckptsync.errors import Corrupt, StoreError
from ckptsync.status.training_curves import (
    LIMIT,
    MOST,
    Curve,
    read_curves,
    read_newest,
    states_of,
    thinned,
    value_at,
    with_metrics,
)
from ckptsync.stores.memory import MemoryStore
from tests.support.status_examples import location


def state(*history: Any) -> bytes:
    return json.dumps({"best_metric": None, "log_history": history, "global_step": 9}).encode()


def test_metrics_are_curves_over_steps_and_the_rest_is_left_out() -> None:
    history = [
        {"step": 1, "epoch": 0.1, "loss": 2.5, "learning_rate": 1e-4, "grad_norm": 3},
        {"step": 2, "loss": math.nan, "learning_rate": math.inf},
        {"step": 2, "eval_loss": 2.0, "eval_name": "x", "eval_flag": True, "eval_none": None},
        {"step": 3, "loss": 2.25, "train_runtime": 5.0, "eval_classes": {"a": [1]}, "eval_f1": [1]},
        {"loss": 7.0},
        {"step": -1, "loss": 7.0},
        {"step": 1e300, "loss": 7.0},
        {"step": True, "loss": 7.0},
    ]
    assert read_curves(state(*history), "s") == {
        "loss": [(1, 2.5), (2, None), (3, 2.25)],
        "learning_rate": [(1, 1e-4), (2, None)],
        "grad_norm": [(1, 3.0)],
        "eval_loss": [(2, 2.0)],
        "eval_none": [(2, None)],
    }


def test_where_a_training_went_back_the_later_points_count() -> None:
    steps = [(1, 5.0), (2, 4.0), (3, 9.0), (2, 3.0)]
    curves = read_curves(state(*({"step": s, "loss": v} for s, v in steps)), "s")
    assert curves == {"loss": [(1, 5.0), (2, 3.0), (3, 9.0)]}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"null",
        b'{"log_history": 1}',
        b'{"log_history": [1]}',
        b'{"log_history": ' + b"[" * 100_000,
        b'{"log_history": [{"step": 1, "loss": 1' + b"0" * 400 + b"}]}",
        b"\xff\xfe",
        b" " * (LIMIT + 1),
    ],
)
def test_what_no_trainer_wrote_is_corrupt_and_nothing_else(data: bytes) -> None:
    with pytest.raises(Corrupt):
        read_curves(data, "s")


class Away(MemoryStore):
    def size(self, name: str) -> int:
        raise StoreError(f"{name}: 403")


def test_the_newest_state_that_can_be_read_counts() -> None:
    saves = [location(f"run/checkpoint-{n}", ago=100 - n) for n in range(1, 6)]
    newest = states_of([*saves, location("run/checkpoint-6", retired="old", ago=1)])
    assert [s.step for s in newest] == [5, 4, 3]
    for store in (MemoryStore(), Away()):
        for n, data in ((2, state()), (3, state({"step": 3, "loss": 0.5})), (4, b"{")):
            store.write(f"run/checkpoint-{n}/trainer_state.json", [data])
        found = {} if isinstance(store, Away) else {"loss": [(3, 0.5)]}
        assert read_newest(store, newest) == found


def test_what_an_event_measured_counts_before_what_the_trainer_logged() -> None:
    logged: dict[str, Curve] = {"loss": [(1, 2.0)], "eval_loss": [(1, 3.0)]}
    measured = [
        location("run/checkpoint-2", metrics=(("loss", 1.0),)),
        location("run/final", metrics=(("loss", 9.0),)),
    ]
    assert with_metrics(logged, measured) == logged | {"loss": [(2, 1.0)]}


def test_of_hostile_names_few_are_taken() -> None:
    entry = {f"eval_{n}": 1.0 for n in range(10 * MOST)}
    assert len(read_curves(state({"step": 1, **entry}), "s")) == MOST


def test_a_long_curve_keeps_its_extremes_and_what_is_missing() -> None:
    drawn = random.Random(7)
    curve: Curve = [(n, drawn.random()) for n in range(100_000)]
    curve[5_000], curve[70_001], curve[70_002] = (5_000, 99.0), (70_001, -99.0), (70_002, None)
    short = thinned(curve)
    assert len(short) <= 3003
    assert {curve[5_000], curve[70_001], curve[70_002]} <= set(short)
    assert [step for step, _ in short] == sorted(step for step, _ in short)
    assert (short[0][0] < 100, short[-1][0] > 99_900) == (True, True)
    assert thinned(curve[:2000]) == curve[:2000]


def test_a_value_is_the_last_one_up_to_a_step() -> None:
    curves: dict[str, Curve] = {"loss": [(10, 3.0), (20, 2.0)]}
    steps = (None, 9, 10, 19, 20, 99)
    assert [value_at(curves, "loss", s) for s in steps] == [None, None, 3.0, 3.0, 2.0, 2.0]
    assert value_at(curves, "eval_loss", 10) is None
