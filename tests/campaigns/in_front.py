"""Trainings with ``ckptsync resume`` in front of them, killed again and again: the losses are those
of a training that was never interrupted.

    python -m tests.campaigns.in_front --modes ddp fsdp2 zero3 lora --chains 2

A real training (Hugging Face's Trainer) is trained once to its end, without anything of ckptsync,
and keeps every checkpoint.  Then the same training runs on two nodes that share no disk,
``ckptsync resume`` before it on each, and is killed at random moments: its processes on one node or
on both, ``resume`` itself, or all that a node runs, with its disk, or with both disks.  Saves are
slow, so that many kills leave a torn one.  A node may come back under another name.  A worker
that ``resume`` runs is killed alone; then the training goes on, or is killed later.  Attempts
follow each other until one ends by itself.

Every step of every attempt must have the loss and the norm of the gradients that it has in the
training that was not interrupted, bit for bit; the last weights must be the same; what the store
calls COMPLETE must be, file by file, what the undisturbed training has saved; both nodes of an
attempt must begin at the same step; the last one must leave nothing that is whole and not stored;
and no finished checkpoint may be gone from a disk, under its own name or under the one that it was
moved to.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shutil
import subprocess
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from ckptsync.digest import digest
from ckptsync.walk import SPOOL
from ckptsync.worker.torn_saves import is_random_state
from tests.campaigns.campaign import CKPTSYNC, end_by_signal, flags, verdict, working
from tests.campaigns.judged import (
    FINAL,
    differences,
    is_same,
    is_weights,
    locations,
    merged_otherwise,
    truths,
)
from tests.campaigns.nodes import below, command_lines, kill, kill_tree
from tests.campaigns.two_nodes import (
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
    parse_arguments,
    training_arguments,
)
from tests.support.files_in_memory import contents
from tests.support.vector import ROOT
from tests.support.waiting import until

WORKER = {"quiet": "2s", "unmarked": "5s", "scan_every": "1s"}
SCOPES = ("trainings", "training", "resume", "disk", "disks", "node", "all", "name", "worker")
RESUMED = ("ddp", "fsdp2", "zero2", "zero3", "lora")
MOST_ATTEMPTS = 30
PATIENCE = START * 4  # torchrun waits 5 minutes for an agent that is gone, and `resume` drains


def main(argv: Sequence[str] | None = None) -> int:
    """0 if every training went on as if nothing had happened, 1 if not."""
    parser = training_arguments(__doc__, RESUMED, "ddp", "fsdp2")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--chains", type=int, default=2, help="trainings of each mode")
    parser.add_argument("--kills", type=int, default=4, help="of each training")
    parser.add_argument("--scopes", nargs="+", choices=SCOPES, default=SCOPES)
    args = parse_arguments(parser, argv)
    wrong = 0
    for mode in args.modes:
        with (
            working("in-front", args.home) as home,
            on_two_nodes(home / mode, args.store, args.python, **WORKER) as nodes,
        ):
            wrong += verdict(Campaign(nodes, mode, args).run())
    return 1 if wrong else 0


class Campaign:
    """All trainings of one mode."""

    def __init__(self, nodes: TwoNodes, mode: str, args: argparse.Namespace) -> None:
        self._nodes, self._mode, self._args = nodes, mode, args
        self._dice = random.Random(f"{args.seed} {mode}")
        whole = Job("whole", mode, steps=args.steps, pause=0.3, ranks=1, is_alone=True, limit=50)
        self._whole = replace(whole, more=flags(slow=0.01))
        self._saved: Mapping[str, Mapping[str, Path]] = {}

    def run(self) -> Iterator[str]:
        """Train; yield what is wrong."""
        with self._nodes.training(self._whole) as trainings:
            if finish(trainings, START * 2) != [0] * NODES:
                yield f"{self._mode}: the training that nobody kills has failed: {self._nodes.home}"
                return
        self._saved = truths(self._nodes.outs(self._whole), is_weights)
        expected = losses(self._nodes.truth(0, self._whole))
        if sorted(expected) != [*range(1, self._args.steps + 1)]:
            yield f"{self._mode}: the training that nobody kills has losses of {sorted(expected)}"
            return
        for chain in range(1, self._args.chains + 1):
            # every second chain is without the hook: there the files say alone what is whole
            hook = "hook" if chain % 2 else "none"
            job = replace(self._whole, run=f"{self._mode}-{chain}", hook=hook, is_alone=False)
            more = ["--no-truth", *flags(slow=0.1, resume="{checkpoint}")]
            yield from self._chain(replace(job, more=more), expected)

    def _chain(self, job: Job, expected: Losses) -> Iterator[str]:
        run = job.run
        for number in range(MOST_ATTEMPTS):
            job = replace(job, attempt=f"a{number}")
            finished = [_checkpoints(out) for out in self._nodes.outs(job)]
            scope = self._dice.choice(self._args.scopes) if number < self._args.kills else ""
            lost, codes = yield from self._attempt(job, scope)
            for n in {*range(NODES)} - lost:
                yield from self._missing(n, job, finished[n])
            yield from self._compared(job, expected)
            yield from self._claimed(run)
            if codes == [0] * NODES and all_events(self._nodes.truth(0, job), "trained"):
                yield from self._unsent(job)
                break
            if self._args.steps in self._steps(job):
                print(f"{run}: killed after its last step", flush=True)
                return  # a Trainer that resumes there may take one step more
        else:
            yield f"{run}: not trained to its end in {MOST_ATTEMPTS} attempts"
            return
        for path in sorted(self._nodes.outs(self._whole)[0].glob("*.safetensors")):
            model = self._nodes.outs(job)[0] / path.name
            if not model.is_file():
                yield f"{run}: {path.name} is missing in the end"
            elif model.read_bytes() != path.read_bytes():
                yield f"{run}: {path.name}: other weights than without kills"
        print(f"{run}: trained after {number + 1} attempts", flush=True)

    def _attempt(
        self, job: Job, scope: str
    ) -> Generator[str, None, tuple[set[int], list[int | None]]]:
        """One start on both nodes, and its end; return the nodes without a disk, and the codes."""
        lost: set[int] = set()
        node = self._dice.randrange(NODES)
        # without its worker a training goes on, or is killed itself
        is_killed = scope not in ("", "worker") or (scope != "" and self._dice.random() < 0.6)
        outs, truth = self._nodes.outs(job), self._nodes.truth(0, job)
        with self._trainings(job) as fronts:

            def has_ended() -> list[bool]:
                return [front.poll() is not None for front in fronts]

            if scope:
                until(lambda: any(has_ended()) or all_events(truth, "end"), START, 0.1)
                if scope == "worker":
                    _kill_worker(outs[node])
                # mostly before its last step
                last = self._args.steps - 1
                until(lambda: last in self._steps(job), self._dice.uniform(0, 6), 0.1)
                if is_killed:
                    self._kill(scope, node, fronts)
            until(lambda: all(has_ended()), PATIENCE)
            codes = [front.poll() for front in fronts]
            if None in codes or (not is_killed and any(codes)):
                yield f"{job.name}: {scope or 'not killed'}, and ended with {codes}"
        if scope in ("disk", "disks"):
            lost = {node} if scope == "disk" else {*range(NODES)}
            for n in lost:
                _kill_worker(outs[n])  # it would own pins on the new disk
                shutil.rmtree(outs[n], ignore_errors=True)
        if scope == "name":  # it comes back under another one, with its disk
            config = self._nodes.workers[node].config
            options = yaml.safe_load(config.read_text()) | {"node": f"node{node}-{job.name}"}
            config.write_text(yaml.safe_dump(options))
        steps = self._steps(job)
        trained = f"steps {steps[0]} to {steps[-1]}" if steps else "no step"
        print(f"{job.name}: {scope or 'not killed'}: {trained}, ended {codes}", flush=True)
        return lost, codes

    def _trainings(
        self, job: Job
    ) -> contextlib.AbstractContextManager[list[subprocess.Popen[bytes]]]:
        """Return a training on both nodes, with ``resume`` before it."""

        def front(n: int) -> list[str]:
            out, config = self._nodes.outs(job)[n], self._nodes.workers[n].config
            words = flags(run=job.run, nnodes=NODES, attempt=job.attempt, wait="5m", drain="8m")
            words += flags(trust="complete")
            return [*CKPTSYNC, "resume", str(out), "-c", str(config), *words, "--"]

        return self._nodes.training(job, front)

    def _kill(self, scope: str, node: int, fronts: Sequence[subprocess.Popen[bytes]]) -> None:
        on_both = scope in ("trainings", "worker", "all", "disks")
        for front in fronts if on_both else [fronts[node]]:
            if scope == "resume":
                front.kill()
                time.sleep(1)
            if scope not in ("trainings", "training", "worker"):
                kill_tree(front)
                continue
            script, children = f"{SCRIPT}\0".encode(), {*below(front.pid)} - {front.pid}
            lines = ((pid, line) for pid, line in command_lines() if pid in children)
            kill(pid for pid, line in lines if script in line and b"\0ckptsync\0" not in line)

    def _unsent(self, job: Job) -> Iterator[str]:
        """Yield what is whole on a node and not in the store, by what `resume` says in the end."""
        for n in range(NODES):
            log = (self._nodes.node(n) / f"{job.name}.log").read_text(errors="replace")
            for line in log.splitlines():
                if line.startswith(("ckptsync: do not shut", "ckptsync: the store cannot")):
                    yield f"{job.name}: node{n}: {line}"

    def _missing(self, n: int, job: Job, before: dict[str, dict[str, str]]) -> Iterator[str]:
        now = list(_checkpoints(self._nodes.outs(job)[n]).values())
        for name, digests in before.items():
            if digests and not any(digests.items() <= its.items() for its in now):
                yield f"{job.run}: node{n}: {name} is gone from its disk"

    def _claimed(self, run: str) -> Iterator[str]:
        """Yield what the store calls COMPLETE or better, and is not what was saved undisturbed."""
        for name, state in locations(self._nodes.store, run).items():
            if state.status in ("COMPLETE", "CONSOLIDATED", "VERIFIED"):
                saved = self._saved.get(state.checkpoint, {})
                # a save is whole without it: a Trainer resumes without a random state
                is_needed = (
                    is_weights
                    if state.checkpoint == FINAL
                    else (lambda path: not is_random_state(path))
                )
                store, fetched = self._nodes.store, self._nodes.home / "fetched" / name
                wrong = differences(store, state, saved, is_needed=is_needed, is_same=_is_like)
                lines = [f"{path}: {how}" for path, how in wrong]
                step = state.checkpoint.rpartition("-")[2]
                model = self._nodes.truth(0, self._whole) / f"model-{step}.safetensors"
                lines.append(merged_otherwise(store, state, fetched, model, ROOT / "base"))
                yield from (f"{run}/{name} is {state.status}; {line}" for line in lines if line)

    def _compared(self, job: Job, expected: Losses) -> Iterator[str]:
        begun = [all_events(self._nodes.truth(n, job), "begin")[:1] for n in range(NODES)]
        first = [event["step"] for events in begun for event in events]
        if len(set(first)) > 1:
            yield f"{job.name}: the nodes began at steps {first}"
        for step, values in losses(self._nodes.truth(0, job)).items():
            if values != expected[step]:
                yield f"{job.name}: step {step}: {values}, {expected[step]} without kills"

    def _steps(self, job: Job) -> list[int]:
        """Return the steps that were trained in an attempt."""
        return sorted(losses(self._nodes.truth(0, job)))


def _checkpoints(out: Path) -> dict[str, dict[str, str]]:
    """Return the digests of each checkpoint that lies on a node's disk, by its path."""
    return {
        str(path.relative_to(out)): {n: digest(data) for n, data in contents(path).items()}
        for path in (*out.glob("checkpoint-*"), *out.glob("_ckptsync-aside/*"))
    }


def _is_like(path: str, ours: bytes, reference: bytes) -> bool:
    """Return whether a file is of the same save: states of a resumed training have other bytes."""
    is_long_enough = not is_weights(path) and len(ours) == len(reference)
    return is_same(path, ours, reference) or is_long_enough


def _kill_worker(out: Path) -> None:
    """Kill the worker that `resume` runs for an output directory, at whatever it is."""
    config = f"{out}/{SPOOL}/embedded-".encode()
    kill(pid for pid, line in command_lines() if config in line)


if __name__ == "__main__":
    end_by_signal(main)
