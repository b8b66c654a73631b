"""What a sharded checkpoint lacks and only the living model knows: its configuration, its tokenizer, tied weights, versions.

Rank 0 writes these files once, when the training begins, beside the pins; a pin then holds those of them that the checkpoint itself
lacks.  Objects are read by the attributes that they have, so no library is imported here.
"""

from __future__ import annotations

import copy
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from ckptsync.doctor.probe import LIBRARIES, NCCL
from ckptsync.spool import folders
from ckptsync.walk import walk

_VARIABLES = (  # how the nodes were told of each other; none of them holds a secret
    "NNODES",
    "NPROC_PER_NODE",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "NCCL_SOCKET_IFNAME",
    "NCCL_IB_DISABLE",
    "NCCL_IB_HCA",
    "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLE",
    "NCCL_NET",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_DEBUG",
    "GLOO_SOCKET_IFNAME",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
)


def write_added(model: Any, processing: Any, folder: Path) -> list[str]:
    """Write what can be written whole; what could not is returned, a sentence each.  Never raises an Exception but for ``folder`` itself."""
    folders.make(folder)
    inner = _unwrapped(model)
    steps: list[tuple[str, Callable[[Path], object]]] = []
    if hasattr(inner, "peft_config"):
        steps.append(("the adapter's configuration", lambda fresh: _save_adapter(inner, fresh)))
    elif hasattr(inner, "config"):
        steps.append(("the model's configuration", lambda fresh: _save_config(inner, fresh)))
    if getattr(inner, "generation_config", None) is not None and not hasattr(inner, "peft_config"):
        steps.append(("the generation configuration", lambda fresh: copy.deepcopy(inner.generation_config).save_pretrained(fresh)))
    if hasattr(processing, "save_pretrained"):
        steps.append(("the tokenizer", processing.save_pretrained))
    return [trouble for what, step in steps for trouble in _tried(what, step, folder)]


def processing_of(given: Mapping[str, Any]) -> Any:
    """The tokenizer or processor among what an event is given; Trainer saves the collator's own where it has no other."""
    collate = getattr(given.get("train_dataloader"), "collate_fn", None)
    collator = getattr(collate, "data_collator", collate)  # it may be wrapped, to remove columns
    named = (given.get("processing_class"), given.get("tokenizer"), getattr(collator, "tokenizer", None))
    return next((found for found in named if found is not None), None)


def about_model(model: Any) -> dict[str, str]:
    """What the model says of itself: where it came from, the dtypes of its weights, and names that share one tensor (``a=b``)."""
    inner = _unwrapped(model)
    if not hasattr(inner, "named_parameters"):
        return {}
    owner: dict[int, str] = {}
    tied: list[str] = []
    dtypes: set[str] = set()
    for name, weight in inner.named_parameters(remove_duplicate=False):
        dtypes.add(str(weight.dtype).removeprefix("torch."))
        if id(weight) in owner:
            tied.append(f"{owner[id(weight)]}={name}")
        owner.setdefault(id(weight), name)
    return {"class": _class_name(inner), "base_model": _base(inner), "dtypes": ",".join(sorted(dtypes)), "tied": ",".join(tied)}


def about_process() -> dict[str, str]:
    """Versions of what trains here, and how this process was told of the others."""
    torch = sys.modules.get("torch")
    told = {"python": platform.python_version(), **{name: version for name in (*LIBRARIES, *NCCL) if (version := version_of(name))}}
    if torch is not None:
        told["cuda"] = str(getattr(torch.version, "cuda", None) or "")
    return told | {name: os.environ[name][:200] for name in _VARIABLES if name in os.environ}


def version_of(library: str) -> str:
    """The version that is installed, or the empty string."""
    try:
        return metadata.version(library) or ""  # None, where its metadata names none
    except metadata.PackageNotFoundError:
        return ""


def _tried(what: str, step: Callable[[Path], object], folder: Path) -> Iterator[str]:
    """Written elsewhere, by libraries that want a path, and then copied, each file whole: half of one would be sent as the checkpoint's own."""
    try:
        with tempfile.TemporaryDirectory(prefix="ckptsync-added-") as fresh, folders.Tree(folder) as tree:
            step(Path(fresh))
            for file in walk(Path(fresh)).files:
                with (
                    (Path(fresh) / file.path).open("rb") as like,
                    folders.copy_of(like.fileno(), folder, *tree.place(file.path)) as out,
                ):
                    shutil.copyfileobj(like, out)
    except Exception as e:  # noqa: BLE001  # a model of somebody's own making may raise anything; the checkpoint does not depend on it
        yield f"{what} could not be added: {type(e).__name__}: {e}"


def _save_config(model: Any, folder: Path) -> None:
    config = copy.deepcopy(model.config)  # ours to complete, as the model's own save_pretrained does
    config.architectures = [_class_name(model)]
    dtype = next((str(p.dtype) for p in model.parameters() if p.is_floating_point()), "")
    if dtype:
        config.dtype = dtype.removeprefix("torch.")
    config.save_pretrained(folder)


def _save_adapter(model: Any, folder: Path) -> None:
    for name, config in model.peft_config.items():
        ours = copy.deepcopy(config)
        ours.inference_mode = True
        ours.base_model_name_or_path = ours.base_model_name_or_path or _base(model)
        ours.save_pretrained(folder if name == "default" else folder / name)


def _base(model: Any) -> str:
    return str(getattr(getattr(model, "config", None), "_name_or_path", "") or "")


def _class_name(model: Any) -> str:
    return type(model).__name__.removeprefix("FSDP")  # torch's fully_shard makes a class of its own, with this before the name


def _unwrapped(model: Any) -> Any:
    """The model within the wrappers of torch, accelerate and DeepSpeed."""
    for inside in ("module", "_orig_mod"):
        while hasattr(model, inside) and not hasattr(model, "save_pretrained"):
            model = getattr(model, inside)
    return model
