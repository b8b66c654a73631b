"""The table of checks, and the checks of machines: GPUs, versions, clocks, identities, disks, limits.

`compare` runs the table over the facts of the nodes that train together, `alone` over those of one node.  A new check is a function in the table that yields
findings, and a row in docs/doctor.md.  Needs the standard library alone: Ray's workers and its driver may have nothing of what ckptsync depends on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from ckptsync.doctor import launch
from ckptsync.doctor.facts import (
    STORAGE,
    Finding,
    Node,
    fail,
    grouped,
    in_order,
    is_true,
    names_of,
    read,
    share_a_network,
    show,
    warn,
)
from ckptsync.units import show_duration

SKEW_WARN, SKEW_FAIL = 1.0, 30.0  # seconds
SHM = "/dev/shm"  # noqa: S108 - looked at, and never written
_NOFILE, _SHM, _MEMLOCK = (
    1024,
    512 << 20,
    1 << 30,
)  # file descriptors; bytes: a container's own 64 MiB of shared memory is too little
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_NO_DEVICES = ("", "-1", "nodevfiles", "none", "void")  # CUDA_VISIBLE_DEVICES where there are to be none; Slurm writes NoDevFiles
_ANY = 1 << 30
_NUMBER = re.compile(r"[0-9]{1,4}")
_BUILD = re.compile(r"\+(cpu|cu[0-9]+|rocm[0-9.]+)$")  # one torch is 2.8.0 from PyPI and 2.8.0+cu128 from pytorch.org
_NCCL = re.compile(r"libnccl\.so\.([0-9]+\.[0-9.]+)$")
_RAY_CPUS = 10  # that LLaMA-Factory 0.9.5 asks of Ray for each GPU


def compare(facts: Iterable[Mapping[str, Any]]) -> tuple[Finding, ...]:
    """Return what is wrong with nodes that are to train together, failures first.

    ``facts``: of one node or more, as `ckptsync.doctor.probe.gather` gives them.  Of several processes on a node (one id, one boot) the first counts.
    """
    nodes = list({(node.name, node.boot): node for node in reversed([read(one) for one in facts])}.values())[::-1]
    found = [finding for node in nodes for check in OF_ONE_NODE for finding in check(node)]
    found += launch.compare_launch(nodes)
    if len(nodes) > 1:
        found += [finding for check in BETWEEN_NODES for finding in check(nodes)]
    return in_order(found)


def alone(facts: Mapping[str, Any]) -> tuple[Finding, ...]:
    """Return what is wrong with a node whoever trains with it."""
    node = read(facts)
    return in_order([*(finding for check in OF_ONE_NODE for finding in check(node)), *launch.check_launch(node, [node])])


def check_clock(node: Node) -> Iterator[Finding]:
    """Check a node's clock against the store's."""
    if node.clock is not None and abs(node.clock) > SKEW_WARN:
        what = f"{show_duration(abs(node.clock))} {'ahead of' if node.clock > 0 else 'behind'} the store's"
        yield _skew(abs(node.clock), (node.name,), what)


def compare_clocks(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Check the two clocks that are farthest from each other."""
    known = sorted((node.clock, node.name) for node in nodes if node.clock is not None)
    if known and known[-1][0] - known[0][0] > SKEW_WARN:
        apart, behind, ahead = known[-1][0] - known[0][0], known[0][1], known[-1][1]
        yield _skew(apart, tuple(sorted((behind, ahead))), f"{show_duration(apart)} apart, {behind} behind {ahead}")


def _skew(seconds: float, names: tuple[str, ...], what: str) -> Finding:
    why = "times of one save are compared between nodes, S3 refuses requests signed a quarter of an hour off, and logs do not fit together"
    hint = "let chrony or systemd-timesyncd set it: `timedatectl set-ntp true`"
    return (fail if seconds > SKEW_FAIL else warn)("clock", names, "the clock", what, why=why, hint=hint)


def check_limits(node: Node) -> Iterator[Finding]:
    """Check the limits of the system that trainings run into; below 0 there is no limit."""
    limits = node.limits
    if 0 <= limits.get("nofile", _NOFILE) < _NOFILE:
        why = "each rank, data loader and connection of NCCL needs some; a save fails with `Too many open files`"
        hint = "raise it: LimitNOFILE= of a unit, /etc/security/limits.conf"
        yield warn("few-files", node.name, "ulimit -n", f"{limits['nofile']}, {_NOFILE} or more expected", why=why, hint=hint)
    if limits.get("shm", _SHM) < _SHM:
        why = "data loaders and NCCL share memory there: `Bus error`, or a hang"
        hint = "`--shm-size=16g` for a container, else `mount -o remount,size=50% /dev/shm`"
        yield warn("small-shm", node.name, SHM, f"{limits['shm'] >> 20} MiB free, {_SHM >> 20} expected", why=why, hint=hint)
    if limits.get("hcas") and 0 <= limits.get("memlock", -1) < _MEMLOCK and node.variables.get("NCCL_IB_DISABLE") != "1":
        what = f"{limits['memlock'] >> 10} KiB, with {limits['hcas']} adapters for RDMA"
        why = "NCCL registers memory with the adapter, and fails where it may not"
        yield warn("memlock", node.name, "ulimit -l", what, why=why, hint="`ulimit -l unlimited`, LimitMEMLOCK=infinity")


def visible(node: Node) -> int | None:
    """Return how many GPUs a process sees that starts there; ``None`` where nobody knows.

    As CUDA reads CUDA_VISIBLE_DEVICES: entries up to the first that is no device count (CUDA C++ Programming Guide, "CUDA Environment Variables").
    Where no GPU is known of, it is how many the variable names.
    """
    if node.gpus is None:
        return None
    counts = [len(_devices(node.variables[name], len(node.gpus) or _ANY)) for name in _VISIBLE if name in node.variables]
    return min([*counts, len(node.gpus)] if node.gpus else counts, default=0)


def _devices(text: str, there: int) -> list[str]:
    found: list[str] = []
    for entry in (part.strip() for part in text.split(",")):
        is_index = bool(_NUMBER.fullmatch(entry))
        if entry in found or (is_index and int(entry) >= there) or not (is_index or entry.startswith(("GPU-", "MIG-"))):
            break
        found.append(entry)
    return found


def check_gpus(node: Node) -> Iterator[Finding]:
    """Check that a node sees the GPUs that its variables ask for."""
    seen, wanted, there = visible(node), node.variables.get("NPROC_PER_NODE", ""), len(node.gpus or ())
    if seen is None or node.within:
        return
    is_told = any(node.variables.get(name, "").strip().lower() not in _NO_DEVICES for name in _VISIBLE)
    if _NUMBER.fullmatch(wanted) and seen < int(wanted) and (there or is_told):
        what = f"{wanted} processes are to start, {seen} GPUs are visible, {there} are there"
        why = "ranks without a GPU of their own fail or share one, and the others wait for them"
        hint = "set NPROC_PER_NODE and CUDA_VISIBLE_DEVICES so that both count the same GPUs"
        yield fail("gpus-too-few", node.name, "NPROC_PER_NODE", what, why=why, hint=hint)
    for name in _VISIBLE[:2]:
        listed = [part.strip() for part in node.variables.get(name, "").split(",") if part.strip()]
        if ",".join(listed).lower() not in _NO_DEVICES and len(_devices(",".join(listed), there)) < len(listed):
            what = f"{node.variables[name]}, where there are {there} GPUs"
            why = "CUDA ignores all entries from the first that is no device: the training sees fewer GPUs than it is told"
            hint = f"name devices from 0 to {there - 1}, each once" if there else "look at the driver: nvidia-smi, or rocm-smi"
            yield fail("gpus-not-there", node.name, name, what, why=why, hint=hint)


def check_driver(node: Node) -> Iterator[Finding]:
    """Check that the driver knows the CUDA that torch is built for."""
    build = node.builds.get("cuda", "")
    if build and node.driver_cuda and version(node.driver_cuda)[:1] < version(build)[:1]:
        what, why = f"knows CUDA {node.driver_cuda}, torch is built for {build}", "torch finds no GPU, or the first kernel fails"
        yield fail(
            "driver-too-old", node.name, "the driver", what, why=why, hint="install a newer driver, or a torch of an older CUDA"
        )


def compare_gpus(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Check that all nodes see GPUs, or none does, and that they are of one kind."""
    known = [node for node in nodes if node.gpus is not None]
    having = grouped(
        (n for n in known if not n.within), lambda node: f"{visible(node) or 0} GPUs" if node.gpus and visible(node) else ""
    )
    if "" in having and len(having) > 1:
        why = "there ranks train on the CPU, or fail, and the others wait for them"
        hint = "look at the driver where there are none: nvidia-smi, or rocm-smi; is the container given its GPUs?"
        yield fail("gpus-on-some", names_of(having), "GPUs", show(having), why=why, hint=hint)
    kinds = grouped((n for n in known if n.gpus), lambda node: ", ".join(sorted(set(node.gpus or ()))))
    if len(kinds) > 1 or any(len(set(node.gpus or ())) > 1 for node in known):
        why = "NCCL may choose other paths for each kind and hang; the slowest sets the pace, the smallest the memory"
        hint = "use GPUs of one kind, or CUDA_VISIBLE_DEVICES to leave the others out"
        yield warn("gpus-mixed", names_of(kinds), "GPUs", show(kinds), why=why, hint=hint)


def compare_ranks(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Check that all nodes would start as many ranks.

    torchrun trains with different numbers.  LLaMA-Factory calls torchrun only where a node sees several GPUs, or is forced to.
    """
    nodes = [node for node in nodes if node.gpus is not None and not node.within and not is_true(node.variables.get("USE_RAY", ""))]
    if len({_processes(node) for node in nodes}) < 2:
        return
    groups = grouped(nodes, lambda node: f"{_processes(node)} ranks ({visible(node)} of {len(node.gpus or ())} GPUs visible)")
    alone = [
        node.name
        for node in nodes
        if "llamafactory" in node.versions and (visible(node) or 0) < 2 and not is_true(node.variables.get("FORCE_TORCHRUN", ""))
    ]
    if alone:
        why = f"LLaMA-Factory trains alone on a node that sees fewer than two GPUs, and the other nodes wait for {', '.join(alone)}"
        hint = "export FORCE_TORCHRUN=1 on all nodes, or set NPROC_PER_NODE and CUDA_VISIBLE_DEVICES alike on them"
        yield fail("ranks-differ", names_of(groups), "NPROC_PER_NODE", show(groups), why=why, hint=hint)
        return
    why = (
        "torchrun trains with different numbers of ranks; `accelerate launch` starts num_processes / num_machines on every node, "
        "and tensor parallelism or HSDP within a node may not fit"
    )
    hint = "if this is not meant, set NPROC_PER_NODE and CUDA_VISIBLE_DEVICES alike on all nodes"
    yield warn("ranks-differ", names_of(groups), "NPROC_PER_NODE", show(groups), why=why, hint=hint)


def _processes(node: Node) -> int | None:
    """Return how many ranks a launcher starts there: NPROC_PER_NODE, else one for each GPU that is visible (LLaMA-Factory, launcher.py)."""
    given = node.variables.get("NPROC_PER_NODE", "")
    return int(given) if _NUMBER.fullmatch(given) else visible(node)


def _reached_at(node: Node) -> str:
    return ", ".join(address for address in node.addresses if not launch.is_loopback(address))


_IDENTITIES: tuple[tuple[str, Callable[[Node], str], str, str], ...] = (
    (
        "the host name",
        lambda node: node.host,
        "logs, Ray and torchrun name nodes by it; nobody can tell whose checkpoint is whose",
        "`hostnamectl hostname NAME`, another on each",
    ),
    (
        "/etc/machine-id",
        lambda node: node.machine,
        "a cloned image: programs that take it for the machine (ckptsync's node id, DHCP, journald) take two for one",
        "rm /etc/machine-id && systemd-machine-id-setup, on all but one",
    ),
    (
        "the address of the host's name",
        _reached_at,
        "a node that connects to another by it reaches itself: containers have it, each behind a bridge of its own",
        "`--network=host` for containers; else another address on each",
    ),
)


def compare_identities(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Check that no two machines share a name, an id or an address; containers and namespaces of one machine may."""
    for what, value, why, hint in _IDENTITIES:
        for shared, names in grouped((n for n in nodes if value(n)), value).items():
            if len({node.boot for node in nodes if node.name in names and node.boot}) > 1:
                yield warn("identity-shared", names, what, f"{shared} on each of them", why=why, hint=hint)


def compare_outputs(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Check that output directories are the same strings everywhere, but for nodes that are one machine."""
    groups = grouped((n for n in nodes if n.output_dirs), lambda node: ", ".join(sorted(node.output_dirs)))
    if len(groups) > 1 and not share_a_network(nodes):
        why = "rank 0 tells the others where to resume from, and each looks at its own path; runs get different names in the store"
        yield warn(
            "output-differs", names_of(groups), "output_dir", show(groups), why=why, hint="give all nodes the same absolute path"
        )


def compare_disks(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Check that a path is one disk for all nodes, or a disk of its own for each."""
    for path in sorted({path for node in nodes for path in node.output_dirs}):
        yield from _compare_disk(
            path, sorted((n for n in nodes if path in n.output_dirs and n.output_dirs[path].nonce), key=lambda n: n.name)
        )


def _compare_disk(path: str, nodes: Sequence[Node]) -> Iterator[Finding]:
    names, shared, apart = tuple(node.name for node in nodes), set[str](), False
    for a, b in combinations(nodes, 2):
        here, there = a.output_dirs[path], b.output_dirs[path]
        if here.nonce in there.seen or there.nonce in here.seen:  # whoever gathered later saw the other's word
            shared |= {a.name, b.name}
        else:
            apart = True
    remount = "mount the same file system on all nodes, or on none"
    if shared and apart:
        what = f"one disk for {', '.join(sorted(shared))}, another for {', '.join(sorted({*names} - shared)) or 'some of them'}"
        why = "trainers take an output directory for shared, or for each node's own: files that they leave out are nowhere then"
        yield fail("disk-differs", names, path, what, why=why, hint=remount, code=STORAGE)
    elif apart and len({bool(node.output_dirs[path].server) for node in nodes}) > 1:
        what = show(grouped(nodes, lambda node: node.output_dirs[path].server or "a disk of the node's own"))
        why = "a mount is missing: files that the nodes mean to share lie on one machine's own disk"
        yield fail("disk-differs", names, path, what, why=why, hint=remount, code=STORAGE)
    elif shared and len({node.uid for node in nodes if node.uid is not None}) > 1:
        what = show(grouped(nodes, lambda node: f"uid {node.uid} ({node.user})"))
        why = "another node may not read, replace or rotate what one node writes: safetensors 0.8 and newer write files for their owner alone"
        yield warn("users-differ", names, path, what, why=why, hint="train as one user on all nodes")
    elif shared and any(is_true(node.training.get("save_on_each_node", "")) for node in nodes):
        why = "every node writes the same names into one directory: a shard may be lost in silence"
        hint = "set save_on_each_node: false, or give each node a disk of its own"
        yield fail("disk-shared", names, path, "shared by the nodes, and save_on_each_node is set", why=why, hint=hint)


def compare_models(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Check that all nodes train the same model, by its configuration and the sizes of its files."""
    groups = grouped((n for n in nodes if n.model), lambda node: node.digest)
    if len(groups) > 1:
        why = "ranks begin with other weights or shapes: they fail, hang, or train something that nobody has"
        hint = "copy the model again, to all nodes alike"
        yield warn("model-differs", names_of(groups), "the base model", show(groups), why=why, hint=hint)


def version(text: str) -> tuple[int, ...]:
    """Return ``(5, 15, 0)`` for ``5.15.0.dev0``; empty for what is none."""
    found = re.match(r"[0-9]{1,6}(\.[0-9]{1,6})*", text)
    return tuple(map(int, found[0].split("."))) if found else ()


def _library(name: str) -> Callable[[Node], str]:
    return lambda node: node.versions.get(name, "")


def _overrides(node: Node) -> str:
    """Return the versions of libnccl that go before torch's own; where the file's name does not tell it, the path."""
    return ", ".join(found[1] if (found := _NCCL.search(path)) else path for path in node.overrides)


_HANGS = "ranks of different builds hang in the first collective, or fail in it"
_FILES = "ranks of one save write, and read, other files or formats"
_SAME: tuple[tuple[str, bool, Callable[[Node], str], str], ...] = (  # name, whether a difference is a failure, value, reason
    ("torch", True, lambda node: _BUILD.sub("", node.versions.get("torch", "")), _HANGS),
    ("the CUDA of torch", True, lambda node: node.builds.get("cuda", ""), _HANGS),
    ("the HIP of torch", True, lambda node: node.builds.get("hip", ""), _HANGS),
    ("nccl", True, _library("nccl"), _HANGS),
    ("libnccl", True, _overrides, f"LD_PRELOAD or LD_LIBRARY_PATH puts another NCCL before torch's own: {_HANGS}"),
    ("transformers", True, _library("transformers"), _FILES),
    ("deepspeed", True, _library("deepspeed"), _FILES),
    ("ray", True, _library("ray"), "Ray refuses a node of another version"),
    (
        "python",
        True,
        lambda node: ".".join(node.python.split(".")[:2]),
        "another minor version does not read what ranks, or Ray, pickle",
    ),
    ("llamafactory", False, _library("llamafactory"), "its arguments, and who starts whom, change between versions"),
    ("accelerate", False, _library("accelerate"), _FILES),
    ("peft", False, _library("peft"), _FILES),
    ("safetensors", False, _library("safetensors"), "files get other modes: 0600 from 0.8 on"),
    ("the driver", False, lambda node: node.driver, "what works on one node may not on the other"),
)


def compare_versions(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Check that libraries are the same on all nodes whose training's Python is known."""
    known = [node for node in nodes if node.versions or node.builds]
    for name, must_equal, value, why in _SAME:
        groups = grouped((n for n in known if n.driver) if name == "the driver" else known, value)
        if len(groups) > 1:
            hint = f"install the same {name} on all nodes"
            yield (fail if must_equal else warn)("versions-differ", names_of(groups), name, show(groups), why=why, hint=hint)


def check_versions(node: Node) -> Iterator[Finding]:
    """Check for versions that are known to fail."""
    had = {name: version(text) for name, text in node.versions.items()}
    transformers, factory, ray = had.get("transformers", ()), had.get("llamafactory", ()), had.get("ray", ())
    if transformers >= (5, 15) and is_true(node.training.get("save_on_each_node", "")):
        what = f"true, with transformers {node.versions['transformers']}"
        why = "since 5.15 nodes other than the first may leave out files of their checkpoints"
        hint = "set it to false: ckptsync collects each node's own files from where they lie"
        yield warn("save-on-each-node", node.name, "save_on_each_node", what, why=why, hint=hint)
    if (4, 36) <= transformers < (4, 39) and node.variables.get("NNODES", "") not in ("", "1"):
        why = "4.36 to 4.38 rename finished saves, and nodes other than the first may keep theirs in tmp-checkpoint-N (transformers#27925)"
        what = f"{node.versions['transformers']}, on several nodes"
        yield warn("tmp-checkpoint", node.name, "transformers", what, why=why, hint="install 4.40 or newer")
    if node.gpus and node.versions.get("torch", "").endswith("+cpu"):
        what = f"{node.versions['torch']}, where there are {len(node.gpus)} GPUs"
        hint = "install a torch for CUDA, or ROCm; or name the Python that trains with --python"
        yield warn(
            "torch-for-cpus", node.name, "torch", what, why="it is built for no GPU: the training runs on the CPUs", hint=hint
        )
    if () < factory <= (0, 9, 2) and () < ray < (2, 55):
        what = f"LLaMA-Factory {node.versions['llamafactory']} with Ray {node.versions['ray']}"
        why = "both destroy the process group: after the last save the training ends with an AssertionError (LLaMA-Factory#7327); its checkpoints are safe"
        yield warn("ray-destroys-twice", node.name, "ray", what, why=why, hint="LLaMA-Factory 0.9.3, or Ray 2.55, or newer")
    if factory == (0, 9, 5) and is_true(node.variables.get("USE_RAY", "")) and node.gpus is not None:
        yield from _check_ray_cpus(node, visible(node) or 0)


def _check_ray_cpus(node: Node, gpus: int) -> Iterator[Finding]:
    """LLaMA-Factory 0.9.5 asks Ray for ten CPUs with each GPU of the cluster, or, started where there is no GPU, with each of its CPUs."""
    if not gpus:
        why = f"started here, LLaMA-Factory 0.9.5 asks Ray for {_RAY_CPUS} CPUs for each CPU that Ray has, and waits for ever"
        hint = "start llamafactory-cli on a node that sees a GPU, or train without USE_RAY"
        yield warn("ray-cpus", node.name, "GPUs", f"none is visible, {node.cpus} CPUs", why=why, hint=hint)
    elif node.cpus < _RAY_CPUS * gpus:  # Ray may have been told of more than there are
        why = f"LLaMA-Factory 0.9.5 asks Ray for {_RAY_CPUS} CPUs with each GPU, and waits for ever where Ray has fewer"
        hint = f"start Ray with `--num-cpus={_RAY_CPUS * gpus}`"
        yield warn("ray-cpus", node.name, "CPUs", f"{node.cpus} CPUs for {gpus} GPUs", why=why, hint=hint)


def check_training(node: Node) -> Iterator[Finding]:
    """Check for settings of the training's own file that lose files."""
    given = node.training
    if given.get("zero_stage") == "3" and given.get("gather_16bit") and not is_true(given["gather_16bit"]):
        why = "save_model() writes no weights: the final model is only in the shards of the last checkpoint"
        hint = "set it to true; or let a head consolidate the shards"
        yield warn(
            "zero3-no-model", node.name, "stage3_gather_16bit_weights_on_model_save", "false, with ZeRO-3", why=why, hint=hint
        )
    output = given.get("output_dir", "")
    uses_ray = is_true(node.variables.get("USE_RAY", "")) or any(key.startswith("ray_") for key in given)
    if output and not output.startswith("/") and uses_ray:
        why = "it is relative to wherever Ray starts the worker, often a session's directory that is removed with it"
        yield warn(
            "output-relative", node.name, "output_dir", f"{output}, relative, with Ray", why=why, hint="give an absolute path"
        )


OF_ONE_NODE: tuple[Callable[[Node], Iterator[Finding]], ...] = (
    check_gpus,
    check_driver,
    check_limits,
    check_clock,
    check_versions,
    check_training,
    launch.check_interfaces,
)
BETWEEN_NODES: tuple[Callable[[Sequence[Node]], Iterator[Finding]], ...] = (
    compare_versions,
    compare_gpus,
    compare_ranks,
    compare_clocks,
    compare_identities,
    compare_outputs,
    compare_disks,
    compare_models,
    launch.check_reachable,
    launch.compare_network,
    launch.compare_links,
)
