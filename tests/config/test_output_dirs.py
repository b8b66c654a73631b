"""Which output directories are there, and under which names."""

import os
from glob import escape
from pathlib import Path

import pytest

from ckptsync.config.output_dirs import (
    OutputDirectories,
    existing_directories,
    is_matched,
    list_watched,
    output_directories,
)
from ckptsync.config.value_parsers import RunConfig


def find(*paths: str, store: str = "/store") -> OutputDirectories:
    return output_directories([RunConfig(path) for path in paths], store)


def test_a_glob_takes_in_directories_that_appear_later(tmp_path: Path) -> None:
    assert find(f"{tmp_path}/*").runs == ()
    (tmp_path / "b").mkdir()
    (tmp_path / "a").mkdir()
    (tmp_path / "file").write_text("")
    assert [r.name for r in find(f"{tmp_path}/*").runs] == ["a", "b"]


def test_a_given_name_is_kept_and_a_missing_directory_is_no_problem(tmp_path: Path) -> None:
    found = output_directories(
        [RunConfig(str(tmp_path), "special"), RunConfig(f"{tmp_path}/absent")], "/store"
    )
    assert found.runs == (RunConfig(str(tmp_path), "special"),)
    assert found.problems == ()


def test_directories_of_one_name_are_called_by_what_wildcards_matched(tmp_path: Path) -> None:
    for job in ("one", "two"):
        (tmp_path / job / "run-1" / "out").mkdir(parents=True)
    named = {
        f"{tmp_path}/*/run-1/out": ["one", "two"],
        f"{tmp_path}/*/run-*/out": ["one-run-1", "two-run-1"],
        f"{tmp_path}/t*/*": ["two-run-1"],
        f"{tmp_path}/one/run-1/o*": ["out"],
    }
    for pattern, names in named.items():
        found = find(pattern)
        assert ([r.name for r in found.runs], found.problems) == (names, ())


def test_a_wildcard_that_is_escaped_is_a_name_and_names_no_run(tmp_path: Path) -> None:
    (tmp_path / "a [b] c" / "zero3").mkdir(parents=True)
    found = find(f"{tmp_path}/{escape('a [b] c')}/*")
    assert [run.name for run in found.runs] == ["zero3"]


def test_a_name_does_not_depend_on_what_else_is_there(tmp_path: Path) -> None:
    (tmp_path / "two" / "out").mkdir(parents=True)
    alone = find(f"{tmp_path}/*/out").runs
    (tmp_path / "one" / "out").mkdir(parents=True)
    assert set(alone) < set(find(f"{tmp_path}/*/out").runs)


def test_two_directories_of_one_name_are_refused(tmp_path: Path) -> None:
    for job in ("one", "two"):
        (tmp_path / job / "out").mkdir(parents=True)
    found = find(f"{tmp_path}/two/out", f"{tmp_path}/one/out")
    assert found.runs == (RunConfig(f"{tmp_path}/one/out", "out"),)
    assert "two/out: its run would be named 'out'" in found.problems[0]


def test_one_directory_has_one_name_by_whatever_links_it_is_reached(tmp_path: Path) -> None:
    (tmp_path / "session_1" / "artifacts").mkdir(parents=True)
    (tmp_path / "session_latest").symlink_to("session_1")
    for pattern in ("session_*/artifacts", "session_*/art*", "*/artifacts"):
        (run,) = find(f"{tmp_path}/{pattern}").runs
        assert run.path == f"{tmp_path}/session_1/artifacts"
        assert run.name.startswith("session_1")
    assert find(f"{tmp_path}/session_latest/*").runs == (
        RunConfig(f"{tmp_path}/session_1/artifacts", "artifacts"),
    )


def test_new_directories_appear_in_places_that_can_be_watched(tmp_path: Path) -> None:
    runs = [RunConfig(f"{tmp_path}/data/*/out"), RunConfig(f"{tmp_path}/special")]
    assert list_watched(runs) == (f"{tmp_path}",)
    (tmp_path / "data").mkdir()
    assert list_watched(runs) == (f"{tmp_path}/data", f"{tmp_path}")
    (tmp_path / "data" / "one").mkdir()
    assert list_watched(runs) == (f"{tmp_path}/data", f"{tmp_path}/data/one", f"{tmp_path}")


def test_an_output_directory_inside_the_store_is_refused_through_links_too(tmp_path: Path) -> None:
    (tmp_path / "store" / "out").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "store" / "out")
    (tmp_path / "other").symlink_to("store")
    for out, store in (
        ("link", f"{tmp_path}/store"),
        ("link", f"file://{tmp_path}/store"),
        ("store/out", f"{tmp_path}/other"),
        ("store", f"{tmp_path}/store"),
    ):
        found = find(f"{tmp_path}/{out}", store=store)
        assert found.runs == ()
        assert "inside the store" in found.problems[0]


def test_a_name_that_begins_with_the_stores_is_not_inside_it(tmp_path: Path) -> None:
    for name in ("store-out", "stor"):
        (tmp_path / name).mkdir()
        found = find(f"{tmp_path}/{name}", store=f"{tmp_path}/store")
        assert [run.path for run in found.runs] == [f"{tmp_path}/{name}"], found.problems


def test_a_store_inside_an_output_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    found = find(f"{tmp_path}/out", store=f"{tmp_path}/out/store")
    assert found.runs == ()
    assert "lies inside this output directory" in found.problems[0]


def test_a_link_that_a_glob_matches_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "link").symlink_to(tmp_path / "elsewhere")
    assert find(f"{tmp_path}/out/*").runs == ()
    assert find(f"{tmp_path}/out/link").runs == (RunConfig(f"{tmp_path}/elsewhere", "elsewhere"),)


def test_a_directory_whose_name_is_no_runs_name_is_left_out(tmp_path: Path) -> None:
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "consolidated").mkdir()
    found = find(f"{tmp_path}/.hidden", f"{tmp_path}/cons*", store="s3://bucket")
    assert (found.runs, len(found.problems)) == ((), 2)


def test_a_directory_inside_another_counts_once_a_checkpoint_is_in_it(tmp_path: Path) -> None:
    ray = tmp_path / "session_1" / "artifacts"
    runs = [RunConfig(f"{ray}/*"), RunConfig(f"{ray}/*/*")]
    for name in (
        "data",
        "hooked/_ckptsync",
        "out/checkpoint-1",
        "checkpoint-2",
        "checkpoints/checkpoint_0",
        "run-0/checkpoint-3",
        "_ckptsync",
    ):
        (ray / "exp" / name).mkdir(parents=True)
    found = output_directories(runs, "/store")
    assert ([r.name for r in found.runs], found.problems) == (["exp", "exp-hooked", "exp-out"], ())
    assert f"{ray}/exp/data" in list_watched(runs)
    (ray / "exp" / "data" / "step-1.ckpt").write_bytes(b"")
    assert f"{ray}/exp/data" in [r.path for r in output_directories(runs, "/store").runs]


def test_directories_that_are_given_by_name_are_taken_whatever_lies_in_them(tmp_path: Path) -> None:
    (tmp_path / "out" / "sub").mkdir(parents=True)
    found = find(f"{tmp_path}/*", f"{tmp_path}/out/sub")
    assert [r.name for r in found.runs] == ["out", "sub"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes directories of other users")
def test_a_match_where_other_users_may_write_is_left_out(tmp_path: Path) -> None:
    for name in ("mine", "theirs", "everybodys", "sticky", "theirs-above/out", "groups"):
        (tmp_path / "jobs" / name).mkdir(parents=True)
    (tmp_path / "jobs" / "everybodys").chmod(0o777)
    (tmp_path / "jobs" / "sticky").chmod(0o1777)
    (tmp_path / "jobs" / "groups").chmod(0o775)
    os.chown(tmp_path / "jobs" / "theirs", 65534, 65534)
    os.chown(tmp_path / "jobs" / "theirs-above", 65534, 65534)
    runs = [RunConfig(f"{tmp_path}/jobs/*"), RunConfig(f"{tmp_path}/jobs/*/out")]
    found = output_directories(runs, "/store")
    assert [r.name for r in found.runs] == ["groups", "mine", "sticky"]
    assert found.problems == ()
    theirs = "it belongs to uid 65534, and this is uid 0"
    at = f"{tmp_path}/jobs"
    assert set(found.unsafe) == {
        f"{at}/everybodys: left out: {at}/everybodys: others may write there (chmod o-w)",
        f"{at}/theirs-above: left out: {at}/theirs-above: {theirs}",
        f"{at}/theirs-above/out: left out: {at}/theirs-above: {theirs}",
        f"{at}/theirs: left out: {at}/theirs: {theirs}",
    }
    assert [r.name for r in existing_directories(runs, "/store").runs][:2] == [
        "everybodys",
        "groups",
    ]
    given = RunConfig(f"{tmp_path}/jobs/theirs", "named")
    assert given in output_directories([*runs, given], "/store").runs, "who names it answers for it"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes directories of other users")
def test_the_name_of_a_run_is_not_taken_by_another_users_directory(tmp_path: Path) -> None:
    for job in ("a", "b"):
        (tmp_path / job / "out").mkdir(parents=True)
    os.chown(tmp_path / "a", 65534, 65534)
    found = output_directories([RunConfig(f"{tmp_path}/?/out", "one")], "/store")
    assert [r.path for r in found.runs] == [f"{tmp_path}/b/out"]
    assert found.problems == ()


@pytest.mark.parametrize(
    ("pattern", "directory", "is_named"),
    [
        ("jobs/*", "jobs/new", True),
        ("jobs/*", "jobs/new/checkpoints", True),
        ("jobs/*", "jobs/new/deeper", False),
        ("jobs/*", "jobs/.hidden", False),
        ("jobs/*", "jobs/_ckptsync", False),
        ("jobs/*", "saves/new", False),
        ("jobs/*/out", "jobs/a/out", True),
        ("jobs/sft", "jobs/sft", True),
        ("jobs/sft", "jobs/sft/x", False),
        ("jobs/sft", "jobs", False),
        ("link/*", "jobs/new", True),
        ("link/*", "link/new", True),
        ("jobs/*", "jobs/link", False),
        ("jobs/*", "jobs/../saves", False),
    ],
)
def test_a_directory_is_matched_before_it_exists(
    pattern: str,
    directory: str,
    is_named: bool,  # noqa: FBT001
    tmp_path: Path,
) -> None:
    for name in ("jobs", "saves"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("jobs")
    (tmp_path / "jobs/link").symlink_to("../saves")
    runs = [RunConfig(f"{tmp_path}/{pattern}")]
    assert is_matched(runs, tmp_path / directory) == is_named


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes directories of other users")
def test_root_asks_for_the_users_whose_directories_they_are(tmp_path: Path) -> None:
    for name in ("private", "everybodys", "team"):
        (tmp_path / name).mkdir()
        os.chown(tmp_path / name, 12345, 12345)
    (tmp_path / "everybodys").chmod(0o777)
    (tmp_path / "team").chmod(0o777)
    (tmp_path / "team/theirs").mkdir()
    (tmp_path / ".of-root/a/theirs").mkdir(parents=True)
    os.chown(tmp_path / ".of-root/a/theirs", 12345, 12345)
    runs = [RunConfig(f"{tmp_path}/{glob}") for glob in ("*", "*/out", ".of-root/*/t*")]
    found = output_directories(runs, "/store", [tmp_path / "team/out"], as_owner=True)
    assert [r.path for r in found.runs] == [
        f"{tmp_path}/.of-root/a/theirs",
        f"{tmp_path}/private",
    ]
    assert {hint.partition(",")[0] for hint in found.unsafe.values()} == {
        f"chmod o-w {tmp_path}/everybodys",
        f"chmod o-w {tmp_path}/team",
    }
    assert any(problem.startswith(f"{tmp_path}/team/out: left out") for problem in found.unsafe)
