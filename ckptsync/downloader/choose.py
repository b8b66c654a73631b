"""Choose which checkpoint of a run a user means: the one with a name, or the newest that is whole.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ckptsync.catalogue.location_summary import Summary, by_age, last_models
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
    """The chosen checkpoint.  ``notes`` name newer ones, and say why they were not chosen."""

    summary: Summary
    notes: tuple[str, ...] = ()


def split(what: str, summaries: Sequence[Summary]) -> tuple[str, str]:
    """Return run and checkpoint (or `LATEST`) of ``RUN`` or ``RUN/CHECKPOINT``.

    A run's name may contain slashes.
    """
    above, _, last = what.rpartition("/")
    if above and (last == LATEST or what not in {s.run for s in summaries}):
        return above, last
    return what, LATEST


def choose(
    summaries: Sequence[Summary], run: str, name: str, trust: Trust, part: PulledPart = "whole"
) -> Choice:
    """Return the newest checkpoint of ``run`` for `LATEST`, else the one with this name.

    The run has at least one.

    Raises ConfigError if there is no such checkpoint, Incomplete or Corrupt if it may not be given.
    """
    in_run = by_age(s for s in summaries if s.run == run)
    if name == LATEST:
        return _choose_latest(run, in_run, trust, part)
    named = [s for s in in_run if name in (s.location, s.checkpoint)]
    if not named:
        names = ", ".join(dict.fromkeys(s.checkpoint for s in in_run[-8:]))
        raise ConfigError(f"{run}/{name}: no such checkpoint", hint=f"the run has {names}")
    found = named[-1]
    _check_may_be_given(found, trust, part)
    others = [s for s in named if s.checkpoint == name and found.location not in (s.location, name)]
    return Choice(
        found,
        tuple(f"{run}/{s.location} is another save of the same name: {_status(s)}" for s in others),
    )


def _choose_latest(run: str, in_run: Sequence[Summary], trust: Trust, part: PulledPart) -> Choice:
    """Return the newest of a run's locations, which come oldest first, that may be given."""
    extra = last_models(in_run)
    saves = [s for s in in_run if s.location not in extra] or in_run
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
            one = f"{run}/{saves[-1].location}"
            hint = f"wait until one is complete, or name one, such as {one}, to get what is there"
        last = "; ".join(f"{s.location} is {_status(s)}" for s in saves[:-4:-1])
        raise Incomplete(
            f"{run}: none of its {len(saves)} checkpoints is {status}: {last}", hint=hint
        )
    found = usable[-1]
    newer = saves[saves.index(found) + 1 :]
    return Choice(
        found,
        tuple(f"{run}/{s.location} is newer, and was not chosen: {_status(s)}" for s in newer),
    )


def _check_may_be_given(found: Summary, trust: Trust, part: PulledPart) -> None:
    name = f"{found.run}/{found.location}"
    if found.status == "CONFLICT":
        raise Corrupt(
            f"{name}: two saves have this name, and nothing proves which file belongs to which:"
            f" {_first(found.evidence)}"
        )
    if part == "model":
        if not found.model_record:
            raise Incomplete(
                f"{name}: it has not been consolidated",
                hint=f"wait for a head, or run `ckptsync merge STORE_URL/{name} DST`",
            )
        return
    if found.shards_retired and trust != "any":
        raise Incomplete(
            f"{name}: retention is deleting its shards: {found.shards_retired}",
            hint=(
                "get its consolidated model with --consolidated, or the files that are left with"
                " --unverified"
            ),
        )
    if found.status == "RETIRED" and trust != "any":
        raise Incomplete(
            f"{name}: retired: {found.retired}",
            hint="get the files that are left with --unverified",
        )


def _status(s: Summary) -> str:
    if s.shards_retired:
        return f"retention is deleting its shards: {s.shards_retired}"
    if s.status == "CONSOLIDATED":
        return "CONSOLIDATED, not yet verified"
    return f"{s.status}{', ' if s.evidence else ''}{_first(s.evidence)}"


def _first(lines: Sequence[str]) -> str:
    return f"{lines[0]} (and {len(lines) - 1} more)" if len(lines) > 1 else "".join(lines)
