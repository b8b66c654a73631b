"""A worker's options and its results."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptsync.errors import ConfigError, Corrupt
from ckptsync.worker.options import RunDir, WorkerOptions, checked_options, checked_run
from ckptsync.worker.results import Phase, UploadProgress, WorkerResult, describe_failure


def options(path: Path, node: str = "n0", run: str = "run") -> WorkerOptions:
    return WorkerOptions(node, RunDir(run, path))


@pytest.mark.parametrize("source", ["store", "store/run", "store/run/out"])
def test_an_output_directory_inside_the_store_is_refused(tmp_path: Path, source: str) -> None:
    with pytest.raises(ConfigError, match="inside the store"):
        checked_options(options(tmp_path / source), f"file://{tmp_path}/store")


@pytest.mark.parametrize(
    "store",
    [
        "out/checkpoint-4",
        "out/checkpoint-4/store",
        "out/checkpoints/checkpoint_0/s",
        "out/_ckptsync/s",
    ],
)
def test_a_store_inside_a_checkpoint_is_refused(tmp_path: Path, store: str) -> None:
    with pytest.raises(ConfigError, match="inside a checkpoint"):
        checked_options(options(tmp_path / "out"), str(tmp_path / store))


def test_a_link_does_not_hide_that_one_lies_in_the_other(tmp_path: Path) -> None:
    (tmp_path / "store" / "run").mkdir(parents=True)
    (tmp_path / "out").symlink_to(tmp_path / "store" / "run")
    with pytest.raises(ConfigError, match="inside the store"):
        checked_options(options(tmp_path / "out"), str(tmp_path / "store"))


def test_names_that_no_store_can_keep_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'a/b': not a node id"):
        checked_options(options(tmp_path, node="a/b"), "s3://b")
    for name in ("../x", "", "a//b", ".ckptsync", "_x", "consolidated"):
        with pytest.raises(ConfigError):
            checked_options(options(tmp_path / "a", run=name), "s3://b")


def test_a_run_within_another_is_refused_since_nobody_would_look_for_it_there() -> None:
    with pytest.raises(ConfigError, match="run 'team/exp': not one directory's name") as caught:
        checked_run("team/exp")
    assert "team-exp" in caught.value.hint


def test_what_is_on_its_way_and_what_failed_are_told_in_a_line_each() -> None:
    told: list[tuple[int, int, Phase]] = [
        (1, 0, "stored"),
        (2, 0, "waiting"),
        (2, 1, "waiting"),
        (3, 0, "failed"),
        (4, 0, "elsewhere"),
        (5, 0, "sending"),
    ]
    progress = tuple(UploadProgress("run", f"checkpoint-{n}", k, phase, "") for n, k, phase in told)
    failures = (
        describe_failure("run", "checkpoint-3", Corrupt("x: torn", hint="look")),
        describe_failure("run", "", Corrupt("y")),
    )
    result = WorkerResult("n0", progress, (), failures)
    assert result.queue == tuple(f"run/checkpoint-{n}" for n in (5, 2, 3))
    assert result.errors == ("run/checkpoint-3: x: torn", "run: y")
    assert (failures[0].error, failures[0].hint, failures[0].exit_code) == ("Corrupt", "look", 10)
