"""Bytes that nothing covers on a bare directory, each with the reason.

``docs/formats.md`` names the same.

The manifest of a store covers them all.  What is not in this table has to be seen.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.campaigns.damaged import Damage, Kind, Outcome


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
        "configuration and tokenizer are copied as they are",
        ANY,
        re.compile(r".*(\.json|\.jinja|\.model|\.txt|\.py)"),
        "beside",
    ),
    Uncovered(
        "safetensors has no checksum, of its header or its data",
        ("flip",),
        re.compile(r".*\.safetensors"),
    ),
    Uncovered(
        "the shards of two ranks do not say whose they are", ("swap",), re.compile(r".*\.distcp")
    ),
    Uncovered(
        "a pipeline's layers do not say which they are",
        ("swap",),
        re.compile(r".*layer_\d+.*-model_states\.pt"),
    ),
)
LONE = "a file that is alone has none to be compared with by its time"
CONVERTED = "a conversion to the universal format keeps the time of the model file"
STAGE_3 = "at stage 3 the files of two ranks do not say whose they are"
TENSOR = "the files of tensor-parallel ranks do not say whose they are"
LEGACY = "torch's legacy container has no checksum"


def reason(damage: Damage, outcome: Outcome, files: Mapping[str, bytes]) -> str | None:
    """Why this could not be seen; ``None`` if it should have been."""
    for row in TABLE:
        if (
            outcome.word == row.outcome
            and damage.kind in row.kinds
            and row.file.fullmatch(damage.file)
        ):
            return row.why
    if damage.kind in ("older", "newer"):
        return _undated(damage.file, files)
    if damage.kind == "swap" and damage.file.endswith("_states.pt"):
        return _swapped(sorted(damage.content), files)
    is_legacy = (
        damage.file.endswith((".pt", ".bin", ".pth")) and files[damage.file][:2] == b"\x80\x02"
    )
    return LEGACY if is_legacy and damage.kind == "flip" else None


def _undated(file: str, files: Mapping[str, bytes]) -> str | None:
    folder, _, base = file.rpartition("/")
    suffix = base.rpartition(".")[2]
    if any(name.startswith(f"{folder}/zero/") for name in files):
        return CONVERTED
    return (
        LONE
        if sum(name.rpartition("/")[0] == folder and name.endswith(suffix) for name in files) == 1
        else None
    )


def _swapped(pair: Sequence[str], files: Mapping[str, bytes]) -> str | None:
    model_parallel = {re.sub(r".*mp_rank_(\d+)_.*", r"\1", name) for name in pair}
    if len(model_parallel) > 1:
        return TENSOR
    return None if f"{pair[0].rpartition('/')[0]}/mp_rank_00_model_states.pt" in files else STAGE_3
