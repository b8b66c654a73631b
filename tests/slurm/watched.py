"""A training of two nodes that a document's script starts: how far it may go, what it logs, and
what of it a head has verified.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.support.run_documents import Block, Location

NODES = 2
_HEAD = Block(
    0, "yaml", "roles: [head, verifier]\nstore: {url: /mnt/checkpoints}\n", "file", "head.yaml"
)
_SERVE = Block(0, "sh", "ckptsync run -c head.yaml", "serve", "")


class Watched:
    """`tests.slurm.train` with `TRAIN_UNTIL`, beside a head and a verifier."""

    def __init__(self, place: Location) -> None:
        self.place = place
        self._until = place.home / "until"
        self.environment = {**place.environment(), "TRAIN_UNTIL": str(self._until)}

    def start_head(self) -> None:
        """Start a head and a verifier, which end with the test."""
        self.place.do(_HEAD)
        self.place.do(_SERVE)

    def allow(self, step: int) -> None:
        fresh = self._until.with_suffix(".new")
        fresh.write_text(str(step))
        fresh.replace(self._until)

    def logged(self, node: int) -> list[dict[str, Any]]:
        """Return what one node has logged, in all attempts."""
        path = self._until.with_name(f"{self._until.name}.losses-{node}")
        whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
        return [json.loads(line) for line in whole.splitlines()]

    def has_reached(self, step: int) -> bool:
        return all([line["step"] for line in self.logged(n)][-1:] == [step] for n in range(NODES))

    def is_verified(self, step: int) -> bool:
        done = self.ls("--json")
        rows = json.loads(done.stdout)["locations"] if done.returncode == 0 else []
        return {"VERIFIED"} == {
            row["status"] for row in rows if row["location"] == f"checkpoint-{step}"
        }

    def ls(self, *words: str) -> subprocess.CompletedProcess[str]:
        store = self.place.here("/mnt/checkpoints")
        return subprocess.run(
            [sys.executable, "-m", "ckptsync", "ls", "--store", store, *words],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
