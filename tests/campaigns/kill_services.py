"""Kill workers and head at any moment, again and again, and see that every promise holds once they
are let alone.

In each round every run saves once more, while processes are killed at random moments (SIGKILL;
where strace is installed, also at the nth system call that changes a file) and started again, some
without what they remember in ``_ckptsync``.  Earlier checkpoints are rotated away as soon as the
store has them.  Then all is left alone until every checkpoint is VERIFIED, and compared with what
was written, bit for bit.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ckptsync.records import manifest_groups
from tests.campaigns.cluster import (
    NODES,
    RUNS,
    Save,
    Service,
    Training,
    services,
    settle,
    snapshots,
    violations,
)
from tests.campaigns.killing import Trap, can_trap
from tests.support.waiting import until

CALLS = ("write", "fsync", "rename", "renameat", "linkat", "mkdir", "mkdirat", "unlinkat")
TRAPPED = 4.0  # seconds that a process has to come to the call at which it dies
PATIENCE = 300.0  # seconds, on a busy machine, until all is VERIFIED once nobody is killed any more


class Campaign:
    """Who is killed, when and how is drawn from ``dice``; what the scheduler makes of it is not."""

    def __init__(self, home: Path, dice: random.Random) -> None:
        self._home, self._dice = home, dice
        self._training = Training(home, dice)
        self._killed: Counter[str] = Counter()
        self._can_trap = can_trap()
        for node in NODES:
            for run in RUNS:
                self._training.output(node, run).mkdir(parents=True)

    def run(self, rounds: int, kills: int) -> list[str]:
        """All that was wrong."""
        begun = time.monotonic()
        with _started(services(self._home)) as running:
            for n in range(1, rounds + 1):
                wrong = self._round(running, n, kills)
                if wrong:
                    return wrong
        wrong = violations(self._home, self._training.saves)
        took = time.monotonic() - begun
        print(
            f"{sum(self._killed.values())} kills in {took:.0f} s, {len(self._training.saves)}"
            f" saves: {dict(self._killed)}"
        )
        return wrong

    def _round(self, running: Mapping[str, Service], n: int, kills: int) -> list[str]:
        saves = [self._training.prepare(run, n * 8 + step) for step in (0, 4) for run in RUNS]
        trainer = threading.Thread(
            target=self._train, args=(saves, self._dice.choice((0.1, 0.2, 0.3)))
        )
        trainer.start()
        for _ in range(kills):
            self._kill(self._dice.choice(list(running.values())))
            self._rotate(self._training.saves[: -len(saves)])
        trainer.join()
        begun = time.monotonic()
        late = settle(self._home, self._training.saves, PATIENCE)
        wrong = [late] if late else violations(self._home, self._training.saves)
        ended = [
            f"{s.name} ended by itself with {s.ended()}"
            for s in running.values()
            if s.ended() is not None
        ]
        print(
            f"round {n}: {kills} kills, all VERIFIED {time.monotonic() - begun:.0f} s later",
            flush=True,
        )
        return [*wrong, *ended]

    def _train(self, saves: Sequence[Save], pause: float) -> None:
        for save in saves:
            self._training.write(save, pause)

    def _rotate(self, saves: Sequence[Save]) -> None:
        """Let the trainer delete what both nodes have stored (or have had every chance to pin)."""
        seen = snapshots(self._home)
        for save in saves:
            known = seen.get((save.run, save.checkpoint))
            manifests = known.manifests if known else ()
            stored = {k.manifest.node for k in manifest_groups.live_manifests(manifests)}
            if (
                stored == set(NODES)
                and (self._training.output(NODES[0], save.run) / save.checkpoint).exists()
            ):
                self._training.rotate(save)

    def _kill(self, victim: Service) -> None:
        """Kill it at a random moment, or start it anew under strace and let it run to its end.

        Then start it again.
        """
        way = "kill"
        if self._can_trap and self._dice.random() < 0.5:
            victim.kill()
            victim.start(Trap(self._dice.choice(CALLS), self._dice.randrange(1, 30)).before())
            way = "strace" if _ends(victim, TRAPPED) else "kill"
        else:
            time.sleep(self._dice.uniform(0.0, 1.5))
        victim.kill()
        if self._dice.random() < 0.25 and victim.name in NODES:
            way += ", forgets"
            for run in RUNS:
                shutil.rmtree(
                    self._training.output(victim.name, run) / "_ckptsync", ignore_errors=True
                )
        self._killed[f"{victim.name} ({way})"] += 1
        victim.start()


def _ends(service: Service, patience: float) -> bool:
    return until(lambda: service.ended() is not None, patience)


@contextlib.contextmanager
def _started(running: Mapping[str, Service]) -> Iterator[Mapping[str, Service]]:
    try:
        for service in running.values():
            service.start()
        yield running
    finally:
        for service in running.values():
            service.kill()
