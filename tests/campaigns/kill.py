"""Kill a command again and again, run it again, and see that nothing is lost, torn or left.

    python -m tests.campaigns.kill --only push --stores posix s3 sftp --calls 50 --moments 50

A command is killed (SIGKILL) before each system call that changes something outside of the process
(strace injects the signal), or before ``--calls`` of them, and at random moments.  After each death
its victim (`tests.campaigns.victims`) says what must not be true of what is left; then it finishes
the work, and says what is not as if nobody had died.
"""

from __future__ import annotations

import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from tests.campaigns.campaign import arguments, end_by_signal, verdict, working
from tests.campaigns.victims import PATIENCE, VICTIMS, Victim, run

EVERY = 1 << 30
STORES = ("posix", "s3", "sftp")
_WORDS = """
write pwrite64 writev pwritev pwritev2 sendto sendmsg sendmmsg copy_file_range sendfile fsync
fdatasync sync_file_range ftruncate fallocate ioctl flock fchmod utimensat link linkat rename
renameat renameat2 unlink unlinkat rmdir mkdir mkdirat openat connect shutdown
"""
CHANGING = frozenset(_WORDS.split())
_STRACE = ("strace", "-f", "-b", "execve", "-qq")
_NAMING = ("access", "faccessat", "faccessat2")  # calls that only name a mark
_CALL = re.compile(r"(\d+)\s+(\w+)\((.*)")
Trap = tuple[str, int]
"""The n-th call of this name by any thread is the one that the process dies before."""


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if every promise was kept, 1 if not."""
    parser = arguments(__doc__, "seed", "home")
    parser.add_argument("--only", nargs="+", choices=VICTIMS, default=[*VICTIMS])
    parser.add_argument("--stores", nargs="+", choices=STORES, default=STORES)
    most = "at most so many system calls of each command (default: all); 0: none"
    parser.add_argument("--calls", type=int, default=EVERY, help=most)
    moments = "deaths of each command at random moments"
    parser.add_argument("--moments", type=int, default=20, help=moments)
    options = parser.parse_args(argv)
    calls = options.calls if can_trap() else 0
    wrong: list[str] = []
    with working("kill", options.home) as home:
        dice = random.Random(options.seed)
        for name in options.only:
            make, kinds = VICTIMS[name]
            for kind in (kind for kind in kinds if kind in options.stores):
                begun, deaths = time.monotonic(), Counter[str]()
                victim = make(kind, home / f"{name}-{kind}", dice)
                wrong += killed(victim, dice, calls, options.moments, deaths)
                tally = ", ".join(f"{count} {what}" for what, count in deaths.items())
                print(f"{victim.name}: {tally}, {time.monotonic() - begun:.0f} s", flush=True)
    return verdict(wrong)


def killed(
    victim: Victim, dice: random.Random, calls: int, moments: int, tally: Counter[str]
) -> Iterator[str]:
    """Kill a victim at so many calls and moments, count its deaths, and yield what is wrong."""
    _live(victim)  # once, so that all is compiled
    begun = time.monotonic()
    _live(victim)
    life = time.monotonic() - begun
    deaths: list[tuple[str, Sequence[str], float]] = []
    if calls:
        with tempfile.NamedTemporaryFile() as log:
            ended = _live(victim, _traced(Path(log.name)))
            lines = Path(log.name).read_text(errors="replace").splitlines()
        assert ended.returncode == 0, f"{victim.name}: {ended}"
        every = traps(lines, victim.mark)
        tally["system calls"] = len(every)
        deaths += [(f"{trap}", _trapped(*trap), PATIENCE) for trap in _drawn(every, calls, dice)]
    pauses = (dice.uniform(0.3, 1.1) * life for _ in range(moments))
    deaths += [(f"{pause:.3f} s of {life:.3f}", (), pause) for pause in pauses]
    for moment, before, pause in deaths:
        ended = _live(victim, before, pause)
        code = ended.returncode
        tally["deaths" if code == -signal.SIGKILL else "survivals"] += 1
        wrong = [f"ended by itself with {code}: {ended.stderr[-500:]}"]
        wrong = wrong if code not in (0, -signal.SIGKILL) else []
        wrong += [*victim.harm(), *victim.finish()]
        yield from (f"{victim.name}, killed at {moment}: {line}" for line in wrong)


def _live(
    victim: Victim, before: Sequence[str] = (), pause: float = PATIENCE
) -> subprocess.CompletedProcess[str]:
    victim.prepare()
    return run([*before, *victim.command()], victim.environment, pause)


def can_trap() -> bool:
    """Return whether strace is installed, and may trace."""
    if not shutil.which("strace"):
        return False
    trial = ["strace", "-f", "-o", "/dev/null", "true"]
    return subprocess.run(trial, capture_output=True, check=False).returncode == 0


def _trapped(call: str, nth: int) -> list[str]:
    """Return the words to put before a command that dies in a trap."""
    injected = f"inject={call}:signal=SIGKILL:when={nth}"
    return [*_STRACE, "-o", "/dev/null", "-e", f"trace={call}", "-e", injected]


def _traced(log: Path) -> list[str]:
    """Return the words to put before a command, so that strace writes its changing calls."""
    calls = ",".join(sorted({*CHANGING, *_NAMING}))
    return [*_STRACE, "-s", "4096", "-o", str(log), "-e", f"trace={calls}"]


def traps(lines: Sequence[str], mark: str) -> list[Trap]:
    """Return the traps that a trace (of strace -f) holds from the mark on, each once."""
    counts: Counter[tuple[str, str]] = Counter()
    result: dict[Trap, None] = {}
    is_begun = False
    for line in lines:
        match = _CALL.match(line)
        if not match:
            continue  # the end of a call that another thread's has interrupted
        thread, call, arguments = match.groups()
        is_begun = is_begun or mark in arguments
        counts[thread, call] += 1
        is_reading = call == "openat" and "O_CREAT" not in arguments
        if is_begun and call in CHANGING and not is_reading:
            result[call, counts[thread, call]] = None
    assert result, "nothing was changed after the mark"
    return list(result)


def _drawn(every: Sequence[Trap], most: int, dice: random.Random) -> list[Trap]:
    """Return all traps, or one of each of ``most`` parts of the run that are equally long."""
    if most >= len(every):
        return list(every)
    bounds = [len(every) * n // most for n in range(most + 1)]
    return [dice.choice(every[a:b]) for a, b in pairwise(bounds)]


if __name__ == "__main__":
    end_by_signal(main)
