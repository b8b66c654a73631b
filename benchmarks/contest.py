"""Paired rounds: every tool once a round on the same files, from an empty output, in an order that
turns by one each round.
"""

from __future__ import annotations

import math
import os
import shutil
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from benchmarks.cache import cached, drop
from benchmarks.measure import Failed, Run, measure
from benchmarks.outputs import Tensors, compared, tensors
from benchmarks.tools import Tool, is_installed

MOST_SECONDS = 600.0
COLD_ENOUGH = 0.02  # of the pages may be left in memory

Heat = Literal["warm", "cold"]


@dataclass
class Contest:
    """What came of it: for each tool its runs, one a round, or why it failed; ``first`` is ours."""

    title: str
    heat: Heat
    needed: int
    first: str
    runs: dict[str, list[Run]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)
    not_cold: float = 0.0

    def median(self, tool: str, what: str) -> float:
        """Of all its rounds."""
        return float(statistics.median(getattr(run, what) for run in self.runs[tool]))

    def ratio(self, tool: str, what: str) -> float:
        """The median of the ratios to ours within each round, so that a machine that drifts does
        not matter; NaN if ours failed.
        """
        if self.first not in self.runs:
            return math.nan
        pairs = zip(self.runs[tool], self.runs[self.first], strict=True)
        return float(statistics.median(getattr(a, what) / getattr(b, what) for a, b in pairs))


def held(found: Contest, source: Path, tools: Sequence[Tool], rounds: int, work: Path) -> Contest:
    """Rounds of all tools; warm ones after a round that does not count.

    A tool that fails once is out, and said to be.
    """
    heat, written = found.heat, dict[str, Tensors]()
    files = [path for path in sorted(source.rglob("*")) if path.is_file()]
    for tool in tools:
        if not is_installed(tool.module):
            found.failed[tool.name] = f"{tool.module} is not installed"
    for number in range(-1 if heat == "warm" else 0, rounds):
        turn = number % len(tools)
        for tool in [*tools[turn:], *tools[:turn]]:
            if tool.name in found.failed:
                continue
            destination = _emptied(work / "out")
            os.sync()  # what the one before has left to write is not the next one's burden
            if heat == "cold":
                drop(files)
                found.not_cold = max(found.not_cold, cached(files))
            try:
                run = measure(tool.command(source, destination), work / "log", MOST_SECONDS)
            except Failed as e:
                found.failed[tool.name] = str(e)
                found.runs.pop(tool.name, None)
                print(f"    {tool.name}: {e}", file=sys.stderr)
                continue
            if number < 0:
                written[tool.name] = tensors(destination)
            else:
                found.runs.setdefault(tool.name, []).append(run)
        print(
            f"  {found.title}, {heat}: {'warm-up' if number < 0 else f'round {number + 1}'}",
            file=sys.stderr,
        )
    _emptied(work / "out")
    ours = written.get(found.first, {})
    found.outputs = {
        tool.name: compared(written[tool.name], ours)
        for tool in tools
        if tool.module and tool.name in written and ours
    }
    return found


def _emptied(destination: Path) -> Path:
    if destination.is_dir():
        shutil.rmtree(destination)
    destination.unlink(missing_ok=True)
    return destination
