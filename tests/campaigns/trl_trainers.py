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
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ckptsync.stores.opening import create_store
from tests.campaigns.campaign import (
    CLEAN,
    arguments,
    end_by_signal,
    flags,
    started,
    verdict,
    working,
)
from tests.campaigns.cluster import Service
from tests.campaigns.judged import in_store, locations, merged_otherwise
from tests.campaigns.two_nodes import PROJECT, QUIET, default_python, has_modules
from tests.support.vector import ROOT
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
    parser.add_argument(
        "--python", default=default_python("TRL"), help="that has TRL, and ckptsync"
    )
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
            (home / "out").mkdir()
            unmarked = "2s" if mode == "hub" else "10s"
            told = {"runs": [str(home / "out")], "unmarked": unmarked, **WORKER}
            worker = Service(home, "worker", "worker", store={"url": url}, worker=told)
            worker.start()
            stack.callback(worker.kill)
        code = _trained(home, mode, hook, url, args)
        took, begun = time.monotonic() - begun, time.monotonic()
        wanted = {*(f"checkpoint-{step}" for step in range(1, args.steps + 1)), "final"}
        until(lambda: locations(url, "out").keys() >= wanted, PATIENCE if not code else 1.0, 0.5)
        waited = time.monotonic() - begun
        if hook == "none":
            time.sleep(2 * float(WORKER["quiet"][:-1]))  # for what should not come
    wrong = [f"the training ended with {code}; see {home / 'log'}"] if code else []
    wrong += [*judged(home, wanted), *_said(home, url, hook, args.steps)]
    print(
        f"{home.name}: {len(wrong)} wrong; trained {took:.0f} s, stored {waited:.0f} s later",
        flush=True,
    )
    verdict(f"{home.name}: {line}" for line in wrong)
    return wrong


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
    told = {"PYTHONPATH": str(PROJECT), "HF_HOME": str(home / "cache"), "CKPTSYNC_NODE": "node0"}
    command, env = [args.python, str(SCRIPT), mode, *asked], {**CLEAN, **QUIET, **told}
    with (home / "log").open("wb") as log, started(command, stdout=log, stderr=log, env=env) as p:
        return p.wait()


def judged(home: Path, wanted: set[str]) -> Iterator[str]:
    """Yield what of the store is not as the trainer wrote or held it."""
    url = str(home / "store")
    truths = {name: home / "truth" / name for name in wanted}
    yield from in_store(url, "out", truths, _is_of_model, adds_configs=True)
    for name, seen in sorted(locations(url, "out").items()):
        for held in sorted((home / "truth/held" / name.rpartition("-")[2]).glob("*.safetensors")):
            has_directory = any(path.startswith(f"{held.stem}/") for path in seen.files)
            source = held.stem if has_directory else None if held.stem == "model" else "peft:."
            fetched = home / "fetched" / name / held.stem
            how = merged_otherwise(create_store(url), seen, fetched, held, source=source)
            yield from [f"{name}: {held.stem}: {how}"] * bool(how)


def _is_of_model(path: str) -> bool:
    name = path.rpartition("/")[2]
    return name.endswith((".safetensors", "adapter_config.json")) or name == "config.json"


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
