"""The commands that a head runs, as the head runs them."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from ckptsync.catalogue.cached import Cache
from ckptsync.child import PARENT
from ckptsync.cli import gc
from ckptsync.cli.main import main
from ckptsync.config.loading import read, share
from ckptsync.config.schema import Config
from ckptsync.head.due_jobs import Job
from ckptsync.head.gc import RetentionRequest, RetentionResult, apply_retention
from ckptsync.head.retention_rules import Rules
from ckptsync.service.jobs import CommandResult, JobProgress, decode_line, end_of
from ckptsync.service.log import Pairs
from ckptsync.stores.contract import Store
from ckptsync.stores.opening import create_store
from tests.service.test_head import arrive, fail, word
from tests.service.test_jobs import catches_sigterm
from tests.support.retention_stores import FIRST, fill
from tests.support.small_store import flip, make

CONSOLIDATE = Job("consolidate", "fsdp2", "checkpoint-4")
VERIFY = Job("verify", "fsdp2", "checkpoint-4", level="digest")


def configured(url: Path | str, more: str = "") -> Config:
    return read(f"roles: [head]\nstore: {{url: {url}}}\n{more}", "c", {})


def words(job: Job, url: Path | str, home: Path, more: str = "") -> list[str]:
    """The command line of a job, of a configuration that is written for it."""
    file = home / "head.yaml"
    file.write_text(f"roles: [head]\nstore: {{url: {url}}}\n{more}")
    _, name, *rest = job.command(str(file))
    return [name, "--progress", "json", *rest]


def started(job: Job, url: Path | str, home: Path, more: str = "") -> list[str]:
    return [sys.executable, "-m", "ckptsync", *words(job, url, home, more)]


def answered(
    url: Path, job: Job, home: Path, parent: int = 0
) -> tuple[int, list[JobProgress | CommandResult | None]]:
    """Exit status, and what it said."""
    done = subprocess.run(
        started(job, url, home),
        capture_output=True,
        check=False,
        timeout=600,
        env={**os.environ, PARENT: str(parent or os.getpid())},
    )
    return done.returncode, [decode_line(line) for line in done.stdout.splitlines()]


@pytest.fixture(autouse=True)
def _own_log() -> Iterator[None]:
    """A command that runs in this process sets up its log."""
    handlers = [*logging.root.handlers]
    yield
    logging.root.handlers[:] = handlers
    logging.captureWarnings(capture=False)


class Run:
    def __init__(self, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._home, self._capsys = home, capsys

    def __call__(self, job: Job, url: Path, more: str = "") -> CommandResult:
        self._capsys.readouterr()
        main(words(job, url, self._home, more))
        result = decode_line(self._capsys.readouterr().out.splitlines()[-1].encode())
        assert isinstance(result, CommandResult)
        return result


@pytest.fixture
def run(tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(tmp_path_factory.mktemp("head"), capsys)


@pytest.fixture
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("head")


def test_a_bug_is_logged_with_its_traceback_and_has_no_result(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    create_store(str(tmp_path))
    monkeypatch.setattr(gc, "build_request", lambda _: fail(KeyError("bug")))
    assert main(words(Job("retain"), tmp_path, home, "log: {format: json}\n")) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "KeyError: 'bug'" in json.loads(said.err)["traceback"]


def test_damage_is_an_answer_with_what_was_found(tmp_path: Path, run: Run) -> None:
    make(tmp_path)
    model = next(tmp_path.glob("fsdp2/consolidated/*/model.safetensors"))
    flip(model)
    result = run(VERIFY, tmp_path)
    assert (result.exit_code, end_of(result)) == (10, result)
    proved, *findings = result.lines()
    assert proved.level == "error"
    assert " check=digest verdict=damaged read=" in proved.text
    assert all(
        line.level == "error" and line.text.startswith("phase=found run=fsdp2") for line in findings
    )
    told = [line.text.values for line in findings if isinstance(line.text, Pairs)]
    assert told[0]["kind"] == "digest"
    assert str(told[0]["file"]).endswith("/model.safetensors")
    assert told[0]["tensors"]


def test_a_child_of_a_dead_parent_ends_before_it_begins(tmp_path: Path, home: Path) -> None:
    assert answered(tmp_path, CONSOLIDATE, home, parent=1) == (1, [])


def test_sigterm_ends_it_while_it_waits_for_a_store_that_does_not_answer(home: Path) -> None:
    command = started(CONSOLIDATE, "sftp://203.0.113.1/x", home, "limits: {patience: 10m}\n")
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe) as child:
        while not catches_sigterm(child.pid):
            assert child.poll() is None
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 143
        assert child.stdout
        assert not any(isinstance(decode_line(line), CommandResult) for line in child.stdout)


def test_a_location_is_consolidated_and_then_there_is_nothing_to_do(
    tmp_path: Path, run: Run
) -> None:
    store = create_store(str(tmp_path))
    arrive(store, "fsdp2")
    where = "run=fsdp2 location=checkpoint-4"
    for job, text in (
        (CONSOLIDATE, rf"phase=consolidated {where} files=[1-9]\d* bytes=[1-9]\d* notes=\".*\""),
        (VERIFY, rf"phase=verified {where} check=digest verdict=ok read=[1-9]\d*"),
    ):
        done = run(job, tmp_path)
        assert (done.exit_code, done.is_change) == (0, True)
        assert re.fullmatch(text, next(done.lines()).text)
    assert word(store) == ["VERIFIED"]
    assert not run(CONSOLIDATE, tmp_path).is_change
    assert run(VERIFY, tmp_path).is_change, "the schedule knows from reports alone"
    assert word(store) == ["VERIFIED"]
    assert not run(Job("consolidate", "fsdp2"), tmp_path).is_change


def test_children_share_the_bandwidth_and_the_memory_of_transfers(tmp_path: Path) -> None:
    text = 'limits: {bandwidth: "08:00,50M 19:00,off"}\nhead: {jobs: 5}\n'
    told = share(configured(tmp_path, text))
    assert told.bandwidth
    assert told.bandwidth.rates == (10 * 2**20, None) * 7
    assert share(configured(tmp_path)).bandwidth is None
    assert share(configured(tmp_path)).memory >> 20 == 19
    assert share(configured(tmp_path, "limits: {memory: 8MiB}\n")).memory >> 20 == 8


@pytest.fixture
def four(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Of which two may go; what is read of it is kept in a file."""
    monkeypatch.delenv("CACHE_DIRECTORY", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store = create_store(str(tmp_path / "store"))
    for n in range(1, 5):
        fill(store, f"checkpoint-{n}", FIRST + n * 3600)
    return store


RULES = "retention: {keep_last: 2}\n"


RETAIN = Job("retain")


def remembered(store: Store) -> int:
    found = Cache.load(store.url)
    found.unpack()
    return sum(len(run.checkpoints) for run in found.runs.values())


def test_retention_reads_what_an_earlier_one_has_read_from_its_file(
    four: Store, tmp_path: Path, run: Run
) -> None:
    assert len(run(RETAIN, tmp_path / "store", RULES).done) == 2
    assert remembered(four) == 4
    (manifest,) = (tmp_path / "store/run/.ckptsync/checkpoint-4").glob("manifest-*")
    told = manifest.stat()
    flip(manifest)
    os.utime(manifest, ns=(told.st_atime_ns, told.st_mtime_ns))  # as a disk would do it
    assert not run(RETAIN, tmp_path / "store", RULES).is_change, (
        "read again it would hide the newest, and another would be kept in its stead"
    )


def test_retention_keeps_what_it_has_read_when_it_is_ended(
    four: Store, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*given: object) -> NoReturn:
        apply_retention(*given)  # type: ignore[arg-type]
        raise SystemExit(143)

    apply_retention(four, RetentionRequest(lambda _: Rules(keep_last=2)))  # marks them
    monkeypatch.setattr(gc, "apply_retention", ended)
    rules = "retention: {keep_last: 2, grace: 1ms}\n"
    with pytest.raises(SystemExit):
        main(words(RETAIN, tmp_path / "store", home, rules))
    assert remembered(four) == 4


@pytest.mark.usefixtures("four")
def test_retention_that_has_taken_its_time_leaves_the_rest_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    def hurried(*given: object) -> RetentionResult:
        return apply_retention(*given[:-1], lambda: True)  # type: ignore[arg-type, call-arg]

    monkeypatch.setattr(gc, "apply_retention", hurried)
    for _ in range(2):
        assert len(run(RETAIN, tmp_path / "store", RULES).done) == 1
    assert not run(RETAIN, tmp_path / "store", RULES).is_change
