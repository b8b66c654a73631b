"""What an idle worker costs, and how soon it uploads: ``python -m benchmarks.idle
[--out build/bench/idle.json]``.

The worker runs as its command does, over ``--checkpoints`` checkpoints that the store has already.
Idle is CPU and memory over ``--seconds`` once it has been at rest for a moment.  *First
byte* is the time from the end of a save to its first byte in the store, a directory: with a hook a
save is finished when its pin appears, without one when nothing has changed for ``worker.quiet``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ckptsync.spool import pins
from ckptsync.spool.markers import Commit, save_id, write_mark

HERE = Path(__file__).parents[1]
QUIET = 2.0  # seconds, for a run without a hook that does not take too long
LONGEST = 60.0
FILES = 8


@dataclass(frozen=True)
class Idle:
    """``cpu``: percent of a core; ``rss`` and ``peak`` in MB."""

    checkpoints: int
    seconds: float
    cpu: float
    rss: float
    peak: float


@dataclass(frozen=True)
class IdleCost:
    """``hooked``, ``plain``: seconds to the first byte, of each round, with a hook and without."""

    idle: Idle
    hooked: list[float]
    plain: list[float]


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoints", type=int, nargs="+", default=[20, 100])
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--work", default=tempfile.gettempdir())
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = [
        measure_worker(many, args.seconds, args.rounds, args.work) for many in args.checkpoints
    ]
    text = json.dumps([asdict(result) for result in results], indent=1)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text)
    print("\n".join(table(results)))


def section(stored: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of docs/benchmarks.md, from the results as JSON."""
    results = [IdleCost(**{**each, "idle": Idle(**each["idle"])}) for each in stored]
    yield "## A worker that has nothing to do"
    yield ""
    yield (
        "`benchmarks/idle.py`: over checkpoints of 9 files that the store, a directory, has"
        f" already; CPU of all threads over {results[0].idle.seconds:.0f} s."
    )
    yield (
        "*First byte*: from the end of a save to its first byte in the store;"
        f" {len(results[0].hooked)} saves each, one after the other."
    )
    yield ""
    yield from table(results)


def table(results: Sequence[IdleCost]) -> Iterator[str]:
    """Yield a row for each number of checkpoints."""
    yield (
        "| checkpoints | % of a core | MB | first byte, hook: median s | longest | no hook: median"
        " s | longest |"
    )
    yield "|--:|--:|--:|--:|--:|--:|--:|"
    for result in results:
        yield (
            f"| {result.idle.checkpoints} | {result.idle.cpu:.2f} | {result.idle.rss:.0f} |"
            f" {_median_and_longest(result.hooked)} | {_median_and_longest(result.plain)} |"
        )


def measure_worker(checkpoints: int, seconds: float, rounds: int, work: str) -> IdleCost:
    """Return the cost of one worker over so many checkpoints."""
    with tempfile.TemporaryDirectory(dir=work) as folder, _worker(Path(folder)) as worker:
        out, store = Path(folder) / "out" / "run", Path(folder) / "store" / "run"
        for step in range(checkpoints):
            _write(out / f"checkpoint-{step + 1}", step + 1)
        _until(
            lambda: len(list(store.glob(".ckptsync/*/manifest-*"))) >= checkpoints,
            LONGEST + 5 * checkpoints,
        )
        time.sleep(5)
        idle = _idle(worker.pid, checkpoints, seconds)
        hooked = [_first_byte(out, store, 1000 + n, _hooked) for n in range(rounds)]
        plain = [_first_byte(out, store, 2000 + n, _plain) for n in range(rounds)]
    return IdleCost(idle, hooked, plain)


def _median_and_longest(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} | {max(seconds):.2f}" if seconds else "- | -"


@contextmanager
def _worker(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    (folder / "out" / "run").mkdir(parents=True)
    config = {
        "node": "n0",
        "store": {"url": str(folder / "store")},
        "worker": {"runs": [f"{folder}/out/*"], "quiet": f"{QUIET}s"},
    }
    (folder / "c.yaml").write_text(json.dumps(config))
    command = [sys.executable, "-m", "ckptsync", "run", "-c", str(folder / "c.yaml")]
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(command, stderr=log, cwd=HERE) as child,
    ):
        try:
            yield child
        finally:
            child.terminate()


def _idle(pid: int, checkpoints: int, seconds: float) -> Idle:
    before = _cpu(pid)
    time.sleep(seconds)
    used = _cpu(pid) - before
    memory = dict(line.split(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    rss, peak = (int(memory[key].split()[0]) * 1024 / 1e6 for key in ("VmRSS", "VmHWM"))
    return Idle(checkpoints, seconds, round(100 * used / seconds, 3), round(rss, 1), round(peak, 1))


def _cpu(pid: int) -> float:
    """Seconds on a CPU so far, of all threads, those that have ended too.

    The kernel scales it by what ran, so short wakes count.
    """
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _first_byte(out: Path, store: Path, step: int, save: Callable[[Path, int], float]) -> float:
    """Return seconds from the end of a save to its first byte in the store."""
    checkpoint = out / f"checkpoint-{step}"
    finished = save(checkpoint, step)
    stored = store / checkpoint.name
    _until(lambda: list((store / ".ckptsync" / checkpoint.name).glob("manifest-*")), LONGEST)
    first = min(path.stat().st_mtime for path in stored.rglob("*") if path.is_file())
    shutil.rmtree(checkpoint)
    return first - finished


def _plain(checkpoint: Path, step: int) -> float:
    _write(checkpoint, step)
    return time.time() + QUIET


def _hooked(checkpoint: Path, step: int) -> float:
    _write(checkpoint, step)
    output_dir = checkpoint.parent
    fresh = output_dir / "_ckptsync" / "pins" / f".new-hook-{os.getpid()}-{step}"
    (fresh / "files").mkdir(parents=True)
    files = {}
    for path in checkpoint.iterdir():
        (fresh / "files" / path.name).hardlink_to(path)
        files[path.name] = (path.stat().st_size, path.stat().st_mtime_ns)
    commit = Commit(
        "t",
        save_id("t", checkpoint.name, 0),
        checkpoint.name,
        step,
        1,
        (0,),
        "host",
        "bench",
        time.time(),
        files,
    )
    write_mark(fresh / "commit.json", commit)
    pins.publish(output_dir, checkpoint.name, fresh)
    return time.time()


def _write(checkpoint: Path, step: int) -> None:
    checkpoint.mkdir()
    for n in range(FILES):
        (checkpoint / f"part-{n}.bin").write_bytes(os.urandom(1 << 16))
    (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": step}))


def _until(condition: Callable[[], object], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("the worker has not stored it; its log is in the work folder")
        time.sleep(0.02)


if __name__ == "__main__":
    main()
