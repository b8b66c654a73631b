"""TRL as it was released, with the hook, and with a worker alone: every step in the store, bit for
bit.

    python -m tests.campaigns.trl_trainers --python /opt/trl/bin/python
    python -m tests.campaigns.trl_trainers --modes named hub --hooks none

Each training saves every step and keeps one checkpoint: SFT, DPO with its ``ref`` adapter, GRPO,
adapters with names of their own, ``save_only_model`` with ``load_best_model_at_end``, and copies
for the Hub, which is replaced.  With the hook the training brings its worker along
(``CKPTSYNC_STORE``) and waits for it; without, a worker runs beside it, and the training keeps all
checkpoints and pauses between them.  Every file of every step, and of the final model, is compared
with what the trainer wrote, and every merged model or adapter with the weights that it held.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ckptsync.catalogue.uncached import read_state
from ckptsync.errors import CkptsyncError
from ckptsync.layouts.file_names import is_beside_weights
from ckptsync.merger.plan import MergeOptions
from ckptsync.records.location_status import LocationState
from ckptsync.stores.contract import Store, read_all
from ckptsync.stores.opening import create_store
from tests.campaigns.campaign import (
    CKPTSYNC,
    CLEAN,
    arguments,
    end_by_signal,
    flags,
    started,
    verdict,
    working,
)
from tests.campaigns.cluster import compared
from tests.campaigns.two_nodes import QUIET, has_modules
from tests.support.files_in_memory import file_paths
from tests.support.merge_on_disk import merge_local
from tests.support.vector import ROOT, bits
from tests.support.waiting import until

SCRIPT = Path(__file__).with_name("trl_training.py")
MODES = ("sft", "dpo", "grpo", "named", "best", "hub")
HOOKS = ("hook", "none")
PAUSE = 2.5  # seconds before each step without the hook
COPIED = 6.0  # the same of copies for the Hub: longer than the worker takes a model for final
PATIENCE = 120.0  # seconds for the store to have everything, once the training has ended
WORKER = {"quiet": "2s", "scan_every": "1s"}


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if every promise was kept, 1 if not."""
    args = _arguments().parse_args(argv)
    if not can_train(args.python):
        print(f"left out: {args.python} has no TRL, or lacks what the hook's worker needs")
        return 0
    wrong = 0
    with working("trl", args.home) as home:
        for mode in args.modes:
            for hook in args.hooks:
                wrong += len(_judged(home / f"{mode}-{hook}", mode, hook, args))
    print(f"{wrong} wrong")
    return 1 if wrong else 0


def _arguments() -> argparse.ArgumentParser:
    parser = arguments(__doc__, "home")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--hooks", nargs="+", choices=HOOKS, default=HOOKS)
    parser.add_argument("--steps", type=int, default=4)
    python = os.environ.get("CKPTSYNC_TEST_TRL", sys.executable)
    parser.add_argument("--python", default=python, help="that has TRL, and ckptsync")
    return parser


def can_train(python: str) -> bool:
    """Return whether a Python has TRL and what an embedded worker imports."""
    return has_modules(python, "trl", "peft", "ckptsync", "blake3", "msgspec")


def _judged(home: Path, mode: str, hook: str, args: argparse.Namespace) -> list[str]:
    """Train once, and return what is wrong."""
    home.mkdir(parents=True)
    url, begun = str(home / "store"), time.monotonic()
    with contextlib.ExitStack() as stack:
        if hook == "none":
            stack.enter_context(_worker(home, url, "2s" if mode == "hub" else "10s"))
        code = _trained(home, mode, hook, url, args)
        took, begun = time.monotonic() - begun, time.monotonic()
        wanted = {*(f"checkpoint-{step}" for step in range(1, args.steps + 1)), "final"}
        until(lambda: _locations(url).keys() >= wanted, PATIENCE if not code else 1.0, 0.5)
        waited = time.monotonic() - begun
        if hook == "none":
            time.sleep(2 * float(WORKER["quiet"][:-1]))  # for what should not come
    wrong = [f"the training ended with {code}; see {home / 'log'}"] if code else []
    wrong += [*in_store(create_store(url), home, wanted), *_said(home, url, hook, args.steps)]
    print(
        f"{home.name}: {len(wrong)} wrong; trained {took:.0f} s, stored {waited:.0f} s later",
        flush=True,
    )
    verdict(f"{home.name}: {line}" for line in wrong)
    return wrong


@contextlib.contextmanager
def _worker(home: Path, url: str, unmarked: str) -> Iterator[None]:
    """Run a worker beside the training."""
    config = {
        "roles": ["worker"],
        "store": {"url": url},
        "worker": {"runs": [str(home / "out")], "unmarked": unmarked, **WORKER},
    }
    (home / "worker.yaml").write_text(json.dumps(config))  # JSON is YAML
    (home / "out").mkdir()
    with (
        (home / "worker.log").open("wb") as log,
        started([*CKPTSYNC, "run", "-c", str(home / "worker.yaml")], stderr=log, env=CLEAN),
    ):
        yield


def _trained(home: Path, mode: str, hook: str, url: str, args: argparse.Namespace) -> int:
    """Train, and return the exit code."""
    asked = flags(
        out=home / "out",
        truth=home / "truth",
        base=ROOT / "base",
        steps=args.steps,
        limit=1 if hook == "hook" else args.steps,
        pause=0.0 if hook == "hook" else COPIED if mode == "hub" else PAUSE,
        store=url if hook == "hook" else False,
    )
    told = {**CLEAN, **QUIET, "HF_HOME": str(home / "cache"), "CKPTSYNC_NODE": "node0"}
    command = [args.python, str(SCRIPT), mode, *asked]
    with (home / "log").open("wb") as log, started(command, stdout=log, stderr=log, env=told) as p:
        return p.wait()


def _locations(url: str) -> dict[str, LocationState]:
    if not Path(url).is_dir():
        return {}
    return {s.location: s for s in read_state(create_store(url), "out").readable}


def in_store(store: Store, home: Path, wanted: set[str]) -> Iterator[str]:
    """Yield what of the store is not as the trainer wrote or held it."""
    found = {s.location: s for s in read_state(store, "out").readable}
    for location in sorted(wanted ^ found.keys()):
        yield f"{location}: {'nobody wrote that' if location in found else 'not in the store'}"
    for location in sorted(wanted & found.keys()):
        truth = home / "truth" / location
        lacking, extra, other = compared(store, found[location], file_paths(truth))
        if location == "final":  # without logs and cards
            lacking = [path for path in lacking if _is_of_model(path)]
        yield from (f"{location}/{path}: not in the store" for path in lacking)
        yield from (
            f"{location}/{path}: nobody wrote that" for path in extra if not is_beside_weights(path)
        )
        yield from (f"{location}/{path}: not the bytes that the trainer wrote" for path in other)
        yield from _merged(store, found[location], home)


def _is_of_model(path: str) -> bool:
    name = path.rpartition("/")[2]
    return name.endswith((".safetensors", "adapter_config.json")) or name == "config.json"


def _merged(store: Store, seen: LocationState, home: Path) -> Iterator[str]:
    """Yield each set of weights that does not merge to what the trainer held at that save."""
    step = seen.location.rpartition("-")[2]
    for held in sorted((home / "truth" / "held" / step).glob("*.safetensors")):
        fetched = home / "fetched" / seen.location / held.stem
        shutil.rmtree(fetched, ignore_errors=True)
        for path, where in seen.files.items():
            here = fetched / "stored" / path
            here.parent.mkdir(parents=True, exist_ok=True)
            here.write_bytes(read_all(store, where[0].name))
            os.utime(here, ns=(where[0].entry.mtime, where[0].entry.mtime))
        source = None if held.stem == "model" else "peft:."
        if (fetched / "stored" / held.stem).is_dir():
            source = held.stem
        options = MergeOptions(source=source)
        try:
            merge_local([fetched / "stored"], fetched / "merged", options)
        except CkptsyncError as e:
            yield f"{seen.location}: {held.stem}: cannot be merged: {e}"
            continue
        if bits(*(fetched / "merged").glob("*.safetensors")) != bits(held):
            yield f"{seen.location}: {held.stem}: not the weights that the trainer held"


def _said(home: Path, url: str, hook: str, steps: int) -> Iterator[str]:
    """Yield what the training's log lacks with the hook, and what a worker missed."""
    if hook == "hook":
        told = f"uploaded to {url}: {steps} saves of {home / 'out'} and the final model"
        if told not in (home / "log").read_text("utf-8", "replace"):
            yield f"the log does not say: {told}"
    logs = (home / "worker.log", home / "out" / "_ckptsync" / "embedded.log")
    for log in (log for log in logs if log.exists()):
        for line in log.read_text("utf-8", "replace").splitlines():
            is_lost = '"phase": "missed"' in line or '"phase": "lost"' in line
            if is_lost and '"checkpoint": "checkpoint-' in line:  # a copy for the Hub may be
                yield f"{log.name}: {line[:200]}"


if __name__ == "__main__":
    end_by_signal(main)
