"""A store that real services fill: two trainings on two nodes, a head, one damaged checkpoint.

For the pictures of the page. `training` goes on saving until its block ends.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ckptsync.catalogue.uncached import read_state
from ckptsync.cli.demo import BASE, DATA, NODES, byte_of_a_tensor, configurations, flip, running
from ckptsync.stores.contract import Store
from ckptsync.stores.opening import create_store
from tests.support.waiting import until

RUNS = ("qwen3-8b-sft", "qwen3-8b-dpo")
SPACING = 100  # steps between two saves
LARGE = 160 << 20  # bytes of the file that is being uploaded while the picture is taken
RATE = "4MB/s"


def trainer_state(step: int, seed: int) -> bytes:
    """Return a trainer's state: a falling loss with noise, a warm-up, a cosine."""
    noise = random.Random(seed)
    entries: list[dict[str, float]] = []
    for at in range(5, step + 1, 5):
        rate = 2e-5 * min(1.0, at / 100) * (1 + math.cos(math.pi * min(1.0, at / 2400))) / 2
        loss = 0.9 + 1.9 * math.exp(-at / 260) + noise.gauss(0, 0.045)
        norm = 0.6 + 2 * math.exp(-at / 120) + abs(noise.gauss(0, 0.12))
        entries.append({"step": at, "loss": loss, "learning_rate": rate, "grad_norm": norm})
        if at % SPACING == 0:
            value = 0.95 + 1.8 * math.exp(-at / 260) + noise.gauss(0, 0.01)
            entries.append({"step": at, "eval_loss": value, "eval_runtime": 11.0})
    return json.dumps({"global_step": step, "log_history": entries}).encode()


@dataclass(frozen=True, slots=True)
class Trainings:
    """A directory with a store and the output directories of two nodes."""

    directory: Path
    store: Store

    def save(self, run: str, step: int, large: int = 0) -> None:
        """Write a checkpoint on each node, in place at once."""
        for node in NODES:
            made = self.directory / "tmp" / f"{run}-{node}-{step}"
            source = DATA / "fsdp2" / node / "checkpoint-4"
            shutil.copytree(source, made, copy_function=shutil.copyfile)
            if node == NODES[0]:
                state = trainer_state(step, sum(run.encode()))
                (made / "trainer_state.json").write_bytes(state)
                if large:
                    (made / "extra_state.bin").write_bytes(random.randbytes(large))
            out = self.directory / node / "out" / run
            out.mkdir(parents=True, exist_ok=True)
            made.rename(out / f"checkpoint-{step}")

    def status(self, run: str, step: int) -> str:
        """Return the status of a checkpoint; empty where the store does not have it."""
        location = read_state(self.store).of(run, f"checkpoint-{step}")
        return location.status if location else ""

    def wait(self, run: str, step: int, *statuses: str) -> None:
        assert until(lambda: self.status(run, step) in statuses, pause=0.2), self.status(run, step)

    def damage(self, run: str, step: int) -> None:
        """Flip a bit of a tensor in the store, and take the node's own copies away."""
        for node in NODES:
            shutil.rmtree(self.directory / node / "out" / run / f"checkpoint-{step}")
        stored = Path(self.store.url) / run / f"checkpoint-{step}"
        path, at, _ = byte_of_a_tensor(stored)
        flip(stored / path, at)
        place = f"{run}/checkpoint-{step}"
        command = [sys.executable, "-m", "ckptsync", "verify", place, "--store", self.store.url]
        subprocess.run(command, check=False, capture_output=True)
        self.wait(run, step, "DAMAGED")


@contextlib.contextmanager
def training(directory: Path, saves: int) -> Iterator[Trainings]:
    """Run the services over two trainings of so many saves; the last one is being uploaded."""
    store = create_store(str(directory / "store"))
    configs = configurations(directory)
    head = configs["head"]["head"]
    assert isinstance(head, dict)
    head["config_from"] = dict.fromkeys(RUNS, str(BASE))
    verify = configs["head"]["verify"]
    assert isinstance(verify, dict)
    verify["period"] = "1h"
    configs[NODES[0]]["limits"] = {"bandwidth": RATE}
    made = Trainings(directory, store)
    with running(directory / "etc", configs):
        for n in range(1, saves + 1):
            for run in RUNS if n > saves // 2 else RUNS[:1]:
                made.save(run, n * SPACING)
                made.wait(run, n * SPACING, "CONSOLIDATED", "VERIFIED")
        for run in RUNS:
            made.wait(run, saves * SPACING, "VERIFIED")
        damaged = (saves - 3) * SPACING
        made.damage(RUNS[1], damaged)
        made.save(RUNS[0], (saves + 1) * SPACING, LARGE)
        yield made
