"""What the verifier says: findings, worst first.  A report that says DAMAGED is the request for repair."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FORMAT = 1
Level = Literal["stat", "digest", "parse", "load"]
LEVELS: tuple[Level, ...] = ("stat", "digest", "parse", "load")
Verdict = Literal["ok", "damaged", "arriving"]
Kind = Literal["missing", "size", "digest", "parse", "load", "nonfinite", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, or worth knowing (``nonfinite`` and ``note`` damage nothing).

    ``name`` is relative to the run (``checkpoint-4/model.safetensors``, ``consolidated/checkpoint-4/config.json``).
    ``ranges`` are the byte ranges of the blocks that differ; ``tensors`` those they overlap.
    """

    kind: Kind
    name: str
    detail: str
    ranges: tuple[tuple[int, int], ...] = ()
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """Numbered: highest seen plus one; on a tie the worse one counts.

    ``read`` counts the bytes that were really read.  ``when`` is seconds since the epoch on the head's clock, for people only.
    """

    run: str
    checkpoint: str
    place: str
    n: int
    level: Level
    verdict: Verdict
    manifests: tuple[str, ...]
    seal: str
    read: int
    findings: tuple[Finding, ...]
    when: float = 0.0
    format: int = FORMAT
