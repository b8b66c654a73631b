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
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from ckptsync.catalogue.uncached import read_state
from ckptsync.errors import CkptsyncError
from ckptsync.stores.opening import create_store
from tests.campaigns.cluster import CLEAN, Service
from tests.support.vector import vector

# seconds from the last byte of a save to its end: what lived longer than 2 s must not be missed
LIVES = 2.3
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
        self.service = Service(
            home,
            "node",
            {
                "node": "node",
                "roles": ["worker"],
                "store": {"url": self.store.url},
                "worker": worker,
            },
        )

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
        until = time.monotonic() + patience
        while time.monotonic() < until:
            if words in (said := self.status()):
                return []
            time.sleep(1)
        return [f"status does not say {words!r}, but: {' / '.join(said.splitlines()[2:6])}"]

    def wait_for_log(self, words: str, patience: float = 60) -> None:
        """Until the worker has said so."""
        until = time.monotonic() + patience
        while self.logged(words):
            assert time.monotonic() < until, self.service.log.read_text()
            time.sleep(0.05)

    def logged(self, words: str) -> list[str]:
        """Wrong if the worker's log does not say so."""
        return [] if words in self.service.log.read_text() else [f"the log does not say {words!r}"]

    def status(self) -> str:
        """What ``ckptsync status`` prints."""
        command = [sys.executable, "-m", "ckptsync", "status", self.store.url]
        done = subprocess.run(command, capture_output=True, text=True, env=CLEAN, check=False)
        return done.stdout + done.stderr

    def judged(self, patience: float, says: str = "") -> list[str]:
        """Wait until all is there; whatever is wrong then."""
        until = time.monotonic() + patience
        while (
            (wrong := self._absent()) and time.monotonic() < until and self.service.ended() is None
        ):
            time.sleep(0.5)
        if self.service.ended() is not None:
            wrong.append(f"the worker ended by itself with {self.service.ended()}")
        wrong += self._touched()
        return wrong + (self.told(says, 40) if says else [])

    def _absent(self) -> list[str]:
        try:
            listed = {entry.name: entry.size for entry in self.store.names("")}
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
            stored = {path: where[0].name for path, where in snapshot.files.items()}
            written = {
                p.relative_to(location).as_posix(): p for p in location.rglob("*") if p.is_file()
            }
            if stored.keys() != written.keys():
                names = sorted(stored.keys() ^ written.keys())
                wrong.append(
                    f"{location.parent.name}/{location.name}: TORN, {len(names)} files differ:"
                    f" {', '.join(names[:5])}"
                )
            torn = [
                p
                for p in stored.keys() & written.keys()
                if self._bytes(stored[p], listed) != written[p].read_bytes()
            ]
            wrong += [
                f"{location.parent.name}/{location.name}/{path}: TORN, not the bytes that the"
                " trainer wrote"
                for path in torn
            ]
        return wrong

    def _bytes(self, name: str, listed: Mapping[str, int]) -> bytes:
        return (self._home / "store" / name).read_bytes() if name in listed else b""

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
