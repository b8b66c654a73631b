"""The facts of this node."""

import os
import platform
import socket
from dataclasses import replace
from pathlib import Path

from ckptsync.daemon.surveying import shown, survey
from ckptsync.fleet import facts
from ckptsync.spool import marks
from ckptsync.spool.marks import Begun, begun_path, write_mark
from ckptsync.stores.memory import MemoryStore


def begin(out: Path, process: str, train: str, rank: int, at: float) -> None:
    told = {"torch": "2.13", "NCCL_SOCKET_IFNAME": "eth0"} if rank == 0 else {}
    mark = Begun(train, rank, 4, 2 if rank else 0, "host", 1, "1", "boot", at, "transformers 5", told, process)
    write_mark(begun_path(out / "_ckptsync", process), mark)


def test_a_node_tells_what_it_is_made_of(tmp_path: Path) -> None:
    found = survey("n0", {"run": tmp_path})
    assert (found.node, found.python, found.kernel) == ("n0", platform.python_version(), platform.release())
    assert found.limits["nofile"] > 0
    assert found.limits["max_user_watches"] > 0
    assert len(found.umask) == 4
    assert found.file_systems[str(tmp_path)]
    assert found.trains == {}
    assert survey("n0", {"run": tmp_path}) == found, "it changes only where something did"


def test_the_newest_training_of_each_run_is_told_as_its_hook_introduced_it(tmp_path: Path) -> None:
    begin(tmp_path, "a", "old", 0, 1.0)
    begin(tmp_path, "b", "new", 1, 5.0)
    begin(tmp_path, "c", "new", 0, 4.0)
    train = survey("n0", {"run": tmp_path, "other": tmp_path / "none"}).trains
    assert list(train) == ["run"]
    assert (train["run"].world, train["run"].local_world, train["run"].began) == (4, 2, 4.0)
    assert train["run"].facts["NCCL_SOCKET_IFNAME"] == "eth0"


def test_a_training_runs_until_its_processes_say_that_they_ended_or_are_gone(tmp_path: Path) -> None:
    mine = Begun("t", 0, 2, 2, socket.gethostname(), os.getpid(), marks.began(os.getpid()), marks.boot(), 1.0, process="a")
    other = replace(mine, rank=1, process="b")

    def state(*begun: Begun) -> str:
        for b in begun:
            write_mark(begun_path(tmp_path / "_ckptsync", b.process), b)
        return survey("n0", {"run": tmp_path}).trains["run"].state

    assert state(mine, other) == "runs"
    assert state(replace(mine, ended=2.0), other) == "runs"
    assert state(replace(mine, ended=2.0), replace(other, began="1")) == "gone"
    assert state(mine, replace(other, left=2.0)) == "runs"
    assert state(replace(mine, left=2.0), replace(other, left=2.0)) == "gone", "an exception ended it"
    assert state(replace(mine, ended=2.0), replace(other, ended=2.0, left=2.0)) == "ended"


def test_a_path_that_is_no_text_can_be_told(tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"\xff")
    odd.mkdir()
    store = MemoryStore()
    facts.write(store, survey("n0", {"run": odd}), ("worker",))
    assert shown(odd).endswith("\ufffd")
