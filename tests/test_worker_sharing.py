"""What waits to be sent, and which lane may take it."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from ckptsync.worker.queue import SMALL, Job, Share, UploadQueues, following, shares, whole
from ckptsync.worker.upload import small_at_once

SIZES = st.sampled_from([0, 1, SMALL, SMALL + 1, 100 * SMALL])
LINES = st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4), SIZES), max_size=6), max_size=3)
Lines = dict[object, list[Job]]


def job(run: str, checkpoint: str, size: int) -> Job:
    return Job((run, checkpoint, size), (run, checkpoint), size, lambda _: None)


def test_lanes_together_take_no_more_than_one_would() -> None:
    for threads in range(2, 40):
        wide, narrow = shares(threads)
        assert wide.threads + narrow.threads == threads
        assert wide.small + narrow.small == small_at_once(threads)
        assert (wide.most, narrow.most) == (None, SMALL)
        assert min(wide.threads, narrow.threads, wide.small, narrow.small) > 0


def test_who_asks_for_one_file_at_a_time_has_one_lane() -> None:
    assert shares(1) == (whole(1),) == (Share(None, 1, 1),)


def test_what_is_large_is_never_the_narrow_lanes_nor_what_waits_behind_it_in_its_run() -> None:
    lines: Lines = {"a": [job("r", "1", SMALL + 1), job("r", "2", 1), job("s", "1", 1)]}
    assert following(lines, (), SMALL) == ("a", lines["a"][2])
    assert following(lines, (), None) == ("a", lines["a"][0])


def test_what_is_small_is_left_to_a_lane_that_is_free_for_it() -> None:
    lines: Lines = {"a": [job("r", "1", 1)], "b": [job("s", "1", SMALL + 1)]}
    assert following(lines, (), None, SMALL) == ("b", lines["b"][0])
    assert following(lines, (), None) == ("a", lines["a"][0])


@given(LINES, st.randoms(use_true_random=False), st.integers(1, 5))
def test_all_is_taken_once_each_run_in_its_order_and_no_name_by_two(
    drawn: list[list[tuple[int, int, int]]], dice: random.Random, threads: int
) -> None:
    lanes, wanted = UploadQueues(threads), [[job(f"{n}.{r}", str(c), size) for r, c, size in line] for n, line in enumerate(drawn)]
    for n, line in enumerate(wanted):
        lanes.post(n, line)
    begun: list[Job] = []
    hands: dict[Share, Job] = {}
    while not lanes.is_drained or hands:
        share = dice.choice(shares(threads))
        if share in hands:
            lanes.end(share, hands.pop(share))
        elif (taken := lanes.take(share)) is not None:
            assert taken.name not in {held.name for held in hands.values()}
            assert share.most is None or taken.size <= share.most
            hands[share] = taken
            begun.append(taken)
    for line in wanted:
        for run in {j.name[0] for j in line}:
            assert [j for j in begun if j.name[0] == run] == [j for j in line if j.name[0] == run]
