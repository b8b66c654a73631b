"""Manifests that others name and that are gone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptsync.errors import Corrupt, NotFound
from ckptsync.records.io import Record, encode, find_missing_manifests, record_name
from ckptsync.records.model_record import ModelRecord
from ckptsync.records.report import Report
from ckptsync.records.tombstone_keep_join import Tombstone
from tests.support.verified_stores import LOCATION, RUN, WHOLE, manifest


def name(record: Record) -> str:
    return record_name(record, encode(record))


ONE = manifest(WHOLE)
OTHER = manifest(WHOLE, "n1")
SEAL = ModelRecord(RUN, LOCATION, LOCATION, 0, (name(ONE), name(OTHER)), {}, (), ())
REPORT = Report(RUN, LOCATION, LOCATION, 0, "digest", "ok", (name(ONE),), "", 0, ())
STONE = Tombstone(RUN, LOCATION, LOCATION, 0, (name(ONE),), "old", ended={"n0": 1})


def gone(*records: Record, listed: tuple[Record, ...] = ()) -> list[str]:
    """Names of what is missed.  ``listed``: what is there besides, and cannot be read."""
    there = {name(r): r for r in records}

    def size(wanted: str) -> int:
        raise NotFound(wanted)

    return [*find_missing_manifests(there, {*there, *map(name, listed)}, size)]


def test_nothing_is_missed_where_all_is_there() -> None:
    assert gone(ONE, OTHER, SEAL, REPORT) == []
    assert gone(ONE) == []
    assert gone() == []


@pytest.mark.parametrize("by", [SEAL, REPORT])
def test_what_a_model_record_or_a_report_names_is_missed(by: Record) -> None:
    assert gone(OTHER, by) == [name(ONE)]


def test_all_are_missed_where_no_manifest_is_left() -> None:
    assert gone(SEAL, REPORT) == sorted([name(ONE), name(OTHER)])


def test_what_is_there_and_cannot_be_read_is_not_gone() -> None:
    assert gone(OTHER, SEAL, listed=(ONE,)) == []


def test_what_a_listing_had_not_yet_is_asked_for() -> None:
    assert find_missing_manifests({name(SEAL): SEAL}, (name(SEAL), name(OTHER)), lambda _: 7) == {}


def test_what_was_let_go_is_not_missed_before_that_was_taken_back() -> None:
    assert gone(REPORT, STONE) == []
    assert gone(REPORT, STONE, replace(STONE, n=1, stage="withdrawn")) == [name(ONE)]


def test_shards_that_were_let_go_keep_their_manifest() -> None:
    assert gone(REPORT, replace(STONE, scope="shards")) == [name(ONE)]


def test_what_its_own_node_has_replaced_is_not_missed_and_nobody_else_can() -> None:
    again = replace(ONE, version="2", supersedes=(name(ONE),))
    assert gone(REPORT, again) == []
    assert gone(REPORT, replace(again, node="n1")) == [name(ONE)]


def test_what_went_with_the_location_that_it_had_moved_to_is_not_missed() -> None:
    moved = f"{LOCATION}~abcd"
    home = replace(ONE, location=moved, supersedes=(name(ONE),))
    assert (
        gone(REPORT, Tombstone(RUN, LOCATION, moved, 0, (name(home),), "old", ended={"n0": 1}))
        == []
    )
    assert gone(
        REPORT, Tombstone(RUN, LOCATION, moved, 0, (name(home),), "old", ended={"n1": 1})
    ) == [name(ONE)]


def test_a_name_of_another_location_proves_nothing() -> None:
    foreign = name(replace(ONE, location=f"{LOCATION}~abcd"))
    assert (
        gone(
            replace(
                REPORT,
                manifests=(foreign, "run/elsewhere", f"{RUN}/.ckptsync/{LOCATION}/manifest-x"),
            )
        )
        == []
    )


def test_the_error_says_who_is_gone_and_who_names_it() -> None:
    def size(wanted: str) -> int:
        raise NotFound(wanted)

    (error,) = find_missing_manifests(
        {name(SEAL): replace(SEAL, manifests=(name(ONE),))}, {name(SEAL)}, size
    ).values()
    assert isinstance(error, Corrupt)
    seal = name(SEAL).rpartition("/")[2]
    assert str(error) == f"{name(ONE)}: missing, although {seal} refers to it"
    assert "writes it again" in error.hint


def test_only_its_own_checkpoint_excuses_it() -> None:
    elsewhere = replace(
        ONE, checkpoint="checkpoint-9", location="checkpoint-9", supersedes=(name(ONE),)
    )
    assert gone(REPORT, elsewhere) == [name(ONE)]
    stone = Tombstone(RUN, "checkpoint-9", "checkpoint-9", 0, (name(ONE),), "old", ended={"n0": 1})
    assert gone(REPORT, stone) == [name(ONE)]
