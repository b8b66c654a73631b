"""`ckptsync.mark_saved` in real processes: what a script sees of it, and what the worker makes of it."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckptsync
from ckptsync.catalogue.fresh import fresh
from ckptsync.catalogue.shortened import summary
from ckptsync.errors import CkptsyncError, ConfigError, Incomplete, StoreError
from ckptsync.hooks import marking
from ckptsync.hooks.marking import located
from ckptsync.hooks.seat import Rank
from ckptsync.spool import marks
from ckptsync.stores.memory import MemoryStore
from ckptsync.worker.options import RunDir, WorkerOptions
from ckptsync.worker.worker import Worker
from tests.hooking import commits, other_disk

__all__ = ["other_disk"]  # a fixture
ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that trains alone, and has said nothing yet."""
    monkeypatch.setattr(marking, "_seats", {})
    monkeypatch.setattr(marking, "_told", set())
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield
    marking._leave(os.getpid())


def saved(out: Path, name: str = "checkpoint-5") -> Path:
    (out / name).mkdir(parents=True)
    (out / name / "weights.txt").write_text("weights")
    (out / name / "trainer_state.json").write_text(f'{{"global_step": {name[-1]}}}')
    return out / name


def test_what_is_marked_is_pinned_and_survives_rotation(tmp_path: Path) -> None:
    path = saved(tmp_path)
    assert ckptsync.mark_saved(path) is True
    shutil.rmtree(path)
    assert set(commits(tmp_path)["checkpoint-5.0"].files) == {"weights.txt", "trainer_state.json"}
    assert (tmp_path / "_ckptsync" / "pins" / "checkpoint-5.0" / "files" / "weights.txt").read_text() == "weights"


def words(store: MemoryStore) -> dict[str, str]:
    """What a store says of its locations."""
    found = fresh(store)
    return {s.location: s.status for s in (summary(seen, found.mtimes) for seen in found.locations)}


def patient(out: Path, store: MemoryStore) -> Worker:
    """A worker that never believes files alone within this test."""
    return Worker(WorkerOptions("n0", (RunDir("run", out),), quiet=1e6, unmarked=1e6), store)


def test_a_worker_sends_what_is_marked_at_once_and_waits_for_the_rest(tmp_path: Path) -> None:
    store = MemoryStore()
    worker = patient(tmp_path, store)
    for name in ("checkpoint-5", "checkpoint-6"):
        saved(tmp_path, name)
    ckptsync.mark_saved(tmp_path / "checkpoint-5", strict=True)
    found = {p.checkpoint: p.phase for p in worker.tick(0.0).progress}
    assert found == {"checkpoint-5": "sent", "checkpoint-6": "waiting"}
    assert set(words(store)) == {"checkpoint-5"}


def test_a_save_that_nobody_marks_is_judged_as_if_nobody_marked_any(tmp_path: Path) -> None:
    """A script that marks some of its saves must not make the others wait."""
    ckptsync.mark_saved(saved(tmp_path), strict=True)
    saved(tmp_path, "checkpoint-6")
    worker = Worker(WorkerOptions("n0", (RunDir("run", tmp_path),)), MemoryStore())
    worker.tick(0.0)
    assert {p.checkpoint: p.phase for p in worker.tick(11.0).progress}["checkpoint-6"] == "sent"


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
        ("checkpoint-9", Incomplete, "nothing is there"),
        ("step-9", Incomplete, "nothing is there"),
        ("notes", ConfigError, "no checkpoint that a worker would find"),
        ("s3://bucket/checkpoint-5", ConfigError, "not a path of this machine"),
    ],
)
def test_what_cannot_be_marked_is_logged_and_with_strict_raised(
    path: str, error: type[CkptsyncError], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "text").write_text("not a checkpoint")
    (tmp_path / "step-9").mkdir()
    given = path if "://" in path else str(tmp_path / path)
    with caplog.at_level(logging.WARNING, "ckptsync.hook"):
        assert ckptsync.mark_saved(given) is False
    assert said in caplog.text
    with pytest.raises(error, match=said):
        ckptsync.mark_saved(given, strict=True)


def test_a_disk_that_refuses_is_a_store_error(tmp_path: Path) -> None:
    path = saved(tmp_path)
    (tmp_path / "_ckptsync").write_text("in the way")
    with pytest.raises((StoreError, ConfigError)):
        ckptsync.mark_saved(path, strict=True)
    assert ckptsync.mark_saved(path) is False


@pytest.mark.parametrize("wrong", [None, 7, b"x"])
def test_no_argument_raises_into_the_training(wrong: object) -> None:
    assert ckptsync.mark_saved(wrong) is False  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("checkpoint-5", "checkpoint-5"),
        ("run-0/checkpoint-5", "run-0.checkpoint-5"),
        ("checkpoints/checkpoint_3", "checkpoint_3"),
        ("checkpoint/step-4", "step-4"),
        ("step-4", "step-4"),
        ("global_step7", "global_step7"),
        ("global_step_9", "global_step_9"),
        ("epoch=0-step=4.ckpt", "epoch-0-step-4.ckpt"),
        ("lightning_logs/version_2/checkpoints/last.ckpt", "version_2.last.ckpt"),
        (".", "final"),
    ],
)
def test_a_checkpoint_is_found_where_a_worker_finds_it(path: str, name: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    checkpoint = out / path
    if path.endswith(".ckpt"):
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        checkpoint.write_text("x")
    else:
        checkpoint.mkdir(parents=True)
        for file in (".metadata", "mp_rank_00_model_states.pt", "data.pt", "model.safetensors")[: 3 if path != "." else 4]:
            (checkpoint / file).write_text("x")
        if path == ".":
            (checkpoint / "mp_rank_00_model_states.pt").unlink()
    found = located(checkpoint)
    assert found is not None
    assert (found[0], found[1].name) == (out, name)


def test_where_a_worker_has_its_spool_its_run_begins(tmp_path: Path) -> None:
    path = saved(tmp_path / "checkpoints", "checkpoint_3")
    assert located(path) is not None
    (tmp_path / "checkpoints" / "_ckptsync").mkdir()
    found = located(path)
    assert found is not None
    assert found[0] == tmp_path / "checkpoints"


def test_a_file_that_lightning_still_writes_is_not_marked(tmp_path: Path) -> None:
    path = tmp_path / "epoch=0-step=4.ckpt"
    whole = b"PK\x03\x04" + bytes(40) + b"PK\x05\x06" + bytes(18)
    for size in (0, 2, 40, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(Incomplete, match="still being written"):
            ckptsync.mark_saved(path, strict=True)
    assert commits(tmp_path) == {}
    path.write_bytes(whole)
    assert ckptsync.mark_saved(path, strict=True)
    assert set(commits(tmp_path)) == {"epoch-0-step-4.ckpt.0"}


def test_a_run_begins_where_links_can_be_made(tmp_path: Path, other_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``checkpoints/`` may be a volume of its own, or lie where this user may not write."""
    path = saved(tmp_path / "checkpoints", "checkpoint_3")
    for is_allowed, home in ((True, tmp_path), (False, tmp_path / "checkpoints")):
        monkeypatch.setattr(os, "access", lambda *_, allowed=is_allowed: allowed)
        found = located(path)
        assert found is not None
        assert found[0] == home
    monkeypatch.undo()
    (other_disk / "checkpoints").mkdir()
    assert marking._is_near(other_disk, other_disk / "checkpoints")
    assert not marking._is_near(tmp_path, other_disk / "checkpoints")
    assert not marking._is_near(Path("/"), Path("/"))


def test_one_rank_speaks_for_all_where_the_process_group_has_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marking, "this_rank", lambda: Rank(0, 2, is_met=True))
    path = saved(tmp_path)
    assert ckptsync.mark_saved(path, part="all", strict=True) is True
    with pytest.raises(CkptsyncError):
        ckptsync.mark_saved(path, strict=True)


def test_a_link_to_a_checkpoint_is_that_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(saved(tmp_path).name)
    assert ckptsync.mark_saved(tmp_path / "latest", strict=True)
    assert set(commits(tmp_path)) == {"checkpoint-5.0"}


def program(*words: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, cwd=ROOT, env=env, timeout=120)


def test_it_needs_nothing_but_the_standard_library(tmp_path: Path) -> None:
    path = saved(tmp_path)
    script = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}]; before = set(sys.modules)\n"
        "import ckptsync\n"
        "light = {m for m in set(sys.modules) - before if m.startswith('ckptsync.')}\n"
        f"assert ckptsync.mark_saved({str(path)!r}, strict=True)\n"
        "names = {m.partition('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names)\n"
        "print(sorted(light), *sorted(names))"
    )
    done = program("-S", "-I", "-c", script)
    assert done.stdout.split() == ["[]", "ckptsync"], done.stderr
    (begun,) = marks.begun(tmp_path / "_ckptsync")
    assert 0 < begun.ended <= begun.left
    assert set(commits(tmp_path)) == {"checkpoint-5.0"}


def test_a_script_that_fails_has_left_and_has_not_ended(tmp_path: Path) -> None:
    done = program("-c", f"import ckptsync; ckptsync.mark_saved({str(saved(tmp_path))!r}); raise SystemError")
    assert done.returncode == 1
    (begun,) = marks.begun(tmp_path / "_ckptsync")
    assert begun.ended == 0 < begun.left


def test_two_real_ranks_keep_what_both_have_marked_and_never_what_one_has(tmp_path: Path) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = program(*launch, str(ROOT / "tests" / "marked_training.py"), str(tmp_path))
    first, second = ([json.loads(line) for line in (tmp_path / f"said-{r}.jsonl").read_text().splitlines()] for r in range(2))
    assert [step for step, _, _ in (*first, *second)] == [1, 2, 3, 1, 2], done.stderr[-2000:]
    assert sorted([first[0][1], second[0][1]]) == [False, True], "the last of the two"
    assert [pinned for _, pinned, _ in (*first[1:], second[1])] == [False, False, True]
    assert commits(tmp_path / "ahead")["step-2.0"].ranks == (0, 1), "rank 1 was done before rank 0 had begun"
    assert first[1][2] == ["step-1.0"], "rank 0 marked step-2 long before rank 1 had written"
    found = commits(tmp_path)
    assert set(found) == {"step-1.0", "step-2.0"}
    assert all(set(c.files) == {".metadata", "__0_0.distcp", "__1_0.distcp"} and c.ranks == (0, 1) for c in found.values())
    assert commits(tmp_path / "lonely")["step-1.0"].ranks == (0,), "rank 1 has said that it has nothing of it"
    assert commits(tmp_path / "silent") == {}
    assert [set(commits(tmp_path / f"node{r}" / "apart")) for r in range(2)] == [{"step-1.0", "step-2.0"}] * 2
    assert done.stderr.count("other ranks have never said") == 1


def test_a_part_that_is_marked_too_early_for_all_is_completed_by_its_files_or_never(tmp_path: Path) -> None:
    """The script is wrong: with ``part="all"`` it says that all is written while one rank's shard is not."""
    demo = ROOT / "ckptsync" / "demo_data" / "fsdp2"
    early = tmp_path / "checkpoint-4"
    shutil.copytree(demo / "node0" / "checkpoint-4", early)
    assert ckptsync.mark_saved(early, part="all", strict=True)
    store = MemoryStore()
    worker = Worker(WorkerOptions("n0", (RunDir("run", tmp_path),)), store)
    worker.tick(0.0)
    assert words(store) == {"checkpoint-4": "ARRIVING"}
    shutil.copytree(demo / "node1" / "checkpoint-4", early, dirs_exist_ok=True)
    for after in (1.0, 100.0, 800.0):
        worker.tick(after)
    assert words(store) == {"checkpoint-4": "COMPLETE"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes directories of other users")
@pytest.mark.parametrize("kind", ["theirs", "link"])
def test_in_a_spool_that_is_not_this_users_nothing_is_kept_and_one_line_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    marking._told.clear()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    saved(tmp_path / "out")
    if kind == "theirs":
        (tmp_path / "out" / "_ckptsync").mkdir()
        os.chown(tmp_path / "out" / "_ckptsync", 65534, 65534)
    else:
        (tmp_path / "out" / "_ckptsync").symlink_to(elsewhere)
        os.chown(tmp_path / "out" / "_ckptsync", 65534, 65534, follow_symlinks=False)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert ckptsync.mark_saved(tmp_path / "out" / "checkpoint-5") is False
    (line,) = caplog.messages
    assert "_ckptsync: " in line
    assert "belongs to uid 65534" in line or "a link that somebody else may have made" in line
    assert list(elsewhere.iterdir()) == []
    with pytest.raises(ConfigError, match="_ckptsync"):
        ckptsync.mark_saved(tmp_path / "out" / "checkpoint-5", strict=True)
