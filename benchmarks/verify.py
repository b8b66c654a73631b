"""Verification beside what only reads: cold files beside `cat`, warm ones beside `sha256sum`.

    python -m benchmarks.verify --gib 2 --rounds 7 [--work DIR] [--s3]

Rounds alternate, so that what else the machine does meets both; told are the medians of the ratios
of a round.  Verification is the public command's own code, in this process (its start, 0.3 s, is
not measured).
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.cache import drop
from benchmarks.machine import described
from ckptsync.digest import digest_stream
from ckptsync.records.io import encode, record_name
from ckptsync.records.manifest import FileEntry, Manifest
from ckptsync.stores.contract import Store
from ckptsync.stores.opening import create_store, open_store
from ckptsync.tensors import Demands
from ckptsync.verify.verification import InStore, VerifyOptions, verify

MIB = 1 << 20
FILES = 4
GOALS = {"cold": (1.1, "times as long as cat"), "warm": (5.0, "times as fast as sha256sum")}


def fill(store: Store, size: int) -> list[str]:
    """One checkpoint of `FILES` files; their names."""
    names, entries = [], []
    for i in range(FILES):
        block = os.urandom(MIB)
        chunks = [block[k % 251 :] + block[: k % 251] for k in range(size // FILES // MIB)]
        found = digest_stream(chunks, len(chunks) * MIB)
        name = f"shard-{i}.bin"
        store.write(f"run/checkpoint-1/{name}", chunks)
        entries.append(FileEntry(name, found.size, found.digest, found.block_size, found.blocks, 0))
        names.append(f"run/checkpoint-1/{name}")
    demands = Demands({entry.path: entry.size for entry in entries})
    manifest = Manifest(
        "run", "checkpoint-1", "checkpoint-1", "node0", 0, tuple(entries), (), 0, 0, demands
    )
    data = encode(manifest)
    store.write(record_name(manifest, data), [data])
    return names


def verified(store: Store) -> None:
    (found,) = verify(InStore(store, "run", "checkpoint-1"), VerifyOptions("digest"))
    report = found.report
    if report.verdict != "ok":
        raise SystemExit(f"it is {report.verdict}: {report.findings}")


def timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def pairs(
    ours: Callable[[], object],
    others: Callable[[], object],
    before: Callable[[], object],
    rounds: int,
) -> list[tuple[float, float]]:
    """Seconds of both in each round; who goes first changes."""
    found = []
    for number in range(rounds):
        times = {}
        for work in (ours, others) if number % 2 else (others, ours):
            before()
            times[work] = timed(work)
        found.append((times[ours], times[others]))
    return found


def here(root: Path, size: int, rounds: int) -> Iterator[str]:
    create_store(str(root))
    paths = [root / name for name in fill(open_store(str(root)), size)]
    store = open_store(str(root))
    read = lambda: subprocess.run(  # noqa: E731
        [_program("cat"), *map(str, paths)], stdout=subprocess.DEVNULL, check=True
    )
    sums = lambda: subprocess.run(  # noqa: E731
        [_program("sha256sum"), *map(str, paths)], stdout=subprocess.DEVNULL, check=True
    )
    cold = pairs(lambda: verified(store), read, lambda: drop(paths), rounds)
    yield _line("cold", size, cold, "cat", statistics.median(a / b for a, b in cold))
    read()
    warm = pairs(lambda: verified(store), sums, lambda: None, rounds)
    yield _line("warm", size, warm, "sha256sum", statistics.median(b / a for a, b in warm))


def far(size: int, rounds: int) -> Iterator[str]:
    from tests.support.seaweedfs import weed  # noqa: PLC0415 - a real server is started

    server = weed()
    url, options = f"s3://{server.bucket()}/store", server.options()
    store = create_store(url, options)
    names = fill(store, size)
    out = memoryview(bytearray(8 * MIB))

    def fetch() -> None:
        for name in names:
            for at in range(0, store.size(name), len(out)):
                store.read_into(name, at, out[: min(len(out), store.size(name) - at)])

    times = pairs(lambda: verified(store), fetch, lambda: None, rounds)
    rate = statistics.median(size / a for a, _ in times) / 1e9
    other = statistics.median(size / b for _, b in times) / 1e9
    yield (
        f"S3 (SeaweedFS on this machine): verified at {rate:.2f} GB/s; fetched front to back, one"
        f" request at a time, {other:.2f} GB/s"
    )


def _program(name: str) -> str:
    return shutil.which(name) or name


def _line(
    kind: str, size: int, times: Sequence[tuple[float, float]], other: str, ratio: float
) -> str:
    ours, theirs = (statistics.median(size / pair[i] for pair in times) / 1e9 for i in (0, 1))
    goal, words = GOALS[kind]
    met = "met" if (ratio <= goal if kind == "cold" else ratio >= goal) else "NOT MET"
    return (
        f"{kind}: verified at {ours:.2f} GB/s, {other} {theirs:.2f} GB/s: {ratio:.2f} {words} (goal"
        f" {goal}: {met})"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--work",
        type=Path,
        help="a directory on the disk to measure (default: that for temporary files)",
    )
    parser.add_argument(
        "--s3",
        action="store_true",
        help="also of an S3 server on this machine (takes as much memory as bytes)",
    )
    args = parser.parse_args(argv)
    size = int(args.gib * 1024) // FILES * FILES * MIB
    for line in described():
        print(line)
    work = Path(tempfile.mkdtemp(prefix="ckptsync-verify-", dir=args.work))
    try:
        for line in here(work / "store", size, args.rounds):
            print(line, flush=True)
    finally:
        shutil.rmtree(work)
    if args.s3:
        for line in far(size, max(1, args.rounds // 2)):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
