"""What lies between a small save's settling and its first byte in S3: ``python -m
benchmarks.first_byte [--large 1GiB]``.

A proxy before the server sees each request when it begins.  The worker runs as its command does,
without a limit of bandwidth, and sends a checkpoint of ``--large`` bytes meanwhile (0: none); small
saves are settled by a hook's word, one after the other.  Said of each: seconds from that word to
the first request that carries a file of it, and the requests about its run in between, with their
times.  The proxy takes CPU, too: waits beside a large save are an upper bound.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from benchmarks.idle import HERE, LONGEST, _hooked, _until, _write
from benchmarks.places import Place, s3
from ckptsync.quantities import parse_size
from tests.support.fault_proxy import HttpProxy
from tests.support.network_faults import Request

BETWEEN = 3.0  # seconds in which the worker ends what the last save leaves to be done
Asked = tuple[float, str, str]
"""When, S3's name of the operation, the target."""


def main() -> None:
    """Measure, and print a line for each save."""
    asked = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    asked.add_argument("--large", type=parse_size, default=0)
    asked.add_argument("--rounds", type=int, default=5)
    asked.add_argument("--work", default=tempfile.gettempdir())
    given = asked.parse_args()
    with tempfile.TemporaryDirectory(dir=given.work) as folder, s3(Path(folder)) as fresh:
        waits = [told(*one) for one in rounds(Path(folder), fresh(), given.large, given.rounds)]
    print(f"median {statistics.median(waits):.2f} s, longest {max(waits):.2f} s")


def rounds(
    folder: Path, place: Place, large: int, count: int
) -> Iterator[tuple[int, float, list[Asked]]]:
    """Of each small save: its step, when it was settled, and all that was asked by the time it was
    stored.
    """
    said: list[Asked] = []

    def hear(request: Request) -> None:
        said.append((time.time(), request.kind, unquote(request.target)))

    split = urlsplit(place.environment["AWS_ENDPOINT_URL"])
    out = folder / "out" / "run"
    out.mkdir(parents=True)
    with (
        contextlib.closing(HttpProxy((str(split.hostname), int(split.port or 80)), hear)) as proxy,
        _worker(folder, place, proxy.port),
    ):
        _save(out, 1, said)
        if large:
            checkpoint = folder / "out" / "other" / "checkpoint-1"
            checkpoint.parent.mkdir()
            _write(checkpoint, 1)
            (checkpoint / "large.bin").touch()
            os.truncate(checkpoint / "large.bin", large)
            os.utime(checkpoint / "trainer_state.json")  # a trainer's last word
            _until(lambda: any(kind == "UploadPart" for _, kind, _ in said), LONGEST)
        for step in range(2, 2 + count):
            time.sleep(BETWEEN)
            del said[:]
            yield step, _save(out, step, said), list(said)


def told(step: int, settled: float, said: list[Asked]) -> float:
    """Print it; the seconds."""
    mine = [
        one
        for one in said
        if one[0] >= settled and ("/run/" in one[2] or "prefix=run" in one[2].replace("%2F", "/"))
    ]
    first = next(
        at
        for at, kind, target in mine
        if kind == "PutObject" and f"/run/checkpoint-{step}/" in target
    )
    before = ", ".join(f"{kind} {at - settled:.2f}" for at, kind, _ in mine if at < first)
    print(f"{first - settled:.2f} s: {before}", flush=True)
    return first - settled


def _save(out: Path, step: int, said: list[Asked]) -> float:
    settled = _hooked(out / f"checkpoint-{step}", step)
    _until(lambda: any(f"checkpoint-{step}/manifest-" in target for _, _, target in said), LONGEST)
    return settled


@contextlib.contextmanager
def _worker(folder: Path, place: Place, port: int) -> Iterator[None]:
    config = {
        "node": "n0",
        "store": {"url": place.url, "options": {"endpoint_url": f"http://127.0.0.1:{port}"}},
        "worker": {"runs": [f"{folder}/out/*"], "quiet": "1s"},
    }
    (folder / "c.yaml").write_text(json.dumps(config))
    command = [sys.executable, "-m", "ckptsync", "run", "-c", str(folder / "c.yaml")]
    environment = {**os.environ, **place.environment}
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(command, stderr=log, cwd=HERE, env=environment) as child,
    ):
        try:
            yield
        finally:
            child.terminate()


if __name__ == "__main__":
    main()
