"""A verifier's report about a location: what was read, and its findings, the worst first.

A verifier changes none of a store's files. Its report is the request for repair: a location with an
unanswered DAMAGED report has the status DAMAGED until a later report finds the damage gone.
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
    """Return ``value`` as a level; raise ValueError, with what to do instead, if it is none."""
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
    """What one level read: ``files`` of ``of_files``, and ``size`` of ``of_size`` bytes.

    They are fewer if a sample was read. ``tensors``: how many were parsed or loaded; 0 at levels
    that count none.
    """

    level: Level
    files: Count
    size: Count
    of_files: Count
    of_size: Count
    tensors: Count = 0


@dataclass(frozen=True, slots=True)
class Report:
    """One verification of a location; its number is 1 + the highest at its time.

    A report without damage takes its number before it reads, a damaged one after; under one number
    the worse one counts. ``level``: the highest that was reached for all files. ``read`` counts the
    bytes that were read, ``readings`` says what each level read, also above ``level``. ``when`` is
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
        """Count level `model`, of reports of older programs, as `load`."""
        if self.level == "model":
            object.__setattr__(self, "level", LEVELS[-1])
