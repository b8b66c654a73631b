"""Collects what a sharded checkpoint lacks and the living model has.

Shards alone cannot be loaded: files are missing (configuration, tokenizer), and facts (tied
weights, dtypes, versions, launch variables).  Rank 0 writes the files once, when the training
begins, beside the pins; a pin then holds those of them that the checkpoint itself lacks.  Objects
are read by the attributes that they have, so no library is imported here.
"""

from __future__ import annotations

import copy
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from ckptsync.doctor.probe import LIBRARIES, NCCL
from ckptsync.spool import safe_files
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
    """Write a model's configuration, and its tokenizer or processor, into a directory.

    Return an error, a sentence, for each that could not be written; raise only for ``folder``
    itself.
    """
    safe_files.make_folders(folder)
    inner = _unwrapped(model)
    steps: dict[str, Callable[[Path], object]] = {}
    if hasattr(inner, "peft_config"):
        steps["the adapter's configuration"] = partial(_save_adapter, inner)
    elif hasattr(inner, "config"):
        steps["the model's configuration"] = partial(_save_config, inner)
        if getattr(inner, "generation_config", None) is not None:
            generation = copy.deepcopy(inner.generation_config)
            steps["the generation configuration"] = generation.save_pretrained
    if hasattr(processing, "save_pretrained"):
        steps["the tokenizer"] = processing.save_pretrained
    errors = []
    for subject, step in steps.items():
        try:
            _write_whole(step, folder)
        except Exception as e:  # noqa: BLE001, PERF203  # a model of somebody's own making may raise anything; the checkpoint does not depend on it
            errors.append(f"{subject} could not be added: {type(e).__name__}: {e}")
    return errors


def find_processing(event: Mapping[str, Any]) -> Any:
    """Return the tokenizer or processor of a Trainer's event, or None.

    The data collator's one is used if the event has no other.
    """
    collate = getattr(event.get("train_dataloader"), "collate_fn", None)
    collator = getattr(collate, "data_collator", collate)  # it may be wrapped, to remove columns
    candidates = (
        event.get("processing_class"),
        event.get("tokenizer"),
        getattr(collator, "tokenizer", None),
    )
    return next((candidate for candidate in candidates if candidate is not None), None)


def describe_model(model: Any) -> dict[str, str]:
    """Return a model's ``class``, ``base_model``, ``dtypes`` and ``tied``, as texts.

    ``tied``: pairs of names that share one tensor (``a=b``), with commas.  Empty for an object
    without parameters.
    """
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
    return {
        "class": _class_name(inner),
        "base_model": _base(inner),
        "dtypes": ",".join(sorted(dtypes)),
        "tied": ",".join(tied),
    }


def describe_process() -> dict[str, str]:
    """Return the versions of the libraries here, and the launcher's variables, 200 letters each."""
    torch = sys.modules.get("torch")
    facts = {
        "python": platform.python_version(),
        **{name: version for name in (*LIBRARIES, *NCCL) if (version := version_of(name))},
    }
    if torch is not None:
        facts["cuda"] = str(getattr(torch.version, "cuda", None) or "")
    return facts | {name: os.environ[name][:200] for name in _VARIABLES if name in os.environ}


def version_of(library: str) -> str:
    """Return the installed version of a library; empty if there is none."""
    try:
        return metadata.version(library) or ""  # None, where its metadata names none
    except metadata.PackageNotFoundError:
        return ""


def _write_whole(step: Callable[[Path], object], folder: Path) -> None:
    """Let a library write into a temporary directory, then copy each file to ``folder``, whole.

    Half of a file would be sent as the checkpoint's own.
    """
    with (
        tempfile.TemporaryDirectory(prefix="ckptsync-added-") as temporary,
        safe_files.Tree(folder) as tree,
    ):
        step(Path(temporary))
        for file in walk(Path(temporary)).files:
            with (
                (Path(temporary) / file.path).open("rb") as source,
                safe_files.create_copy(source.fileno(), folder, *tree.place(file.path)) as out,
            ):
                shutil.copyfileobj(source, out)


def _save_config(model: Any, folder: Path) -> None:
    """Write a model's ``config.json`` with its class and dtype, as ``save_pretrained`` does."""
    config = copy.deepcopy(model.config)
    config.architectures = [_class_name(model)]
    dtype = next((str(p.dtype) for p in model.parameters() if p.is_floating_point()), "")
    if dtype:
        config.dtype = dtype.removeprefix("torch.")
    config.save_pretrained(folder)


def _save_adapter(model: Any, folder: Path) -> None:
    """Write the configuration of each adapter into the directory where peft saves that adapter.

    FSDP saves the active adapter alone, without its name: if no adapter is called default, the
    active one's configuration is written at the top, too.
    """
    active = getattr(model, "active_adapter", None)
    for name, config in model.peft_config.items():
        copied_config = copy.deepcopy(config)
        copied_config.inference_mode = True
        copied_config.base_model_name_or_path = copied_config.base_model_name_or_path or _base(
            model
        )
        if name != "default":
            copied_config.save_pretrained(folder / name)
        if name == "default" or (name == active and "default" not in model.peft_config):
            copied_config.save_pretrained(folder)


def _base(model: Any) -> str:
    """Return the name or path from which a model was loaded; empty if it has none."""
    return str(getattr(getattr(model, "config", None), "_name_or_path", "") or "")


def _class_name(model: Any) -> str:
    """Return the name of a model's class, without the prefix of torch's fully_shard."""
    return type(model).__name__.removeprefix("FSDP")


def _unwrapped(model: Any) -> Any:
    """Return the model within the wrappers of torch, accelerate and DeepSpeed."""
    for inside in ("module", "_orig_mod"):
        while hasattr(model, inside) and not hasattr(model, "save_pretrained"):
            model = getattr(model, inside)
    return model
