"""`ckptsync.mark_saved` in real processes: what a script sees of it, and what the worker makes of
it.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

import ckptsync
from ckptsync.checkpoint_dirs import CheckpointDir, output_dirs_of
from ckptsync.errors import CkptsyncError, ConfigError, Incomplete
from ckptsync.hooks import mark_saved as marking
from ckptsync.hooks import process_group
from ckptsync.hooks.mark_saved import Marker, find_home
from ckptsync.hooks.process_group import Rank
from ckptsync.hooks.rank_markers import HookLog
from ckptsync.spool import markers as spool_markers
from ckptsync.stores.memory import MemoryStore
from ckptsync.worker.options import RunDir, WorkerOptions
from ckptsync.worker.worker import Worker
from tests.hooks.training import Table, commits, other_disk
from tests.support.exhaustive import in_exhaustive
from tests.support.stand_in_programs import ROOT, program
from tests.support.worker_in_process import tick

__all__ = ["other_disk"]  # a fixture


Log = pytest.LogCaptureFixture


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that trains alone, and has said nothing yet."""
    monkeypatch.setattr(marking, "_markers", {})
    monkeypatch.setattr(marking, "_log", HookLog())
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield
    marking._leave(os.getpid())


def saved(out: Path, name: str = "checkpoint-5") -> Path:
    (out / name).mkdir(parents=True)
    (out / name / "weights.txt").write_text("weights")
    (out / name / "trainer_state.json").write_text(f'{{"global_step": {name[-1]}}}')
    return out / name


def test_a_save_that_nobody_marks_is_judged_as_if_nobody_marked_any(tmp_path: Path) -> None:
    """A script that marks some of its saves must not make the others wait."""
    ckptsync.mark_saved(saved(tmp_path), strict=True)
    saved(tmp_path, "checkpoint-6")
    worker = Worker(WorkerOptions("n0", RunDir("run", tmp_path)), MemoryStore())
    tick(worker, 0.0)
    assert {p.checkpoint: p.phase for p in tick(worker, 11.0).progress}["checkpoint-6"] == "sent"


def test_a_mark_without_the_rest_of_the_ranks_is_no_error_of_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    path = saved(tmp_path)
    for _ in range(2):
        assert ckptsync.mark_saved(path) is False
    assert [r.getMessage().count('part="all"') for r in caplog.records] == [1], "said once"
    with pytest.raises(ConfigError, match="rank 0 of 2"):
        ckptsync.mark_saved(path, strict=True)
    assert ckptsync.mark_saved(path, part="all", strict=True) is True
    assert commits(tmp_path)["checkpoint-5.0"].save == ""


@pytest.mark.parametrize(
    ("path", "error", "said"),
    [
        ("checkpoint-9", Incomplete, "not found"),
        ("step-9", Incomplete, "not found"),
        ("notes", ConfigError, "the worker does not recognize this path"),
        ("s3://bucket/checkpoint-5", ConfigError, "not a path of this machine"),
    ],
)
def test_what_cannot_be_marked_is_logged_and_with_strict_raised(
    path: str, error: type[CkptsyncError], said: str, tmp_path: Path, caplog: Log
) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "text").write_text("not a checkpoint")
    (tmp_path / "step-9").mkdir()
    path_given = path if "://" in path else str(tmp_path / path)
    with caplog.at_level(logging.WARNING, "ckptsync.hook"):
        assert ckptsync.mark_saved(path_given) is False
    assert said in caplog.text
    with pytest.raises(error, match=said):
        ckptsync.mark_saved(path_given, strict=True)


@pytest.mark.parametrize("wrong", [None, 7, b"x"])
def test_no_argument_raises_into_the_training(wrong: object) -> None:
    assert ckptsync.mark_saved(wrong) is False  # type: ignore[arg-type]


def test_where_a_worker_has_its_spool_its_run_begins(tmp_path: Path) -> None:
    path = saved(tmp_path / "checkpoints", "checkpoint_3")
    assert find_home(path) is not None
    (tmp_path / "checkpoints" / "_ckptsync").mkdir()
    home_and_dir = find_home(path)
    assert home_and_dir is not None
    assert home_and_dir[0] == tmp_path / "checkpoints"


def test_a_run_begins_where_links_can_be_made(
    tmp_path: Path, other_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``checkpoints/`` may be a volume of its own, or lie where this user may not write."""
    path = saved(tmp_path / "checkpoints", "checkpoint_3")
    for is_allowed, home in ((True, tmp_path), (False, tmp_path / "checkpoints")):
        monkeypatch.setattr(os, "access", lambda *_, allowed=is_allowed: allowed)
        home_and_dir = find_home(path)
        assert home_and_dir is not None
        assert home_and_dir[0] == home
    monkeypatch.undo()
    (other_disk / "checkpoints").mkdir()
    assert marking._is_linkable(other_disk, other_disk / "checkpoints")
    assert not marking._is_linkable(tmp_path, other_disk / "checkpoints")
    assert not marking._is_linkable(Path("/"), Path("/"))


def test_one_rank_speaks_for_all_where_the_process_group_has_no_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marking, "this_rank", lambda: Rank(0, 2, can_meet=True))
    path = saved(tmp_path)
    assert ckptsync.mark_saved(path, part="all", strict=True) is True
    with pytest.raises(CkptsyncError):
        ckptsync.mark_saved(path, strict=True)
    (tmp_path / "model.safetensors").write_text("x")
    with pytest.raises(ConfigError, match="a final model is complete only after all ranks"):
        ckptsync.mark_saved(tmp_path, strict=True)


def test_a_rank_that_finds_nothing_there_tells_the_others_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Table()
    monkeypatch.setattr(process_group, "first_word", lambda _: "train")
    monkeypatch.setattr(process_group, "exchange", lambda *words: table.meet(*words[:3]))
    for rank in (1, 0):
        monkeypatch.setattr(marking, "_markers", {})  # of another process
        monkeypatch.setattr(marking, "this_rank", lambda r=rank: Rank(r, 2, can_meet=True))
        path = saved(tmp_path) if rank == 0 else tmp_path / "checkpoint-5"
        assert ckptsync.mark_saved(path, strict=True) == (rank == 0)


def test_a_link_to_a_checkpoint_is_that_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(saved(tmp_path).name)
    assert ckptsync.mark_saved(tmp_path / "latest", strict=True)
    assert set(commits(tmp_path)) == {"checkpoint-5.0"}


def test_it_needs_nothing_but_the_standard_library(tmp_path: Path) -> None:
    path = saved(tmp_path)
    script = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}]; before = set(sys.modules)\n"
        "import ckptsync\n"
        "light = {m for m in set(sys.modules) - before if m.startswith('ckptsync.')}\n"
        f"assert ckptsync.mark_saved({str(path)!r}, strict=True)\n"
        "names = {m.partition('.')[0] for m in set(sys.modules) - before} - "
        "set(sys.stdlib_module_names)\n"
        "print(sorted(light), *sorted(names))"
    )
    done = program("-S", "-I", "-c", script)
    assert done.stdout.split() == ["[]", "ckptsync"], done.stderr
    (begun,) = spool_markers.list_training_processes(tmp_path / "_ckptsync")
    assert 0 < begun.ended <= begun.left
    assert set(commits(tmp_path)) == {"checkpoint-5.0"}


def test_a_script_that_fails_has_left_and_has_not_ended(tmp_path: Path) -> None:
    done = program(
        "-c", f"import ckptsync; ckptsync.mark_saved({str(saved(tmp_path))!r}); raise SystemError"
    )
    assert done.returncode == 1
    (begun,) = spool_markers.list_training_processes(tmp_path / "_ckptsync")
    assert begun.ended == 0 < begun.left


def test_a_process_that_the_script_has_forked_does_not_end_the_training(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, ckptsync\n"
        "from ckptsync.spool.markers import list_training_processes\n"
        f"assert ckptsync.mark_saved({str(saved(tmp_path))!r}, strict=True)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    raise SystemExit\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        f"(begun,) = list_training_processes(pathlib.Path({str(tmp_path / '_ckptsync')!r}))\n"
        "print(begun.left, begun.ended)"
    )
    done = program("-c", script)
    assert done.stdout == "0.0 0.0\n", done.stderr


@in_exhaustive
def test_two_real_ranks_keep_what_both_have_marked_and_never_what_one_has(tmp_path: Path) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = program(*launch, str(ROOT / "tests" / "hooks" / "marked_training.py"), str(tmp_path))
    first, second = (
        [json.loads(line) for line in (tmp_path / f"said-{r}.jsonl").read_text().splitlines()]
        for r in range(2)
    )
    assert [step for step, _, _ in (*first, *second)] == [1, 2, 1, 2], done.stderr[-2000:]
    assert sorted([first[0][1], second[0][1]]) == [False, True], "the last of the two"
    assert (first[1][1:], second[1][1]) == ([False, ["step-1.0"]], True)
    pin_commits = commits(tmp_path)
    assert set(pin_commits) == {"step-1.0", "step-2.0"}
    for commit in pin_commits.values():
        assert commit.ranks == (0, 1)
        assert set(commit.files) == {".metadata", "__0_0.distcp", "__1_0.distcp"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes directories of other users")
@pytest.mark.parametrize("kind", ["theirs", "link"])
def test_in_a_spool_that_is_not_this_users_nothing_is_pinned(
    tmp_path: Path, caplog: Log, kind: str
) -> None:
    elsewhere, spool = tmp_path / "elsewhere", tmp_path / "out" / "_ckptsync"
    elsewhere.mkdir()
    saved(tmp_path / "out")
    if kind == "theirs":
        spool.mkdir()
    else:
        spool.symlink_to(elsewhere)
    os.chown(spool, 65534, 65534, follow_symlinks=False)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert ckptsync.mark_saved(tmp_path / "out" / "checkpoint-5") is False
    (line,) = caplog.messages
    assert "_ckptsync: " in line
    assert "belongs to uid 65534" in line or "a link that somebody else may have made" in line
    assert list(elsewhere.iterdir()) == []
    with pytest.raises(ConfigError, match="_ckptsync"):
        ckptsync.mark_saved(tmp_path / "out" / "checkpoint-5", strict=True)


def markers(world: int, train: str = "train") -> list[Marker]:
    table = Table()
    return [
        Marker(Rank(r, world, can_meet=True), train, partial(table.meet, r, world))
        for r in range(world)
    ]


def wrote(home: Path, rank: int, name: str = "checkpoint-5", text: str = "") -> CheckpointDir:
    """A rank's part of a checkpoint."""
    (home / name).mkdir(parents=True, exist_ok=True)
    (home / name / f"__{rank}_0.distcp").write_text(f"part {rank} of {name} {text}")
    return CheckpointDir(name, "trainer", home / name)


def mark(marker: Marker, home: Path, name: str = "checkpoint-5") -> bool:
    return marker.mark_mine(home, wrote(home, marker._rank.rank, name))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_last_rank_to_mark_a_save_pins_it_from_the_first_one_on(
    tmp_path: Path, order: tuple[int, ...]
) -> None:
    ours = markers(3)
    for name in ("checkpoint-5", "checkpoint-6"):
        assert [mark(ours[n], tmp_path, name) for n in order] == [False, False, True]
        commit = commits(tmp_path)[f"{name}.0"]
        assert set(commit.files) == {f"__{r}_0.distcp" for r in range(3)}
        assert (commit.ranks, commit.world) == ((0, 1, 2), 3)
        marks = spool_markers.list_rank_marks(tmp_path / "_ckptsync", name)
        assert marks[-1].local_world == 3, "the worker may go by the marks"
    assert len({c.save for c in commits(tmp_path).values()}) == 2


@pytest.mark.parametrize("moment", ["before its word", "after its word", "after its look"])
def test_a_first_save_is_pinned_whenever_the_other_comes(tmp_path: Path, moment: str) -> None:
    table, done = Table(), list[bool]()
    other = Marker(Rank(1, 2, can_meet=True), "train", partial(table.meet, 1, 2))

    def meet(word: str) -> Callable[[], tuple[str, ...] | None]:
        come("before its word")
        asked = table.meet(0, 2, word)
        come("after its word")

        def ask() -> tuple[str, ...] | None:
            heard = asked()
            come("after its look")
            return heard

        return ask

    def come(now: str) -> None:
        if now == moment:
            done.append(mark(other, tmp_path))

    done.append(mark(Marker(Rank(0, 2, can_meet=True), "train", meet), tmp_path))
    assert sorted(done) == [False, True]
    assert commits(tmp_path)["checkpoint-5.0"].ranks == (0, 1)


def test_a_save_that_one_rank_never_marks_is_never_pinned(tmp_path: Path) -> None:
    first, second = markers(2)
    assert not mark(first, tmp_path)
    assert mark(second, tmp_path)
    for name in ("checkpoint-6", "checkpoint-7"):
        assert not mark(first, tmp_path, name)
    assert set(commits(tmp_path)) == {"checkpoint-5.0"}
    marks = spool_markers.list_rank_marks(tmp_path / "_ckptsync", "checkpoint-6")
    assert {m.rank for m in marks} == {0}


def test_on_several_nodes_the_quicker_ones_first_save_is_left_to_its_files(tmp_path: Path) -> None:
    """Without a shared disk it does not know yet which ranks write into its directory."""
    a, b, other = markers(3)
    pinned = [mark(a, tmp_path / "a"), mark(b, tmp_path / "a"), mark(other, tmp_path / "b")]
    assert pinned == [False, False, True]
    assert commits(tmp_path / "a") == {}
    early = spool_markers.list_rank_marks(tmp_path / "a" / "_ckptsync", "checkpoint-5")
    assert {m.local_world for m in early} == {0}, "nobody says that it is whole"
    assert [mark(marker, tmp_path / "a", "checkpoint-6") for marker in (a, b)] == [False, True]
    [(name, commit)] = commits(tmp_path / "a").items()
    assert (name, commit.ranks) == ("checkpoint-6.0", (0, 1))


def test_ranks_that_go_over_to_another_spool_wait_for_each_other_there(tmp_path: Path) -> None:
    """A worker that is started during the training makes a spool where it looks, nearer to the
    checkpoints than the ranks' own.
    """
    first, second = markers(2)
    above, near = tmp_path, tmp_path / "checkpoints"

    def save(marker: Marker, home: Path, n: int) -> bool:
        wrote(near, marker._rank.rank, f"checkpoint_{n}")
        return marker.mark_mine(
            home, CheckpointDir(f"checkpoint_{n}", "accelerate", near / f"checkpoint_{n}")
        )

    assert [save(first, above, 1), save(second, above, 1)] == [False, True]
    assert [save(first, above, 2), save(second, near, 2)] == [False, False]
    assert not save(second, near, 3), "the first rank has written and said nothing there"
    assert save(first, near, 3)
    [(name, commit)] = commits(near).items()
    assert (name, set(commit.files)) == ("checkpoint_3.0", {"__0_0.distcp", "__1_0.distcp"})


def test_nodes_give_one_save_one_id(tmp_path: Path) -> None:
    here, there = markers(2)
    for name in ("checkpoint-5", "checkpoint-6"):
        mark(here, tmp_path / "a", name)
        mark(there, tmp_path / "b", name)
    ours, theirs = commits(tmp_path / "a"), commits(tmp_path / "b")
    assert ours["checkpoint-6.0"].save == theirs["checkpoint-6.0"].save != ""


def test_a_rank_that_has_nothing_here_speaks_and_is_not_waited_for(tmp_path: Path) -> None:
    first, second = markers(2)
    second.mark_nothing(tmp_path / "checkpoint-5")
    assert mark(first, tmp_path)
    assert commits(tmp_path)["checkpoint-5.0"].ranks == (0,)
    assert not mark(second, tmp_path, "checkpoint-6"), (
        "it writes here after all: then it is waited for, too"
    )
    assert mark(first, tmp_path, "checkpoint-6")


@pytest.mark.parametrize(
    "name",
    ["checkpoint-6", "run-0/checkpoint-6", "checkpoints/checkpoint_6", "a=1.ckpt", "step-6", "tag"],
)
def test_a_rank_that_runs_ahead_of_the_one_that_writes_is_not_waited_for(
    tmp_path: Path, name: str
) -> None:
    first, second = markers(2)

    def checkpoint_dir(of: str) -> CheckpointDir:
        (tmp_path / of).mkdir(parents=True)
        (tmp_path / of / "mp_rank_00_model_states.pt").write_text("x")
        (tmp_path / of / ".metadata").write_text("x")
        ((_, found),) = [each for each in output_dirs_of(tmp_path / of) if each[0] == tmp_path]
        return found

    before = checkpoint_dir(name.replace("6", "5") if "/" in name else "checkpoint-5")
    assert [marker.mark_mine(tmp_path, before) for marker in (first, second)] == [False, True]
    second.mark_nothing(tmp_path / name)
    assert first.mark_mine(tmp_path, checkpoint_dir(name))


def test_saves_that_are_marked_while_a_rank_is_silent_are_counted(tmp_path: Path) -> None:
    first, second = markers(2)
    for n, name in enumerate(("checkpoint-5", "checkpoint-6")):
        assert not mark(first, tmp_path, name)
        assert first.unmatched == n + 1
    assert mark(second, tmp_path)
    assert not mark(first, tmp_path, "checkpoint-7")
    assert first.unmatched == 0


def test_one_rank_may_speak_for_all(tmp_path: Path) -> None:
    first, second = markers(2)
    found_dirs = [wrote(tmp_path, rank) for rank in range(2)]
    assert first.mark_all(tmp_path, found_dirs[0])
    commit = commits(tmp_path)["checkpoint-5.0"]
    assert set(commit.files) == {"__0_0.distcp", "__1_0.distcp"}
    assert second.mark_all(tmp_path, found_dirs[1]), "it is pinned: by the first"
    assert set(commits(tmp_path)) == {"checkpoint-5.0"}


def test_a_checkpoint_that_is_saved_again_is_another_save(tmp_path: Path) -> None:
    (only,) = markers(1)
    for text in ("once", "again, and longer"):
        shutil.rmtree(tmp_path / "checkpoint-5", ignore_errors=True)
        assert only.mark_mine(tmp_path, wrote(tmp_path, 0, text=text))
    pin_commits = commits(tmp_path)
    assert set(pin_commits) == {"checkpoint-5.0", "checkpoint-5.1"}
    assert len({c.save for c in pin_commits.values()}) == 2


def test_of_a_file_among_others_only_that_one_is_pinned(tmp_path: Path) -> None:
    (only,) = markers(1)
    for name in ("a.ckpt", "b.ckpt"):
        (tmp_path / name).write_text(name)
    assert only.mark_mine(tmp_path, CheckpointDir("a.ckpt", "lightning", tmp_path, ("a.ckpt",)))
    assert set(commits(tmp_path)["a.ckpt.0"].files) == {"a.ckpt"}


def test_marks_of_a_save_that_lies_deeper_stay_when_another_rank_begins(tmp_path: Path) -> None:
    first, second = markers(2)
    checkpoint_dir = wrote(tmp_path / "checkpoints", 0, "checkpoint_5")
    assert not first.mark_mine(tmp_path, checkpoint_dir)
    wrote(tmp_path / "checkpoints", 1, "checkpoint_5")
    assert second.mark_mine(tmp_path, checkpoint_dir)


def test_who_marks_some_saves_says_so_and_says_when_it_is_over(tmp_path: Path) -> None:
    (only,) = markers(1)
    mark(only, tmp_path)
    (begun,) = spool_markers.list_training_processes(tmp_path / "_ckptsync")
    assert (begun.marks, begun.ended, begun.left, begun.local_world) == ("some", 0.0, 0.0, 1)
    only.leave(has_failed=True)
    (begun,) = spool_markers.list_training_processes(tmp_path / "_ckptsync")
    assert begun.ended == 0.0 < begun.left
    only.leave(has_failed=False)
    (begun,) = spool_markers.list_training_processes(tmp_path / "_ckptsync")
    assert begun.ended > 0
