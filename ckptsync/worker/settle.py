"""Is a checkpoint finished?  Pure: what was seen and for how long, what the trainer's files say, and the time.

Presence proves nothing: ZeRO-3 writes every shard twice, ``latest`` comes before other ranks' shards, and a resumed run writes
over an old checkpoint whose ``trainer_state.json`` is valid all the while.  So times within the checkpoint are compared with each
other (one clock wrote them all), and quiet is measured by watching for it (our clock), never one against the other.

What the trainer has removed holds still for ever, whole or not: it counts only if it was seen whole, and at rest, while it was there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ckptsync.scan import Family
from ckptsync.walk import Stat
from ckptsync.worker.cut_short import (
    TRAINER_STATE,
    awaits_its_end,
    half_written,
    is_metadata,
    is_of_rank_0,
    may_be_cut_short,
    stale_metadata,
    two_saves,
    without_arguments,
)
from ckptsync.worker.evenness import current, is_random_state, lacking

SENTINEL = "checkpoint-is-incomplete.txt"
MARKED = 1.0  # seconds, where every rank here has said that it is done but nobody pinned what there is
_V1 = "CHECKPOINT_COMPLETE"  # LLaMA-Factory v1, on the node of rank 0
_LIGHTNING_LAST = "meta.pt"
_SAY_SO = "if your script writes no more than this, push it (ckptsync push), or let it call ckptsync.mark_saved"
Word = Literal["", "committed", "marked", "training", "killed"]
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
    hook: Word = ""
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
    refused = refusal(evidence) or cut_short(evidence, rule) or alone(evidence, rule)
    if refused:
        return Verdict(settled=False, reason=refused, left=None)
    wait, reason = _wait(evidence, rule)
    left = wait - (now - sighting.since)
    if left > 0:
        return Verdict(settled=False, reason=f"{reason}; settled if nothing changes for {left:.0f} s", left=left)
    return Verdict(settled=True, reason=reason)


def is_hopeless(evidence: Evidence) -> bool:
    """Whether what is left of a removed checkpoint can never be known to be a whole one: nobody saw that it was, while it was there."""
    return evidence.gone and evidence.hook != "committed" and (not evidence.stable or _awaits_its_end(evidence))


def refusal(evidence: Evidence) -> str:
    """What no length of waiting makes good."""
    if not evidence.files:
        return "holds no file yet"
    if evidence.writing:
        return f"{evidence.writing[0]} is open for writing"
    if evidence.hook == "committed":
        return ""  # it was like this when all who write it were done
    if any(s.path.rpartition("/")[2] == SENTINEL for s in evidence.partial):
        return f"the trainer says that it is not finished ({SENTINEL})"
    # other JSON may be anybody's
    torn = next((name for name in evidence.unclosed if name == TRAINER_STATE or not name.endswith(".json")), "")
    if torn:
        return f"{torn} does not end as its format does: torn, or still being written"
    if is_hopeless(evidence):
        return "the trainer has removed it before it was known whole"
    return ""


def cut_short(evidence: Evidence, rule: Rule) -> str:
    """The same of what a crash has left.  Who waits for nothing (`push`) may know better."""
    if not rule.doubtful or evidence.hook in ("committed", "marked"):
        return ""
    if evidence.family == "trainer" and (torn := half_written(evidence.files, evidence.unclosed)):
        return f"{torn} is only half written"
    if _awaits_its_end(evidence):
        return f"no {TRAINER_STATE}, which the trainer writes last"
    if evidence.hook == "killed" and (lacking := without_arguments(evidence.files)):
        return lacking
    if evidence.fresh or evidence.stable:
        return ""
    return two_saves(evidence.files, evidence.state.mtime if evidence.state is not None else None, rule.unmarked)


def alone(evidence: Evidence, rule: Rule) -> str:
    """What a crash may have left or a script have written so: a second checkpoint of the same kind tells, or whoever knows the script."""
    if not rule.doubtful or evidence.alike or _is_ended(evidence):
        return ""
    lacking = may_be_cut_short(evidence.files, evidence.family)
    return f"no {lacking}, which comes last, and no other checkpoint like it: {_SAY_SO}" if lacking else ""


def _awaits_its_end(evidence: Evidence) -> bool:
    return not _is_ended(evidence) and _is_of_trainer(evidence) and awaits_its_end(evidence.files, awaited=evidence.awaited)


def _is_ended(evidence: Evidence) -> bool:
    """Whether the trainer's last word is here, or the hook's."""
    is_said = evidence.hook in ("committed", "marked") or evidence.state is not None
    return is_said or any(f.path == _V1 for f in evidence.files)


def _wait(evidence: Evidence, rule: Rule) -> tuple[float, str]:
    """How long without a change is long enough, and why."""
    if evidence.hook == "committed":
        return 0.0, "every rank that writes here has said that it is done"
    if evidence.gone:
        return 0.0, "the trainer has removed it"
    if evidence.hook == "training":
        return rule.doubtful, "the training that writes it has not said that it is done"
    doubted = doubt(evidence, rule)
    if doubted:
        return rule.doubtful, doubted
    if evidence.hook in ("marked", "killed"):
        return min(MARKED, rule.quiet), "every rank that writes here has said that it is done, or is gone"
    if evidence.unclosed:  # somebody's own format under that name, or a crash
        return rule.unmarked, f"{evidence.unclosed[0]} is no whole JSON"
    proven, missing = proof(evidence), behind(evidence)
    if proven and not missing:
        return rule.quiet, proven
    if _is_of_trainer(evidence) and evidence.state is None:
        return rule.doubtful, f"no {TRAINER_STATE} yet"
    return rule.unmarked, f"{missing} is missing" if missing else "nothing in it says that it is finished"


def proof(evidence: Evidence) -> str:
    """What speaks for its being finished."""
    if not evidence.fresh and stale_metadata(evidence.files):
        return ""
    if _is_of_trainer(evidence):
        return _proof_of_trainer(evidence)
    if evidence.later:
        return "a later checkpoint has been written"
    if evidence.mates:
        return "another node has stored its part of the same save"
    return _own_word(evidence)


def _own_word(evidence: Evidence) -> str:
    """What trainers other than Hugging Face's leave when they are done."""
    files = evidence.files
    if evidence.family == "dcp" and any(map(is_metadata, files)):
        return ".metadata is newer than its shards"
    if evidence.family == "lightning" and len(files) == 1 and files[0].path.endswith(".ckpt"):
        return "it is one file, which appears when it is whole"
    if evidence.family == "lightning" and _is_newest(_LIGHTNING_LAST, evidence):
        return f"{_LIGHTNING_LAST} is the newest of its files"
    marker = evidence.marker
    if marker is None or marker.step is None or evidence.step is None or marker.step < evidence.step:
        return ""
    return f"the trainer says that step {marker.step} is written" if all(f.mtime <= marker.mtime for f in files) else ""


def _proof_of_trainer(evidence: Evidence) -> str:
    """Where rank 0 writes, its last file tells: that training goes on proves nothing of a save that a crash cut short."""
    if _is_newest(_V1, evidence):
        return f"{_V1} is the newest of its files"
    if evidence.state is None or evidence.state.step is None:
        return ""
    if _is_newest(TRAINER_STATE, evidence):
        return f"{TRAINER_STATE} {'has appeared' if evidence.fresh else 'is the newest of its files'}"
    return "a later checkpoint has been written" if evidence.later else ""


def doubt(evidence: Evidence, rule: Rule) -> str:
    """What speaks against it, though a crash may have left it so."""
    if unfinished := _unfinished(evidence):
        return f"{unfinished} is unfinished"
    stale = stale_metadata(evidence.files, rule.unmarked)
    if stale and not evidence.fresh:
        return f"{stale} is older than its shards: written over?"
    if evidence.state is None:
        return ""
    if evidence.state.step is None:
        return f"{TRAINER_STATE} is not whole"
    if evidence.step is not None and evidence.state.step != evidence.step:
        return f"{TRAINER_STATE} speaks of step {evidence.state.step}"
    newest = max(evidence.files, key=lambda f: f.mtime, default=None)
    if newest is not None and not evidence.fresh and newest.mtime - evidence.state.mtime > rule.unmarked * 1e9:
        # callbacks edit a checkpoint seconds after the trainer is done with it; a resumed run begins to write over it much later
        return f"{newest.path} is much newer than {TRAINER_STATE}: written over?"
    return ""


def _unfinished(evidence: Evidence) -> str:
    """A name that a writer has not replaced yet.  One that is older than what the trainer writes last is of an earlier save, which was killed."""
    ended = evidence.state.mtime if evidence.state is not None and evidence.state.step is not None else 0
    return next((p.path for p in evidence.partial if p.mtime >= ended), "")


def _is_newest(name: str, evidence: Evidence) -> bool:
    """Whether a file of that name is no older than what its writer writes before it."""
    at = next((f.mtime for f in evidence.files if f.path == name), None)
    return at is not None and (evidence.fresh or all(f.mtime <= at for f in evidence.files if not is_random_state(f.path)))


def behind(evidence: Evidence) -> str:
    """What a rank should have written by now; empty if nothing shows that one is behind."""
    return lacking(names(evidence)) if evidence.missing is None else evidence.missing


def names(evidence: Evidence) -> list[str]:
    """Of its files, by path, but for random states of the save before."""
    return [f.path for f in evidence.files] if evidence.fresh else current(evidence.files)


def _is_of_trainer(evidence: Evidence) -> bool:
    """Whether rank 0 of Hugging Face's Trainer, or LLaMA-Factory's, writes here: accelerate's scripts use the same names."""
    return evidence.family == "trainer" and is_of_rank_0([f.path for f in evidence.files])
