"""What was seen of a checkpoint, and for how long: the values that are judged.  Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ckptsync.scan import Family
from ckptsync.walk import Stat

HookStatus = Literal["", "committed", "marked", "training", "killed"]
"""What the hook says of a save: nothing; its pin is whole; every rank here is done with it; a training that lives has it in hand, or had it when it died."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Seconds without a change: where the save proves its end, where nothing tells, and where something speaks against it."""

    quiet: float = 10.0
    unmarked: float = 60.0
    doubtful: float = 600.0


@dataclass(frozen=True, slots=True)
class Sighting:
    """What was seen, and since when nothing has changed, on the clock of the machine that watches."""

    stats: tuple[Stat, ...]
    since: float


@dataclass(frozen=True, slots=True)
class TrainerState:
    """``trainer_state.json``, or what verl writes instead, as far as it matters here; ``step`` is ``None`` if it does not parse."""

    step: int | None
    mtime: int


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a checkpoint's files say of it.  ``step`` is its number by its name.

    ``unclosed``: files without the end that their format gives them.  ``writing``: held open for writing (``None``: cannot be told).
    ``later``: a later checkpoint lies beside it, all of it newer.  ``mates``: another node's manifest of the same save is in the
    store.  ``gone``: the trainer has removed the directory, only the pin is left.  ``hook``: see `Word`.  ``stable``: these very files
    were whole and at rest while the trainer's directory was there (`at_rest`).  ``marker``: verl's ``latest_checkpointed_iteration.txt``.

    ``folders``: when a name last came or went in the trainer's directories, ``pulse``: when they were last looked at; both in ns on
    the clock of the file system, 0 where it is not known.  ``missing``: what a rank should have written by now (`evenness.lacking`),
    where that was worked out already, since of 100,000 files it takes a while.

    ``fresh``: all of it appeared while we looked on, so that nothing in it is of an older save.  Then what a trainer writes last tells by
    being there, whatever a clock that was set meanwhile made of the files' times.  ``awaited``: Hugging Face's Trainer writes in this output directory.
    ``alike``: another checkpoint of this run, at rest for long or in the store, holds files of the same names.
    """

    family: Family
    step: int | None
    files: tuple[Stat, ...]
    partial: tuple[Stat, ...] = ()
    state: TrainerState | None = None
    unclosed: tuple[str, ...] = ()
    writing: tuple[str, ...] | None = ()
    later: bool = False
    mates: bool = False
    gone: bool = False
    hook: HookStatus = ""
    stable: bool = False
    marker: TrainerState | None = None
    folders: int = 0
    pulse: int = 0
    missing: str | None = None
    fresh: bool = False
    awaited: bool = False
    alike: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """``reason`` is shown to people.  ``left`` is how long it will still take if nothing changes; ``None``: nobody knows."""

    finished: bool
    reason: str
    left: float | None = 0.0


def observe(last: Sighting | None, stats: Iterable[Stat], now: float) -> Sighting:
    """Any change restarts the clock; so does a clock that was set back, since nothing is known of the time between."""
    seen = tuple(sorted(stats))
    if last is None or last.stats != seen or now < last.since:
        return Sighting(seen, now)
    return last
