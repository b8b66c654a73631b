from __future__ import annotations

import shlex
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from ckptsync.spool import marks
from tests.hooking import commits
from tests.standing import PINS, ROOT, STAND_IN, STEPS, ran

BEGIN = (
    "import sys; from pathlib import Path; out = Path(sys.argv[1]); from transformers.trainer import DEFAULT_CALLBACKS, Trainer\n"
)
OWN = "from ckptsync.hooks.hf import CkptSyncCallback\nclass Own(CkptSyncCallback): pass\n"
TRAIN = "one.train(); one.save_model()\n"
ON = "ckptsync: on: every save of"


def trained(out: Path, *lines: str, **variables: str) -> subprocess.CompletedProcess[str]:
    program = "from ckptsync.hooks.autoload import begin; begin()\n" + BEGIN + "\n".join(lines)
    done = ran("-c", program, str(out), path=(STAND_IN, ROOT), cwd=ROOT, **{"CKPTSYNC_AUTOLOAD": "1", **variables})
    assert done.returncode == 0, done.stderr
    return done


def begun(out: Path) -> int:
    return len(list(marks.begun(out / "_ckptsync")))


def test_a_script_that_knows_nothing_of_us_has_every_step_and_the_final_model_kept(tmp_path: Path) -> None:
    done = trained(tmp_path, "one = Trainer(str(out))", TRAIN)
    found = commits(tmp_path)
    assert set(found) == PINS
    for name, commit in found.items():
        kept = tmp_path / "_ckptsync" / "pins" / name / "files" / "model.safetensors"
        assert kept.read_text() == ("final model.safetensors" if name == "final.0" else f"model.safetensors {commit.step}")
    assert done.stderr.count(ON) == 1
    assert str(tmp_path) in done.stderr


def test_a_second_training_of_the_process_is_kept_and_not_announced(tmp_path: Path) -> None:
    done = trained(tmp_path, *(f"one = Trainer(str(out / {name!r}))\n{TRAIN}" for name in "ab"))
    assert [set(commits(tmp_path / name)) for name in "ab"] == [PINS, PINS]
    assert done.stderr.count(ON) == 1


PASSED = {
    "given to the Trainer": "one = Trainer(str(out), callbacks=[Own()])",
    "added to it later": "one = Trainer(str(out)); one.add_callback(Own())",
    "a default before ours": "DEFAULT_CALLBACKS.insert(0, Own); one = Trainer(str(out))",
    "a default after ours": "DEFAULT_CALLBACKS.append(Own); one = Trainer(str(out))",
}


@pytest.mark.parametrize("passed", PASSED.values(), ids=PASSED)
def test_a_callback_of_the_scripts_own_wins(tmp_path: Path, passed: str) -> None:
    done = trained(
        tmp_path, OWN, passed, TRAIN, "assert [c._saver is None for c in one.callbacks if hasattr(c, '_saver')].count(True) == 1"
    )
    assert set(commits(tmp_path)) == PINS
    assert (begun(tmp_path), done.stderr) == (1, "")


@pytest.mark.parametrize("own", "ab")
def test_of_two_trainings_one_may_have_its_own(tmp_path: Path, own: str) -> None:
    made = [f"one = Trainer(str(out / {name!r}), callbacks=[{'Own()' if name == own else ''}])\n{TRAIN}" for name in "ab"]
    done = trained(tmp_path, OWN, *made)
    assert [set(commits(tmp_path / name)) for name in "ab"] == [PINS, PINS]
    assert [begun(tmp_path / name) for name in "ab"] == [1, 1]
    assert done.stderr.count(ON) == 1


def test_a_trainer_may_be_given_its_own_before_it_trains_once_more(tmp_path: Path) -> None:
    again = "one.folder = out / 'b'; one.args.output_dir = str(out / 'b'); one.add_callback(Own())"
    trained(tmp_path, OWN, "one = Trainer(str(out / 'a'))", TRAIN, again, TRAIN)
    assert [set(commits(tmp_path / name)) for name in "ab"] == [PINS, PINS]
    (first,), (second,) = (marks.begun(tmp_path / name / "_ckptsync") for name in "ab")
    assert 0 < first.left < second.ended, "the one that stands aside has left what it had before"


def test_a_trainer_that_tells_of_fewer_events_is_heard_from_the_first_that_comes(tmp_path: Path) -> None:
    few = (
        "heard = Trainer.event; Trainer.event = lambda self, name: name in ('on_epoch_begin', 'on_step_begin') or heard(self, name)"
    )
    trained(tmp_path, few, "one = Trainer(str(out))", TRAIN)
    assert {f"checkpoint-{STEPS}.0", "final.0"} <= set(commits(tmp_path))
    assert begun(tmp_path) == 1


def test_a_wait_that_is_none_is_said_at_both_ends_and_everything_is_sent_all_the_same(tmp_path: Path) -> None:
    out, store = tmp_path / "out", tmp_path / "store"
    wait = f"""
import time
until = time.monotonic() + 90
wanted = Path({str(store)!r}) / "out" / "checkpoint-3" / "model.safetensors"
while not wanted.exists() and time.monotonic() < until: time.sleep(0.1)
assert wanted.exists()
"""
    done = trained(out, "one = Trainer(str(out))", TRAIN, wait, CKPTSYNC_STORE=str(store), CKPTSYNC_WAIT="soon")
    first, *_, last = done.stderr.splitlines()
    assert first == last
    assert first.startswith("ckptsync: CKPTSYNC_WAIT: 'soon' is not a duration")


def test_the_last_line_says_that_all_is_stored_where_somebody_waited_for_it(tmp_path: Path) -> None:
    out, store = tmp_path / "out", tmp_path / "store"
    done = trained(out, "one = Trainer(str(out))", TRAIN, CKPTSYNC_STORE=str(store), CKPTSYNC_WAIT="90s")
    assert done.stderr.splitlines()[-1] == f"ckptsync: all is stored that was kept of {out}, in {store}"
    assert len(list((store / "out").glob("*/model.safetensors"))) == len(PINS)


@pytest.mark.skipif(find_spec("gcsfs") is not None, reason="the worker of this test lacks gcsfs")
@pytest.mark.parametrize("wait", ["60s", ""])
def test_the_last_line_says_what_to_install_and_the_push_that_sends_what_is_left(tmp_path: Path, wait: str) -> None:
    out = tmp_path / "my out"
    ended = "import time; until = time.monotonic() + 60\nwhile not one.callbacks[-1]._workers[out].poll() and time.monotonic() < until: time.sleep(0.1)"
    ended = ended.replace("_workers[out]", "_workers[out][0]")
    told = {"CKPTSYNC_STORE": "gs://bucket/x", "CKPTSYNC_WAIT": wait, "CKPTSYNC_RUN": "sft"}
    done = trained(out, "one = Trainer(str(out))", TRAIN, ended, **told)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ckptsync: not stored: checkpoint-1, checkpoint-2, checkpoint-3, final: ")
    assert "gs:// is not installed; hint: pip install gcsfs" in last
    assert last.endswith(f"ckptsync push '{out}' gs://bucket/x --run sft")
    *words, _, _, _ = shlex.split(last.partition("send what is left: ")[2])
    sent = ran("-m", *words, str(tmp_path / "store"), cwd=ROOT, path=(ROOT,))
    assert sent.returncode == 0, sent.stderr
    assert len(list((tmp_path / "store" / "my out").glob("*/model.safetensors"))) == len(PINS)


def test_where_nothing_can_be_kept_nobody_says_that_it_is(tmp_path: Path) -> None:
    (tmp_path / "_ckptsync").write_text("a file where the spool would be")
    done = trained(tmp_path, "one = Trainer(str(out))", TRAIN)
    assert f"ckptsync: could not begin: UnsafeSpool: {tmp_path}/_ckptsync: no directory" in done.stderr
    assert ON not in done.stderr


@pytest.mark.parametrize("run", ["", "qwen"])
def test_the_environment_can_ask_for_a_worker_and_for_time_to_send(tmp_path: Path, run: str) -> None:
    told = {"CKPTSYNC_STORE": "../store", "CKPTSYNC_WAIT": "60s", "CKPTSYNC_RUN": run}
    trained(tmp_path / "out", "import os; out.mkdir(); os.chdir(out)", "one = Trainer(str(out))", TRAIN, **told)
    stored = {path.parent.name: path.read_text() for path in (tmp_path / "store" / (run or "out")).glob("*/model.safetensors")}
    wanted = {f"checkpoint-{step}": f"model.safetensors {step}" for step in range(1, STEPS + 1)}
    assert stored == {**wanted, "final": "final model.safetensors"}


def test_why_a_worker_could_not_begin_is_said_where_the_training_speaks(tmp_path: Path) -> None:
    done = trained(tmp_path, "one = Trainer(str(out))", TRAIN, CKPTSYNC_STORE=str(tmp_path / "store"), CKPTSYNC_WAIT="60s")
    assert f"the embedded worker ended with exit code 2: {tmp_path}: the store {tmp_path}/store lies inside" in done.stderr


def test_a_callback_that_several_trainers_share_brings_a_worker_for_each_directory(tmp_path: Path) -> None:
    shared = f"shared = CkptSyncCallback(store={str(tmp_path / 'store')!r}, wait=60)"
    made = [f"one = Trainer(str(out / {name!r}), callbacks=[shared])\n{TRAIN}" for name in "ab"]
    trained(tmp_path, OWN, shared, *made)
    for name in "ab":
        assert len(list((tmp_path / "store" / name).glob("*/model.safetensors"))) == len(PINS), name


def test_trainings_of_one_process_in_one_directory_share_a_worker(tmp_path: Path) -> None:
    clear = "import shutil; [shutil.rmtree(path) for path in out.glob('checkpoint-*')]"
    begun = "from ckptsync.hooks import embedded; (first,) = embedded._BEGUN.values()"
    again = "(second,) = embedded._BEGUN.values(); print(first is second, first.poll())"
    once = f"one = Trainer(str(out))\n{TRAIN}"
    done = trained(tmp_path / "out", once, begun, clear, once, again, CKPTSYNC_STORE=str(tmp_path / "store"))
    assert done.stdout == "True None\n"


@pytest.mark.parametrize(("at_work", "stored"), [(0.0, True), (3600.0, False)], ids=["is begun again", "unless it has only begun"])
def test_a_worker_that_is_killed_while_the_training_goes_on(tmp_path: Path, at_work: float, *, stored: bool) -> None:
    killing = """
import ckptsync.hooks.hf as hf
hf._AT_WORK = %s
class Killing(TrainerCallback):
    def on_save(self, args, state, control, **kwargs):
        if state.global_step == 1:
            (worker, since), = shared._workers.values()
            worker.kill(); worker.wait()
one = Trainer(str(out / 'out'), callbacks=[shared, Killing()])
"""
    shared = f"from transformers import TrainerCallback\nshared = CkptSyncCallback(store={str(tmp_path / 'store')!r}, wait=60)"
    done = trained(tmp_path, OWN, shared, killing % at_work, TRAIN)
    assert "the embedded worker ended with exit code -9: see embedded.log in" in done.stderr
    assert (tmp_path / "store" / "out" / "checkpoint-3" / "model.safetensors").exists() == stored


def test_the_last_line_says_it_of_a_worker_that_covers_several_directories_too(tmp_path: Path) -> None:
    cover = "from ckptsync.hooks import embedded; embedded.cover({out.parent})"
    ended = "embedded.say_ended({out.parent}, 'error: s3://b: no key')"
    done = trained(tmp_path / "out", cover, "one = Trainer(str(out))", TRAIN, ended, CKPTSYNC_STORE="s3://b")
    last = done.stderr.splitlines()[-1]
    assert "not stored: checkpoint-1, checkpoint-2, checkpoint-3, final: error: s3://b: no key; then send" in last
    assert last.endswith(f"ckptsync push {tmp_path}/out s3://b")
