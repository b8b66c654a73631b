"""What a training feels of a worker that sends at its cap: ``python -m benchmarks.beside --python
PYTHON_WITH_TRANSFORMERS``.

One training (Trainer on all cores, then on all but one, no saves of its own) and one worker that
sends an earlier checkpoint all the while, as the systemd unit runs it (nice 10).  The worker is
stopped and let go on (SIGSTOP, SIGCONT) in blocks of some seconds: two blocks are a pair, in an
order that turns, so that what else changes on the machine falls on both.  A block's figure is the
median of its steps; what is reported is the median over the pairs. The store is on this machine
too: a directory on its disk, or SeaweedFS over S3 in memory, whose own CPU is taken from the
training as well.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import seconds_of

HERE = Path(__file__).parents[1]
# seconds at the begin of a block: the other block's last step, and what the worker does first
SKIPPED = 0.7
MIB = 1 << 20
STARTING = 400.0


@dataclass(frozen=True)
class Block:
    """``step``: median seconds of a step.

    ``trainer``, ``worker``: seconds of CPU for each second of wall; ``sent``: bytes for each
    second.
    """

    step: float
    trainer: float
    worker: float
    sent: float


@dataclass(frozen=True)
class Beside:
    """Pairs of blocks, without the worker and with it."""

    store: str
    threads: int
    cap: int
    pairs: list[tuple[Block, Block]]


def main() -> None:
    """Measure each kind of store, and write what came of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--python", default=sys.executable, help="that has transformers and accelerate"
    )
    parser.add_argument("--stores", nargs="+", choices=("posix", "s3"), default=("posix", "s3"))
    cores = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--threads",
        nargs="+",
        type=int,
        default=sorted({cores, max(1, cores - 1)}),
        help="of the training",
    )
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument(
        "--block",
        type=float,
        default=3.0,
        help="seconds: short ones, as what else a machine does changes slowly",
    )
    parser.add_argument("--cap", type=int, default=50, help="MB/s")
    parser.add_argument(
        "--hidden", type=int, default=512, help="width of the model that is trained"
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("/dev/shm"),  # noqa: S108
        help="where S3's server keeps what it is sent",
    )
    parser.add_argument("--json", type=Path, default=Path("build/bench/beside.json"))
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory(dir=args.work) as place:
        for kind, threads in itertools.product(args.stores, args.threads):
            with tempfile.TemporaryDirectory(prefix="ckptsync-beside-") as home:
                results.append(measure_pairs(args, kind, threads, Path(home), Path(place)))
            print(*[*table(results)][-1:], flush=True)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps([asdict(result) for result in results], indent=1))


def measure_pairs(
    args: argparse.Namespace, kind: str, threads: int, home: Path, served: Path
) -> Beside:
    """Return all pairs of one training and one kind of store."""
    with ExitStack() as stack:
        trainer = stack.enter_context(_training(args, threads, home))
        worker = stack.enter_context(_sending(args, kind, home, served))
        pairs = []
        for n in range(args.pairs + 1):
            order = (False, True) if n % 2 else (True, False)
            both = {runs: _block(trainer, worker, home, args.block, runs=runs) for runs in order}
            if worker.poll() is not None or both[True].sent < args.cap * 1e6 / 4:
                raise SystemExit(
                    f"the worker does not send: see {home};"
                    f" {(home / 'worker.log').read_text()[-2000:]}"
                )
            pairs.append((both[False], both[True]))
    return Beside(kind, threads, args.cap, pairs[1:])  # the first one warms caches


def section(stored: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of docs/benchmarks.md, from the results as JSON."""
    results = [_result(each) for each in stored]
    yield "## A worker that uploads at its limit, beside a training"
    yield ""
    yield (
        f"`benchmarks/beside.py`: {len(results[0].pairs)} pairs of blocks of one training, without"
        " the worker and with it, in an order that turns; a block's step is the median of its"
    )
    yield (
        "steps, and the table has medians over the pairs. The store is on the same machine, and"
        " SeaweedFS' own CPU is taken from the training too."
    )
    yield ""
    yield from table(results)


def table(results: Sequence[Beside]) -> Iterator[str]:
    """Yield the table: medians over pairs; ratios are medians of the pairs' ratios."""
    yield (
        "| store | trainer's threads | MB/s sent | step ms alone | step ms beside | ratio |"
        " trainer's CPU, cores alone | beside | worker's CPU, cores | CPU s a GB |"
    )
    yield "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
    for result in results:
        alone, beside = ([pair[n] for pair in result.pairs] for n in (0, 1))
        ratio = statistics.median(b.step / a.step for a, b in result.pairs)
        sent, worker = _median(beside, "sent"), _median(beside, "worker")
        cells = (
            *(
                result.store,
                str(result.threads),
                f"{sent / 1e6:.0f} of {result.cap}",
                f"{_median(alone, 'step') * 1e3:.1f}",
                f"{_median(beside, 'step') * 1e3:.1f}",
            ),
            *(
                f"{ratio:.3f}",
                f"{_median(alone, 'trainer'):.2f}",
                f"{_median(beside, 'trainer'):.2f}",
                f"{worker:.2f}",
            ),
            f"{worker / sent * 1e9:.2f}",
        )
        yield f"| {' | '.join(cells)} |"


def _result(stored: Mapping[str, Any]) -> Beside:
    """Return one result from its JSON."""
    return Beside(
        stored["store"],
        stored["threads"],
        stored["cap"],
        [(Block(**a), Block(**b)) for a, b in stored["pairs"]],
    )


def _median(blocks: list[Block], what: str) -> float:
    return statistics.median(getattr(block, what) for block in blocks)


def _block(
    trainer: subprocess.Popen[bytes],
    worker: subprocess.Popen[bytes],
    home: Path,
    seconds: float,
    *,
    runs: bool,
) -> Block:
    worker.send_signal(signal.SIGCONT if runs else signal.SIGSTOP)
    time.sleep(SKIPPED)
    begun, before = time.time(), _counted(trainer, worker)
    time.sleep(seconds)
    ended, after = time.time(), _counted(trainer, worker)
    spent = [(b - a) / (ended - begun) for a, b in zip(before, after, strict=True)]
    steps = [time_ for time_ in _steps(home) if begun <= time_ <= ended]
    return Block(statistics.median(b - a for a, b in itertools.pairwise(steps)), *spent)


def _counted(
    trainer: subprocess.Popen[bytes], worker: subprocess.Popen[bytes]
) -> tuple[float, float, float]:
    read = Path(f"/proc/{worker.pid}/io").read_text().split()[1]
    return seconds_of(trainer.pid), seconds_of(worker.pid), float(read)


def _steps(home: Path) -> list[float]:
    path = home / "truth" / "events-0.jsonl"
    events = (
        (json.loads(line) for line in path.read_text().splitlines() if line.endswith("}"))
        if path.exists()
        else iter(())
    )
    return [each["at"] for each in events if each["event"] == "begin"]


@contextmanager
def _training(
    args: argparse.Namespace, threads: int, home: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a training that never ends, once it has made some steps."""
    words = [
        "ddp",
        "--out",
        home / "trains",
        "--truth",
        home / "truth",
        "--base",
        HERE / "tests" / "vectors" / "base",
    ]
    words += ["--steps", 10**6, "--save-steps", 10**6, "--hidden", args.hidden, "--no-truth"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(HERE),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
    }
    command = [args.python, str(HERE / "tests" / "campaigns" / "hf_training.py"), *map(str, words)]
    with _process(command, home / "trainer.log", environment) as process:
        until = time.monotonic() + STARTING
        while len(_steps(home)) < 10:
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit((home / "trainer.log").read_text()[-2000:])
            time.sleep(0.2)
        yield process


@contextmanager
def _sending(
    args: argparse.Namespace, kind: str, home: Path, served: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a worker that uploads, with a checkpoint that lasts for all blocks."""
    sent = home / "out" / "sent" / "checkpoint-4"
    shutil.copytree(HERE / "tests" / "vectors" / "hf-ddp" / "out" / "checkpoint-4", sent)
    with (sent / "ballast_0.distcp").open("wb") as large:
        # real bytes, since the pages of a save that was just written are in memory, too
        block = os.urandom(MIB)
        for _ in range(int((args.pairs + 3) * (args.block + SKIPPED) * args.cap * 1e6 / MIB)):
            large.write(block)
    os.utime(sent / "trainer_state.json")
    config = home / "worker.json"  # JSON is YAML
    worker = {"runs": [{"path": str(home / "out" / "*")}], "quiet": "1s"}
    limits = {"bandwidth": f"{args.cap}MB/s"}
    config.write_text(
        json.dumps(
            {
                "node": "beside",
                "roles": ["worker"],
                "store": _place(kind, home, served),
                "worker": worker,
                "limits": limits,
            }
        )
    )
    command = ["nice", "-n", "10", sys.executable, "-m", "ckptsync", "run", "-c", str(config)]
    with _process(command, home / "worker.log", {**os.environ, "PYTHONPATH": str(HERE)}) as process:
        until = time.monotonic() + STARTING
        while float(Path(f"/proc/{process.pid}/io").read_text().split()[1]) < 100 * MIB:
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit((home / "worker.log").read_text()[-2000:])
            time.sleep(0.2)
        yield process


def _place(kind: str, home: Path, served: Path) -> dict[str, Any]:
    if kind == "posix":
        return {"url": str(home / "store")}
    from tests.support.seaweedfs import weed  # noqa: PLC0415  it wants botocore

    # where the server keeps what it is sent, in all blocks
    before, tempfile.tempdir = (tempfile.tempdir, str(served))
    try:
        server = weed()
    finally:
        tempfile.tempdir = before
    return {"url": f"s3://{server.bucket()}", "options": server.options()}


@contextmanager
def _process(
    command: list[str], log: Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
