"""Is a checkpoint finished?  Pure: what was seen and for how long, what the trainer's files say, and the time.

Presence proves nothing: ZeRO-3 writes every shard twice, ``latest`` comes before other ranks' shards, and a resumed run writes
over an old checkpoint whose ``trainer_state.json`` is valid all the while.  So times within the checkpoint are compared with each
other (one clock wrote them all), and quiet is measured by watching for it (our clock), never one against the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ckptsync.scan import Family
from ckptsync.walk import Stat

# written by every rank, after the rank that writes trainer_state.json has gone on
_RANDOM_STATE = re.compile(r"rng_state(_\d+)?\.pth|random_states_\d+\.pkl")
_OF_A_RANK = re.compile(
    r"__\d+_\d+\.distcp|(bf16_|fp16_)?zero_pp_rank_\d+_.*|rng_state_\d+\.pth|random_states_\d+\.pkl|mp_rank_\d+_.*"
)
_DCP_SHARD = re.compile(r"__\d+_\d+\.distcp")
TRAINER_STATE = "trainer_state.json"
SENTINEL = "checkpoint-is-incomplete.txt"


Word = Literal["", "committed", "marked", "training"]
"""What the hook says of a save: nothing; its pin is whole; every rank here is done with it; a training that lives has it in hand."""


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
    """``trainer_state.json`` as far as it matters here; ``step`` is ``None`` if it does not parse."""

    step: int | None
    mtime: int


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a checkpoint's files say of it.  ``step`` is its number by its name.

    ``unclosed``: files without the end that their format gives them.  ``writing``: held open for writing (``None``: cannot be told).
    ``later``: a later checkpoint lies beside it, all of it newer.  ``mates``: another node's manifest of the same save is in the
    store.  ``gone``: the trainer has removed the directory, only the pin is left.
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
    hook: Word = ""
    stable: bool = False
    ranks_local: bool = False
    marker: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """``reason`` is shown to people.  ``left`` is how long it will still take if nothing changes; ``None``: nobody knows."""

    settled: bool
    reason: str
    left: float | None = 0.0


def observe(last: Sighting | None, stats: Iterable[Stat], now: float) -> Sighting:
    """Any change restarts the clock; so does a clock that was set back, since nothing is known of the time between."""
    seen = tuple(sorted(stats))
    if last is None or last.stats != seen or now < last.since:
        return Sighting(seen, now)
    return last


def judge(evidence: Evidence, sighting: Sighting, now: float, rule: Rule) -> Verdict:
    """Whether this is all of one save, for ever."""
    refusal = _refusal(evidence)
    if refusal:
        return Verdict(settled=False, reason=refusal, left=None)
    wait, reason = _wait(evidence, rule)
    left = wait - (now - sighting.since)
    if left > 0:
        return Verdict(settled=False, reason=f"{reason}; settled if nothing changes for {left:.0f} s", left=left)
    return Verdict(settled=True, reason=reason)


def is_hopeless(evidence: Evidence) -> bool:
    """Whether what is left of a removed checkpoint can never be a whole one: its save was given up half way."""
    if not evidence.gone or evidence.later or evidence.mates:
        return False
    return bool(evidence.unclosed) or (
        evidence.family == "trainer" and evidence.state is None and not _is_of_ranks_only(evidence.files)
    )


def _refusal(evidence: Evidence) -> str:
    """What no length of waiting makes good."""
    if not evidence.files:
        return "holds no file yet"
    if evidence.writing:
        return f"{evidence.writing[0]} is open for writing"
    if any(s.path.rpartition("/")[2] == SENTINEL for s in evidence.partial):
        return f"the trainer says that it is not finished ({SENTINEL})"
    if evidence.unclosed:
        return f"{evidence.unclosed[0]} does not end as its format does: torn, or still being written"
    return ""


def _wait(evidence: Evidence, rule: Rule) -> tuple[float, str]:
    """How long without a change is long enough, and why."""
    doubt = _doubt(evidence, rule)
    if doubt:
        return rule.doubtful, doubt
    proof = _proof(evidence)
    if evidence.gone:
        return (
            (0.0, "the trainer has removed it")
            if proof
            else (rule.unmarked, "the trainer has removed it before it was known whole")
        )
    if proof:
        return rule.quiet, proof
    if evidence.family == "trainer" and not _is_of_ranks_only(evidence.files) and evidence.state is None:
        return rule.doubtful, f"no {TRAINER_STATE} yet"
    return rule.unmarked, "nothing in it says that it is finished"


def _proof(evidence: Evidence) -> str:
    """What speaks for its being finished."""
    if _stale_metadata(evidence.files):
        return ""
    if evidence.later:
        return "a later checkpoint has been written"
    if evidence.state is not None and not _newer_than_state(evidence):
        return f"{TRAINER_STATE} is the newest of its files"
    if evidence.mates:
        return "another node has stored its part of the same save"
    if evidence.family == "dcp" and any(map(_is_metadata, evidence.files)):
        return ".metadata is newer than its shards"
    return ""


def _doubt(evidence: Evidence, rule: Rule) -> str:
    """What speaks against it, though a crash may have left it so."""
    if evidence.partial:
        return f"{evidence.partial[0].path} is unfinished"
    stale = _stale_metadata(evidence.files, rule.unmarked)
    if stale:
        return f"{stale} is older than its shards: written over?"
    if evidence.state is None:
        return ""
    if evidence.state.step is None:
        return f"{TRAINER_STATE} is not whole"
    if evidence.step is not None and evidence.state.step != evidence.step:
        return f"{TRAINER_STATE} speaks of step {evidence.state.step}"
    newest = max((f for f in evidence.files if not _is_random_state(f)), key=lambda f: f.mtime, default=None)
    if newest is not None and newest.mtime - evidence.state.mtime > rule.unmarked * 1e9:
        # callbacks edit a checkpoint seconds after the trainer is done with it; a resumed run begins to write over it much later
        return f"{newest.path} is much newer than {TRAINER_STATE}: written over?"
    return ""


def _newer_than_state(evidence: Evidence) -> bool:
    state = evidence.state
    return state is not None and any(f.mtime > state.mtime for f in evidence.files if not _is_random_state(f))


def _stale_metadata(files: Iterable[Stat], tolerance: float = 0.0) -> str:
    """The name of a ``.metadata`` with shards beside it that are newer by more than ``tolerance`` seconds: DCP replaces it last.

    A little newer they are after a ``cp -r`` too, which is no proof of anything; a save written over an old one is further apart.
    """
    newest: dict[str, int] = {}
    for f in files:
        folder, _, name = f.path.rpartition("/")
        if _DCP_SHARD.fullmatch(name):
            newest[folder] = max(newest.get(folder, 0), f.mtime)
    stale = (f.path for f in files if _is_metadata(f) and newest.get(f.path.rpartition("/")[0], 0) - f.mtime > tolerance * 1e9)
    return next(stale, "")


def _is_metadata(file: Stat) -> bool:
    return file.path.rpartition("/")[2] == ".metadata"


def _is_random_state(file: Stat) -> bool:
    return _RANDOM_STATE.fullmatch(file.path.rpartition("/")[2]) is not None


def _is_of_ranks_only(files: Iterable[Stat]) -> bool:
    """A node without global rank 0 holds nothing else (and of rank 0 itself, nobody can say)."""
    return all(_OF_A_RANK.fullmatch(f.path.rpartition("/")[2]) for f in files)
