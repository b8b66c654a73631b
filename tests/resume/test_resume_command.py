"""``ckptsync resume`` and ``ckptsync drain`` as programs, in front of real processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ckptsync.cli import resume
from ckptsync.cli.main import main
from ckptsync.hooks import embedded_worker
from ckptsync.resume.drain import DrainResult, OutputDirSaves
from ckptsync.spool import markers
from ckptsync.spool.markers import read_log
from ckptsync.stores.opening import create_store
from tests.resume.trainer import save, source
from tests.support.exhaustive import sampled
from tests.support.refused_commands import run
from tests.support.stand_in_programs import CLEAN, ROOT
from tests.support.terminal import on_terminal, read_until
from tests.support.waiting import until
from tests.support.worker_in_process import push_now

FRONT = (
    "import sys; from ckptsync.cli import resume; resume.FIRST = 0.1;"
    " from ckptsync.cli.main import main; sys.exit(main(sys.argv[1:]))"
)
ON_ITS_TERMINAL = (
    "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
    " os.execv(sys.argv[1], sys.argv[1:])"
)


class Place:
    """A node's output directory, its configuration, and the store."""

    def __init__(self, root: Path, node: str = "n0", store: Path | None = None) -> None:
        self.out, self.config = root / "out", root / "worker.yaml"
        self.store = store or root / "store"
        self.config.write_text(
            f"node: {node}\nstore: {{url: {self.store}}}\n"
            f"worker: {{runs: [{self.out}], scan_every: 200ms, quiet: 300ms, unmarked: 1s}}\n"
        )

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-c", FRONT, *words]

    def resume(self, steps: int, ends: str, *options: str, store: bool = True) -> list[str]:
        """A command line of `resume` in front of the trainer."""
        trainer = [str(ROOT / "tests" / "resume" / "trainer.py"), str(self.out)]
        given = ("-c", str(self.config), "--trust", "complete") if store else ()
        return self.command(
            "resume", str(self.out), *given, *options, "--", sys.executable, *trainer,
            "--resume_from_checkpoint", "{checkpoint}", str(steps), ends,
        )  # fmt: skip

    def starts(self) -> list[Any]:
        """What each start of the trainer was given, and each signal that it noted."""
        log = Path(f"{self.out}.starts")
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    def stored(self) -> set[str]:
        """The checkpoints that have a manifest in the store."""
        records = self.store / "out" / ".ckptsync"
        return {path.parent.name for path in records.glob("*/manifest*")}

    def drain(self, *options: str) -> tuple[int, dict[str, Any]]:
        done = run(("drain", self.out, "-c", self.config, "--json", *options), CLEAN)
        return done.returncode, json.loads(done.stdout)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def ran(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=CLEAN, cwd=ROOT, timeout=600,
        **options,
    )  # fmt: skip


@contextlib.contextmanager
def started(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=CLEAN, cwd=ROOT
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def has_more_starts(place: Place, count: int) -> bool:
    return len(place.starts()) > count


def has_stored(place: Place, checkpoint: str) -> bool:
    is_there = (place.out / checkpoint).is_dir()
    return is_there and statuses(place.drain("--wait", "0")[1]).get(checkpoint) == "stored"


def statuses(document: dict[str, Any]) -> dict[str, str]:
    return {save["checkpoint"]: save["status"] for save in document["saves"]}


def test_a_training_killed_in_a_save_goes_on_from_the_newest_whole_one(place: Place) -> None:
    done = ran(place.resume(2, "torn,exit:3,torn", "--restarts", "2"))
    assert done.returncode == 137, done.stderr
    first, second, third = place.starts()
    assert (first["from"], first["argv"][1:]) == (None, ["2", "torn,exit:3,torn"])
    path = str(place.out / "checkpoint-2")
    assert (second["from"], second["argv"][1:3]) == (path, ["--resume_from_checkpoint", path])
    assert third["from"] == str(place.out / "checkpoint-4")
    assert place.stored() == {f"checkpoint-{step}" for step in range(1, 7)}, done.stderr
    stored = place.store / "out" / "checkpoint-6" / "model.safetensors"
    assert stored.read_bytes() == (source() / "model.safetensors").read_bytes()
    assert "not stored: checkpoint-7: model.safetensors does not end as" in done.stderr
    assert "what is not stored is on this machine only" in done.stderr
    code, document = place.drain("--wait", "0")
    assert (code, document["may_shut_down"]) == (3, False)
    assert statuses(document)["checkpoint-7"] == "refused"


def test_all_nodes_go_on_to_the_same_next_attempt(tmp_path: Path) -> None:
    nodes = []
    for name in ("n0", "n1"):
        (tmp_path / name).mkdir()
        place = Place(tmp_path / name, node=name, store=tmp_path / "store")
        nodes.append(place)
    options = ("--nnodes", "2", "--attempt", "job-1", "--restarts", "2", "--run", "out")
    # each start takes the next end, and a signal counts as a start
    ends = "signals:1,unused,exit:0"
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(started(place.resume(2, ends, *options))) for place in nodes]
        # an upload after the other node joined would make it another save of the same step
        for place in nodes:
            assert until(partial(has_stored, place, "checkpoint-2"))
        for place in nodes:
            os.kill(place.starts()[0]["pid"], signal.SIGUSR1)
        told = [process.communicate(timeout=120)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0], told
    for place, text in zip(nodes, told, strict=True):
        first, _, second = place.starts()
        assert (first["from"], second["from"]) == (None, str(place.out / "checkpoint-2"))
        assert "attempt job-1)" in text
        assert "attempt job-1.1)" in text


def test_the_worker_notes_why_each_attempt_ended(place: Place) -> None:
    done = ran(place.resume(1, "kill,exit:0", "--attempt", "job7", "--restarts", "1"))
    assert done.returncode == 0, done.stderr
    log = [line.partition(" ")[2] for line in read_log(place.out / "_ckptsync")]
    assert log[0].startswith("resume: attempt job7 begins from the beginning")
    assert log[1] == "resume: the training was killed by SIGKILL (attempt job7)"
    assert log[2].startswith("resume: attempt job7.1 begins with checkpoint-1")
    assert log[3] == "resume: the training ended with status 0 (attempt job7.1)"
    assert log[1] in (place.out / "_ckptsync" / "embedded.log").read_text()  # a note of its worker


def test_a_failure_before_any_new_save_counts_twice(place: Place, tmp_path: Path) -> None:
    save(tmp_path / "before" / "out", 1, 9)
    push_now(tmp_path / "before" / "out", create_store(str(place.store)), "n0", "out")
    done = ran(place.resume(0, "exit:4,exit:4,exit:5", "--restarts", "3"))
    assert (done.returncode, len(place.starts())) == (4, 2), done.stderr
    assert "not started again" in done.stderr


def test_the_exit_code_is_the_trainings_and_the_worker_has_its_keys(place: Place) -> None:
    settings = "retention: {keep_last: 3}\nhead: {jobs: 1}\nlog: {format: text}\n"
    place.config.write_text(place.config.read_text() + settings)
    done = ran(place.resume(1, "exit:3"))
    assert done.returncode == 3, done.stderr
    assert done.stdout == "trained to step 1\n"
    [mark] = markers.list_training_processes(place.out / "_ckptsync")
    assert mark.ended == 0  # so that its files are no final model
    assert "all that was saved here is stored; this machine may be shut down" in done.stderr
    (written,) = (place.out / "_ckptsync").glob("embedded-*.yaml")
    given = json.loads(written.read_text())
    assert (given["node"], given["roles"]) == ("n0", ["worker"])
    assert given["worker"]["quiet"] == "300ms"
    assert given["store"] == {"url": str(place.store)}
    assert not {"retention", "head"} & given.keys()
    assert embedded_worker.read_log_problem(place.out / "_ckptsync") == ""
    assert place.drain()[0] == 0


REPLACED = ("--signal-map", "USR1=TERM", "--signal-map", "USR2=NONE")


@pytest.mark.parametrize(
    ("options", "sent", "noted"),
    [((), ["USR1", "INT"], ["SIGUSR1", "SIGINT"]), (REPLACED, ["USR2", "USR1"], ["SIGTERM"])],
)
def test_signals_go_to_the_training(
    place: Place, options: tuple[str, ...], sent: list[str], noted: list[str]
) -> None:
    end = f"signals:{len(noted)}"
    with started(place.resume(0, end, *options, "--restarts", "5", store=False)) as process:
        assert until(place.starts), process.poll()
        for name in sent:
            count = len(place.starts())
            process.send_signal(signal.Signals[f"SIG{name}"])
            # what is not passed on leaves no trace; of the others each is noted before the next
            assert name == "USR2" or until(partial(has_more_starts, place, count))
        last = process.wait(60)
    assert place.starts()[1:][: len(noted)] == noted
    assert last == 7, "a training that somebody ended is not started again"


@pytest.mark.parametrize(("mapped", "is_ignored"), [("USR1=TERM", 1), ("USR1=NONE", 0)])
def test_a_replaced_signal_is_ignored(place: Place, mapped: str, is_ignored: int) -> None:
    """A scheduler may send it to every process of a step."""
    program = "import signal, sys; sys.exit(signal.getsignal(10) == signal.SIG_IGN)"
    words = ("resume", str(place.out), "--signal-map", mapped, "--", sys.executable, "-c", program)
    assert ran(place.command(*words)).returncode == is_ignored


def test_a_terminals_interrupt_reaches_the_training_once(place: Place) -> None:
    command = [sys.executable, "-c", ON_ITS_TERMINAL, *place.resume(0, "signals:1", store=False)]
    with on_terminal(command, ("stdin", "stdout", "stderr"), env=CLEAN, cwd=ROOT) as (
        child,
        leader,
    ):
        assert until(place.starts), child.poll()
        os.write(leader, b"\x03")
        read_until(leader, lambda shown: b"nothing was uploaded" in shown)
        assert child.wait(60) == 7
    assert place.starts()[1:] == ["SIGINT"]


def test_standard_input_is_the_trainings(place: Place) -> None:
    done = subprocess.run(
        place.resume(0, "exit:0", store=False), input="a line\n", text=True, check=False,
        capture_output=True, cwd=ROOT, env={**CLEAN, "READS_STDIN": "1"}, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert place.starts()[0]["stdin"] == "a line\n"


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_a_training_whose_resume_was_killed_gets_sigterm(place: Place) -> None:
    with started(place.resume(0, "signals:1", store=False)) as process:
        assert until(place.starts), process.poll()
        process.kill()
        assert until(lambda: "SIGTERM" in place.starts())
    assert until(lambda: not markers.start_time(place.starts()[0]["pid"]))


@pytest.mark.parametrize(
    ("options", "is_stopped"),
    [
        (["--restarts", "0"], [False, False, True]),
        (["--restarts", "3"], [False, True, True, False, True, True]),
        (["--drain", "0s"], [True, True, True]),
    ],
)
def test_one_signal_ends_the_wait_before_a_restart_a_second_one_the_last_wait(
    place: Place, monkeypatch: pytest.MonkeyPatch, options: list[str], is_stopped: list[bool]
) -> None:
    """Each may also have ended our worker, which then starts again at once."""
    stops, ended_workers = list[bool](), list[Path]()

    def wait(
        _: OutputDirSaves, is_stopped: Callable[[], bool], ensure_worker: Callable[[], None],
        *_rest: object,
    ) -> DrainResult:  # fmt: skip
        for _read in range(3):
            ensure_worker()
            ensure_worker()
            stops.append(is_stopped())
            signal.raise_signal(signal.SIGTERM)
        return DrainResult()

    monkeypatch.setattr(resume, "drain", wait)
    monkeypatch.setattr(embedded_worker, "expect_end", ended_workers.append)
    words = ["-c", str(place.config), "--no-worker", *options, "--", "false"]
    assert main(["resume", str(place.out), *words]) == 1
    assert stops == is_stopped
    assert len(ended_workers) == len(stops) - 1


def test_drain_sends_by_a_worker_of_its_own_what_is_left(place: Place) -> None:
    save(place.out, 1, 9)
    code, document = place.drain()
    assert (code, statuses(document)) == (0, {"checkpoint-1": "stored"})


def test_the_exit_code_is_known_where_who_started_it_ignores_children(place: Place) -> None:
    ignores = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN);"
    command = [sys.executable, "-c", f"{ignores} os.execv(sys.argv[1], sys.argv[1:])"]
    done = ran([*command, *place.resume(1, "exit:3", store=False)])
    assert done.returncode == 3, done.stderr


def test_a_worker_that_serves_the_directory_is_enough(place: Place) -> None:
    place.out.mkdir()
    service = place.command("run", "-c", str(place.config))
    with started(service) as worker:
        assert worker.stderr
        assert any('"started"' in line for line in worker.stderr)
        done = ran(place.resume(2, "exit:0", "--no-worker"))
        assert done.returncode == 0, done.stderr
        assert place.stored() == {"checkpoint-1", "checkpoint-2"}
        done = ran(place.resume(1, "exit:0,exit:0"))
        assert place.stored() == {f"checkpoint-{n}" for n in (1, 2, 3)}, done.stderr
        assert worker.poll() is None
        worker.terminate()
        assert worker.wait(60) == 0


def test_the_final_model_of_a_training_of_a_moment_is_stored_with_it(place: Place) -> None:
    script = (
        "import shutil, sys; out, source, *names = sys.argv[1:];"
        "[shutil.copyfile(source + '/' + name, out + '/' + name) for name in names]"
    )
    place.out.mkdir()
    place.config.write_text(place.config.read_text().replace("unmarked: 1s", "unmarked: 1h"))
    names = ("model.safetensors", "config.json")
    words = ("resume", str(place.out), "-c", str(place.config), "--trust", "complete", "--")
    files = (str(place.out), str(source()), *names)
    done = ran(place.command(*words, sys.executable, "-c", script, *files))
    assert done.returncode == 0, done.stderr
    assert place.stored() == {"final"}, done.stderr


@pytest.mark.parametrize("has_logs", sampled([True, False], 2))
def test_the_last_logs_are_in_the_store_when_the_wait_ends(place: Place, *, has_logs: bool) -> None:
    settings = place.config.read_text().replace("200ms", f"30s, logs: {str(has_logs).lower()}")
    place.config.write_text(settings)
    log = place.out / "_ckptsync" / "embedded.log"
    trainer = f"""
import pathlib, subprocess, sys, time
out, log = pathlib.Path({str(place.out)!r}), pathlib.Path({str(log)!r})
program = {str(ROOT / "tests" / "resume" / "trainer.py")!r}
subprocess.run([sys.executable, program, str(out), "1", "exit:0"], check=True)
while not log.exists() or '"sent"' not in log.read_text():
    time.sleep(0.1)
(out / "all_results.json").write_text('{{"loss": 1}}')
"""
    command = ("resume", str(place.out), "-c", str(place.config), "--", sys.executable, "-c")
    done = ran(place.command(*command, trainer))
    assert done.returncode == 0, done.stderr
    stored = place.store / "out" / "logs" / "n0" / "all_results.json"
    assert stored.exists() == has_logs


def test_drain_of_nothing_does_not_wait(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    place.out.mkdir()
    named = place.config.read_text().replace(f"[{place.out}]", f"[{{path: {place.out}, name: a}}]")
    place.config.write_text(named)
    assert main(["drain", str(place.out), "-c", str(place.config), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["run"], document["may_shut_down"], document["saves"]) == ("a", True, [])
    assert list(place.out.iterdir()) == []


@pytest.mark.parametrize("out", ["missing", "dangling", "worker.yaml"])
def test_drain_does_not_call_a_path_stored_that_is_no_directory(
    place: Place, out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place.out.with_name("dangling").symlink_to("nowhere")
    path = place.out.with_name(out)
    assert main(["drain", str(path), "-c", str(place.config), "--wait", "0"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert str(path) in printed.err
    assert not place.store.exists()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "no command to run"),
        (["--"], "no command to run"),
        (["--", "no-such-program-anywhere"], "no such program"),
        (["--signal-map", "KILL=TERM", "--", "true"], "--signal-map"),
        (["--signal-map", "USR1=NOTHING", "--", "true"], "--signal-map"),
        (["--drain", "soon", "--", "true"], "--drain"),
        (["--for", "hf", "--", "true", "{checkpoint}"], "--for hf"),
        (["--no-such", "--", "true"], "--no-such"),
        (["--", "env", "--nnodes=2"], "is to run on 2 nodes"),
    ],
)
def test_what_cannot_be_begun_is_an_error_of_usage(
    place: Place, words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["resume", str(place.out), *words]) == 2
    assert why in capsys.readouterr().err
    assert not place.out.exists()


def test_a_training_ignores_no_signal_that_python_does(place: Place) -> None:
    words = ("resume", str(place.out), "--", "grep", "SigIgn", "/proc/self/status")
    ignored = int(ran(place.command(*words)).stdout.split()[1], 16)
    assert not ignored & (1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1)


def test_what_is_required_or_to_be_kept_is_said_to_the_preparation(place: Place) -> None:
    save(place.out, 1, 9)
    (place.out / "checkpoint-1/trainer_state.json").unlink()
    words = ["resume", str(place.out), "--keep-newer"]
    assert main([*words, "--require", "--", "true"]) == 3
    assert main([*words, "--", "true"]) == 0
    assert (place.out / "checkpoint-1").is_dir()
    assert main([*words[:2], "--", "true"]) == 0
    assert not (place.out / "checkpoint-1").exists()


def test_options_of_the_training_are_its_own(place: Place) -> None:
    given = ["--json", "--store", "x", "--", "-c", "{}"]
    program = [sys.executable, "-c", "import sys; print(sys.argv[1:])", *given]
    done = ran(place.command("resume", str(place.out), "--", *program))
    assert (done.returncode, done.stdout) == (0, f"{given}\n"), done.stderr
