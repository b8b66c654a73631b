"""What the hook's marks say of a checkpoint.  Files decide what is stored; a mark only says sooner that they are all there.

Times of marks and of files are compared here, which is fair on one machine.  Where the clocks differ, or one was set, a mark says less
than it might, and the files are judged as they are without a hook.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ckptsync.scan import FINAL
from ckptsync.spool import marks as spool_marks
from ckptsync.spool.marks import Begun, RankMark
from ckptsync.spool.pins import Pin
from ckptsync.walk import OURS
from ckptsync.worker.observed import HookStatus


@dataclass(frozen=True, slots=True)
class Hooked:
    """Who trains in an output directory, and by checkpoint which ranks say that they have written their part."""

    begun: tuple[Begun, ...] = ()
    marks: Mapping[str, tuple[RankMark, ...]] = field(default_factory=dict)


NOBODY = Hooked()


def read_hooked(output_dir: Path, checkpoints: Collection[str] = ()) -> Hooked:
    """What there is to know of these checkpoints; never raises, since a mark that cannot be read is none."""
    spool = output_dir / OURS
    begun = spool_marks.begun(spool)
    return Hooked(begun, {name: spool_marks.marks(spool, name) for name in checkpoints} if begun else {})


def word(hooked: Hooked, pin: Pin | None, checkpoint: str, now_running: Callable[[Begun], bool | None]) -> HookStatus:
    """What the hook says of one pin of a checkpoint.  Pure, if ``now_running`` is."""
    if pin is None or not pin.files:
        return ""
    if pin.is_committed:
        return "committed"
    newest = max(f.mtime for f in pin.files) / 1e9
    writers = [b for b in hooked.begun if b.at <= newest]  # who began later did not write it
    living = [b for b in writers if now_running(b) is not False]
    if checkpoint == FINAL:
        return "training" if living else _of_final(writers)
    if newest <= _done(hooked.marks.get(checkpoint, ())):
        return "marked"
    return "training" if any(not b.ended and b.marks == "all" for b in living) else ""


def _of_final(writers: Sequence[Begun]) -> HookStatus:
    """What those that are gone say of the model in the root: whether they were done with it, or killed.  They came in the order in which they began."""
    last = [b for b in writers if b.train == writers[-1].train]  # who was killed and begun again says nothing
    if last and all(b.left for b in last):
        return "marked"
    return "killed" if last and last[0].trainer.startswith("transformers") else ""


def _done(marks: Iterable[RankMark]) -> float:
    """When the last of all ranks that write here said that the newest save of a name was written; 0 if one has not."""
    ordered = sorted(marks, key=lambda m: m.at)
    of_newest = [m for m in ordered if m.save == ordered[-1].save]
    wanted = of_newest[-1].local_world if of_newest else 0  # 0: how many write here, nobody knew
    return of_newest[-1].at if 0 < wanted <= len({m.rank for m in of_newest}) else 0.0
