"""The simulation of power cuts sees what may be lost, and the store as it is loses nothing.

`make crash-states` tries more.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.campaigns.crash_states import Work, judged, needless
from tests.campaigns.crash_works import (
    WORKS,
    Data,
    Mark,
    Names,
    Step,
    Sync,
    content,
    recorded,
)
from tests.support.files_in_memory import contents

BEGIN = Mark({"begin": 1, "kind": "put", "name": "run/a", "seed": 0, "size": 8192})
DONE = Mark({"done": 1})
CONTENT = content(0, 8192)
MADE = Names(0, name="run", inode=1)
DRAFT = Names(1, name=".ckptsync-0.part", inode=2)
BYTES = Data(2, 0, CONTENT)
RENAME = Names(1, ".ckptsync-0.part", "a", 2)
ABOVE, FILE, DIRECTORY = Sync(0, "above"), Sync(2, "file"), Sync(1, "directory")
AS_IT_SHOULD_BE = (BEGIN, MADE, DRAFT, ABOVE, BYTES, FILE, RENAME, DIRECTORY, DONE)


def wrong(steps: Sequence[Step], states: int = 1000) -> set[str]:
    return set(Work(steps, states).violations())


def without(*left_out: Step) -> tuple[Step, ...]:
    return tuple(step for step in AS_IT_SHOULD_BE if step not in left_out)


def test_a_write_as_it_should_be_loses_nothing() -> None:
    assert wrong(AS_IT_SHOULD_BE) == set()
    assert [sync.where for _, sync in Work(AS_IT_SHOULD_BE, 100).syncs()] == [
        "above",
        "file",
        "directory",
    ]


@pytest.mark.parametrize("states", [3, 1000])
def test_each_fsync_left_out_is_seen(states: int) -> None:
    """Also where not all states are tried."""
    assert (
        wrong(without(ABOVE), states)
        == wrong(without(DIRECTORY), states)
        == {"run/a: acknowledged, and gone"}
    )
    assert wrong(without(FILE)) == {
        f"run/a: {size} bytes that nobody has written so, or that were replaced"
        for size in (0, 4096, 8192)
    }


def test_an_fsync_that_comes_too_late_is_seen() -> None:
    late = (BEGIN, MADE, DRAFT, ABOVE, BYTES, RENAME, FILE, DIRECTORY, DONE)
    assert any("nobody has written so" in text for text in wrong(late)), (
        "the name was there before its bytes were durable"
    )
    assert wrong((*without(DIRECTORY), DIRECTORY)) == {"run/a: acknowledged, and gone"}


def test_a_delete_must_last_once_it_is_acknowledged() -> None:
    begun, gone, done = (
        Mark({"begin": 2, "kind": "delete", "name": "run/a"}),
        Names(1, gone="a"),
        Mark({"done": 2}),
    )
    assert wrong((*AS_IT_SHOULD_BE, begun, gone, DIRECTORY, done)) == set()
    assert wrong((*AS_IT_SHOULD_BE, begun, gone, done)) == {
        "run/a: acknowledged to be deleted, and back"
    }


def test_a_name_that_somebody_was_told_of_must_last() -> None:
    told = Mark({"exists": 2})
    again = Mark({"begin": 2, "kind": "put", "name": "run/a", "seed": 5, "size": 1})
    killed = without(DIRECTORY, DONE)
    assert wrong((*killed, again, told)) == {"run/a: acknowledged, and gone"}
    assert wrong((*killed, again, DIRECTORY, told)) == set()


def test_an_overwrite_shows_the_old_file_or_the_new_one() -> None:
    again = Mark({"begin": 2, "kind": "put", "name": "run/a", "seed": 5, "size": 10})
    draft, rename = Names(1, name=".ckptsync-1.part", inode=3), Names(1, ".ckptsync-1.part", "a", 3)
    rest = (
        again,
        draft,
        Data(3, 0, content(5, 10)),
        Sync(3, "file"),
        rename,
        DIRECTORY,
        Mark({"done": 2}),
    )
    assert wrong((*AS_IT_SHOULD_BE, *rest)) == set()
    in_location = (again, Data(2, 0, None), Data(2, 0, content(5, 10)), FILE, Mark({"done": 2}))
    assert any("nobody has written so" in text for text in wrong((*AS_IT_SHOULD_BE, *in_location)))


def test_the_store_loses_nothing_and_no_fsync_of_it_can_be_spared() -> None:
    verdicts = [judged(work, states=60) for work in (*WORKS, "at_random 1")]
    assert [line for verdict in verdicts for line in verdict.wrong] == []
    assert needless(verdicts) == []
    locations = {where.partition(" ")[0] for verdict in verdicts for where in verdict.lost}
    own = {"commit", "claim", "rename_if_free", "make_durable", "create", "delete"}
    assert locations - {"left_by_another"} == own, "each of the store's own fsyncs is tried"


def test_what_a_work_has_written_is_what_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    steps = recorded("several_names", tmp_path / "store")
    *_, last = Work(steps, 1).left(len(steps), [0] * len(steps))
    assert last == contents(tmp_path / "store")
