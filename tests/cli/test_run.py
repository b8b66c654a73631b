"""``ckptsync run`` as a program."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckptsync.catalogue.uncached import read_state
from ckptsync.stores.opening import open_store
from tests.support.command_line import Cli
from tests.support.small_store import DATA


def configured(tmp_path: Path, node: str = "n0") -> str:
    (tmp_path / "out").mkdir(exist_ok=True)
    path = tmp_path / f"{node}.yaml"
    path.write_text(
        f"node: {node}\n"
        f"store: {{url: {tmp_path}/store}}\n"
        f"worker: {{runs: [{tmp_path}/out], scan_every: 200ms, quiet: 0, unmarked: 0}}\n"
    )
    return str(path)


@contextmanager
def started(config: str, *more: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "ckptsync", "run", "-c", config, *more]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def until_started(child: subprocess.Popen[str]) -> None:
    assert child.stderr
    while '"phase": "started"' not in child.stderr.readline():
        assert child.poll() is None


def test_its_first_line_says_on_what_it_works_and_what_a_variable_overrides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    config, other = configured(tmp_path), f"{tmp_path}/other"
    monkeypatch.setenv("CKPTSYNC_STORE", other)
    told = f"{config}:2: store.url: {tmp_path}/store is overridden by CKPTSYNC_STORE={other}"
    with started(config) as child:
        assert child.stderr
        first = json.loads(child.stderr.readline())
    expected = {"phase": "starting", "level": "warning", "store": other, "overridden": told}
    assert first.items() >= (expected | {"outputs": f"{tmp_path}/out"}).items()
    for words in (["push", DATA / "fsdp2/node0"], ["ls"], ["status"]):
        assert cli(*words, "-c", config).err.count(told) == 1, words


def test_a_worker_ends_with_its_job_once_all_is_stored(tmp_path: Path) -> None:
    config = configured(tmp_path)
    with (
        subprocess.Popen(["sleep", "600"]) as job,
        started(config, "--until-gone", str(job.pid)) as child,
    ):
        until_started(child)
        shutil.copytree(DATA / "zero3" / "node1", tmp_path / "out", dirs_exist_ok=True)
        job.kill()
        assert child.wait(60) == 0
    assert [s.run for s in read_state(open_store(f"{tmp_path}/store")).readable] == ["out"]
