"""The simulation of power cuts sees what may be lost, and the store as it is loses nothing.

`make crash-states` tries more.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.campaigns.crash_states import Simulation, judged, needless
from tests.campaigns.crash_works import WORKS, Call, Data, Names, Recorder, Step, Sync, at_random
from tests.support.files_in_memory import contents

CONTENT = random.Random(0).randbytes(8192)
MADE = Names(0, name="run", inode=1)
DRAFT = Names(1, name=".ckptsync-0.part", inode=2)
BYTES = Data(2, 0, CONTENT)
RENAME = Names(1, ".ckptsync-0.part", "a", 2)
ABOVE, FILE, DIRECTORY = Sync(0, "above"), Sync(2, "file"), Sync(1, "directory")
AS_IT_SHOULD_BE = (MADE, DRAFT, ABOVE, BYTES, FILE, RENAME, DIRECTORY)


def wrong(steps: Sequence[Step], states: int = 1000, after: Sequence[Step] = ()) -> set[str]:
    """What breaks promises where ``run/a`` is written in ``steps``, before those ``after``."""
    call = Call("run/a", CONTENT, 0, len(steps))
    return set(Simulation([*steps, *after], [call], states).violations())


def then(call: Call, *steps: Step) -> set[str]:
    """What breaks promises where another call follows a write as it should be."""
    first = Call("run/a", CONTENT, 0, len(AS_IT_SHOULD_BE))
    call.begun, call.ended = len(AS_IT_SHOULD_BE), len(AS_IT_SHOULD_BE) + len(steps)
    return set(Simulation([*AS_IT_SHOULD_BE, *steps], [first, call], 1000).violations())


def without(*left_out: Step) -> tuple[Step, ...]:
    return tuple(step for step in AS_IT_SHOULD_BE if step not in left_out)


def test_a_write_as_it_should_be_loses_nothing() -> None:
    assert wrong(AS_IT_SHOULD_BE) == set()
    syncs = [sync for _, sync in Simulation(AS_IT_SHOULD_BE, [], 100).syncs()]
    assert syncs == [ABOVE, FILE, DIRECTORY]


@pytest.mark.parametrize("states", [3, 1000])
def test_each_fsync_left_out_is_seen(states: int) -> None:
    """Also where not all states are tried."""
    gone = {"run/a: acknowledged, and gone"}
    assert wrong(without(ABOVE), states) == wrong(without(DIRECTORY), states) == gone
    assert wrong(without(FILE)) == {
        f"run/a: {size} bytes that nobody has written so, or that were replaced"
        for size in (0, 4096, 8192)
    }


def test_an_fsync_that_comes_too_late_is_seen() -> None:
    late = (MADE, DRAFT, ABOVE, BYTES, RENAME, FILE, DIRECTORY)
    assert any("nobody has written so" in text for text in wrong(late)), (
        "the name was there before its bytes were durable"
    )
    acknowledged = without(DIRECTORY)
    assert wrong(acknowledged, after=[DIRECTORY]) == {"run/a: acknowledged, and gone"}


def test_a_delete_must_last_once_it_is_acknowledged() -> None:
    gone = Names(1, gone="a")
    assert then(Call("run/a", None, 0), gone, DIRECTORY) == set()
    assert then(Call("run/a", None, 0), gone) == {"run/a: acknowledged to be deleted, and back"}


def test_a_name_that_somebody_was_told_of_must_last() -> None:
    steps = without(DIRECTORY)
    calls = [Call("run/a", CONTENT, 0), Call("run/a", b"other", 6, 6, is_told=True)]
    gone = {"run/a: acknowledged, and gone"}
    assert set(Simulation(steps, calls, 1000).violations()) == gone
    calls[1].ended = 7
    assert set(Simulation([*steps, DIRECTORY], calls, 1000).violations()) == set()


def test_an_overwrite_shows_the_old_file_or_the_new_one() -> None:
    new = b"0123456789"
    draft, rename = Names(1, name=".ckptsync-1.part", inode=3), Names(1, ".ckptsync-1.part", "a", 3)
    steps = (draft, Data(3, 0, new), Sync(3, "file"), rename, DIRECTORY)
    assert then(Call("run/a", new, 0), *steps) == set()
    in_place = then(Call("run/a", new, 0), Data(2, 0, None), Data(2, 0, new), FILE)
    assert any("nobody has written so" in text for text in in_place)


def test_the_store_loses_nothing_and_no_fsync_of_it_can_be_spared() -> None:
    lost, spared = Counter[str](), Counter[str]()
    for name, work in {**WORKS, "at_random 1": at_random("1")}.items():
        assert list(judged(name, work, 60, lost, spared)) == []
    assert needless(lost, spared) == []
    places = {where.partition(" ")[0] for where in lost}
    own = {"commit", "claim", "rename_if_free", "make_durable", "create", "delete"}
    assert places - {"_do"} == own, "each of the store's own fsyncs is tried"


def test_what_a_work_has_written_is_what_is_recorded(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.record(WORKS["several_names"])
    end = len(recorder.steps)
    *_, last = Simulation(recorder.steps, [], 1).left(end, [0] * end)
    assert last == contents(tmp_path)
