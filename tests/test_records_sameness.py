from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.model import Demands
from ckptsync.records.manifest import Manifest
from ckptsync.records.sameness import SLACK, compare, demands_differ, parts, same_save
from tests.test_records_saves import FIRST, LATER, entry, manifest, of_rank, shard

A0, B1 = of_rank(0, "a"), of_rank(1, "b")
ALONE = {"model.safetensors": 7}


def whole(node: str, content: str) -> Manifest:
    return replace(manifest(node, entry("model.safetensors", content)), demands=Demands(dict(ALONE)))


@pytest.mark.parametrize(
    ("a", "b", "relation"),
    [
        (A0, B1, "one"),
        (A0, replace(B1, started=B1.started + SLACK, ended=B1.ended + SLACK), "one"),
        (A0, replace(B1, started=B1.started + SLACK + 1, ended=B1.ended + SLACK + 1), "unproven"),
        (A0, of_rank(0, "b", "second"), "two"),
        (A0, of_rank(0, "b"), "one"),  # one file, seen by two nodes: the same bytes
        (A0, manifest("b", entry("rng_state_0.pth"), ranks=(0,)), "two"),
        (A0, of_rank(0, "a", "second"), "two"),
        (A0, of_rank(0, "a", "second", LATER), "two"),
        (A0, manifest("a", shard(0), entry("late", at=LATER)), "one"),
        (replace(A0, location="x"), replace(manifest("a", entry("late", at=LATER)), location="x"), "one"),
        (replace(A0, location=""), replace(manifest("a", entry("late", at=LATER)), location=""), "unproven"),
        (replace(A0, save="s"), replace(of_rank(1, "b", at=LATER), save="s"), "one"),
        (replace(A0, save="s"), replace(B1, save="t"), "two"),
        (replace(A0, save="s"), B1, "one"),
        (replace(A0, save="s"), replace(of_rank(0, "a", "second"), save="s"), "two"),
        (replace(A0, demands=Demands(world=2)), replace(B1, demands=Demands(world=4)), "two"),
        (replace(A0, demands=Demands(world=2)), replace(B1, demands=Demands(world=2)), "one"),
        (whole("a", "one"), whole("b", "one"), "one"),
        (whole("a", "one"), whole("b", "two"), "two"),
        (manifest("a", entry("optimizer.pt", "x")), manifest("b", entry("optimizer.pt", "y")), "one"),
        (A0, replace(of_rank(1, "b", at=LATER), clock_offset=LATER - FIRST), "one"),
    ],
)
def test_what_two_manifests_prove(a: Manifest, b: Manifest, relation: str) -> None:
    assert same_save(a, b).relation == relation
    assert same_save(b, a) == same_save(a, b)


def test_a_contradiction_says_what_it_is() -> None:
    assert same_save(A0, of_rank(0, "a", "second")).reason == "dcp/__0_0.distcp has two contents"
    assert demands_differ(Demands({"x": 1}), Demands(resume={"x": 2})) == "x should have 1 and 2 bytes"
    assert demands_differ(Demands({"x": 1}), Demands(resume={"x": None})) == ""


@given(st.integers(0, 10), st.integers(0, 10), st.integers(0, 10), st.integers(0, 10))
def test_spans_touch_if_they_have_a_moment_in_common_or_nearly(a: int, b: int, c: int, d: int) -> None:
    first = replace(A0, started=min(a, b) * SLACK, ended=max(a, b) * SLACK)
    second = replace(B1, started=min(c, d) * SLACK, ended=max(c, d) * SLACK)
    near = any(abs(x - y) <= 1 for x in range(min(a, b), max(a, b) + 1) for y in range(min(c, d), max(c, d) + 1))
    assert (same_save(first, second).relation == "one") == near


def test_an_edited_files_time_does_not_reach_back_to_the_first_save() -> None:
    edited = manifest("a", *A0.files, entry("config.json", "new", LATER))
    first = manifest("a", *A0.files, entry("config.json", "old", FIRST + SLACK))
    before, mine, mate = parts([first, edited, B1])
    assert (before.start, before.end) == (FIRST, FIRST + SLACK)
    assert compare(mine, mate).relation == "unproven"
    assert same_save(edited, B1).relation == "one"  # without the first, nothing says that the shard is older


def test_an_id_repeated_over_changed_bytes_proves_nothing() -> None:
    first, mate = replace(A0, save="s"), replace(B1, save="s")
    again = replace(manifest("a", replace(shard(0, "second"), mtime=LATER)), save="s", ended=LATER)
    _, mine, other = parts([first, again, mate])
    assert compare(mine, other).relation != "one"
