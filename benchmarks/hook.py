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
from collections.abc import Callable, Iterator, Sequence
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--files", type=int, nargs="+", default=[10, 100, 1000], help="in a checkpoint"
    )
    parser.add_argument("--saves", type=int, default=100)
    parser.add_argument("--work", default=tempfile.gettempdir(), help="where the training writes")
    parser.add_argument(
        "--other",
        default="/dev/shm",  # noqa: S108
        help="a directory on another disk; empty for none",
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    spools = ("the same disk", *(["another disk"] if args.other else []))
    results = [
        measure_saves(many, args.saves, args.work, spool, args.other)
        for spool in spools
        for many in args.files
    ]
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps([asdict(result) for result in results], indent=1))
    print("\n".join(table(results)))


def section(stored: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of docs/benchmarks.md, from the results as JSON."""
    results = [Hooked(**each) for each in stored]
    yield "## What the hook takes of a step"
    yield ""
    yield (
        f"`benchmarks/hook.py`: {len(results[0].on_save)} saves of one rank for each row. *on_save*"
        " remembers; *commit* is the event after it, in which the last rank marks its part and"
        " makes the pin."
    )
    yield "On another disk files are opened there, and copied beside the training."
    yield ""
    yield from table(results)


def table(results: Sequence[Hooked]) -> Iterator[str]:
    """Yield a row for each number of files and location of the spool."""
    yield "| spool | files | on_save: median ms | longest | commit: median ms | longest |"
    yield "|---|--:|--:|--:|--:|--:|"
    for result in results:
        seconds = (_median_and_longest(result.on_save), _median_and_longest(result.commit))
        yield f"| {result.spool} | {result.files} | {' | '.join(seconds)} |"


def measure_saves(files: int, saves: int, work: str, spool: str, other: str) -> Hooked:
    """Return the seconds of all saves of one training."""
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
        pins = [*(out / "_ckptsync" / "pins").glob("checkpoint-*")]
        hook.leave()
    if len(pins) < min(saves, BACKLOG):
        raise SystemExit("the hook made too few pins")
    return Hooked(files, spool, [a for a, _ in took], [b for _, b in took])


def _callback() -> Any:
    # of it the hook needs one class, which has nothing in it
    if "transformers" not in sys.modules and importlib.util.find_spec("transformers") is None:
        sys.modules["transformers"] = types.ModuleType("transformers")
        sys.modules["transformers"].TrainerCallback = object  # type: ignore[attr-defined]
    from ckptsync.hooks.hf import CkptSyncCallback  # noqa: PLC0415  # the report needs none of it

    return CkptSyncCallback()


def _training(out: Path) -> tuple[Any, Callable[[str, int], float]]:
    """Return a callback, and a function that calls one of its events and returns the seconds."""
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


def _median_and_longest(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.2f} | {max(seconds) * 1e3:.2f}"


if __name__ == "__main__":
    main()
