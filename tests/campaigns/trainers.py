"""Real trainers on two nodes, a worker on each, and everything that may happen meanwhile: no
checkpoint missed, none torn, training undisturbed.

    python -m tests.campaigns.trainers --modes ddp fsdp2 zero2 zero3 --rounds 10
        # with the hook and without
    python -m tests.campaigns.trainers --store s3 --kill 3 --cut 60 --hooks hook

Every training saves each step and keeps one checkpoint (``save_steps=1``, ``save_total_limit=1``);
the nodes share no disk, and where this may be done (root, Linux) each has a network of its own.
With the hook steps follow each other as fast as they can, and every one of them must be in the
store, on its way or pinned, whatever rotation deletes.  Without it there is a pause before each
step, and every one that lived longer than 2 s beside one life of its node's worker must be.  In the
store every file of every node is compared with what the trainer wrote, and every step's merged
model with what the framework gathered, bit for bit.  ``--kill``: workers are killed (SIGKILL) after
that many seconds, more or less, and started again.  ``--cut``: while the training runs nodes lose
the store for so many seconds.  ``--late``: workers are started only when the training has ended.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import threading
import time
from collections.abc import Iterator, Sequence

from tests.campaigns.campaign import end_by_signal, verdict, working
from tests.campaigns.judged import Judge, Tally, with_more
from tests.campaigns.two_nodes import (
    NODES,
    START,
    Job,
    TwoNodes,
    finish,
    on_two_nodes,
    training_arguments,
    wait_for,
)

PAUSE = 6.0  # seconds before each step without the hook
PATIENCE = 600.0  # seconds for the store to have everything, once the training has ended
WORKER = {"quiet": "2s", "unmarked": "10s"}


def main(argv: Sequence[str] | None = None) -> int:
    """0 if every promise was kept, 1 if not."""
    args = _arguments().parse_args(argv)
    with (
        working("trainers", args.home) as home,
        on_two_nodes(home, args.store, args.python, **WORKER) as nodes,
    ):
        return Campaign(nodes, args).run()


def _arguments() -> argparse.ArgumentParser:
    parser = training_arguments(__doc__)
    parser.add_argument("--hooks", nargs="+", choices=("hook", "none"), default=("hook", "none"))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--ranks", type=int, default=2, help="on each node")
    parser.add_argument(
        "--pause", type=float, default=0.0, help="seconds before each step with the hook"
    )
    parser.add_argument(
        "--kill", type=float, default=0.0, help="seconds between two kills, on average"
    )
    parser.add_argument("--cut", type=float, default=0.0, help="seconds without the store")
    return parser


class Campaign:
    """All modes, so many rounds of each."""

    def __init__(self, nodes: TwoNodes, args: argparse.Namespace) -> None:
        self._nodes, self._args, self._dice = nodes, args, random.Random(1)
        self._kills = 0

    def run(self) -> int:
        """A line for each training; what was wrong below it."""
        wrong = 0
        for n in range(NODES):
            self._nodes.begin(n)
        for n in range(self._args.rounds):
            for mode in self._args.modes:
                for hook in self._args.hooks:
                    wrong += len(self._train(self._job(f"{mode}-{hook}-{n + 1}", mode, hook)).wrong)
        print(f"{self._kills} kills; {wrong} wrong")
        return 1 if wrong else 0

    def _job(self, run: str, mode: str, hook: str) -> Job:
        pause = self._args.pause if hook == "hook" else max(self._args.pause, PAUSE)
        return Job(run, mode, hook == "hook", self._args.steps, pause, self._args.ranks)

    def _train(self, job: Job) -> Tally:
        begun = time.monotonic()
        over = threading.Event()
        with self._nodes.training(job) as trainers, self._disturbed(job, over):
            codes = finish(trainers, START + job.steps * (job.pause + 5))
        took = time.monotonic() - begun
        judge = Judge(self._nodes, job)
        waited = judge.wait(PATIENCE)
        tally = with_more(judge.tally(codes), *self._ended())
        print(f"{job.run}: {tally}; trained {took:.0f} s, stored {waited:.0f} s later", flush=True)
        verdict(tally.wrong)
        return tally

    def _ended(self) -> list[str]:
        return [
            f"{w.name}'s worker ended by itself with {w.ended()}"
            for w in self._nodes.workers
            if w.ended() is not None
        ]

    @contextlib.contextmanager
    def _disturbed(self, job: Job, over: threading.Event) -> Iterator[None]:
        threads = []
        if self._args.kill:
            threads.append(
                threading.Thread(target=self._kill, args=(over, random.Random(self._dice.random())))
            )
        if self._args.cut:
            threads.append(threading.Thread(target=self._cut, args=(job,)))
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            over.set()
            for thread in threads:
                thread.join()

    def _kill(self, over: threading.Event, dice: random.Random) -> None:
        while not over.wait(dice.uniform(0.3, 1.7) * self._args.kill):
            victim = dice.randrange(NODES)
            self._nodes.workers[victim].kill()
            self._kills += 1
            if over.wait(dice.choice((0.0, 0.0, 1.0))):
                pass  # it is started again all the same
            self._nodes.begin(victim)

    def _cut(self, job: Job) -> None:
        assert self._nodes.network, "a network cannot be cut that is not there"
        wait_for(self._nodes.node(0) / "truth" / job.run, "saved", 1, START)
        for n in range(NODES):
            self._nodes.network.cut(n)
        time.sleep(self._args.cut)
        for n in range(NODES):
            self._nodes.network.mend(n)


if __name__ == "__main__":
    end_by_signal(main)
