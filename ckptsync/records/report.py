"""A verifier's report: findings, worst first.

A report that says DAMAGED is the request for repair.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ckptsync.records.store_paths import FORMAT
from ckptsync.typed_json import Count, FormatNumber, Seconds

Level = Literal["stat", "digest", "parse", "load", "model"]
"""``model`` is of reports that ckptsync no longer writes; a `Report` counts it as load."""
LEVELS: tuple[Level, ...] = ("stat", "digest", "parse", "load")
"""What can be asked for, each including those before it."""
Verdict = Literal["ok", "damaged", "incomplete"]
FindingKind = Literal["missing", "size", "digest", "parse", "load", "model", "nonfinite", "note"]
DAMAGE: frozenset[FindingKind] = frozenset({"missing", "size", "digest", "parse", "load", "model"})
"""The kinds of findings that are damage; the others are worth knowing."""
OF_BYTES: frozenset[FindingKind] = frozenset({"missing", "size", "digest"})
"""Damage that other bytes than the recorded ones make; a file may have had the other kinds of
damage before it was stored.
"""


def checked_level(value: object) -> Level:
    """Return the level that somebody asks for.  Raises ValueError, with what to do instead."""
    for level in LEVELS:
        if value == level:
            return level
    if value == "model":
        why = (
            "level model is no more: load is the highest; to run the model's class, give a program"
        )
        raise ValueError(f"{why} of your own what `ckptsync pull --consolidated` downloads")
    raise ValueError(f"{value!r} is not one of {', '.join(LEVELS)}")


@dataclass(frozen=True, slots=True)
class VerifyFinding:
    """One thing that is wrong, or worth knowing (``nonfinite`` and ``note`` damage nothing).

    ``name`` is relative to the run (``checkpoint-4/model.safetensors``,
    ``consolidated/checkpoint-4/config.json``). ``ranges`` are the byte ranges of the blocks that
    differ; ``tensors`` those they overlap.
    """

    kind: FindingKind
    name: str
    detail: str
    ranges: tuple[tuple[Count, Count], ...] = ()
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Reading:
    """What one level looked at: ``files`` of ``of_files`` and ``size`` of ``of_size`` bytes.

    Fewer where only a sample was read.

    ``tensors``: those that were parsed, loaded, or found in the model; 0 at the levels that know of
    none.
    """

    level: Level
    files: Count
    size: Count
    of_files: Count
    of_size: Count
    tensors: Count = 0


@dataclass(frozen=True, slots=True)
class Report:
    """Numbered: highest seen plus one; on a tie the worse one counts.

    A report without damage has its number from before its reading, a damaged one from after it.

    ``level``: the highest that was reached for all of it.  ``read`` counts the bytes that were
    really read, ``readings`` says what each level looked at, also beyond ``level``.  ``when`` is
    seconds since the epoch on the head's clock, for people only.
    """

    run: str
    checkpoint: str
    location: str
    n: Count
    level: Level
    verdict: Verdict
    manifests: tuple[str, ...]
    model_record: str
    read: Count
    findings: tuple[VerifyFinding, ...]
    when: Seconds = 0.0
    readings: tuple[Reading, ...] = ()
    format: FormatNumber = FORMAT

    def __post_init__(self) -> None:
        """Count level model of an old report as the one below it."""
        if self.level == "model":
            object.__setattr__(self, "level", LEVELS[-1])
