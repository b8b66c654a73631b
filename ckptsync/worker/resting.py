"""Was a checkpoint whole, and at rest, while the trainer's directory was there?  Pure.

What rotation takes before it could be finished holds still for ever, whole or not: nothing that is seen afterwards tells which.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

from ckptsync.walk import Stat
from ckptsync.worker.cut_short import BY_ACCELERATE
from ckptsync.worker.evenness import has_every_random_state, rank
from ckptsync.worker.observed import Evidence, Rule, Sighting
from ckptsync.worker.proof import behind, doubt, names, proof
from ckptsync.worker.settle import alone, cut_short, judge, refusal

AT_REST = 0.4  # seconds between two looks that see the same, what proves that it is whole among it
AT_REST_UNPROVEN = 2.0  # the same where only the files of all ranks speak for it, or the times of directories against it
AGE = 1.0  # seconds by which, on the file system's clock, one look finds nothing written, added or taken away
_REGISTERED = re.compile(r"custom_checkpoint_[0-9]+\.pkl")


def at_rest(evidence: Evidence, sighting: Sighting, now: float, rule: Rule) -> int:
    """The `mark` of its files, if what was seen is a whole save and nothing more is to come; else 0.

    To be remembered beside the pin, since it is what counts once rotation has taken the rest (`was_at_rest`).  Sooner than finished, and
    as good: whatever a trainer did to the checkpoint after this look would have to fall, with all of its next save, before the next one.
    """
    if judge(evidence, sighting, now, rule).finished:
        return mark(evidence.files)
    if evidence.gone or refusal(evidence) or cut_short(evidence, rule) or doubt(evidence, rule) or behind(evidence):
        return 0
    if alone(
        evidence, rule
    ):  # whole or not, nobody writes to it any more: it is kept for whoever knows, and tells of others like it
        return mark(evidence.files) if now - sighting.since >= rule.doubtful else 0
    newest = max(f.mtime for f in evidence.files)
    is_emptied = (
        evidence.folders - newest > AGE * 1e9
    )  # something was taken out after the last file was written, or a clock was set
    if is_emptied and not evidence.fresh:
        return 0  # rotation, half way; what we saw begin would have been seen before that
    proven, seen_for = bool(proof(evidence)), now - sighting.since
    if not proven and not _is_done_by_ranks(evidence):
        return 0
    is_old = proven and evidence.folders > 0 and evidence.pulse - max(newest, evidence.folders) >= AGE * 1e9
    return mark(evidence.files) if is_old or seen_for >= (AT_REST if proven and not is_emptied else AT_REST_UNPROVEN) else 0


def was_at_rest(stable: int, files: Iterable[Stat]) -> bool:
    """Whether what `at_rest` once said holds for these files: none was added since, taken away, or written again."""
    return stable > 0 and mark(files) == stable


def mark(files: Iterable[Stat]) -> int:
    """One positive number for these names, sizes and times: a copy of a file is as good as the file."""
    told = "\n".join(f"{f.path}\0{f.size}\0{f.mtime}" for f in sorted(files))
    return int.from_bytes(hashlib.blake2b(told.encode("utf-8", "surrogateescape"), digest_size=7).digest(), "big") + 1


def _is_done_by_ranks(evidence: Evidence) -> bool:
    """Whether accelerate's ranks, the first among them, have left the file that each writes last: it prunes what nothing proves.

    Only what a script registered itself comes after it.
    """
    there = names(evidence)
    first = next((f for f in evidence.files if BY_ACCELERATE.fullmatch(f.path) and rank(f.path) == 0), None)
    before = (f for f in evidence.files if rank(f.path) is None and not _REGISTERED.fullmatch(f.path))
    return first is not None and has_every_random_state(there) and all(f.mtime <= first.mtime for f in before)
