"""The judge of trainers that are killed in the middle of a save: `make campaign-killed` is the
campaign itself.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

from ckptsync.catalogue.uncached import read_state
from ckptsync.checkpoint_dirs import FINAL
from ckptsync.stores.contract import Store
from ckptsync.stores.opening import create_store
from tests.campaigns.killed import Segment, Written, judged, overtaken, written
from tests.support.files_in_memory import write_files
from tests.support.replays import of
from tests.support.worker_in_process import push_now

NODE = "node0"


def saved(home: Path, segment: int, files: dict[str, bytes], *, finished: bool) -> Written:
    part = write_files(home / "truth" / f"run.{segment}" / "checkpoint-4", files)
    done = 100.0 if finished else 0.0
    return Written(
        "run", segment, "checkpoint-4", 4, {NODE: part}, part / "none", 90.0, done, marked=False
    )


def sent(home: Path, save: Written) -> Store:
    store = create_store(str(home / "store"))
    push_now(save.parts[NODE], store, NODE, "run")
    return store


def wrong(store: Store, *saves: Written) -> list[str]:
    return judged(store, read_state(store).readable, saves).wrong


def test_a_location_that_is_a_finished_save_is_right_and_one_that_is_missing_is_missed(
    tmp_path: Path,
) -> None:
    save = saved(tmp_path, 0, of("hf-ddp"), finished=True)
    assert wrong(sent(tmp_path, save), save) == []
    again = saved(tmp_path, 1, of("hf-ddp") | {"optimizer.pt": b"other"}, finished=True)
    assert wrong(create_store(str(tmp_path / "store")), save, again) == [
        "run/checkpoint-4 of segment 1: MISSED"
    ]
    assert wrong(create_store(str(tmp_path / "store")), save, replace(again, ended=105.0)) == []


def test_a_torn_save_that_is_called_complete_is_seen(tmp_path: Path) -> None:
    files = of("hf-ddp")
    torn = saved(
        tmp_path, 0, {n: d for n, d in files.items() if n != "optimizer.pt"}, finished=False
    )
    assert wrong(sent(tmp_path, torn), torn) == [
        "run/checkpoint-4: COMPLETE, and TORN: run/checkpoint-4 of segment 0 was never finished"
    ]


def test_a_rank_that_was_killed_before_its_random_state_leaves_a_model_that_is_whole(
    tmp_path: Path,
) -> None:
    files = of("hf-ddp")
    whole = saved(tmp_path, 0, files, finished=True)
    short = saved(
        tmp_path, 1, {n: d for n, d in files.items() if n != "rng_state_1.pth"}, finished=False
    )
    found = judged(
        sent(tmp_path, short),
        read_state(create_store(str(tmp_path / "store"))).readable,
        [replace(whole, ended=101.0), short],
    )
    assert (found.wrong, found.short, found.whole) == ([], 1, 1)


def test_a_rank_killed_after_all_was_written_leaves_a_save_and_an_older_file_makes_it_torn(
    tmp_path: Path,
) -> None:
    whole = replace(saved(tmp_path, 0, of("hf-ddp"), finished=True), ended=101.0)
    unsaid = saved(
        tmp_path,
        1,
        of("hf-ddp") | {"scheduler.pt": of("hf-ddp")["rng_state_0.pth"]},
        finished=False,
    )
    store = sent(tmp_path, unsaid)
    found = judged(store, read_state(store).readable, [whole, unsaid])
    assert (found.wrong, found.unsaid, found.whole) == ([], 1, 1)
    os.utime(unsaid.parts[NODE] / "rng_state_1.pth", (80.0, 80.0))
    assert wrong(store, whole, unsaid) == [
        "run/checkpoint-4: COMPLETE, and TORN: run/checkpoint-4 of segment 1 was never finished"
    ]


def test_whole_weights_alone_are_torn_also_where_nothing_else_was_ever_saved(
    tmp_path: Path,
) -> None:
    bare = saved(
        tmp_path,
        0,
        {n: d for n, d in of("hf-ddp").items() if n in ("config.json", "model.safetensors")},
        finished=False,
    )
    assert wrong(sent(tmp_path, bare), bare) == [
        "run/checkpoint-4: COMPLETE, and TORN: run/checkpoint-4 of segment 0 was never finished"
    ]


def test_one_finished_save_that_lacks_a_file_excuses_no_torn_one_that_lacks_it_too(
    tmp_path: Path,
) -> None:
    files = of("hf-ddp")
    short = {n: d for n, d in files.items() if n != "optimizer.pt"}
    some = [
        replace(saved(tmp_path, n, f, finished=True), ended=101.0)
        for n, f in enumerate((short, files))
    ]
    torn = saved(tmp_path, 2, short | {"scheduler.pt": b"other"}, finished=False)
    assert len(wrong(sent(tmp_path, torn), *some, torn)) == 1


def test_a_location_that_nobody_saved_is_wrong_but_for_the_model_at_the_end(tmp_path: Path) -> None:
    save = saved(tmp_path, 0, of("hf-ddp"), finished=True)
    store = sent(tmp_path, save)
    assert wrong(store, replace(save, checkpoint="checkpoint-5", ended=101.0)) == [
        "run/checkpoint-4: COMPLETE, and nobody began to save that"
    ]
    (seen,) = read_state(store).readable
    ends = [
        replace(seen, checkpoint=FINAL),
        replace(seen, run="zero3-hook-1", checkpoint="global_step4"),
    ]
    assert judged(store, ends, []).wrong == []
    assert (
        len(
            judged(
                store, [replace(seen, run="raw-zero3-none-1", checkpoint="global_step4")], []
            ).wrong
        )
        == 1
    )


def test_a_mixture_of_two_saves_is_of_no_save(tmp_path: Path) -> None:
    one = saved(tmp_path, 0, of("hf-ddp"), finished=True)
    two = saved(
        tmp_path,
        1,
        of("hf-ddp") | {"optimizer.pt": b"other", "scheduler.pt": b"other"},
        finished=True,
    )
    mixed = saved(tmp_path, 2, of("hf-ddp") | {"optimizer.pt": b"other"}, finished=False)
    told = wrong(
        sent(tmp_path, mixed), one, replace(two, ended=101.0), replace(mixed, segment=9, parts={})
    )
    assert (
        told[0]
        == "run/checkpoint-4: COMPLETE, and of no save: beside run/checkpoint-4 of segment 0 on"
        " node0, optimizer.pt: not the bytes that the trainer wrote"
    )


def said(home: Path, node: int, rank: int, *events: tuple[str, int, float]) -> None:
    truth = home / f"node{node}" / "truth" / "run.0"
    truth.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"event": event, "step": step, "at": at}) for event, step, at in events]
    (truth / f"events-{rank}.jsonl").write_text("".join(line + "\n" for line in lines))


def test_a_save_is_finished_when_every_rank_has_said_so_and_lives_until_the_next_begins(
    tmp_path: Path,
) -> None:
    said(
        tmp_path,
        0,
        0,
        ("saving", 1, 10.0),
        ("written", 1, 12.0),
        ("gone", 1, 13.0),
        ("saving", 2, 20.0),
    )
    said(
        tmp_path,
        1,
        1,
        ("saving", 1, 11.0),
        ("written", 1, 14.0),
        ("gone", 1, 15.0),
        ("saving", 2, 21.0),
        ("written", 2, 22.0),
    )
    (tmp_path / "node1" / "out" / "run" / "checkpoint-1").mkdir(parents=True)
    first, second = written(tmp_path, Segment("run", 0, hook=True, ranks=2))
    assert (first.begun, first.finished, first.marked, first.ended) == (10.0, 14.0, True, 20.0)
    assert (second.finished, second.marked, set(first.parts)) == (0.0, False, {"node1"})
    assert [w.ended for w in overtaken([first, replace(first, ended=99.0)], 50.0)] == [20.0, 50.0]
