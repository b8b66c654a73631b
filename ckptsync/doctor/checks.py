"""The tables of checks, and the checks of machines: GPUs, versions, clocks, disks, limits.

A check is a pure function from facts to findings, so one table of checks serves facts from this
machine, from the store and from Ray.  `compare` runs the tables over the facts of the nodes that
train together, `check_node` over those of one node.  A new check is a function, its name in the
table at the end of this module, and a row in docs/doctor.md.  Imports the standard library alone:
Ray's workers and its driver may lack what ckptsync depends on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from ckptsync.doctor import launch_checks
from ckptsync.doctor.facts import (
    NodeFacts,
    find_difference,
    group_by,
    is_true,
    names_of,
    read_facts,
    share_a_network,
    show_groups,
)
from ckptsync.doctor.findings import STORAGE, Finding, fail, in_order, warn
from ckptsync.quantities import show_duration

SKEW_WARN, SKEW_FAIL = 1.0, 30.0  # seconds
_NOFILE = 1024  # file descriptors
# bytes: a container's own 64 MiB of shared memory is too little
_SHM, _MEMLOCK = 512 << 20, 1 << 30
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
# CUDA_VISIBLE_DEVICES where there are to be none; Slurm writes NoDevFiles
_NO_DEVICES = ("", "-1", "nodevfiles", "none", "void")
_NUMBER = re.compile(r"[0-9]{1,4}")
# one torch is 2.8.0 from PyPI and 2.8.0+cu128 from pytorch.org
_BUILD = re.compile(r"\+(cpu|cu[0-9]+|rocm[0-9.]+)$")
_NCCL = re.compile(r"libnccl\.so\.([0-9]+\.[0-9.]+)$")
_RAY_CPUS = 10  # that LLaMA-Factory 0.9.5 asks of Ray for each GPU


def compare(facts: Iterable[Mapping[str, Any]]) -> tuple[Finding, ...]:
    """Return the findings of all checks over nodes that will train together, failures first.

    ``facts``: as `ckptsync.doctor.probe.gather` returns them; () without any.  Of several processes
    on a node (one id, one boot) the first counts.  One node alone is not compared, but for NNODES.
    """
    distinct: dict[tuple[str, str], NodeFacts] = {}
    for node in map(read_facts, facts):
        distinct.setdefault((node.name, node.boot), node)
    nodes = list(distinct.values())
    findings = [finding for node in nodes for finding in _check(node, nodes)]
    findings += launch_checks.compare_counts(nodes)  # also of one node: the others may be missing
    if len(nodes) > 1:
        findings += [finding for check in BETWEEN_NODES for finding in check(nodes)]
    return in_order(findings)


def check_node(facts: Mapping[str, Any]) -> tuple[Finding, ...]:
    """Return the findings of the checks that need no other node, failures first."""
    node = read_facts(facts)
    return in_order(_check(node, [node]))


def _check(node: NodeFacts, nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Yield the findings of one node; ``nodes``: all nodes with facts, this one among them."""
    for check in OF_ONE_NODE:
        yield from (finding.on(node.name) for finding in check(node))
    yield from (finding.on(node.name) for finding in launch_checks.check_launch(node, nodes))


def check_clock(node: NodeFacts) -> Iterator[Finding]:
    """Yield a finding if a node's measured clock is over `SKEW_WARN` seconds from the store's."""
    if node.clock is not None and abs(node.clock) > SKEW_WARN:
        direction = "ahead of" if node.clock > 0 else "behind"
        what = f"{show_duration(abs(node.clock))} {direction} the store's"
        yield _skew(abs(node.clock), what)


def compare_clocks(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Yield one finding, of the two clocks farthest apart, if that is over `SKEW_WARN` seconds."""
    clocks = sorted((node.clock, node.name) for node in nodes if node.clock is not None)
    if clocks and (difference := clocks[-1][0] - clocks[0][0]) > SKEW_WARN:
        late_node, early_node = clocks[0][1], clocks[-1][1]
        what = f"{show_duration(difference)} apart, {late_node} behind {early_node}"
        yield _skew(difference, what, tuple(sorted((late_node, early_node))))


def _skew(seconds: float, what: str, nodes: tuple[str, ...] = ()) -> Finding:
    """Return the finding of a wrong clock: a failure above `SKEW_FAIL` seconds, else a warning."""
    why = (
        "times of one save are compared between nodes, and S3 refuses requests that are signed a"
        " quarter of an hour off"
    )
    hint = "let chrony or systemd-timesyncd set it: `timedatectl set-ntp true`"
    level = fail if seconds > SKEW_FAIL else warn
    return level("clock", "the clock", what, why=why, hint=hint, nodes=nodes)


def check_open_files(node: NodeFacts) -> Iterator[Finding]:
    """Yield a warning if a process may open fewer than `_NOFILE` files; below 0 means no limit."""
    limit = node.limits.get("nofile", _NOFILE)
    if 0 <= limit < _NOFILE:
        why = "ranks, data loaders and NCCL need more: a save fails with `Too many open files`"
        hint = "raise it: LimitNOFILE= of a unit, /etc/security/limits.conf"
        what = f"{limit}, {_NOFILE} or more expected"
        yield warn("few-files", "ulimit -n", what, why=why, hint=hint)


def check_shared_memory(node: NodeFacts) -> Iterator[Finding]:
    """Yield a warning if /dev/shm has fewer than `_SHM` bytes free; nothing if unknown."""
    free = node.limits.get("shm", _SHM)
    if free < _SHM:
        why = "data loaders and NCCL share memory there: `Bus error`, or a hang"
        hint = "`--shm-size=16g` for a container, else `mount -o remount,size=50% /dev/shm`"
        what = f"{free >> 20} MiB free, {_SHM >> 20} expected"
        yield warn("small-shm", "/dev/shm", what, why=why, hint=hint)  # noqa: S108 - only named


def check_locked_memory(node: NodeFacts) -> Iterator[Finding]:
    """Yield a warning if NCCL uses adapters for RDMA, and may lock fewer than `_MEMLOCK` bytes."""
    limit, adapters = node.limits.get("memlock", -1), node.limits.get("hcas", 0)
    if adapters and 0 <= limit < _MEMLOCK and node.variable("NCCL_IB_DISABLE") != "1":
        what = f"{limit >> 10} KiB, with {adapters} adapters for RDMA"
        why = "NCCL registers memory with the adapter, and fails where it may not"
        hint = "`ulimit -l unlimited`, LimitMEMLOCK=infinity"
        yield warn("memlock", "ulimit -l", what, why=why, hint=hint)


def count_visible(node: NodeFacts) -> int | None:
    """Return how many GPUs a process would see on a node; None if its GPUs are unknown.

    As CUDA reads CUDA_VISIBLE_DEVICES: entries up to the first that is no device count (CUDA C++
    Programming Guide, "CUDA Environment Variables").  The smallest count of `_VISIBLE` and the
    driver's GPUs counts; if the driver shows none, that of the variables, and 0 without them.
    """
    if node.gpus is None:
        return None
    gpu_count = len(node.gpus) or 1 << 30
    lists = [node.variables[name] for name in _VISIBLE if name in node.variables]
    counts = [len(_devices(text, gpu_count)) for text in lists]
    return min([*counts, len(node.gpus)] if node.gpus else counts, default=0)


def _devices(text: str, gpu_count: int) -> list[str]:
    """Return the entries that name devices, up to the first that does not or repeats one.

    Devices are numbers below ``gpu_count``, and what begins with ``GPU-`` or ``MIG-``.
    """
    devices: list[str] = []
    for entry in (part.strip() for part in text.split(",")):
        is_index = bool(_NUMBER.fullmatch(entry)) and int(entry) < gpu_count
        if entry in devices or not (is_index or entry.startswith(("GPU-", "MIG-"))):
            break
        devices.append(entry)
    return devices


def _names_devices(node: NodeFacts, name: str) -> bool:
    """Return whether a variable is set to something else than "no devices"."""
    return node.variable(name).strip(" ,").lower() not in _NO_DEVICES


def check_gpu_count(node: NodeFacts) -> Iterator[Finding]:
    """Yield a failure if a node sees fewer GPUs than NPROC_PER_NODE.

    Yield nothing if the GPUs are not known, in a process of Ray's or a training's, or if the
    node has none and no variable names one.
    """
    visible, processes = count_visible(node), node.variable("NPROC_PER_NODE")
    if visible is None or node.within or not _NUMBER.fullmatch(processes):
        return
    if visible < int(processes) and (node.gpus or any(_names_devices(node, v) for v in _VISIBLE)):
        what = f"{processes} processes start, {visible} of {len(node.gpus or ())} GPUs are visible"
        why = "ranks without a GPU of their own fail or share one, and the others wait for them"
        hint = "set NPROC_PER_NODE and CUDA_VISIBLE_DEVICES so that both count the same GPUs"
        yield fail("gpus-too-few", "NPROC_PER_NODE", what, why=why, hint=hint)


def check_gpu_names(node: NodeFacts) -> Iterator[Finding]:
    """Yield a failure for each variable that names a missing GPU, or one twice.

    The variables are CUDA_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES; nothing if the GPUs are not
    known, or in a process of Ray's or a training's.
    """
    gpu_count = len(node.gpus or ())
    for name in _VISIBLE[:2] if node.gpus is not None and not node.within else ():
        entries = [part for part in node.variable(name).split(",") if part.strip()]
        if _names_devices(node, name) and len(_devices(",".join(entries), gpu_count)) < len(
            entries
        ):
            what = f"{node.variables[name]}; the node has {gpu_count} GPUs"
            why = "CUDA ignores all entries from the first that is no device"
            hint = f"name devices from 0 to {gpu_count - 1}, each once"
            if not gpu_count:
                hint = "check the driver: nvidia-smi, or rocm-smi"
            yield fail("gpus-not-there", name, what, why=why, hint=hint)


def check_driver(node: NodeFacts) -> Iterator[Finding]:
    """Yield a failure if the driver's CUDA has a lower major version than torch's, both known."""
    build, driver_cuda = node.builds.get("cuda", ""), node.driver_cuda
    if build and driver_cuda and parse_version(driver_cuda)[:1] < parse_version(build)[:1]:
        what = f"knows CUDA {driver_cuda}, torch is built for {build}"
        why = "torch finds no GPU, or the first kernel fails"
        hint = "install a newer driver, or a torch of an older CUDA"
        yield fail("driver-too-old", "the driver", what, why=why, hint=hint)


def check_torch_build(node: NodeFacts) -> Iterator[Finding]:
    """Yield a warning if torch is a build for CPUs, and the node has GPUs."""
    torch = node.versions.get("torch", "")
    if node.gpus and torch.endswith("+cpu"):
        what = f"{torch}; the node has {len(node.gpus)} GPUs"
        why = "it is built for no GPU: the training runs on the CPUs"
        hint = "install a torch for CUDA, or ROCm; or name the Python that trains with --python"
        yield warn("torch-for-cpus", "torch", what, why=why, hint=hint)


def compare_gpus(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Yield a failure if some nodes see GPUs and others see none.

    Nodes in Ray or in training, or with unknown GPUs, are not compared.
    """

    def show_visible(node: NodeFacts) -> str:
        """Return the number of visible GPUs; "" for none."""
        visible = count_visible(node) if node.gpus else 0
        return f"{visible} GPUs" if visible else ""

    judged = [node for node in nodes if node.gpus is not None and not node.within]
    if not all(map(show_visible, judged)):
        why = "ranks without GPUs train on the CPU, or fail, and the others wait for them"
        hint = "check the driver (nvidia-smi, or rocm-smi), and give the container its GPUs"
        yield from find_difference(
            fail, "gpus-on-some", "GPUs", judged, show_visible, why=why, hint=hint
        )


def compare_gpu_models(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Yield a warning if not all GPUs, of a node or of several, are of one model."""
    kinds = group_by((n for n in nodes if n.gpus), lambda n: ", ".join(sorted(set(n.gpus or ()))))
    if len(kinds) > 1 or any(len(set(node.gpus or ())) > 1 for node in nodes):
        what, names = show_groups(kinds), names_of(kinds)
        why = "NCCL may hang; the slowest GPU sets the pace, and the smallest the memory"
        hint = "use GPUs of one kind, or CUDA_VISIBLE_DEVICES to leave the others out"
        yield warn("gpus-mixed", "GPUs", what, why=why, hint=hint, nodes=names)


def compare_ranks(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Yield a finding if not all nodes would start the same number of ranks.

    It is a warning, since torchrun trains with different numbers.  It is a failure if LLaMA-Factory
    would train alone on a node: it calls torchrun only where a node sees several GPUs or
    FORCE_TORCHRUN is set.  Nodes in Ray or in training, or with unknown GPUs, are not compared.
    """
    judged = [n for n in nodes if n.gpus is not None and not n.within and not n.is_on("USE_RAY")]
    if len({_processes(node) for node in judged}) < 2:
        return
    alone_nodes = [
        node.name
        for node in judged
        if "llamafactory" in node.versions
        and (count_visible(node) or 0) < 2
        and not node.is_on("FORCE_TORCHRUN")
    ]
    level, why = warn, "tensor parallelism, HSDP and `accelerate launch` need as many on each node"
    hint = "if this is not meant, set NPROC_PER_NODE and CUDA_VISIBLE_DEVICES alike on all nodes"
    if alone_nodes:
        level = fail
        why = f"LLaMA-Factory trains alone on {', '.join(alone_nodes)}, and the other nodes wait"
        hint = "export FORCE_TORCHRUN=1 on all nodes, or set NPROC_PER_NODE alike on them"
    yield from find_difference(
        level,
        "ranks-differ",
        "NPROC_PER_NODE",
        judged,
        lambda n: f"{_processes(n)} ranks ({count_visible(n)} of {len(n.gpus or ())} GPUs visible)",
        why=why,
        hint=hint,
    )


def _processes(node: NodeFacts) -> int | None:
    """Return how many ranks a launcher starts on a node; None if that is unknown.

    NPROC_PER_NODE, else one for each visible GPU (LLaMA-Factory, launcher.py).
    """
    configured = node.variable("NPROC_PER_NODE")
    return int(configured) if _NUMBER.fullmatch(configured) else count_visible(node)


def _reached_at(node: NodeFacts) -> str:
    """Return the addresses of the host's name that are not loopback, with commas; "" for none."""
    return ", ".join(
        address for address in node.addresses if not launch_checks.is_loopback(address)
    )


# what two machines may not share, its value, why, and what to do
_IDENTITIES: tuple[tuple[str, Callable[[NodeFacts], str], str, str], ...] = (
    (
        "the host name",
        lambda node: node.host,
        "logs, Ray and torchrun name nodes by it: their logs and checkpoints are mixed up",
        "`hostnamectl hostname NAME`, another on each",
    ),
    (
        "/etc/machine-id",
        lambda node: node.machine,
        "a cloned image: ckptsync's node id, DHCP and journald take two machines for one",
        "rm /etc/machine-id && systemd-machine-id-setup, on all but one",
    ),
    (
        "the address of the host's name",
        _reached_at,
        "a node that connects to it reaches itself: often a container behind a bridge",
        "`--network=host` for containers; else another address on each",
    ),
)


def compare_identities(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Yield a warning if two machines (two boots) share a host name, a machine id or an address."""
    for subject, value, why, hint in _IDENTITIES:
        for shared, names in group_by((n for n in nodes if value(n)), value).items():
            if len({node.boot for node in nodes if node.name in names and node.boot}) > 1:
                same = f"{shared} on each of them"
                yield warn("identity-shared", subject, same, why=why, hint=hint, nodes=names)


def compare_output_dirs(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Yield a warning if output directories have different paths on two nodes.

    Nothing if all nodes are one machine, or for nodes without any.
    """
    if not share_a_network(nodes):
        yield from find_difference(
            warn,
            "output-differs",
            "output_dir",
            (n for n in nodes if n.output_dirs),
            lambda node: ", ".join(sorted(node.output_dirs)),
            why="each rank resumes from its own path; runs get different names in the store",
            hint="give all nodes the same absolute path",
        )


def compare_disks(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Yield the findings of `_compare_disk` for each output path of the nodes."""
    for path in sorted({path for node in nodes for path in node.output_dirs}):
        having = [n for n in nodes if path in n.output_dirs and n.output_dirs[path].nonce]
        yield from _compare_disk(path, sorted(having, key=lambda n: n.name))


def _compare_disk(path: str, nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Yield the first thing that is wrong with one output path, by the tokens that nodes saw there.

    In this order: some nodes share a disk and others do not; only some have a server's file system;
    different users write to a shared one (a warning); every node saves there (save_on_each_node).
    """
    names, shared, is_apart = tuple(node.name for node in nodes), set[str](), False
    for a, b in combinations(nodes, 2):
        first, second = a.output_dirs[path], b.output_dirs[path]
        # the node that gathered later saw the other's token
        if first.nonce in second.seen or second.nonce in first.seen:
            shared |= {a.name, b.name}
        else:
            is_apart = True
    remount = "mount the same file system on all nodes, or on none"
    servers = {node.output_dirs[path].server for node in nodes}
    if shared and is_apart:
        elsewhere = ", ".join(sorted({*names} - shared)) or "some of them"
        what = f"one disk for {', '.join(sorted(shared))}, another for {elsewhere}"
        why = "a trainer leaves some files to other nodes: on another disk they are missing"
        yield fail("disk-differs", path, what, why=why, hint=remount, nodes=names, code=STORAGE)
    elif is_apart and "" in servers and len(servers) > 1:
        what = show_groups(group_by(nodes, lambda n: n.output_dirs[path].server or "a local disk"))
        why = "a mount is missing: files that the nodes mean to share lie on a local disk"
        yield fail("disk-differs", path, what, why=why, hint=remount, nodes=names, code=STORAGE)
    elif shared and len({node.uid for node in nodes if node.uid is not None}) > 1:
        what = show_groups(group_by(nodes, lambda node: f"uid {node.uid} ({node.user})"))
        why = "a node may not read or rotate what another writes: safetensors 0.8 writes mode 0600"
        hint = "train as one user on all nodes"
        yield warn("users-differ", path, what, why=why, hint=hint, nodes=names)
    elif shared and any(is_true(node.training.get("save_on_each_node", "")) for node in nodes):
        what = "shared by the nodes, and save_on_each_node is set"
        why = "every node writes the same names into one directory: a shard may be lost in silence"
        hint = "set save_on_each_node: false, or give each node a disk of its own"
        yield fail("disk-shared", path, what, why=why, hint=hint, nodes=names)


def compare_models(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Yield a warning if nodes that name a base model have different digests of it; "" is one."""
    yield from find_difference(
        warn,
        "model-differs",
        "the base model",
        (n for n in nodes if n.model),
        lambda node: node.digest,
        why="ranks begin with other weights or shapes: they fail, hang, or train a mixture",
        hint="copy the model again, to all nodes alike",
    )


def parse_version(text: str) -> tuple[int, ...]:
    """Return ``(5, 15, 0)`` for ``5.15.0.dev0``; () for text that is no version."""
    match = re.match(r"[0-9]{1,6}(\.[0-9]{1,6})*", text)
    return tuple(map(int, match[0].split("."))) if match else ()


def _overrides(node: NodeFacts) -> str:
    """Return the versions (a path without one) of the libnccl put before torch's, with commas."""
    return ", ".join(match[1] if (match := _NCCL.search(path)) else path for path in node.overrides)


_HANGS = "ranks of different builds hang in the first collective, or fail in it"
_FILES = "ranks of one save write, and read, other files or formats"
# libraries that must be the same on all nodes, and why
_FAILING = {
    "nccl": _HANGS,
    "transformers": _FILES,
    "deepspeed": _FILES,
    "ray": "Ray refuses a node of another version",
}
_WARNING = {
    "llamafactory": "versions differ in their arguments, and in how they launch the training",
    "accelerate": _FILES,
    "peft": _FILES,
    "safetensors": "0.8 and later create files with mode 0600, which other users cannot read",
}
# what else must be the same, its value, and why
_BUILDS: tuple[tuple[str, Callable[[NodeFacts], str], str], ...] = (
    ("torch", lambda node: _BUILD.sub("", node.versions.get("torch", "")), _HANGS),
    ("the CUDA of torch", lambda node: node.builds.get("cuda", ""), _HANGS),
    ("the HIP of torch", lambda node: node.builds.get("hip", ""), _HANGS),
    ("libnccl", _overrides, f"a library path puts another NCCL before torch's own: {_HANGS}"),
    (
        "python",
        lambda node: ".".join(node.python.split(".")[:2]),
        "minor versions may not read each other's pickles, which ranks and Ray exchange",
    ),
)


def compare_versions(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Yield a finding for each library, and the driver, whose version differs between nodes.

    It is a failure for those of `_BUILDS` and `_FAILING`, else a warning.  Nodes count whose
    training's Python was probed; one without a library differs from one that has it.
    """

    def of(name: str) -> Callable[[NodeFacts], str]:
        """Return a function from a node to its version of a library."""
        return lambda node: node.versions.get(name, "")

    probed = [node for node in nodes if node.versions or node.builds]
    compared = [
        *((fail, name, probed, value, why) for name, value, why in _BUILDS),
        *((fail, name, probed, of(name), why) for name, why in _FAILING.items()),
        *((warn, name, probed, of(name), why) for name, why in _WARNING.items()),
    ]
    having, why = [node for node in probed if node.driver], "a feature may be missing on a node"
    compared.append((warn, "the driver", having, lambda node: node.driver, why))
    for level, name, judged, value, why in compared:
        hint = f"install the same {name} on all nodes"
        yield from find_difference(
            level, "versions-differ", name, judged, value, why=why, hint=hint
        )


def check_transformers(node: NodeFacts) -> Iterator[Finding]:
    """Yield a warning for versions of transformers that leave out files on nodes but the first.

    From 5.15 on with save_on_each_node, from 4.36 to 4.38 if NNODES is set, and not 1.
    """
    text = node.versions.get("transformers", "")
    if parse_version(text) >= (5, 15) and is_true(node.training.get("save_on_each_node", "")):
        what = f"true, with transformers {text}"
        why = "since 5.15 nodes other than the first may leave out files of their checkpoints"
        hint = "set it to false: ckptsync collects each node's own files from where they lie"
        yield warn("save-on-each-node", "save_on_each_node", what, why=why, hint=hint)
    if (4, 36) <= parse_version(text) < (4, 39) and node.variable("NNODES") not in ("", "1"):
        what = f"{text}, on several nodes"
        why = "nodes other than the first may keep saves in tmp-checkpoint-N (transformers#27925)"
        hint = "install 4.40 or newer"
        yield warn("tmp-checkpoint", "transformers", what, why=why, hint=hint)


def check_llamafactory_ray(node: NodeFacts) -> Iterator[Finding]:
    """Yield a warning for versions of LLaMA-Factory that do not end, or do not start, under Ray.

    They are up to 0.9.2 with Ray before 2.55; and 0.9.5 with USE_RAY on a node without a visible
    GPU, or with fewer than `_RAY_CPUS` CPUs for each.
    """
    factory, ray = (parse_version(node.versions.get(name, "")) for name in ("llamafactory", "ray"))
    if () < factory <= (0, 9, 2) and () < ray < (2, 55):
        what = f"LLaMA-Factory {node.versions['llamafactory']} with Ray {node.versions['ray']}"
        why = "the training ends with an AssertionError after its last save (LLaMA-Factory#7327)"
        hint = "install LLaMA-Factory 0.9.3, or Ray 2.55, or newer"
        yield warn("ray-destroys-twice", "ray", what, why=why, hint=hint)
    if factory != (0, 9, 5) or not node.is_on("USE_RAY") or node.gpus is None:
        return
    gpus = count_visible(node) or 0
    if not gpus:
        what = f"none is visible, {node.cpus} CPUs"
        why = f"started here, it asks Ray for {_RAY_CPUS} CPUs for each CPU, and waits for ever"
        hint = "start llamafactory-cli on a node that sees a GPU, or train without USE_RAY"
        yield warn("ray-cpus", "GPUs", what, why=why, hint=hint)
    elif node.cpus < _RAY_CPUS * gpus:  # Ray may have been started with more than the node has
        what = f"{node.cpus} CPUs for {gpus} GPUs"
        why = f"LLaMA-Factory 0.9.5 asks Ray for {_RAY_CPUS} CPUs with each GPU, and waits for ever"
        hint = f"start Ray with `--num-cpus={_RAY_CPUS * gpus}`"
        yield warn("ray-cpus", "CPUs", what, why=why, hint=hint)


def check_final_model(node: NodeFacts) -> Iterator[Finding]:
    """Yield a warning if a training with ZeRO-3 says that its saves do not gather the weights."""
    gathers = node.training.get("gather_16bit")
    if node.training.get("zero_stage") == "3" and gathers and not is_true(gathers):
        subject = "stage3_gather_16bit_weights_on_model_save"
        why = "save_model() writes no weights: the model is only in the last checkpoint's shards"
        hint = "set it to true; or let a head consolidate the shards"
        yield warn("zero3-no-model", subject, "false, with ZeRO-3", why=why, hint=hint)


def check_relative_output(node: NodeFacts) -> Iterator[Finding]:
    """Yield a warning if a training under Ray has a relative output_dir."""
    output = node.training.get("output_dir", "")
    uses_ray = node.is_on("USE_RAY") or any(key.startswith("ray_") for key in node.training)
    if output and not output.startswith(("/", "~", "$", "`")) and uses_ray:
        why = "it is relative to where Ray starts the worker, often a directory that Ray removes"
        what, hint = f"{output}, relative, with Ray", "give an absolute path"
        yield warn("output-relative", "output_dir", what, why=why, hint=hint)


OF_ONE_NODE: tuple[Callable[[NodeFacts], Iterator[Finding]], ...] = (
    check_gpu_count,
    check_gpu_names,
    check_driver,
    check_torch_build,
    check_open_files,
    check_shared_memory,
    check_locked_memory,
    check_clock,
    check_transformers,
    check_llamafactory_ray,
    check_final_model,
    check_relative_output,
    launch_checks.check_interfaces,
)
BETWEEN_NODES: tuple[Callable[[Sequence[NodeFacts]], Iterator[Finding]], ...] = (
    compare_versions,
    compare_gpus,
    compare_gpu_models,
    compare_ranks,
    compare_clocks,
    compare_identities,
    compare_output_dirs,
    compare_disks,
    compare_models,
    launch_checks.compare_variables,
    launch_checks.compare_reachable,
    launch_checks.compare_network,
    launch_checks.compare_links,
)
