from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from ckptsync.hooks import rank_markers
from ckptsync.spool import markers
from tests.hooks.training import trains
from tests.support.stand_in_programs import ROOT, ran


def test_a_shared_directory_is_one_location_whatever_the_hosts(tmp_path: Path) -> None:
    mine, other = (trains(tmp_path, rank, 2) for rank in range(2))
    assert mine.writers((mine.begun.process, other.begun.process)) == (0, 1)
    assert mine.writers((mine.begun.process, "elsewhere")) == (0,)


def test_where_introductions_were_deleted_nobody_knows_who_writes(tmp_path: Path) -> None:
    mine = trains(tmp_path, 0, 2)
    mine.withdraw()
    assert mine.writers((mine.begun.process, "other")) == ()
    alone = trains(tmp_path)
    alone.withdraw()
    assert alone.writers((alone.begun.process,)) == (0,)


def test_marks_are_kept_as_long_as_the_save_is_there_or_pinned(tmp_path: Path) -> None:
    spool = tmp_path / "_ckptsync"
    for checkpoint in (
        "checkpoint-1",
        "checkpoint-2",
        "checkpoint-3",
        "checkpoint_4",
        "run-0.checkpoint-1",
        "run-0.checkpoint-2",
    ):
        markers.save_folder(spool, checkpoint, "s").mkdir(parents=True)
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoints" / "checkpoint_4").mkdir(parents=True)
    (tmp_path / "run-0" / "checkpoint-1").mkdir(parents=True)
    (spool / "pins" / "checkpoint-2.0").mkdir(parents=True)
    rank_markers.forget_saves(spool)
    assert sorted(p.name for p in (spool / "saves").iterdir()) == [
        "checkpoint-1@s",
        "checkpoint-2@s",
        "checkpoint_4@s",
        "run-0.checkpoint-1@s",
    ]


def test_a_process_of_another_machine_is_believed_for_a_month(tmp_path: Path) -> None:
    spool = tmp_path / "_ckptsync"
    mine = trains(tmp_path).begun
    far = dataclasses.replace(mine, boot="another", host="elsewhere", process="far")
    markers.write_mark(markers.process_path(spool, "far"), far)
    markers.write_mark(
        markers.process_path(spool, "old"),
        dataclasses.replace(far, process="old", at=far.at - 31 * 24 * 3600),
    )
    rank_markers.forget_ended(spool)
    assert {b.process for b in markers.list_training_processes(spool)} == {mine.process, "far"}


@pytest.mark.parametrize(
    ("script", "failed"),
    [("", False), ("raise ValueError", True), ("import sys; sys.exit(3)", False)],
)
def test_an_exception_that_nobody_caught_is_seen_at_the_end(script: str, failed: bool) -> None:  # noqa: FBT001
    program = (
        "import atexit\n"
        "from ckptsync.hooks import rank_markers\n"
        "atexit.register(lambda: print(rank_markers.has_failed()))\n"
        f"{script}"
    )
    assert ran("-c", program, path=(ROOT,)).stdout.strip() == str(failed)


FORKED = """
import multiprocessing, sys
from ckptsync.hooks import rank_markers
def work(how):
    rank_markers.run_at_exit(lambda: print(how, rank_markers.has_failed(), flush=True))
    if how == "raises":
        raise ValueError
    sys.exit(how == "exits with 1")
if __name__ == "__main__":
    for how in ("ends", "exits with 1", "raises"):
        process = multiprocessing.get_context(sys.argv[1]).Process(target=work, args=(how,))
        process.start()
        process.join()
"""


@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_a_process_of_multiprocessing_has_an_end_too(tmp_path: Path, way: str) -> None:
    """Those of `notebook_launcher` and of torch's `spawn`."""
    (tmp_path / "forked.py").write_text(FORKED)
    done = ran(str(tmp_path / "forked.py"), way, cwd=ROOT)
    assert done.stdout.splitlines() == ["ends False", "exits with 1 True", "raises True"]
