"""LLaMA-Factory as it was released, with the hook and without: every step in the store, bit for
bit, and training as if we were not there.

    python -m tests.campaigns.llamafactory --python /opt/llamafactory/bin/python
    python -m tests.campaigns.llamafactory --ways ray --hooks yaml

Each training saves every step and keeps one checkpoint, and brings its worker along
(``CKPTSYNC_STORE``).  Its reference is the same training without us that keeps them all: of one
process, and of two.  Trainings on a CPU are the same to the last bit, so every file that tells no
time must be the same, too: in the store, and in what the trainer left on its disk.  ``nodes``: two
of them without a shared disk, with networks of their own where this may be done (root, Linux).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ckptsync.catalogue.uncached import read_state
from ckptsync.records.location_status import LocationState
from ckptsync.stores.opening import create_store
from tests.campaigns.campaign import arguments, end_by_signal, verdict, working
from tests.campaigns.cluster import compared, stored_bytes
from tests.campaigns.llamafactory_runs import (
    HOOKS,
    STAGES,
    WAYS,
    Bench,
    Run,
    can_train,
    default_python,
    files,
)
from tests.campaigns.nodes import Network, can_isolate
from tests.support.waiting import until

TIMED = frozenset(
    {
        "training_args.bin",
        "trainer_log.jsonl",
        "train_results.json",
        "all_results.json",
        "README.md",
    }
)  # or name a directory
STATE = "trainer_state.json"
WEIGHTS = {"model.safetensors"}
PATIENCE = 180.0  # seconds for the store to have everything, once the training has ended


def main(argv: Sequence[str] | None = None) -> int:
    """0 if every promise was kept, 1 if not."""
    args = _arguments().parse_args(argv)
    with contextlib.ExitStack() as stack:
        home = stack.enter_context(working("llamafactory", args.home))
        network = (
            stack.enter_context(contextlib.closing(Network(2)))
            if "nodes" in args.ways and can_isolate()
            else None
        )
        bench = Bench(home, args.python, args.steps, network)
        runs = [Run(*one) for one in _asked(args)]
        wrong = [line for run in runs for line in _judged(bench, run)]
    print(f"{len(runs)} trainings; {len(wrong)} wrong")
    return 1 if wrong else 0


def _arguments() -> argparse.ArgumentParser:
    parser = arguments(__doc__, "home")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument(
        "--hooks",
        nargs="+",
        choices=HOOKS,
        default=HOOKS,
        help="yaml: Ray's worker_process_setup_hook",
    )
    parser.add_argument(
        "--stages",
        nargs="+",
        choices=STAGES,
        default=STAGES,
        help="rm is trained by one process and by two",
    )
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument(
        "--python", default=default_python(), help="that has LLaMA-Factory, Ray, and ckptsync"
    )
    return parser


def _asked(args: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    for way in args.ways:
        if not can_train(args.python, way):
            print(f"{way}: left out, {args.python} lacks what it takes")
            continue
        for hook in args.hooks:
            for stage in args.stages:
                if (way == "ray" or hook != "yaml") and (
                    stage == "sft" or way in ("single", "torchrun")
                ):
                    yield way, stage, hook


def _judged(bench: Bench, run: Run) -> list[str]:
    """What is wrong with one training."""
    plain = Run("single" if run.way == "single" else "torchrun", run.stage, "")
    wrong: list[str] = []
    if not bench.out(plain).parent.exists():
        codes, logs = bench.trained(plain)
        wrong += _failed(plain, codes, logs)
    begun = time.monotonic()
    codes, logs = bench.trained(run)
    took = time.monotonic() - begun
    wrong += _failed(run, codes, logs)
    waited = _wait(bench, run) if not any(codes) else 0.0
    wrong += [
        *_in_store(bench, run, bench.out(plain)),
        *_on_disk(bench, run, bench.out(plain)),
        *_said(run, logs),
    ]
    print(
        f"{run.name}: {len(wrong)} wrong; trained {took:.0f} s, stored {waited:.0f} s later",
        flush=True,
    )
    verdict(f"{run.name}: {line}" for line in wrong)
    return wrong


def _failed(run: Run, codes: Sequence[int | None], logs: Sequence[Path]) -> Iterator[str]:
    for code, log in zip(codes, logs, strict=True):
        if code != 0:
            print(log.read_text("utf-8", "replace")[-4000:], file=sys.stderr)
            yield f"{run.name} ended with {code}; see {log}"


def _said(run: Run, logs: Sequence[Path]) -> Iterator[str]:
    """It is told once, by the first rank; not where Ray sets it up."""
    count = sum(
        log.read_text("utf-8", "replace").count("ckptsync: hook active: every") for log in logs
    )
    # Ray's driver shows what workers say, or not
    if run.way != "ray" and count != (run.hook != "yaml"):
        yield f"{count} times it was said to be on"


def _locations(bench: Bench, run: Run) -> dict[str, LocationState]:
    store = bench.store(run)
    return (
        {found.location: found for found in read_state(create_store(str(store)), "out").readable}
        if store.is_dir()
        else {}
    )


def _wanted(bench: Bench) -> set[str]:
    return {*(f"checkpoint-{step}" for step in range(1, bench.steps + 1)), "final"}


def _wait(bench: Bench, run: Run) -> float:
    begun = time.monotonic()

    def is_stored() -> bool:
        found, wanted = _locations(bench, run), _wanted(bench)
        return found.keys() >= wanted and all(
            len(found[location].manifests) == run.nodes for location in wanted - {"final"}
        )

    until(is_stored, PATIENCE, 0.5)
    return time.monotonic() - begun


def _in_store(bench: Bench, run: Run, truth: Path) -> Iterator[str]:
    store, found = create_store(str(bench.store(run))), _locations(bench, run)
    for location in sorted(_wanted(bench) ^ found.keys()):
        yield f"{location}: {'nobody wrote that' if location in found else 'not in the store'}"
    for location in sorted(_wanted(bench) & found.keys()):
        folder = truth if location == "final" else truth / location
        written = {path.relative_to(folder).as_posix(): path for path in files(folder)}
        lacking, extra, other = compared(store, found[location], written)
        if location == "final":
            lacking = sorted(WEIGHTS - found[location].files.keys())
        yield from (f"{location}/{path}: not in the store" for path in lacking)
        yield from (f"{location}/{path}: nobody wrote that" for path in extra)
        yield from (
            f"{location}/{path}: not the bytes of the reference"
            for path in other
            if _differ(
                path,
                stored_bytes(store, found[location].files[path][0].name) or b"",
                written[path].read_bytes(),
            )
        )


def _on_disk(bench: Bench, run: Run, truth: Path) -> Iterator[str]:
    """What all nodes have is what is left where nobody hooks in."""
    here = {
        path.relative_to(bench.out(run, n)).as_posix(): path
        for n in range(run.nodes)
        for path in files(bench.out(run, n))
    }
    old = {f"checkpoint-{step}" for step in range(1, bench.steps)}
    if run.way == "nodes":
        # nobody rotates on the other node
        here = {path: at for path, at in here.items() if path.partition("/")[0] not in old}
    there = {
        path.relative_to(truth).as_posix(): path
        for path in files(truth)
        if path.relative_to(truth).parts[0] not in old
    }
    yield from (
        f"{path}: {'not on the disk' if path in there else 'only there with us'}"
        for path in sorted(here.keys() ^ there.keys())
    )
    for path in sorted(here.keys() & there.keys()):
        if _differ(path, here[path].read_bytes(), there[path].read_bytes()):
            yield f"{path}: on the disk it is another one than without us"


def _differ(path: str, ours: bytes, reference: bytes) -> bool:
    name = path.rpartition("/")[2]
    if name == STATE:
        return bool(_history(ours) != _history(reference))
    return name not in TIMED and ours != reference


def _history(state: bytes) -> Any:
    told = json.loads(state)
    steps = [
        {
            key: value
            for key, value in entry.items()
            if key in ("step", "loss", "grad_norm", "learning_rate")
        }
        for entry in told["log_history"]
    ]
    return told["global_step"], told["max_steps"], steps


if __name__ == "__main__":
    end_by_signal(main)
