"""Nodes that are sound, each in its own way: nothing is to be found on them."""

from __future__ import annotations

from collections.abc import Mapping

from tests.campaigns.doctor_faults import LOOPBACK, THREE, USER, Planted
from tests.campaigns.doctor_pair import Told


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


_NOTHING = dict.fromkeys(("NNODES", "NODE_RANK", "NPROC_PER_NODE", "MASTER_ADDR", "MASTER_PORT"))
SOUND: Mapping[str, Planted] = {
    "plain": sound(),
    "three-nodes": sound(everywhere=THREE, nodes=3),
    "no-variables": sound(everywhere=_NOTHING),
    "no-gpus": sound(gpus=0, driver="", everywhere={"NPROC_PER_NODE": "2"}),
    "no-gpus-by-slurm": sound(gpus=0, driver="", everywhere={"CUDA_VISIBLE_DEVICES": "NoDevFiles", "SLURM_JOB_ID": "7"}),
    "half-of-the-gpus": sound(gpus=4, everywhere={"CUDA_VISIBLE_DEVICES": "2,3"}),
    "master-by-name": sound(everywhere={"MASTER_ADDR": "n0"}),
    "master-by-name-here-and-address-there": sound(on=1, environment={"MASTER_ADDR": "n0.cluster"}),
    "debian": sound(LOOPBACK, on=0, everywhere={"MASTER_ADDR": "n0"}),
    "elastic": sound(everywhere={"NNODES": "1:4", "NODE_RANK": None, "RDZV_ID": "job"}),
    "exclusion": sound(everywhere={"NCCL_SOCKET_IFNAME": "^lo,docker"}),
    "prefix": sound(everywhere={"NCCL_SOCKET_IFNAME": "tra"}),
    "switches": sound(on=1, environment={"FORCE_TORCHRUN": "true"}, everywhere={"FORCE_TORCHRUN": "1"}),
    "logs-differ": sound(on=1, environment={"NCCL_DEBUG": "INFO", "NCCL_HOSTID": "n1"}),
    "torch-of-another-index": sound(on=1, versions={"torch": "2.8.0+cu128"}),
    "a-patch-of-python": sound(
        python='#!/bin/sh\n"{python}" "$@" | sed \'s/"python": "\\(3[.][0-9]*\\)[.][0-9]*/"python": "\\1.99/\'\n', on=1
    ),
    "a-banner": sound(python='#!/bin/sh\necho welcome\n"{python}" "$@"\n'),
    "another-locale": sound(everywhere={"LC_ALL": "C", "LANG": "C", "LANGUAGE": "de", "TZ": "Asia/Shanghai", "PYTHONUTF8": "0"}),
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
    "bound-over-its-own-disk": sound("echo '{home}/{node}/out {home}/out none bind 0 0' > {home}/fstab"),
    "automounted": sound("echo 'head:/srv /elsewhere nfs4 noauto 0 0' > {home}/fstab"),
    "another-clock-within-a-second": sound(),
    "a-store-not-there-yet": sound("rm -rf {home}/shared/store", on=0),
    "names-with-blanks": sound(
        "mkdir -p '{home}/out/my run/checkpoint-1'; echo x > '{home}/out/my run/checkpoint-1/model.safetensors'"
    ),
}
