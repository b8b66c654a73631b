"""As LLaMA-Factory 0.9.5's, with two processes one after the other instead of torchrun's."""

from __future__ import annotations

import os
import subprocess
import sys


def launch() -> None:
    command = sys.argv.pop(1)
    if command == "train" and os.environ.get("FORCE_TORCHRUN"):
        for rank in ("0", "1"):
            told = {**os.environ, "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
            subprocess.run([sys.executable, __file__, *sys.argv[1:]], env=told, check=True)
        sys.exit(0)
    elif command == "train":
        from llamafactory.train.tuner import run_exp

        run_exp()
    else:
        print(f"{command}, of its own")


if __name__ == "__main__":
    from llamafactory.train.tuner import run_exp

    run_exp()
