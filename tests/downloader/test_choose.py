"""A run means its newest VERIFIED checkpoint; a name means the newest save of that name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptsync.catalogue.location_summary import Summary
from ckptsync.downloader.choose import LATEST, choose, split
from ckptsync.errors import CkptsyncError, ConfigError, Corrupt, Incomplete
from ckptsync.records.location_status import Status

PLAIN = Summary(
    *("run", "checkpoint-1", "checkpoint-1", 1, "VERIFIED"),
    model_record="model",
    ended=1.0,
    consolidated=True,
)


def save(
    step: int, word: Status = "VERIFIED", ended: float = 0.0, location: str = "", **more: object
) -> Summary:
    name = f"checkpoint-{step}"
    found = replace(
        PLAIN,
        checkpoint=name,
        location=location or name,
        step=step,
        status=word,
        ended=ended or step,
        first_arrival=ended or step,
    )
    return replace(found, **more)  # type: ignore[arg-type]


def test_a_run_means_its_newest_verified_checkpoint_and_newer_ones_are_named() -> None:
    saves = [
        save(1),
        save(2),
        save(3, "CONSOLIDATED"),
        save(4, "INCOMPLETE", evidence=("x: no node has uploaded it",)),
    ]
    found = choose(saves, "run", LATEST, "verified")
    assert found.summary.location == "checkpoint-2"
    assert found.notes == (
        "run/checkpoint-3 is newer, and was not chosen: CONSOLIDATED, not yet verified",
        "run/checkpoint-4 is newer, and was not chosen: INCOMPLETE, x: no node has uploaded it",
    )


def test_newest_is_by_time_as_a_restarted_training_counts_from_the_beginning() -> None:
    assert (
        choose([save(500, ended=10), save(100, ended=20)], "run", LATEST, "verified").summary.step
        == 100
    )
    assert (
        choose(
            [save(100, ended=10), save(100, ended=20, location="checkpoint-100~b")],
            "run",
            LATEST,
            "verified",
        ).summary.location[-2:]
        == "~b"
    )


def test_a_checkpoint_that_is_only_complete_is_given_by_name_or_with_unverified() -> None:
    saves = [save(1), save(2, "COMPLETE"), save(3, "DAMAGED"), save(4, "INCOMPLETE")]
    assert choose(saves, "run", LATEST, "any").summary.step == 2
    assert choose(saves, "run", "checkpoint-2", "verified").summary.step == 2
    assert (
        choose(
            [save(1), save(2, "COMPLETE", consolidated=False)], "run", LATEST, "any", "model"
        ).summary.step
        == 1
    )


def test_the_model_that_a_training_leaves_at_its_end_is_no_checkpoint_to_resume_from() -> None:
    final = replace(PLAIN, checkpoint="final", location="final", step=None, ended=99.0)
    tag = replace(PLAIN, checkpoint="global_step9", location="global_step9", step=9, ended=100.0)
    assert choose([save(1), final, tag], "run", LATEST, "verified").summary.step == 1
    assert choose([final, tag], "run", LATEST, "verified").summary.step == 9
    assert choose([final], "run", LATEST, "verified").summary.location == "final"


@pytest.mark.parametrize(
    ("saves", "name", "error", "words"),
    [
        ([save(1)], "checkpoint-2", ConfigError, "run/checkpoint-2: no such checkpoint"),
        (
            [save(1, "DAMAGED", evidence=("a", "b"))],
            LATEST,
            Incomplete,
            r"checkpoint-1 is DAMAGED, a \(and 1 more\)",
        ),
        ([save(1, "CONFLICT", evidence=("two saves",))], "checkpoint-1", Corrupt, "two saves"),
        (
            [save(1, "RETIRED", retired="keep_last 3")],
            "checkpoint-1",
            Incomplete,
            "retired: keep_last 3",
        ),
    ],
)
def test_a_checkpoint_that_may_not_be_given_is_refused_with_the_reason(
    saves: list[Summary], name: str, error: type[CkptsyncError], words: str
) -> None:
    with pytest.raises(error, match=words):
        choose(saves, "run", name, "verified")


def test_a_name_is_a_location_or_the_newest_save_of_that_name() -> None:
    saves = [save(1, ended=1), save(1, ended=2, location="checkpoint-1~b")]
    found = choose(saves, "run", "checkpoint-1", "verified")
    assert found.summary.location == "checkpoint-1~b"
    assert found.notes == ("run/checkpoint-1 is another save of the same name: VERIFIED",)
    assert choose(saves, "run", "checkpoint-1~b", "verified").notes == ()


def test_a_model_is_given_after_its_shards_were_deleted() -> None:
    assert choose([save(1, "RETIRED")], "run", "checkpoint-1", "verified", "model")
    with pytest.raises(Incomplete, match="no consolidated model yet"):
        choose([save(1, model_record="")], "run", "checkpoint-1", "verified", "model")


def test_only_the_model_is_given_while_retention_deletes_the_shards() -> None:
    saves = [save(1), save(2, shards_retired="shards after 3")]
    found = choose(saves, "run", LATEST, "verified")
    assert (found.summary.step, found.notes) == (
        1,
        (
            (
                "run/checkpoint-2 is newer, and was not chosen: retention is deleting its shards:"
                " shards after 3"
            ),
        ),
    )
    assert choose(saves, "run", LATEST, "verified", "model").summary.step == 2
    with pytest.raises(Incomplete, match="deleting its shards: shards after 3"):
        choose(saves, "run", "checkpoint-2", "verified", "node")
    assert choose(saves, "run", "checkpoint-2", "any").summary.step == 2


def test_a_runs_name_may_have_slashes() -> None:
    runs = [replace(PLAIN, run="a/b"), replace(PLAIN, run="a")]
    assert split("a/b", runs) == ("a/b", LATEST)
    assert split("a/checkpoint-1", runs) == ("a", "checkpoint-1")
    assert split("a/b/latest", runs) == ("a/b", LATEST)
    assert split("a", runs) == ("a", LATEST)
