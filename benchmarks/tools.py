"""The programs that are compared, each as a command line for a source and a destination."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

CALL = "import sys; from {module} import {name} as f; f(*sys.argv[1:])"
CONSOLIDATE = """
import glob, os, sys
from safetensors import safe_open
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files \
as f
names = [n for p in glob.glob(sys.argv[1] + "/*.safetensors") for n in safe_open(p, "pt").keys()]
os.mkdir(sys.argv[2])
f(sys.argv[1], sys.argv[2], dict.fromkeys(names, 1), 2)
"""


@dataclass(frozen=True)
class Tool:
    """``command`` makes a command line; ``module`` is what has to be installed for it."""

    name: str
    command: Callable[[Path, Path], list[str]]
    module: str | None = None


def ckptsync(dtype: str) -> Tool:
    """What users run, with its defaults."""
    return Tool(
        f"ckptsync merge --dtype {dtype}",
        lambda source, destination: [
            sys.executable,
            "-m",
            "ckptsync",
            "merge",
            str(source),
            str(destination),
            "--dtype",
            dtype,
        ],
    )


CONVERT = Tool(
    "ckptsync convert --to universal",
    lambda s, d: [sys.executable, "-m", "ckptsync", "convert", str(s), str(d), "--to", "universal"],
)
TO_UNIVERSAL = Tool(
    "ds_to_universal",
    lambda s, d: [
        sys.executable,
        *("-m", "deepspeed.checkpoint.ds_to_universal"),
        *("--input_folder", f"{s}/global_step1", "--output_folder", f"{d}/global_step1"),
        "--inject_missing_state",
    ],
    "deepspeed",
)


def cat(pattern: str) -> Tool:
    """The limit: every byte of the shards read once and written once."""
    return Tool(
        "cat SHARDS > FILE",
        lambda s, d: ["sh", "-c", f"mkdir '{d}' && cat '{s}'/{pattern} > '{d}'/all"],
    )


def cat_and_sync(pattern: str) -> Tool:
    """The same until the disk has it, which is what ckptsync waits for."""
    return Tool(
        "cat SHARDS > FILE && sync FILE",
        lambda s, d: [
            "sh",
            "-c",
            f"mkdir '{d}' && cat '{s}'/{pattern} > '{d}'/all && sync '{d}'/all",
        ],
    )


ACCELERATE = Tool(
    "accelerate merge-weights",
    lambda s, d: [
        sys.executable,
        "-m",
        "accelerate.commands.accelerate_cli",
        "merge-weights",
        str(s),
        str(d),
    ],
    "accelerate",
)
DCP_TO_TORCH = Tool(
    "dcp_to_torch_save",
    lambda s, d: [
        sys.executable,
        "-c",
        CALL.format(module="torch.distributed.checkpoint.format_utils", name="dcp_to_torch_save"),
        str(s),
        str(d),
    ],
    "torch",
)
ZERO_TO_FP32 = Tool(
    "zero_to_fp32 --safe_serialization",
    lambda s, d: [
        sys.executable,
        "-m",
        "deepspeed.utils.zero_to_fp32",
        str(s),
        str(d),
        "--safe_serialization",
    ],
    "deepspeed",
)
TORCH_CONSOLIDATE = Tool(
    "consolidate_safetensors_files (2 threads)",
    lambda s, d: [sys.executable, "-c", CONSOLIDATE, str(s), str(d)],
    "torch",
)
OTHERS = {
    "verl.model_merger": (
        "verl's model_merger reads its own per-rank files, of which none are generated here"
    )
}


def is_installed(module: str | None) -> bool:
    """Whether a peer can be run at all."""
    if module is None:
        return True
    found = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([sys.executable, "-c", found], check=False).returncode == 0
