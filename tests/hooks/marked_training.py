"""Two ranks that save with torch's distributed checkpoints and mark what they saved; run by
torchrun.

    marked_training.py DIR

    step-1   both ranks save and mark
    step-2   rank 0 marks long before rank 1 has written its part
    step-3   the same, and rank 1 dies before it has
    lonely/step-1   rank 1 has nothing of it on its own disk, and marks it all the same
    ahead/step-1, ahead/step-2   rank 0 writes for both; rank 1 marks the second before there is
                                 anything of it
    silent/step-1, silent/step-2   rank 1 never marks anything there
    node0/apart, node1/apart   each rank has a disk of its own; step-1 is deleted before step-2 is
                               written

What each call returned, and which pins there were then, is in DIR/said-R.jsonl.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
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

        def ahead() -> None:
            for name in ("ahead/step-1", "ahead/step-2"):
                if rank == 1 and name == "ahead/step-2":
                    mark_saved(out / name, strict=True)
                dist.barrier()
                if rank == 0:
                    shutil.copytree(out / "step-1", out / name)
                    mark_saved(out / name, strict=True)
                dist.barrier()
                if rank == 1 and name == "ahead/step-1":
                    mark_saved(out / name, strict=True)

        def elsewhere() -> None:
            for name in ("lonely/step-1", "silent/step-1", "silent/step-2"):
                if rank == 0:
                    shutil.copytree(out / "step-1", out / name)
            if rank == 1:
                mark_saved(out / "node1" / "lonely" / "step-1", strict=True)
            dist.barrier()
            if rank == 0:
                for name in ("lonely/step-1", "silent/step-1", "silent/step-2"):
                    mark_saved(out / name, strict=True)

        dcp.save({"weights": weights}, checkpoint_id=str(out / "step-1"))  # type: ignore[attr-defined]
        mark(1)
        ahead()
        elsewhere()
        for name in ("step-1", "step-2"):
            mine = out / f"node{rank}" / "apart"
            shutil.rmtree(mine / "step-1", ignore_errors=True)
            shutil.copytree(out / "step-1", mine / name)
            mark_saved(mine / name, strict=True)
            dist.barrier()
        for step in (2, 3):
            dist.barrier()
            if rank == 0:
                shutil.copytree(
                    out / "step-1",
                    out / f"step-{step}",
                    ignore=lambda _, names: [n for n in names if n.startswith("__1")],
                )
                mark(step)
            dist.barrier()
            if rank == 1 and step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == 1:
                shutil.copy(out / "step-1" / "__1_0.distcp", out / f"step-{step}")
                mark(step)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
