"""Where a system gives few threads or none, fewer are used, or an error says so."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptsync
from ckptsync.cli.main import main
from ckptsync.config.loading import read
from ckptsync.errors import CkptsyncError
from ckptsync.head.due_jobs import Job
from ckptsync.hooks.pin_checkpoint import _in_thread
from ckptsync.service.jobs import Jobs
from ckptsync.service.tasks import Outcome, Task
from ckptsync.threads import ThreadPool, start_thread
from ckptsync.web.app import make_app
from ckptsync.web.server import HttpServer
from tests.support.waiting import until

NODES = Path(ckptsync.__file__).parent / "demo_data" / "fsdp2"
NAMES = ("node0", "node1")


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Lets so many threads start from now on, as limits of a user, a unit or memory do."""
    start = threading.Thread.start

    def limit(most: int) -> None:
        left = iter(range(most))

        def counted(thread: threading.Thread) -> None:
            if next(left, None) is None:
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", counted)

    return limit


@pytest.mark.parametrize("most", [1, 2, 3])
def test_a_pool_works_with_fewer_threads(most: int, limited: Callable[[int], None]) -> None:
    limited(most)
    with ThreadPool(8) as pool:
        assert [*pool.map(abs, range(100))] == [*range(100)]


def test_without_any_thread_there_is_an_error_with_a_hint(limited: Callable[[int], None]) -> None:
    limited(0)
    with ThreadPool(8, "merge") as pool, pytest.raises(CkptsyncError, match="merge") as caught:
        pool.submit(print)
    assert "ulimit -v" in caught.value.hint
    with pytest.raises(CkptsyncError, match="beat"):
        start_thread(print, "beat")
    with pytest.raises(CkptsyncError, match="web"):
        HttpServer("127.0.0.1:0", make_app({}), "metrics.listen")
    done: list[int] = []
    _in_thread(lambda: done.append(1), "pin")  # a training is never disturbed
    assert done == [1]


@pytest.mark.parametrize("most", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("command", ["merge", "push", "ls", "status", "verify", "pull"])
def test_a_command_ends_with_its_result_or_an_error(
    command: str,
    most: int,
    limited: Callable[[int], None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    checkpoint, store = NODES / "node0/checkpoint-4", f"{tmp_path}/store"
    for node in NAMES:
        send = ["push", str(NODES / node / "checkpoint-4"), "--store", store, "--run", "fsdp2"]
        assert main([*send, "--node", node]) == 0
    words = {
        "merge": [*(f"{NODES}/{node}/checkpoint-4" for node in NAMES), f"{tmp_path}/merged"],
        "push": [str(checkpoint), "--store", store, "--run", "another"],
        "ls": ["--store", store],
        "status": ["--store", store],
        "verify": ["--store", store],
        "pull": ["fsdp2/checkpoint-4", f"{tmp_path}/pulled", "--store", store],
    }
    capsys.readouterr()
    limited(most)
    code = main([command, *words[command]])
    said = capsys.readouterr().err
    assert code == 0 or (code == 1 and "no thread can be started" in said and "hint" in said), said
    assert most < 5 or code == 0
    assert "Traceback" not in said
    assert not (tmp_path / "merged").exists() or code == 0


def test_a_task_that_gets_no_thread_is_begun_again(
    limited: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    bugs: list[BaseException] = []
    task = Task("scan", 60.0, Outcome, bugs.append)
    limited(0)
    now = time.monotonic()
    task.start_if_due(now)
    assert (task.is_running, task.failures, bugs) == (False, 1, [])
    assert "no thread can be started (scan)" in task.error
    assert now < task.due < now + 60.0
    monkeypatch.undo()
    task.start_if_due(task.due)
    until(lambda: task.finished == 1)
    assert (task.error, bugs) == ("", [])


def test_a_job_that_gets_no_thread_is_tried_again(
    limited: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = read("roles: [head]\nstore: {url: /store}", "c", {})
    ended: list[Job] = []
    command = ("sh", "-c", "echo '{\"exit_code\": 0}'")
    jobs = Jobs(config, {"consolidate": 1}, ended.append, command)
    limited(0)
    assert jobs.begin("consolidate", [Job("consolidate", "r", "c")]) == ("r/c",)
    assert jobs.running() == ()
    (error,) = jobs.errors("consolidate")
    assert "no thread can be started" in error
    monkeypatch.undo()
    jobs.begin("consolidate", [Job("consolidate", "r", "c", key="changed")])
    until(lambda: len(ended) == 1)
    assert jobs.running() == ()
