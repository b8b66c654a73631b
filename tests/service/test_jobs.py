"""Jobs in child processes that hang, crash, answer nonsense or will not end: real processes."""

from __future__ import annotations

import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from ckptsync.child import Child
from ckptsync.config.loading import read
from ckptsync.head.due_jobs import Job, JobKind
from ckptsync.service import jobs as module
from ckptsync.service.jobs import (
    LATE,
    SOON,
    CommandResult,
    JobFailed,
    JobProgress,
    Jobs,
    Wait,
    bounds,
    decode_line,
    end_of,
    wait_after,
)
from tests.support.waiting import until

CONFIG = replace(read("roles: [head]\nstore: {url: /nowhere}\n", "c", {}), file="/etc/c.yaml")
COMMAND = "ckptsync verify -c /etc/c.yaml --level digest --always-report -- run/a"
SAYS_DONE = "print('{\"exit_code\":0}', flush=True)"
FAILS = 'print(\'{"error":"odd","hint":"look","exit_code":10}\')'
FINDS = (
    'print(\'{"exit_code":10,"failed":[{"run":"a","location":"","error":"damaged","hint":""}],'
    '"done":[{"run":"a","location":"b","outcome":"marked","scope":"location","reason":"old",'
    '"files":1,"bytes":2}]}\')'
)
HANGS = "import time; time.sleep(600)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def job(location: str, key: str = "k", size: int = 0) -> Job:
    return Job("verify", "run", location, size, key=key)


@contextmanager
def running(script: str, most: int = 1) -> Iterator[tuple[Jobs, threading.Event]]:
    ended = threading.Event()
    command = [sys.executable, "-c", script]
    jobs = Jobs(CONFIG, {"verify": most, "consolidate": 1}, lambda _: ended.set(), command)
    yield jobs, ended
    jobs.end()
    assert until(lambda: not jobs.running())


def error_of(script: str) -> str:
    with running(script) as (jobs, ended):
        jobs.begin("verify", [job("a")])
        assert ended.wait(60)
        [error] = jobs.errors("verify")
        return error.removeprefix("run/a: ").removesuffix(f" (`{COMMAND}`)")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (f"print('{{}}'); {FAILS}", "odd"),
        (
            "print('[' * 100000); print('{}'); print('\\xff')",
            "its process ended with status 0: the log says why",
        ),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
            "its process was killed: the system may have run out of memory",
        ),
        ("import os; os.kill(os.getpid(), 11)", "its process was killed by SIGSEGV"),
        ("import os; os.kill(os.getpid(), 40)", "its process was killed by signal 40"),
        ("import sys; sys.exit(7)", "its process ended with status 7: the log says why"),
    ],
)
def test_a_child_that_fails_crashes_or_answers_nonsense_is_a_failure_that_says_how(
    script: str, error: str
) -> None:
    assert error_of(script) == error


def test_a_hard_limit_of_this_process_is_no_error_and_holds_for_its_children_too() -> None:
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_DATA, (1 << 29, 1 << 29))\n"
        f"print(flush=True); {HANGS}"
    )
    child = Child([sys.executable, "-c", script], os.environ)
    try:
        assert child.line(60) == b"\n"
        child.limit(resource.RLIMIT_DATA, 1 << 30)
        assert resource.prlimit(child.pid, resource.RLIMIT_DATA) == (1 << 29, 1 << 29)
        child.limit(resource.RLIMIT_DATA, 1 << 28)
        assert resource.prlimit(child.pid, resource.RLIMIT_DATA) == (1 << 28, 1 << 29)
    finally:
        child.end()


def test_a_bug_in_listening_to_a_child_is_a_failure_and_the_next_job_begins(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch, running(SAYS_DONE) as (jobs, ended):
        patch.setattr(module, "decode_line", {}.__getitem__)
        jobs.begin("verify", [job("a")])
        assert ended.wait(60)
        [error] = jobs.errors("verify")
        assert error.startswith("run/a: KeyError: ")
        assert "verify run/a" in caplog.text
        assert jobs.begin("verify", [job("a"), job("b")]) == ("run/b",)


ALIVE = 'while True: print(\'{"done":0,"total":0}\', flush=True)'


@pytest.mark.parametrize(
    ("script", "limits", "error"),
    [
        (HANGS, (0.5, 60.0), "killed: no progress for 0 s"),
        (ALIVE, (60.0, 0.5), "killed: no result after 0 s"),
    ],
)
def test_a_child_without_progress_is_killed_and_so_is_one_that_never_ends(
    script: str, limits: tuple[float, float], error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "bounds", lambda *_: limits)
    assert error_of(script) == error


def test_a_child_that_ignores_sigterm_dies_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = tmp_path / "pid"
    for stall in (1.5, 10.0, 60.0):  # a busy machine may need some to start both
        monkeypatch.setattr(module, "bounds", lambda *_, stall=stall: (stall, 600.0))
        error_of(
            "import subprocess, sys, pathlib; other = subprocess.Popen([sys.executable, '-c', "
            f"{DEAF!r}])\n"
            f"pathlib.Path('{pid}').write_text(str(other.pid))\n"
            f"{DEAF}"
        )
        if pid.exists() and pid.read_text():
            break
    assert until(lambda: not is_alive(int(pid.read_text())))


def test_most_of_them_run_at_once_the_others_wait_and_a_hung_one_holds_up_no_other_kind() -> None:
    script = 'print(\'{"done":30,"total":90}\', flush=True); ' + HANGS
    with running(script, most=2) as (jobs, _):
        for _ in "first", "again":
            assert set(jobs.begin("verify", map(job, "abc"))) == {"run/a", "run/b", "run/c"}
            assert sorted(j.subject for j in jobs.running()) == ["run/a", "run/b"]
        assert jobs.begin("consolidate", [Job("consolidate", "run", "a")]) == ("run/a",)
        expected = [("consolidate", "run/a"), ("verify", "run/a"), ("verify", "run/b")]
        assert sorted((j.kind, j.subject) for j in jobs.running()) == expected
        assert until(lambda: {(j.done, j.total) for j in jobs.running()} == {(30, 90)})


def test_what_waits_says_for_what() -> None:
    with running(HANGS) as (jobs, _):
        jobs.begin("verify", [job("a", size=7), job("b")])
        [runs], [waits] = jobs.running(), jobs.waiting()
        assert (runs.subject, runs.state, runs.name) == ("run/a", "running", "")
        assert (runs.done, runs.total) == (0, 0), "not known yet"
        assert (waits.subject, waits.state) == ("run/b", "queued")
        assert waits.reason == "other jobs go first"
        jobs.begin("verify", [job("a")])
        assert jobs.waiting() == ()
    with running(FAILS) as (jobs, ended):
        before = time.time()
        jobs.begin("verify", [job("a")])
        assert ended.wait(60)
        [failed] = jobs.waiting()
        assert (failed.state, failed.reason, failed.hint) == ("failed", "odd", "look")
        assert failed.until is not None
        assert failed.until > before + LATE - 1
    with running(SAYS_DONE) as (jobs, ended):
        jobs.begin("verify", [job("a")])
        assert ended.wait(60)
        assert jobs.waiting() == ()


def test_a_stop_ends_children_in_time_is_no_failure_and_nothing_begins_after_it() -> None:
    with running(DEAF) as (jobs, ended):
        jobs.begin("verify", [job("a")])
        before = time.monotonic()
        jobs.end()
        assert until(lambda: not jobs.running())
        assert time.monotonic() - before < 50
        jobs.begin("verify", [job("a")])
        assert (jobs.running(), jobs.errors("verify"), ended.is_set()) == ((), (), False)


def test_a_failure_is_an_error_until_nobody_asks_for_that_job_and_lets_others_begin() -> None:
    with running(FAILS) as (jobs, ended):
        jobs.begin("verify", [job("a"), job("b")])
        assert ended.wait(60)
        assert jobs.errors("verify") == (f"run/a: odd (`{COMMAND}`)",)
        [line] = jobs.lines("verify")
        told = f'phase=failed subject=run/a error=odd hint=look command="{COMMAND}"'
        assert line.text == told, "who pastes it sees the same failure"
        assert jobs.begin("verify", [job("a")]) == (), "it waits"
        ended.clear()
        assert jobs.begin("verify", [job("a"), job("b")]) == ("run/b",)
        assert ended.wait(60)
        ended.clear()
        assert jobs.begin("verify", [job("a", "another")]) == ("run/a",), "something has changed"
        assert ended.wait(60)
        assert jobs.begin("verify", []) == ()
        assert jobs.errors("verify") == ()


def test_a_job_that_fails_again_waits_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "backoff", lambda count, *_: LATE * (count - 1))
    with running("raise SystemExit(1)") as (jobs, ended):
        for _ in "first", "again":
            ended.clear()
            assert jobs.begin("verify", [job("a")]) == ("run/a",)
            assert ended.wait(60)
        assert jobs.begin("verify", [job("a")]) == ()


def test_what_a_job_found_is_an_error_until_it_runs_again(tmp_path: Path) -> None:
    well = tmp_path / "well"
    with running(f"import os\nif os.path.exists({str(well)!r}): {SAYS_DONE}\nelse: {FINDS}") as (
        jobs,
        ended,
    ):
        jobs.begin("verify", [job("a")])
        assert ended.wait(60)
        jobs.begin("verify", [])
        assert jobs.errors("verify") == ("a: damaged",)
        well.touch()
        ended.clear()
        jobs.begin("verify", [job("a")])
        assert ended.wait(60)
        assert jobs.errors("verify") == ()


PARENT = """
import sys, time
from pathlib import Path
from ckptsync.config.loading import load
from ckptsync.head.due_jobs import Job
from ckptsync.service.jobs import Jobs
config = load(Path(sys.argv[1]), {})
Jobs(config, {"consolidate": 1}).begin("consolidate", [Job("consolidate", "run", "p")])
time.sleep(600)
"""


def children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def catches_sigterm(pid: int) -> bool:
    """Whether the child has begun: before that it has asked to die with its parent."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    caught = next((line for line in status if line.startswith("SigCgt")), "SigCgt 0")
    return bool(int(caught.split()[1], 16) & (1 << (signal.SIGTERM - 1)))


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG")
def test_a_child_does_not_outlive_its_parent_however_that_dies(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("roles: [head]\nstore: {url: sftp://203.0.113.1/x}\n")

    def begun() -> bool:
        found = children_of(parent.pid)
        return bool(found) and b"consolidate" in Path(f"/proc/{found[0]}/cmdline").read_bytes()

    with subprocess.Popen([sys.executable, "-c", PARENT, str(config)]) as parent:
        try:
            assert until(begun)
            [child] = children_of(parent.pid)
            assert until(lambda: catches_sigterm(child))
            assert os.getpgid(child) == child
        finally:
            parent.kill()
    assert until(lambda: not is_alive(child))


@pytest.mark.parametrize("kind", ["consolidate", "verify", "event"])
def test_a_child_waits_for_the_head_goes_before_it_and_leaves_no_core(
    tmp_path: Path, kind: JobKind
) -> None:
    score = int(Path("/proc/self/oom_score_adj").read_text()) + module.OOM_FIRST
    memory = module.MEMORY + 2 * CONFIG.limits.memory
    if kind != "consolidate":  # torch has a limit of its own, and an operator's program none
        memory = resource.getrlimit(resource.RLIMIT_DATA)[0]
    expected = [min(19, os.nice(0) + module.NICER), str(min(1000, score)), 0, memory]
    script = (
        "import os, pathlib, resource, time\n"
        "def told(): return [os.nice(0),"
        " pathlib.Path('/proc/self/oom_score_adj').read_text().strip(),"
        " resource.getrlimit(resource.RLIMIT_CORE)[0],"
        " resource.getrlimit(resource.RLIMIT_DATA)[0]]\n"
        "end = time.monotonic() + 60\n"  # its parent limits it while it begins
        f"while told() != {expected!r} and time.monotonic() < end: time.sleep(0.05)\n"
        f"pathlib.Path('{tmp_path}/told').write_text(repr(told())); {SAYS_DONE}"
    )
    ended = threading.Event()
    command = [sys.executable, "-c", script]
    jobs = Jobs(CONFIG, {kind: 1}, lambda _: ended.set(), command)
    jobs.begin(kind, [Job(kind, "run", "a", level="digest", seconds=60.0)])
    assert ended.wait(120)
    assert (tmp_path / "told").read_text() == repr(expected)


def test_bounds_leave_room_for_a_slow_network_and_a_small_bandwidth() -> None:
    text = "roles: [head]\nstore: {url: /x}\nlimits: {bandwidth: 100KB/s, stall: 3m}\n"
    large = job("p", size=10**9)
    (stall, deadline), (_, least) = bounds(CONFIG, large), bounds(CONFIG, job("p"))
    longest_stall, longest = bounds(read(text, "c", {}), large)
    assert deadline > 1000 + least
    assert longest > 10_000
    many = read(f"{text}head: {{jobs: 10}}\n", "c", {})
    assert bounds(many, large)[1] > 2 * 10 * large.size / 100e3, "its jobs share the bandwidth"
    assert (stall, longest_stall) == (120, 240)


MODELS = ({"run": "r", "location": "c"},)
PASSES = JobFailed("away", passes=True)
STAYS = JobFailed("odd")


def test_what_passes_by_itself_is_tried_again_soon_and_then_less_often() -> None:
    wait, waited = None, []
    for _ in range(9):
        wait = wait_after(wait, job("a"), PASSES, 0.0)
        assert wait
        waited.append(wait.until)
    assert waited[:3] == [SOON, 2 * SOON, 4 * SOON]
    assert waited[-1] == LATE
    assert wait_after(None, job("a"), STAYS, 0.0) == Wait("k", LATE, STAYS, 1)
    changed = wait_after(Wait("k", 0.0, PASSES, 3), job("a", "other"), PASSES, 0.0)
    assert changed == Wait("other", SOON, PASSES, 1)


def test_what_was_well_is_done_again_only_where_that_may_find_something() -> None:
    assert wait_after(None, job("a"), CommandResult(0, models=MODELS), 0.0) is None
    late = "another head may have done it, and is not visible yet"
    assert wait_after(None, job("a"), CommandResult(0), 0.0) == Wait("k", SOON), late
    lasting = Job("consolidate", "run", "a", key="k", once_per_key=True)
    assert wait_after(None, lasting, CommandResult(0, models=MODELS), 0.0) == Wait("k", math.inf)


def test_what_is_no_line_of_a_command_is_none() -> None:
    for line in (b"", b"{}", b"null", b'{"done":"x","total":1}', b"[" * 100_000, b"\xff"):
        assert decode_line(line) is None, line[:40]
    assert decode_line(b'{"exit_code":0,"reports":[{"run":"\xff"}]}') is None
    assert decode_line(b'{"done":1,"total":2}\n') == JobProgress(1, 2)
    assert decode_line(b'{"exit_code":0,"locations":[1],"orphans":[]}\n') == CommandResult(0)


def test_errors_of_a_store_pass_by_themselves_and_so_does_another_heads_model() -> None:
    refused = "agreement-0.json: another head, with other options or inputs, writes this model"
    assert end_of(CommandResult(3, refused)) == JobFailed(refused, passes=True)
    for code in (1, 2, 4, 5, 10):
        end = JobFailed("odd", "wait", passes=code < 5)
        assert end_of(CommandResult(code, "odd", "wait")) == end
    damage = CommandResult(10)
    assert end_of(damage) is damage, "its report tells it"
    stopped = decode_line(b'{"exit_code":10,"errors":[{"error":"full","exit_code":4,"hint":""}]}')
    assert isinstance(stopped, CommandResult)
    assert end_of(stopped) == JobFailed("full", passes=True), "its report is not written"


def test_a_job_is_named_by_its_location_or_its_run() -> None:
    subjects = [j.subject for j in (job("p"), Job("consolidate", "run"), Job("retain"))]
    assert subjects == ["run/p", "run", "every run"]


def test_a_name_that_begins_like_an_option_is_none() -> None:
    words = Job("consolidate", "-c", "--all").command("/c.yaml")
    assert words == ("ckptsync", "consolidate", "-c", "/c.yaml", "--", "-c/--all")
    run = Job("consolidate", "run").command("/c.yaml")
    assert run == ("ckptsync", "consolidate", "-c", "/c.yaml", "--only-configuration", "--", "run")
    retain = Job("retain").command("/c.yaml")
    assert retain == ("ckptsync", "gc", "-c", "/c.yaml", "--stop-after", "10m")
