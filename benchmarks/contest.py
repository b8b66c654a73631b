"""Compare programs fairly: each is a whole process, run once a round, in an order that turns.

A first round warms caches and does not count.  Ratios are taken within each round, so that a
machine that becomes slower meanwhile does not matter.  `compete` runs the rounds of one `Contest`,
and `table` shows it; `benchmarks.contestants` lists the programs.
"""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.measure import Failed, Run

Command = Callable[..., list[str]]
Heat = Literal["warm", "cold"]


@dataclass(frozen=True)
class Contestant:
    """A program to compare.

    ``command`` makes its command line of a source and a destination (for a transfer: of a local
    directory and a `Place`), ``back`` that of a download.  ``program`` must be on the path or
    beside this Python, ``module`` must be installed.
    """

    name: str
    command: Command
    back: Command | None = None
    program: str = ""
    module: str = ""

    def lack(self) -> str:
        """Return what is not installed, in words, or an empty text."""
        if self.program and not program(self.program):
            return f"{self.program} is not installed"
        if self.module and importlib.util.find_spec(self.module) is None:
            return f"{self.module} is not installed"
        return ""


@dataclass
class Contest:
    """The results of one comparison.

    ``needed``: the bytes that each program has to move or read.  ``first``: the name of our own
    program.  ``runs``: for each program its results, one a round; ``failed``: why it has none.
    ``outputs``: what it wrote, in a word.  ``not_cold``: the largest share of the source's pages
    that stayed in memory before a cold run.
    """

    title: str
    heat: Heat
    needed: int
    first: str
    runs: dict[str, list[Any]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)
    not_cold: float = 0.0

    def median(self, name: str, attribute: str) -> float:
        """Return the median of an attribute over a program's rounds."""
        return float(statistics.median(getattr(run, attribute) for run in self.runs[name]))

    def largest(self, name: str, attribute: str) -> float:
        """Return the largest value of an attribute over a program's rounds."""
        return float(max(getattr(run, attribute) for run in self.runs[name]))

    def ratio(self, name: str, attribute: str) -> float:
        """Return the median of the ratios to ours within each round; NaN if ours failed."""
        if self.first not in self.runs:
            return math.nan
        pairs = zip(self.runs[name], self.runs[self.first], strict=True)
        return float(
            statistics.median(getattr(a, attribute) / getattr(b, attribute) for a, b in pairs)
        )


Attempt = Callable[[Contestant, int], tuple[Any, str]]
"""Run one contestant in the round of this number (-1: it does not count), and return its result,
and what it wrote in a word.  Raises Failed."""


def compete(
    contest: Contest, contestants: Sequence[Contestant], attempt: Attempt, rounds: int
) -> Contest:
    """Run all rounds, and return the contest with their results.

    A cold contest has no round that does not count.  A program that fails once takes no further
    part, and loses its results.
    """
    contest.failed = {each.name: lack for each in contestants if (lack := each.lack())}
    for number in range(-1 if contest.heat == "warm" else 0, rounds):
        turn = number % len(contestants)
        for contestant in [*contestants[turn:], *contestants[:turn]]:
            name = contestant.name
            if name in contest.failed:
                continue
            try:
                result, contest.outputs[name] = attempt(contestant, number)
            except Failed as e:
                contest.failed[name] = str(e)
                contest.runs.pop(name, None)
                print(f"    {name}: {e}", file=sys.stderr)
                continue
            if number >= 0:
                contest.runs.setdefault(name, []).append(result)
        label = "warm-up" if number < 0 else f"round {number + 1}"
        print(f"  {contest.title}, {contest.heat}: {label}", file=sys.stderr)
    return contest


Column = Callable[[Contest, str], str]
WALL: Mapping[str, Column] = {"wall s": lambda c, name: f"{c.median(name, 'wall'):.2f}"}
CPU: Mapping[str, Column] = {"CPU s": lambda c, name: f"{c.median(name, 'cpu'):.2f}"}
RATE: Mapping[str, Column] = {
    "MB/s": lambda c, name: f"{c.needed / c.median(name, 'wall') / 1e6:.0f}"
}
RATIOS: Mapping[str, Column] = {
    "wall ratio": lambda c, name: f"{c.ratio(name, 'wall'):.2f}",
    "CPU ratio": lambda c, name: f"{c.ratio(name, 'cpu'):.2f}",
}


def table(contest: Contest, columns: Mapping[str, Column], output: str = "") -> Iterator[str]:
    """Yield the lines of a Markdown table, one row for each program; one that failed says why.

    ``output`` is the title of the column that says what a program wrote; empty: there is none.
    """
    titles = ["program", *([output] if output else []), *columns]
    yield f"| {' | '.join(titles)} |"
    yield f"|---|{'---|' if output else ''}{'--:|' * len(columns)}"
    for name in contest.runs:
        cells = [name, *([contest.outputs[name]] if output else [])]
        cells += [column(contest, name) for column in columns.values()]
        yield f"| {' | '.join(cells)} |"
    for name, reason in contest.failed.items():
        empty = " |" * (len(titles) - 2)
        yield f"| {name} | failed: {reason.replace('|', '/')} |{empty}"


def write_contests(path: Path, contests: Sequence[Contest], settings: Mapping[str, object]) -> None:
    """Write contests, and the settings they ran with, as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"settings": settings, "contests": [asdict(contest) for contest in contests]}
    path.write_text(json.dumps(document, indent=1))


def read_contests(path: Path) -> tuple[list[Contest], dict[str, Any]]:
    """Return what `write_contests` wrote: contests whose results are `Run`s, and settings."""
    document = json.loads(path.read_text())
    contests = []
    for fields in document["contests"]:
        runs = {name: [Run(**run) for run in runs] for name, runs in fields["runs"].items()}
        contests.append(Contest(**{**fields, "runs": runs}))
    return contests, document["settings"]


def program(name: str) -> str | None:
    """Return the path of a program beside this Python, or else on the path; or None."""
    return shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
