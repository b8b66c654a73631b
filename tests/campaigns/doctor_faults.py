"""What is planted on a node, and by which kinds of docs/doctor.md it is to be found.

And nodes that are sound, each in its own way: nothing is to be found on them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.campaigns.doctor_pair import Told
from tests.campaigns.nodes import TRAIN, Network, has_user_namespaces

Around = Callable[[Network, int], AbstractContextManager[object]]


def nothing(_network: Network, _node: int) -> AbstractContextManager[object]:
    """Nothing is around a node."""
    return nullcontext()


@dataclass(frozen=True, slots=True)
class Planted:
    """``kinds``: what has to be found, and nothing else.

    ``on``: the node that is unlike, ``None`` for all; ``everywhere``: variables of all nodes.

    ``around``: what is there while a node is asked; ``is_compared``: whether who is no node finds
    the same from what both have said.
    """

    kinds: frozenset[str]
    told: Told
    on: int | None
    nodes: int
    everywhere: Mapping[str, str | None]
    around: Around
    is_compared: bool
    needs: str

    def missing(self) -> str:
        """Why it cannot be planted here; empty if it can."""
        if (
            self.needs == "links"
            and Path("/proc/sys/fs/protected_hardlinks").read_text().strip() != "1"
        ):
            return "anybody may link anything here"
        if self.needs == "fuse" and not os.access("/dev/fuse", os.R_OK | os.W_OK):
            return "no FUSE here"
        if self.needs == "users" and not has_user_namespaces():
            return "no user namespaces here"
        return f"there is no {self.needs}" if self.needs == "cc" and not shutil.which("cc") else ""


def told(
    kinds: str,
    setup: str = "",
    *,
    on: int | None = 1,
    nodes: int = 2,
    everywhere: Mapping[str, str | None] | None = None,
    around: Around = nothing,
    is_compared: bool = True,
    needs: str = "",
    **unlike: object,
) -> Planted:
    """Something that a node has, or is; the keywords that `Planted` does not have are `Told`'s."""
    how = Told(setup, **unlike)  # type: ignore[arg-type]
    found = frozenset(kinds.split())
    return Planted(found, how, on, nodes, everywhere or {}, around, is_compared, needs)


def variables(kinds: str, **said: str | None) -> Planted:
    """Something that the second node's environment says."""
    return told(kinds, environment=said)


def library(kinds: str, **versions: str | None) -> Planted:
    """Something that is installed on the second node alone, or otherwise."""
    return told(kinds, versions={name.replace("_", "-"): v for name, v in versions.items()})


def shifted(seconds: int) -> Planted:
    """The second node's clock is ahead."""
    source = Path(__file__).with_name("shifted_clock.c")
    setup = f"""cc -shared -fPIC -o {{home}}/shifted.so {source}
python3 -c 'import struct; open("{{home}}/shift", "wb").write(struct.pack("=q", {seconds}))'"""
    said = {"SHIFTED_CLOCK": "{home}/shift"}
    return told(
        "clock", setup, needs="cc", environment=said, within=("env", "LD_PRELOAD={home}/shifted.so")
    )


@contextlib.contextmanager
def deaf(network: Network, node: int) -> Iterator[None]:
    """What the second node sends to node 0 gets lost."""
    if node == 1:
        network.hub.ip("link", "set", "t0", "down")
    try:
        yield
    finally:
        network.hub.ip("link", "set", "t0", "up")


@contextlib.contextmanager
def numbered(network: Network, _node: int) -> Iterator[None]:
    """All nodes have an address of IPv6, too."""
    for how in ("add", "del"):
        for n, node in enumerate(network.nodes):
            more = ["nodad"] if how == "add" else []
            node.ip("-6", "address", how, f"fd00::{n + 1}/64", "dev", TRAIN, *more)
        if how == "add":
            yield


_AS_NFS = """sed 's#\\( {{home}}/{what} .*\\) - [^ ]* [^ ]* \\(.*\\)$#\\1 - nfs4 head:/out \
\\2{more}#' /proc/self/mountinfo > {{home}}/table
mount --bind {{home}}/table /proc/$$/mountinfo"""


def nfs(kinds: str, what: str = "out", more: str = "", on: int | None = 1) -> Planted:
    """A mount that the system calls NFS; ``more`` ends its options."""
    return told(kinds, _AS_NFS.format(what=what, more=more), on=on)


_REFUSE = """printf '#include <errno.h>\\nint link(const char *a, const char *b) { errno = EPERM; \
return -1; }\\nint linkat(int a, const char *b, int c, const char *d, int e) { errno = EPERM; \
return -1; }\\n' > {home}/refuse.c
cc -shared -fPIC -o {home}/refuse.so {home}/refuse.c"""
_OTHERS = "chown -R 12345 {home}/out/run/checkpoint-1; chmod %s {home}/out/run/checkpoint-1/*"
# no root, and yet the owner of what root has made
USER = ("unshare", "--user", "--map-user=1000", "--map-group=1000")
_HOLDS = (
    "import os, socket, sys; s = socket.create_server(('0.0.0.0', 29500)); s.set_inheritable(True);"
    " os.execvp(sys.argv[1], sys.argv[1:])"
)
LOOPBACK = (
    "sed 's/.* {node} .*/127.0.1.1 {node}/' {home}/hosts > {home}/{node}/hosts; mount --bind"
    " {home}/{node}/hosts /etc/hosts"
)
THREE = {"NNODES": "3"}
_S3 = {
    "url": "s3://bucket/x",
    "options": {"endpoint_url": "http://127.0.0.1:9", "key": "k", "secret": "s3cret"},
}
_OLDER = '#!/bin/sh\n"{python}" "$@" | sed \'s/"python": "3[.][0-9]*[.]/"python": "3.99./\'\n'

ONE_NODE = {
    "configuration": told("configuration", config={"verify": {"level": "much"}}, is_compared=False),
    "runs-of-one-name": told(
        "run-left-out output-differs",
        "mkdir -p {home}/out/a/x {home}/out/b/x",
        config={"worker": {"runs": [{"path": "{home}/out/a/x"}, {"path": "{home}/out/b/x"}]}},
    ),
    "output-parent": told(
        "output-absent",
        config={"worker": {"runs": [{"path": "{home}/out/*"}, {"path": "/no/such/location/*"}]}},
    ),
    "store-gone": told(
        "store-absent",
        "mkdir -p {home}/out/run/_ckptsync; echo {home}/shared/store >"
        " {home}/out/run/_ckptsync/store; mount -t tmpfs none {home}/shared",
        is_compared=False,
    ),
    "store-not-mounted": told(
        "not-mounted", "echo 'head:/srv {home}/shared nfs4 hard 0 0' > {home}/fstab"
    ),
    "store-read-only": told(
        "store-create",
        "mount --bind {home}/shared/store {home}/shared/store; mount -o remount,ro,bind"
        " {home}/shared/store",
        is_compared=False,
    ),
    "store-full": told(
        "store-create disk-full",
        "mount -t tmpfs -o size=512k,nr_inodes=500 tmpfs {home}/shared/store; cat /dev/zero >"
        " {home}/shared/store/x || true",
        is_compared=False,
    ),
    "store-of-no-server": told("store-unreachable", config={"store": _S3}, is_compared=False),
    "store-dead": told(
        "no-answer",
        "exec 9<>/dev/fuse; mount -i -t fuse -o fd=9,rootmode=40000,user_id=0,group_id=0 dead"
        " {home}/shared/store",
        is_compared=False,
        needs="fuse",
    ),
    "store-not-writable": told(
        "store-create",
        "chmod 555 {home}/shared/store",
        within=USER,
        is_compared=False,
        needs="users",
    ),
    "store-not-listable": told(
        "store-list", "chmod 311 {home}/shared/store", within=USER, is_compared=False, needs="users"
    ),
    "spool-of-another-user": told(
        "output-not-writable",
        "mkdir {home}/out/run/_ckptsync; chown 12345 {home}/out/run/_ckptsync",
        needs="users",
        within=USER,
    ),
    "umask": told("umask", "chmod 2775 {home}/shared/store; umask 077"),
    "file-of-another-user": told("unreadable", _OTHERS % "600", needs="users", within=USER),
    "link-of-another-user": told("unlinkable", _OTHERS % "644", needs="links", within=USER),
    "directory-of-another-user": told(
        "other-user output-not-writable run-left-out",
        "rm -rf {home}/out/run/*; chown 12345 {home}/out/run",
        needs="users",
        within=USER,
    ),
    "not-to-be-listed": told(
        "other-user output-not-writable output-unreadable run-left-out",
        "chown 12345 {home}/out/run; chmod 711 {home}/out/run",
        needs="users",
        within=USER,
    ),
    "asked-by-root": told(
        "asked-as-root",
        "chown -R 12345 {home}/out/run; chmod a+rx {home} {home}/out; chmod -R a+rwX {home}/shared",
    ),
    "output-read-only": told(
        "output-not-writable",
        "mount --bind {home}/out {home}/out; mount -o remount,ro,bind {home}/out",
    ),
    "spool-elsewhere": told(
        "links-cross",
        "mkdir -p {home}/out/run/_ckptsync; mount -t tmpfs none {home}/out/run/_ckptsync",
    ),
    "no-links": told(
        "no-links", _REFUSE, needs="cc", within=("env", "LD_PRELOAD={home}/refuse.so")
    ),
    "disk-for-two": told(
        "disk-full",
        "mount -t tmpfs -o size=300m none {home}/out; mkdir -p {home}/out/run/checkpoint-1; head -c"
        " 120m /dev/zero > {home}/out/run/checkpoint-1/model.safetensors",
    ),
    "inodes": told(
        "inodes", "mount -t tmpfs -o size=1g,nr_inodes=50 none {home}/out; mkdir {home}/out/run"
    ),
    "nfs-soft": nfs("nfs-soft no-events", more=",soft", on=None),
    "nfs-late": nfs("late-names no-events", more=",actimeo=600", on=None),
    "few-files": told("few-files", "ulimit -n 512"),
    "small-shm": told("small-shm", "mount -t tmpfs -o size=64m none /dev/shm"),
    "python": told("python", python="#!/bin/sh\nexit 3\n", is_compared=False),
    "no-torch": library("no-torch versions-differ", torch=None),
    "clock-5s": shifted(5),
    "clock-a-minute-behind": shifted(-60),
    "clock-two-days": shifted(2 * 86400),
    "clock-years-behind": shifted(-9 * 365 * 86400),
    "save-on-each-node": told(
        "save-on-each-node versions-differ",
        versions={"transformers": "5.15.1"},
        training={"save_on_each_node": True},
    ),
    "ray-destroys-twice": told(
        "ray-destroys-twice", on=None, versions={"llamafactory": "0.9.2", "ray": "2.54.0"}
    ),
    "ray-cpus": told(
        "ray-cpus",
        versions={"llamafactory": "0.9.5"},
        gpus=900,
        on=None,
        everywhere={"USE_RAY": "1"},
    ),
    "zero3-no-model": told(
        "zero3-no-model", training={"deepspeed": {"zero_optimization": {"stage": 3}}}
    ),
    "output-relative": told(
        "output-relative output-differs run-left-out",
        training={"output_dir": "saves/x", "ray_run_name": "x"},
    ),
    "gpus-too-few": variables("gpus-too-few", CUDA_VISIBLE_DEVICES="0"),
    "gpus-not-there": variables("gpus-not-there gpus-too-few", CUDA_VISIBLE_DEVICES="0,7"),
    "gpus-all": variables("gpus-not-there gpus-too-few gpus-on-some", CUDA_VISIBLE_DEVICES="all"),
    "driver-too-old": told("driver-too-old", driver_cuda=11080, needs="cc"),
    "interface-missing": variables("interface-missing", NCCL_SOCKET_IFNAME="ib0"),
    "interface-bare": told(
        "interface-bare",
        links=(
            ("link add bare0 type veth peer name bare1", "link del bare0"),
            ("link set bare0 up", "link set lo up"),
            ("link set bare1 up", "link set lo up"),
        ),
        environment={"NCCL_SOCKET_IFNAME": "bare0"},
    ),
    "torch-for-cpus": told(
        "torch-for-cpus versions-differ", versions={"torch": "2.8.0+cpu"}, cuda=""
    ),
    "tmp-checkpoint": told("tmp-checkpoint", on=None, versions={"transformers": "4.37.2"}),
    "interface-down": told(
        "interface-down master-unreachable",
        links=((f"link set {TRAIN} down", f"link set {TRAIN} up"),),
    ),
}
BETWEEN = {
    "torch": library("versions-differ", torch="2.7.1"),
    "nccl": library("versions-differ", nvidia_nccl_cu12="2.26.2"),
    "transformers": library("versions-differ", transformers="4.56.0"),
    "deepspeed": library("versions-differ", deepspeed=None),
    "ray": library("versions-differ", ray="2.56.0"),
    "safetensors": library("versions-differ", safetensors="0.5.3"),
    "cuda": told("versions-differ", cuda="12.6"),
    "minor-python": told("versions-differ", python=_OLDER),
    "driver": told("versions-differ", driver="580.65.06"),
    "libnccl": told(
        "versions-differ",
        "mkdir {home}/nccl; touch {home}/nccl/libnccl.so.2",
        environment={"LD_PRELOAD": "{home}/nccl/libnccl.so.2"},
    ),
    "gpus-on-one-node-only": told("gpus-on-some", gpus=0, driver=""),
    "gpus-of-two-kinds": told("gpus-mixed", kind="NVIDIA L4"),
    "another-count-of-gpus": told("ranks-differ", gpus=4, everywhere={"NPROC_PER_NODE": None}),
    "nproc-on-one-only": variables("ranks-differ gpus-too-few", NPROC_PER_NODE="4"),
    "nccl-variable": variables("network-differs", NCCL_IB_DISABLE="1"),
    "gloo-variable": variables("network-differs", GLOO_TIMEOUT="9"),
    "nccl-conf": told("network-differs", "echo NCCL_PROTO=LL > {home}/{node}/.nccl.conf"),
    "nnodes": variables("launch-differs nodes-missing", NNODES="4"),
    "port": variables("launch-differs", MASTER_PORT="29501"),
    "no-rank": variables("launch-missing", NODE_RANK=None),
    "one-rank-twice": variables("node-rank master-elsewhere", NODE_RANK="0"),
    "rank-too-high": variables("node-rank", NODE_RANK="2"),
    "world-size": told("world-size", on=None, everywhere={"WORLD_SIZE": "6"}),
    "master-loopback": variables("master-loopback launch-differs", MASTER_ADDR="127.0.0.1"),
    "master-unspecified": variables("master-loopback launch-differs", MASTER_ADDR="0.0.0.0"),
    "master-unknown": variables(
        "master-unknown launch-differs", MASTER_ADDR="no.such.host.invalid"
    ),
    "port-taken": told("port-taken", on=0, within=("python3", "-c", _HOLDS)),
    "master-on-the-other": told("master-elsewhere", on=None, everywhere={"MASTER_ADDR": "n1"}),
    "master-behind-a-firewall": told("master-unreachable", around=deaf),
    "interface-loopback": variables("interface-loopback", GLOO_SOCKET_IFNAME="lo"),
    "exclusion-without-lo": variables("interface-loopback", NCCL_SOCKET_IFNAME="^docker0"),
    "host-loopback": told("host-loopback", LOOPBACK, everywhere={"GLOO_SOCKET_IFNAME": None}),
    "mtu": told(
        "links-differ", links=((f"link set {TRAIN} mtu 1400", f"link set {TRAIN} mtu 1500"),)
    ),
    "one-host-name": told("identity-shared", "hostname n0"),
    "one-address": told(
        "identity-shared",
        "sed 's/.* {node} .*/198.18.1.10 {node}/' {home}/hosts > {home}/{node}/hosts; mount --bind"
        " {home}/{node}/hosts /etc/hosts",
    ),
    "one-machine-id": told("identity-shared", "mount --bind {home}/n0/machine /etc/machine-id"),
    "one-node-id": told("not-published", node="n0", is_compared=False),
    "another-output": told(
        "output-differs",
        "mkdir -p {home}/out/other/x; touch {home}/out/other/x/y",
        config={"worker": {"runs": [{"path": "{home}/out/other"}]}},
    ),
    "mounted-on-one-only": nfs("disk-differs no-events"),
    "shared-by-two-of-three": told(
        "disk-differs", "mount --bind {home}/n0/out {home}/out", nodes=3, everywhere=THREE
    ),
    "shared-and-each-saves": told(
        "disk-shared",
        "mount --bind {home}/n0/out {home}/out",
        on=None,
        training={"save_on_each_node": True},
    ),
    "model": told(
        "model-differs",
        "mkdir {home}/other; echo '{}' > {home}/other/config.json; mount --bind {home}/other"
        " {home}/model",
    ),
    "model-on-one-node-only": told("model-differs", "mv {home}/model {home}/elsewhere"),
    "two-users-of-one-disk": told(
        "users-differ run-left-out",
        "mount --bind {home}/n0/out {home}/out; chmod -R 777 {home}/n0/out",
        needs="users",
        within=USER,
    ),
    "store-on-a-disk-of-its-own": told(
        "nodes-missing",
        "mount -t tmpfs -o size=1g none {home}/shared/store; mkdir -p {home}/shared/store",
    ),
    "one-too-many": told("nodes-too-many node-rank", on=9, nodes=3),
}
FAULTS: Mapping[str, Planted] = {**ONE_NODE, **BETWEEN}


def sound(setup: str = "", *, on: int | None = None, **told_of: Any) -> Planted:
    """Nodes that are unlike the plain ones, and well."""
    return told("", setup, on=on, **told_of)


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
    "ipv6": sound(around=numbered, everywhere={"MASTER_ADDR": "fd00::1"}),
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
