"""What a push finds below a directory: the saves that a daemon would see there, without pinning them, and whether they are finished."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptsync import scan
from ckptsync.errors import CkptsyncError, ConfigError
from ckptsync.layouts import table
from ckptsync.scan import FINAL, Family, Found, Spot
from ckptsync.spool import pins as spool
from ckptsync.spool.pins import Pin
from ckptsync.walk import OURS, UnsafeSpool
from ckptsync.worker.cut_short import TRAINER_STATE
from ckptsync.worker.evidence import gather
from ckptsync.worker.hold import hold
from ckptsync.worker.hooked import read_hooked
from ckptsync.worker.looking import Seen
from ckptsync.worker.observed import Evidence, Rule, Sighting, Verdict
from ckptsync.worker.options import RunDir
from ckptsync.worker.order_of_writing import Span, is_later, spans_of
from ckptsync.worker.selecting import is_of_states
from ckptsync.worker.settle import judge

NOW = Rule(quiet=0, unmarked=0, doubtful=0)
_PROVEN = Rule(quiet=0, unmarked=1, doubtful=1)


@dataclass(frozen=True, slots=True)
class Offer:
    """``root``: the output directory, where a spool may be.  ``spots``: the checkpoints that were asked for; ``pins``: of the same, whoever made them.

    ``save``: the id of the save, where somebody agreed on one and no mark says it.  ``notes``: what was not looked at, and why.
    ``left_out``: what lies in the directory that was named, and in none of them.
    """

    run: str
    root: Path
    spots: tuple[Spot, ...]
    pins: tuple[Pin, ...] = ()
    save: str = ""
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


def offered(directory: Path, runs: Iterable[RunDir] = (), name: str = "") -> Offer:
    """Return the checkpoint ``directory``, or all that a worker finds below it; in one of ``runs`` under the names that a worker gives.

    ``name``: that of the checkpoint in the store, where all of ``directory`` is to be one.  A directory that no worker takes for a checkpoint is one here
    if a layout reads it; a link that the user names is followed.  Raises ConfigError if there is no checkpoint, or a store cannot keep its name.
    """
    if not directory.is_dir():
        raise ConfigError(
            f"{directory}: {'not a' if directory.exists() else 'no such'} directory",
            hint="give a checkpoint's directory, or the one that holds checkpoints",
        )
    here, given = directory.resolve(), Path(os.path.abspath(directory))  # noqa: PTH100  # no link is resolved
    configured = max((r for r in runs if r.path in (here, *here.parents, *given.parents)), key=_depth, default=None)
    own = None if configured else scan.spot_at(here)
    run = configured or (RunDir(here.name, here) if own is None else _above(here))
    spots = (own,) if own else tuple(s for s in scan.spots(run.path) if here in (run.path, s.path, *s.path.parents))
    is_watched = configured is not None and configured.path == here and bool(spots)
    one = None if is_watched and not name else _as_one(here, given.name, spots, name)
    if one:  # no worker knows it under this name, so that no pin and no mark is of it
        return Offer((configured or _above(here if own else given)).name, here, (one,))
    if not spots:
        raise _nothing_in(directory)
    names = {s.name for s in spots}
    try:
        pins = spool.pins(run.path, lambda name: here == run.path or name in names)
    except UnsafeSpool as e:  # the checkpoints are what they are
        return Offer(
            run.name, run.path, spots, (), "", (f"what is kept in the spool is not sent: {e}",), scan.uncovered(here, spots)
        )
    return Offer(run.name, run.path, spots, pins, left_out=scan.uncovered(here, spots))


def _as_one(here: Path, given: str, spots: Sequence[Spot], name: str) -> Spot | None:
    """Return all of a directory as one checkpoint: since the user names it so, or since it is one by what lies in it."""
    below = [s for s in spots if s.family != FINAL and (s.path != here or s.only is not None)]
    if any(s.family != "deepspeed" for s in below) or (name and len(below) > 1):
        if name:
            raise ConfigError(
                f"{here}: --as gives one checkpoint a name, and this directory holds {below[0].name}", hint="name its directory"
            )
        return None
    known = next((s for s in spots if s.path == here and s.only is None), None)
    if not name and known:
        return None
    entries = scan.uncovered(here, ())
    has_states = any(is_of_states(e) or e == ".metadata" or e.endswith(".distcp") for e in entries)
    if not (name or not spots or has_states or scan.is_named_like_one(given)):
        return None  # an output directory with a final model, or with DeepSpeed's tags
    told = Spot(name or given, known.family if known else _family(name or given, entries), here)
    if not (known or table.sources(hold(scan.found(told), None, told.family, told.name))):
        return None
    if not scan.is_plain(told.name):
        hint = "give it a name with --as NAME, such as --as checkpoint-4: letters, digits, '_', '.' and '-', at most 100"
        raise ConfigError(f"{here}: a store cannot keep a checkpoint under the name {told.name!r}", hint=hint)
    return told


def _family(name: str, entries: Sequence[str]) -> Family:
    """Return whose checkpoint it is, by its name, and else by what lies at its top."""
    found = scan.family_of(name)
    if found == "deepspeed" or name == FINAL:
        if ".metadata" in entries or any(e.endswith(".distcp") for e in entries):
            return "dcp"
        if TRAINER_STATE in entries:
            return "trainer"
    return found


def _nothing_in(directory: Path) -> ConfigError:
    links = [directory / name for name in scan.uncovered(directory, ()) if (directory / name).is_symlink()]
    folder = next((link for link in links if link.is_dir()), None)
    if folder:
        hint = f"a link is followed where you name it: ckptsync push {folder}"
        return ConfigError(f"{directory}: no checkpoint in it but behind a link, {folder.name}", hint=hint)
    hint = "checkpoints are directories that `ckptsync inspect` can read, such as checkpoint-N; name one, or the directory that holds them"
    return ConfigError(f"{directory}: no checkpoint in it", hint=hint)


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
    return judge(evidence, Sighting(evidence.files, 0.0), 0.0, _PROVEN).finished


def _is_of(pin: Pin, found: Found) -> bool:
    relation = spool.compare(pin.files, found.files)
    return not (relation.changed or relation.new) and (pin.is_committed or not relation.vanished)


def _outlives(pin: Pin, source: Found | None) -> bool:
    is_gone = source is None or not source.files or bool(spool.compare(pin.files, source.files).changed)
    return is_gone and (pin.is_committed or bool(pin.took.stable))


def _of_pin(run: str, root: Path, pin: Pin) -> Seen:
    spot = Spot(pin.checkpoint, scan.family_of(pin.checkpoint), root / pin.checkpoint)
    return Seen(run, spot, hold(None, pin, spot.family, spot.name), pin)
