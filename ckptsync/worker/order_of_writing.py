"""What the checkpoints beside one tell of it: one that was begun later, and who writes here.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckptsync.worker.cut_short import TRAINER_STATE
from ckptsync.worker.hooked import Hooked
from ckptsync.worker.looking import Seen

Span = tuple[str, int, int]
"""Of a checkpoint: its kind, its step, and the mtime of its first file (ns)."""


@dataclass(frozen=True, slots=True)
class Beside:
    """All that lies in an output directory at one look; ``awaited``: see `is_awaited`."""

    seen: Sequence[Seen]
    hooked: Hooked
    spans: Sequence[Span]
    awaited: bool


def beside(seen: Sequence[Seen], hooked: Hooked) -> Beside:
    """As the checkpoints and the hook tell it."""
    return Beside(seen, hooked, spans_of(seen), is_awaited(seen, hooked))


def spans_of(seen: Iterable[Seen]) -> list[Span]:
    """Of those that have a step, and files."""
    return [
        (one.spot.family, one.spot.step, min(h.stat.mtime for h in one.hold.held.values()))
        for one in seen
        if one.spot.step is not None and one.hold.held
    ]


def is_later(one: Seen, spans: Iterable[Span]) -> bool:
    """Whether one with a higher number, of the same kind, was begun when all of this had been written."""
    step = one.spot.step
    if step is None or not one.hold.held:
        return False
    end = max(h.stat.mtime for h in one.hold.held.values())
    return any(family == one.spot.family and other > step and start >= end for family, other, start in spans)


def is_awaited(seen: Iterable[Seen], hooked: Hooked) -> bool:
    """Whether Hugging Face's Trainer writes into this output directory, by its checkpoints or by its hook: then each gets its last file."""
    return any(TRAINER_STATE in one.hold.held for one in seen) or any(b.trainer.startswith("transformers") for b in hooked.begun)
