"""A worker in hostile surroundings: nothing is missed, nothing is torn, and ``ckptsync status``
says what is wrong.

    python -m tests.campaigns.hostile                     # all, a few minutes
    python -m tests.campaigns.hostile --only watches clock

No hook here: a trainer's save is replayed file after file, lives `LIVES` seconds, and is rotated
away.

flood     100,000 files appear in a directory that is watched: more events than the kernel keeps
crowd     a checkpoint has 100,000 files
watches   the kernel gives ten inotify watches to this user, for forty runs
elsewhere the spool lies on a tmpfs: no hard link leads there
full      the disk of the checkpoints is full to the last byte while a save lives; the worker can
          write nothing
store     the disk of the store is full for a while
clock     the wall clock is set back an hour, then forward two, for the worker and the times of new
          files (by a library that the worker preloads: the kernel's own clock is not moved)
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import struct
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tests.campaigns.campaign import CLEAN, arguments, end_by_signal, verdict, working
from tests.campaigns.nodes import built, has_user_namespaces
from tests.campaigns.replayed import LIVES, Replay

FILES, RUNS = 100_000, 40
_WATCHES = 'echo 10 > /proc/sys/user/max_inotify_watches; exec "$@"'


def main(argv: Sequence[str] | None = None) -> int:
    """0 if every promise was kept, 1 if not."""
    parser = arguments(__doc__, "home")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--files", type=int, default=FILES)
    args = parser.parse_args(argv)
    count = 0
    for name in args.only:
        with working("hostile", args.home) as root:
            home = root / name
            home.mkdir(parents=True)
            why = missing(name)
            if why:
                print(f"{name}: left out, {why}")
                continue
            begun = time.monotonic()
            wrong = CASES[name](home, args)
        print(f"{name}: {len(wrong)} wrong, {time.monotonic() - begun:.0f} s", flush=True)
        count += verdict(f"{name}: {line}" for line in wrong)
    return 1 if count else 0


def flood(home: Path, args: argparse.Namespace) -> list[str]:
    """In the run's directory itself, while checkpoints come and go."""
    with started(home) as replay:
        replay.save("run", 1)
        for n in range(args.files):
            (replay.out("run") / f"{n}.json").write_bytes(b"{}")
            if n % (args.files // 4) == args.files // 8:
                replay.pass_by("run", 2 + n // (args.files // 4), lives=LIVES)
        return replay.judged(400)


def crowd(home: Path, args: argparse.Namespace) -> list[str]:
    """Small ones pass by while the crowded one is written, looked at and sent."""
    with started(home) as replay:
        replay.save("run", 1)
        crowded = replay.out("run") / "checkpoint-1" / "dataloader"
        crowded.mkdir()
        for n in range(args.files):
            (crowded / f"{n}.json").write_bytes(b"{}")
        replay.keep("run", 1)
        for step in range(2, 6):
            replay.pass_by("run", step, lives=LIVES)
        return replay.judged(400 + args.files / 100)


def watches(home: Path, _args: argparse.Namespace) -> list[str]:
    """The limit is that of a user namespace, not the machine's."""
    few = ["unshare", "--user", "--map-root-user", "sh", "-c", _WATCHES, "sh"]
    with started(home, few) as replay:
        for run in range(RUNS):
            replay.save(f"run{run}", 1)
        for run in (0, 17, RUNS - 1):
            replay.pass_by(f"run{run}", 2, lives=LIVES)
        replay.save("late", 1)
        return replay.judged(400, says="inotify")


def elsewhere(home: Path, _args: argparse.Namespace) -> list[str]:
    """Only the worker sees the tmpfs."""
    spool = home / "out" / "run" / "_ckptsync"
    spool.mkdir(parents=True)
    mounted = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs none {spool} && exec "$@"', "sh"]
    with started(home, mounted) as replay:
        for step in range(1, 6):
            replay.pass_by("run", step, lives=LIVES)
        replay.save("run", 6)
        return replay.judged(400)


def full(home: Path, _args: argparse.Namespace) -> list[str]:
    """A small disk; the trainer has its room back after each save, the worker never any."""
    with small_disk(home / "out"), started(home, settings={"quiet": "1s"}) as replay:
        replay.pass_by("run", 1, lives=LIVES)
        ballast = home / "out" / "ballast"
        for step in range(2, 6):
            ballast.unlink(missing_ok=True)
            replay.save("run", step)
            fill(ballast)
            time.sleep(LIVES)
            ballast.unlink()
            replay.rotate("run", step)
        replay.save("run", 6)
        fill(ballast)
        return replay.judged(400)


def store(home: Path, _args: argparse.Namespace) -> list[str]:
    """Everything is sent once there is room again.

    The log says it: a heartbeat could not be written.
    """
    with small_disk(home / "store"), started(home) as replay:
        fill(home / "store" / "ballast")
        for step in range(1, 5):
            replay.pass_by("run", step, lives=LIVES)
        replay.save("run", 5)
        (home / "store" / "ballast").unlink()
        return [*replay.judged(400), *replay.logged("no space left")]


def clock(home: Path, _args: argparse.Namespace) -> list[str]:
    """The worker's own clock, and with it the times of the files that appear."""
    library, offset = home / "shifted_clock.so", home / "offset"
    built(library, Path(__file__).with_name("shifted_clock.c").read_text())
    offset.write_bytes(struct.pack("=q", 0))
    shifted = ["env", f"LD_PRELOAD={library}", f"SHIFTED_CLOCK={offset}"]
    with started(home, shifted) as replay:
        replay.pass_by("run", 1, lives=LIVES)
        for step, hours in ((2, -1), (5, 1)):
            with offset.open("r+b") as there:
                there.write(struct.pack("=q", hours * 3600))
            replay.shift = hours * 3600.0
            for later in range(step, step + 3):
                replay.pass_by("run", later, lives=LIVES)
        replay.save("run", 8)
        return replay.judged(400, says="clock")


CASES: Mapping[str, Callable[[Path, argparse.Namespace], list[str]]] = {
    case.__name__: case for case in (flood, crowd, watches, elsewhere, full, store, clock)
}


def missing(name: str) -> str:
    """Why a case cannot be tried here; empty if it can."""
    if name in ("elsewhere", "full", "store") and os.geteuid():
        return "only root may mount"
    if name == "watches" and not has_user_namespaces():
        return "no user namespaces here"
    if name == "clock" and not shutil.which("cc"):
        return "there is no C compiler"
    return ""


@contextlib.contextmanager
def started(
    home: Path, before: Sequence[str] = (), settings: Mapping[str, object] | None = None
) -> Iterator[Replay]:
    """A worker at work, and its trainer's replay."""
    replay = Replay(home, settings or {})
    replay.service.start(before)
    try:
        replay.wait_for_log('"phase": "started"')
        yield replay
    finally:
        replay.service.kill()


@contextlib.contextmanager
def small_disk(where: Path, size: str = "64M") -> Iterator[None]:
    """An ext4 of its own."""
    where.mkdir()
    image = where.with_name(f"{where.name}.ext4")
    subprocess.run(["truncate", "-s", size, str(image)], check=True)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True, env=CLEAN)
    subprocess.run(["mount", "-o", "loop", str(image), str(where)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(where)], check=True)


def fill(ballast: Path) -> None:
    """To the last byte."""
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as out:
        while True:
            out.write(bytes(1 << 20))
    with contextlib.suppress(OSError), ballast.open("ab", buffering=0) as out:
        while True:
            out.write(bytes(1))


if __name__ == "__main__":
    end_by_signal(main)
