"""Machines: GPUs, clocks, limits of the system, who they are, and whether one path is one disk."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

from ckptsync.doctor.findings import STORAGE, Finding, Level
from ckptsync.doctor.launch import is_loopback
from ckptsync.doctor.nodes import Node, grouped, is_true, share_a_network, told
from ckptsync.units import show_duration

_NOFILE = 1024
_SHM = 512 << 20  # bytes: a container's own default of 64 MiB is too little for any data loader
SHM = "/dev/shm"  # noqa: S108 - looked at, and never written
_SHARED_GPU = "ranks without a GPU of their own fail or share one, and the others wait for them"
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_NO_DEVICES = (
    "-1",
    "nodevfiles",
    "none",
    "void",
)  # what CUDA_VISIBLE_DEVICES is where there are to be none; Slurm writes NoDevFiles
_ANY = 1 << 30
_NUMBER = re.compile(r"[0-9]{1,4}")
SKEW_WARN, SKEW_FAIL = 1.0, 30.0  # seconds
_SAVES = "the times of one save are compared between nodes, S3 refuses what is signed a quarter of an hour off, and logs do not fit together"


def check_clock(node: Node) -> Iterator[Finding]:
    """A node's clock beside the store's."""
    if node.clock is not None and abs(node.clock) > SKEW_WARN:
        what = f"{show_duration(abs(node.clock))} {'ahead of' if node.clock > 0 else 'behind'} the store's"
        yield _skew(abs(node.clock), (node.name,), what)


def compare_clocks(nodes: Sequence[Node]) -> Iterator[Finding]:
    """The two that are farthest from each other."""
    known = sorted((node.clock, node.name) for node in nodes if node.clock is not None)
    if known and known[-1][0] - known[0][0] > SKEW_WARN:
        apart = known[-1][0] - known[0][0]
        behind, ahead = known[0][1], known[-1][1]
        yield _skew(apart, tuple(sorted((behind, ahead))), f"{show_duration(apart)} apart, {behind} behind {ahead}")


def _skew(seconds: float, names: tuple[str, ...], what: str) -> Finding:
    level: Level = "fail" if seconds > SKEW_FAIL else "warn"
    hint = "let chrony or systemd-timesyncd set it: `timedatectl set-ntp true`"
    return Finding(level, "clock", names, "the clock", what, _SAVES, hint)


def compare_identities(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Machines that share a name or an id.  Containers and namespaces of one machine do, and are told apart by what they were named."""
    for what, value, why, hint in _IDENTITIES:
        groups = grouped((n for n in nodes if value(n)), value)
        for shared, names in groups.items():
            if len({node.boot for node in nodes if node.name in names and node.boot}) > 1:
                yield Finding("warn", "identity-shared", names, what, f"{shared} on each of them", why, hint)


def _reached_at(node: Node) -> str:
    """Where the host's own name leads, as others would be told."""
    return ", ".join(address for address in node.addresses if not is_loopback(address))


_IDENTITIES: tuple[tuple[str, Callable[[Node], str], str, str], ...] = (
    (
        "the host name",
        lambda node: node.host,
        "logs, Ray and torchrun name nodes by it; whose checkpoint is whose cannot be told",
        "`hostnamectl hostname NAME`, another on each",
    ),
    (
        "/etc/machine-id",
        lambda node: node.machine,
        "a cloned image: what takes it for the machine (ckptsync's node id, DHCP, journald) takes two for one",
        "rm /etc/machine-id && systemd-machine-id-setup, on all but one",
    ),
    (
        "the address of the host's name",
        _reached_at,
        "who connects to another node by it reaches itself: containers have it, each behind a bridge of its own, or a network has one address twice",
        "`--network=host` for containers; else another address on each",
    ),
)


def compare_outputs(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Output directories: one string everywhere, but for nodes that are one machine, and one disk for all nodes or one for each."""
    groups = grouped((n for n in nodes if n.places), lambda node: ", ".join(sorted(node.places)))
    if len(groups) > 1 and not share_a_network(nodes):
        names = tuple(name for found in groups.values() for name in found)
        why = "rank 0 tells the others where to resume from, and each looks at its own path; runs get different names in the store"
        yield Finding("warn", "output-differs", names, "output_dir", told(groups), why, "give all nodes the same absolute path")
    for path in sorted({path for node in nodes for path in node.places}):
        yield from _disks(path, sorted((n for n in nodes if path in n.places and n.places[path].nonce), key=lambda n: n.name))


def _disks(path: str, nodes: Sequence[Node]) -> Iterator[Finding]:
    pairs = {(a.name, b.name): _is_shared(path, a, b) for a, b in combinations(nodes, 2)}
    shared = [pair for pair, is_one in pairs.items() if is_one]
    apart = [pair for pair, is_one in pairs.items() if not is_one]
    names = tuple(node.name for node in nodes)
    if shared and apart:
        together = {name for pair in shared for name in pair}
        what = (
            f"one disk for {', '.join(sorted(together))}, another for {', '.join(sorted(set(names) - together)) or 'some of them'}"
        )
        why = "trainers take an output directory for shared, or for each node's own: what they leave out is nowhere then"
        yield Finding(
            "fail", "disk-differs", names, path, what, why, "mount the same file system on all nodes, or on none", STORAGE
        )
    elif apart and len({bool(node.places[path].server) for node in nodes}) > 1:
        what = told(grouped(nodes, lambda node: node.places[path].server or "a disk of the node's own"))
        why = "a mount is missing: what the nodes mean to share lies on one machine's own disk"
        yield Finding(
            "fail", "disk-differs", names, path, what, why, "mount the same file system on all nodes, or on none", STORAGE
        )
    elif shared and len({node.uid for node in nodes if node.uid is not None}) > 1:
        what = told(grouped(nodes, lambda node: f"uid {node.uid} ({node.user})"))
        why = "what one node writes another may not read, replace or rotate: safetensors 0.8 and newer write files for their owner alone"
        yield Finding("warn", "users-differ", names, path, what, why, "train as one user on all nodes")
    elif shared and any(is_true(node.training.get("save_on_each_node", "")) for node in nodes):
        why = "every node writes the same names into one directory: a shard may be lost in silence"
        hint = "set save_on_each_node: false, or give each node a disk of its own"
        yield Finding("fail", "disk-shared", names, path, "shared by the nodes, and save_on_each_node is set", why, hint)


def _is_shared(path: str, a: Node, b: Node) -> bool:
    """Whoever gathered later sees the other's word."""
    return a.places[path].nonce in b.places[path].seen or b.places[path].nonce in a.places[path].seen


def compare_models(nodes: Sequence[Node]) -> Iterator[Finding]:
    """The model that is trained: its configuration and the sizes of its files."""
    groups = grouped((n for n in nodes if n.model), lambda node: node.digest)
    if len(groups) > 1:
        names = tuple(name for found in groups.values() for name in found)
        why = "ranks begin with other weights or shapes: they fail, hang, or train something that nobody has"
        yield Finding(
            "warn", "model-differs", names, "the base model", told(groups), why, "copy the model again, to all nodes alike"
        )


def visible(node: Node) -> int | None:
    """How many GPUs a process that starts there sees; where no GPU is known of, how many it is told of; ``None`` where nobody knows.

    As CUDA reads CUDA_VISIBLE_DEVICES: entries up to the first that is no device count (CUDA C++ Programming Guide, "CUDA Environment Variables").
    """
    if node.gpus is None:
        return None
    told = [node.variables[name] for name in _VISIBLE if name in node.variables]
    counts = [len(_devices(text, len(node.gpus) or _ANY)) for text in told]
    return min([*counts, len(node.gpus)] if node.gpus else counts, default=0)


def _devices(text: str, there: int) -> list[str]:
    found: list[str] = []
    for entry in (part.strip() for part in text.split(",")):
        is_index = bool(_NUMBER.fullmatch(entry))
        if entry in found or (is_index and int(entry) >= there) or not (is_index or entry.startswith(("GPU-", "MIG-"))):
            break
        found.append(entry)
    return found


def processes(node: Node) -> int | None:
    """How many ranks a launcher starts there: NPROC_PER_NODE, else one for each GPU that is visible (LLaMA-Factory, launcher.py)."""
    said = node.variables.get("NPROC_PER_NODE", "")
    return int(said) if _NUMBER.fullmatch(said) else visible(node)


def check_gpus(node: Node) -> Iterator[Finding]:
    """What one node shows."""
    yield from _driver(node)
    seen, wanted, there = visible(node), node.variables.get("NPROC_PER_NODE", ""), len(node.gpus or ())
    if seen is None or node.within:
        return
    is_told = any(node.variables.get(name, "").strip().lower() not in ("", *_NO_DEVICES) for name in _VISIBLE)
    if _NUMBER.fullmatch(wanted) and seen < int(wanted) and (there or is_told):
        what = f"{wanted} processes are to start, {seen} GPUs are visible, {there} are there"
        hint = "set NPROC_PER_NODE and CUDA_VISIBLE_DEVICES so that both count the same GPUs"
        yield Finding("fail", "gpus-too-few", (node.name,), "NPROC_PER_NODE", what, _SHARED_GPU, hint)
    for name in _VISIBLE[:2]:
        listed = [part.strip() for part in node.variables.get(name, "").split(",") if part.strip()]
        if ",".join(listed).lower() not in _NO_DEVICES and len(_devices(",".join(listed), there)) < len(listed):
            what = f"{node.variables[name]}, where there are {there} GPUs"
            why = "what stands behind the first entry that is no device is ignored: the training sees fewer GPUs than it is told"
            yield Finding(
                "fail",
                "gpus-not-there",
                (node.name,),
                name,
                what,
                why,
                f"name devices from 0 to {there - 1}, each once" if there else "look at the driver: nvidia-smi, or rocm-smi",
            )


def _driver(node: Node) -> Iterator[Finding]:
    build = node.builds.get("cuda", "")
    if build and node.driver_cuda and _major(node.driver_cuda) < _major(build):
        what = f"knows CUDA {node.driver_cuda}, torch is built for {build}"
        yield Finding(
            "fail",
            "driver-too-old",
            (node.name,),
            "the driver",
            what,
            "torch finds no GPU, or the first kernel fails",
            "install a newer driver, or a torch of an older CUDA",
        )


def compare_gpus(nodes: Sequence[Node]) -> Iterator[Finding]:
    """What the nodes of one training show beside each other."""
    known = [node for node in nodes if node.gpus is not None]
    yield from _ranks([node for node in known if not node.within and not is_true(node.variables.get("USE_RAY", ""))])
    having = grouped(
        (n for n in known if not n.within), lambda node: f"{visible(node) or 0} GPUs" if node.gpus and visible(node) else ""
    )
    if "" in having and len(having) > 1:
        names = tuple(name for names in having.values() for name in names)
        why = "there ranks train on the CPU, or fail, and the others wait for them"
        hint = "look at the driver where there are none: nvidia-smi, or rocm-smi; is the container given its GPUs?"
        yield Finding("fail", "gpus-on-some", names, "GPUs", told(having), why, hint)
    kinds = grouped((n for n in known if n.gpus), lambda node: ", ".join(sorted(set(node.gpus or ()))))
    mixed = [node.name for node in known if len(set(node.gpus or ())) > 1]
    if len(kinds) > 1 or mixed:
        names = tuple(name for names in kinds.values() for name in names)
        why = "NCCL may choose other paths for each kind and hang; the slowest sets the pace, the smallest the memory"
        yield Finding(
            "warn",
            "gpus-mixed",
            names,
            "GPUs",
            told(kinds),
            why,
            "use GPUs of one kind, or CUDA_VISIBLE_DEVICES to leave the others out",
        )


def _ranks(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Different numbers of ranks.  torchrun trains with them; LLaMA-Factory calls torchrun only where a node sees several GPUs, or is forced to."""
    if len({processes(node) for node in nodes}) < 2:
        return
    groups = grouped(nodes, lambda node: f"{processes(node)} ranks ({visible(node)} of {len(node.gpus or ())} GPUs visible)")
    alone = [
        node.name
        for node in nodes
        if "llamafactory" in node.versions and (visible(node) or 0) < 2 and not is_true(node.variables.get("FORCE_TORCHRUN", ""))
    ]
    names = tuple(name for names in groups.values() for name in names)
    if alone:
        why = f"LLaMA-Factory trains alone on a node that sees fewer than two GPUs, and the other nodes wait for {', '.join(alone)}"
        hint = "export FORCE_TORCHRUN=1 on all nodes, or set NPROC_PER_NODE and CUDA_VISIBLE_DEVICES alike on them"
        yield Finding("fail", "ranks-differ", names, "NPROC_PER_NODE", told(groups), why, hint)
        return
    why = (
        "torchrun, and LLaMA-Factory by it, train with different numbers of ranks; `accelerate launch` starts num_processes / num_machines "
        "on every node, and tensor parallelism or HSDP within a node may not fit"
    )
    hint = "if this is not meant, set NPROC_PER_NODE and CUDA_VISIBLE_DEVICES alike on all nodes"
    yield Finding("warn", "ranks-differ", names, "NPROC_PER_NODE", told(groups), why, hint)


def _major(version: str) -> int:
    found = _NUMBER.match(version)
    return int(found[0]) if found else 0


def check_limits(node: Node) -> Iterator[Finding]:
    """Whether a limit of the system is one that trainings run into."""
    limits = node.limits
    if 0 <= limits.get("nofile", _NOFILE) < _NOFILE:  # below 0: no limit
        why = "each rank, data loader and connection of NCCL needs some; a save fails with `Too many open files`"
        yield Finding(
            "warn",
            "few-files",
            (node.name,),
            "ulimit -n",
            f"{limits['nofile']}, {_NOFILE} or more wanted",
            why,
            "raise it: LimitNOFILE= of a unit, /etc/security/limits.conf",
        )
    if limits.get("shm", _SHM) < _SHM:
        why = "data loaders and NCCL share memory there: `Bus error`, or a hang"
        hint = "`--shm-size=16g` for a container, else `mount -o remount,size=50% /dev/shm`"
        yield Finding("warn", "small-shm", (node.name,), SHM, f"{limits['shm'] >> 20} MiB free, {_SHM >> 20} wanted", why, hint)
    if limits.get("hcas") and 0 <= limits.get("memlock", -1) < 1 << 30 and node.variables.get("NCCL_IB_DISABLE") != "1":
        what = f"{limits['memlock'] >> 10} KiB, with {limits['hcas']} adapters for RDMA"
        yield Finding(
            "warn",
            "memlock",
            (node.name,),
            "ulimit -l",
            what,
            "NCCL registers memory with the adapter, and fails where it may not",
            "`ulimit -l unlimited`, LimitMEMLOCK=infinity",
        )
