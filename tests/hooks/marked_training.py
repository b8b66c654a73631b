"""Two ranks that save with torch's distributed checkpoints and mark what they saved; run by
torchrun.

    marked_training.py DIR

    step-1   both ranks save and mark
    step-2   rank 0 marks long before rank 1 has written its part

What each call returned, and which pins there were then, is in DIR/said-R.jsonl.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckptsync import mark_saved


def main(out: Path) -> None:
    """One rank."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    weights = distribute_tensor(
        torch.arange(64.0).reshape(8, 8), init_device_mesh("cpu", (2,)), [Shard(0)]
    )
    with (out / f"said-{rank}.jsonl").open("a") as log:

        def mark(step: int) -> None:
            done = mark_saved(out / f"step-{step}", strict=True)
            pins = sorted(p.name for p in (out / "_ckptsync" / "pins").glob("[!.]*"))
            print(json.dumps([step, done, pins]), file=log, flush=True)

        dcp.save({"weights": weights}, checkpoint_id=str(out / "step-1"))  # type: ignore[attr-defined]
        mark(1)
        dist.barrier()
        if rank == 0:
            ours = shutil.ignore_patterns("__1*")
            shutil.copytree(out / "step-1", out / "step-2", ignore=ours)
            mark(2)
        dist.barrier()
        if rank == 1:
            shutil.copy(out / "step-1" / "__1_0.distcp", out / "step-2")
            mark(2)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
