"""Choose which checkpoint of a run a user means: the one with a name, or the newest that is whole.

A run may hold checkpoints that are incomplete, damaged, or being deleted. So the newest one is
chosen of those that may be given, and newer ones are named with the reason. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ckptsync.catalogue.location_summary import Summary, by_age, last_models
from ckptsync.downloader.download_plan import not_consolidated
from ckptsync.errors import ConfigError, Corrupt, Incomplete

LATEST = "latest"
Trust = Literal["verified", "any"]
"""``verified``: give only what is VERIFIED, or is checked as it is read.

``any``: also give what is incomplete.
"""
PulledPart = Literal["whole", "node", "model"]
_COMPLETE = ("COMPLETE", "CONSOLIDATED", "VERIFIED")


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen checkpoint; ``notes``: which newer ones were not chosen, and why."""

    summary: Summary
    notes: tuple[str, ...] = ()


def split(what: str, summaries: Sequence[Summary]) -> tuple[str, str]:
    """Return run and checkpoint of ``RUN/CHECKPOINT``, or run and `LATEST` of ``RUN``.

    A run's name may contain slashes: ``what`` is a run if it has no slash, or if ``summaries`` have
    a run of this name and its last part is not `LATEST`. Else its last part is the checkpoint,
    which need not exist.
    """
    above, _, last = what.rpartition("/")
    if above and (last == LATEST or what not in {s.run for s in summaries}):
        return above, last
    return what, LATEST


def choose(
    summaries: Sequence[Summary], run: str, name: str, trust: Trust, part: PulledPart = "whole"
) -> Choice:
    """Return for `LATEST` what `_choose_latest` returns, else the newest location of this name.

    ``name``: a location, or a checkpoint, of which other saves are named in the notes. The run must
    have a location in ``summaries``. Raise ConfigError if none has the name, Incomplete or Corrupt
    as `_check_may_be_given`, and Incomplete if `LATEST` finds none.
    """
    in_run = by_age(s for s in summaries if s.run == run)
    if name == LATEST:
        return _choose_latest(run, in_run, trust, part)
    of_name = [s for s in in_run if name in (s.location, s.checkpoint)]
    if not of_name:
        names = ", ".join(dict.fromkeys(s.checkpoint for s in in_run[-8:]))
        raise ConfigError(f"{run}/{name}: no such checkpoint", hint=f"the run has {names}")
    chosen = of_name[-1]
    _check_may_be_given(chosen, trust, part)
    other_saves = [
        s for s in of_name if s.checkpoint == name and chosen.location not in (s.location, name)
    ]
    return Choice(
        chosen,
        tuple(
            f"{run}/{s.location} is another save of the same name: {_status_text(s)}"
            for s in other_saves
        ),
    )


def _choose_latest(run: str, in_run: Sequence[Summary], trust: Trust, part: PulledPart) -> Choice:
    """Return the newest location of a run that may be given; raise Incomplete if there is none.

    It may if it is VERIFIED or, with ``trust`` `any`, complete (with a model if ``part`` is
    `model`). Locations whose shards are being deleted may be given for the model alone. A
    training's last model (`last_models`) counts only if the run has nothing else. The notes name
    the newer ones. ``in_run``: the run's locations, the oldest first, at least one.
    """
    last_model_locations = last_models(in_run)
    saves = [s for s in in_run if s.location not in last_model_locations] or in_run
    usable = [
        s
        for s in saves
        if s.status == "VERIFIED"
        or (trust == "any" and s.status in _COMPLETE and (s.consolidated or part != "model"))
    ]
    usable = [s for s in usable if not s.shards_retired or part == "model"]
    if not usable:
        status, hint = (
            "VERIFIED",
            "name a checkpoint, or give --unverified for the newest complete one",
        )
        if trust == "any":
            status = "complete"
        if trust == "any" or not any(s.status in _COMPLETE for s in saves):
            example = f"{run}/{saves[-1].location}"
            hint = (
                f"wait until one is complete, or name one, such as {example}, to get what is there"
            )
        last = "; ".join(f"{s.location} is {_status_text(s)}" for s in saves[:-4:-1])
        raise Incomplete(
            f"{run}: none of its {len(saves)} checkpoints is {status}: {last}", hint=hint
        )
    chosen = usable[-1]
    newer = saves[saves.index(chosen) + 1 :]
    return Choice(
        chosen,
        tuple(f"{run}/{s.location} is newer, and was not chosen: {_status_text(s)}" for s in newer),
    )


def _check_may_be_given(summary: Summary, trust: Trust, part: PulledPart) -> None:
    """Raise Incomplete or Corrupt if a named checkpoint may not be given; check no files.

    Corrupt for a CONFLICT, whatever ``trust`` is. For the model: Incomplete without a model record,
    and nothing else. Otherwise Incomplete if the checkpoint is RETIRED or its shards are, unless
    ``trust`` is `any`. INCOMPLETE and DAMAGED pass.
    """
    name = f"{summary.run}/{summary.location}"
    if summary.status == "CONFLICT":
        raise Corrupt(
            f"{name}: two saves have this name, and nothing proves which file belongs to which:"
            f" {_first_line(summary.evidence)}"
        )
    if part == "model":
        if not summary.model_record:
            raise not_consolidated(name)
        return
    if summary.shards_retired and trust != "any":
        raise Incomplete(
            f"{name}: retention is deleting its shards: {summary.shards_retired}",
            hint=(
                "get its consolidated model with --consolidated, or the files that are left with"
                " --unverified"
            ),
        )
    if summary.status == "RETIRED" and trust != "any":
        raise Incomplete(
            f"{name}: retired: {summary.retired}",
            hint="get the files that are left with --unverified",
        )


def _status_text(summary: Summary) -> str:
    """Return a location's status for people, with the first reason."""
    if summary.shards_retired:
        return f"retention is deleting its shards: {summary.shards_retired}"
    if summary.status == "CONSOLIDATED":
        return "CONSOLIDATED, not yet verified"
    return f"{summary.status}{', ' if summary.evidence else ''}{_first_line(summary.evidence)}"


def _first_line(lines: Sequence[str]) -> str:
    """Return the first line, and how many more there are; "" for no lines."""
    return f"{lines[0]} (and {len(lines) - 1} more)" if len(lines) > 1 else "".join(lines)
