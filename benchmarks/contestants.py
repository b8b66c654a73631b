"""The programs that are compared, each as a command line."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.contest import Contestant, program
from benchmarks.places import Place

RUN, CHECKPOINT = "run", "checkpoint-1"
LOCATION = f"{RUN}/{CHECKPOINT}"
CKPTSYNC = (sys.executable, "-m", "ckptsync")

# Merging: a source directory, a destination directory.

_CALL = "import sys; from {module} import {name} as f; f(*sys.argv[1:])"
_CONSOLIDATE = """
import glob, os, sys
from safetensors import safe_open
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files \
as f
names = [n for p in glob.glob(sys.argv[1] + "/*.safetensors") for n in safe_open(p, "pt").keys()]
os.mkdir(sys.argv[2])
f(sys.argv[1], sys.argv[2], dict.fromkeys(names, 1), 2)
"""
_PEFT = """
import sys
from transformers import AutoModelForCausalLM
from peft import PeftModel
model = AutoModelForCausalLM.from_pretrained(sys.argv[1] + "/base", dtype="auto")
model = PeftModel.from_pretrained(model, sys.argv[1] + "/adapter").merge_and_unload()
model.save_pretrained(sys.argv[2])
"""


def ckptsync_merge(dtype: str) -> Contestant:
    """Return `ckptsync merge` to a dtype, otherwise with its defaults."""
    return Contestant(
        f"ckptsync merge --dtype {dtype}",
        lambda s, d: [*CKPTSYNC, "merge", str(s), str(d), "--dtype", dtype],
    )


def cat(pattern: str, *, is_synced: bool = False) -> Contestant:
    """Return the limit: read every byte of the shards once, and write it once.

    ``is_synced``: wait until the disk has the bytes, as ckptsync does.
    """
    copy = "mkdir '{d}' && cat '{s}'/{pattern} > '{d}'/all" + " && sync '{d}'/all" * is_synced
    return Contestant(
        "cat SHARDS > FILE" + " && sync FILE" * is_synced,
        lambda s, d: ["sh", "-c", copy.format(s=s, d=d, pattern=pattern)],
    )


ACCELERATE = Contestant(
    "accelerate merge-weights",
    lambda s, d: [
        *(sys.executable, "-m", "accelerate.commands.accelerate_cli"),
        *("merge-weights", str(s), str(d)),
    ],
    module="accelerate",
)
DCP_TO_TORCH = Contestant(
    "dcp_to_torch_save",
    lambda s, d: [
        *(sys.executable, "-c"),
        _CALL.format(module="torch.distributed.checkpoint.format_utils", name="dcp_to_torch_save"),
        *(str(s), str(d)),
    ],
    module="torch",
)
ZERO_TO_FP32 = Contestant(
    "zero_to_fp32 --safe_serialization",
    lambda s, d: [
        *(sys.executable, "-m", "deepspeed.utils.zero_to_fp32"),
        *(str(s), str(d), "--safe_serialization"),
    ],
    module="deepspeed",
)
TORCH_CONSOLIDATE = Contestant(
    "consolidate_safetensors_files (2 threads)",
    lambda s, d: [sys.executable, "-c", _CONSOLIDATE, str(s), str(d)],
    module="torch",
)
CONVERT = Contestant(
    "ckptsync convert --to universal",
    lambda s, d: [*CKPTSYNC, "convert", str(s), str(d), "--to", "universal"],
)
DS_TO_UNIVERSAL = Contestant(
    "ds_to_universal",
    lambda s, d: [
        *(sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"),
        *("--input_folder", f"{s}/global_step1", "--output_folder", f"{d}/global_step1"),
        "--inject_missing_state",
    ],
    module="deepspeed",
)


def adapter_merges(llamafactory: str) -> tuple[Contestant, ...]:
    """Return the programs that sum an adapter into its base: ``adapter`` and ``base`` of a source.

    ``llamafactory``: the path of `llamafactory-cli`; empty: it is left out.
    """
    ours = Contestant(
        "ckptsync merge ADAPTER --into BASE",
        lambda s, d: [*CKPTSYNC, "merge", f"{s}/adapter", "--into", f"{s}/base", str(d)],
    )
    peft = Contestant(
        "peft merge_and_unload",
        lambda s, d: [sys.executable, "-c", _PEFT, str(s), str(d)],
        module="peft",
    )
    export = Contestant(
        "llamafactory-cli export",
        lambda s, d: [
            *("env", "DISABLE_VERSION_CHECK=1", "HF_HUB_OFFLINE=1", llamafactory, "export"),
            *("--model_name_or_path", f"{s}/base", "--adapter_name_or_path", f"{s}/adapter"),
            *("--template", "empty", "--export_device", "cpu", "--export_dir", str(d)),
        ],
    )
    return (ours, peft, export) if llamafactory else (ours, peft)


# Transfers: a local directory, a `Place`.  Uploads write below LOCATION there; downloads write into
# a directory that does not exist yet, or below it as CHECKPOINT.


def _carry(library: str, name: str, module: str, prefix: str = LOCATION) -> Contestant:
    """Return a library as a program: `benchmarks.carry`."""

    def command(direction: str, directory: Path, place: Place) -> list[str]:
        url = place.below(prefix) if prefix else place.url
        return [sys.executable, "-m", "benchmarks.carry", library, direction, str(directory), url]

    return Contestant(
        name,
        lambda d, p: command("up", d, p),
        lambda d, p: command("down", d, p),
        module=module,
    )


def _s5cmd(*words: str) -> list[str]:
    return [program("s5cmd") or "", *words]


def _aws(*words: str) -> list[str]:
    return [program("aws") or "", "s3", *words, "--only-show-errors"]


def _sh(line: str) -> list[str]:
    return ["sh", "-c", line]


def _rclone(place: Place) -> str:
    return f"S:{place.below(LOCATION).removeprefix('s3://')}"


def _host(place: Place) -> str:
    """Return ``user@host``."""
    return place.url.removeprefix("sftp://").partition("/")[0].rpartition(":")[0]


def _sftp(line: str, place: Place) -> list[str]:
    options = " ".join(place.ssh[1:])
    return _sh(f"printf '%s\\n' {line} | sftp -q -b - {options} {_host(place)}:{place.files}")


def _rsync(source: str, target: str, place: Place) -> list[str]:
    return _sh(f"rsync -a --mkpath -e '{' '.join(place.ssh)}' {source} {target}")


def _remote(place: Place) -> str:
    return f"{_host(place)}:{place.files}/{LOCATION}/"


PUSH_PULL = Contestant(
    "ckptsync",
    lambda d, p: [
        *(*CKPTSYNC, "push", str(d), "--store", p.url, "--run", RUN, "--node", "bench"),
    ],
    lambda d, p: [*CKPTSYNC, "pull", LOCATION, str(d), "--store", p.url],
)
RCLONE = Contestant(
    "rclone copy",
    lambda d, p: ["rclone", "copy", str(d), _rclone(p)],
    lambda d, p: ["rclone", "copy", _rclone(p), str(d)],
    program="rclone",
)
OVER_S3 = (
    PUSH_PULL,
    _carry("store", "ckptsync's store alone", "", prefix=""),
    Contestant(
        "s5cmd",
        lambda d, p: _s5cmd("cp", f"{d}/", f"{p.below(LOCATION)}/"),
        lambda d, p: _s5cmd("cp", f"{p.below(LOCATION)}/*", f"{d}/"),
        program="s5cmd",
    ),
    RCLONE,
    _carry("boto3", "boto3 upload_file, download_file", "boto3"),
    _carry("s3fs", "s3fs put, get", "s3fs"),
)
OVER_SFTP = (
    PUSH_PULL,
    _carry("store", "ckptsync's store alone", "", prefix=""),
    Contestant(
        "sftp",
        lambda d, p: _sftp(f"'mkdir {RUN}' 'put -r {d} {LOCATION}'", p),
        lambda d, p: _sftp(f"'get -r {LOCATION} {d}'", p),
        program="sftp",
    ),
    Contestant(
        "rsync over ssh",
        lambda d, p: _rsync(f"{d}/", _remote(p), p),
        lambda d, p: _rsync(_remote(p), f"{d}/", p),
        program="rsync",
    ),
)
# Commands that are killed and run again.  `sync` of s5cmd and aws leaves out complete files.
RUN_AGAIN = (
    PUSH_PULL,
    RCLONE,
    Contestant(
        "s5cmd sync",
        lambda d, p: _s5cmd("sync", f"{d}/", f"{p.below(LOCATION)}/"),
        lambda d, p: _s5cmd("sync", f"{p.below(LOCATION)}/*", f"{d}/{CHECKPOINT}/"),
        program="s5cmd",
    ),
    Contestant(
        "aws s3 sync",
        lambda d, p: _aws("sync", f"{d}/", f"{p.below(LOCATION)}/"),
        lambda d, p: _aws("sync", f"{p.below(LOCATION)}/", f"{d}/{CHECKPOINT}/"),
        program="aws",
    ),
    Contestant(
        "aws s3 cp --recursive",
        lambda d, p: _aws("cp", "--recursive", f"{d}/", f"{p.below(LOCATION)}/"),
        lambda d, p: _aws("cp", "--recursive", f"{p.below(LOCATION)}/", f"{d}/{CHECKPOINT}/"),
        program="aws",
    ),
)
