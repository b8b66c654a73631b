"""What trainers that were killed have really written: which saves were finished on every rank, and
what those held on each node.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckptsync.walk import walk
from tests.campaigns.two_nodes import NODES, events

Said = Mapping[str, Sequence[Mapping[str, Any]]]
"""What each rank said, by any name of it."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One process group of a training that was killed, and perhaps went on: ``n`` counts them from
    0.  ``ranks``: of all nodes.  ``stem``: of a checkpoint's name.
    """

    run: str
    n: int
    hook: bool
    ranks: int
    stem: str = "checkpoint-"

    @property
    def name(self) -> str:
        """Of its directory of truth."""
        return f"{self.run}.{self.n}"


@dataclass(frozen=True, slots=True)
class Written:
    """One save.

    ``parts``: node → a copy of what it held when it was finished, or of what was left of it.
    ``model``: as the framework gathered it.

    ``begun`` and ``finished``: seconds since the epoch, 0 where a rank never said so.  ``marked``:
    every rank took part in the next step after it, so that a hook had its word.  ``ended``: when
    another save may have rotated it, or begun to write over it.
    """

    run: str
    segment: int
    checkpoint: str
    step: int
    parts: Mapping[str, Path]
    model: Path
    begun: float
    finished: float
    marked: bool
    ended: float = float("inf")

    @property
    def lived(self) -> float:
        """For how many seconds it was there, and whole."""
        return self.ended - self.finished if self.finished else 0.0


def written(home: Path, segment: Segment) -> list[Written]:
    """All saves that a segment began, oldest first, once its processes have ended and before
    another begins.
    """
    truths = [home / f"node{n}" / "truth" / segment.name for n in range(NODES)]
    said = {
        f"{n} {rank}": lines
        for n, truth in enumerate(truths)
        for rank, lines in events(truth).items()
    }
    found = [_written(home, segment, step, said) for step in sorted(_times(said, "saving"))]
    return [replace(w, ended=_gone(said, w)) for w in found]


def overtaken(saves: Iterable[Written], begun: float) -> list[Written]:
    """Those of earlier segments when a later one begins to save: whatever it rotates or overwrites,
    it does not before.
    """
    return [replace(w, ended=min(w.ended, begun)) for w in saves]


def _written(home: Path, segment: Segment, step: int, said: Said) -> Written:
    name = f"{segment.stem}{step}"
    parts = {f"node{n}": _part(home / f"node{n}", segment, name) for n in range(NODES)}
    done, after = _times(said, "written").get(step, ()), _times(said, "gone").get(step, ())
    return Written(
        run=segment.run,
        segment=segment.n,
        checkpoint=name,
        step=step,
        parts={node: part for node, part in parts.items() if part is not None},
        model=home / "node0" / "truth" / segment.name / f"model-{step}.safetensors",
        begun=min(_times(said, "saving")[step]),
        finished=max(done) if len(done) == segment.ranks else 0.0,
        marked=len(after) == segment.ranks,
    )


def _part(node: Path, segment: Segment, name: str) -> Path | None:
    """The copy that the trainer made itself when all had gone on, else one of what lies there
    now.
    """
    kept, there = node / "truth" / segment.name / name, node / "out" / segment.run / name
    if not kept.is_dir() and there.is_dir():
        shutil.copytree(there, kept)
    return kept if kept.is_dir() else None


def _times(said: Said, event: str) -> dict[int, list[float]]:
    """Step → when each rank said it first."""
    found: dict[int, list[float]] = {}
    for lines in said.values():
        first: dict[int, float] = {}
        for line in lines:
            if line["event"] == event:
                first.setdefault(line["step"], line["at"])
        for step, at in first.items():
            found.setdefault(step, []).append(at)
    return found


def _gone(said: Said, save: Written) -> float:
    """When its own training may have rotated it: not before it saved again."""
    later = [min(at) for step, at in _times(said, "saving").items() if step > save.step]
    return min(later, default=float("inf"))


def files(part: Path) -> dict[str, Path]:
    """Of a copy, by path; without what a writer had not given its name yet."""
    return {stat.path: part / stat.path for stat in walk(part).files}
