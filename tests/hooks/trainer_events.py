"""A training of one process that calls the hook's events as Trainer does, saves each step and keeps
one; run as a program.

    trainer_events.py run DIR             trains once
    trainer_events.py twice DIR           trains in DIR/a and then in DIR/b with one callback, and
                                          forks a process that only ends
    trainer_events.py own DIR             trains twice in DIR, each time with a callback of its own,
                                          and each time tells which final models are kept when that
                                          begins
    trainer_events.py search DIR          trains in DIR/run-0 and then in DIR/run-1, as trials of
                                          one search in DIR
    trainer_events.py fail|dead|kill DIR EVERY
                                          trains once for the first of each EVERY calls that the
                                          hook makes to the system: at the n-th it gets an error
                                          (`fail`), it gets one from then on (`dead`), or the
                                          process is killed (`kill`); DIR/<n> is what each leaves

A stand-in for transformers with its one class is imported: what is tested is ours, and torch would
make each child slow.
"""

from __future__ import annotations

import atexit
import errno
import json
import os
import shutil
import signal
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

stand_in = types.ModuleType("transformers")
stand_in.TrainerCallback = type("TrainerCallback", (), {})  # type: ignore[attr-defined]
sys.modules["transformers"] = stand_in

from ckptsync.hooks import added_files  # noqa: E402
from ckptsync.hooks.hf import CkptSyncCallback  # noqa: E402
from tests.hooks.training import FILES, STEPS  # noqa: E402

WATCHED = ("open", "os.", "shutil.", "fcntl.")  # audit events that are calls to the system


class Faults:
    """Errors, or death, at the n-th call to the system that is made within the hook."""

    def __init__(self) -> None:
        self.action, self.at, self.count, self.inside = "", 0, 0, False
        sys.addaudithook(self.audit)

    def audit(self, event: str, args: Any) -> None:
        if not self.inside or not event.startswith(WATCHED):
            return
        self.count += 1
        if self.action == "kill" and self.count == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        if (self.action == "fail" and self.count == self.at) or (
            self.action == "dead" and self.count >= self.at
        ):
            raise OSError(errno.ENOSPC, "No space left on device")


def train(output_dir: Path, faults: Faults, hook: Any = None, trial: str = "") -> None:
    """The events of `Trainer.train`, and what it writes between them.

    A trial of a search writes below the output directory.
    """
    hook = hook or CkptSyncCallback()
    args = SimpleNamespace(
        output_dir=str(output_dir),
        process_index=0,
        world_size=1,
        should_save=True,
        save_only_model=False,
    )
    state = SimpleNamespace(
        global_step=0,
        is_hyper_param_search=bool(trial),
        trial_params={"of": trial} if trial else None,
    )
    control = SimpleNamespace(should_training_stop=False)
    folder = output_dir / trial

    def event(name: str) -> None:
        if not hasattr(hook, name):
            return
        faults.inside = True
        getattr(hook, name)(args, state, control, model=None, processing_class=None)
        faults.inside = False

    event("on_train_begin")
    event("on_epoch_begin")
    for step in range(1, STEPS + 1):
        for name in ("on_step_begin", "on_pre_optimizer_step", "on_optimizer_step"):
            event(name)
        state.global_step, control.should_training_stop = step, step == STEPS
        event("on_step_end")
        save(folder, step)
        if trial:
            (folder / f"checkpoint-{step}" / "trainer_state.json").write_text(
                json.dumps(vars(state))
            )
        event("on_save")
        (folder / f"checkpoint-{step}" / "model.safetensors").write_text(
            f"a later callback's {step}"
        )
    for name in ("on_epoch_end", "on_log", "on_train_end"):
        event(name)
    for name in ("model.safetensors", "config.json") if not trial else ():
        (output_dir / f"{name}.new").write_text(f"final {name}")
        (output_dir / f"{name}.new").replace(output_dir / name)  # as safetensors writes
    faults.inside = True  # the interpreter ends now


def save(output_dir: Path, step: int) -> None:
    folder = output_dir / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    for name in FILES:
        (folder / name).write_text(f"{name} {step}")
    old = output_dir / f"checkpoint-{step - 1}"
    for name in FILES if old.exists() else ():
        (old / name).unlink()
    if old.exists():
        old.rmdir()


def each(action: str, folder: Path, faults: Faults, every: int) -> None:
    """Until the hook makes no n-th call."""
    added_files.describe_process()  # looks through all that is installed, and remembers
    for n in range(1, 10_000, every):
        child = os.fork()
        if not child:
            # after the hook's own, which is registered later
            atexit.register(count, folder / f"{n}.count", faults)
            faults.action, faults.at = action, n
            train(folder / str(n), faults)
            sys.exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        (folder / f"{n}.code").write_text(str(code))
        if (folder / f"{n}.count").exists() and int((folder / f"{n}.count").read_text()) < n:
            return


def count(path: Path, faults: Faults) -> None:
    faults.inside = False
    path.write_text(str(faults.count))


if __name__ == "__main__":
    what, where = sys.argv[1], Path(sys.argv[2])
    if what == "run":
        train(where, Faults())
    elif what == "search":
        one = CkptSyncCallback()
        for trial in ("run-0", "run-1"):
            train(where, Faults(), one, trial)
    elif what == "own":
        faults = Faults()
        for _ in range(2):
            one = CkptSyncCallback()
            train(where, faults, one)
            print(*sorted(path.name for path in where.glob("_ckptsync/pins/final.*")))
            shutil.rmtree(where / f"checkpoint-{STEPS}")
    elif what == "twice":
        only = CkptSyncCallback()
        train(where / "a", Faults(), only)
        train(where / "b", Faults(), only)
        forked = os.fork()
        if not forked:
            sys.exit(0)
        os.waitpid(forked, 0)
    else:
        each(what, where, Faults(), every=int(sys.argv[3]))
