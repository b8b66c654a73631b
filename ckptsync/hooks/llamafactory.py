"""``ckptsync-llamafactory train x.yaml``: ``llamafactory-cli`` with the hook in every process.

LLaMA-Factory's own command reads its variables, and trains here, or lets torchrun start its
launcher's file as every rank; its options take no callback.  Here that file is this module, and the
function that trains gets the callback: torchrun's options stay LLaMA-Factory's own (0.9.2 to
0.9.5).  Another torchrun starts this module, too: ``torchrun … -m ckptsync.hooks.llamafactory train
x.yaml``.  Under ``USE_RAY=1`` the callback travels to the workers with the function's arguments.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

_V1 = (
    "ckptsync-llamafactory: error: USE_V1=1: LLaMA-Factory's v1 tells no callback of its saves\n"
    "ckptsync-llamafactory: hint: use llamafactory-cli, and let a worker watch the output directory"
)


def main() -> None:
    """Do what ``llamafactory-cli`` does, with the hook.

    Raises SystemExit with code 5 for v1, and 2 without LLaMA-Factory.
    """
    if os.environ.get("USE_V1", "").lower() in ("1", "true", "y"):
        sys.stderr.write(_V1 + "\n")
        sys.exit(5)
    try:
        from llamafactory.train import tuner  # noqa: PLC0415  # long to import
    except ModuleNotFoundError as e:
        if e.name != "llamafactory":
            raise
        sys.stderr.write(
            "ckptsync-llamafactory: error: LLaMA-Factory is not installed for"
            f" {sys.executable}\nckptsync-llamafactory: hint: install both into one environment\n"
        )
        sys.exit(2)
    from ckptsync.hooks.hf import DefaultCallback  # noqa: PLC0415  # it needs transformers

    train = tuner.run_exp = partial(tuner.run_exp, callbacks=[DefaultCallback()])
    if "LOCAL_RANK" in os.environ:  # torchrun's; LLaMA-Factory leaves `train` out
        words = [w for w in sys.argv[1:] if not w.startswith(("--local_rank", "--local-rank"))]
        sys.argv[1:] = words[words[:1] == ["train"] :]
        train()
    else:
        from llamafactory import cli, launcher  # noqa: PLC0415

        launcher.__file__ = __file__
        cli.main()


if __name__ == "__main__":
    # torchrun puts this directory first, and its `ray.py` would be imported instead of Ray
    sys.path[:] = [path for path in sys.path if path != str(Path(__file__).parent)]
    main()
