"""A merge from a bucket into another one, beside s5cmd bringing the same bytes here and sending
them back.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.contest import Contest
from benchmarks.measure import Run
from benchmarks.movers import Mover, found
from benchmarks.places import Digests, Place, digests
from benchmarks.running import measured

OURS = Mover("ckptsync merge", None, None)
THEIRS = Mover("s5cmd, here and back", None, None, "s5cmd")
Fresh = Callable[[], Place]


class Merge:
    """Shards of a distributed checkpoint, four ranks, float32, in one bucket.

    A new bucket each time for what is made of them.
    """

    def __init__(self, gib: float, generator: Path, fresh: Fresh, work: Path) -> None:
        self._fresh, self._work = fresh, work
        shards, merged = work / "shards" / "checkpoint-1", work / "merged"
        generate = [
            str(generator),
            "-m",
            "benchmarks.generate",
            "dcp-rows",
            str(shards),
            "--gib",
            str(gib),
            "--tensors",
            "0",
        ]
        subprocess.run(generate, check=True, stdout=subprocess.DEVNULL)
        subprocess.run(
            [sys.executable, "-m", "ckptsync", "merge", *_kept(str(shards), str(merged))],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        self._shards, self._merged = digests(shards), digests(merged)
        self.size = sum(path.stat().st_size for path in merged.rglob("*") if path.is_file())
        self._source = fresh()
        measured(
            [found("s5cmd") or "", "cp", f"{shards}/", f"{self._source.below('checkpoint-1')}/"],
            self._source,
            work / "log",
        )
        for used in (shards.parent, merged):
            shutil.rmtree(used)

    def contest(self, gib: float) -> Contest:
        """Of both."""
        return Contest(f"S3 to S3, a merge of {gib:g} GiB", "warm", self.size, OURS.name)

    def measured(self, mover: Mover, _wanted: Digests) -> tuple[Run, str]:
        """One of both, into a bucket of its own."""
        place, scratch = self._fresh(), self._work / "brought"
        source, target = self._source.below("checkpoint-1"), place.below("model")
        program = found("s5cmd")
        ours = [sys.executable, "-m", "ckptsync", "merge", *_kept(source, target)]
        theirs = [
            "sh",
            "-c",
            f"{program} cp '{source}/*' {scratch}/ && {program} cp {scratch}/ {target}/",
        ]
        try:
            run = measured(ours if mover is OURS else theirs, place, self._work / "log")
            wanted = self._merged if mover is OURS else self._shards
            arrived = {
                name.removeprefix("model/"): digest for name, digest in place.digests().items()
            }
            return (
                run,
                "same bytes"
                if arrived == wanted
                else f"OTHER BYTES in {len(wanted.items() ^ arrived.items())}",
            )
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            place.clear()

    def close(self) -> None:
        """Remove the shards."""
        self._source.clear()


def _kept(source: str, target: str) -> list[str]:
    return [source, target, "--dtype", "keep"]
