"""What a push finds below a directory: the saves that a daemon would see there, without pinning them, and whether they are finished."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptsync import scan
from ckptsync.errors import CkptsyncError, ConfigError
from ckptsync.scan import Found, Spot
from ckptsync.spool import pins as spool
from ckptsync.spool.pins import Pin
from ckptsync.walk import OURS
from ckptsync.worker.evidence import gather
from ckptsync.worker.hold import hold
from ckptsync.worker.hooked import read_hooked
from ckptsync.worker.looking import Seen
from ckptsync.worker.observed import Evidence, Rule, Sighting, Verdict
from ckptsync.worker.options import RunDir
from ckptsync.worker.order_of_writing import Span, is_later, spans_of
from ckptsync.worker.settle import judge

NOW = Rule(quiet=0, unmarked=0, doubtful=0)
_PROVEN = Rule(quiet=0, unmarked=1, doubtful=1)


@dataclass(frozen=True, slots=True)
class Offer:
    """``root``: the output directory, where a spool may be.  ``spots``: the checkpoints that were asked for; ``pins``: of the same, whoever made them.

    ``save``: the id of the save, where somebody agreed on one and no mark says it.
    """

    run: str
    root: Path
    spots: tuple[Spot, ...]
    pins: tuple[Pin, ...] = ()
    save: str = ""


def offered(directory: Path, runs: Iterable[RunDir] = ()) -> Offer:
    """A checkpoint, or all below an output directory; in one of ``runs`` under the names that a daemon gives.  Raises ConfigError if there are none."""
    if not directory.is_dir():
        raise ConfigError(
            f"{directory}: no such directory", hint="give a checkpoint's directory, or the one that holds checkpoints"
        )
    here = directory.resolve()
    run = max((r for r in runs if r.path in (here, *here.parents)), key=_depth, default=None)
    own = None if run else scan.spot_at(here)
    run = run or (RunDir(here.name, here) if own is None else _above(here))
    spots = (own,) if own else tuple(s for s in scan.spots(run.path) if here in (run.path, s.path, *s.path.parents))
    if not spots:
        raise ConfigError(
            f"{directory}: no checkpoint in it",
            hint="wanted: checkpoint-N, checkpoint_K, step-N, global_step_N, *.ckpt, a DeepSpeed save directory, or a model with its weights",
        )
    names = {s.name for s in spots}
    return Offer(run.name, run.path, spots, spool.pins(run.path, lambda name: here == run.path or name in names))


def _depth(run: RunDir) -> int:
    return len(run.path.parts)


def _above(checkpoint: Path) -> RunDir:
    """The run that a checkpoint is in, by its path alone."""
    above = checkpoint.parent
    root = above.parent if above.name in scan.NESTED else above
    return RunDir(root.name, root)


def of_source(offer: Offer, spot: Spot) -> Seen:
    """A checkpoint as the trainer's directory holds it now, beside what a pin of the same files says of it.

    What rotation has taken of one that the hook committed is read from the pin.
    """
    found = scan.found(spot)
    same = [p for p in offer.pins if p.checkpoint == spot.name and _is_of(p, found)]
    pin = same[-1] if same else None
    is_short = pin is not None and len(pin.files) > len(found.files)
    return Seen(offer.run, spot, hold(found, pin if is_short else None, spot.family, spot.name), pin)


def left_behind(offer: Offer, node: str) -> tuple[Seen, ...]:
    """Saves that the trainer has removed, or written over, and that a pin kept whole: the hook's word, or a daemon that looked in time.

    What another node's daemon pinned on a shared disk is its own to send.
    """
    there = {s.name: scan.found(s) for s in offer.spots}
    kept = [p for p in offer.pins if p.node in ("", node) and not p.stored and p.files]
    return tuple(_of_pin(offer.run, offer.root, p) for p in kept if _outlives(p, there.get(p.checkpoint)))


def spans(offer: Offer) -> list[Span]:
    """When the checkpoints of the same output directory were written, as far as they can be looked at."""
    seen: list[Seen] = []
    with contextlib.suppress(CkptsyncError):  # what cannot be looked at proves nothing of the rest, and pushing it tells why
        for spot in scan.spots(offer.root):
            seen.append(Seen(offer.run, spot, hold(scan.found(spot), None, spot.family, spot.name), None))  # noqa: PERF401
    return spans_of(seen)


def evidence_of(seen: Seen, root: Path, beside: Sequence[Span]) -> tuple[Evidence, str]:
    """All that a daemon would ask, but for the store; and the id that the hook's marks give the save, where no pin says one.

    Marks speak of pins; what is not pinned is judged as if it were.  Raises Incomplete if files vanish meanwhile.
    """
    name = seen.spot.name
    hooked = read_hooked(root, (name,))
    pin = seen.pin or Pin(name, 0, "", 0, root / OURS / "pins" / "none", seen.hold.stats)
    found = gather(seen.hold, seen.spot, later=is_later(seen, beside), mates=False, pin=pin, hooked=hooked)
    marks = hooked.marks.get(name, ()) if found.hook == "marked" else ()
    return found, max(marks, key=lambda m: m.at).save if marks else ""


def judged(evidence: Evidence) -> Verdict:
    """Whether it may be sent at this moment: all but what no waiting makes good."""
    return judge(evidence, Sighting(evidence.files, 0.0), 0.0, NOW)


def is_proven(evidence: Evidence) -> bool:
    """Whether something says that it is finished, so that a daemon, too, would only see to it that nothing moves."""
    return judge(evidence, Sighting(evidence.files, 0.0), 0.0, _PROVEN).settled


def _is_of(pin: Pin, found: Found) -> bool:
    relation = spool.compare(pin.files, found.files)
    return not (relation.changed or relation.new) and (pin.is_committed or not relation.vanished)


def _outlives(pin: Pin, source: Found | None) -> bool:
    is_gone = source is None or not source.files or bool(spool.compare(pin.files, source.files).changed)
    return is_gone and (pin.is_committed or bool(pin.took.stable))


def _of_pin(run: str, root: Path, pin: Pin) -> Seen:
    spot = Spot(pin.checkpoint, scan.family_of(pin.checkpoint), root / pin.checkpoint)
    return Seen(run, spot, hold(None, pin, spot.family, spot.name), pin)
