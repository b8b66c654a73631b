"""A user's Ray Train script: the Hugging Face Trainer on two Ray workers, with a relative output
directory, and nothing of ckptsync in it.

    python -m tests.campaigns.ray_driver MODE --address HOST:PORT --run NAME --home DIR --base DIR
    [--steps N] [--pause S] [--failures N] [--ending raise]

What each Ray worker saves, and keeps beside it, is `tests.campaigns.hf_training`'s; a worker's node
is what CKPTSYNC_NODE says.  Each time that the worker group begins again it writes into another
directory: ``out0``, ``out1``.  ``--ending raise``: after the last save the process group is
destroyed, and an error raised, as LLaMA-Factory 0.9.2 and Ray up to 2.54 do together.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any


def main() -> int:
    """0 if Ray says that the training has ended well."""
    args = _arguments().parse_args()
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(address=args.address, log_to_driver=True, logging_level="WARNING")
    until = time.monotonic() + 120
    while sum(node["Alive"] for node in ray.nodes()) < 2 and time.monotonic() < until:
        time.sleep(0.2)
    trainer = TorchTrainer(
        train,
        train_loop_config={**vars(args), "driver": args.run},
        scaling_config=ScalingConfig(
            num_workers=2, resources_per_worker={"CPU": 1}, placement_strategy="STRICT_SPREAD"
        ),
        run_config=RunConfig(
            name=args.run,
            storage_path=str(Path(args.home) / "results"),
            failure_config=FailureConfig(max_failures=args.failures),
        ),
    )
    try:
        trainer.fit()
    except Exception as e:  # noqa: BLE001  # whatever it is, a user sees it, and the process ends with 1
        print(f"fit: {type(e).__name__}: {str(e)[-2000:]}", flush=True)
        return 1
    return 0


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode")
    for name in ("--address", "--run", "--home", "--base", "--truth"):
        parser.add_argument(name, required=True)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--failures", type=int, default=0)
    parser.add_argument("--ending", choices=("", "raise"), default="")
    return parser


def train(config: dict[str, Any]) -> None:
    """On each Ray worker."""
    home = Path(config["home"]) / os.environ["CKPTSYNC_NODE"] / "truth"
    attempt = sum(1 for _ in home.glob(f"{config['truth']}-out*"))
    truth = home / f"{config['truth']}-out{attempt}"
    truth.mkdir(parents=True)
    told = {"out": f"out{attempt}", "truth": truth} | {
        name: config[name] for name in ("base", "steps", "pause")
    }
    words = (word for name, value in told.items() for word in (f"--{name}", str(value)))
    sys.argv = ["hf_training", config["mode"], *words]
    from tests.campaigns import hf_training

    hf_training.trained()
    if config["ending"] == "raise":
        # by the last line of what was trained
        raise AssertionError("the process group was destroyed already")


if __name__ == "__main__":
    sys.exit(main())
