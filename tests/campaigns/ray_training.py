"""A user's Ray Train script: the Hugging Face Trainer on two Ray workers of this machine, and
nothing of ckptsync in it.

    python -m tests.campaigns.ray_training MODE --out DIR --truth DIR --base DIR [--kill]

What each Ray worker saves is `tests.campaigns.hf_training`'s.  ``--kill``: the second worker is
killed in its last step but one, and the group begins again in the directory ``<out>1``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tests.campaigns.witness import training_parser


def main() -> None:
    """Train; raises what Ray raises."""
    parser = training_parser(__doc__, ("ddp", "fsdp2"))
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--setup", action="store_true", help="the hook comes by Ray's own")
    args = parser.parse_args()
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    setup = {"worker_process_setup_hook": "ckptsync.hooks.ray.setup_worker"}
    runtime = setup if args.setup else {}
    ray.init(num_cpus=2, include_dashboard=False, logging_level="WARNING", runtime_env=runtime)
    if args.kill:
        threading.Thread(target=kill, args=(args.truth / "0", args.steps - 1), daemon=True).start()
    failures = FailureConfig(max_failures=1 if args.kill else 0)
    TorchTrainer(
        train,
        train_loop_config=vars(args),
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(
            name="run", storage_path=str(args.truth / "results"), failure_config=failures
        ),
    ).fit()


def kill(truth: Path, step: int) -> None:
    """Kill the second worker when it begins a step."""
    events = truth / "events-1.jsonl"
    while True:
        lines = events.read_text().splitlines() if events.exists() else []
        if any(f'"begin", "step": {step},' in line for line in lines):
            os.kill(int((truth / "pid").read_text()), signal.SIGKILL)
            return
        time.sleep(0.05)


def train(config: dict[str, Any]) -> None:
    """On each Ray worker."""
    rank = int(os.environ["RANK"])
    life = sum(1 for _ in Path(config["truth"]).glob(f"*/begun-{rank}"))
    truth = Path(config["truth"]) / str(life)
    truth.mkdir(parents=True, exist_ok=True)
    (truth / f"begun-{rank}").touch()
    if rank == 1:
        (truth / "pid").write_text(json.dumps(os.getpid()))
    told = {"out": f"{config['out']}{life or ''}", "truth": truth}
    told |= {name: config[name] for name in ("base", "steps", "limit")}
    told |= {"pause": 0.5 if config["kill"] else 0.0}
    words = (word for name, value in told.items() for word in (f"--{name}", str(value)))
    sys.argv = ["hf_training", config["mode"], "--no-truth", *words]
    from tests.campaigns import hf_training

    hf_training.trained()


if __name__ == "__main__":
    main()
