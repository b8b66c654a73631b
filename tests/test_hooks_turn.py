from __future__ import annotations

import fcntl
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ckptsync.hooks.turn import await_turn, claimed
from ckptsync.records.names import checked_node
from tests.standing import ROOT


@pytest.mark.parametrize("ends_first", ["worker", "training"])
def test_who_is_at_work_is_waited_for_and_after_the_training_not_for_ever(spool: Path, ends_first: str) -> None:
    trains = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    answers = list[bool]()
    with (spool / "worker-node.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = threading.Thread(target=lambda: answers.append(await_turn(spool, trains.pid, 0.1)))
        waiting.start()
        if ends_first == "training":
            waiting.join(1)
            assert waiting.is_alive(), "while the training lives it waits longer than it is patient afterwards"
            trains.communicate()
            waiting.join(30)
    waiting.join(30)
    trains.communicate()
    assert answers == [ends_first == "worker"]


def test_where_nobody_is_at_work_it_begins_also_for_a_training_that_has_gone(spool: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert await_turn(spool, gone.pid)


CLAIM = """
import os, sys
from pathlib import Path
from ckptsync.hooks.turn import claimed
print(claimed("node", sys.argv[1], Path("/a/_ckptsync")), flush=True)
os.execv(sys.executable, [sys.executable, "-c", "import sys; print('become another', flush=True); sys.stdin.read()"])
"""


def test_of_two_trainings_of_a_machine_the_first_has_the_nodes_own_id_in_one_store(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CLAIM, str(tmp_path)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert holder.stdout is not None
    assert [holder.stdout.readline() for _ in "12"] == ["node\n", "become another\n"]
    one, other = (claimed("node", str(tmp_path), Path(f"/{name}/_ckptsync")) for name in "bc")
    assert checked_node(one).startswith("node-")
    assert one != other
    assert one == claimed("node", str(tmp_path), Path("/b/_ckptsync")), "the same when it begins again"
    assert claimed("node", f"{tmp_path}/other", Path("/b/_ckptsync")) == "node"
    assert claimed("n" * 100, str(tmp_path), Path("/b/_ckptsync")) == "n" * 100
    assert checked_node(claimed("n" * 100, str(tmp_path), Path("/b/_ckptsync")))
    holder.communicate()
    assert claimed("node", str(tmp_path), Path("/b/_ckptsync")) == "node"


def test_of_several_that_begin_at_once_one_does_and_the_others_wait(spool: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert [await_turn(spool, gone.pid, 0.1) for _ in range(3)] == [True, False, False]
