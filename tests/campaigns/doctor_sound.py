"""Nodes that are sound, each in its own way: nothing is to be found on them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from tests.campaigns.doctor_faults import LOOPBACK, THREE, USER, Planted
from tests.campaigns.doctor_pair import Told
from tests.campaigns.nodes import TRAIN, Network


def sound(
    setup: str = "",
    *,
    everywhere: Mapping[str, str | None] | None = None,
    nodes: int = 2,
    on: int | None = None,
    needs: str = "",
    **unlike: object,
) -> Planted:
    """Nodes that are unlike the plain ones, and well."""
    return Planted(frozenset(), Told(setup, **unlike), on, nodes, everywhere or {}, needs=needs)  # type: ignore[arg-type]


@contextlib.contextmanager
def numbered(network: Network, _node: int) -> Iterator[None]:
    """All nodes have an address of IPv6, too."""
    for how in ("add", "del"):
        for n, node in enumerate(network.nodes):
            node.ip(
                "-6",
                "address",
                how,
                f"fd00::{n + 1}/64",
                "dev",
                TRAIN,
                *(["nodad"] if how == "add" else []),
            )
        if how == "add":
            yield


_NOTHING = dict.fromkeys(("NNODES", "NODE_RANK", "NPROC_PER_NODE", "MASTER_ADDR", "MASTER_PORT"))
SOUND: Mapping[str, Planted] = {
    "plain": sound(),
    "three-nodes": sound(everywhere=THREE, nodes=3),
    "no-variables": sound(everywhere=_NOTHING),
    "no-gpus": sound(gpus=0, driver="", everywhere={"NPROC_PER_NODE": "2"}),
    "no-gpus-by-slurm": sound(
        gpus=0, driver="", everywhere={"CUDA_VISIBLE_DEVICES": "NoDevFiles", "SLURM_JOB_ID": "7"}
    ),
    "half-of-the-gpus": sound(gpus=4, everywhere={"CUDA_VISIBLE_DEVICES": "2,3"}),
    "master-by-name": sound(everywhere={"MASTER_ADDR": "n0"}),
    "master-by-name-here-and-address-there": sound(on=1, environment={"MASTER_ADDR": "n0.cluster"}),
    "debian": sound(LOOPBACK, on=0, everywhere={"MASTER_ADDR": "n0"}),
    "ipv6": Planted(frozenset(), around=numbered, everywhere={"MASTER_ADDR": "fd00::1"}),
    "elastic": sound(everywhere={"NNODES": "1:4", "NODE_RANK": None, "RDZV_ID": "job"}),
    "exclusion": sound(everywhere={"NCCL_SOCKET_IFNAME": "^lo,docker"}),
    "prefix": sound(everywhere={"NCCL_SOCKET_IFNAME": "tra"}),
    "switches": sound(
        on=1, environment={"FORCE_TORCHRUN": "true"}, everywhere={"FORCE_TORCHRUN": "1"}
    ),
    "logs-differ": sound(on=1, environment={"NCCL_DEBUG": "INFO", "NCCL_HOSTID": "n1"}),
    "torch-of-another-index": sound(on=1, versions={"torch": "2.8.0+cu128"}),
    "a-patch-of-python": sound(
        python=(
            '#!/bin/sh\n"{python}" "$@" | sed \'s/"python": "\\(3[.][0-9]*\\)[.][0-9]*/"python":'
            " \"\\1.99/'\n"
        ),
        on=1,
    ),
    "a-banner": sound(python='#!/bin/sh\necho welcome\n"{python}" "$@"\n'),
    "another-locale": sound(
        everywhere={
            "LC_ALL": "C",
            "LANG": "C",
            "LANGUAGE": "de",
            "TZ": "Asia/Shanghai",
            "PYTHONUTF8": "0",
        }
    ),
    "no-home": sound(everywhere={"HOME": None}),
    "no-names": sound("mount --bind /dev/null /etc/passwd"),
    "no-fstab": sound("mount --bind /dev/null /etc/fstab"),
    "no-machine-id": sound("mount --bind /dev/null /etc/machine-id"),
    "a-container": sound(within=("unshare", "--pid", "--fork", "--mount-proc")),
    "not-root": sound(needs="users", within=USER),
    "root-made-it-for-all": sound("rm -rf {home}/out/run/*; chmod 1777 {home}/out/run"),
    "nothing-saved-yet": sound("rm -rf {home}/out/run/*"),
    "nothing-there-yet": sound("rm -rf {home}/out/run", training={"output_dir": "{home}/soon/run"}),
    "one-shared-disk": sound("mount --bind {home}/n0/out {home}/out"),
    "bound-over-its-own-disk": sound(
        "echo '{home}/{node}/out {home}/out none bind 0 0' > {home}/fstab"
    ),
    "automounted": sound("echo 'head:/srv /elsewhere nfs4 noauto 0 0' > {home}/fstab"),
    "little-memory": sound(within=("prlimit", "--nproc=400", "--as=4000000000")),
    "a-proxy-and-a-job": sound(
        everywhere={
            "http_proxy": "http://me:s3cret@proxy:1",
            "SLURM_JOB_ID": "9",
            "SLURM_PROCID": "0",
        }
    ),
    "a-store-not-there-yet": sound("rm -rf {home}/shared/store", on=0),
    "names-with-blanks": sound(
        "mkdir -p '{home}/out/my run/checkpoint-1'; echo x > '{home}/out/my"
        " run/checkpoint-1/model.safetensors'"
    ),
}
