"""Manifests that others name and that are gone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptsync.errors import Corrupt, NotFound
from ckptsync.records.io import Record, encode, find_missing_manifests, record_name
from ckptsync.records.model_record import ModelRecord
from ckptsync.records.report import Report
from ckptsync.records.save_decisions import Tombstone
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


WITHDRAWN = replace(STONE, n=1, stage="withdrawn")
AGAIN = replace(ONE, version="2", supersedes=(name(ONE),))
HOME = replace(ONE, location=f"{LOCATION}~abcd", supersedes=(name(ONE),))
HOME_STONE = replace(STONE, location=HOME.location, manifests=(name(HOME),))
NINE = "checkpoint-9"
NO_MANIFESTS = ("run/elsewhere", f"{RUN}/.ckptsync/{LOCATION}/manifest-x")
FOREIGN = replace(REPORT, manifests=(name(HOME), *NO_MANIFESTS))


@pytest.mark.parametrize(
    ("records", "missed"),
    [
        pytest.param((ONE, OTHER, SEAL, REPORT), (), id="all are there"),
        pytest.param((ONE,), (), id="nobody names any"),
        pytest.param((), (), id="nothing is there"),
        pytest.param((OTHER, SEAL), (ONE,), id="a model record names it"),
        pytest.param((OTHER, REPORT), (ONE,), id="a report names it"),
        pytest.param((SEAL, REPORT), (ONE, OTHER), id="no manifest is left"),
        pytest.param((REPORT, STONE), (), id="its save is given up"),
        pytest.param((REPORT, STONE, WITHDRAWN), (ONE,), id="its save is kept after all"),
        pytest.param((REPORT, replace(STONE, scope="shards")), (ONE,), id="only shards go"),
        pytest.param((REPORT, AGAIN), (), id="its node has replaced it"),
        pytest.param((REPORT, replace(AGAIN, node="n1")), (ONE,), id="no other node can"),
        pytest.param((REPORT, HOME_STONE), (), id="it went with the location it had moved to"),
        pytest.param(
            (REPORT, replace(HOME_STONE, ended={"n1": 1})), (ONE,), id="another node's went there"
        ),
        pytest.param((FOREIGN,), (), id="a name of another location proves nothing"),
        pytest.param(
            (REPORT, replace(AGAIN, checkpoint=NINE, location=NINE)),
            (ONE,),
            id="a manifest of another checkpoint excuses nothing",
        ),
        pytest.param(
            (REPORT, replace(STONE, checkpoint=NINE, location=NINE)),
            (ONE,),
            id="a tombstone of another checkpoint excuses nothing",
        ),
    ],
)
def test_what_others_name_and_nothing_excuses_is_missed(
    records: tuple[Record, ...], missed: tuple[Record, ...]
) -> None:
    assert gone(*records) == sorted(map(name, missed))


def test_what_is_there_and_cannot_be_read_is_not_gone() -> None:
    assert gone(OTHER, SEAL, listed=(ONE,)) == []


def test_what_a_listing_had_not_yet_is_asked_for() -> None:
    assert find_missing_manifests({name(SEAL): SEAL}, (name(SEAL), name(OTHER)), lambda _: 7) == {}


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
