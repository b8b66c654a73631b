"""What is said of trainings whose weights look wrong: a head has compared each model with those
before it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.world import World
from tests.support.exhaustive import in_exhaustive

Weights = dict[str, list[float]]
"""Tensor by name, as float32; one of four values or more is a matrix."""
LAYER = "model.layers.{}.{}.weight"
NORM = "model.norm.weight"
UP = LAYER.format(1, "mlp.up_proj")
INFINITE = float("inf")


def write(folder: Path, weights: Mapping[str, list[float]], name: str = "model") -> None:
    """Write a checkpoint of one process."""
    header: dict[str, Any] = {}
    data = b""
    for tensor, values in weights.items():
        bits = struct.pack(f"<{len(values)}f", *values)
        shape = [2, len(values) // 2] if len(values) > 3 else [len(values)]
        header[tensor] = {
            "dtype": "F32",
            "shape": shape,
            "data_offsets": [len(data), len(data) + len(bits)],
        }
        data += bits
    head = json.dumps(header).encode()
    folder.mkdir(parents=True)
    (folder / f"{name}.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + data)
    if name == "model":
        (folder / "config.json").write_text('{"model_type": "mine", "num_hidden_layers": 2}')


def healthy(saves: int) -> Iterator[Weights]:
    """Yield the weights of a training at each save: all of them move a little."""
    modules = ("self_attn.q_proj", "mlp.up_proj", "input_layernorm")
    names = [LAYER.format(n, module) for n in range(2) for module in modules]
    for k in range(saves):
        weights = {
            name: [1 + 0.1 * i + 0.01 * k * (i + 2) for i in range(6)]
            for name in ("model.embed_tokens.weight", *names, "lm_head.weight")
        }
        mask = {"model.mask": [0.0, -INFINITE, 0.0, 0.0], "model.far": [-INFINITE, -INFINITE]}
        yield {**weights, NORM: [1.0 - 0.001 * k] * 2, **mask}


def sick(kind: str) -> Iterator[Weights]:
    """Yield the same, of which the last save is sick."""
    *first, last = healthy(5)
    before = first[-1]
    changed: Weights = {
        "none": {},
        "same": before,
        "unchanged": {n: v for n, v in before.items() if "layers.1" in n},
        "nonfinite": {UP: [float("nan"), *last[UP][1:]]},
        "zero": {UP: [0.0] * 6},
        "jump": {UP: [10 * v for v in last[UP]]},
    }[kind]
    yield from [*first, {**last, **changed}]


@pytest.mark.stores("path")
@pytest.mark.parametrize(
    "is_late", [False, pytest.param(True, marks=in_exhaustive)], ids=["in-order", "newest-first"]
)
def test_weights_that_look_wrong_are_in_ls_status_and_json_and_healthy_ones_are_not(
    world: World, *, is_late: bool
) -> None:
    store = ("--store", world.store.url)
    kinds = ["none", "unchanged", "zero", *(["same", "nonfinite", "jump"] if is_late else [])]
    trainings = [sick(kind) for kind in kinds]
    for step, saves in enumerate(zip(*trainings, strict=True), 1):
        for kind, weights in zip(kinds, saves, strict=True):
            write(world.output(kind) / f"checkpoint-{step * 10}", weights)
        if step == 5 or not is_late:
            for kind in kinds:
                world.push(world.output(kind))
            world.run("consolidate", *store)
    rows = world.ls()
    assert len(rows) == 5 * len(kinds)
    told = {
        location: [finding["kind"] for finding in row["weights_findings"]]
        for location, row in rows.items()
        if row["weights_findings"]
    }
    # infinite from the first save on, and not yet known to stay so
    first = {f"{kind}/checkpoint-10": ["nonfinite"] for kind in kinds}
    assert told == {f"{k}/checkpoint-50": [k] for k in kinds if k != "none"} | first
    lines = {k: world.run("ls", f"{k}/checkpoint-50", *store).out for k in kinds}
    assert f"1 tensor is all zero, and had other values in checkpoint-40 ({UP})" in lines["zero"]
    still = "3 tensors are bit-identical to those of checkpoint-40 (attention, mlp, norm)"
    assert still in lines["unchanged"]
    if is_late:
        assert "bit-identical to those of checkpoint-40: the same state was saved" in lines["same"]
        assert f"jumped since checkpoint-40, that of {UP} from" in lines["jump"]
    alarms = world.run("status", *store, "--json").json["alarms"]
    codes = {a["subject"]: a["code"] for a in alarms if a["code"] in ("weights", "nonfinite")}
    assert codes == {
        k: "nonfinite" if k == "nonfinite" else "weights" for k in kinds if k != "none"
    }
    assert world.run("status", "zero", *store, "--check", code=10).out
