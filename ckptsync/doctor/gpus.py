"""GPUs: how many a training sees, beside how many processes are to start, and whether they are the same everywhere."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ckptsync.doctor.findings import Finding
from ckptsync.doctor.nodes import Node, grouped, is_true, told

_HANG = "ranks without a GPU of their own fail or share one, and the others wait for them"
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_NONE = ("-1", "nodevfiles", "none", "void")  # what CUDA_VISIBLE_DEVICES is where there are to be none; Slurm writes NoDevFiles
_ANY = 1 << 30
_NUMBER = re.compile(r"[0-9]{1,4}")


def visible(node: Node) -> int | None:
    """How many GPUs a process that starts there sees; where no GPU is known of, how many it is told of; ``None`` where nobody knows.

    As CUDA reads CUDA_VISIBLE_DEVICES: entries up to the first that is no device count (CUDA C++ Programming Guide, "CUDA Environment Variables").
    """
    if node.gpus is None:
        return None
    told = [node.variables[name] for name in _VISIBLE if name in node.variables]
    counts = [len(_chosen(text, len(node.gpus) or _ANY)) for text in told]
    return min([*counts, len(node.gpus)] if node.gpus else counts, default=0)


def _chosen(text: str, there: int) -> list[str]:
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


def alone(node: Node) -> Iterator[Finding]:
    """What one node shows."""
    yield from _driver(node)
    seen, wanted, there = visible(node), node.variables.get("NPROC_PER_NODE", ""), len(node.gpus or ())
    if seen is None or node.within:
        return
    is_told = any(node.variables.get(name, "").strip().lower() not in ("", *_NONE) for name in _VISIBLE)
    if _NUMBER.fullmatch(wanted) and seen < int(wanted) and (there or is_told):
        what = f"{wanted} processes are to start, {seen} GPUs are visible, {there} are there"
        hint = "set NPROC_PER_NODE and CUDA_VISIBLE_DEVICES so that both count the same GPUs"
        yield Finding("fail", "gpus-too-few", (node.name,), "NPROC_PER_NODE", what, _HANG, hint)
    for name in _VISIBLE[:2]:
        listed = [part.strip() for part in node.variables.get(name, "").split(",") if part.strip()]
        if ",".join(listed).lower() not in _NONE and len(_chosen(",".join(listed), there)) < len(listed):
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


def unequal(nodes: Sequence[Node]) -> Iterator[Finding]:
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
