from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ckptsync.hooks import ranks
from ckptsync.hooks.ranks import exchange
from ckptsync.spool import marks


def test_who_begins_says_so_in_the_spool(tmp_path: Path) -> None:
    mine = ranks.introduce(tmp_path, 1, 4, trainer="transformers 5", facts={"torch": "2"})
    assert marks.begun(tmp_path / "_ckptsync") == (mine,)
    assert (mine.rank, mine.world, mine.train, mine.facts["torch"]) == (1, 4, "", "2")
    assert marks.is_running(mine)


def test_a_copy_of_a_run_is_not_the_same_location(tmp_path: Path) -> None:
    """A spool that somebody copied to another node has introductions in it, of processes before."""
    before = ranks.introduce(tmp_path, 0, 1, trainer="transformers 5", facts={})
    mine = ranks.introduce(tmp_path, 0, 1, trainer="transformers 5", facts={})
    words = [f"{mine.process} {mine.host}", f"elsewhere {before.host}"]
    assert ranks.neighbours(tmp_path / "_ckptsync", mine, words) == (0,)


def test_a_shared_directory_is_one_location_whatever_the_hosts(tmp_path: Path) -> None:
    mine = ranks.introduce(tmp_path, 0, 2, trainer="transformers 5", facts={})
    other = ranks.introduce(tmp_path, 1, 2, trainer="transformers 5", facts={})
    words = [f"{mine.process} a", f"{other.process} b"]
    assert ranks.neighbours(tmp_path / "_ckptsync", mine, words) == (0, 1)


def test_where_introductions_were_deleted_the_host_decides(tmp_path: Path) -> None:
    mine = ranks.introduce(tmp_path, 0, 3, trainer="transformers 5", facts={})
    marks.begun_path(tmp_path / "_ckptsync", mine.process).unlink()
    words = [f"{mine.process} {mine.host}", f"x {mine.host}", "y elsewhere"]
    assert ranks.neighbours(tmp_path / "_ckptsync", mine, words) == (0, 1)


def test_marks_are_kept_as_long_as_the_save_is_there_or_pinned(tmp_path: Path) -> None:
    spool = tmp_path / "_ckptsync"
    for checkpoint in ("checkpoint-1", "checkpoint-2", "checkpoint-3", "checkpoint_4", "run-0.checkpoint-1", "run-0.checkpoint-2"):
        marks.save_folder(spool, checkpoint, "s").mkdir(parents=True)
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoints" / "checkpoint_4").mkdir(parents=True)
    (tmp_path / "run-0" / "checkpoint-1").mkdir(parents=True)
    (spool / "pins" / "checkpoint-2.0").mkdir(parents=True)
    ranks.forget_saves(spool)
    assert sorted(p.name for p in (spool / "saves").iterdir()) == [
        "checkpoint-1@s",
        "checkpoint-2@s",
        "checkpoint_4@s",
        "run-0.checkpoint-1@s",
    ]


def test_a_process_of_another_machine_is_believed_for_a_month(tmp_path: Path) -> None:
    spool = tmp_path / "_ckptsync"
    mine = ranks.introduce(tmp_path, 0, 1, trainer="transformers 5", facts={})
    far = dataclasses.replace(mine, boot="another", host="elsewhere", process="far")
    marks.write_mark(marks.begun_path(spool, "far"), far)
    marks.write_mark(marks.begun_path(spool, "old"), dataclasses.replace(far, process="old", at=far.at - 31 * 24 * 3600))
    ranks.forget_ended(spool)
    assert {b.process for b in marks.begun(spool)} == {mine.process, "far"}


def test_what_the_killed_have_half_copied_goes_and_what_the_living_copy_stays(tmp_path: Path) -> None:
    spool = tmp_path / "_ckptsync"
    mine = ranks.introduce(tmp_path, 0, 1, trainer="transformers 5", facts={})
    gone = subprocess.Popen(["true"])
    gone.wait()
    killed, left = (dataclasses.replace(mine, process=name) for name in ("killed", "left"))
    marks.write_mark(marks.begun_path(spool, "killed"), dataclasses.replace(killed, pid=gone.pid))
    marks.write_mark(
        marks.begun_path(spool, "left"), dataclasses.replace(left, left=1.0, pid=os.getppid(), began=marks.began(os.getppid()))
    )
    for pid in (gone.pid, os.getpid(), os.getppid()):
        (spool / "pins" / f".new-hook-{pid}-0a-checkpoint-1" / "files").mkdir(parents=True)
    (spool / "pins" / f".gone-hook-{gone.pid}-checkpoint-1.0").mkdir()
    ranks.forget_ended(spool)
    for thread in threading.enumerate():
        if thread.name == "ckptsync-remove":
            thread.join()
    assert {p.name.split("-")[2] for p in (spool / "pins").iterdir()} == {str(os.getpid()), str(os.getppid())}


RANK = """
import sys
from datetime import timedelta
import torch.distributed as dist
from ckptsync.hooks.ranks import exchange, first_word
rank = int(sys.argv[1])
store = dist.TCPStore("127.0.0.1", int(sys.argv[2]), 2, is_master=rank == 0, timeout=timedelta(seconds=60))
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
if rank == 1:
    assert sys.stdin.readline() == "begin\\n"
first = exchange(rank, 2, f"first {rank}")
print(first(), first_word(f"I am {rank}"), flush=True)
assert sys.stdin.readline() == "look\\n"
print(first(), flush=True)
second = exchange(rank, 2, f"second {rank}")
dist.barrier()  # a gradient
print(second(), flush=True)
dist.barrier()
"""


def test_one_process_agrees_with_itself() -> None:
    assert exchange(0, 1, "me")() == ("me",)


def test_without_a_process_group_nobody_agrees() -> None:
    with pytest.raises((ValueError, RuntimeError, ImportError)):
        exchange(0, 2, "me")


def start(rank: int, port: int) -> subprocess.Popen[str]:
    root = Path(__file__).parent.parent.parent
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RANK, str(rank), str(port)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd=root)


def tell(child: subprocess.Popen[str], line: str) -> None:
    assert child.stdin is not None
    child.stdin.write(line + "\n")
    child.stdin.flush()


def heard(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def test_ranks_learn_of_each_other_without_waiting() -> None:
    """Real processes, with the store that torch's rendezvous leaves."""
    pytest.importorskip("torch")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    with start(0, port) as zero, start(1, port) as one:
        assert heard(zero) == "None I am 0"  # rank 1 has not begun, and nobody waits for it
        tell(one, "begin")
        assert heard(one) == "('first 0', 'first 1') I am 0", "the first to say a word said it for all"
        for child in (zero, one):
            tell(child, "look")
        assert heard(zero) == heard(one) == "('first 0', 'first 1')"
        assert heard(zero) == heard(one) == "('second 0', 'second 1')"
    assert (zero.returncode, one.returncode) == (0, 0)
