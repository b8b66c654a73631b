from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from ckptsync.checkpoint_dirs import find_checkpoint_dirs
from ckptsync.spool import markers
from ckptsync.spool.markers import Commit
from tests.hooks.training import FILES, STEPS, commits
from tests.support.exhaustive import ALL
from tests.support.stand_in_programs import PINS, ROOT, STAND_IN, program, ran
from tests.support.stand_in_programs import STEPS as SAVES

CHECKPOINTS = {f"checkpoint-{step}.0" for step in range(1, STEPS + 1)}


def check_whole(output_dir: Path, name: str, commit: Commit) -> None:
    """Every file of a pin is there, is what the trainer wrote in that step, and is the one that the
    commit names.
    """
    root = output_dir / "_ckptsync" / "pins" / name / "files"
    step = "final" if commit.checkpoint == "final" else str(commit.step)
    wanted = {"model.safetensors", "config.json"} if step == "final" else set(FILES)
    assert {p.name for p in root.iterdir()} == wanted == set(commit.files)
    for path in root.iterdir():
        own = (
            f"{path.name} {step}"
            if path.name != "model.safetensors"
            else f"a later callback's {step}"
        )
        assert path.read_text() == (f"final {path.name}" if step == "final" else own)
        assert (path.stat().st_size, path.stat().st_mtime_ns) == commit.files[path.name]


def on(out: Path) -> str:
    """What the hook says when the first training of a process begins."""
    kept = f"every save in {out} is kept until it is uploaded by this node's worker"
    return f"ckptsync: hook active: {kept}\n"


def unserved(out: Path, names: str) -> str:
    """What the hook says at the end where no worker is at work."""
    command = shlex.join(["ckptsync", "push", str(out), "--store", "STORE"])
    why = f"no worker runs for {out}"
    return f"ckptsync: not uploaded: {names}: {why}; to upload the rest: {command}\n"


def runs(folder: Path, action: str) -> Iterator[tuple[int, Path]]:
    """What each of the trainings left, and its exit code."""
    every = 1 if ALL else 20  # calls
    done = program("-m", "tests.hooks.trainer_events", action, str(folder), str(every))
    assert done.returncode == 0, done.stderr
    codes = sorted(folder.glob("*.code"), key=lambda p: int(p.stem))
    assert len(codes) > 80 // every
    for code in codes:
        yield int(code.read_text()), folder / code.stem


def test_every_step_and_the_final_model_are_pinned(tmp_path: Path) -> None:
    done = program("-m", "tests.hooks.trainer_events", "run", str(tmp_path / "out"))
    left = unserved(tmp_path / "out", "checkpoint-1, checkpoint-2, final")
    assert (done.returncode, done.stderr) == (0, on(tmp_path / "out") + left)
    pin_commits = commits(tmp_path / "out")
    assert set(pin_commits) == {*CHECKPOINTS, "final.0"}
    for name, commit in pin_commits.items():
        check_whole(tmp_path / "out", name, commit)
    assert len({c.save for c in pin_commits.values()}) == STEPS + 1
    (process,) = markers.list_training_processes(tmp_path / "out" / "_ckptsync")
    assert 0 < process.ended <= pin_commits["final.0"].at <= process.left


def test_a_second_training_with_one_callback_ends_the_first(tmp_path: Path) -> None:
    done = program("-m", "tests.hooks.trainer_events", "twice", str(tmp_path))
    left = [unserved(tmp_path / name, "checkpoint-1, checkpoint-2, final") for name in "ab"]
    assert (done.returncode, done.stderr) == (0, on(tmp_path / "a") + "".join(left))
    (first,), (second,) = (
        markers.list_training_processes(tmp_path / name / "_ckptsync") for name in ("a", "b")
    )
    assert 0 < first.left <= second.at < second.left
    for name in ("a", "b"):
        assert set(commits(tmp_path / name)) == {*CHECKPOINTS, "final.0"}


def test_trainings_that_share_a_directory_have_their_own_final_models(tmp_path: Path) -> None:
    """In a sweep, or stages: the model of one is pinned when the next one begins."""
    done = program("-m", "tests.hooks.trainer_events", "own", str(tmp_path))
    left = unserved(
        tmp_path, "checkpoint-1, checkpoint-1, checkpoint-2, checkpoint-2, final, final"
    )
    assert (done.returncode, done.stderr) == (0, on(tmp_path) + left)
    assert done.stdout.splitlines() == ["", "final.0"]
    pin_commits = commits(tmp_path)
    assert pin_commits["final.0"].train != pin_commits["final.1"].train
    assert "final.2" not in pin_commits
    check_whole(tmp_path, "final.0", pin_commits["final.0"])


def test_a_training_in_a_forked_process_has_its_final_model(tmp_path: Path) -> None:
    script = (
        "import multiprocessing, sys\n"
        "from pathlib import Path\n"
        "from tests.hooks.trainer_events import Faults, train\n"
        "work = multiprocessing.get_context('fork').Process(target=train, "
        "args=(Path(sys.argv[1]), Faults()))\n"
        "work.start(), work.join()"
    )
    assert program("-c", script, str(tmp_path)).returncode == 0
    assert set(commits(tmp_path)) == {*CHECKPOINTS, "final.0"}


def test_a_search_is_left_to_the_files_of_its_trials(tmp_path: Path) -> None:
    done = program("-m", "tests.hooks.trainer_events", "search", str(tmp_path))
    assert done.returncode == 0
    assert "does not follow hyperparameter_search" in done.stderr
    assert (commits(tmp_path), markers.list_training_processes(tmp_path / "_ckptsync")) == ({}, ())
    assert {s.name for s in find_checkpoint_dirs(tmp_path)} == {
        f"run-{n}.checkpoint-{STEPS}" for n in range(2)
    }


@pytest.mark.parametrize("action", ["fail", "dead", "kill"])
def test_an_error_a_dead_disk_or_a_kill_at_any_call_leaves_no_torn_pin(
    tmp_path: Path, action: str
) -> None:
    for code, output_dir in runs(tmp_path, action):
        assert code in ((0, -9) if action == "kill" else (0,))
        pin_commits = commits(output_dir)
        if action != "kill":  # training never notices
            assert {p.name for p in (output_dir / f"checkpoint-{STEPS}").iterdir()} == set(FILES)
        # the hook is off from the beginning, or misses at most one
        assert action != "fail" or not pin_commits or len(pin_commits) >= STEPS
        for name, commit in pin_commits.items():
            check_whole(output_dir, name, commit)


def test_the_hook_needs_nothing_but_the_standard_library_and_transformers(tmp_path: Path) -> None:
    (tmp_path / "transformers.py").write_text("class TrainerCallback: pass\n")
    script = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; "
        "before = set(sys.modules)\n"
        "from ckptsync.hooks.hf import CkptSyncCallback\n"
        "CkptSyncCallback()\n"
        "print(*sorted({m.partition('.')[0] for m in set(sys.modules) - before} - "
        "set(sys.stdlib_module_names)))"
    )
    done = program("-S", "-I", "-c", script)
    assert done.stdout.split() == ["ckptsync", "transformers"], done.stderr


BEGIN = (
    "import sys; from pathlib import Path; out = Path(sys.argv[1]); from transformers.trainer"
    " import DEFAULT_CALLBACKS, Trainer\n"
)
OWN = "from ckptsync.hooks.hf import CkptSyncCallback\nclass Own(CkptSyncCallback): pass\n"
# where no worker will start again, nobody need wait for one
SHORT_RESTART = "from ckptsync.hooks import embedded_worker; embedded_worker.RESTART = 0.1"
TRAIN = "one.train(); one.save_model()\n"
ON = "ckptsync: hook active: every save in"


def trained(out: Path, *lines: str, **variables: str) -> subprocess.CompletedProcess[str]:
    script = "from ckptsync.hooks.autoload import begin; begin()\n" + BEGIN + "\n".join(lines)
    variables = {"CKPTSYNC_AUTOLOAD": "1", **variables}
    done = ran("-c", script, str(out), path=(STAND_IN, ROOT), cwd=ROOT, **variables)
    assert done.returncode == 0, done.stderr
    return done


def begun(out: Path) -> int:
    return len(list(markers.list_training_processes(out / "_ckptsync")))


EVENTS = """
from types import SimpleNamespace
for name in sys.argv[2:]:
    hook, folder = Own(), out / name
    args = SimpleNamespace(output_dir=str(folder), process_index=0, world_size=1)
    state = SimpleNamespace(global_step=1)
    control = SimpleNamespace(should_training_stop=name != "on_log")
    hook.on_train_begin(args, state, control, model=None)
    (folder / "checkpoint-1").mkdir()
    (folder / "checkpoint-1" / "model.safetensors").touch()
    hook.on_save(args, state, control)
    getattr(hook, name.removesuffix("-last"))(args, state, control)
    print((folder / "_ckptsync" / "pins" / "checkpoint-1.0").exists())
"""


def test_each_event_after_a_save_commits_it_but_a_log_only_at_the_end(tmp_path: Path) -> None:
    committing = ("on_step_begin", "on_substep_end", "on_epoch_begin", "on_epoch_end")
    names = (*committing, "on_train_end", "on_log-last", "on_log")
    done = ran("-c", BEGIN + OWN + EVENTS, str(tmp_path), *names)
    assert done.stdout.split() == ["True"] * 6 + ["False"], done.stderr


PASSED = {
    "of nobody's": "one = Trainer(str(out))",
    "given to the Trainer": "one = Trainer(str(out), callbacks=[Own()])",
    "added to it later": "one = Trainer(str(out)); one.add_callback(Own())",
    "a default before ours": "DEFAULT_CALLBACKS.insert(0, Own); one = Trainer(str(out))",
    "a default after ours": "DEFAULT_CALLBACKS.append(Own); one = Trainer(str(out))",
}


@pytest.mark.parametrize("passed", PASSED.values(), ids=PASSED)
def test_there_is_one_callback_and_the_scripts_own_wins(tmp_path: Path, passed: str) -> None:
    done = trained(tmp_path, OWN, passed, TRAIN)
    assert set(commits(tmp_path)) == PINS
    left = unserved(tmp_path, "checkpoint-1, checkpoint-2, checkpoint-3, final")
    assert (begun(tmp_path), done.stderr) == (1, on(tmp_path) + left)


@pytest.mark.parametrize("is_served", [False, True])
def test_a_training_without_a_worker_is_told_so_once(tmp_path: Path, *, is_served: bool) -> None:
    lock = "import fcntl; lock = (out / '_ckptsync' / 'worker-n0.lock').open('w')"
    lines = [
        OWN,
        "from ckptsync.hooks import hf",
        "class Own(CkptSyncCallback):",
        "    def on_save(self, args, state, *more, **kwargs):",
        "        hf.WORKER_DUE = 0.0 if state.global_step > 1 else 600.0  # not due at first",
        "        super().on_save(args, state, *more, **kwargs)",
        "(out / '_ckptsync').mkdir(0o700)",
        f"{lock}; fcntl.flock(lock, fcntl.LOCK_EX)" if is_served else "",
        "one = Trainer(str(out), callbacks=[Own(run='mine-{dir}')])",
    ]
    done = trained(tmp_path, *lines, TRAIN)
    assert f"uploaded by this node's worker, as the run mine-{tmp_path.name}\n" in done.stderr
    said = f"ckptsync: no worker watches {tmp_path}: its saves stay in {tmp_path / '_ckptsync'} "
    assert done.stderr.count(said) == (not is_served)


@pytest.mark.parametrize("own", "ab")
def test_of_two_trainings_one_may_have_its_own(tmp_path: Path, own: str) -> None:
    made = [
        f"one = Trainer(str(out / {name!r}), callbacks=[{'Own()' if name == own else ''}])\n{TRAIN}"
        for name in "ab"
    ]
    done = trained(tmp_path, OWN, *made)
    assert [set(commits(tmp_path / name)) for name in "ab"] == [PINS, PINS]
    assert [begun(tmp_path / name) for name in "ab"] == [1, 1]
    assert done.stderr.count(ON) == 1


def test_a_trainer_may_be_given_its_own_before_it_trains_once_more(tmp_path: Path) -> None:
    again = "one.folder = out / 'b'; one.args.output_dir = str(out / 'b'); one.add_callback(Own())"
    trained(tmp_path, OWN, "one = Trainer(str(out / 'a'))", TRAIN, again, TRAIN)
    assert [set(commits(tmp_path / name)) for name in "ab"] == [PINS, PINS]
    (first,), (second,) = (
        markers.list_training_processes(tmp_path / name / "_ckptsync") for name in "ab"
    )
    assert 0 < first.left < second.ended, "the one that stands aside has left what it had before"


def test_a_trainer_with_fewer_events_is_heard_from_the_first_that_comes(tmp_path: Path) -> None:
    few = (
        "heard = Trainer.event; Trainer.event = lambda self, name: name in ('on_epoch_begin',"
        " 'on_step_begin') or heard(self, name)"
    )
    trained(tmp_path, few, "one = Trainer(str(out))", TRAIN)
    assert {f"checkpoint-{SAVES}.0", "final.0"} <= set(commits(tmp_path))
    assert begun(tmp_path) == 1


def test_a_wait_that_is_none_is_said_and_ends_no_training(tmp_path: Path) -> None:
    done = trained(tmp_path, "one = Trainer(str(out))", TRAIN, CKPTSYNC_WAIT="soon")
    assert "ckptsync: wait (CKPTSYNC_WAIT): 'soon' is not a duration" in done.stderr
    assert set(commits(tmp_path)) == PINS


def test_without_a_wait_the_last_line_says_what_is_not_stored_yet(tmp_path: Path) -> None:
    out, store = tmp_path / "out", tmp_path / "store"
    slow = {"CKPTSYNC_STORE": str(store), "CKPTSYNC_LIMITS_BANDWIDTH": "1KB/s"}
    done = trained(out, "one = Trainer(str(out))", TRAIN, **slow)
    last = done.stderr.splitlines()[-1]
    assert re.match(r"ckptsync: .*not uploaded yet: .*final: the embedded worker goes on", last)
    command = last.partition("to wait for the rest: ")[2]
    assert command == f"ckptsync push {out} --store {store}"
    assert ran("-m", *shlex.split(command), path=(ROOT,)).returncode == 0
    assert len(list((store / "out").glob("*/model.safetensors"))) == len(PINS)


@pytest.mark.skipif(find_spec("gcsfs") is not None, reason="the worker of this test lacks gcsfs")
def test_the_last_line_says_what_to_install_and_what_sends_the_rest(tmp_path: Path) -> None:
    out = tmp_path / "my out"
    store = f"gs://bucket/{os.getpid()}"  # two workers of one store would have two node ids
    told = {"CKPTSYNC_STORE": store, "CKPTSYNC_WAIT": "600s", "CKPTSYNC_RUN": "sft"}
    done = trained(out, SHORT_RESTART, "one = Trainer(str(out))", TRAIN, **told)
    last = done.stderr.splitlines()[-1]
    names = "checkpoint-1, checkpoint-2, checkpoint-3, final"
    assert last.startswith(f"ckptsync: not uploaded: {names}: ")
    assert f"gs:// is not installed; hint: {sys.executable} -m pip install gcsfs" in last
    assert last.endswith(f"ckptsync push '{out}' --store {store} --run sft")
    *words, _, _, _ = shlex.split(last.partition("to upload the rest: ")[2])
    sent = ran("-m", *words, str(tmp_path / "store"), path=(ROOT,))
    assert sent.returncode == 0, sent.stderr
    assert len(list((tmp_path / "store" / "my out").glob("*/model.safetensors"))) == len(PINS)


def test_the_environment_can_ask_for_a_worker_and_for_time_to_send(tmp_path: Path) -> None:
    told = {"CKPTSYNC_STORE": " ../store ", "CKPTSYNC_WAIT": "600s", "CKPTSYNC_RUN": "qwen"}
    out, inside = tmp_path / "out", "import os; out.mkdir(); os.chdir(out)"
    done = trained(out, inside, "one = Trainer(str(out))", TRAIN, **told)
    models = (tmp_path / "store" / "qwen").glob("*/model.safetensors")
    stored = {path.parent.name: path.read_text() for path in models}
    wanted = {f"checkpoint-{step}": f"model.safetensors {step}" for step in range(1, SAVES + 1)}
    assert stored == {**wanted, "final": "final model.safetensors"}
    last = f"ckptsync: uploaded to ../store: 3 saves of {out} and the final model"
    assert done.stderr.splitlines()[-1] == last


def test_why_a_worker_could_not_begin_is_said_where_the_training_speaks(tmp_path: Path) -> None:
    store = {"CKPTSYNC_STORE": str(tmp_path / "store"), "CKPTSYNC_WAIT": "60s"}
    done = trained(tmp_path, SHORT_RESTART, "one = Trainer(str(out))", TRAIN, **store)
    why = f"{tmp_path}: the store {tmp_path}/store lies inside"
    assert f"the embedded worker ended: {why}" in done.stderr


def test_a_callback_of_two_trainers_brings_a_worker_for_each_directory(tmp_path: Path) -> None:
    shared = f"shared = CkptSyncCallback(store={str(tmp_path / 'store')!r}, wait=600)"
    made = [f"one = Trainer(str(out / {name!r}), callbacks=[shared])\n{TRAIN}" for name in "ab"]
    trained(tmp_path, OWN, shared, *made)
    for name in "ab":
        assert len(list((tmp_path / "store" / name).glob("*/model.safetensors"))) == len(PINS), name


def test_a_worker_that_is_killed_while_the_training_goes_on_is_begun_again(tmp_path: Path) -> None:
    killing = """
import os, signal, time
from ckptsync.hooks import embedded_worker
embedded_worker.RESTART_EVERY = 0.0
class Killing(TrainerCallback):
    def on_save(self, args, state, control, **kwargs):
        if state.global_step == 1:
            (worker,) = embedded_worker._workers.values()
            os.kill(worker.pid, signal.SIGKILL)
            while worker.is_running(): time.sleep(0.01)
one = Trainer(str(out / 'out'), callbacks=[shared, Killing()])
"""
    shared = (
        "from transformers import TrainerCallback\n"
        f"shared = CkptSyncCallback(store={str(tmp_path / 'store')!r}, wait=600)"
    )
    done = trained(tmp_path, OWN, shared, killing, TRAIN)
    assert "the embedded worker ended: see embedded.log in" in done.stderr
    assert (tmp_path / "store" / "out" / "checkpoint-3" / "model.safetensors").exists()
