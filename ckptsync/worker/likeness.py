"""Which checkpoints of a run hold files of the same names: what a script writes again and again is no accident.  Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ckptsync.records.manifest import Manifest
from ckptsync.scan import Spot
from ckptsync.worker.looking import Seen
from ckptsync.worker.resting import was_at_rest
from ckptsync.worker.selecting import Selection, select


def is_like_another(one: Seen, others: Iterable[Seen]) -> bool:
    """Whether one of them has another step's name and the same files, and has been at rest with these very files (`resting.at_rest`)."""
    of_size = (o for o in others if len(o.hold.held) == len(one.hold.held) and o.spot.family == one.spot.family)
    at_rest = (o for o in of_size if o.pin is not None and was_at_rest(o.pin.took.stable, o.hold.stats))
    wanted = shape(one.hold.held, one.spot.step)
    return any(o.spot.name != one.spot.name and shape(o.hold.held, o.spot.step) == wanted for o in at_rest)


def is_like_stored(one: Seen, manifests: Iterable[Manifest], selection: Selection) -> bool:
    """The same of what nodes have sent of the run's other checkpoints, of the files that are sent."""
    names = [f.path for f in one.hold.stats]
    others = (m for m in manifests if m.checkpoint != one.spot.name and len(m.files) <= len(names))
    return any(_is_like(one.spot, names, m, selection) for m in others)


def shape(names: Iterable[str], step: int | None) -> frozenset[str]:
    """Names without the step, which scripts like to write into them."""
    number = re.compile(rf"(?<![0-9])0*{step}(?![0-9])")
    return frozenset(number.sub("#", name) for name in names)


def _is_like(spot: Spot, names: Sequence[str], manifest: Manifest, selection: Selection) -> bool:
    sent = names if selection.is_everything else select(names, selection, manifest.demands)
    other = Spot(manifest.checkpoint, spot.family, spot.path)
    return shape(sent, spot.step) == shape((f.path for f in manifest.files), other.step)
