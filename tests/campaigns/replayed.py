"""A trainer's saves, replayed file after file in its own order, beside a worker.

And whether the store has them all.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import shutil
import subprocess
import time
from collections.abc import Mapping
from itertools import islice
from pathlib import Path

from ckptsync.catalogue.uncached import read_state
from ckptsync.errors import CkptsyncError
from ckptsync.stores.opening import create_store
from tests.campaigns.campaign import CKPTSYNC, CLEAN
from tests.campaigns.cluster import Service, differences
from tests.support.files_in_memory import file_paths
from tests.support.vector import vector
from tests.support.waiting import until

# seconds from the last byte of a save to its end: what lived longer than 2 s must not be missed
# where a worker gets its turn, which a busy machine gives it late
LIVES = 5.0
ORDER = (
    *(
        "rng_state_1.pth",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "chat_template.jinja",
        "tokenizer_config.json",
    ),
    *("tokenizer.json", "optimizer.pt", "scheduler.pt", "rng_state_0.pth", "trainer_state.json"),
)  # of Trainer over DDP, two ranks
SHOWN = 5  # files of a torn checkpoint
DEFAULT = {"quiet": "2s", "unmarked": "10s"}


class Replay:
    """One node: ``home``/out/<run> are its output directories.

    ``shift``: seconds by which the times of new files are wrong.
    """

    def __init__(self, home: Path, settings: Mapping[str, object]) -> None:
        self._home, self._dice, self.shift = home, random.Random(5), 0.0
        self._source = vector("hf-ddp").sources[0]
        self._truth = home / "truth"
        (home / "out").mkdir(exist_ok=True)
        self.store = create_store(str(home / "store"))
        worker = {"runs": [{"path": f"{home}/out/*"}], **DEFAULT, **settings}
        self.service = Service(home, "node", "worker", store={"url": self.store.url}, worker=worker)

    def out(self, run: str) -> Path:
        """A run's output directory."""
        return self._home / "out" / run

    def save(self, run: str, step: int) -> None:
        """As Trainer does: the model under another name first, the state of the trainer last."""
        to = self.out(run) / f"checkpoint-{step}"
        to.mkdir(parents=True)
        for name in ORDER:
            if name == "model.safetensors":
                temporary = to / f".tmp{secrets.token_hex(3)}"
                self._write(temporary, self._perturbed(name))
                temporary.rename(to / name)
            elif name == "trainer_state.json":
                told = json.loads((self._source / name).read_text()) | {"global_step": step}
                self._write(to / name, json.dumps(told).encode())
            else:
                self._write(to / name, (self._source / name).read_bytes())
        self.keep(run, step)

    def keep(self, run: str, step: int) -> None:
        """What is there now is what the store must hold."""
        there = self.out(run) / f"checkpoint-{step}"
        shutil.rmtree(self._truth / run / there.name, ignore_errors=True)
        shutil.copytree(there, self._truth / run / there.name)

    def rotate(self, run: str, step: int) -> None:
        """As ``save_total_limit`` does."""
        shutil.rmtree(self.out(run) / f"checkpoint-{step}")

    def pass_by(self, run: str, step: int, lives: float) -> None:
        """Save, let it live so long, delete it."""
        self.save(run, step)
        time.sleep(lives)
        self.rotate(run, step)

    def told(self, words: str, patience: float) -> list[str]:
        """Wrong if ``ckptsync status`` does not say so within this time."""
        if until(lambda: words in self.status(), patience, 1):
            return []
        said = " / ".join(self.status().splitlines()[2:6])
        return [f"status does not say {words!r}, but: {said}"]

    def wait_for_log(self, words: str, patience: float = 400) -> None:
        """Until the worker has said so."""
        assert until(lambda: not self.logged(words), patience), self.service.log.read_text()

    def logged(self, words: str) -> list[str]:
        """Wrong if the worker's log does not say so."""
        return [] if words in self.service.log.read_text() else [f"the log does not say {words!r}"]

    def status(self) -> str:
        """What ``ckptsync status`` prints."""
        command = [*CKPTSYNC, "status", "--store", self.store.url]
        done = subprocess.run(command, capture_output=True, text=True, env=CLEAN, check=False)
        return done.stdout + done.stderr

    def judged(self, patience: float, says: str = "") -> list[str]:
        """Wait until all is there; whatever is wrong then."""
        until(lambda: not self._absent() or self.service.ended() is not None, patience, 0.5)
        wrong = self._absent()
        if self.service.ended() is not None:
            wrong.append(f"the worker ended by itself with {self.service.ended()}")
        wrong += self._touched()
        return wrong + (self.told(says, 400) if says else [])

    def _absent(self) -> list[str]:
        try:
            seen = {(s.run, s.location): s for s in read_state(self.store).readable}
        except CkptsyncError as e:
            return [f"the store cannot be read: {e}"]
        wrong = [
            f"{run}/{location}: nobody wrote that"
            for run, location in seen
            if not (self._truth / run / location).is_dir()
        ]
        for location in sorted(self._truth.glob("*/*")):
            snapshot = seen.get((location.parent.name, location.name))
            if not snapshot or not snapshot.manifests:
                wrong.append(f"{location.parent.name}/{location.name}: MISSED")
                continue
            torn = differences(self.store, snapshot, file_paths(location))
            name = f"{location.parent.name}/{location.name}"
            wrong += [f"{name}/{path}: TORN, {how}" for path, how in islice(torn, SHOWN)]
        return wrong

    def _touched(self) -> list[str]:
        """Checkpoint directories that are still there are as the trainer left them, to the time of
        the directory.
        """
        there = [
            p
            for p in self._home.glob("out/*/checkpoint-*")
            if (self._truth / p.parent.name / p.name).is_dir()
        ]
        return [
            f"{p}: was touched"
            for p in there
            if _state(p) != _state(self._truth / p.parent.name / p.name)
        ]

    def _write(self, path: Path, content: bytes) -> None:
        path.write_bytes(content)
        if self.shift:
            then = time.time() + self.shift
            os.utime(path, (then, then))

    def _perturbed(self, name: str) -> bytes:
        content = bytearray((self._source / name).read_bytes())
        content[-64:] = self._dice.randbytes(64)
        return bytes(content)


def _state(directory: Path) -> tuple[int, frozenset[str]]:
    names = (p.relative_to(directory).as_posix() for p in directory.rglob("*"))
    return directory.stat().st_mtime_ns, frozenset(names)
