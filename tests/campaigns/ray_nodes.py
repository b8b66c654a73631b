"""A merge over S3 by two Ray nodes, of which one is killed in the middle: the model is the one that
a single process makes, byte for byte.

    python -m tests.campaigns.ray_nodes --rounds 3

Both nodes are Ray's own processes on this machine, started as `ray start` starts them, each with
one core; killing one kills its raylet and all its workers (SIGKILL).  The sources and the
destination are in a bucket.  Needs Ray: pip install 'ckptsync[ray]'.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ckptsync.formats.safetensors import encode_header
from ckptsync.stores.contract import Store, read_all
from ckptsync.stores.opening import open_any
from tests.campaigns.campaign import CKPTSYNC, arguments, flags
from tests.campaigns.nodes import kill_tree
from tests.support.seaweedfs import weed
from tests.support.waiting import until

MIB = 1 << 20
MODEL_MIB = 384  # of the model that is merged, in fp32
AFTER = 2  # output files, after which one node is killed
PATIENCE = 300.0


def main(argv: Sequence[str] | None = None) -> int:
    """0 if every model was the right one, 1 if not."""
    args = _arguments().parse_args(argv)
    url = f"s3://{weed().bucket()}"
    store = open_any(url, weed().options())
    _fill(store, MODEL_MIB)
    wanted = _made(store, url, "local", _merge(args, url, "local"))
    wrong = 0
    for n in range(args.rounds):
        begun = time.monotonic()
        found, told = _interrupted(
            args, store, url, f"ray-{n}", alone=n + 1 == args.rounds and args.rounds > 1
        )
        is_same = found == wanted
        wrong += not is_same
        print(
            f"round {n + 1}: {told}; {'the same' if is_same else 'OTHER'} {len(found)} files,"
            f" {time.monotonic() - begun:.0f} s",
            flush=True,
        )
    return 1 if wrong else 0


def _arguments() -> argparse.ArgumentParser:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="the last of several loses no node")
    return parser


def _fill(store: Store, mib: int) -> None:
    """A model in fp32 of several files, with numbers that a cast to bf16 must round."""
    tensor = os.urandom(4 * MIB)
    for number in range(4):
        rows = [(f"layers.{number}.{n}.weight", "F32", (1024, 1024)) for n in range(mib // 16)]
        chunks: Iterator[bytes] = (tensor[n:] + tensor[:n] for n in range(len(rows)))
        store.write(
            f"model/model-{number + 1:05d}-of-00004.safetensors", [encode_header(rows), *chunks]
        )
    names = {
        f"layers.{k}.{n}.weight": f"model-{k + 1:05d}-of-00004.safetensors"
        for k in range(4)
        for n in range(mib // 16)
    }
    store.write(
        "model/model.safetensors.index.json",
        [json.dumps({"metadata": {}, "weight_map": names}).encode()],
    )
    store.write("model/config.json", [b'{"model_type": "llama", "dtype": "bfloat16"}'])


def _merge(args: argparse.Namespace, url: str, name: str, *words: str) -> subprocess.Popen[str]:
    size = f"{max(4, MODEL_MIB // 24)}MiB"
    command = [*CKPTSYNC, "merge", f"{url}/model", f"{url}/{name}", *words]
    told = flags(dtype="bf16", max_shard_size=size, json=True)
    env = {**os.environ, "CKPTSYNC_STORAGE_OPTIONS": json.dumps(weed().options())}
    pipe = subprocess.PIPE
    return subprocess.Popen([*command, *told], env=env, stdout=pipe, stderr=pipe, text=True)


def _made(store: Store, url: str, name: str, merge: subprocess.Popen[str]) -> dict[str, str]:
    """Name → SHA-256 of every file that a merge has made, once it has ended."""
    _, said = merge.communicate(timeout=PATIENCE)
    assert merge.returncode == 0, f"{url}/{name}: {merge.returncode}: {said}"
    return {
        e.name.removeprefix(name): hashlib.sha256(read_all(store, e.name)).hexdigest()
        for e in store.names(f"{name}/")
    }


def _interrupted(
    args: argparse.Namespace, store: Store, url: str, name: str, *, alone: bool
) -> tuple[dict[str, str], str]:
    """What a merge on two nodes has made, one of which was killed when some files were there.

    And what happened.
    """
    from ray.cluster_utils import Cluster  # type: ignore[import-not-found,unused-ignore]

    cluster: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        victim = cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        merge = _merge(args, url, name, "--engine", "ray", "--ray-address", cluster.address)
        try:
            told = (
                "no node was lost"
                if alone
                else _kill(cluster, victim, lambda: _count(store, name) >= AFTER, merge)
            )
            return _made(store, url, name, merge), told
        finally:
            kill_tree(merge)  # type: ignore[arg-type]
    finally:
        cluster.shutdown()


def _kill(
    cluster: Any, victim: Any, is_time: Callable[[], bool], merge: subprocess.Popen[str]
) -> str:
    until(lambda: is_time() or merge.poll() is not None, PATIENCE)
    is_on = merge.poll() is None
    cluster.remove_node(victim, allow_graceful=False)
    return (
        "one of two nodes was killed in the middle" if is_on else "a node was killed, but too late"
    )


def _count(store: Store, name: str) -> int:
    return sum(e.name.endswith(".safetensors") for e in store.names(f"{name}/"))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="ckptsync-ray-") as home:
        os.environ.setdefault("RAY_TMPDIR", str(Path(home)))
        sys.exit(main())
