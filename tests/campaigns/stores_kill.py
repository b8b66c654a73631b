"""Kill a process that writes to a store, at every system call with which it changes something and
at random moments, and look what is there.

    python -m tests.campaigns.stores_kill --stores posix s3 sftp --moments 200 --seed 1

After each kill, and with a new object: no file is seen that is not whole; every file that was
acknowledged is there.  Then the same is written again, to its end: bytes that the server had been
given already are sent again for parts in flight at most; and nothing else is there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from tests.campaigns.campaign import CLEAN, arguments, kill_session, started, verdict, working
from tests.campaigns.stores_child import File
from tests.campaigns.stores_locations import Location, location
from tests.campaigns.stores_work import Pushing, Work, Writing
from tests.campaigns.trapping import can_trap, traps

KINDS = ("posix", "s3", "sftp")
OLD = File("run/a", "write", 1, 70_000)
SMALL = (
    File("run/a", "write", 2, 300_000),
    File("run/deep/b", "create", 3, 5_000),
    File("run/deep/c", "write", 4, 0),
)
PARTS = 4  # and a third of a large file
THREADS = 2
PATIENCE = 300.0


class Campaign:
    """Kills of one kind of work in one place, and what was seen."""

    def __init__(self, there: Location, work: Work) -> None:
        self._there, self._work = there, work
        self.tally: Counter[str] = Counter()
        self.again = 0
        self.wrong: list[str] = []

    def trap(self, most: int) -> None:
        """Kill at each changing system call, or at ``most`` that are spread over all of them."""
        with (
            tempfile.NamedTemporaryFile() as log,
            _process(self._work.prepare(self._there), self._environment()) as process,
        ):
            process.communicate(timeout=PATIENCE)  # once without strace, so that all is compiled
            found = traps(
                self._work.prepare(self._there),
                self._work.mark,
                Path(log.name),
                self._environment(),
            )
        self.tally["system calls"] = len(found)
        every = -(-len(found) // most)
        for trap in found[every // 2 :: every]:
            self._try(str(trap), trap.before(), lambda process: process.wait(PATIENCE))

    def moments(self, count: int, dice: random.Random) -> None:
        """Kill once so many bytes have gone, drawn ``count`` times, or a little later."""
        for _ in range(count):
            after, pause = dice.randrange(self._work.size), dice.choice((0.0, dice.random() * 0.05))
            self._try(f"{after} bytes, {pause:.3f} s", [], partial(self._kill_after, after, pause))

    def _kill_after(self, count: int, pause: float, process: subprocess.Popen[str]) -> None:
        self._there.passed(self._there.kept() + count, PATIENCE)
        time.sleep(pause)
        kill_session(process)

    def _try(
        self, how: str, before: Sequence[str], end: Callable[[subprocess.Popen[str]], object]
    ) -> None:
        command = self._work.prepare(self._there)
        had = self._there.kept()
        with _process([*before, *command], self._environment()) as process:
            end(process)
            out, err = process.communicate(timeout=PATIENCE)
        lines = out.splitlines()
        is_killed = process.returncode == -signal.SIGKILL
        self.tally["kills" if is_killed else "survived"] += 1
        self.tally["at its end"] += is_killed and self._work.is_over(lines)
        if not is_killed and not self._work.is_over(lines):
            self._note(how, [f"ended by itself with {process.returncode}: {err[-500:]}"])
        self._note(how, self._seen(had, self._work.acknowledged(lines)))

    def _note(self, how: str, wrong: Sequence[str]) -> None:
        self.wrong += [
            f"{self._there.kind}, {self._work.kind}, killed at {how}: {line}" for line in wrong
        ]

    def _seen(self, had: int, acknowledged: set[str]) -> list[str]:
        """All that is wrong after a kill, and after the work was done again."""
        given = self._there.kept() - had
        wrong = self._work.violations(self._there, acknowledged)
        before = self._there.sent()
        names = self._work.finish(self._there)
        again = given + self._there.sent() - before - self._work.size
        self.again = max(self.again, again)
        if again > self._allowed():
            wrong.append(f"{again} bytes were sent again, {self._allowed()} are allowed")
        left = {name: size for name, size in self._there.everything().items() if name not in names}
        self.tally["with a small file that is left"] += bool(left)
        orphaned = [
            f"left behind: {name}, {size} bytes"
            for name, size in left.items()
            if size > self._there.orphaned
        ]
        return [*wrong, *self._work.violations(self._there, names), *orphaned]

    def _environment(self) -> Mapping[str, str]:
        """What the command line is told of the location."""
        options = (
            json.dumps({self._there.kind: dict(self._there.options)})
            if self._there.options
            else "{}"
        )
        limits = {"CKPTSYNC_LIMITS_THREADS": str(THREADS), "CKPTSYNC_LIMITS_PATIENCE": "2m"}
        return {**CLEAN, "CKPTSYNC_STORAGE_OPTIONS": options, **limits}

    def _allowed(self) -> int:
        each, connection = self._there.extra
        return self._there.part * THREADS + int(each * self._work.size) + 8 * connection


def _process(
    command: Sequence[str], env: Mapping[str, str]
) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    null, pipe = subprocess.DEVNULL, subprocess.PIPE
    return started(command, stdin=null, stdout=pipe, stderr=pipe, text=True, env=env)


def large(part: int, seed: int) -> list[File]:
    """A file of several parts, the last of them a short one; and the small one that tells of it."""
    return [
        File("run/big", "create", seed, PARTS * part + part // 3),
        File(OLD.name, "write", seed + 1, 1000),
    ]


def campaigns(
    there: Location, home: Path, *, calls: int, moments: int, seed: int
) -> Iterator[Campaign]:
    """Each of them after it has run.  ``calls``: of each kind of work; 0 is none."""
    small, big = Writing(home, SMALL, OLD), Writing(home, large(there.part, seed), OLD)
    pushing = Pushing(home / "big", PARTS * there.part, seed)
    for work in (
        (small, Pushing(home / "small", there.part + there.part // 4, seed))
        if calls and can_trap()
        else ()
    ):
        found = Campaign(there, work)
        found.trap(calls)
        yield found
    for work in (big, pushing) if moments else ():
        found = Campaign(there, work)
        found.moments(moments, random.Random(seed))
        yield found


def main(argv: Sequence[str] | None = None) -> int:
    """0 if every promise was kept, 1 if not."""
    args = _arguments().parse_args(argv)
    wrong: list[str] = []
    for kind in args.stores:
        with (
            working("kill") as home,
            location(kind, home) as there,
        ):
            begun = time.monotonic()
            for one in campaigns(
                there, home, calls=args.calls, moments=args.moments, seed=args.seed
            ):
                took, begun = time.monotonic() - begun, time.monotonic()
                counted = ", ".join(f"{count} {what}" for what, count in one.tally.items())
                print(
                    f"{kind}: {counted}; at most {one.again} bytes sent again; {took:.0f} s",
                    flush=True,
                )
                wrong += one.wrong
    return verdict(wrong)


def _arguments() -> argparse.ArgumentParser:
    parser = arguments(__doc__, "seed")
    parser.add_argument("--stores", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument(
        "--calls",
        type=int,
        default=100_000,
        help="at most so many system calls of each kind of work; 0: none",
    )
    parser.add_argument(
        "--moments",
        type=int,
        default=200,
        help="at which large writes are killed, and as many pushes",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
