"""What the hook takes of a training's time: ``python -m benchmarks.hook [--out
build/bench/hook.json]``.

The callback's own events are called as Trainer calls them, on one rank that writes checkpoints of
so many files, rotates them and keeps one: ``on_save``, and the event after it, in which the last
rank makes the pin (commit).  Before each event files are written, so that caches are as a training
leaves them.  Where the spool is on the same disk a pin is links; on another one (``--other``) files
are opened, and copied beside the training.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

KIB = 1 << 10
BACKLOG = 10  # pins that nobody has sent yet


@dataclass(frozen=True)
class Hooked:
    """``spool``: where pins lie; ``on_save``, ``commit``: seconds, one for each save."""

    files: int
    spool: str
    on_save: list[float]
    commit: list[float]


def main() -> None:
    """Measure, and print a table."""
    asked = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    asked.add_argument(
        "--files", type=int, nargs="+", default=[10, 100, 1000], help="in a checkpoint"
    )
    asked.add_argument("--saves", type=int, default=100)
    asked.add_argument("--work", default=tempfile.gettempdir(), help="where the training writes")
    asked.add_argument(
        "--other",
        default="/dev/shm",  # noqa: S108
        help="a directory on another disk; empty for none",
    )
    asked.add_argument("--out", type=Path)
    given = asked.parse_args()
    spools = ("the same disk", *(["another disk"] if given.other else []))
    found = [
        measured(many, given.saves, given.work, spool, given.other)
        for spool in spools
        for many in given.files
    ]
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps([asdict(one) for one in found], indent=1))
    print("\n".join(table(found)))


def table(found: Iterable[Hooked]) -> Iterator[str]:
    """One row for each number of files and place of the spool."""
    yield "| spool | files | on_save: median ms | longest | commit: median ms | longest |"
    yield "|---|--:|--:|--:|--:|--:|"
    for one in found:
        yield f"| {one.spool} | {one.files} | {_told(one.on_save)} | {_told(one.commit)} |"


def measured(files: int, saves: int, work: str, spool: str, other: str) -> Hooked:
    """One training."""
    with (
        tempfile.TemporaryDirectory(dir=work) as folder,
        tempfile.TemporaryDirectory(dir=other or work) as apart,
    ):
        out = Path(folder)
        if spool != "the same disk":
            if out.stat().st_dev == Path(apart).stat().st_dev:
                raise SystemExit(f"--other {other}: the same disk as {work}")
            (out / "_ckptsync").symlink_to(apart)
        hook, event = _training(out)
        event("on_train_begin", 0)
        # the first one imports, and makes directories
        took = [_saved(out, step, files, event) for step in range(1, saves + 2)][1:]
        event("on_train_end", saves + 1)
        kept = [*(out / "_ckptsync" / "pins").glob("checkpoint-*")]
        hook.leave()
    if len(kept) < min(saves, BACKLOG):
        raise SystemExit("the hook has not kept what it was told of")
    return Hooked(files, spool, [a for a, _ in took], [b for _, b in took])


def _callback() -> Any:
    # of it the hook needs one class, which has nothing in it
    if "transformers" not in sys.modules and importlib.util.find_spec("transformers") is None:
        sys.modules["transformers"] = types.ModuleType("transformers")
        sys.modules["transformers"].TrainerCallback = object  # type: ignore[attr-defined]
    from ckptsync.hooks.hf import CkptSyncCallback  # noqa: PLC0415  # the report needs none of it

    return CkptSyncCallback()


def _training(out: Path) -> tuple[Any, Callable[[str, int], float]]:
    """A callback, and what tells it of an event and says how many seconds that took."""
    hook, args = (
        _callback(),
        SimpleNamespace(output_dir=str(out), process_index=0, world_size=1, should_save=True),
    )

    def event(name: str, step: int) -> float:
        state = SimpleNamespace(global_step=step, is_hyper_param_search=False)
        begun = time.perf_counter()
        getattr(hook, name)(args, state, SimpleNamespace(should_training_stop=False), model=None)
        return time.perf_counter() - begun

    return hook, event


def _saved(
    out: Path, step: int, files: int, event: Callable[[str, int], Any]
) -> tuple[float, float]:
    checkpoint = out / f"checkpoint-{step}"
    checkpoint.mkdir()
    for n in range(files - 2):
        (checkpoint / f"part-{n}.bin").write_bytes(os.urandom(KIB))
    for name in ("rng_state.pth", "trainer_state.json"):
        (checkpoint / name).write_text(json.dumps({"global_step": step}))
    shutil.rmtree(out / f"checkpoint-{step - 1}", ignore_errors=True)
    took = event("on_save", step), event("on_step_begin", step)
    for thread in threading.enumerate():
        if thread.name.startswith("ckptsync-"):
            thread.join()
    # a worker has sent it
    shutil.rmtree(out / "_ckptsync" / "pins" / f"checkpoint-{step - BACKLOG}.0", ignore_errors=True)
    return took


def _told(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.2f} | {max(seconds) * 1e3:.2f}"


if __name__ == "__main__":
    main()
