"""Kill a process that writes to a store, at every system call with which it changes something and at random moments, and look what is there.

    python -m tests.campaigns.stores_kill --stores posix s3 sftp --moments 200 --seed 1

After each kill, and with a new object: no file is seen that is not whole; every file that was acknowledged is there.  Then the same is written
again, to its end: bytes that the server had been given already are sent again for parts in flight at most; and no other file is there.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ckptsync.stores.contract import Store, read_all
from tests.campaigns.cluster import CLEAN
from tests.campaigns.stores_child import ACK, BEGIN, MARK, File, Job, done
from tests.campaigns.stores_places import Place, place
from tests.campaigns.trapping import Trap, can_trap, traps

KINDS = ("posix", "s3", "sftp")
SMALL = (File("run/a", "write", 2, 300_000), File("run/deep/b", "create", 3, 5_000), File("run/deep/c", "write", 4, 0))
OLD = File("run/a", "write", 1, 70_000)
"""What is there before, under a name that is written anew."""
PARTS = 6
PATIENCE = 60.0


@dataclass(slots=True)
class Tally:
    """Of one store.  ``again``: the most bytes that were sent twice after one kill."""

    kills: int = 0
    too_early: int = 0
    too_late: int = 0
    again: int = 0
    wrong: list[str] = field(default_factory=list)


class Campaign:
    """Kills in one place, and what was seen."""

    def __init__(self, there: Place, home: Path, files: Sequence[File]) -> None:
        self._there, self._home, self._files = there, home, files
        self._path = home / f"{there.kind}.job"
        self.tally = Tally()

    def trap(self, every: int, offset: int = 0) -> None:
        """Kill at one changing system call in ``every`` of them."""
        found = self._traps()
        print(f"{self._there.kind}: {len(found)} changing system calls, {len(found[offset::every])} of them tried", flush=True)
        for trap in found[offset::every]:
            self._try(str(trap), trap.before(), lambda process: process.wait(PATIENCE))

    def moments(self, count: int, dice: random.Random) -> None:
        """Kill once so many bytes have gone, drawn ``count`` times, or a little later."""
        total = sum(file.size for file in self._files)
        for _ in range(count):
            after, pause = dice.randrange(total), dice.choice((0.0, dice.random() * 0.05))
            self._try(f"{after} bytes, {pause:.3f} s", [], partial(self._kill_after, after, pause))

    def _traps(self) -> list[Trap]:
        self._command(self._prepared())
        command = self._command(self._prepared())
        return traps(command, MARK, self._home / "trace")

    def _try(self, how: str, before: Sequence[str], end: Callable[[subprocess.Popen[str]], object]) -> None:
        job = self._prepared()
        with _process([*before, *self._command(job)]) as process:
            end(process)
            out, err = process.communicate(timeout=PATIENCE)
        lines = out.splitlines()
        acknowledged = {line.split()[1] for line in lines if line.startswith(ACK)}
        if process.returncode != -signal.SIGKILL and len(acknowledged) < len(self._files):
            self.tally.wrong.append(f"{how}: ended by itself with {process.returncode}: {err[-500:]}")
            return
        self.tally.kills += 1
        self.tally.too_early += BEGIN not in lines
        self.tally.too_late += len(acknowledged) == len(self._files)
        for wrong in self._violations(job, acknowledged):
            self.tally.wrong.append(f"{self._there.kind}, killed at {how}: {wrong}")

    def _prepared(self) -> Job:
        self._there.fresh()
        OLD.put(Job(self._there.url, self._there.options, ()).store())
        return Job(self._there.url, self._there.options, self._files)

    def _command(self, job: Job) -> list[str]:
        job.save(self._path)
        return [sys.executable, "-m", "tests.campaigns.stores_child", str(self._path)]

    def _kill_after(self, count: int, pause: float, process: subprocess.Popen[str]) -> None:
        self._there.passed(OLD.size + count, PATIENCE)
        time.sleep(pause)
        os.killpg(process.pid, signal.SIGKILL)

    def _violations(self, job: Job, acknowledged: set[str]) -> list[str]:
        kept = self._there.kept()
        wrong = _unlike(job.store(), self._files, acknowledged)
        before = self._there.sent()
        finished = {file.name for file in done(job, job.store())}
        again = kept + self._there.sent() - before - OLD.size - sum(file.size for file in self._files)
        self.tally.again = max(self.tally.again, again)
        if again > self._allowed(job):
            wrong.append(f"{again} bytes were sent again, {self._allowed(job)} are allowed")
        left = self._there.everything() - finished
        return [*wrong, *_unlike(job.store(), self._files, finished), *(f"left behind: {name}" for name in left)]

    def _allowed(self, job: Job) -> int:
        each, connection = self._there.extra
        return self._there.part * job.threads + int(each * sum(file.size for file in self._files)) + 8 * connection


def _unlike(store: Store, files: Sequence[File], acknowledged: set[str]) -> list[str]:
    """What must not be seen: a file that is no whole one of these, and none where one was acknowledged."""
    names = {entry.name: entry.size for entry in store.names("")}
    wrong = [f"{name}: nobody wrote that" for name in names.keys() - {file.name for file in files}]
    for file in files:
        contents = [file.content()] if file.name in acknowledged else [file.content(), *([OLD.content()] * (file.name == OLD.name))]
        if file.name in names:
            found = read_all(store, file.name)
            wrong += [f"{file.name}: {len(found)} bytes that nobody wrote"] * (
                found not in contents or len(found) != names[file.name]
            )
        elif file.name in acknowledged or file.name == OLD.name:
            wrong.append(f"{file.name}: lost, although it was {'acknowledged' if file.name in acknowledged else 'there before'}")
    return wrong


@contextlib.contextmanager
def _process(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=CLEAN,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def large(part: int, seed: int) -> list[File]:
    """Files of several parts, the last of them a short one."""
    return [File("run/big", "create", seed, PARTS * part + part // 3), File(OLD.name, "write", seed + 1, 1000)]


def main(argv: Sequence[str] | None = None) -> int:
    """0 if every promise was kept, 1 if not."""
    args = _arguments().parse_args(argv)
    wrong: list[str] = []
    for kind in args.stores:
        with tempfile.TemporaryDirectory(prefix="ckptsync-kill-") as home, place(kind, Path(home)) as there:
            begun = time.monotonic()
            small = Campaign(there, Path(home), SMALL)
            if args.every and can_trap():
                small.trap(args.every)
            big = Campaign(there, Path(home), large(there.part, args.seed))
            big.moments(args.moments, random.Random(args.seed))
            for name, tally in (("system calls", small.tally), ("moments", big.tally)):
                print(f"{kind}, {name}: {tally}", flush=True)
                wrong += tally.wrong
            print(f"{kind}: {time.monotonic() - begun:.0f} s", flush=True)
    for line in wrong:
        print(f"VIOLATED {line}")
    return 1 if wrong else 0


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stores", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--every", type=int, default=1, help="kill at each system call (1), at every second one (2), at none (0)")
    parser.add_argument("--moments", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    return parser


if __name__ == "__main__":
    sys.exit(main())
