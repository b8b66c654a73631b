"""Decides whether a checkpoint is finished, from one observation of its files.  Pure.

No trainer says reliably that a save is complete, and the presence of a file alone proves nothing:
ZeRO-3 writes every shard twice, ``latest`` comes before other ranks' shards, and a resumed run
writes over an old checkpoint whose ``trainer_state.json`` is valid all the while.  So `judge` calls
a save finished when the file that its trainer writes last (`_LAST`) is newer than the others, and
nothing has changed for a while.  Times within a checkpoint are compared with each other, since one
clock wrote them; the time without a change is measured by the worker's clock.

A checkpoint that the trainer has removed never changes again, whole or not: it counts only if it
was stable while it was still there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ckptsync.checkpoint_dirs import Family
from ckptsync.worker.observation import Observation, UnendedTraining
from ckptsync.worker.torn_saves import (
    FIRST_OF_ACCELERATE,
    MEGATRON_COMMON,
    STABLE,
    TRAINER_STATE,
    are_all_ranks_done,
    awaits_trainer_state,
    current_names,
    half_written,
    is_metadata,
    is_of_rank_0,
    is_random_state,
    lacking_file,
    possibly_lacking,
    rank_of,
    stale_metadata,
    two_saves,
    without_arguments,
)

# Hugging Face's Trainer has this file as long as it saves just in time
SENTINEL = "checkpoint-is-incomplete.txt"
V1 = "CHECKPOINT_COMPLETE"  # LLaMA-Factory v1, on the node of rank 0
_LIGHTNING_LAST = "meta.pt"
_PRIME_RL_LAST = "trainer/.metadata"
# what comes after the file of `observation.TRACKERS`: verl's states of data loaders, SkyRL's of its
# asynchronous trainer; Megatron-Bridge's configuration and tokenizer, and its model for others,
# which it writes while shards are saved in the background
_AFTER_TRACKER = re.compile(
    r"data_[^/]*\.pt|fully_async_state\.pt|run_config\.yaml|(tokenizer|hf)/.+", re.DOTALL
)
MARKED = 1.0  # seconds without a change, where every rank here has marked the save
SAVES = 3  # times the Trainer's usual, without another checkpoint, after which training has ended
DAY = 86400.0  # seconds after which it has ended if its usual interval is unknown
# seconds without a change, after which rotation may delete a save that has its last file
REST_OF_LAST_FILE = 0.4
_HINT = "if your script writes nothing else, push it (ckptsync push), or call ckptsync.mark_saved"


@dataclass(frozen=True, slots=True)
class Rule:
    """Seconds without a change after which a save is finished.

    ``quiet``: the trainer's last file is here.  ``unmarked``: nothing marks the end.  ``doubtful``:
    something speaks against it. ``doubtful`` 0: the caller knows that nobody writes any more
    (``ckptsync push``).
    """

    quiet: float = 10.0
    unmarked: float = 60.0
    doubtful: float = 600.0


@dataclass(frozen=True, slots=True)
class Judgement:
    """Whether a save is finished, and the reason, which is shown to people.

    ``remaining``: seconds until it is finished if nothing changes; None if waiting alone does not
    finish it.
    """

    finished: bool
    reason: str
    remaining: float | None = 0.0


def judge(observed: Observation, unchanged_for: float, rule: Rule) -> Judgement:
    """Return whether a checkpoint is finished, and why.

    Not, whatever the time, if a file is open or torn, or a crash or a training that goes on may
    have left it.  Else once ``unchanged_for``, the seconds without a change, has reached the time
    that `_required_rest` returns.
    """
    if refused := (
        _refusal(observed)
        or _torn(observed, rule)
        or _possibly_torn(observed, rule)
        or _replaced(observed, rule)
    ):
        return Judgement(finished=False, reason=refused, remaining=None)
    wait, reason = _required_rest(observed, rule)
    remaining = wait - unchanged_for
    if remaining > 0:
        return Judgement(
            finished=False,
            reason=f"{reason}; finished if nothing changes for {remaining:.0f} s",
            remaining=remaining,
        )
    return Judgement(finished=True, reason=reason)


def is_stable(observed: Observation, unchanged_for: float, rule: Rule, verdict: Judgement) -> bool:
    """Return whether these files count as a save if rotation deletes them before `judge` says so.

    The answer is noted beside the pin, and decides once the trainer has removed the checkpoint.
    True if the ``verdict`` is finished; False if it is gone, refused, torn, doubtful, or lacks a
    rank's file.  A save that perhaps lacks its last file counts after `Rule.doubtful` seconds: a
    user may know that it is whole, and it shows what later saves look like.  Others count after
    `REST_OF_LAST_FILE` seconds if their last file is here and rotation has not begun.
    """
    if verdict.finished:
        return True
    if (
        observed.is_gone
        or _refusal(observed)
        or _torn(observed, rule)
        or _find_doubt(observed, rule)
        or lacking_file(_current_names(observed))
    ):
        return False
    if _possibly_torn(observed, rule):
        return unchanged_for >= rule.doubtful
    if observed.was_emptied and not observed.is_new:
        return False  # rotation may have taken files of it before it was seen first
    return unchanged_for >= REST_OF_LAST_FILE and (
        bool(last_file(observed)) or _accelerate_is_done(observed)
    )


def is_lost(observed: Observation) -> bool:
    """Return whether a checkpoint that the trainer removed can never be known to be complete.

    It was not stable before, or lacks the Trainer's last file, and the hook has no commit of it.
    """
    return (
        observed.is_gone
        and observed.hook != "committed"
        and (not observed.stable or _awaits_trainer_state(observed))
    )


def may_be_alone(observed: Observation, rule: Rule) -> bool:
    """Return whether only another checkpoint with the same names could show that this is whole."""
    return bool(_possibly_torn(observed, rule))


# Reasons that no waiting removes.


def _refusal(observed: Observation) -> str:
    """Return why these files are no finished save, however long one waits; else empty.

    A save that the hook committed is refused only without files, or with one open for writing.
    """
    if not observed.files:
        return "holds no file yet"
    if observed.writing:
        return f"{observed.writing[0]} is open for writing"
    if observed.hook == "committed":
        return ""  # it was like this when all who write it were done
    if any(s.path.rpartition("/")[2] == SENTINEL for s in observed.partial):
        return f"the trainer says that it is not finished ({SENTINEL})"
    # other JSON may be anybody's
    torn = next(
        (name for name in observed.unclosed if name == TRAINER_STATE or not name.endswith(".json")),
        "",
    )
    if torn:
        return f"{torn} does not end as its format does: torn, or still being written"
    if is_lost(observed):
        return "the trainer deleted it before the worker knew that it was complete"
    return ""


def _torn(observed: Observation, rule: Rule) -> str:
    """Return why these files look like a save that a crash interrupted; empty if they do not.

    Empty, too, if ``rule.doubtful`` is 0 or the hook has committed or marked the save.
    """
    if not rule.doubtful or observed.hook in ("committed", "marked"):
        return ""
    if observed.family == "trainer" and (torn := half_written(observed.files, observed.unclosed)):
        return f"{torn} is only half written"
    if _awaits_trainer_state(observed):
        return f"no {TRAINER_STATE}, which the trainer writes last"
    if observed.hook == "killed" and (lacking := without_arguments(observed.files)):
        return lacking
    if observed.is_new or observed.stable:
        return ""
    return two_saves(
        observed.files, observed.state.mtime if observed.state is not None else None, rule.unmarked
    )


def _possibly_torn(observed: Observation, rule: Rule) -> str:
    """Return why either a crash or a script may have left these files; else empty.

    Empty if no last file is missing, a similar checkpoint is here, or ``rule.doubtful`` is 0: a
    user who knows the script decides.
    """
    if not rule.doubtful or observed.has_similar or _has_its_end(observed):
        return ""
    lacking = possibly_lacking(observed.files, observed.family)
    return (
        f"no {lacking}, which a trainer writes last, and no similar checkpoint to compare with:"
        f" {_HINT}"
        if lacking
        else ""
    )


def _replaced(observed: Observation, rule: Rule) -> str:
    """Return why this is no final model, if its training went on after it; else empty."""
    training = _unended_training(observed, rule)
    if training is None or not training.is_followed:
        return ""
    return f"not the final model: {_describe_training(training)}, and the training went on"


def _unended_training(observed: Observation, rule: Rule) -> UnendedTraining | None:
    """Return the training that may go on after this model was written; None if it has ended.

    None, too, if a hook says when it ends, or if ``rule`` does not wait for doubtful files.
    """
    is_known = not rule.doubtful or observed.hook not in ("", "training")
    return None if is_known else observed.unended


def _describe_training(training: UnendedTraining) -> str:
    """Return which checkpoint shows that the training goes on, as text."""
    return f"{training.checkpoint} before it is of step {training.step} of {training.last}"


def _awaits_trainer_state(observed: Observation) -> bool:
    """Return whether rank 0 of the Trainer writes here, and its last file is missing.

    False if the hook has committed or marked the save.
    """
    return (
        not _has_its_end(observed)
        and _is_of_trainer(observed)
        and awaits_trainer_state(observed.files, has_trainer=observed.has_trainer)
    )


def _has_its_end(observed: Observation) -> bool:
    """Return whether the trainer's last file is here, or the hook has marked the save as done."""
    return (
        observed.hook in ("committed", "marked")
        or observed.state is not None
        or any(f.path == V1 for f in observed.files)
    )


def _is_of_trainer(observed: Observation) -> bool:
    """Return whether rank 0 of Hugging Face's Trainer writes these files."""
    return observed.family == "trainer" and is_of_rank_0([f.path for f in observed.files])


# How long to wait, and why.


def _required_rest(observed: Observation, rule: Rule) -> tuple[float, str]:
    """Return how many seconds without a change finish a save, and why.

    0 if the hook committed it or the trainer removed it; `MARKED` if every rank marked it or was
    killed; ``rule.quiet`` if its last file is here and no rank lacks one; ``rule.doubtful`` where
    a sign says that it is being written; hours where it may not be the final model; else
    ``rule.unmarked``.
    """
    if observed.hook == "committed":
        return 0.0, "every rank that writes here has finished, by its hook"
    if observed.is_gone:
        return 0.0, "the trainer has removed it"
    if training := _unended_training(observed, rule):
        # with `push_to_hub` the Trainer copies each save to where the final model will lie
        next_save_due = max(rule.doubtful, SAVES * training.every) if training.every else DAY
        return next_save_due, f"perhaps not the final model: {_describe_training(training)}"
    if observed.hook == "training":
        return rule.doubtful, "the hook has not reported yet that this training finished the save"
    if doubt := _find_doubt(observed, rule):
        return rule.doubtful, doubt
    if observed.hook in ("marked", "killed"):
        return (
            min(MARKED, rule.quiet),
            "every rank that writes here has finished, by its hook, or its process has ended",
        )
    if observed.unclosed:  # somebody's own format under that name, or a crash
        return rule.unmarked, f"{observed.unclosed[0]} is not complete JSON"
    last, lacking = last_file(observed), lacking_file(_current_names(observed))
    if last and not lacking:
        return rule.quiet, last
    if _is_of_trainer(observed) and observed.state is None:
        return rule.doubtful, f"no {TRAINER_STATE} yet"
    return (
        rule.unmarked,
        f"{lacking} is missing" if lacking else "no file in it marks the end of a save",
    )


def _find_doubt(observed: Observation, rule: Rule) -> str:
    """Return a sign that the save is still being written; empty without one.

    Signs: an unfinished file, a last file or metadata older than others, or a trainer state that is
    torn or of another step than the directory.  Times are ignored for a new save.  A crash may also
    leave such files, so they count as finished after `Rule.doubtful` seconds.
    """
    state = observed.state
    # a partial file older than the trainer's last file is of an earlier save that was killed
    ended = state.mtime if state is not None and state.step is not None else 0
    unfinished = next((p.path for p in observed.partial if p.mtime >= ended), "")
    if unfinished:
        return f"{unfinished} is unfinished"
    if not observed.is_new and (stale := stale_metadata(observed.files, rule.unmarked)):
        return f"{stale} is older than its shards: written over?"
    if state is not None and state.step is None:
        return f"{TRAINER_STATE} is not whole"
    if state is not None and observed.step is not None and state.step != observed.step:
        return f"{TRAINER_STATE} says step {state.step}, the directory says {observed.step}"
    last_name = TRAINER_STATE if state is not None else _PRIME_RL_LAST
    last = next((f for f in observed.files if f.path == last_name), None)
    newest = max(observed.files, key=lambda f: f.mtime, default=None)
    if (
        newest is not None
        and last is not None
        and not observed.is_new
        and newest.mtime - last.mtime > rule.unmarked * 1e9
    ):
        # callbacks edit a checkpoint seconds after the trainer is done with it; a resumed run
        # begins to write over it much later
        return f"{newest.path} is much newer than {last_name}: written over?"
    return ""


def _current_names(observed: Observation) -> list[str]:
    """Return the names of a save's files, without random states of the save before."""
    return [f.path for f in observed.files] if observed.is_new else current_names(observed.files)


# What each family of trainers writes last.


def last_file(observed: Observation) -> str:
    """Return why the save counts as finished, by its last file; empty if nothing shows it.

    Empty if a ``.metadata`` is older than its shards.  A later checkpoint, or another node's part,
    shows it, too, but not where rank 0 of the Trainer writes: that the training goes on proves
    nothing of a save that a crash cut short.
    """
    if not observed.is_new and stale_metadata(observed.files):
        return ""
    if not _is_of_trainer(observed):
        if observed.later:
            return "a later checkpoint has been written"
        if observed.other_part:
            return "another node has stored its part of the same save"
    last = _LAST.get(observed.family)
    return last(observed) if last else ""


def _last_of_trainer(observed: Observation) -> str:
    """Return why a save of Hugging Face's Trainer, or LLaMA-Factory v1, is finished; else empty.

    A later checkpoint shows it if ``trainer_state.json`` is whole, although not the newest file.
    """
    if _is_newest(V1, observed):
        return f"{V1} is the newest of its files"
    if observed.state is None or observed.state.step is None:
        return ""
    if _is_newest(TRAINER_STATE, observed):
        return (
            f"{TRAINER_STATE} {'has appeared' if observed.is_new else 'is the newest of its files'}"
        )
    return "a later checkpoint has been written" if observed.later else ""


def _last_of_lightning(observed: Observation) -> str:
    """Return why Lightning's checkpoint is finished (one file, or newest meta.pt); else empty."""
    if len(observed.files) == 1 and observed.files[0].path.endswith(".ckpt"):
        return "it is one file, and the trainer renames it when it is complete"
    return (
        f"{_LIGHTNING_LAST} is the newest of its files"
        if _is_newest(_LIGHTNING_LAST, observed)
        else ""
    )


def _last_of_tracked(observed: Observation) -> str:
    """Return why a checkpoint is finished whose trainer writes the step beside it; else empty.

    It writes the step when all but `_AFTER_TRACKER` is written: the step there is this one or
    greater, and none of the other files is newer.
    """
    marker = observed.marker
    if (
        marker is None
        or marker.step is None
        or observed.step is None
        or marker.step < observed.step
    ):
        return ""
    written = (f.mtime for f in observed.files if not _AFTER_TRACKER.fullmatch(f.path))
    return (
        f"the trainer says that step {marker.step} is written"
        if all(mtime <= marker.mtime for mtime in written)
        else ""
    )


def _last_of_dcp(observed: Observation) -> str:
    """Return why a distributed checkpoint of torch is finished; else empty.

    Its ``.metadata`` is enough: `last_file` has compared the times.  Megatron (its rank 0 writes
    ``common.pt``) adds files after it, so there the trainer's step decides.
    """
    names = [f.path for f in observed.files]
    if not any(map(is_metadata, names)):
        return ""
    if observed.marker is not None or MEGATRON_COMMON in names:
        return _last_of_tracked(observed)
    return ".metadata is newer than its shards"


def _last_of_prime_rl(observed: Observation) -> str:
    """Return why a checkpoint of prime-rl is finished: its trainer's, or its weights; else empty.

    The trainer writes ``.metadata`` last, and later than its orchestrator as a rule; the process
    that writes whole weights, ``STABLE``.
    """
    last = next((name for name in (STABLE, _PRIME_RL_LAST) if _is_newest(name, observed)), "")
    return f"{last} is the newest of its files" if last else ""


_LAST: Mapping[Family, Callable[[Observation], str]] = {
    "trainer": _last_of_trainer,  # trainer_state.json, or CHECKPOINT_COMPLETE
    "dcp": _last_of_dcp,  # .metadata, or as verl's
    "lightning": _last_of_lightning,  # the one file, or meta.pt
    "verl": _last_of_tracked,  # a file of `TRACKERS`, beside the checkpoints
    "prime-rl": _last_of_prime_rl,  # .metadata, or STABLE
}


def _is_newest(name: str, observed: Observation) -> bool:
    """Return whether a file of that name is here and no file but random states is newer.

    In a new save (``is_new``) its presence alone decides.
    """
    mtime = next((f.mtime for f in observed.files if f.path == name), None)
    return mtime is not None and (
        observed.is_new
        or all(f.mtime <= mtime for f in observed.files if not is_random_state(f.path))
    )


def _accelerate_is_done(observed: Observation) -> bool:
    """Return whether accelerate's ranks have all left random states, the first one after the model.

    No file without a rank may be newer than the first rank's state.  Objects that a script has
    registered are excepted: they come later, so this is no proof that the save is finished.
    """
    first = next((f for f in observed.files if f.path == FIRST_OF_ACCELERATE), None)
    before = (
        f
        for f in observed.files
        if rank_of(f.path) is None and not f.path.startswith("custom_checkpoint_")
    )
    return (
        first is not None
        and are_all_ranks_done(_current_names(observed))
        and all(f.mtime <= first.mtime for f in before)
    )
