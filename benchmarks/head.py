"""How much memory a head takes, its daemon and its children together: ``python -m benchmarks.head
--json out.json``.

A store of ten thousand checkpoints, as `benchmarks.catalogue` fills it, and one of several GiB that
has just arrived: the head reads its catalogue, merges it and verifies it.  Memory is proportional
set size: what several processes share is counted once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.catalogue import fill
from benchmarks.measure import descendants
from ckptsync.catalogue.uncached import read_location
from ckptsync.stores.opening import create_store
from ckptsync.worker.push import find_offer, push

SIDE = 4096  # of each tensor, a square of bf16
LOCATION = ("real", "checkpoint-1")


@dataclass(frozen=True)
class HeadMemory:
    """The most memory, in MB, of the daemon, of one child, and of all together.

    ``seconds`` until the checkpoint was VERIFIED.
    """

    checkpoints: int
    gib: float
    store: str
    threads: int
    daemon: float
    child: float
    together: float
    seconds: float


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoints", type=int, default=10_000)
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--threads", type=int, nargs="+", default=[2])
    parser.add_argument(
        "--s3",
        action="store_true",
        help="on SeaweedFS, on this machine (the tests' packages are needed)",
    )
    parser.add_argument("--work", default=tempfile.gettempdir())
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = []
    for threads in args.threads:
        with tempfile.TemporaryDirectory(dir=args.work) as folder:
            results.append(_measure(Path(folder), args, threads))
            print(json.dumps(asdict(results[-1])), file=sys.stderr)
    text = json.dumps([asdict(result) for result in results], indent=1)
    args.json.write_text(text) if args.json else print(text)


def _location(home: Path, *, s3: bool) -> dict[str, Any]:
    """Return a store's URL and options."""
    if not s3:
        return {"url": str(home / "store")}
    from tests.support.seaweedfs import weed  # noqa: PLC0415 - a real server is started

    server = weed()
    return {"url": f"s3://{server.bucket()}/store", "options": server.options()}


def _measure(home: Path, args: argparse.Namespace, threads: int) -> HeadMemory:
    place = _location(home, s3=args.s3)
    store = create_store(place["url"], place.get("options"))
    fill(store, 5, args.checkpoints)
    _write_model(home / "out" / "checkpoint-1", args.gib)
    push(replace(find_offer(home / "out"), run="real"), store, "node")
    (home / "head.yaml").write_text(
        yaml.safe_dump(
            {
                "roles": ["head", "verifier"],
                "node": "head",
                "store": place,
                "head": {"every": "5s", "threads": threads},
                "verify": {"tick": "5s"},
            }
        )
    )
    begun = time.monotonic()
    with (home / "log").open("wb") as log:
        head = subprocess.Popen(
            [sys.executable, "-m", "ckptsync", "run", "-c", str(home / "head.yaml")], stderr=log
        )
    daemon = child = together = 0.0
    while (
        summary := read_location(store, *LOCATION).of(*LOCATION)
    ) is None or summary.status != "VERIFIED":
        if head.poll() is not None:
            raise SystemExit((home / "log").read_text())
        for _ in range(40):
            own, *children = [_pss(pid) for pid in descendants(head.pid)]
            daemon, child, together = (
                max(daemon, own),
                max(child, *children, 0.0),
                max(together, own + sum(children)),
            )
            time.sleep(0.05)
    head.terminate()
    head.wait()
    return HeadMemory(
        args.checkpoints,
        args.gib,
        "s3" if args.s3 else "path",
        threads,
        daemon,
        child,
        together,
        round(time.monotonic() - begun, 1),
    )


def _write_model(folder: Path, gib: float) -> None:
    """Write a model of one file, and the trainer's files of a checkpoint."""
    folder.mkdir(parents=True)
    size, header, end = SIDE * SIDE * 2, {}, 0
    for n in range(max(1, round(gib * 2**30 / size))):
        header[f"model.layers.{n}.mlp.up_proj.weight"] = {
            "dtype": "BF16",
            "shape": [SIDE, SIDE],
            "data_offsets": [end, end + size],
        }
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    block = os.urandom(1 << 20)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _ in range(end // len(block)):
            file.write(block)
    (folder / "config.json").write_text('{"architectures": ["X"], "torch_dtype": "bfloat16"}')
    (folder / "trainer_state.json").write_text('{"global_step": 1}')


def _pss(pid: int) -> float:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return round(int(line.split()[1]) / 1000, 1)
    return 0.0


if __name__ == "__main__":
    main()
