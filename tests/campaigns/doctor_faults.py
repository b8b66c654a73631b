"""What is planted on a node, and by which kinds of docs/doctor.md it is to be found: what only a
real machine has, such as mounts, users, clocks and networks.

And nodes that are sound, each in its own way: nothing is to be found on them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.campaigns.nodes import TRAIN, has_user_namespaces

Variables = Mapping[str, str | None]
"""``None`` takes a variable, or a library, away."""


@dataclass(frozen=True, slots=True)
class Fault:
    """How a node is unlike a sound one; ``kinds``: what has to be found, and nothing else.

    ``setup``: shell within the node, ``{home}`` is the pair's directory; ``within``: the last
    command before ours; ``python``: a wrapper around the Python that trains; ``links``: words for
    iproute2 that plant and undo, and where (``node``, ``hub`` or ``all``).

    ``on``: the node that is unlike, ``None`` for all; ``everywhere``: variables of all nodes;
    ``is_compared``: whether who is no node finds the same; ``needs``: what the machine must have.
    """

    kinds: str
    setup: str = ""
    on: int | None = 1
    nodes: int = 2
    everywhere: Variables = field(default_factory=dict)
    environment: Variables = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    gpus: int = 2
    driver: str = "570.124.06"
    driver_cuda: int = 12080
    training: Mapping[str, object] = field(default_factory=dict)
    python: str = ""
    within: tuple[str, ...] = ()
    links: tuple[tuple[str, str, str], ...] = ()
    is_compared: bool = True
    needs: str = ""

    def missing(self) -> str:
        """Return why it cannot be planted here; empty if it can."""
        links = Path("/proc/sys/fs/protected_hardlinks")
        has = {
            "": True,
            "cc": bool(shutil.which("cc")),
            "fuse": os.access("/dev/fuse", os.R_OK | os.W_OK),
            "users": has_user_namespaces(),
            "protected links": links.read_text().strip() == "1",
        }
        return "" if has[self.needs] else f"there is no {self.needs}"


_AS_NFS = """sed 's#\\( {{home}}/out .*\\) - [^ ]* [^ ]* \\(.*\\)$#\\1 - nfs4 head:/out \
\\2{more}#' /proc/self/mountinfo > {{home}}/table
mount --bind {{home}}/table /proc/$$/mountinfo"""


def nfs(kinds: str, more: str = "", on: int | None = 1) -> Fault:
    """A mount that the system calls NFS; ``more`` ends its options."""
    return Fault(f"{kinds} no-events", _AS_NFS.format(more=more), on=on)


def shifted(seconds: int) -> Fault:
    """The second node's clock is ahead."""
    source = Path(__file__).with_name("shifted_clock.c")
    setup = f"""cc -shared -fPIC -o {{home}}/shifted.so {source}
python3 -c 'import struct; open("{{home}}/shift", "wb").write(struct.pack("=q", {seconds}))'"""
    preloaded = ("env", "LD_PRELOAD={home}/shifted.so", "SHIFTED_CLOCK={home}/shift")
    return Fault("clock", setup, needs="cc", within=preloaded)


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
_NAMED = (
    "sed 's/.* {node} .*/%s {node}/' {home}/hosts > {home}/{node}/hosts; mount --bind"
    " {home}/{node}/hosts /etc/hosts"
)
_LOOPBACK = _NAMED % "127.0.1.1"
_SHARE_OUT = "mount --bind {home}/n0/out {home}/out"
THREE = {"NNODES": "3"}
_PATCHED = (
    '#!/bin/sh\n"{python}" "$@" | sed \'s/"python": "\\(3[.][0-9]*\\)[.][0-9]*/"python":'
    " \"\\1.99/'\n"
)
_of_user = partial(Fault, needs="users", within=USER)

FAULTS: Mapping[str, Fault] = {
    "store-gone": Fault(
        "store-absent",
        "mkdir -p {home}/out/run/_ckptsync; echo {home}/shared/store >"
        " {home}/out/run/_ckptsync/store; mount -t tmpfs none {home}/shared",
        is_compared=False,
    ),
    "store-not-mounted": Fault(
        "not-mounted", "echo 'head:/srv {home}/shared nfs4 hard 0 0' > {home}/fstab"
    ),
    "store-read-only": Fault(
        "store-create",
        "mount --bind {home}/shared/store {home}/shared/store; mount -o remount,ro,bind"
        " {home}/shared/store",
        is_compared=False,
    ),
    "store-full": Fault(
        "store-create disk-full",
        "mount -t tmpfs none -o size=512k,nr_inodes=500 {home}/shared/store; cat /dev/zero >"
        " {home}/shared/store/x || true",
        is_compared=False,
    ),
    "store-dead": Fault(
        "no-answer",
        "exec 9<>/dev/fuse; mount -i -t fuse -o fd=9,rootmode=40000,user_id=0,group_id=0 dead"
        " {home}/shared/store",
        is_compared=False,
        needs="fuse",
    ),
    "store-not-writable": _of_user(
        "store-create", "chmod 555 {home}/shared/store", is_compared=False
    ),
    "store-not-listable": _of_user(
        "store-list", "chmod 311 {home}/shared/store", is_compared=False
    ),
    "spool-of-another-user": _of_user(
        "output-not-writable",
        "mkdir {home}/out/run/_ckptsync; chown 12345 {home}/out/run/_ckptsync",
    ),
    "umask": Fault("umask", "chmod 2775 {home}/shared/store; umask 077"),
    "file-of-another-user": _of_user("unreadable", _OTHERS % "600"),
    "link-of-another-user": Fault(
        "unlinkable", _OTHERS % "644", needs="protected links", within=USER
    ),
    "asked-by-root": Fault(
        "asked-as-root",
        "chown -R 12345 {home}/out/run; chmod a+rx {home} {home}/out; chmod -R a+rwX {home}/shared",
    ),
    "output-read-only": Fault(
        "output-not-writable",
        "mount --bind {home}/out {home}/out; mount -o remount,ro,bind {home}/out",
    ),
    "spool-elsewhere": Fault(
        "links-cross",
        "mkdir -p {home}/out/run/_ckptsync; mount -t tmpfs none {home}/out/run/_ckptsync",
    ),
    "no-links": Fault(
        "no-links", _REFUSE, needs="cc", within=("env", "LD_PRELOAD={home}/refuse.so")
    ),
    "disk-for-two": Fault(
        "disk-full",
        "mount -t tmpfs none -o size=300m {home}/out; mkdir -p {home}/out/run/checkpoint-1; head -c"
        " 120m /dev/zero > {home}/out/run/checkpoint-1/model.safetensors",
    ),
    "inodes": Fault(
        "inodes", "mount -t tmpfs none -o size=1g,nr_inodes=50 {home}/out; mkdir {home}/out/run"
    ),
    "nfs-soft": nfs("nfs-soft", ",soft", on=None),
    "nfs-late": nfs("late-names", ",actimeo=600", on=None),
    "few-files": Fault("few-files", "ulimit -n 512"),
    "small-shm": Fault("small-shm", "mount -t tmpfs -o size=64m none /dev/shm"),
    "clock-5s": shifted(5),
    "clock-years-behind": shifted(-9 * 365 * 86400),
    "driver-too-old": Fault("driver-too-old", driver_cuda=11080, needs="cc"),
    "interface-bare": Fault(
        "interface-bare",
        links=(
            ("link add bare0 type veth peer name bare1", "link del bare0", "node"),
            ("link set bare0 up", "link set lo up", "node"),
            ("link set bare1 up", "link set lo up", "node"),
        ),
        environment={"NCCL_SOCKET_IFNAME": "bare0"},
    ),
    "interface-down": Fault(
        "interface-down master-unreachable",
        links=((f"link set {TRAIN} down", f"link set {TRAIN} up", "node"),),
    ),
    "torch": Fault("versions-differ", versions={"torch": "2.7.1"}),
    "gpus-on-one-node-only": Fault("gpus-on-some", gpus=0, driver=""),
    "nccl-conf": Fault("network-differs", "echo NCCL_PROTO=LL > {home}/{node}/.nccl.conf"),
    "port-taken": Fault("port-taken", on=0, within=("python3", "-c", _HOLDS)),
    "master-behind-a-firewall": Fault(
        "master-unreachable", links=(("link set t0 down", "link set t0 up", "hub"),)
    ),
    "host-loopback": Fault("host-loopback", _LOOPBACK, everywhere={"GLOO_SOCKET_IFNAME": None}),
    "mtu": Fault(
        "links-differ",
        links=((f"link set {TRAIN} mtu 1400", f"link set {TRAIN} mtu 1500", "node"),),
    ),
    "one-host-name": Fault("identity-shared", "hostname n0"),
    "one-address": Fault("identity-shared", _NAMED % "198.18.1.10"),
    "one-machine-id": Fault("identity-shared", "mount --bind {home}/n0/machine /etc/machine-id"),
    "mounted-on-one-only": nfs("disk-differs"),
    "shared-by-two-of-three": Fault("disk-differs", _SHARE_OUT, nodes=3, everywhere=THREE),
    "shared-and-each-saves": Fault(
        "disk-shared", _SHARE_OUT, on=None, training={"save_on_each_node": True}
    ),
    "two-users-of-one-disk": _of_user(
        "users-differ run-left-out",
        "mount --bind {home}/n0/out {home}/out; chmod -R 777 {home}/n0/out",
    ),
    "store-on-a-disk-of-its-own": Fault(
        "nodes-missing",
        "mount -t tmpfs none -o size=1g {home}/shared/store; mkdir -p {home}/shared/store",
    ),
}
_sound = partial(Fault, "", on=None)
_NOTHING = dict.fromkeys(("NNODES", "NODE_RANK", "NPROC_PER_NODE", "MASTER_ADDR", "MASTER_PORT"))
SOUND: Mapping[str, Fault] = {
    "plain": _sound(),
    "three-nodes": _sound(everywhere=THREE, nodes=3),
    "no-variables": _sound(everywhere=_NOTHING),
    "no-gpus": _sound(gpus=0, driver="", everywhere={"NPROC_PER_NODE": "2"}),
    "half-of-the-gpus": _sound(gpus=4, everywhere={"CUDA_VISIBLE_DEVICES": "2,3"}),
    "master-by-name": _sound(everywhere={"MASTER_ADDR": "n0"}),
    "master-by-name-here-and-address-there": Fault("", environment={"MASTER_ADDR": "n0.cluster"}),
    "debian": Fault("", _LOOPBACK, on=0, everywhere={"MASTER_ADDR": "n0"}),
    "ipv6": _sound(
        links=(
            (
                f"-6 address add fd00::{{}}/64 dev {TRAIN} nodad",
                f"-6 address del fd00::{{}}/64 dev {TRAIN}",
                "all",
            ),
        ),
        everywhere={"MASTER_ADDR": "fd00::1"},
    ),
    "torch-of-another-index": Fault("", versions={"torch": "2.8.0+cu128"}),
    "a-patch-of-python": Fault("", python=_PATCHED),
    "a-banner": _sound(python='#!/bin/sh\necho welcome\n"{python}" "$@"\n'),
    "another-locale": _sound(
        everywhere={
            "LC_ALL": "C",
            "LANG": "C",
            "LANGUAGE": "de",
            "TZ": "Asia/Shanghai",
            "PYTHONUTF8": "0",
        }
    ),
    "no-home": _sound(everywhere={"HOME": None}),
    "no-names": _sound("mount --bind /dev/null /etc/passwd"),
    "no-fstab": _sound("mount --bind /dev/null /etc/fstab"),
    "no-machine-id": _sound("mount --bind /dev/null /etc/machine-id"),
    "a-container": _sound(within=("unshare", "--pid", "--fork", "--mount-proc")),
    "not-root": _sound(needs="users", within=USER),
    "root-made-it-for-all": _sound("rm -rf {home}/out/run/*; chmod 1777 {home}/out/run"),
    "nothing-saved-yet": _sound("rm -rf {home}/out/run/*"),
    "nothing-there-yet": _sound(
        "rm -rf {home}/out/run", training={"output_dir": "{home}/out/soon"}
    ),
    "one-shared-disk": _sound(_SHARE_OUT),
    "bound-over-its-own-disk": _sound(
        "echo '{home}/{node}/out {home}/out none bind 0 0' > {home}/fstab"
    ),
    "automounted": _sound("echo 'head:/srv /elsewhere nfs4 noauto 0 0' > {home}/fstab"),
    "little-memory": _sound(within=("prlimit", "--nproc=400", "--as=4000000000")),
    "a-store-not-there-yet": Fault("", "rm -rf {home}/shared/store", on=0),
    "names-with-blanks": _sound(
        "mkdir -p '{home}/out/my run/checkpoint-1'; echo x > '{home}/out/my"
        " run/checkpoint-1/model.safetensors'"
    ),
}
