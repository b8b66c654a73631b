"""Kill what lets go of checkpoints (`ckptsync gc`, the head's retention) at every call that changes
something, and at any moment.

    python -m tests.campaigns.gc_kill --stores posix s3 --moments 200 --seed 1

At each death: what the rules keep is whole, and VERIFIED; so is whatever is not given up; another
run is untouched.  Then gc comes again, at once and after the dead one's lease, and all is as if
nobody had died.  At half of the moments another gc with other rules is at work beside the one that
dies.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from ckptsync.head.due_jobs import Job
from ckptsync.head.gc import apply_retention
from ckptsync.stores.contract import Store
from ckptsync.stores.opening import create_store
from tests.campaigns.campaign import (
    CKPTSYNC,
    CLEAN,
    arguments,
    kill_session,
    new_store,
    started,
    verdict,
    working,
)
from tests.campaigns.cluster import head_command
from tests.campaigns.gc_scenes import Scene, differences, finished, harm, scenes
from tests.campaigns.trapping import Trap, can_trap, drawn, traced
from tests.support.files_in_memory import write_files

OLD = 9 * 86400.0  # seconds: a draft is orphaned after a week
PATIENCE = 300.0
WHO = ("gc", "head")
MARK = "clocks"  # it begins by asking the store what time it is there: nothing is changed before
OTHER = {"keep_last": 1, "shards": "drop-after:1"}  # rules of who is at work beside
KEPT_BY_BOTH = frozenset({"checkpoint-4"})


class Ground:
    """Where scenes are played, each on a fresh store."""

    def __init__(self, kind: str, home: Path) -> None:
        self.kind, self._count = kind, 0
        self._top, self.options = new_store(kind, home)
        self.url = ""

    def lay(self, scene: Scene) -> Store:
        """A store with the scene's files, and nothing else; orphaned files are old."""
        self._count += 1
        if self.kind == "s3":  # which makes no file old
            self.url = f"{self._top}/{self._count}"
            store = create_store(self.url, self.options)
            for name, data in scene.files.items():
                store.write(name, [data])
            return store
        self.url = self._top
        shutil.rmtree(self.url, ignore_errors=True)
        store = create_store(self.url)
        root = write_files(Path(self.url), scene.files)
        for name in scene.strays:
            os.utime(root / name, (time.time() - OLD,) * 2)
        return store

    def empty(self) -> list[str]:
        """Directories with nothing in them; a bucket has none."""
        found = Path(self.url).rglob("*") if self.kind == "posix" else ()
        return [str(p.relative_to(self.url)) for p in found if p.is_dir() and not any(p.iterdir())]


class Campaign:
    """One scene on one ground, played by ``who``: the command, or the head's child process."""

    def __init__(self, ground: Ground, scene: Scene, who: str, home: Path) -> None:
        self._ground, self._scene, self._who, self._home = ground, scene, who, home
        self.wrong: list[str] = []
        self.tally: Counter[str] = Counter()
        self.left: Counter[str] = Counter()

    def __str__(self) -> str:
        left = f", left {dict(self.left)}" if self.left else ""
        return (
            f"{self._who}, {self._scene.name}:"
            f" {', '.join(f'{n} {what}' for what, n in self.tally.items())}{left}"
        )

    def calls(self, most: int, dice: random.Random) -> None:
        """Die at each call that changes something.

        ``most``: of so many that are drawn, 0: of all.
        """
        self._ground.lay(self._scene)
        log = self._home / "trace"
        with self._started(traced(log)) as process:
            assert process.wait(PATIENCE) == 0
        for trap in drawn(log, MARK, most, dice)[1]:
            self._die_at(trap)

    def _die_at(self, trap: Trap) -> None:
        store = self._ground.lay(self._scene)
        with self._started(trap.before()) as process:
            self._ended(process.wait(PATIENCE))
        self._judge(store, str(trap))

    def moments(self, count: int, dice: random.Random) -> None:
        """Die at moments that are drawn from its whole life.

        Every second time another is at work beside it.
        """
        self._ground.lay(self._scene)
        begun = time.monotonic()
        with self._started() as process:
            process.wait(PATIENCE)
        lasts = time.monotonic() - begun
        for n in range(count):
            store, pause = self._ground.lay(self._scene), dice.uniform(0.3, 1.1) * lasts
            with contextlib.ExitStack() as stack:
                other = (
                    stack.enter_context(self._started(said=OTHER))
                    if n % 2 and not self._scene.strays
                    else None
                )
                process = stack.enter_context(self._started())
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(pause)
                kill_session(process)
                self._ended(process.wait(PATIENCE))
                self._judge(store, f"{pause:.3f} s of {lasts:.3f}", other)

    def _ended(self, status: int) -> None:
        self.tally["deaths" if status == -signal.SIGKILL else "survivals"] += 1
        if status not in (0, -signal.SIGKILL):
            self.wrong.append(f"{self._who}, {self._scene.name}: ended by itself with {status}")

    def _judge(self, store: Store, how: str, other: subprocess.Popen[bytes] | None = None) -> None:
        """At once; when the one beside has ended, or another has come at once; and when all that is
        left to do was done.
        """
        scene = self._scene if other is None else replace(self._scene, kept=KEPT_BY_BOTH)
        wrong = [*harm(store, scene)]
        if other is None:
            apply_retention(store, scene.asked)
        elif status := other.wait(PATIENCE):
            wrong.append(f"the one beside has ended with {status}")
        wrong += [*harm(store, scene), *finished(store, scene), *harm(store, scene)]
        wrong += differences(store, scene) if other is None else []
        if left := self._ground.empty():
            self.tally["with empty directories that are left"] += 1
            self.left.update(left)
        self.wrong += [
            f"{self._ground.kind}, {self._who}, {scene.name}, killed at {how}: {line}"
            for line in wrong
        ]

    @contextlib.contextmanager
    def _started(
        self, before: Sequence[str] = (), said: Mapping[str, object] | None = None
    ) -> Iterator[subprocess.Popen[bytes]]:
        config = self._configured(self._scene.said if said is None else said)
        by_hand = [*CKPTSYNC, "gc", "-c", str(config)]
        command = head_command(Job("retain"), config) if self._who == "head" else by_hand
        words = [*before, *command, *(["--orphans"] if self._scene.strays else [])]
        with (
            (self._home / "log").open("ab") as log,
            started(
                words,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**CLEAN, "XDG_CACHE_HOME": str(self._home / "cache")},
            ) as process,
        ):
            yield process

    def _configured(self, said: Mapping[str, object]) -> Path:
        path = self._home / f"{'-'.join(said) or 'nothing'}.yaml"
        store = {"url": self._ground.url, "options": dict(self._ground.options)}
        told: dict[str, object] = {"node": "head", "roles": ["head"], "store": store}
        told["retention"] = {"grace": "0s", "runs": {"run": dict(said)} if said else {}}
        path.write_text(yaml.safe_dump(told))
        return path


def campaigns(ground: Ground, names: Sequence[str], home: Path) -> Iterator[Campaign]:
    """Each scene, by the command and by the head, as far as there is such a thing: only the command
    deletes orphans, and no server makes a file old.
    """
    for name, scene in scenes().items():
        if name in names and not (scene.strays and ground.kind == "s3"):
            yield from (
                Campaign(ground, scene, who, home) for who in (WHO[:1] if scene.strays else WHO)
            )


def main(argv: Sequence[str] | None = None) -> int:
    """0 if every promise was kept, 1 if not."""
    args = _arguments().parse_args(argv)
    wrong: list[str] = []
    dice = random.Random(args.seed)
    with working("gc") as home:
        for ground in (Ground(kind, home) for kind in args.stores):
            for one in campaigns(ground, args.scenes, home):
                begun = time.monotonic()
                if can_trap():
                    one.calls(args.calls, dice)
                one.moments(args.moments, dice) if args.moments else None
                print(f"{ground.kind}, {one}: {time.monotonic() - begun:.0f} s", flush=True)
                wrong += one.wrong
    return verdict(wrong)


def _arguments() -> argparse.ArgumentParser:
    parser = arguments(__doc__, "calls", "seed")
    parser.add_argument("--stores", nargs="+", choices=("posix", "s3"), default=("posix", "s3"))
    parser.add_argument("--scenes", nargs="+", choices=tuple(scenes()), default=tuple(scenes()))
    parser.add_argument("--moments", type=int, default=20, help="of each")
    return parser


if __name__ == "__main__":
    sys.exit(main())
