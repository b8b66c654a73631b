"""A run is lost with all its disks, pulled out of the store onto two fresh nodes, and goes on as if
nothing had happened.

    python -m tests.campaigns.resume --modes fsdp2 zero3 --store s3

A real training on two nodes that share no disk saves each step, and workers send it to the store.
When it has ended, a head has made models of it and a verifier has proven them, both nodes' disks
are wiped.  ``ckptsync pull`` then brings a checkpoint from the middle onto both nodes, all of it
onto the first and what it needs onto the second, and the trainer resumes there
(``resume_from_checkpoint``) while the workers watch.  Every later step must have the loss and the
norm of the gradients that it had in the run that was lost, and every weight must be the same, bit
for bit.  The checkpoint that was pulled must be VERIFIED afterwards, without another record of any
worker.  Then all of it is done once more: the disks are lost again, and the same checkpoint is
pulled and resumed from.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ckptsync.catalogue.uncached import read_state
from ckptsync.head.consolidate import HeadOptions
from ckptsync.head.due_jobs import VerifyPolicy
from tests.campaigns.campaign import end_by_signal, verdict, working
from tests.campaigns.judged import Judge
from tests.campaigns.two_nodes import (
    NODES,
    START,
    Job,
    TwoNodes,
    all_events,
    finish,
    losses,
    on_two_nodes,
    training_arguments,
)
from tests.support.head_in_process import consolidate_due, verify_next

WORKER = {"quiet": "2s", "unmarked": "10s", "scan_every": "2s"}
SETTLED = 25.0  # seconds in which a worker has judged all that it sees


def main(argv: Sequence[str] | None = None) -> int:
    """0 if every training went on as it would have, 1 if not."""
    args = _arguments().parse_args(argv)
    wrong = 0
    for mode in args.modes:
        with (
            working("resume", args.home) as home,
            on_two_nodes(home / mode, args.store, args.python, **WORKER) as nodes,
        ):
            job = Job(mode, mode, hook=True, steps=args.steps, ranks=args.ranks)
            found = [*lost_and_resumed(nodes, job, args.at)]
        wrong += len(found)
        print(f"{mode}: {f'{len(found)} wrong' if found else 'as if never lost'}", flush=True)
        verdict(found)
    return 1 if wrong else 0


def _arguments() -> argparse.ArgumentParser:
    parser = training_arguments(__doc__, default=("fsdp2", "zero3"), store="s3")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument(
        "--at", type=int, default=2, help="the step whose checkpoint is brought back"
    )
    parser.add_argument("--ranks", type=int, default=1, help="on each node")
    return parser


def lost_and_resumed(nodes: TwoNodes, job: Job, at: int) -> Iterator[str]:
    """All of it; what was wrong."""
    for n in range(NODES):
        nodes.begin(n)
    yield from _trained(nodes, job)
    if Judge(nodes, job).wait(600) >= 600:
        yield "the store has not got every step"
    _prove(nodes)
    kept = nodes.home / "kept"
    shutil.copytree(nodes.node(0) / "truth" / job.run, kept)
    for n in range(NODES):
        nodes.wipe(n)
    pulled = _state(nodes, job.run, f"checkpoint-{at}")
    for hook in (False, True):
        again = replace(job, hook=hook, resume=f"checkpoint-{at}")
        yield from _pulled(nodes, job, again)
        for n in range(NODES):
            nodes.begin(n)
        yield from _trained(nodes, again)
        yield from _compared(
            kept, nodes.node(0) / "truth" / again.run, range(at + 1, job.steps + 1)
        )
        time.sleep(SETTLED)
        if (now := _state(nodes, job.run, f"checkpoint-{at}")) != pulled:
            yield f"checkpoint-{at} was {pulled}, and is {now} after it was pulled and resumed from"
        yield from _watched(nodes)
        for n in range(NODES):
            nodes.wipe(n)


def _state(nodes: TwoNodes, run: str, location: str) -> tuple[str, tuple[str, ...]]:
    """What a location is, and the manifests that say so."""
    seen = read_state(nodes.store, run).of(run, location)
    return (seen.status, tuple(k.name for k in seen.manifests)) if seen else ("", ())


def _watched(nodes: TwoNodes) -> Iterator[str]:
    """Whether a worker has said more than once that it sent nothing."""
    for n in range(NODES):
        said = [
            line
            for line in nodes.workers[n].log.read_text().splitlines()
            if '"phase": "sent"' in line and '"files": 0' in line
        ]
        if said:
            yield f"node{n} sent nothing, and said so {len(said)} times: {said[0][:200]}"


def _trained(nodes: TwoNodes, job: Job) -> Iterator[str]:
    with nodes.training(job) as trainers:
        codes = finish(trainers, START)
    for n in range(NODES):
        if not all_events(nodes.node(n) / "truth" / job.run, "kept"):
            yield f"{job.run}: the trainers ended with {codes}: {nodes.node(n) / job.run}.log"


def _prove(nodes: TwoNodes) -> None:
    consolidate_due(nodes.store, HeadOptions())
    for _ in read_state(nodes.store).readable:  # a tick proves one location or more
        verify_next(nodes.store, VerifyPolicy(), time.time())


def _pulled(nodes: TwoNodes, job: Job, again: Job) -> Iterator[str]:
    """The whole checkpoint onto the first node, what it needs onto the others."""
    for n in range(NODES):
        out = str(nodes.node(n) / "out" / again.run)
        latest = nodes.reached(n, "pull", job.run, out, "--dry-run", "--json")
        told = json.loads(latest.stdout or "{}")
        if (told.get("status"), told.get("location")) != ("VERIFIED", f"checkpoint-{job.steps}"):
            yield f"latest is {told.get('location')}, {told.get('word')}: {latest.stderr}"
        needs = ["--node", f"node{n}"] if n else []
        done = nodes.reached(n, "pull", f"{job.run}/{again.resume}", out, *needs)
        print(done.stdout, end="", flush=True)
        if done.returncode:
            yield f"pull onto node{n} ended with {done.returncode}: {done.stderr}"


def _compared(kept: Path, truth: Path, steps: Sequence[int]) -> Iterator[str]:
    wanted, found = losses(kept), losses(truth)
    if sorted(found) != list(steps):
        yield f"steps {sorted(found)} were trained, not {list(steps)}"
    for step in steps:
        line = f"step {step}: loss and norm {found.get(step)}, {wanted[step]} in the run lost"
        print(f"  {line}", flush=True)
        if found.get(step) != wanted[step]:
            yield line
        ours, theirs = (folder / f"model-{step}.safetensors" for folder in (truth, kept))
        if not ours.is_file() or ours.read_bytes() != theirs.read_bytes():
            yield f"step {step}: other weights"


if __name__ == "__main__":
    end_by_signal(main)
