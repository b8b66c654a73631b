"""Child processes that hang, crash, talk nonsense or will not end: real ones."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckptsync.config.loading import read
from ckptsync.daemon.children import Bounds, Children
from ckptsync.daemon.orders import Done, End, Failed, Order
from tests.ticks import until

CONFIG = read("roles: [head]\nstore: {url: /nowhere}\n", "c", {})
ORDER = Order("consolidate", "run", "checkpoint-1", 100)
GENEROUS = Bounds(60.0, 60.0)
SAYS_DONE = 'print(\'{"type":"done","changed":true}\', flush=True)'
HANGS = "import time; time.sleep(600)"


def children(script: str) -> Children:
    return Children(CONFIG, [sys.executable, "-c", script])


def lived(script: str, bounds: Bounds = GENEROUS) -> End:
    ends: queue.Queue[End] = queue.Queue()
    assert children(script).begin(ORDER, bounds, lambda _, end: ends.put(end))
    return ends.get(timeout=60)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_what_a_child_says_last_is_its_end() -> None:
    assert lived(f'import sys; sys.stdin.readline(); print(\'{{"type":"at","done":1}}\'); {SAYS_DONE}') == Done(changed=True)


def test_nonsense_is_no_answer_and_no_harm() -> None:
    assert lived("print('[' * 100000); print('{}'); print('\\xff')") == Failed(
        "its process ended with status 0: the log says why", passes=True, is_ours=True
    )


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "the system may have run out of memory"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
        ("import sys; sys.exit(7)", "ended with status 7"),
    ],
)
def test_a_crash_is_a_failure_that_says_how(script: str, text: str) -> None:
    end = lived(script)
    assert isinstance(end, Failed)
    assert text in end.text


def test_what_gets_no_further_is_killed_and_so_is_what_never_ends() -> None:
    stuck, endless = (
        lived(HANGS, Bounds(0.5, 60.0)),
        lived('while True: print(\'{"type":"at"}\', flush=True)', Bounds(60.0, 0.5)),
    )
    assert (str(stuck), str(endless)) == ("no progress for 0 s, and killed", "not done in 0 s, and killed")


def test_a_child_that_hears_no_sigterm_dies_with_all_that_it_started(tmp_path: Path) -> None:
    script = (
        "import signal, subprocess, sys, time, pathlib; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"other = subprocess.Popen([sys.executable, '-c', 'import signal, time; signal.signal(15, 1); time.sleep(600)'])\n"
        f"pathlib.Path('{tmp_path}/pid').write_text(str(other.pid)); time.sleep(600)"
    )
    lived(script, Bounds(1.5, 60.0))
    assert until(lambda: not is_alive(int((tmp_path / "pid").read_text())))


def test_a_hung_child_holds_up_no_other() -> None:
    ends: queue.Queue[str] = queue.Queue()
    both = children(
        f"import sys; l = sys.stdin.readline(); {SAYS_DONE} if 'checkpoint-2' in l else sys.stdin.read() or __import__('time').sleep(600)"
    )
    for location in ("checkpoint-1", "checkpoint-2"):
        assert both.begin(Order("consolidate", "run", location), GENEROUS, lambda order, _: ends.put(order.location))
    assert ends.get(timeout=60) == "checkpoint-2"
    assert [job.subject for job in both.jobs()] == ["run/checkpoint-1"]
    assert both.are_watched()
    both.end()
    assert until(lambda: not both.jobs())


def test_a_stop_ends_children_in_time_and_is_no_failure() -> None:
    ends: list[End] = []
    running = children("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); import time; time.sleep(600)")
    running.begin(ORDER, GENEROUS, lambda _, end: ends.append(end))
    before = time.monotonic()
    running.end()
    assert until(lambda: not running.jobs(), 30)
    assert (ends, time.monotonic() - before < 20) == ([], True)
    assert not running.begin(ORDER, GENEROUS, lambda *_: None), "nothing begins after the end"


def test_progress_is_told_while_it_is_made() -> None:
    running = children('import time; print(\'{"type":"at","done":30,"total":90}\', flush=True); time.sleep(600)')
    running.begin(ORDER, GENEROUS, lambda *_: None)
    assert until(
        lambda: [(j.kind, j.subject, j.done, j.total) for j in running.jobs()] == [("consolidate", "run/checkpoint-1", 30, 90)], 30
    )
    running.end()
    assert until(lambda: not running.jobs(), 30)


def test_the_same_is_not_begun_twice() -> None:
    running = children(HANGS)
    assert running.begin(ORDER, GENEROUS, lambda *_: None)
    assert not running.begin(ORDER, GENEROUS, lambda *_: None)
    running.end()
    assert until(lambda: not running.jobs(), 30)


PARENT = """
import sys, time
from ckptsync.config.loading import read
from ckptsync.daemon.children import Bounds, Children, COMMAND
from ckptsync.daemon.orders import Order
children = Children(read("roles: [head]\\nstore: {url: sftp://203.0.113.1/x}\\n", "c", {}), COMMAND)
children.begin(Order("consolidate", "run", "p"), Bounds(600.0, 600.0), lambda *_: None)
time.sleep(600)
"""


def children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG")
def test_a_child_does_not_outlive_its_parent_however_that_dies() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT]) as parent:
        try:
            assert until(lambda: children_of(parent.pid) and b"ckptsync.daemon.child" in cmdline(children_of(parent.pid)[0]), 30)
            [child] = children_of(parent.pid)
            assert until(lambda: sigterm_is_caught(child), 30)
            assert os.getpgid(child) == child
        finally:
            parent.kill()
    assert until(lambda: not is_alive(child), 30)


def cmdline(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def sigterm_is_caught(pid: int) -> bool:
    """It has begun: what comes before is to die with its parent was done."""
    caught = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) & (1 << (signal.SIGTERM - 1)))


def test_no_secret_stands_on_a_command_line_or_in_what_a_child_inherits() -> None:
    script = f"import os, sys; assert 'hunter2' in sys.stdin.readline(); assert 'hunter2' not in str(sys.argv) + str(os.environ); {SAYS_DONE}"
    config = read("roles: [head]\nstore: {url: s3://b, options: {secret: hunter2}}\n", "c", {})
    ends: queue.Queue[End] = queue.Queue()
    Children(config, [sys.executable, "-c", script]).begin(ORDER, GENEROUS, lambda _, end: ends.put(end))
    assert ends.get(timeout=60) == Done(changed=True)
