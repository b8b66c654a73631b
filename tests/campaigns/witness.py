"""Within a trainer: its options, its corpus, and what it says of its steps.

Nothing here imports more than the standard library, so a script may use it before torch.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

RANK = int(os.environ.get("RANK", "0"))
WORDS = ("the", "of", "and", "to", "in", "is", "it", "you", "that", "he", "was", "for", "on")


def training_parser(description: str | None, modes: Sequence[str]) -> argparse.ArgumentParser:
    """Return a parser with what all trainings are told."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mode", choices=modes)
    for name in ("--out", "--truth", "--base"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--limit", type=int, default=1, help="save_total_limit")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds before each step")
    parser.add_argument("--resume", type=Path, help="a checkpoint to go on from")
    told = "seconds that each file of a save takes, about"
    parser.add_argument("--slow", type=float, default=0.0, help=told)
    return parser


def sentence(line: int, flavour: int = 0) -> str:
    """Return a line of the corpus: always the same of one flavour."""
    chosen = (7 * line + 3 * word * word + 5 * flavour for word in range(12))
    return " ".join(WORDS[index % len(WORDS)] for index in chosen)


class Witness:
    """What one rank of a training writes into ``directory``, which is its node's."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._events = (directory / f"events-{RANK}.jsonl").open("a")

    def say(self, event: str, step: int, **more: object) -> None:
        """Write a line, with the time in seconds."""
        line = {"event": event, "step": step, "at": time.time(), **more}
        print(json.dumps(line), file=self._events, flush=True)
