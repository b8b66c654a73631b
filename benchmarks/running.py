"""Paired rounds of programs that move files: each once a round, in an order that turns, and what
arrived is looked at.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from benchmarks.contest import Contest
from benchmarks.measure import Failed, Run, measure, seconds_of
from benchmarks.movers import Mover
from benchmarks.places import Digests, Place

MOST_SECONDS = 1800.0


class Road(Protocol):
    """Where from and where to."""

    def measured(self, mover: Mover, wanted: Digests) -> tuple[Run, str]:
        """One run, and in a word what was there afterwards; raises Failed."""
        ...

    def close(self) -> None:
        """Remove what was made for all of them."""
        ...


def held(
    contest: Contest, movers: Sequence[Mover], road: Road, wanted: Digests, rounds: int
) -> Contest:
    """Rounds of all tools, after one that does not count.

    A tool that fails once is out, and said to be.
    """
    contest.failed = {mover.name: missing for mover in movers if (missing := mover.missing())}
    with contextlib.closing(road):
        for number in range(-1, rounds):
            turn = number % len(movers)
            for mover in [*movers[turn:], *movers[:turn]]:
                if mover.name in contest.failed:
                    continue
                try:
                    run, contest.outputs[mover.name] = road.measured(mover, wanted)
                except Failed as e:
                    contest.failed[mover.name] = str(e)
                    contest.runs.pop(mover.name, None)
                    print(f"    {mover.name}: {e}", file=sys.stderr)
                    continue
                if number >= 0:
                    contest.runs.setdefault(mover.name, []).append(run)
            print(
                f"  {contest.title}: {'warm-up' if number < 0 else f'round {number + 1}'}",
                file=sys.stderr,
            )
    return contest


def measured(command: list[str], place: Place, log: Path) -> Run:
    """With the server's seconds of CPU in ``server``."""
    before = seconds_of(place.pid)
    run = measure(command, log, MOST_SECONDS, {**ordinary(), **place.environment})
    return Run(**{**asdict(run), "server": seconds_of(place.pid) - before})


def ordinary() -> dict[str, str]:
    """The environment without what would send a client elsewhere, or slow one down.

    A bundle of certificates breaks rclone.  Where Python may not keep what it has compiled, it
    would compile ckptsync at each start, which an installed one never does.
    """
    return {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("AWS_", "S3_", "RCLONE_", "PYTHONDONTWRITEBYTECODE"))
    }
