"""A training on two nodes: each holds half of the weights, and saves its half to its own disk, as
FSDP does.

The node's number is SLURM_NODEID, or NODE_RANK.  `--until FILE`: the step in that file is not
passed, so that a test decides when the training goes on.  At SIGTERM it saves once more, and ends
with 143.  Each step's loss goes to `FILE.losses-<node's number>`, a line of JSON each.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import sys
import time
import zipfile
from pathlib import Path
from types import FrameType

import numpy as np

from ckptsync.tensors import Shape
from tests.support import dcp_writer

HALF = 512
_SHARD, _STATE = "pytorch_model_fsdp_0", "trainer_state.json"
_TERMINATED = 143


def main() -> int:
    options = _options()
    node = int(os.environ.get("SLURM_NODEID") or os.environ["NODE_RANK"])
    start, weights = _first_weights(node)
    if options.resume_from_checkpoint:
        start, weights = _read(Path(options.resume_from_checkpoint), node)
    signals: list[int] = []

    def remember(number: int, _frame: FrameType | None) -> None:
        signals.append(number)

    signal.signal(signal.SIGTERM, remember)
    for step in range(start + 1, options.max_steps + 1):
        while step > int(options.until.read_text() or 0) and not signals:
            time.sleep(0.02)
        if signals:
            _save(options.output_dir, node, step - 1, weights)
            return _TERMINATED
        weights = next_weights(weights, step)
        _log(options.until, node, step, start, weights)
        if step % options.save_steps == 0:
            _save(options.output_dir, node, step, weights)
    return 0


def next_weights(weights: np.ndarray, step: int) -> np.ndarray:
    """Return the weights after a step, which depend on all steps before."""
    return np.asarray(weights * np.float32(0.9) + np.float32(step % 7), np.float32)


def loss_of(weights: np.ndarray) -> float:
    """Return the loss: another number for other weights."""
    return float(weights.sum(dtype=np.float64))


def losses(node: int, steps: int) -> list[float]:
    """Return what a training that nobody interrupts logs."""
    _, weights = _first_weights(node)
    values = []
    for step in range(1, steps + 1):
        weights = next_weights(weights, step)
        values.append(loss_of(weights))
    return values


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--resume_from_checkpoint", default="")
    parser.add_argument("--max_steps", type=int, default=12)
    parser.add_argument("--save_steps", type=int, default=2)
    parser.add_argument("--until", type=Path, default=os.environ.get("TRAIN_UNTIL"))
    return parser.parse_args()


def _first_weights(node: int) -> tuple[int, np.ndarray]:
    return 0, np.arange(HALF, dtype=np.float32) + np.float32(node * HALF)


def _log(until: Path, node: int, step: int, start: int, weights: np.ndarray) -> None:
    attempt = os.environ.get("SLURM_RESTART_COUNT", "0")
    line = {"step": step, "loss": loss_of(weights), "start": start, "attempt": attempt}
    line["pid"] = os.getpid()
    with until.with_name(f"{until.name}.losses-{node}").open("a") as log:
        log.write(json.dumps(line) + "\n")


def _save(output_dir: Path, node: int, step: int, weights: np.ndarray) -> None:
    """Write this node's part, the files that describe the whole last."""
    target = output_dir / f"checkpoint-{step}"
    halves: dict[Shape, tuple[Shape, bytes]] = {
        (n * HALF,): ((HALF,), weights.tobytes()) for n in range(2)
    }
    files = dcp_writer.checkpoint(_SHARD, {"model.weight": ((2 * HALF,), halves)})
    mine = [f"{_SHARD}/__{node}_0.distcp"] + [f"{_SHARD}/.metadata"] * (node == 0)
    content = {name: files[name] for name in mine}
    content[f"rng_state_{node}.pth"] = dcp_writer.item(np.array([step], np.float32).tobytes(), (1,))
    if node == 0:
        state = {"global_step": step, "max_steps": 100, "log_history": [], "epoch": 1.0}
        content[_STATE] = json.dumps(state).encode()
    for name, data in content.items():
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def _read(checkpoint: Path, node: int) -> tuple[int, np.ndarray]:
    """Return step and weights, of this node's own part of a checkpoint."""
    rng = (checkpoint / f"rng_state_{node}.pth").read_bytes()
    shard = (checkpoint / _SHARD / f"__{node}_0.distcp").read_bytes()
    return int(_values(rng)[0]), _values(shard)


def _values(data: bytes) -> np.ndarray:
    """Return the one tensor of a file of ``torch.save``."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        name = next(n for n in archive.namelist() if n.endswith("data/0"))
        return np.frombuffer(archive.read(name), np.float32)


if __name__ == "__main__":
    sys.exit(main())
