from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptsync.scan import spots
from ckptsync.spool import marks
from ckptsync.spool.marks import Commit
from tests.exhaustive import ALL
from tests.hooking import FILES, STEPS, commits

ROOT = Path(__file__).parent.parent
CHECKPOINTS = {f"checkpoint-{step}.0" for step in range(1, STEPS + 1)}


def program(*arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, cwd=ROOT, env=env, timeout=timeout
    )


def check_whole(output_dir: Path, name: str, commit: Commit) -> None:
    """Every file of a pin is there, is what the trainer wrote in that step, and is the one that the commit names."""
    root = output_dir / "_ckptsync" / "pins" / name / "files"
    step = "final" if commit.checkpoint == "final" else str(commit.step)
    wanted = {"model.safetensors", "config.json"} if step == "final" else set(FILES)
    assert {p.name for p in root.iterdir()} == wanted == set(commit.files)
    for path in root.iterdir():
        own = f"{path.name} {step}" if path.name != "model.safetensors" else f"a later callback's {step}"
        assert path.read_text() == (f"final {path.name}" if step == "final" else own)
        assert (path.stat().st_size, path.stat().st_mtime_ns) == commit.files[path.name]


def runs(folder: Path, action: str) -> Iterator[tuple[int, Path]]:
    """What each of the trainings left, and its exit code."""
    done = program("-m", "tests.hook_training", action, str(folder), timeout=600)
    assert done.returncode == 0, done.stderr
    codes = sorted(folder.glob("*.code"), key=lambda p: int(p.stem))
    assert len(codes) > (100 if ALL else 20)
    for code in codes:
        yield int(code.read_text()), folder / code.stem


def test_every_step_and_the_final_model_are_pinned_though_rotation_leaves_one(tmp_path: Path) -> None:
    done = program("-m", "tests.hook_training", "run", str(tmp_path / "out"))
    assert (done.returncode, done.stderr) == (0, "")
    found = commits(tmp_path / "out")
    assert set(found) == {*CHECKPOINTS, "final.0"}
    for name, commit in found.items():
        check_whole(tmp_path / "out", name, commit)
    assert len({c.save for c in found.values()}) == STEPS + 1
    (process,) = marks.begun(tmp_path / "out" / "_ckptsync")
    assert 0 < process.ended <= found["final.0"].at <= process.left


def test_a_second_training_with_the_same_callback_ends_the_first(tmp_path: Path) -> None:
    done = program("-m", "tests.hook_training", "twice", str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    (first,), (second,) = (marks.begun(tmp_path / name / "_ckptsync") for name in ("a", "b"))
    assert 0 < first.left <= second.at < second.left
    assert set(commits(tmp_path / "a")) == {*CHECKPOINTS, "final.0"}


def test_each_training_of_a_script_has_its_own_final_model_though_they_share_a_directory(tmp_path: Path) -> None:
    """A sweep, or stages: what one has left is kept when the next one begins, and not only when the script is over."""
    done = program("-m", "tests.hook_training", "own", str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["", "final.0"]
    first, second = marks.begun(tmp_path / "_ckptsync")
    found = commits(tmp_path)
    assert [found[f"final.{k}"].train for k in range(2)] == [first.train, second.train]
    assert "final.2" not in found
    check_whole(tmp_path, "final.0", found["final.0"])


def test_a_training_in_a_process_that_multiprocessing_forked_has_its_final_model(tmp_path: Path) -> None:
    script = (
        "import multiprocessing, sys\n"
        "from pathlib import Path\n"
        "from tests.hook_training import Faults, train\n"
        "work = multiprocessing.get_context('fork').Process(target=train, args=(Path(sys.argv[1]), Faults()))\n"
        "work.start(), work.join()"
    )
    assert program("-c", script, str(tmp_path)).returncode == 0
    assert set(commits(tmp_path)) == {*CHECKPOINTS, "final.0"}


def test_where_the_hook_saves_configurations_is_not_in_the_training_s_log() -> None:
    script = (
        "import logging, tests.hook_training\n"
        "from ckptsync.hooks import hf\n"
        "logging.basicConfig(format='%(message)s')\n"
        "logging.getLogger('transformers').setLevel(logging.INFO)\n"
        "its = logging.getLogger('transformers.configuration_utils')\n"
        "with hf._quietly():\n"
        "    its.info('saved'), its.warning('wrong')\n"
        "its.info('its own')"
    )
    assert program("-c", script).stderr.split("\n") == ["wrong", "its own", ""]


def test_every_step_of_every_trial_of_a_search_is_pinned_under_the_name_that_a_worker_gives_it(tmp_path: Path) -> None:
    done = program("-m", "tests.hook_training", "search", str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    found = commits(tmp_path)
    assert set(found) == {f"run-{n}.{name}" for n in range(2) for name in CHECKPOINTS}
    assert len({commit.save for commit in found.values()}) == 2 * STEPS
    assert {s.name for s in spots(tmp_path)} == {f"run-{n}.checkpoint-{STEPS}" for n in range(2)}
    assert all(process.left for process in marks.begun(tmp_path / "_ckptsync"))


def test_a_forked_process_says_nothing_of_the_training(tmp_path: Path) -> None:
    assert program("-m", "tests.hook_training", "twice", str(tmp_path)).returncode == 0
    assert set(commits(tmp_path / "b")) == {*CHECKPOINTS, "final.0"}


def test_an_error_of_any_call_costs_one_save_at_most_and_training_never_notices(tmp_path: Path) -> None:
    for code, output_dir in runs(tmp_path, "fail"):
        assert code == 0
        assert sorted(p.name for p in (output_dir / f"checkpoint-{STEPS}").iterdir()) == sorted(FILES)
        found = commits(output_dir)
        assert not found or len(found) >= STEPS, "the hook is off from the beginning, or misses at most one"
        for name, commit in found.items():
            check_whole(output_dir, name, commit)


def test_a_disk_that_dies_at_any_call_leaves_no_torn_pin_and_training_never_notices(tmp_path: Path) -> None:
    for code, output_dir in runs(tmp_path, "dead"):
        assert code == 0
        assert sorted(p.name for p in (output_dir / f"checkpoint-{STEPS}").iterdir()) == sorted(FILES)
        for name, commit in commits(output_dir).items():
            check_whole(output_dir, name, commit)


def test_a_process_killed_at_any_call_leaves_no_torn_pin(tmp_path: Path) -> None:
    for code, output_dir in runs(tmp_path, "kill"):
        assert code in (0, -9)
        for name, commit in commits(output_dir).items():
            check_whole(output_dir, name, commit)


def test_the_hook_needs_nothing_but_the_standard_library_and_transformers(tmp_path: Path) -> None:
    (tmp_path / "transformers.py").write_text("class TrainerCallback: pass\n")
    script = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; before = set(sys.modules)\n"
        "from ckptsync.hooks.hf import CkptSyncCallback\n"
        "CkptSyncCallback()\n"
        "print(*sorted({m.partition('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names)))"
    )
    done = program("-S", "-I", "-c", script)
    assert done.stdout.split() == ["ckptsync", "transformers"], done.stderr


def test_a_callback_can_be_sent_to_another_process(tmp_path: Path) -> None:
    """Ray does so with the callbacks that it is given."""
    script = (
        "import tests.hook_training, copy\n"
        "from ckptsync.hooks.hf import CkptSyncCallback\n"
        "copy.deepcopy(CkptSyncCallback(wait=3.0)).__reduce_ex__(2)"
    )
    assert program("-c", script).returncode == 0


def trained(output_dir: Path, *words: str, world: int = 2) -> subprocess.CompletedProcess[str]:
    """Hugging Face's Trainer itself."""
    for library in ("torch", "transformers", "accelerate"):
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)] if world > 1 else []
    done = program(*launch, str(ROOT / "tests" / "hook_trainer.py"), str(output_dir), *words, timeout=480)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def test_two_real_ranks_pin_every_step_whole_and_quickly(tmp_path: Path) -> None:
    done = trained(tmp_path / "out", "--steps", "4")
    assert "_ckptsync" not in done.stderr
    found = commits(tmp_path / "out")
    assert set(found) == {*(f"checkpoint-{n}.0" for n in range(1, 5)), "final.0"}
    for name, commit in found.items():
        files = tmp_path / "out" / "_ckptsync" / "pins" / name / "files"
        assert {p.name for p in files.iterdir()} == set(commit.files)
        if name != "final.0":
            assert {"rng_state_0.pth", "rng_state_1.pth", "model.safetensors", "optimizer.pt", "trainer_state.json"} <= set(
                commit.files
            )
            assert json.loads((files / "trainer_state.json").read_text())["global_step"] == commit.step
    slowest = {name: float(ms) for name, ms in re.findall(r"(\w+): fastest ([0-9.]+) ms", done.stdout)}
    assert slowest["on_save"] < 1
    assert slowest["on_step_begin"] < 50


def test_a_real_just_in_time_save_is_pinned(tmp_path: Path) -> None:
    trained(tmp_path / "out", "--steps", "50", "--stop-at", "2", "--save-steps", "1000", world=1)
    (commit,) = (c for c in commits(tmp_path / "out").values() if c.checkpoint != "final")
    assert "checkpoint-is-incomplete.txt" not in commit.files
    assert {"rng_state.pth", "model.safetensors", "trainer_state.json"} <= set(commit.files)


def test_the_trainer_writes_the_same_with_the_hook_as_without(tmp_path: Path) -> None:
    trained(tmp_path / "with", "--steps", "2", world=1)
    trained(tmp_path / "without", "--steps", "2", "--no-hook", world=1)
    ours, theirs = (
        {str(p.relative_to(tmp_path / d)): p.read_bytes() for p in sorted((tmp_path / d).rglob("*")) if p.is_file()}
        for d in ("with", "without")
    )
    ours = {name: content for name, content in ours.items() if not name.startswith("_ckptsync/")}
    assert ours.keys() == theirs.keys()
    same = [n for n in ours if n.endswith((".safetensors", "optimizer.pt", "scheduler.pt", "config.json"))]
    assert [n for n in same if ours[n] != theirs[n]] == []
