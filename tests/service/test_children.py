"""Child processes that hang, crash, talk nonsense or will not end: real ones."""

from __future__ import annotations

import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ckptsync.config.loading import read
from ckptsync.errors import Corrupt, Transient
from ckptsync.service.children import (
    LATE,
    SOON,
    At,
    Bounds,
    Brief,
    Children,
    Done,
    End,
    Failed,
    Order,
    Task,
    Tasks,
    Wait,
    bounds,
    brief,
    encode,
    failure,
    message,
    wait_after,
)
from ckptsync.service.log import Line
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
from ckptsync.service.children import Bounds
from ckptsync.service.children import Children
from ckptsync.service.children import COMMAND
from ckptsync.service.children import Order
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
            assert until(lambda: children_of(parent.pid) and b"ckptsync.service.child" in cmdline(children_of(parent.pid)[0]), 30)
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


FAILS = 'print(\'{"type":"failed","text":"odd","hint":"look"}\')'
FINDS = 'print(\'{"type":"done","errors":["a: damaged"],"changed":true}\')'


def task(location: str, key: str = "k") -> Task:
    return Task(Order("verify", "run", location), key)


def errands(script: str, most: int = 1) -> tuple[Tasks, Children, threading.Event]:
    children, ended = Children(CONFIG, [sys.executable, "-c", script]), threading.Event()
    return Tasks(children, CONFIG, most, ended.set), children, ended


def test_the_first_ones_begin_and_the_others_are_in_the_queue() -> None:
    its, children, _ = errands(HANGS, most=2)
    for _ in "look", "look again":
        assert set(its.begin(map(task, "abc"))) == {"run/a", "run/b", "run/c"}
        assert sorted(job.subject for job in children.jobs()) == ["run/a", "run/b"]
    children.end()
    assert until(lambda: not children.jobs(), 30)


def test_what_failed_is_told_until_it_is_no_errand_any_more_and_gives_way_to_others() -> None:
    its, _, ended = errands(FAILS)
    its.begin([task("a"), task("b")])
    assert ended.wait(60)
    assert its.errors() == ("run/a: odd",)
    assert its.lines()[0].text == "phase=failed subject=run/a error=odd hint=look"
    assert its.begin([task("a")]) == ()
    ended.clear()
    assert its.begin([task("a"), task("b")]) == ("run/b",)
    assert ended.wait(60)
    assert its.begin([]) == ()
    assert its.errors() == ()


def test_what_is_found_is_told_until_it_is_looked_at_again() -> None:
    its, _, ended = errands(FINDS)
    its.begin([task("a")])
    assert ended.wait(60)
    its.begin([])
    assert its.errors() == ("a: damaged",)


def test_a_change_brings_it_back_at_once() -> None:
    its, children, ended = errands(FAILS)
    its.begin([task("a")])
    assert ended.wait(60)
    assert its.begin([task("a", "other")]) == ("run/a",)
    assert until(lambda: not children.jobs(), 30)


def test_bounds_leave_room_for_a_slow_network_and_a_small_bandwidth() -> None:
    wide, narrow = (
        read(f"roles: [head]\nstore: {{url: /x}}\n{more}", "c", {}) for more in ("", "limits: {bandwidth: 100KB/s, stall: 3m}\n")
    )
    order = Order("consolidate", "run", "p", 10**9)
    assert bounds(wide, order).deadline > 1000 + bounds(wide, Order("consolidate", "run", "p")).deadline
    assert bounds(narrow, order).deadline > 10_000
    assert (bounds(wide, order).stall, bounds(narrow, order).stall) == (120, 240), "limits.stall and a wait before the next try"


PASSES = Failed("away", passes=True)
STAYS = Failed("odd")


def test_what_passes_by_itself_is_tried_again_soon_and_then_less_often() -> None:
    wait, waited = None, []
    for _ in range(9):
        wait = wait_after(wait, task("a"), PASSES, 0.0)
        assert wait
        waited.append(wait.until)
    assert waited[:3] == [SOON, 2 * SOON, 4 * SOON]
    assert waited[-1] == LATE
    assert wait_after(None, task("a"), STAYS, 0.0) == Wait("k", LATE, STAYS, 1)


def test_a_change_begins_the_count_anew() -> None:
    third = Wait("k", 0.0, PASSES, 3)
    assert wait_after(third, task("a", "other"), PASSES, 0.0) == Wait("other", SOON, PASSES, 1)


def test_what_was_well_is_done_again_only_where_that_may_find_something() -> None:
    assert wait_after(None, task("a"), Done(changed=True), 0.0) is None
    assert wait_after(None, task("a"), Done(), 0.0) == Wait("k", SOON), "another head may have done it, and is not seen yet"
    assert wait_after(None, replace(task("a"), lasts=True), Done(changed=True), 0.0) == Wait("k", math.inf)


FULL = """\
roles: [head]
store: {url: "s3://b/x", options: {s3: {key: x, deep: [1, 2.5, null]}}}
limits: {bandwidth: "08:00,50M 19:00,off"}
head: {config_from: {"*": /base}}
retention: {keep_best: "eval_loss:2", runs: {a: {keep_best: "max:x:2", shards: "drop-after:3", max_age: 3d}, b: {shards: keep}}}
"""


def test_a_brief_is_what_it_was_after_the_journey() -> None:
    config = read(FULL, "c", {})
    given = Brief(Order("verify", "run", "location", 5, "parse", 1.5), config, 7)
    assert brief(encode(given)) == given
    assert brief(encode(given)).config.retention.of("a") == config.retention.of("a")


@pytest.mark.parametrize(
    "said", [At(1, 2), Done((Line("k", "t", is_error=True),), ("e",), changed=True), Failed("text\n…", "hint", 4, passes=True)]
)
def test_a_message_is_one_line_and_what_it_was_after_the_journey(said: At | Done | Failed) -> None:
    assert encode(said).count(b"\n") == 1
    assert message(encode(said)) == said


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{}",
        b"null",
        b'{"type":"at","done":"x"}',
        b"[" * 100_000,
        b"\xff",
        b'{"type":"order"}',
        b'{"type":"done","lines":[],"errors":["\xff"]}',
    ],
)
def test_what_is_no_message_is_none(line: bytes) -> None:
    assert message(line) is None


def test_errors_of_a_store_pass_by_themselves_and_others_do_not() -> None:
    assert failure(Transient("away", hint="wait")) == Failed("away", "wait", 4, passes=True)
    assert failure(Corrupt("bad")) == Failed("bad", "", 10)


def test_what_people_are_told_is_the_location_or_the_run() -> None:
    order = Order("consolidate", "run", "location")
    assert (order.subject, Order("consolidate", "run").subject) == ("run/location", "run")
    assert replace(read(FULL, "c", {}), node="x") != read(FULL, "c", {})
