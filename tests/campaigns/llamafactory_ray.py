"""A small Ray cluster for one command, of the Python that runs LLaMA-Factory.

    llamafactory_ray.py COMMAND...

LLaMA-Factory 0.9.5 asks for 10 CPUs for each device of the cluster, and without GPUs every CPU is a
device.  So the cluster has two at first, and gets twenty more once what was asked for two of them
is waiting: its command runs as it was released.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import ray
from ray.cluster_utils import Cluster
from ray.util import placement_group_table


def main() -> int:
    """The command's exit code."""
    cluster = Cluster(
        initialize_head=True,
        connect=True,
        head_node_args={"num_cpus": 2, "include_dashboard": False},
    )
    # without a dashboard LLaMA-Factory cannot ask for it
    where = f"master_addr={cluster.address.rpartition(':')[0]}"
    trainer = subprocess.Popen(
        [*sys.argv[1:], where], env={**os.environ, "RAY_ADDRESS": cluster.address}
    )
    try:
        while trainer.poll() is None and not placement_group_table():
            time.sleep(0.2)
        cluster.add_node(num_cpus=20)
        return trainer.wait()
    finally:
        trainer.kill()
        trainer.wait()
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main())
