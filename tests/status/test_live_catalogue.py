"""What a store holds and what its nodes do, as one."""

import re
from dataclasses import replace
from typing import Any

import pytest

from ckptsync.catalogue.location_summary import Catalogue, Proven, Summary
from ckptsync.records.progress import Progress
from ckptsync.status.heartbeat import Heartbeat
from ckptsync.status.live_catalogue import LiveCatalogue, add_node_progress, describe
from ckptsync.status.nodes import NodeFile, NodeFiles, list_nodes
from tests.support.status_examples import HOUR, NOW, heart, job, location, waiting

MIB = 1 << 20
SENDING = {"state": "uploading", "done": 77 * MIB, "total": 300 * MIB, "rate": 5.0 * MIB}


def seen(*hearts: NodeFile, locations: tuple[Summary, ...] = (), run: str = "") -> LiveCatalogue:
    files = NodeFiles({h.entry.name: h for h in hearts})
    return add_node_progress(Catalogue(locations), list_nodes(files, NOW), NOW, run)


def sends(name: str = "run/checkpoint-2", **changes: Any) -> tuple[Progress, ...]:
    return waiting(name, **{**SENDING, **changes})


def test_a_save_that_only_a_node_knows_is_a_location_in_its_whole_size() -> None:
    [s] = seen(heart(running=sends()), locations=()).catalogue.shown
    assert (s.run, s.location, s.step, s.status) == ("run", "checkpoint-2", 2, "UPLOADING")
    assert (s.whole, s.uploading, s.percent, s.nodes) == (300 * MIB, ("n0",), 25, ())
    why: dict[str, Any] = {"reason": "trainer_state.json says step 4", "total": 9}
    [s] = seen(heart(running=waiting("run/checkpoint-8", **why))).catalogue.shown
    assert (s.status, s.whole, s.evidence) == ("WAITING", 9, ("trainer_state.json says step 4",))


def test_a_save_that_no_node_can_upload_is_refused_and_says_why() -> None:
    why: dict[str, Any] = {"state": "refused", "reason": "a bad name"}
    refused = waiting("run/checkpoint-8", **why)
    [s] = seen(heart(running=refused)).catalogue.shown
    assert (s.status, s.evidence) == ("REFUSED", ("a bad name",))
    for other, status in (
        (sends("run/checkpoint-8"), "UPLOADING"),
        (waiting("run/checkpoint-8"), "WAITING"),
    ):
        [s] = seen(heart(running=refused), heart("n1", running=other)).catalogue.shown
        assert s.status == status


def test_two_nodes_of_one_save_are_one_location() -> None:
    first, second = heart("n0", running=sends()), heart("n1", running=waiting("run/checkpoint-2"))
    over = seen(first, second)
    [s] = over.catalogue.shown
    assert (s.status, s.uploading) == ("UPLOADING", ("n0",))
    assert [(e.node, e.state) for e in over.running] == [("n0", "uploading"), ("n1", "waiting")]


def test_a_part_that_another_node_still_has_changes_what_is_incomplete() -> None:
    half = location("run/checkpoint-2~ab", "INCOMPLETE", size=100 * MIB, nodes=("n9",))
    for running, status in ((sends(), "UPLOADING"), (waiting("run/checkpoint-2"), "WAITING")):
        over = seen(heart(running=running), locations=(half,))
        [s] = over.catalogue.shown
        assert (s.status, s.location) == (status, "checkpoint-2~ab")
        assert over.running[0].location == "checkpoint-2~ab"
    for nodes, whole, percent in ((("n9",), 400 * MIB, 44), (("n0", "n9"), 100 * MIB, 100)):
        stored = (replace(half, nodes=nodes),)
        [s] = seen(heart(running=sends()), locations=stored).catalogue.shown
        assert (s.size, s.whole, s.percent) == (100 * MIB, whole, percent)


@pytest.mark.parametrize("state", ["refused", "failed", "running"])
def test_what_is_not_on_its_way_leaves_an_incomplete_location_so(state: str) -> None:
    half = location("run/checkpoint-2", "INCOMPLETE")
    work = waiting("run/checkpoint-2", state=state)
    if state == "running":
        work = (job("verify", "run/checkpoint-2"),)
    over = seen(heart(running=work), locations=(half,))
    assert over.catalogue.shown == (half,)
    assert [e.state for e in over.running] == [state]


def test_an_upload_is_of_the_location_that_it_has_chosen() -> None:
    stored = (
        location("run/checkpoint-2~ab", "INCOMPLETE"),
        location("run/checkpoint-2", "VERIFIED", ago=1.0),
    )
    over = seen(heart(running=sends(location="checkpoint-2~cd")), locations=stored)
    statuses = {s.location.partition("~")[2]: s.status for s in over.catalogue.shown}
    assert statuses == {"": "VERIFIED", "ab": "INCOMPLETE", "cd": "UPLOADING"}
    both = (stored[0], location("run/checkpoint-2", "INCOMPLETE"))
    [entry] = seen(heart(running=sends()), locations=both).running
    assert entry.location == "checkpoint-2"


def test_an_announced_upload_whose_node_waits_now_is_still_one() -> None:
    begun = replace(location("run/checkpoint-2", "UPLOADING", uploading=("n9",)), manifests=())
    files = NodeFiles({h.entry.name: h for h in (heart(running=waiting("run/checkpoint-2")),)})
    nodes = list_nodes(files, NOW)
    for catalogue in (Catalogue(begun=(begun,)), Catalogue((replace(begun, manifests=("m",)),))):
        [s] = add_node_progress(catalogue, nodes, NOW).catalogue.shown
        assert (s.status, s.uploading, s.whole) == ("UPLOADING", ("n9",), 1000)


def test_a_node_that_is_silent_or_has_stopped_does_nothing() -> None:
    old = heart(ago=HOUR, running=sends())
    gone = heart("n1", stopped=True, running=sends())
    assert seen(old, gone) == LiveCatalogue(Catalogue())


def test_what_the_store_shows_to_be_done_does_not_run() -> None:
    done = location("run/checkpoint-2", "VERIFIED", ago=1.0)
    work = (
        *sends(),
        job("consolidate", "run/checkpoint-2"),
        job("verify", "run/checkpoint-2"),
        job("verify", "run"),
        job("event", "run/checkpoint-2"),
    )
    over = seen(heart(running=work), locations=(done,))
    kinds = [("verify", "run"), ("event", "run/checkpoint-2")]
    assert [(e.kind, e.subject) for e in over.running] == kinds
    assert over.catalogue.shown == (done,)
    late = seen(heart(running=work), locations=(replace(done, late=True),))
    assert "consolidate" in [e.kind for e in late.running]
    old = location("run/checkpoint-2", "VERIFIED", ago=60.0, proof=Proven(when=NOW - 60))
    over = seen(heart(running=work), locations=(old,))
    assert [e.kind for e in over.running] == ["upload", "verify", "verify", "event"]


def test_times_are_on_the_stores_clock_and_what_is_left_counts_from_now() -> None:
    entry = waiting("run/checkpoint-2", since=NOW + 990, until=NOW + 1100)
    known = heart(running=(*sends(done=50 * MIB), *entry))
    assert isinstance(known.content, Heartbeat)
    late = replace(known, content=replace(known.content, written=NOW + 995))
    sending, waits = seen(late).running
    assert (waits.since, waits.until, waits.at, waits.left) == (NOW - 10, NOW + 100, NOW - 5, 100)
    assert sending.left == 50 - 5


def test_of_one_run_nothing_else_is_shown() -> None:
    over = seen(heart(running=(*sends("a/checkpoint-1"), *sends("b/checkpoint-1"))), run="a")
    assert ([s.run for s in over.catalogue.shown], len(over.running)) == (["a"], 1)


def test_a_state_that_a_later_version_knows_hides_nothing() -> None:
    odd = Progress(kind="heal", state="healing", run="a", checkpoint="checkpoint-1", until=1e11)
    known = job("verify", "a", state="paused")
    over = seen(heart(running=(odd, known, *sends())))
    assert [e.state for e in over.running] == ["uploading", "healing", "paused"]
    assert all(describe(e, NOW) for e in over.running)


def said(entry: Progress, ago: float = 1.0) -> str:
    [one] = seen(heart(ago=ago, running=(entry,))).running
    return describe(one, NOW)


def test_people_read_what_a_node_does_and_why_it_waits() -> None:
    [sending] = sends()
    assert said(sending) == "n0 uploads, 25 % of 315 MB, 5.24 MB/s, 44s left"
    [soon] = waiting("run/checkpoint-8", until=NOW + 599)
    assert re.fullmatch(r"n0 waits until \d\d:\d\d:\d\d", said(soon))
    [waits] = waiting("run/checkpoint-8", until=NOW + 600, reason="the directory says 8")
    assert re.fullmatch(r"n0 waits until \d\d:\d\d: the directory says 8", said(waits))
    [late] = waiting("run/checkpoint-8", until=NOW + 9e5)
    assert re.fullmatch(r"n0 waits until \d{4}-\d\d-\d\d \d\d:\d\d", said(late))
    [failed] = waiting("run/checkpoint-8", state="failed", reason="503")
    assert said(failed, ago=40) == "n0 failed to upload (seen 40s ago): 503"
    [refused] = waiting("run/checkpoint-8", since=NOW - 200, state="refused", reason="bad name")
    assert said(refused) == "n0 cannot upload for 3m20s: bad name"
    assert said(sending, ago=15) == "n0 uploads, 25 % of 315 MB, 5.24 MB/s, 30s left"
    assert said(sending, ago=16) == "n0 uploads (seen 16s ago), 25 % of 315 MB"
    assert said(job("verify", "run", done=5)) == "n0 verifies, 5 B"
    assert said(job("event", "run/checkpoint-1", name="eval")) == "n0 runs eval"
    due = job("consolidate", "run/checkpoint-1", state="queued", reason="other jobs go first")
    assert said(due) == "n0 will consolidate: other jobs go first"
