"""Real trainers on two nodes, a worker on each, and everything that may happen meanwhile: no
checkpoint missed, none torn, training undisturbed.

    python -m tests.campaigns.trainers --modes ddp fsdp2 zero2 zero3 --rounds 10
        # with the hook and without
    python -m tests.campaigns.trainers --store s3 --kill 3 --cut 60 --hooks hook
    python -m tests.campaigns.trainers --modes sft dpo hub --python /opt/trl/bin/python

Of each mode one training is let be, and keeps every checkpoint: `tests.campaigns.judged` compares
all others with it.  They save each step and keep one checkpoint (``save_steps=1``,
``save_total_limit=1``); the nodes share no disk, and where this may be done (root, Linux) each has
a network of its own.  With the hook steps follow each other as fast as they can, and every one of
them must be in the store, on its way or pinned, whatever rotation deletes.  Without it there is a
pause before each step.  In the store every file of every step is compared, and its merged model
with what the framework gathered, bit for bit.  ``--kill``: workers are killed (SIGKILL) after that
many seconds, more or less, and started again (with the hook).  ``--cut``: while the training runs
nodes lose the store for so many seconds.

The Trainer of transformers: ddp, fsdp2, zero2, zero3, lora.  TRL's: SFT, DPO with its ``ref``
adapter, GRPO, adapters with names of their own, ``save_only_model`` with
``load_best_model_at_end``, and copies for the Hub, which is replaced.  LLaMA-Factory as it was
released: the hook comes by autoload.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tests.campaigns import judged
from tests.campaigns.campaign import end_by_signal, verdict, working
from tests.campaigns.judged import is_weights
from tests.campaigns.two_nodes import (
    HOOKS,
    MODES,
    NODES,
    START,
    Job,
    TwoNodes,
    all_events,
    finish,
    on_two_nodes,
    parse_arguments,
    training_arguments,
)
from tests.support.vector import ROOT
from tests.support.waiting import until

PAUSE = 6.0  # seconds before each step without the hook: what lives shorter may be missed
PATIENCE = 600.0  # seconds for the store to have everything, once the training has ended
WORKER = {"quiet": "2s", "unmarked": "10s"}


def main(argv: Sequence[str] | None = None) -> int:
    """0 if every promise was kept, 1 if not."""
    parser = training_arguments(__doc__, MODES, "ddp", "fsdp2", "zero2", "zero3")
    parser.add_argument("--hooks", nargs="+", choices=HOOKS, default=("hook", "none"))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--ranks", type=int, default=2, help="on each node")
    kill = "seconds between two kills, on average"
    parser.add_argument("--kill", type=float, default=0.0, help=kill)
    parser.add_argument("--cut", type=float, default=0.0, help="seconds without the store")
    args = parse_arguments(parser, argv)
    with (
        working("trainers", args.home) as home,
        on_two_nodes(home, args.store, args.python, **WORKER) as nodes,
    ):
        return Campaign(nodes, args).run()


class Campaign:
    """All modes, so many rounds of each."""

    def __init__(self, nodes: TwoNodes, args: argparse.Namespace) -> None:
        self._nodes, self._args, self._dice = nodes, args, random.Random(args.seed)
        self._kills = 0

    def run(self) -> int:
        """Print a line for each training, and what was wrong below it."""
        wrong, args = 0, self._args
        for n in range(NODES):
            self._nodes.begin(n)
        for mode in args.modes:
            plain = Job(f"{mode}-plain", mode, steps=args.steps, ranks=args.ranks)
            plain = replace(plain, is_alone=True, limit=args.steps)
            with self._nodes.training(plain) as trainers:
                lines = [*self._ended(plain, finish(trainers, START))]
            for number in range(args.rounds if not lines else 0):
                # LLaMA-Factory lets nobody pause it
                for hook in (h for h in args.hooks if (mode, h) != ("llamafactory", "none")):
                    lines += self._train(plain, f"{mode}-{hook}-{number + 1}", hook)
            wrong += len(lines)
            verdict(lines)
        print(f"{self._kills} kills; {wrong} wrong")
        return 1 if wrong else 0

    def _train(self, plain: Job, run: str, hook: str) -> list[str]:
        """Train once, with what disturbs it; return what is wrong."""
        pause = PAUSE if hook == "none" else 0.0
        job = replace(plain, run=run, hook=hook, pause=pause, limit=1)
        job = replace(job, is_alone=hook == "embedded")
        over = threading.Event()
        with self._nodes.training(job) as trainers, self._disturbed(job, over):
            codes = finish(trainers, START + job.steps * (job.pause + 5))
        begun = time.monotonic()
        outs = self._nodes.outs(plain)
        reference = judged.truths(outs, is_weights)
        of_nodes = {
            name: [job.node_name(n) for n in range(NODES) if not n or (outs[n] / name).is_dir()]
            for name in reference
        }

        def absent() -> list[str]:
            return [*judged.missing(judged.locations(self._nodes.store, run), of_nodes)]

        until(lambda: not absent(), PATIENCE, 0.5)
        waited = time.monotonic() - begun
        wrong = [*self._ended(job, codes), *absent()]
        wrong += judged.in_store(self._nodes.store, run, reference, is_weights)
        wrong += self._merged(plain, run)
        rotated = {f"checkpoint-{step}" for step in range(1, job.steps)}
        wrong += judged.on_disk(self._nodes.outs(job), outs, rotated)
        wrong += self._alarmed(job) if hook != "none" else ()
        for worker in self._nodes.workers:
            if worker.exit_code() is not None:
                wrong.append(f"{worker.name}'s worker ended by itself with {worker.exit_code()}")
        print(f"{run}: {len(wrong)} wrong; stored {waited:.0f} s later", flush=True)
        return [f"{run}: {line}" for line in wrong]

    def _ended(self, job: Job, codes: Sequence[int | None]) -> Iterator[str]:
        ends = [all_events(self._nodes.truth(n, job), "trained") for n in range(NODES)]
        is_trained = job.mode == "llamafactory" or sum(map(len, ends)) == NODES * job.ranks
        # gloo's teardown aborts one FSDP2 run in five, with or without us
        has_failed = job.mode != "fsdp2" and (any(codes) or None in codes)
        if has_failed or not is_trained:
            yield f"{job.run}: the trainers ended with {codes}"

    def _merged(self, plain: Job, run: str) -> Iterator[str]:
        """Yield each step whose merged model is not what the framework gathered."""
        for name, state in sorted(judged.locations(self._nodes.store, run).items()):
            model = self._nodes.truth(0, plain) / f"model-{name.rpartition('-')[2]}.safetensors"
            fetched = self._nodes.home / "fetched" / run / name
            how = judged.merged_otherwise(self._nodes.store, state, fetched, model, ROOT / "base")
            yield from [f"{name}: {how}"] * bool(how)

    def _alarmed(self, job: Job) -> Iterator[str]:
        """Yield what a worker called missed: with the hook nothing is."""
        embedded = [out / "_ckptsync" / "embedded.log" for out in self._nodes.outs(job)]
        for log in (*(worker.log for worker in self._nodes.workers), *embedded):
            for line in log.read_text("utf-8").splitlines() if log.exists() else ():
                if '"phase": "missed"' in line and json.loads(line)["run"] == job.run:
                    yield f"called missed in {log}: {line[:200]}"

    @contextlib.contextmanager
    def _disturbed(self, job: Job, over: threading.Event) -> Iterator[None]:
        threads = []
        if self._args.kill and job.hook != "none":
            threads.append(threading.Thread(target=self._kill, args=(over,)))
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

    def _kill(self, over: threading.Event) -> None:
        while not over.wait(self._dice.uniform(0.3, 1.7) * self._args.kill):
            victim = self._dice.randrange(NODES)
            self._nodes.workers[victim].kill()
            self._kills += 1
            over.wait(self._dice.choice((0.0, 0.0, 1.0)))
            self._nodes.begin(victim)

    def _cut(self, job: Job) -> None:
        network = self._nodes.network
        assert network, "a network cannot be cut that is not there"
        until(lambda: bool(all_events(self._nodes.truth(0, job), "saved")), START)
        for n in range(NODES):
            network.cut(n)
        time.sleep(self._args.cut)
        for n in range(NODES):
            network.mend(n)


if __name__ == "__main__":
    end_by_signal(main)
