"""A child process of the head, as the head starts it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from ckptsync.catalogue.cached import Cache, read_catalogue
from ckptsync.catalogue.child_job import Job
from ckptsync.config.loading import read
from ckptsync.config.schema import Config
from ckptsync.errors import StoreError
from ckptsync.head.gc import RetentionRequest, apply_retention
from ckptsync.head.retention_rules import Rules
from ckptsync.head.schedule import VerifyPolicy, verify_jobs_in_store
from ckptsync.service import job_process
from ckptsync.service.job_process import Ended, run_job, share
from ckptsync.service.jobs import JobBrief, JobDone, JobFailed, decode_message, encode
from ckptsync.service.log import fields
from ckptsync.stores.contract import Store
from ckptsync.stores.opening import create_store
from ckptsync.worker.options import RunDir, WorkerOptions
from ckptsync.worker.worker import Worker
from tests.service.test_head import arrive, word
from tests.service.test_jobs import catches_sigterm
from tests.support.retention_stores import FIRST, fill
from tests.support.small_store import DATA, flip, make
from tests.support.worker_in_process import settle, tick

COMMAND = [sys.executable, "-m", "ckptsync.service.job_process"]


def configured(url: Path | str, more: str = "") -> Config:
    return read(f"roles: [head]\nstore: {{url: {url}}}\n{more}", "c", {})


def answered(url: Path, job: Job, more: str = "", parent: int = 0) -> tuple[int, list[object], str]:
    """Exit status, what it said, what went to the log."""
    brief = encode(JobBrief(job, configured(url, more), parent or os.getpid()))
    done = subprocess.run(COMMAND, input=brief, capture_output=True, check=False, timeout=120)
    return (
        done.returncode,
        [decode_message(line) for line in done.stdout.splitlines()],
        done.stderr.decode(),
    )


def test_a_job_is_done_and_answered(tmp_path: Path) -> None:
    store = create_store(str(tmp_path))
    arrive(store, "fsdp2")
    where = "run=fsdp2 location=checkpoint-4"
    for kind, text in (
        ("consolidate", rf"phase=consolidated {where} files=[1-9]\d* bytes=[1-9]\d* notes=\".*\""),
        ("verify", rf"phase=proved {where} level=digest verdict=ok read=[1-9]\d*"),
    ):
        code, said, _ = answered(tmp_path, Job(kind, "fsdp2", "checkpoint-4"))  # type: ignore[arg-type]
        assert isinstance(said[-1], JobDone)
        assert (code, said[-1].changed) == (0, True)
        assert re.fullmatch(text, said[-1].lines[0].text), said[-1].lines[0].text


def test_an_operators_error_keeps_its_hint_and_one_of_a_store_that_has_gone_passes(
    tmp_path: Path,
) -> None:
    _, [absent], _ = answered(tmp_path / "nothing", Job("consolidate", "fsdp2", "checkpoint-4"))
    assert isinstance(absent, JobFailed)
    assert (absent.exit_code, absent.passes, absent.is_ours) == (4, True, False)
    assert absent.hint


def test_damage_is_an_answer_with_what_was_found(tmp_path: Path) -> None:
    make(tmp_path)
    model = next(tmp_path.glob("fsdp2/consolidated/*/model.safetensors"))
    data = bytearray(model.read_bytes())
    data[-1] ^= 1
    model.chmod(0o600)
    model.write_bytes(data)
    _, said, _ = answered(tmp_path, Job("verify", "fsdp2", "checkpoint-4", level="digest"))
    assert isinstance(said[-1], JobDone)
    assert said[-1].errors == ()
    proved, *found = said[-1].lines
    assert proved.level == "error"
    assert " level=digest verdict=damaged read=" in proved.text
    assert all(
        line.level == "error" and line.text.startswith("phase=found run=fsdp2") for line in found
    )
    told = [fields(line.text) or {} for line in found]
    assert told[0]["kind"] == "digest"
    assert told[0]["file"].endswith("/model.safetensors")
    assert told[0]["tensors"]


def test_a_child_of_a_dead_parent_ends_before_it_begins(tmp_path: Path) -> None:
    assert answered(tmp_path, Job("consolidate", "a", "b"), parent=1)[:2] == (1, [])
    assert subprocess.run(COMMAND, input=b"", capture_output=True, check=False).returncode != 0


def test_sigterm_ends_it_while_it_waits_for_a_store_that_does_not_answer() -> None:
    config = configured("sftp://203.0.113.1/x", "limits: {patience: 10m}\n")
    pipe = subprocess.PIPE
    with subprocess.Popen(COMMAND, stdin=pipe, stdout=pipe, stderr=pipe) as child:
        assert child.stdin
        assert child.stdout
        child.stdin.write(encode(JobBrief(Job("consolidate", "a", "b"), config, os.getpid())))
        child.stdin.close()
        while not catches_sigterm(child.pid):
            assert child.poll() is None
        child.send_signal(signal.SIGTERM)
        said = [decode_message(line) for line in child.stdout.read().splitlines()]
        assert child.wait(60) in (0, 143)
    assert all(isinstance(s, JobFailed) and s.text == "the service is stopping" for s in said)


def test_a_location_is_consolidated_with_what_it_says_on_the_way_and_then_there_is_nothing_to_do(
    tmp_path: Path,
) -> None:
    store = create_store(str(tmp_path))
    arrive(store, "fsdp2")
    told: list[tuple[int, int]] = []
    job = Job("consolidate", "fsdp2", "checkpoint-4")
    assert run_job(job, configured(tmp_path), lambda *at: told.append(at)).changed
    assert 0 < told[-1][0] <= told[-1][1]
    assert not run_job(job, configured(tmp_path), lambda *_: None).changed
    assert word(store) == ["CONSOLIDATED"]
    verify = Job("verify", "fsdp2", "checkpoint-4")
    assert run_job(verify, configured(tmp_path), lambda *_: None).changed
    assert word(store) == ["VERIFIED"]


def test_a_store_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(StoreError):
        run_job(Job("consolidate", "a", "b"), configured(tmp_path / "gone"), lambda *_: None)
    assert not (tmp_path / "gone").exists()


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


def retain(path: Path) -> JobDone:
    return run_job(Job("retain"), configured(path / "store", RULES), lambda *_: None)


def remembered(store: Store) -> int:
    found = Cache.load(store.url)
    found.unpack()
    return sum(len(run.checkpoints) for run in found.runs.values())


def test_retention_reads_what_an_earlier_one_has_read_from_its_file(
    four: Store, tmp_path: Path
) -> None:
    assert len(retain(tmp_path).lines) == 2
    assert remembered(four) == 4
    (manifest,) = (tmp_path / "store/run/.ckptsync/checkpoint-4").glob("manifest-*")
    told = manifest.stat()
    flip(manifest)
    os.utime(manifest, ns=(told.st_atime_ns, told.st_mtime_ns))  # as a disk would do it
    assert not retain(tmp_path).changed, (
        "read again it would hide the newest, and another would be kept in its stead"
    )


def test_retention_keeps_what_it_has_read_when_it_is_ended(four: Store, tmp_path: Path) -> None:
    def ended(_done: int, _total: int) -> NoReturn:
        raise Ended

    apply_retention(four, RetentionRequest(lambda _: Rules(keep_last=2)))  # marks them
    config = configured(tmp_path / "store", "retention: {keep_last: 2, grace: 1ms}\n")
    with pytest.raises(Ended):
        run_job(Job("retain"), config, ended)
    assert remembered(four) == 4


@pytest.mark.usefixtures("four")
def test_retention_that_has_taken_its_time_leaves_the_rest_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_process, "BUDGET", -1.0)
    for _ in range(2):
        found = retain(tmp_path)
        assert found.changed
        assert len(found.lines) == 1
    assert not retain(tmp_path).changed


def test_a_bit_of_the_only_manifest_that_flips_on_disk_is_reported_and_written_again(
    tmp_path: Path,
) -> None:
    out, config = tmp_path / "out", configured(tmp_path / "store")
    for node in ("node0", "node1"):
        shutil.copytree(DATA / "fsdp2" / node, out, dirs_exist_ok=True)
    store, cache = create_store(str(tmp_path / "store")), Cache()
    worker = Worker(WorkerOptions("node0", RunDir("fsdp2", out)), store)
    settle(worker)
    verify = Job("verify", "fsdp2", "checkpoint-4")
    for job in (Job("consolidate", "fsdp2", "checkpoint-4"), verify):
        assert run_job(job, config, lambda *_: None).changed
    tick(worker, 1000.0)
    assert [s.status for s in read_catalogue(store, cache).summaries] == ["VERIFIED"]

    (manifest,) = (tmp_path / "store/fsdp2/.ckptsync/checkpoint-4").glob("manifest-*")
    data, told = manifest.read_bytes(), manifest.stat()
    flip(manifest)
    os.utime(manifest, ns=(told.st_atime_ns, told.st_mtime_ns))  # as a disk would do it
    done = run_job(verify, config, lambda *_: None)
    assert done.changed
    assert done.errors == (), "damage is told by the report"
    assert any(manifest.name in line.text for line in done.lines)
    found = read_catalogue(store, cache)
    assert (found.summaries, [f.name for f in found.faults]) == (
        (),
        [str(manifest.relative_to(tmp_path / "store"))],
    )
    assert verify_jobs_in_store(store, found, VerifyPolicy(), 0.0) == (), "once is enough"

    tick(worker, 1001.0)
    assert manifest.read_bytes() == data
    found = read_catalogue(store, cache)
    assert [s.status for s in found.summaries] == ["DAMAGED"]
    (job,) = verify_jobs_in_store(store, found, VerifyPolicy(), 0.0)
    assert run_job(job, config, lambda *_: None).errors == ()
    assert [s.status for s in read_catalogue(store, cache).summaries] == ["VERIFIED"]
