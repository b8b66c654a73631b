"""Trainings with ``ckptsync resume`` in front of them, killed again and again: the losses are those
of a training that was never interrupted.

    python -m tests.campaigns.in_front --modes ddp fsdp2 zero3 lora --chains 2

A real training (Hugging Face's Trainer) is trained once to its end, without anything of ckptsync.
Then the same training runs on two nodes that share no disk, ``ckptsync resume`` before it on each,
and is killed at random moments: its processes on one node or on both, ``resume`` itself, or all
that a node runs, with its disk.  Saves are slow, so that many kills leave a torn one.  A node may
come back under another name, and the store may be away as an attempt begins.  A worker that
``resume`` runs is killed alone, and so is the head (it is started again); each time the training
goes on, or is killed later.  Attempts follow each other until one ends by itself.

Every step of every attempt must have the loss and the norm of the gradients that it has in the
training that was not interrupted, bit for bit; the last weights must be the same; both nodes of an
attempt must begin at the same step; the last one must leave nothing that is whole and not stored;
and no finished checkpoint may be gone from a disk, under its
own name or under the one that it was moved to.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from ckptsync.digest import digest
from ckptsync.walk import SPOOL
from tests.campaigns.campaign import CKPTSYNC, end_by_signal, flags, verdict, working
from tests.campaigns.cluster import Service
from tests.campaigns.nodes import below, command_lines, kill, kill_tree
from tests.campaigns.two_nodes import (
    MODES,
    NODES,
    SCRIPT,
    START,
    Job,
    Losses,
    TwoNodes,
    all_events,
    finish,
    losses,
    on_two_nodes,
    training_arguments,
)
from tests.support.vector import ROOT
from tests.support.waiting import until

WORKER = {"quiet": "2s", "unmarked": "5s", "scan_every": "1s"}
SERVICES = ("worker", "head")  # of which no training needs to know
SCOPES = ("trainings", "training", "resume", "disk", "node", "all", "name", "store", *SERVICES)
MOST_ATTEMPTS = 30
AWAY = 30.0  # seconds in which the store cannot be reached
DRAIN = "8m"
PATIENCE = START * 4  # torchrun waits 5 minutes for an agent that is gone, and `resume` drains


def main(argv: Sequence[str] | None = None) -> int:
    """0 if every training went on as if nothing had happened, 1 if not."""
    args = _arguments().parse_args(argv)
    wrong = 0
    for mode in args.modes:
        with (
            working("in-front", args.home) as home,
            on_two_nodes(home / mode, args.store, args.python, **WORKER) as nodes,
            _head(nodes, is_wanted=args.trust == "verified") as head,
        ):
            campaign = Campaign(nodes, head, mode, args)
            wrong += verdict([*campaign.run()])
    return 1 if wrong else 0


def _arguments() -> argparse.ArgumentParser:
    parser = training_arguments(__doc__, modes=(*MODES, "lora"), default=("ddp", "fsdp2"))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--chains", type=int, default=2, help="trainings of each mode")
    parser.add_argument("--kills", type=int, default=4, help="of each training")
    parser.add_argument("--trust", choices=("verified", "complete"), default="complete")
    parser.add_argument("--scopes", nargs="+", choices=SCOPES, default=SCOPES)
    parser.add_argument("--seed", type=int, default=1)
    return parser


@contextlib.contextmanager
def _head(nodes: TwoNodes, *, is_wanted: bool) -> Iterator[Service | None]:
    """A head beside the nodes, so that checkpoints are verified."""
    if not is_wanted:
        yield None
        return
    rules = {"every": "1s", "config_from": {"*": str(ROOT / "base")}}
    verify = {"level": "digest", "period": "1h", "tick": "1s"}
    store = {"url": nodes.url, "options": nodes.options}
    head = Service(nodes.home, "head", "head", "verifier", store=store, head=rules, verify=verify)
    head.start()
    try:
        yield head
    finally:
        head.kill()


class Campaign:
    """All trainings of one mode."""

    def __init__(
        self, nodes: TwoNodes, head: Service | None, mode: str, args: argparse.Namespace
    ) -> None:
        self._nodes, self._head, self._mode, self._args = nodes, head, mode, args
        self._dice = random.Random(f"{args.seed} {mode}")
        self._scopes = [*args.scopes]
        if "store" in self._scopes and (not nodes.network or args.store == "posix"):
            self._scopes.remove("store")
            print(f"{mode}: no link leads to this store: it is not cut", flush=True)
        if "head" in self._scopes and head is None:
            self._scopes.remove("head")

    def run(self) -> Iterator[str]:
        """Train; yield what is wrong."""
        whole = self._nodes.home / "whole"
        with self._trainings("whole", "0", is_alone=True) as trainings:
            if finish(trainings, START * 2) != [0] * NODES:
                yield f"{self._mode}: the training that nobody kills has failed: {whole}"
                return
        expected = losses(self._nodes.node(0) / "truth" / "whole.0")
        if sorted(expected) != [*range(1, self._args.steps + 1)]:
            yield f"{self._mode}: the training that nobody kills has losses of {sorted(expected)}"
            return
        for chain in range(1, self._args.chains + 1):
            yield from self._chain(f"{self._mode}-{chain}", expected)

    def _chain(self, run: str, expected: Losses) -> Iterator[str]:
        kills = self._args.kills
        for number in range(MOST_ATTEMPTS):
            finished = [self._checkpoints(n, run) for n in range(NODES)]
            scope = self._dice.choice(self._scopes) if number < kills else ""
            lost, codes = yield from self._attempt(run, f"a{number}", scope)
            for n in range(NODES):
                if n not in lost:
                    yield from self._missing(n, run, finished[n])
            yield from self._compared(run, f"a{number}", expected)
            if codes == [0] * NODES and self._is_trained(run, f"a{number}"):
                yield from self._unsent(run, f"a{number}")
                break
            if self._args.steps in self._steps(run, f"a{number}"):
                print(f"{run}: killed after its last step", flush=True)
                return  # a Trainer that resumes there may take one step more
        else:
            yield f"{run}: not trained to its end in {MOST_ATTEMPTS} attempts"
            return
        one, other = (self._nodes.node(0) / "out" / name for name in ("whole", run))
        for path in sorted(one.glob("*.safetensors")):
            if not (other / path.name).is_file():
                yield f"{run}: {path.name} is missing in the end"
            elif digest(path.read_bytes()) != digest((other / path.name).read_bytes()):
                yield f"{run}: {path.name}: other weights than without kills"
        print(f"{run}: trained after {number + 1} attempts", flush=True)

    def _attempt(
        self, run: str, attempt: str, scope: str
    ) -> Generator[str, None, tuple[set[int], list[int | None]]]:
        """One start on both nodes, and its end; return the nodes without a disk, and the codes."""
        lost: set[int] = set()
        node = self._dice.randrange(NODES)
        # without its worker, or the head, a training goes on, or is killed itself
        is_killed = scope not in ("", *SERVICES) or (scope != "" and self._dice.random() < 0.6)
        with (
            self._store_away(is_wanted=scope == "store"),
            self._without_head(is_wanted=scope == "head"),
            self._trainings(run, attempt) as fronts,
        ):
            if scope:
                self._wait_for_step(run, attempt, fronts)
                if scope == "worker":
                    _kill_worker(self._nodes.node(node) / "out" / run)
                # mostly before its last step
                last = self._args.steps - 1
                until(lambda: last in self._steps(run, attempt), self._dice.uniform(0, 6), 0.1)
                if is_killed:
                    self._kill(scope, node, fronts)
            codes = _finished(fronts)
            if None in codes:
                yield f"{run} {attempt}: {scope or 'not killed'}: ended with {codes}"
            if not is_killed and any(codes):
                yield f"{run} {attempt}: {scope or 'not killed'}, and ended with {codes}"
        if scope == "disk":
            shutil.rmtree(self._nodes.node(node) / "out" / run, ignore_errors=True)
            lost.add(node)
        if scope == "name":
            self._rename(node, f"node{node}-{run}-{attempt}")
        steps = self._steps(run, attempt)
        trained = f"steps {steps[0]} to {steps[-1]}" if steps else "no step"
        print(f"{run} {attempt}: {scope or 'not killed'}: {trained}, ended {codes}", flush=True)
        return lost, codes

    def _trainings(
        self, run: str, attempt: str, *, is_alone: bool = False
    ) -> contextlib.AbstractContextManager[list[subprocess.Popen[bytes]]]:
        """Return a training on both nodes, with ``resume`` before it unless it is alone."""
        args = self._args
        more = flags(limit=50, no_truth=True)
        job = Job(
            run, self._mode, hook=False, steps=args.steps, pause=0.3, ranks=1, attempt=attempt,
            more=more,
        )  # fmt: skip
        if is_alone:
            return self._nodes.training(job)
        job = replace(job, hook=True, more=[*more, *flags(slow=0.1, resume="{checkpoint}")])

        def front(n: int) -> list[str]:
            out, config = self._nodes.node(n) / "out" / run, self._nodes.workers[n].config
            told = flags(run=run, nnodes=NODES, attempt=attempt, wait="5m", drain=DRAIN)
            resume = [*CKPTSYNC, "resume", str(out), "-c", str(config), *told]
            return [*resume, "--trust", args.trust, "--"]

        return self._nodes.training(job, front)

    def _wait_for_step(
        self, run: str, attempt: str, fronts: Sequence[subprocess.Popen[bytes]]
    ) -> None:
        truth = self._truth(0, run, attempt)
        until(
            lambda: all_events(truth, "end") or any(f.poll() is not None for f in fronts),
            START,
            0.1,
        )

    def _kill(self, scope: str, node: int, fronts: Sequence[subprocess.Popen[bytes]]) -> None:
        if scope == "resume":
            fronts[node].kill()
            time.sleep(1)
            kill_tree(fronts[node])
        elif scope in ("trainings", "training", "store", *SERVICES):
            for front in [fronts[node]] if scope == "training" else fronts:
                its = {*below(front.pid)} - {front.pid}
                words = f"{SCRIPT}\0".encode()
                kill(
                    pid
                    for pid, line in command_lines()
                    if pid in its and words in line and b"\0ckptsync\0" not in line
                )
        else:
            for front in fronts if scope == "all" else [fronts[node]]:
                kill_tree(front)

    @contextlib.contextmanager
    def _store_away(self, *, is_wanted: bool) -> Iterator[None]:
        """Cut both nodes from the store, and mend that after a while."""
        network = self._nodes.network
        if not is_wanted or network is None:
            yield
            return

        def mend() -> None:
            for n in range(NODES):
                network.mend(n)

        for n in range(NODES):
            network.cut(n)
        timer = threading.Timer(AWAY, mend)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()
            mend()

    @contextlib.contextmanager
    def _without_head(self, *, is_wanted: bool) -> Iterator[None]:
        """Kill the head, and start it again after a while."""
        if not is_wanted or self._head is None:
            yield
            return
        self._head.kill()
        timer = threading.Timer(self._dice.uniform(0, AWAY), self._head.start)
        timer.start()
        try:
            yield
        finally:
            timer.join()

    def _rename(self, n: int, name: str) -> None:
        """Have a node come back under another name, with its disk."""
        config = self._nodes.workers[n].config
        told = yaml.safe_load(config.read_text())
        config.write_text(yaml.safe_dump({**told, "node": name}))

    def _unsent(self, run: str, attempt: str) -> Iterator[str]:
        """Yield what is whole on a node and not in the store, by what `resume` says in the end."""
        for n in range(NODES):
            log = (self._nodes.node(n) / f"{run}.{attempt}.log").read_text(errors="replace")
            for line in log.splitlines():
                if line.startswith(("ckptsync: do not shut", "ckptsync: the store cannot")):
                    yield f"{run} {attempt}: node{n}: {line}"

    def _checkpoints(self, n: int, run: str) -> dict[str, dict[str, str]]:
        """Return the digests of each checkpoint that lies on a node's disk, by its path."""
        out = self._nodes.node(n) / "out" / run
        paths = [*out.glob("checkpoint-*"), *out.glob("_ckptsync-aside/*")]
        return {str(path.relative_to(out)): _digests(path) for path in sorted(paths)}

    def _missing(self, n: int, run: str, before: dict[str, dict[str, str]]) -> Iterator[str]:
        now = list(self._checkpoints(n, run).values())
        for name, digests in before.items():
            if digests and not any(digests.items() <= its.items() for its in now):
                yield f"{run}: node{n}: {name} is gone from its disk"

    def _compared(self, run: str, attempt: str, expected: Losses) -> Iterator[str]:
        begun = [all_events(self._truth(n, run, attempt), "begin")[:1] for n in range(NODES)]
        first = [said["step"] for its in begun for said in its]
        if len(set(first)) > 1:
            yield f"{run} {attempt}: the nodes began at steps {first}"
        for step, values in losses(self._truth(0, run, attempt)).items():
            if values != expected[step]:
                yield f"{run} {attempt}: step {step}: {values}, {expected[step]} without kills"

    def _truth(self, n: int, run: str, attempt: str) -> Path:
        return self._nodes.node(n) / "truth" / f"{run}.{attempt}"

    def _steps(self, run: str, attempt: str) -> list[int]:
        """Return the steps that were trained in an attempt."""
        return sorted(losses(self._truth(0, run, attempt)))

    def _is_trained(self, run: str, attempt: str) -> bool:
        return bool(all_events(self._truth(0, run, attempt), "trained"))


def _finished(fronts: Sequence[subprocess.Popen[bytes]]) -> list[int | None]:
    """Return the exit codes once all have ended; None for one that does not."""
    until(lambda: all(front.poll() is not None for front in fronts), PATIENCE)
    return [front.poll() for front in fronts]


def _digests(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): digest(path.read_bytes())
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def _kill_worker(out: Path) -> None:
    """Kill the worker that `resume` runs for an output directory, at whatever it is."""
    config = f"{out}/{SPOOL}/embedded-".encode()
    kill(pid for pid, line in command_lines() if config in line)


if __name__ == "__main__":
    end_by_signal(main)
