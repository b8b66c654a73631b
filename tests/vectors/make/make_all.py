"""Make the vectors again, all or by name: make_all.py [--scratch DIR] [NAME ...].

Runs in an environment that has the packages of README.md. Each vector is made in a scratch folder by one of the scripts
beside this one, and copied to ../NAME without what nobody needs.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
VECTORS = HERE.parent
DEMO = VECTORS.parents[1] / "ckptsync" / "demo_data"
DROPPED = ("optimizer_0_rank*.bin", "optim_world_size_*", "extra_state_world_size_*", "training_args.bin", "zero_to_fp32.py", "zero_to_torch.py", "README.md", "runs")
PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "peft", "safetensors")
TIED = {"lm_head.weight": "model.embed_tokens.weight"}
PATIENCE_S = 220
TEARDOWN_S = 15


@dataclass(frozen=True)
class Vector:
    """One checkpoint: who writes it, where it lies, what it is like."""

    name: str
    script: str
    arguments: tuple[str, ...]
    kind: str
    framework: str
    exercises: str
    world: int = 1
    nodes: int = 1
    base: str = "base"
    checkpoint: str = "out/checkpoint-4"
    keep: str = "full"
    auto: str = "full"
    optimizer: bool = False
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def sources(self) -> list[str]:
        """Return the folders, one a node, that together are the checkpoint."""
        if self.nodes == 1:
            return [self.checkpoint]
        return [f"node{node}/{self.checkpoint}" for node in range(self.nodes)]


def trainer(
    name: str, mode: str, exercises: str, *, world: int, nodes: int = 1, extra: tuple[str, ...] = (), **facts: Any
) -> Vector:
    """Return a vector of the HF Trainer."""
    optimizer = bool(facts.pop("optimizer", False))
    keep = facts.pop("keep", "full")
    kind = "dcp" if mode.startswith("fsdp") else "zero" if mode.startswith("zero") else "safetensors"
    if kind == "dcp":
        facts |= {"model_folder": "pytorch_model_fsdp_0"}
    if kind == "zero":
        facts |= {"stage": int(mode[-1]), "tag": "global_step4"}
    return Vector(
        name, "hf_trainer.py", (mode, *extra), kind, "HF Trainer", exercises, world, nodes, keep=keep, auto=keep,
        optimizer=optimizer, facts={"dtype": "float32", **facts},
    )  # fmt: skip


def raw(
    name: str, stage: int, exercises: str, *, world: int, extra: tuple[str, ...] = (), tied: bool = False, note: str = ""
) -> Vector:
    """Return a vector of DeepSpeed without a trainer."""
    bf16, frozen = "--bf16" in extra, "--frozen" in extra
    facts: dict[str, Any] = {"stage": stage, "tag": "global_step2", "dtype": "bfloat16" if bf16 else "float32", "frozen": frozen}
    facts["notes"] = [note] if note else []
    if tied:
        facts |= {"tied": True, "tied_names": TIED}
    return Vector(
        name, "raw_deepspeed.py", (str(stage), *extra), "zero", "DeepSpeed", exercises, world, base="base-tied" if tied else "base",
        checkpoint="out", keep="fp32_master", auto="model_dtype" if bf16 else "fp32_master", facts=facts,
    )  # fmt: skip


def dress(
    name: str, script: str, arguments: tuple[str, ...], framework: str, exercises: str, world: int, checkpoint: str,
    packages: tuple[str, ...], **facts: Any,
) -> Vector:
    """Return a vector of a framework that has a distributed checkpoint of its own."""
    facts = {"dtype": "mixed", "model_folder": "", "packages": packages, **facts}
    return Vector(name, script, arguments, "dcp", framework, exercises, world, base="", checkpoint=checkpoint, facts=facts)


def dcp(name: str, what: str, exercises: str, *, world: int, note: str = "") -> Vector:
    """Return a vector of torch.distributed.checkpoint by hand."""
    facts = {
        "notes": [note] if note else [],
        "dtype": "mixed",
        "model_folder": "",
        "alternatives": [["plain"], ["items"]],
        "wrappers": {"wrapped": "model"},
    }
    return Vector(name, "raw_dcp.py", (what,), "dcp", "torch", exercises, world, base="", checkpoint="wrapped", facts=facts)


def shards(name: str, what: str, framework: str, exercises: str, *, world: int, shards_folder: str) -> Vector:
    """Return a vector of DCP in safetensors."""
    base = "" if framework == "torch" else "base"
    facts = {"dtype": "mixed" if framework == "torch" else "float32", "shards_folder": shards_folder}
    return Vector(
        name, "hf_writer.py", (what,), "dcp_safetensors", framework, exercises, world, base=base, checkpoint="out", facts=facts
    )  # fmt: skip


def ranked(name: str, mode: str, framework: str, exercises: str, *, world: int, base: str = "base", **facts: Any) -> Vector:
    """Return a vector of a file a rank, or (``full``) of one that all ranks wrote together."""
    bf16 = ("--bf16",) if facts.get("dtype") == "bfloat16" else ()
    kind = "bin" if mode == "full" else "per_rank"
    if base == "base-tied":
        facts |= {"tied": True, "tied_names": TIED}
    return Vector(
        name, "rank_files.py", (mode, *bf16), kind, framework, exercises, world, base=base, checkpoint="out",
        facts={"dtype": "float32", **facts},
    )  # fmt: skip


def saved(name: str, what: str, exercises: str, **more: Any) -> Vector:
    """Return a vector of torch.save alone."""
    facts = {"dtype": "float32", **more.pop("facts", {})}
    return Vector(name, "bins.py", (what,), "bin", "torch", exercises, checkpoint="out", facts=facts, **more)


ODD = ("--bf16", "--odd")
ODD_NOTE = "DeepSpeed leaves the float buffers of a bf16 model in fp32; `scratch` is not persistent and not in the file"
LORA_NOTE = (
    "zero_to_fp32 and the shards say lora_A.default.weight; adapter_model.safetensors beside them says lora_A.weight, same bits"
)
WHOLE_PEFT_NOTE = "the framework's tool knows the shards' names only; the reference is peft's save_pretrained of the gathered state"
TIED_NOTE = "zero_to_fp32 adds lm_head.weight, the same bits as its owner; safe_get_full_fp32_param knows the owner only"
ALL = (
    trainer("hf-fsdp2-2node", "fsdp2", "FSDP2 SHARDED; .metadata on node 0 only; the optimizer kept", world=4, nodes=2, optimizer=True),
    trainer("hf-zero3-2node", "zero3", "ZeRO-3, gather16 off; latest, config and tokenizer on node 0 only", world=4, nodes=2),
    trainer("hf-zero2", "zero2", "ZeRO-2; the Trainer puts a whole model.safetensors beside the shards", world=2),
    trainer("hf-zero1", "zero1", "ZeRO-1 over an odd world; a whole model.safetensors beside the shards", world=3),
    trainer("hf-fsdp1", "fsdp1", "FSDP1 SHARDED", world=2),
    trainer("hf-ddp", "ddp", "a whole model, nothing to merge", world=2),
    trainer(
        "hf-zero3-lora", "zero3", "ZeRO shards hold the trained subset only; adapter beside them", world=2, extra=("--lora",),
        adapter=True, adapter_file="out/checkpoint-4/adapter_model.safetensors", notes=[LORA_NOTE],
    ),
    trainer(
        "hf-fsdp2-lora", "fsdp2", "the DCP folder holds LoRA keys only, under the saved names", world=2, extra=("--lora",), adapter=True,
        notes=["no adapter_config.json anywhere in the checkpoint"],
    ),
    Vector(
        "acc-fsdp2-bf16-tied", "accelerate_state.py", ("fsdp2", "--bf16"), "dcp", "accelerate", "both names of a tied weight stored", 3,
        base="base-tied", checkpoint="out/checkpoints/checkpoint_0",
        facts={"dtype": "bfloat16", "tied": True, "tied_names": TIED, "model_folder": "pytorch_model_fsdp_0"},
    ),
    Vector(
        "acc-zero3", "accelerate_state.py", ("zero3",), "zero", "accelerate", "the tag is pytorch_model", 2,
        checkpoint="out/checkpoints/checkpoint_0", facts={"dtype": "float32", "stage": 3, "tag": "pytorch_model"},
    ),
    Vector(
        "acc-fsdp2-peft", "adapters.py", ("fsdp2",), "dcp", "accelerate", "a tied base model and its DoRA adapter in the same shards", 3,
        base="base-tied", checkpoint="out/checkpoints/checkpoint_0", keep="adapter", auto="adapter",
        facts={"dtype": "float32", "adapter": True, "notes": [WHOLE_PEFT_NOTE], "model_folder": "pytorch_model_fsdp_0"},
    ),
    Vector(
        "acc-zero2-peft", "adapters.py", ("zero2",), "zero", "accelerate", "base and adapter in the same shards, of a model compiled in part", 2,
        checkpoint="out/checkpoints/checkpoint_0", keep="adapter", auto="adapter",
        facts={"dtype": "float32", "adapter": True, "notes": [WHOLE_PEFT_NOTE], "stage": 2, "tag": "pytorch_model"},
    ),
    raw(
        "raw-ds-zero1-frozen", 1, "frozen weights lie in `module` only", world=2, extra=("--frozen",),
        note="frozen_param_shapes and frozen_param_fragments are None at stage 1, and zero_to_fp32 drops the frozen weights",
    ),
    raw("raw-ds-zero2-frozen", 2, "frozen weights whole, twice in the file", world=2, extra=("--frozen",)),
    raw("raw-ds-zero3-bf16-frozen", 3, "frozen fragments stay bf16 in model_states", world=3, extra=("--bf16", "--frozen")),
    raw("raw-ds-zero1-bf16", 1, "stage 1 by DeepSpeedZeroOptimizer (stage_1_and_2)", world=2, extra=("--bf16",)),
    raw(
        "raw-ds-zero1-bf16-fp32acc", 1, "stage 1 by BF16_Optimizer", world=2, extra=("--bf16", "--accumulate-fp32"),
        note="no zero_stage, so zero_to_fp32 refuses it; its partitions joined and cut by param_shapes are the reference, bit for bit",
    ),
    raw(
        "raw-ds-zero2-bf16-tied", 2, "tied names share a storage in `module`; paddings at the groups' ends", world=3, extra=("--bf16",),
        tied=True, note=TIED_NOTE,
    ),
    raw(
        "raw-ds-zero3-tied", 3, "several sub-groups; shared_params on rank 0 only", world=2, extra=("--sub-group-size", "1000"), tied=True,
        note=TIED_NOTE + "; no param spans two sub-groups: DeepSpeed 0.19 closes a sub-group after the param that fills it",
    ),
    raw("raw-ds-zero2-odd", 2, "buffers of every sort, params smaller than the world", world=3, extra=ODD, note=ODD_NOTE),
    raw("raw-ds-zero3-odd", 3, "buffers of every sort, params smaller than the world", world=3, extra=ODD, note=ODD_NOTE),
    raw(
        "raw-ds-zero2-aligned", 2, "param_alignment_paddings that are not 0, params in round-robin order", world=3,
        extra=(*ODD, "--round-robin"), note=ODD_NOTE,
    ),
    raw(
        "raw-ds-zero2-dealt", 2, "params in round-robin order, slices told of the order before it", world=3,
        extra=(*ODD, "--dealt"), note="masters as zero_to_fp32 finds them; " + ODD_NOTE,
    ),
    dcp(
        "dcp-dress", "dress", "empty chunks, 0-d, columns, strides, views, odd names, items that are no tensors", world=3,
        note="empty chunks of two ranks at one offset are one chunk in .metadata",
    ),
    dcp("dcp-mesh", "mesh", "HSDP, two dimensions of shards, FSDP over tensor parallelism", world=4, note="chunks are not in the order of their offsets"),
    dress("dcp-local", "dcp_writers.py", ("local", "mesh"), "torch", "__R.metadata of each rank, none of all", 4, "out", (), section="model"),
    dress("titan", "titan.py", (), "torchtitan", "the model at the top, beside optimizer, dataloader and train_state", 3, "checkpoint/step-2", ("torchtitan",)),
    dress("titan-last", "titan.py", ("--last",), "torchtitan", "the last step: the model alone, in bf16", 2, "checkpoint/step-2", ("torchtitan",)),
    dress(
        "lightning", "lightnings.py", ("sharded",), "Lightning", "state_dict beside optimizer_0, and meta.pt", 3, "out.ckpt", ("lightning",),
        section="state_dict",
    ),
    Vector(
        "lightning-file", "lightnings.py", ("file",), "lightning", "Lightning", "one file, and objects of odd classes in it", base="", checkpoint="out",
        facts={"dtype": "mixed", "packages": ("lightning",)},
    ),
    Vector(
        "llamafactory-v1", "llamafactory_v1.py", (), "safetensors", "LLaMA-Factory v1", "a whole model in a directory of the checkpoint",
        checkpoint="out/checkpoint-2", facts={"dtype": "float32", "home": "model", "packages": ("llamafactory",)},
    ),
    dress(
        "megatron", "megatron_dist.py", (), "Megatron-Core", "torch_dist: no paths, stacked layers, extra states, plans in .metadata", 2,
        "out/iter_0000002", ("megatron-core",),
    ),
    dcp("dcp-fp8", "dtypes", "every dtype that torch and safetensors share, fp8, unsigned and complex among them", world=1),
    shards("tf5-fsdp2", "fsdp", "transformers 5", "FSDP2; the optimizer's .metadata proves the shapes", world=3, shards_folder=""),
    shards("tf5-hsdp", "hsdp", "transformers 5", "two replicas, each with some of the tensors; config.json proves them", world=4, shards_folder=""),
    shards("hf-writer-mesh", "mesh", "torch", "FSDP over tensor parallelism, three files a rank, scalars", world=4, shards_folder="sharded"),
    ranked("acc-ranks-fsdp2-tied", "fsdp2", "accelerate", "use_dcp=False: DTensors", world=3, base="base-tied", dtype="bfloat16"),
    ranked("acc-ranks-fsdp1", "fsdp1", "accelerate", "use_dcp=False: ShardedTensors", world=2),
    ranked("acc-full-fsdp2", "full", "accelerate", "pytorch_model_fsdp.bin, written by rank 0", world=2, base="base-tied"),
    ranked("verl-fsdp2", "verl", "verl", "an actor, its configuration in huggingface/", world=3, dtype="bfloat16"),
    ranked("verl-mesh", "mesh", "torch", "HSDP, FSDP over tensor parallelism, columns, buffers, one storage for two names", world=4),
    ranked("verl-parallel", "parallel", "torch", "FSDP within tensor parallelism: what that leaves alone is stored once a group", world=4, base=""),
    ranked("verl-hsdp-parallel", "parallel", "torch", "two replicas of FSDP within tensor parallelism", world=8, base="", dtype="bfloat16"),
    saved("bin-sharded", "sharded", "pytorch_model-….bin with an index", facts={"dtype": "bfloat16"}),
    saved("bin-legacy", "legacy", "torch's container of before 1.6"),
    saved("bin-adapter", "adapter", "adapter_model.bin", keep="adapter", auto="adapter", facts={"adapter": True}),
    Vector("hf-sharded", "whole.py", ("sharded",), "safetensors", "transformers", "an index over several files", checkpoint="out", facts={"dtype": "bfloat16"}),
    Vector(
        "peft-adapter", "whole.py", ("adapter",), "safetensors", "peft", "an adapter with modules_to_save", checkpoint="out", keep="adapter",
        auto="adapter",
        facts={
            "dtype": "float32", "adapter": True, "adapter_file": "out/adapter_model.safetensors", "merged": "reference/full.safetensors",
        },
    ),
)  # fmt: skip
DEMOS = (
    trainer("fsdp2", "fsdp2", "demo", world=2, nodes=2, optimizer=True),
    trainer("zero3", "zero3", "demo", world=2, nodes=2),
)


def free_port() -> int:
    """Return a port nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def command(vector: Vector, node: int, port: int, *, up: str) -> list[str]:
    """Return the command of one node: torchrun's agent, or Python itself for a world of one."""
    script = [str(HERE / vector.script), *vector.arguments, "--reference", f"{up}reference"]
    if vector.base:
        script += ["--base", f"{up}../{vector.base}"]
    if vector.world == 1:
        return [sys.executable, *script]
    ranks = ["--nproc-per-node", str(vector.world // vector.nodes), "--nnodes", str(vector.nodes), "--node-rank", str(node)]
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *ranks,
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(port),
        *script,
    ]


def run(vector: Vector, scratch: Path) -> None:
    """Run every node in its own working directory until the reference is there; the teardown may fail, it is too late to matter."""
    port = free_port()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    processes, logs = [], []
    for node in range(vector.nodes):
        cwd = scratch / f"node{node}" if vector.nodes > 1 else scratch
        cwd.mkdir(parents=True)
        logs.append(scratch / f"node{node}.log")
        argv = command(vector, node, port, up="../" if vector.nodes > 1 else "")
        with logs[-1].open("wb") as log:
            processes.append(subprocess.Popen(argv, cwd=cwd, env=environment, stdout=log, stderr=log, start_new_session=True))
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        if (scratch / "reference" / f"{vector.keep}.safetensors").exists():
            deadline = min(deadline, time.monotonic() + TEARDOWN_S)
        time.sleep(0.2)
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if not (scratch / "reference" / f"{vector.keep}.safetensors").exists():
        sys.exit(f"{vector.name} failed:\n" + "\n".join(log.read_text(errors="replace")[-3000:] for log in logs))


def describe(vector: Vector, scratch: Path) -> dict[str, Any]:
    """Return what vector.json says."""
    facts = {"tied": False, "frozen": False, "notes": [], **vector.facts}
    packages = facts.pop("packages", ())
    engine = scratch / "reference" / "engine.json"
    if engine.exists():
        facts |= json.loads(engine.read_text())
        engine.unlink()
    return {
        "name": vector.name,
        "exercises": vector.exercises,
        "framework": vector.framework,
        "kind": vector.kind,
        "world_size": vector.world,
        "nodes": vector.nodes,
        "sources": vector.sources,
        "keep": f"reference/{vector.keep}.safetensors",
        "auto": f"reference/{vector.auto}.safetensors",
        "config": f"../{vector.base}" if vector.base and "--odd" not in vector.arguments else None,
        **facts,
        "versions": {package: importlib.metadata.version(package) for package in (*PACKAGES, *packages) if find_spec(package)},
        "command": " ".join((vector.script, *vector.arguments)),
    }


def collect(vector: Vector, scratch: Path, target: Path, *, strip: str = "") -> None:
    """Copy the sources without what nobody needs to the target, over what was there."""
    dropped = DROPPED if vector.optimizer else (*DROPPED, "optimizer_0")
    if vector.kind == "dcp_safetensors":
        dropped = (*dropped, "*.distcp")  # of the optimizer; its .metadata alone is a proof
    for source in vector.sources:
        shutil.copytree(scratch / source, target / source.replace(strip, ""), ignore=shutil.ignore_patterns(*dropped))


def make(vector: Vector, scratch: Path) -> None:
    """Run and collect one vector."""
    run(vector, scratch / vector.name)
    facts = describe(vector, scratch / vector.name)
    target = VECTORS / vector.name
    shutil.rmtree(target, ignore_errors=True)
    collect(vector, scratch / vector.name, target)
    for alternative in vector.facts.get("alternatives", []):
        shutil.copytree(scratch / vector.name / alternative[0], target / alternative[0])
    for name in {facts["keep"], facts["auto"], facts.get("merged", facts["keep"])}:
        (target / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(scratch / vector.name / name, target / name)
    (target / "vector.json").write_text(json.dumps(facts, indent=1) + "\n")
    size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    print(f"{vector.name}: {size // 1024} KiB", flush=True)


def make_bases(scratch: Path) -> None:
    """Make the base models and keep them beside the vectors: FSDP's shards bring no config of their own."""
    for name, flags in (("base", ()), ("base-tied", ("--tied",))):
        subprocess.run([sys.executable, HERE / "base.py", scratch / name, *flags], check=True)
        shutil.rmtree(VECTORS / name, ignore_errors=True)
        shutil.copytree(scratch / name, VECTORS / name, ignore=shutil.ignore_patterns("corpus.txt"))
        (VECTORS / name / "model.safetensors").chmod(0o644)


def make_demo(scratch: Path) -> None:
    """Make the shards of two nodes that `ckptsync demo` plays with, and the config that FSDP leaves out."""
    for vector in DEMOS:
        run(vector, scratch / vector.name)
        shutil.rmtree(DEMO / vector.name, ignore_errors=True)
        collect(vector, scratch / vector.name, DEMO / vector.name, strip="out/")
    shutil.rmtree(DEMO / "base", ignore_errors=True)
    shutil.copytree(scratch / "base", DEMO / "base", ignore=shutil.ignore_patterns("corpus.txt", "*.safetensors"))


def main() -> None:
    """Make what is named, or everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="vectors, or demo; all by default")
    parser.add_argument("--scratch", type=Path, help="where to run; a temporary folder by default")
    options = parser.parse_args()
    names = options.names or ["demo", *(vector.name for vector in ALL)]
    if unknown := set(names) - {"demo", *(vector.name for vector in ALL)}:
        parser.error(f"no such vector: {', '.join(sorted(unknown))}")
    with contextlib.ExitStack() as stack:
        scratch = options.scratch or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vectors-")))
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True, exist_ok=True)
        make_bases(scratch.resolve())
        for name in names:
            if name == "demo":
                make_demo(scratch.resolve())
        for vector in ALL:
            if vector.name in names:
                make(vector, scratch.resolve())


if __name__ == "__main__":
    main()
