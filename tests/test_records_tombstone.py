"""Which format number a tombstone must have, so that an older program does not take it for the end of a place."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptsync.errors import Corrupt
from ckptsync.records.coding import decode, encode, record_name
from ckptsync.records.tombstone import Scope, Stage, Tombstone, least_format

STONE = Tombstone("run", "c-1", "c-1", 0, ("run/.ckptsync/c-1/manifest-a-0-0123456789abcdef.json",), "old")


@pytest.mark.parametrize(
    ("scope", "stage", "least"),
    [("place", "said", 1), ("place", "begun", 1), ("place", "back", 2), ("shards", "said", 2), ("shards", "done", 2)],
)
def test_what_an_older_program_would_misread_has_a_newer_format(scope: Scope, stage: Stage, least: int) -> None:
    assert least_format(scope, stage) == least


def test_a_tombstone_with_too_low_a_format_is_corrupt() -> None:
    stone = replace(STONE, scope="shards")
    data = encode(stone)
    with pytest.raises(Corrupt, match="not what a tombstone of format 1 says"):
        decode(record_name(stone, data), data, Tombstone)
