"""Each kind of damage is found in a real store, and the campaign sees what is not found.

`make flips` tries ten thousand.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.campaigns import flips
from tests.campaigns.flips import OTHERS, Harm, Patient, flip, judged, page, suffered


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Patient:
    return Patient(str(tmp_path_factory.mktemp("flips") / "store"), {})


def harms(patient: Patient) -> Iterator[Harm]:
    chance = random.Random(1)
    for make in (flip, page, *OTHERS):
        yield from (make(patient, chance) for _ in range(2))


def test_all_is_found_and_nothing_made_up(patient: Patient) -> None:
    assert [
        (harm.kind if harm else "", text) for harm, text in suffered(patient, harms(patient))
    ] == []


def test_both_shards_and_the_consolidated_model_are_damaged(patient: Patient) -> None:
    assert {"consolidated" in name for name in patient.good} == {True, False}
    chance = random.Random(2)
    hit = {name for _ in range(60) for name in flip(patient, chance).content}
    assert hit >= {name for name, data in patient.good.items() if len(data) > 100_000}


def test_the_campaign_fails_where_damage_is_not_found_or_is_made_up(patient: Patient) -> None:
    healthy = patient.verified()
    harm = flip(patient, random.Random(3))
    assert any("missed" in text for text in judged(harm, *healthy))
    patient.suffer(harm)
    ill = patient.verified()
    patient.recover(harm)
    assert any("made up" in text for text in judged(None, *ill))
    elsewhere = Harm("flip", harm.content, {name: len(patient.good[name]) for name in harm.content})
    assert any("is in none of" in text for text in judged(elsewhere, *ill))


def test_as_a_program_it_says_what_it_did(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        flips.main(["--flips", "1", "--pages", "1", "--others", "1", "--clean", "1", "--seed", "5"])
        == 0
    )
    assert "1 clean: 0 wrong" in capsys.readouterr().out
