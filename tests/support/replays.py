"""Trainers' saves, file system call by file system call, in the order in which real ones were seen
to write.

Seen in system-call traces of transformers 5.23, accelerate 1.15, DeepSpeed 0.19.8, safetensors 0.8
and torch 2.13; of Lightning 2.6.6, torchtitan 0.3, verl 0.9.1, LLaMA-Factory 0.9.5 (v1),
torch_checkpointing 0.1.1 (checkpoint_writer.py), and of the trainers of August 2026 that
`ckptsync.checkpoint_dirs` names the order was read in their sources.  The bytes are real: those of
the vectors.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.files_in_memory import contents
from tests.support.vector import vector

S = 10**9


@dataclass(frozen=True)
class Script:
    """A save of ``checkpoint``: ``orders`` are ``<verb> <path or pattern>``, one after another.

    ``write``: in place, first half of it, then all.  ``swap``: under a name of ``.tmp`` and six
    letters, then renamed (safetensors 0.8). ``metadata``: beside it with ``.tmp``, then renamed
    (DCP).  ``touch``, ``remove``, ``beside`` (in the directory above).  ``rename``: all was written
    in a directory of that name, which now gets the checkpoint's.  ``late``: what `Stage.play`
    yields after the proof that the rest is whole.
    """

    checkpoint: str
    files: Mapping[str, bytes]
    orders: tuple[str, ...]
    late: tuple[str, ...] = ()

    @property
    def is_tracked(self) -> bool:
        """Return whether its end is the step in a file beside it."""
        return any(order.startswith("beside latest_c") for order in self.orders)

    def steps(self) -> list[tuple[str, str]]:
        """Return verb and file of each step: a pattern's files come in order of names."""
        steps = []
        for verb, pattern in (order.split(" ", 1) for order in self.orders):
            names = [pattern]
            if verb in ("write", "swap", "metadata"):
                names = [n for n in sorted(self.files) if re.fullmatch(pattern, n)]
            assert names, f"{self.checkpoint}: nothing is {pattern}"
            steps += [(verb, name) for name in names]
        return steps


class Stage:
    """An output directory in which saves are replayed.

    A second passes with each call, for files and for directories.
    """

    def __init__(self, out: Path) -> None:
        self.out, self.now = out, 1_700_000_000 * S

    def play(self, script: Script) -> Iterator[str]:
        """Write a save; yield what was done, after each call that changes something."""
        renamed = next((o.split()[1] for o in script.orders if o.startswith("rename")), "")
        home = self.out / script.checkpoint
        for verb, name in script.steps():
            path = (home.with_name(renamed) if renamed else home) / name
            if verb == "rename":
                shutil.rmtree(home, ignore_errors=True)  # torch_checkpointing removes what is there
                path.parent.rename(home)
                self._passed(home.parent)
                yield f"{name} renamed"
            elif verb == "beside":
                path = home.with_name(name.split("=")[0])
                yield from self._write(path, name.split("=")[1].encode())
            elif verb == "touch":
                yield from self._write(path, b"")
            elif verb == "remove":
                path.unlink()
                self._passed(path.parent)
                yield f"{name} removed"
            else:
                yield from self._written(verb, path, script.files[name])

    def _written(self, verb: str, path: Path, content: bytes) -> Iterator[str]:
        if verb == "write":
            yield from self._write(path, content)
            return
        fresh = path.with_name(".tmpAb3xYz" if verb == "swap" else path.name + ".tmp")
        yield from self._write(fresh, content)
        fresh.rename(path)
        self._passed(path.parent)
        yield f"{path.name} renamed"

    def _write(self, path: Path, content: bytes) -> Iterator[str]:
        within = (folder for folder in path.parents if folder.is_relative_to(self.out))
        new_folders = [folder for folder in within if not folder.exists()]
        is_new = new_folders or not path.exists()
        changed = [path.parent, *(folder.parent for folder in new_folders)] if is_new else []
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb", buffering=0) as file:
            self._passed(path, *changed)
            yield f"{path.name} opened"
            file.write(content[: len(content) // 2])
            self._passed(path)
            yield f"{path.name} half"
            file.write(content[len(content) // 2 :])
        self._passed(path)
        yield f"{path.name} written"

    def _passed(self, *paths: Path) -> None:
        self.now += S
        for path in paths:
            os.utime(path, ns=(self.now, self.now))


def of(name: str, node: int = 0) -> dict[str, bytes]:
    """Return the files of a vector's node.

    What real checkpoints have and the vector lacks is made up.
    """
    return contents(vector(name).sources[node])


_ONCE = ("write config.json", "write generation_config.json")
_TOKENS = ("write chat_template.jinja", "write tokenizer.*")
_END = ("write scheduler.pt", "write rng_state_[02].pth")
_OTHER = "write rng_state_1.pth"  # of the other rank
_SENTINEL = "touch checkpoint-is-incomplete.txt"
_V1 = "touch CHECKPOINT_COMPLETE"
_STATE = "write trainer_state.json"
_ZERO_0 = ("write global_step4/.*_0_.*", "write global_step4/.*_1_.*", "write latest")


def save(
    files: Mapping[str, bytes],
    *orders: str,
    checkpoint: str = "checkpoint-4",
    late: tuple[str, ...] = (),
) -> Script:
    """Return a save in the order of its writes."""
    return Script(checkpoint, files, orders, late)


_SHARDED = tuple(
    order
    for folder in ("pytorch_model_fsdp_0", "optimizer_0")
    for order in (
        f"write {folder}/__1_0.distcp",
        f"write {folder}/__0_0.distcp",
        f"metadata {folder}/.metadata",
    )
)


def trainers() -> dict[str, Script]:
    """Return saves of Hugging Face's Trainer on the node of rank 0; the last call finishes each."""
    ddp, zero2 = of("hf-ddp"), of("hf-zero2")
    zero3, fsdp = of("hf-zero3-2node"), of("hf-fsdp2-2node")
    only = {n: ddp[n] for n in ddp if not n.startswith(("optimizer", "scheduler", "rng"))}
    model = (*_ONCE, "swap model.safetensors", *_TOKENS)
    whole = (_OTHER, *model, "write optimizer.pt", *_END, _STATE)
    states = (
        "write global_step4/mp_rank_00_model_states.pt",
        "write global_step4/zero.*_0_.*",
        "write latest",
        "write global_step4/zero.*_1_.*",
    )
    sharded = (*_ONCE, *_TOKENS, *_ZERO_0, *_ZERO_0, *_END)
    return {
        "ddp": save(ddp, *whole),
        "just in time": save(ddp, _SENTINEL, *whole, _SENTINEL.replace("touch", "remove")),
        "only the model": save(only, *model, _STATE),
        "fsdp2": save(fsdp, *_SHARDED, *_END, _OTHER, _STATE),
        "fsdp2, rank 1 late": save(fsdp, *_SHARDED, *_END, _STATE, _OTHER),
        "zero2": save(zero2, *model, *states, *_END, _OTHER, _STATE),
        "zero2, rank 1 late": save(zero2, *model, *states, *_END, _STATE, _OTHER),
        "zero3": save(zero3, *sharded, _OTHER, _STATE),
        "zero3, rank 1 late": save(zero3, *sharded, _STATE, _OTHER),
    }


def others() -> dict[str, Script]:
    """Return saves of trainers that have a last file of their own; the last call finishes each."""
    titan, sharded, whole = of("titan"), of("lightning"), of("verl-fsdp2")
    titan = {n: titan[n] for n in titan if "/" not in n}
    verl = whole | {
        n.replace("model_", f"{kind}_"): whole[n]
        for n in whole
        for kind in ("optim", "extra_state")
        if "model_world" in n
    }
    fsdp = of("hf-fsdp2-2node")
    verl |= {"data.pt": fsdp["scheduler.pt"]}
    v1 = {
        n.replace("pytorch_model_fsdp_0", "model").replace("optimizer_0", "optimizer"): fsdp[n]
        for n in fsdp
        if "_0/" in n
    }
    each_rank = [f"{kind}/rank_{r}.pt" for kind in ("dataloader", "rng_state") for r in (0, 1)]
    v1 |= dict.fromkeys(each_rank, fsdp["rng_state_0.pth"])
    v1 |= {"metadata.json": b"{}", "scheduler.pt": fsdp["scheduler.pt"]}
    ranks = tuple(f"write actor/{kind}_world.*" for kind in ("model", "optim", "extra_state"))
    dcp = (r"write __\d_0.distcp", "metadata .metadata")
    sharded_first = tuple(
        order
        for folder in ("model", "optimizer")
        for order in (rf"write {folder}/__\d_0.distcp", f"metadata {folder}/.metadata")
    )
    rest = ("write dataloader/.*", "write rng_state/.*", "write metadata.json")
    skyrl = {name.replace("actor/", "policy/"): verl[name] for name in verl}
    skyrl |= {name.replace("actor/", "critic/"): verl[name] for name in verl}
    skyrl |= dict.fromkeys(("trainer_state.pt", "fully_async_state.pt"), fsdp["scheduler.pt"])
    skyrl_rank = tuple(
        order
        for model in ("policy", "critic")
        for order in (
            *(f"write {model}/{kind}_world.*" for kind in ("model", "optim", "extra_state")),
            f"write {model}/(hugging|fsdp).*",
        )
    )
    skyrl_end = (
        "write data.pt",
        "write trainer_state.pt",
        "beside latest_ckpt_global_step.txt=4",
    )
    megatron = of("megatron") | {
        "train_state.pt": fsdp["scheduler.pt"],
        "run_config.yaml": b"model: {}\n",
    }
    megatron |= {f"policy/{name}": data for name, data in of("megatron").items()}
    megatron |= skyrl
    mcore = (r"write common.pt", r"write __\d_\d.distcp", "metadata .metadata")
    prime = {f"trainer/{name}": data for name, data in titan.items()}
    prime |= {f"trainer/dataloader/rank_{r}.pt": fsdp["rng_state_0.pth"] for r in (0, 1, 2)}
    prime |= {"orchestrator/progress.pt": fsdp["scheduler.pt"]}
    weights = {n: data for n, data in of("hf-ddp").items() if not n.endswith((".pt", ".pth"))}
    return {
        "skyrl": save(skyrl, *skyrl_rank, *skyrl_end, checkpoint="global_step_4"),
        "skyrl, asynchronous": save(
            skyrl,
            *skyrl_rank,
            *skyrl_end,
            "write fully_async_state.pt",
            checkpoint="global_step_4",
            late=("latest_ckpt_global_step.txt written",),
        ),
        "skyrl, megatron": save(
            megatron,
            *(order.replace(" ", " policy/") for order in mcore),
            "write policy/metadata.json",
            "write policy/hugging.*",
            *skyrl_end,
            checkpoint="global_step_4",
        ),
        "slime": save(
            megatron,
            *mcore,
            "write metadata.json",
            "beside latest_checkpointed_iteration.txt=4",
            checkpoint="iter_0000004",
        ),
        "megatron-bridge": save(
            megatron,
            *mcore,
            "write metadata.json",
            "write train_state.pt",
            "beside latest_train_state.pt=4",
            "beside latest_checkpointed_iteration.txt=4",
            "write run_config.yaml",
            checkpoint="iter_0000004",
            late=(
                "latest_checkpointed_iteration.txt written",  # with the old run_config.yaml
                "run_config.yaml opened",
                "run_config.yaml half",
            ),
        ),
        "prime-rl": save(
            prime,
            "write orchestrator/.*",
            "write trainer/dataloader/.*",
            r"write trainer/__\d_0.distcp",
            "metadata trainer/.metadata",
            checkpoint="checkpoints/step_4",
        ),
        "prime-rl, weights": save(
            weights,
            "swap model.safetensors",
            *_ONCE,
            *_TOKENS,
            "touch STABLE",
            checkpoint="weights/step_4",
        ),
        "ms-swift": save(
            fsdp,
            *_SHARDED,
            *_END,
            _OTHER,
            _STATE,
            checkpoint="v0-20260801-093000/checkpoint-4",
        ),
        "torchtitan": save(titan, *dcp, checkpoint="step-2"),
        "lightning, sharded": save(
            sharded, *dcp, "write meta.pt", checkpoint="epoch=0-step=4.ckpt"
        ),
        "verl": save(
            verl,
            *ranks,
            "write actor/(hugging|fsdp).*",
            "write data.pt",
            "beside latest_checkpointed_iteration.txt=4",
            checkpoint="global_step_4",
        ),
        "llama-factory v1": save(v1, *sharded_first, "write scheduler.pt", *rest, _V1),
    }


def unproven() -> dict[str, Script]:
    """Return saves whose end nothing on this node shows: without rank 0, or without a last file."""
    fsdp, zero3 = of("hf-fsdp2-2node", 1), of("hf-zero3-2node", 1)
    accelerate = {
        n.removeprefix("checkpoints/checkpoint_0/"): data for n, data in of("acc-zero3").items()
    }
    zero1 = of("raw-ds-zero1-bf16").items()
    tagged = {n.removeprefix("global_step2/"): data for n, data in zero1 if "/" in n}
    parallel = of("torch-checkpointing")
    swift = {f"iter_0000004/{name}": data for name, data in of("megatron").items()}
    swift |= {n: data for n, data in of("hf-ddp").items() if not n.endswith((".pt", ".pth"))}
    swift |= {"latest_checkpointed_iteration.txt": b"4", "args.json": b"{}"}
    rlhf = tagged | {"metric.json": b"{}"}
    background = {f"policy/{name}": data for name, data in of("megatron").items()}
    background |= {"trainer_state.pt": fsdp["rng_state_2.pth"]}
    shards = ("write pytorch_model.*_0.distcp", "write optimizer.*_0.distcp")
    states = ("write global_step4/.*", "write global_step4/.*")
    return {
        "fsdp2": save(fsdp, *shards, "write rng_state_.*"),
        "zero3": save(zero3, *states, "write rng_state_.*"),
        "ddp": save({"rng_state_2.pth": fsdp["rng_state_2.pth"]}, "write rng_state_2.pth"),
        "deepspeed": save(
            tagged,
            "write mp.*",
            "write bf16_zero_pp_rank_0.*",
            "beside latest=global_step2",
            "write bf16_zero_pp_rank_1.*",
            checkpoint="global_step2",
        ),
        "openrlhf": save(
            rlhf,
            "write mp.*",
            "write bf16_zero_pp_rank_0.*",
            "beside latest=global_step2",
            "write bf16_zero_pp_rank_1.*",
            "write metric.json",
            checkpoint="_actor/global_step2",
        ),
        "skyrl, megatron in the background": save(
            background,
            "write policy/common.pt",
            "write trainer_state.pt",
            "beside latest_ckpt_global_step.txt=4",
            r"write policy/__\d_\d.distcp",
            "metadata policy/.metadata",
            "write policy/metadata.json",
            checkpoint="global_step_4",
        ),
        "torch_checkpointing": save(
            parallel,
            *(rf"write (model|optimizer|train_state)_{rank}.pt" for rank in (1, 0)),
            "write metadata.pkl",
            "rename tmp_step-4",
            checkpoint="step-4",
        ),
        "torch_checkpointing, in place": save(
            parallel,
            *(rf"write (model|optimizer|train_state)_{rank}.pt" for rank in (1, 0)),
            "write metadata.pkl",
            checkpoint="step-4",
        ),
        "megatron-swift": save(
            swift,
            "write args.json",
            "write iter_0000004/common.pt",
            r"write iter_0000004/__\d_\d.distcp",
            "metadata iter_0000004/.metadata",
            "write iter_0000004/metadata.json",
            "write latest_checkpointed_iteration.txt",
            "swap model.safetensors",
            *_ONCE,
            *_TOKENS,
            checkpoint="v0-20260801-093000/checkpoint-4",
        ),
        "accelerate": save(
            accelerate,
            "write pytorch_model/.*",
            "write latest",
            "write scheduler.bin",
            "write random_states_1.pkl",
            "write random_states_0.pkl",
            checkpoint="checkpoint_0",
        ),
    }
