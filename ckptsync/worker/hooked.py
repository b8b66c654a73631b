"""What the hook's marks say of a checkpoint.  Files decide what is stored; a mark only says sooner that they are all there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ckptsync.spool import marks as spool_marks
from ckptsync.spool.marks import Begun, RankMark
from ckptsync.spool.pins import Pin
from ckptsync.walk import OURS
from ckptsync.worker.settle import Word


@dataclass(frozen=True, slots=True)
class Hooked:
    """Who trains in an output directory, and by checkpoint which ranks say that they have written their part."""

    begun: tuple[Begun, ...] = ()
    marks: Mapping[str, tuple[RankMark, ...]] = field(default_factory=dict)


def read_hooked(output_dir: Path, checkpoints: Collection[str] = ()) -> Hooked:
    """What there is to know of these checkpoints; never raises, since a mark that cannot be read is none."""
    spool = output_dir / OURS
    return Hooked(spool_marks.begun(spool), {name: spool_marks.marks(spool, name) for name in checkpoints})


def word(hooked: Hooked, pin: Pin | None, checkpoint: str, now_running: Callable[[Begun], bool | None]) -> Word:  # noqa: ARG001
    """What the hook says of one pin of a checkpoint.  Pure."""
    return ""
