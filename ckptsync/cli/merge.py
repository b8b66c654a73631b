"""``ckptsync merge``: consolidate a sharded checkpoint, with no service running."""

from __future__ import annotations

import argparse
import gc
import math
import os
from collections import Counter
from collections.abc import Iterable
from typing import Any

from ckptsync.cli import output
from ckptsync.cli.arguments import add_bandwidth, add_dry_run
from ckptsync.cli.locations import reached
from ckptsync.cli.output import Progress, shown, silent
from ckptsync.collector import paused
from ckptsync.errors import ConfigError
from ckptsync.merge import local
from ckptsync.merge.consolidate import Merged
from ckptsync.merge.copying import Work
from ckptsync.merge.dated import check_dates
from ckptsync.merge.looking import Asked, Prepared, look, told
from ckptsync.merge.one_save import ignored
from ckptsync.merge.plan import Options
from ckptsync.merge.remote import carry_out_into, check_free
from ckptsync.merge.statistics import Statistics
from ckptsync.stores.trees import Access
from ckptsync.stores.urls import Remote, located
from ckptsync.units import parse_size, show_size

PARTS = 64 << 20  # bytes of parts in flight to a store, beside what is being read and made
MOST_JOBS = 8  # more than a disk takes in
FAR_JOBS = 4  # they mostly wait for a store: so many keep a network busy, within 300 MB for all there is


DTYPES = ("auto", "keep", "bf16", "fp16", "fp32")
DETAILS = "With several SRC, each holds\nshards of the same checkpoint that one node has written."


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Define the arguments."""
    command.add_argument(
        "sources",
        metavar="SRC",
        nargs="+",
        help="a checkpoint, its inner shard directory, or a DeepSpeed save directory; a path or a URL",
    )
    command.add_argument(
        "destination",
        metavar="DST",
        help="a new directory, which appears whole or not at all; or a URL, where a merge that was killed continues",
    )
    _add_output(command)
    _add_engine(command)
    add_bandwidth(command)
    add_dry_run(command, "written")


def _add_output(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="auto: as the model has it; keep: the most precise copy stored (default: auto)",
    )
    command.add_argument(
        "--max-shard-size", metavar="SIZE", default="5GB", help="of one output file, for example 5GB or 512MiB (default: 5GB)"
    )
    command.add_argument(
        "--source",
        metavar="S",
        help="which weights, where a checkpoint holds several (`ckptsync inspect` lists them); S@base is the model under a PEFT adapter in"
        " the same shards, S@adapter=NAME one adapter of several",
    )
    command.add_argument(
        "--config-from",
        metavar="DIR",
        help="a directory with the config and tokenizer files, if the checkpoint and its run have none; code (*.py, auto_map) is copied"
        " from here only",
    )
    command.add_argument(
        "--allow-code",
        action="store_true",
        help="copy code that lies in the checkpoint, too: from_pretrained with trust_remote_code runs it",
    )
    command.add_argument(
        "--base",
        metavar="DIR",
        help="the model that was trained: names and shapes must be the same, and auto gives each tensor its dtype (only headers are read)",
    )


def _add_engine(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--jobs",
        metavar="N",
        type=int,
        help="threads that read, cast and digest; 1: only the main thread (default: one for each core, at most 8; 4 from a URL)",
    )
    command.add_argument(
        "--engine",
        choices=("local", "ray"),
        default="local",
        help="ray: a task of a Ray cluster writes each file of weights, and reads its shards itself (needs ckptsync[ray])",
    )
    command.add_argument(
        "--ray-address",
        metavar="ADDRESS",
        default=os.environ.get("RAY_ADDRESS", "auto"),
        help="the cluster: HOST:PORT of its head; auto: the cluster of this machine; local: this machine alone (default: $RAY_ADDRESS, or auto)",
    )
    command.add_argument(
        "--statistics", action="store_true", help="of each tensor written: minimum, maximum, norm, NaNs, infinities, zeros"
    )
    command.add_argument(
        "--ignore-times",
        action="store_true",
        help="do not compare the files' times to find shards of different saves: the times were lost in copying",
    )


def run(args: argparse.Namespace) -> int:
    """Plan, write, say what was written."""
    options = Options(args.dtype, size(args.max_shard_size), args.source, args.allow_code)
    is_far = any(isinstance(located(url), Remote) for url in args.sources)
    work = Work(jobs(args.jobs, is_far=is_far), tensor_digests=False, statistics=args.statistics)
    access = reached(args).within(PARTS)
    judge = ignored if args.ignore_times else check_dates
    asked = Asked(
        [located(source) for source in args.sources],
        located(args.destination),
        options,
        located(args.config_from) if args.config_from else None,
        located(args.base) if args.base else None,
    )
    store = access.store(asked.destination) if isinstance(asked.destination, Remote) else None
    with paused():
        check_free(store) if store else local.check_free(asked)
        prepared = look(asked, access, judge)
        gc.freeze()  # what is planned stays to the end: the cycle collector need not look at it again and again
    if args.dry_run:
        result = planned(prepared)
    else:
        with (silent if args.json else shown)(f"merging into {told(prepared.destination)}") as progress:
            carried_out = _carried_out(args, prepared, access, progress, work)
            result = written(prepared, carried_out)
    output.print_json(result) if args.json else _show(result)
    return 0


def _carried_out(args: argparse.Namespace, prepared: Prepared, access: Access, progress: Progress, work: Work) -> Merged:
    store = access.store(prepared.destination) if isinstance(prepared.destination, Remote) else None
    if args.engine == "local":
        return carry_out_into(store, prepared, progress, work) if store else local.carry_out_local(prepared, progress, work)
    from ckptsync.merge.ray import RayEngine
    from ckptsync.merge.reaching import reach

    if args.bandwidth:
        raise ConfigError("--bandwidth: tasks of a cluster share none", hint="leave it away, or use the engine local")
    if store:
        return carry_out_into(store, prepared, progress, work, RayEngine(args.ray_address, reach(prepared, access)))
    return local.carry_out_local(prepared, progress, work, lambda at: RayEngine(args.ray_address, reach(prepared, access, at)))


def size(text: str) -> int:
    """Bytes, at least one; raises ConfigError."""
    try:
        count = parse_size(text)
    except ValueError as e:
        raise ConfigError(f"--max-shard-size: {e}") from e
    if count < 1:
        raise ConfigError(f"--max-shard-size: {text!r}: at least one byte is wanted")
    return count


def jobs(asked: int | None, *, is_far: bool = False) -> int:
    """Threads: as many as asked for, else one for each core that this process may use, or what it takes to wait for a store elsewhere.

    Raises ConfigError.
    """
    if asked is not None and asked < 1:
        raise ConfigError(f"--jobs: {asked}: at least one is wanted")
    return asked or (FAR_JOBS if is_far else min(MOST_JOBS, len(os.sched_getaffinity(0))))


def planned(prepared: Prepared) -> dict[str, Any]:
    """What ``--dry-run`` says."""
    job = prepared.job
    files = [{"path": plan.name, "size": plan.size} for plan in job.plans] + [
        {"path": name, "size": len(job.held[name]) if name in job.held else location.sizes()[name]} for name, location in job.beside
    ]
    dtypes = Counter(tensor.dtype for plan in job.plans for tensor in plan.tensors)
    return _result(prepared, files, dtypes, job.notes) | {"dry_run": True}


def written(prepared: Prepared, merged: Merged) -> dict[str, Any]:
    """What a merge says."""
    files = [{"path": file.path, "size": file.size, "blake3": file.digest} for file in merged.files]
    result = _result(prepared, files, Counter(tensor.dtype for tensor in merged.tensors), merged.notes) | {"dry_run": False}
    if merged.statistics is None:
        return result
    return result | {"statistics": {name: described(found) for name, found in merged.statistics.items()}}


def described(found: Statistics) -> dict[str, Any]:
    """One tensor's statistics, in words that JSON has: what is not finite is null."""
    numbers = {"min": found.low, "max": found.high, "norm": found.norm}
    finite = {name: n if n is not None and math.isfinite(n) else None for name, n in numbers.items()}
    return finite | {"nan": found.nans, "infinite": found.infinities, "zeros": found.zeros, "elements": found.count}


def _result(prepared: Prepared, files: list[dict[str, Any]], dtypes: Counter[str], notes: Iterable[str]) -> dict[str, Any]:
    return {
        "destination": told(prepared.destination),
        "source": prepared.job.source,
        "tensors": dtypes.total(),
        "bytes": sum(file["size"] for file in files),
        "dtypes": dict(dtypes.most_common()),
        "files": files,
        "left_out": list(prepared.job.left_out),
        "notes": list(notes),
    }


def _show(result: dict[str, Any]) -> None:
    would = "would be " if result["dry_run"] else ""
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in result["dtypes"].items())
    print(f"source   {output.clean(result['source'])}")
    print(f"tensors  {result['tensors']} ({dtypes})")
    for row in output.aligned([[f"         {file['path']}", show_size(file["size"])] for file in result["files"]]):
        print(row)
    _show_statistics(result.get("statistics", {}))
    for note in result["notes"]:
        print(f"note     {output.clean(note)}")
    print(f"{would}written: {len(result['files'])} files, {show_size(result['bytes'])}, in {output.clean(result['destination'])}")


def _show_statistics(tensors: dict[str, dict[str, Any]]) -> None:
    if tensors:
        rows = [["tensor", "min", "max", "norm", "nan", "infinite", "zero"]]
        for name, found in tensors.items():
            numbers = ["" if found[key] is None else f"{found[key]:.6g}" for key in ("min", "max", "norm")]
            share = f"{found['zeros'] / found['elements']:.2%}"
            rows.append([name, *numbers, str(found["nan"]), str(found["infinite"]), share])
        for row in output.aligned(rows):
            print(row)
