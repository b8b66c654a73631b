"""Ranks that mark what they saved, all in one process."""

from __future__ import annotations

import itertools
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from ckptsync.errors import ConfigError
from ckptsync.hooks.seat import Rank, Seat, this_rank
from ckptsync.scan import Spot, homes
from ckptsync.spool import marks
from ckptsync.walk import walk
from tests.hooking import Said, Table, commits


class Tables(defaultdict[int, Table]):
    """One for the ranks of each level."""

    def meet(self, rank: int, world: int, word: str, level: int) -> Callable[[], tuple[str, ...] | None]:
        return self[level].meet(rank, world, word)


def seats(world: int, train: str = "train") -> list[Seat]:
    tables = Tables(Table)
    return [Seat(Rank(r, world, is_met=True), train, partial(tables.meet, r, world)) for r in range(world)]


def wrote(home: Path, rank: int, name: str = "checkpoint-5", text: str = "") -> Spot:
    """A rank's part of a checkpoint."""
    (home / name).mkdir(parents=True, exist_ok=True)
    (home / name / f"__{rank}_0.distcp").write_text(f"part {rank} of {name} {text}")
    return Spot(name, "trainer", home / name)


def mark(seat: Seat, home: Path, name: str = "checkpoint-5") -> bool:
    return seat.save_mine(home, wrote(home, seat.rank, name), Said())


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_last_rank_to_mark_a_save_pins_it_from_the_first_one_on(tmp_path: Path, order: tuple[int, ...]) -> None:
    ours = seats(3)
    for name in ("checkpoint-5", "checkpoint-6"):
        assert [mark(ours[n], tmp_path, name) for n in order] == [False, False, True]
        commit = commits(tmp_path)[f"{name}.0"]
        assert set(commit.files) == {f"__{r}_0.distcp" for r in range(3)}
        assert (commit.ranks, commit.world) == ((0, 1, 2), 3)
    assert len({c.save for c in commits(tmp_path).values()}) == 2


@pytest.mark.parametrize("moment", ["before its word", "after its word", "after its look"])
def test_a_first_save_is_pinned_whenever_the_other_rank_comes_between(tmp_path: Path, moment: str) -> None:
    tables, done = Tables(Table), list[bool]()
    other = Seat(Rank(1, 2, is_met=True), "train", partial(tables.meet, 1, 2))

    def meet(word: str, level: int) -> Callable[[], tuple[str, ...] | None]:
        come("before its word")
        asked = tables.meet(0, 2, word, level)
        come("after its word")

        def ask() -> tuple[str, ...] | None:
            heard = asked()
            come("after its look")
            return heard

        return ask

    def come(now: str) -> None:
        if now == moment:
            done.append(mark(other, tmp_path))

    done.append(mark(Seat(Rank(0, 2, is_met=True), "train", meet), tmp_path))
    assert sorted(done) == [False, True]
    assert commits(tmp_path)["checkpoint-5.0"].ranks == (0, 1)


def test_a_save_that_one_rank_never_marks_is_never_pinned(tmp_path: Path) -> None:
    first, second = seats(2)
    assert not mark(first, tmp_path)
    assert mark(second, tmp_path)
    for name in ("checkpoint-6", "checkpoint-7"):
        assert not mark(first, tmp_path, name)
    assert set(commits(tmp_path)) == {"checkpoint-5.0"}
    assert {m.rank for m in marks.marks(tmp_path / "_ckptsync", "checkpoint-6")} == {0}


def hidden(home: Path) -> list[str]:
    """Links that are nobody's pin."""
    return sorted(p.name for p in (home / "_ckptsync" / "pins").glob(".*"))


@pytest.mark.parametrize("is_first_again", [True, False])
def test_a_first_save_is_kept_on_every_node_until_all_have_spoken_whatever_rotation_does(
    is_first_again: bool,  # noqa: FBT001
    tmp_path: Path,
) -> None:
    """Two nodes without a shared disk: the quicker one does not know yet who writes into its directory."""
    a, b, other = seats(3)
    assert [mark(a, tmp_path / "a"), mark(b, tmp_path / "a"), mark(other, tmp_path / "b")] == [False, False, True]
    assert commits(tmp_path / "a") == {}
    shutil.rmtree(tmp_path / "a" / "checkpoint-5")
    assert [mark(seat, tmp_path / "a", "checkpoint-6") for seat in ((a, b) if is_first_again else (b, a))] == [False, True]
    found = commits(tmp_path / "a")
    assert {name: set(commit.files) for name, commit in found.items()} == {
        f"checkpoint-{n}.0": {"__0_0.distcp", "__1_0.distcp"} for n in (5, 6)
    }
    assert {commit.ranks for commit in found.values()} == {(0, 1)}
    assert found["checkpoint-5.0"].save == commits(tmp_path / "b")["checkpoint-5.0"].save
    assert hidden(tmp_path / "a") == []
    early = marks.marks(tmp_path / "a" / "_ckptsync", "checkpoint-5")
    assert {(m.rank, m.local_world) for m in early} == {(0, 2), (1, 2)}


def test_a_rank_that_never_speaks_costs_no_disk(tmp_path: Path) -> None:
    first, _ = seats(2)
    mark(first, tmp_path)
    assert len(hidden(tmp_path)) == 1
    mark(first, tmp_path, "checkpoint-6")
    assert hidden(tmp_path) == []
    first.leave(has_failed=False)


def test_what_a_killed_process_kept_is_let_go_of_when_the_next_one_begins(tmp_path: Path) -> None:
    first, _ = seats(2)
    mark(first, tmp_path)
    (left,) = hidden(tmp_path)
    for introduction in (tmp_path / "_ckptsync" / "trains").iterdir():
        introduction.unlink()
    other, _ = seats(2)
    mark(other, tmp_path, "checkpoint-6")
    assert left not in hidden(tmp_path)


def test_ranks_that_go_over_to_another_spool_one_by_one_wait_for_each_other_there(tmp_path: Path) -> None:
    """A worker that is started during the training makes a spool where it looks, nearer to the checkpoints than the ranks' own."""
    first, second = seats(2)
    above, near = tmp_path, tmp_path / "checkpoints"

    def save(seat: Seat, home: Path, n: int) -> bool:
        wrote(near, seat.rank, f"checkpoint_{n}")
        return seat.save_mine(home, Spot(f"checkpoint_{n}", "accelerate", near / f"checkpoint_{n}"), Said())

    assert [save(first, above, 1), save(second, above, 1)] == [False, True]
    assert [save(first, above, 2), save(second, near, 2)] == [False, False]
    assert not save(second, near, 3), "the first rank has not written it, and has said nothing there"
    assert save(first, near, 3)
    assert {name: set(commit.files) for name, commit in commits(near).items()} == {
        "checkpoint_3.0": {"__0_0.distcp", "__1_0.distcp"}
    }


def test_nodes_give_one_save_one_id(tmp_path: Path) -> None:
    here, there = seats(2)
    for name in ("checkpoint-5", "checkpoint-6"):
        mark(here, tmp_path / "a", name)
        mark(there, tmp_path / "b", name)
    ours, theirs = commits(tmp_path / "a"), commits(tmp_path / "b")
    assert ours["checkpoint-6.0"].save == theirs["checkpoint-6.0"].save != ""


def test_a_rank_that_has_nothing_here_speaks_and_is_not_waited_for(tmp_path: Path) -> None:
    first, second = seats(2)
    second.speak()
    assert mark(first, tmp_path)
    assert commits(tmp_path)["checkpoint-5.0"].ranks == (0,)
    assert not mark(second, tmp_path, "checkpoint-6"), "it writes here after all: then it is waited for, too"
    assert mark(first, tmp_path, "checkpoint-6")


@pytest.mark.parametrize("name", ["checkpoint-6", "run-0/checkpoint-6", "checkpoints/checkpoint_6", "a=1.ckpt", "step-6", "tag"])
def test_a_rank_that_runs_ahead_of_the_one_that_writes_is_not_waited_for(tmp_path: Path, name: str) -> None:
    first, second = seats(2)
    assert [mark(first, tmp_path), mark(second, tmp_path)] == [False, True]
    second.save_nothing(tmp_path / name)
    (tmp_path / name).mkdir(parents=True)
    (tmp_path / name / "mp_rank_00_model_states.pt").write_text("x")
    (tmp_path / name / ".metadata").write_text("x")
    ((_, spot),) = [each for each in homes(tmp_path / name) if each[0] == tmp_path]
    assert first.save_mine(tmp_path, spot, Said())


def test_saves_that_are_marked_while_a_rank_is_silent_are_counted(tmp_path: Path) -> None:
    first, _ = seats(2)
    for n, name in enumerate(("checkpoint-5", "checkpoint-6")):
        assert not mark(first, tmp_path, name)
        assert first.waiting == n + 1


def test_one_rank_may_speak_for_all(tmp_path: Path) -> None:
    first, second = seats(2)
    spots = [wrote(tmp_path, rank) for rank in range(2)]
    assert first.save_all(tmp_path, spots[0], Said())
    commit = commits(tmp_path)["checkpoint-5.0"]
    assert set(commit.files) == {"__0_0.distcp", "__1_0.distcp"}
    assert second.save_all(tmp_path, spots[1], Said()), "it is pinned: by the first"
    assert set(commits(tmp_path)) == {"checkpoint-5.0"}


def test_where_ranks_cannot_agree_a_save_has_no_id_and_times_tell(tmp_path: Path) -> None:
    (only,) = seats(1, train="")
    assert only.save_all(tmp_path, wrote(tmp_path, 0), Said())
    assert commits(tmp_path)["checkpoint-5.0"].save == ""


def test_a_checkpoint_that_is_saved_again_is_another_save(tmp_path: Path) -> None:
    (only,) = seats(1)
    for text in ("once", "again, and longer"):
        shutil.rmtree(tmp_path / "checkpoint-5", ignore_errors=True)
        assert only.save_mine(tmp_path, wrote(tmp_path, 0, text=text), Said())
    found = commits(tmp_path)
    assert set(found) == {"checkpoint-5.0", "checkpoint-5.1"}
    assert len({c.save for c in found.values()}) == 2


def test_of_a_file_among_others_only_that_one_is_pinned(tmp_path: Path) -> None:
    (only,) = seats(1)
    for name in ("a.ckpt", "b.ckpt"):
        (tmp_path / name).write_text(name)
    assert only.save_mine(tmp_path, Spot("a.ckpt", "lightning", tmp_path, ("a.ckpt",)), Said())
    assert set(commits(tmp_path)["a.ckpt.0"].files) == {"a.ckpt"}


def test_marks_of_a_save_that_lies_deeper_stay_when_another_rank_begins(tmp_path: Path) -> None:
    first, second = seats(2)
    spot = wrote(tmp_path / "checkpoints", 0, "checkpoint_5")
    assert not first.save_mine(tmp_path, spot, Said())
    wrote(tmp_path / "checkpoints", 1, "checkpoint_5")
    assert second.save_mine(tmp_path, spot, Said())


def test_who_marks_some_saves_says_so_and_says_when_it_is_over(tmp_path: Path) -> None:
    (only,) = seats(1)
    mark(only, tmp_path)
    (begun,) = marks.begun(tmp_path / "_ckptsync")
    assert (begun.marks, begun.ended, begun.left, begun.local_world) == ("some", 0.0, 0.0, 1)
    only.leave(has_failed=True)
    (begun,) = marks.begun(tmp_path / "_ckptsync")
    assert begun.ended == 0.0 < begun.left
    only.leave(has_failed=False)
    (begun,) = marks.begun(tmp_path / "_ckptsync")
    assert begun.ended > 0


def test_nothing_is_written_beside_the_files_of_a_checkpoint(tmp_path: Path) -> None:
    (only,) = seats(1)
    mark(only, tmp_path)
    assert [s.path for s in walk(tmp_path / "checkpoint-5").files] == ["__0_0.distcp"]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Rank(0, 1, is_met=False)),
        ({"RANK": "3", "WORLD_SIZE": "8", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, Rank(3, 8, is_met=False)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, Rank(1, 2, is_met=False)),
        ({"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "6"}, Rank(5, 6, is_met=False)),
    ],
)
def test_what_started_this_process_says_its_rank(
    environment: dict[str, str], expected: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert this_rank(environment) == expected
    with pytest.raises(ConfigError, match="RANK=x"):
        this_rank({"RANK": "x", "WORLD_SIZE": "2"})


def test_marks_of_saves_that_are_gone_do_not_pile_up(tmp_path: Path) -> None:
    (only,) = seats(1)
    for step in range(130):
        assert mark(only, tmp_path, f"checkpoint-{step}")
        shutil.rmtree(tmp_path / f"checkpoint-{step}")
        shutil.rmtree(tmp_path / "_ckptsync" / "pins" / f"checkpoint-{step}.0")
    assert len(list((tmp_path / "_ckptsync" / "saves").iterdir())) <= 65
