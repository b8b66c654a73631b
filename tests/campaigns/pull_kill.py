"""Kill `ckptsync pull` at every system call with which it changes something, and see that nothing
half appears and the same command goes on.

    python -m tests.campaigns.pull_kill --stores posix s3 --calls 40 --seed 1

After each death the checkpoint is not there, or whole with its times, and what names the newest is
not there, or right.  After the second try it is there, and nothing else: no hidden directory, and
no part of a file.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ckptsync.stores.opening import create_store
from tests.campaigns.campaign import CKPTSYNC, CLEAN, arguments, flags, new_store, verdict, working
from tests.campaigns.trapping import can_trap, drawn, traced
from tests.support.files_in_memory import file_paths
from tests.support.vector import vector
from tests.support.worker_in_process import push_now

RUN, CHECKPOINT = "ds", "global_step2"
MARK = ".pull-"  # in the hidden directory's name: nothing is changed before there is one
LARGE = 700_000  # bytes of a file of which the next try finds blocks again
PATIENCE = 120.0
BASE = 1_700_000_000 * 10**9  # ns


class Campaign:
    """A checkpoint of DeepSpeed's in a store of a kind, pulled again and again."""

    def __init__(self, kind: str, home: Path, dice: random.Random) -> None:
        self._home, self._kind = home, kind
        self.url, self._options = new_store(kind, home)
        source = home / "out" / CHECKPOINT
        shutil.copytree(vector("raw-ds-zero3-tied").sources[0], source.parent)
        (source / "ballast.bin").write_bytes(dice.randbytes(LARGE))
        for n, path in enumerate(file_paths(source).values()):
            os.utime(path, ns=(BASE + n * 10**9,) * 2)
        self.truth = lying(source)
        push_now(source.parent, create_store(self.url, self._options), "node0", RUN)
        self.wrong: list[str] = []
        self.deaths = self.calls = 0

    def run(self, most: int, dice: random.Random) -> None:
        """``most``: of so many calls that are drawn; 0: of all."""
        log = self._home / "trace"
        assert self._pull(self._home / "first", traced(log)) == 0
        self.calls, traps = drawn(log, MARK, most, dice)
        for number, trap in enumerate(traps):
            destination = self._home / f"dst{number}"
            status = self._pull(destination, trap.before())
            self.deaths += status == -signal.SIGKILL
            wrong = [*self.harm(destination)]
            wrong += (
                [f"the second try ended with {again}"]
                if (again := self._pull(destination))
                else [*self.left(destination)]
            )
            wrong += [] if status in (0, -signal.SIGKILL) else [f"ended by itself with {status}"]
            self.wrong += [f"{self._kind}, killed at {trap}: {line}" for line in wrong]
            shutil.rmtree(destination)

    def harm(self, destination: Path) -> Iterator[str]:
        """What must not be true at any moment."""
        there, pointer = destination / CHECKPOINT, destination / "latest"
        if there.exists() and lying(there) != self.truth:
            yield f"{CHECKPOINT} is there, and is not what it was"
        if there.exists() and there.stat().st_mtime_ns != max(
            time for _, time in self.truth.values()
        ):
            yield f"{CHECKPOINT} is there without its time"
        if pointer.exists() and not (there.exists() and pointer.read_text() == CHECKPOINT):
            yield f"latest says {pointer.read_text()!r}"

    def left(self, destination: Path) -> Iterator[str]:
        """What is wrong once it is done."""
        yield from self.harm(destination)
        found = sorted(path.name for path in destination.iterdir())
        if found != [CHECKPOINT, "latest"]:
            yield f"there are {found}"

    def _pull(self, destination: Path, before: Sequence[str] = ()) -> int:
        pull = ["pull", f"{RUN}/{CHECKPOINT}", str(destination), *flags(store=self.url)]
        env = {
            **CLEAN,
            "CKPTSYNC_STORAGE_OPTIONS": json.dumps(self._options),
            "XDG_CACHE_HOME": str(self._home / "cache"),
        }
        with (self._home / "log").open("ab") as log:
            done = subprocess.run(
                [*before, *CKPTSYNC, *pull],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                timeout=PATIENCE,
                check=False,
            )
        return done.returncode


def lying(directory: Path) -> Mapping[str, tuple[bytes, int]]:
    """Every file below, hidden ones too, and its time."""
    return {
        name: (path.read_bytes(), path.stat().st_mtime_ns)
        for name, path in file_paths(directory).items()
    }


def main(argv: Sequence[str] | None = None) -> int:
    """0 if every promise was kept, 1 if not."""
    parser = arguments(__doc__, "calls", "seed")
    parser.add_argument("--stores", nargs="+", choices=("posix", "s3"), default=("posix", "s3"))
    args = parser.parse_args(argv)
    assert can_trap(), "strace is wanted, and the right to trace"
    dice, wrong = random.Random(args.seed), list[str]()
    for kind in args.stores:
        with working("pull") as home:
            begun, one = time.monotonic(), Campaign(kind, home, dice)
            one.run(args.calls, dice)
            print(
                f"{kind}: {one.deaths} deaths at {one.calls} calls in"
                f" {time.monotonic() - begun:.0f} s",
                flush=True,
            )
            wrong += one.wrong
    return verdict(wrong)


if __name__ == "__main__":
    sys.exit(main())
