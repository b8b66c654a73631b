"""How long a store of many checkpoints takes to list: ``python -m benchmarks.catalogue --json out.json``.

Each checkpoint has two nodes' manifests, a seal, a report and a few small files; of a hundred one is not consolidated yet, of five hundred one will never be
whole.  *Cold* is the whole process of ``ckptsync ls`` that has never seen the store, *warm* one that has, *head* a daemon's memory once it has read it all.
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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import places
from ckptsync.digest import digest
from ckptsync.model import Demands
from ckptsync.records.coding import Record, encode, record_name
from ckptsync.records.manifest import FileEntry, Manifest
from ckptsync.records.report import Report
from ckptsync.records.seal import Seal, SealedFile, SealedTensor
from ckptsync.stores.contract import Store
from ckptsync.stores.opening import create_store

NODES = ("node-a-0123456789ab", "node-b-0123456789ab")
MODEL = ("model-00001-of-00001.safetensors", "model.safetensors.index.json", "config.json", "tokenizer.json")
SECOND = 1_000_000_000
SIZE = 100  # bytes of a file
HEAD = """
import sys, resource, pathlib
from ckptsync.daemon import heading, service, tick
from ckptsync.catalogue.reading import Cache, read
from ckptsync.stores.opening import open_store
cache, store = Cache(), open_store(sys.argv[1])
for _ in range(3):
    found = read(store, cache)
now = next(line for line in pathlib.Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
print(len(found.summaries), now.split()[1], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@dataclass(frozen=True)
class Listed:
    """Of one store: seconds (wall and CPU) of ``ckptsync ls``, cold once, the median of warm ones; ``server``: CPU seconds of the server for a warm one.

    ``rss`` and ``peak`` of a head in MB; ``load``: processes that wanted one of the machine's ``cores`` meanwhile, on average.
    """

    store: str
    runs: int
    checkpoints: int
    cold: float
    cold_cpu: float
    warm: float
    warm_cpu: float
    server: float
    rss: float
    peak: float
    load: float
    cores: int


def main() -> None:
    """Measure, and print JSON."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--checkpoints", type=int, default=10_000)
    asked.add_argument("--runs", type=int, nargs="+", default=[5, 1])
    asked.add_argument("--rounds", type=int, default=5)
    asked.add_argument("--stores", nargs="+", default=["path", "s3"])
    asked.add_argument("--work", default=tempfile.gettempdir())
    asked.add_argument("--json", type=Path)
    given = asked.parse_args()
    found = []
    for kind in given.stores:
        for runs in given.runs:
            with tempfile.TemporaryDirectory(dir=given.work) as folder, _store(kind, Path(folder)) as (url, environment, pid):
                os.environ.update(environment)
                fill(create_store(url), runs, given.checkpoints)
                found.append(listed(kind, url, runs, given, Path(folder), pid))
                print(json.dumps(asdict(found[-1])), file=sys.stderr)
    text = json.dumps([asdict(one) for one in found], indent=1)
    given.json.write_text(text) if given.json else print(text)


@contextmanager
def _store(kind: str, folder: Path) -> Iterator[tuple[str, dict[str, str], int]]:
    if kind == "path":
        yield str(folder / "store"), {}, 0
        return
    with places.s3(folder) as new:
        place = new()
        yield place.below("store"), dict(place.environment), place.pid


def fill(store: Store, runs: int, checkpoints: int) -> None:
    """That many checkpoints in all, in so many runs."""
    steps = [(f"run-{n % runs}", n // runs + 1, n) for n in range(checkpoints)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda at: _checkpoint(store, *at), steps))


def _checkpoint(store: Store, run: str, step: int, n: int) -> None:
    place = f"checkpoint-{step * 100}"
    nodes = NODES[:1] if n % 500 == 499 else NODES
    manifests = [_manifest(run, place, node, rank, step) for rank, node in enumerate(NODES)][: len(nodes)]
    for rank in range(len(nodes)):
        store.write(f"{run}/{place}/{_shard(rank)}", [b"x" * SIZE])
    names = [_put(store, manifest) for manifest in manifests]
    if n % 100 != 99:
        seal = _put(store, _seal(run, place, names))
        for path in MODEL[:1]:
            store.write(f"{run}/consolidated/{place}/{path}", [b"x" * SIZE])
        _put(store, Report(run, place, place, 1, "digest", "ok", tuple(names), seal, 6 * SIZE, (), float(step)))


def _shard(rank: int) -> str:
    return f"pytorch_model_fsdp_0/__{rank}_0.distcp"


def _manifest(run: str, place: str, node: str, rank: int, step: int) -> Manifest:
    at = 1_700_000_000 * SECOND + step * 600 * SECOND
    demands = Demands({_shard(r): SIZE for r in range(2)}, {}, 2)
    return Manifest(
        run,
        place,
        place,
        node,
        0,
        (_entry(run, place, _shard(rank), at),),
        (rank,),
        at,
        at,
        demands,
        ("dcp:pytorch_model_fsdp_0",),
        f"{step:032x}",
    )


def _entry(run: str, place: str, path: str, at: int) -> FileEntry:
    found = digest(f"{run}/{place}/{path}".encode())
    return FileEntry(path, SIZE, found, 8 << 20, (found[:32],), at)


def _seal(run: str, place: str, manifests: list[str]) -> Seal:
    whole = digest(f"{run}/{place}".encode())
    files = tuple(SealedFile(path, SIZE, whole) for path in MODEL[:1])
    tensors = tuple(SealedTensor(f"model.layers.{n}.weight", "BF16", (5, 1), MODEL[0], 10 * n, 10, whole) for n in range(10))
    return Seal(run, place, place, 0, tuple(manifests), {"dtype": "auto"}, files, tensors)


def _put(store: Store, record: Record) -> str:
    data = encode(record)
    name = record_name(record, data)
    store.write(name, [data])
    return name


def listed(kind: str, url: str, runs: int, given: argparse.Namespace, folder: Path, pid: int) -> Listed:
    """Measure a store that was filled; ``pid``: its server's, 0 where there is none."""
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    cold = _ls(url)
    before = _cpu_of(pid)
    warm = [_ls(url) for _ in range(given.rounds)]
    server = round((_cpu_of(pid) - before) / given.rounds, 2)
    shutil.rmtree(folder / "cache", ignore_errors=True)
    told = subprocess.run([sys.executable, "-c", HEAD, url], stdout=-1, check=True, text=True).stdout.split()
    assert int(told[0]) == given.checkpoints, told
    middle = [round(statistics.median(times), 2) for times in zip(*warm, strict=True)]
    memory = (int(told[1]) >> 10, int(told[2]) >> 10)
    return Listed(kind, runs, given.checkpoints, *cold, *middle, server, *memory, round(os.getloadavg()[1], 1), os.cpu_count() or 0)


def _cpu_of(pid: int) -> float:
    """Seconds that a process has used (proc(5))."""
    if not pid:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _ls(url: str) -> tuple[float, float]:
    """Wall and CPU seconds of the process."""
    before, began = os.times(), time.monotonic()
    subprocess.run([sys.executable, "-m", "ckptsync", "ls", url], stdout=subprocess.DEVNULL, check=True)
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return round(time.monotonic() - began, 2), round(cpu, 2)


if __name__ == "__main__":
    main()
