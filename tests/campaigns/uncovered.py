"""Bytes that nothing covers on a bare directory, each with the reason; ``docs/formats.md`` names the same.

The manifest of a store covers them all.  What is not in this table has to be seen.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tests.campaigns.damaged import Outcome
from tests.campaigns.damaging import Damage, Kind


@dataclass(frozen=True, slots=True)
class Uncovered:
    """Damage of these kinds to files of such names gives such an outcome, and cannot be told."""

    why: str
    kinds: tuple[Kind, ...]
    file: re.Pattern[str]
    outcome: str = "SILENT"


ANY: tuple[Kind, ...] = ("delete", "cut", "grow", "flip", "older", "newer", "swap")
TABLE = (
    Uncovered(
        "configuration and tokenizer are copied as they are", ANY, re.compile(r".*(\.json|\.jinja|\.model|\.txt|\.py)"), "beside"
    ),
    Uncovered("safetensors has no checksum, of its header or its data", ("flip",), re.compile(r".*\.safetensors")),
    Uncovered("the files of a whole model may have been fetched one by one", ("older", "newer"), re.compile(r".*\.safetensors")),
    Uncovered("the shards of two ranks do not say whose they are", ("swap",), re.compile(r".*\.distcp")),
)
LONE = "a lone shard may be older than its metadata, which may have been touched"
STAGE_3 = "at stage 3 the files of two ranks do not say whose they are"
LEGACY = "torch's legacy container has no checksum"


def reason(damage: Damage, outcome: Outcome, files: Mapping[str, bytes]) -> str | None:
    """Why this could not be seen; ``None`` if it should have been."""
    for row in TABLE:
        if outcome.word == row.outcome and damage.kind in row.kinds and row.file.fullmatch(damage.file):
            return row.why
    if damage.kind == "older" and damage.file.endswith(".distcp") and sum(name.endswith(".distcp") for name in files) == 1:
        return LONE
    folder, _, base = damage.file.rpartition("/")
    if damage.kind == "swap" and base.endswith("_states.pt") and f"{folder}/mp_rank_00_model_states.pt" not in files:
        return STAGE_3
    is_legacy = damage.file.endswith((".pt", ".bin", ".pth")) and files[damage.file][:2] == b"\x80\x02"
    return LEGACY if is_legacy and damage.kind == "flip" else None
