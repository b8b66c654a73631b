"""Of many output directories those are looked at in which something happens."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptsync.daemon import posts as module
from ckptsync.daemon.posts import Posts
from ckptsync.stores.memory import MemoryStore
from ckptsync.worker.looking import Look
from ckptsync.worker.options import RunDir, WorkerOptions
from ckptsync.worker.worker import Worker


def manned(tmp_path: Path, count: int) -> Posts:
    found, store = Posts(), MemoryStore()
    runs = [RunDir(f"run-{n}", tmp_path / f"run-{n}") for n in range(count)]
    for run in runs:
        run.path.mkdir()
    found.retain({run: Worker(WorkerOptions("n0", (run,)), store) for run in runs})
    return found


def looked_at(posts: Posts, now: float) -> list[str]:
    """After a glance."""
    posts.stir(now)
    due = [post for post in posts if post.is_due(now, 30.0)]
    for post in due:
        post.look(now)
    return [post.run.name for post in due]


def test_each_is_looked_at_first_then_where_something_moved_and_now_and_then_all(tmp_path: Path) -> None:
    posts = manned(tmp_path, 3)
    assert looked_at(posts, 100.0) == ["run-0", "run-1", "run-2"]
    assert looked_at(posts, 101.0) == []
    (tmp_path / "run-1" / "logs").mkdir()
    assert looked_at(posts, 102.0) == ["run-1"]
    assert looked_at(posts, 131.0) == ["run-0", "run-2"]


def test_a_hint_is_of_one_directory_or_of_any(tmp_path: Path) -> None:
    posts = manned(tmp_path, 2)
    looked_at(posts, 100.0)
    posts.hint(str(tmp_path / "run-1"))
    assert posts.stir(101.0)
    assert looked_at(posts, 101.0) == ["run-1"]
    posts.hint("")
    assert looked_at(posts, 102.0) == ["run-0", "run-1"]


def test_what_is_being_written_is_looked_at_every_half_second_and_ever_more_seldom_while_nothing_moves(tmp_path: Path) -> None:
    posts = manned(tmp_path, 2)
    looked_at(posts, 99.0)
    (tmp_path / "run-0" / "checkpoint-1").mkdir()
    (tmp_path / "run-0" / "checkpoint-1" / "model.safetensors").write_bytes(b"half")
    seen = [now / 2 for now in range(200, 300) if looked_at(posts, now / 2) == ["run-0"]]
    assert seen[:4] == [100.0, 100.5, 101.0, 101.5]
    assert seen[-1] - seen[-2] >= 2.0


def test_of_very_many_that_are_still_some_are_glanced_at_in_turn_and_none_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    posts = manned(tmp_path, 10)
    looked_at(posts, 100.0)
    monkeypatch.setattr(module, "IN_TURN", 9)  # each has three: itself, its pins, and one more
    glanced = [{post.run.name for post in posts._glanced(101.0 + n)} for n in range(5)]
    assert {len(turn) for turn in glanced} == {3}
    assert set.union(*glanced) == {f"run-{n}" for n in range(10)}
    (tmp_path / "run-9" / "checkpoint-1").mkdir()
    assert [looked_at(posts, 110.0 + n) for n in range(4)].count(["run-9"]) == 1


def test_what_was_seen_a_while_ago_is_due_so_much_earlier(tmp_path: Path) -> None:
    (post,) = manned(tmp_path, 1)
    post.found, post.at = Look(due=10.0), 100.0
    assert [post.told(now).due for now in (100.0, 104.0, 200.0)] == [10.0, 6.0, 0.0]
