"""What a checkpoint's files say for its being finished, and what against it.  Pure."""

from __future__ import annotations

import re

from ckptsync.worker.cut_short import TRAINER_STATE, is_metadata, is_of_rank_0, stale_metadata
from ckptsync.worker.evenness import current, is_random_state, lacking
from ckptsync.worker.observed import Evidence, Rule

V1 = "CHECKPOINT_COMPLETE"  # LLaMA-Factory v1, on the node of rank 0
_LIGHTNING_LAST = "meta.pt"
_LOADER = re.compile(r"data_[0-9]+\.pt")  # verl's SFT ranks leave their data loader's state after its barrier, beside rank 0's word


def proof(evidence: Evidence) -> str:
    """What speaks for its being finished."""
    if not evidence.fresh and stale_metadata(evidence.files):
        return ""
    if is_of_trainer(evidence):
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
    written = (f.mtime for f in files if not _LOADER.fullmatch(f.path))
    return f"the trainer says that step {marker.step} is written" if all(at <= marker.mtime for at in written) else ""


def _proof_of_trainer(evidence: Evidence) -> str:
    """Where rank 0 writes, its last file tells: that training goes on proves nothing of a save that a crash cut short."""
    if _is_newest(V1, evidence):
        return f"{V1} is the newest of its files"
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


def is_of_trainer(evidence: Evidence) -> bool:
    """Whether rank 0 of Hugging Face's Trainer, or LLaMA-Factory's, writes here: accelerate's scripts use the same names."""
    return evidence.family == "trainer" and is_of_rank_0([f.path for f in evidence.files])
