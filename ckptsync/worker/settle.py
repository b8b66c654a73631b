"""Is a checkpoint finished?  Pure: what was seen and for how long, what the trainer's files say, and the time.

Presence proves nothing: ZeRO-3 writes every shard twice, ``latest`` comes before other ranks' shards, and a resumed run writes
over an old checkpoint whose ``trainer_state.json`` is valid all the while.  So times within the checkpoint are compared with each
other (one clock wrote them all), and quiet is measured by watching for it (our clock), never one against the other.

What the trainer has removed holds still for ever, whole or not: it counts only if it was seen whole, and at rest, while it was there.
"""

from __future__ import annotations

from ckptsync.worker.cut_short import TRAINER_STATE, awaits_its_end, half_written, may_be_cut_short, two_saves, without_arguments
from ckptsync.worker.observed import Evidence, Rule, Sighting, Verdict
from ckptsync.worker.proof import V1, behind, doubt, is_of_trainer, proof

SENTINEL = "checkpoint-is-incomplete.txt"
MARKED = 1.0  # seconds, where every rank here has said that it is done but nobody pinned what there is
_SAY_SO = "if your script writes no more than this, push it (ckptsync push), or let it call ckptsync.mark_saved"


def judge(evidence: Evidence, sighting: Sighting, now: float, rule: Rule) -> Verdict:
    """Whether this is all of one save, for ever."""
    refused = refusal(evidence) or cut_short(evidence, rule) or alone(evidence, rule)
    if refused:
        return Verdict(finished=False, reason=refused, left=None)
    wait, reason = _wait(evidence, rule)
    left = wait - (now - sighting.since)
    if left > 0:
        return Verdict(finished=False, reason=f"{reason}; finished if nothing changes for {left:.0f} s", left=left)
    return Verdict(finished=True, reason=reason)


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
    return not _is_ended(evidence) and is_of_trainer(evidence) and awaits_its_end(evidence.files, awaited=evidence.awaited)


def _is_ended(evidence: Evidence) -> bool:
    """Whether the trainer's last word is here, or the hook's."""
    is_said = evidence.hook in ("committed", "marked") or evidence.state is not None
    return is_said or any(f.path == V1 for f in evidence.files)


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
    if is_of_trainer(evidence) and evidence.state is None:
        return rule.doubtful, f"no {TRAINER_STATE} yet"
    return rule.unmarked, f"{missing} is missing" if missing else "nothing in it says that it is finished"
