"""Which checkpoint of a run is meant.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ckptsync.catalogue.summary import Summary
from ckptsync.errors import ConfigError, Corrupt, Incomplete
from ckptsync.scan import family_of

LATEST = "latest"
Trust = Literal["verified", "any"]
"""``verified``: only what is proven, or proves itself as it is read.  ``any``: the user's own word for what he gets."""
Part = Literal["whole", "node", "model"]
_GOOD = ("COMPLETE", "CONSOLIDATED", "VERIFIED")


@dataclass(frozen=True, slots=True)
class Choice:
    """``notes``: what is newer, and why it is not taken."""

    summary: Summary
    notes: tuple[str, ...] = ()


def split(what: str, summaries: Sequence[Summary]) -> tuple[str, str]:
    """Run, and checkpoint or `LATEST`, of ``RUN`` or ``RUN/CHECKPOINT``: a run's name may have slashes of its own."""
    above, _, last = what.rpartition("/")
    if above and (last == LATEST or what not in {s.run for s in summaries}):
        return above, last
    return what, LATEST


def choose(summaries: Sequence[Summary], run: str, name: str, trust: Trust, part: Part = "whole") -> Choice:
    """Raises ConfigError where nothing has the name, Incomplete or Corrupt where it has nothing to give."""
    here = [s for s in summaries if s.run == run]
    if not here:
        raise ConfigError(f"{run}: no node has told this store of such a run", hint="`ckptsync ls` shows what is there")
    if name == LATEST:
        return _latest(run, here, trust, part)
    found = _newest([s for s in here if name in (s.place, s.checkpoint)])
    if found is None:
        names = ", ".join(dict.fromkeys(s.checkpoint for s in here[-8:]))
        raise ConfigError(f"{run}/{name}: no such checkpoint", hint=f"there are: {names}")
    _check(found, trust, part)
    others = [s for s in here if s.checkpoint == name and found.place not in (s.place, name)]
    return Choice(found, tuple(f"{run}/{s.place} is another save of the same name: {_state(s)}" for s in others))


def _newest(summaries: Sequence[Summary]) -> Summary | None:
    """The one whose files were written last: a training that was restarted counts its steps from the beginning."""
    return max(summaries, key=lambda s: (s.ended, s.step or 0, s.place), default=None)


def _latest(run: str, here: Sequence[Summary], trust: Trust, part: Part) -> Choice:
    saves = _resumable(here)
    can = [s for s in saves if s.word == "VERIFIED" or (trust == "any" and s.word in _GOOD and (s.sealed or part != "model"))]
    can = [s for s in can if not s.let_go or part == "model"]
    newest = _newest(can)
    if newest is None:
        raise Incomplete(
            f"{run}: none of its {len(saves)} checkpoints is {'complete' if trust == 'any' else 'VERIFIED'}: {_told(saves)}",
            hint="name one, or take the newest that is complete with --unverified" if trust != "any" else "wait for the rest of it",
        )
    newer = sorted((s for s in saves if s.ended > newest.ended), key=lambda s: s.ended)
    return Choice(newest, tuple(f"{run}/{s.place} is newer, and not taken: {_state(s)}" for s in newer))


def _resumable(here: Sequence[Summary]) -> Sequence[Summary]:
    """Without what trainers leave beside their checkpoints at the end: a model, and under DeepSpeed the tag that it was made from."""
    families = {s.place: family_of(s.checkpoint) for s in here}
    beside = ("final", "deepspeed") if {"trainer", "accelerate"}.intersection(families.values()) else ("final",)
    return [s for s in here if families[s.place] not in beside] or here


def _check(found: Summary, trust: Trust, part: Part) -> None:
    """Whether a checkpoint that was asked for by name has anything that may be given."""
    name = f"{found.run}/{found.place}"
    if found.word == "AMBIGUOUS":
        raise Corrupt(f"{name}: nobody can say which of its files are of one save: {_first(found.evidence)}")
    if part == "model":
        if not found.seal:
            raise Incomplete(f"{name}: it has not been consolidated", hint="a head does, or `ckptsync merge`")
        return
    if found.let_go and trust != "any":
        hint = "the model that was made of it is there: --consolidated; what is left of the rest comes with --unverified"
        raise Incomplete(f"{name}: its own files are being let go: {found.let_go}", hint=hint)
    if found.word == "RETIRED" and trust != "any":
        raise Incomplete(f"{name}: retired: {found.retired}", hint="what is still there of it comes with --unverified")


def _state(s: Summary) -> str:
    if s.let_go:
        return f"its own files are being let go: {s.let_go}"
    return (
        f"{s.word}{', ' if s.evidence else ''}{_first(s.evidence)}"
        if s.word != "CONSOLIDATED"
        else "CONSOLIDATED, not yet verified"
    )


def _told(saves: Sequence[Summary]) -> str:
    return "; ".join(f"{s.place} is {_state(s)}" for s in sorted(saves, key=lambda s: -s.ended)[:3])


def _first(lines: Sequence[str]) -> str:
    return f"{lines[0]} (and {len(lines) - 1} more)" if len(lines) > 1 else "".join(lines)
