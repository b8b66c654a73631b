"""``ckptsync convert``: rewrite ZeRO's shards so that any number of ranks can resume from them.

DeepSpeed resumes from its shards only on as many ranks as wrote them.  Its universal checkpoint has
a file for each parameter and optimizer state; the conversion is a merge with another plan.
"""

from __future__ import annotations

import argparse
import gc
from typing import Any

from ckptsync.cli import output
from ckptsync.cli.arguments import (
    access_of,
    add_bandwidth,
    add_dry_run,
    add_ignore_times,
    add_jobs,
)
from ckptsync.cli.merge import PARTS, thread_count
from ckptsync.cli.output import say
from ckptsync.errors import ConfigError
from ckptsync.gc_pause import paused
from ckptsync.merger.destination import check_free, merge
from ckptsync.merger.inputs import MergeRequest, PreparedMerge, open_sources, show_path
from ckptsync.merger.plan import MergeOptions, MergeResources
from ckptsync.merger.universal_conversion import LATEST, prepare_universal
from ckptsync.quantities import show_size
from ckptsync.stores.path_or_url import pure_path, without_links
from ckptsync.stores.urls import Remote, located

DETAILS = (
    "With several SRC, each holds the shards of the same checkpoint that one node wrote. DST is"
    " what load_checkpoint takes, or the Trainer's resume_from_checkpoint, with load_universal in"
    " DeepSpeed's configuration."
)
NOTES = """\
Set `"checkpoint": {"load_universal": true}` in DeepSpeed's configuration to load DST, at stage
1, 2 or 3 as before.

DST holds what DeepSpeed's `ds_to_universal` writes, without integer buffers, and of a Trainer's
checkpoint `trainer_state.json`, random states, scheduler, configuration and tokenizer. Frozen
parameters and buffers are those of the model that the training starts with.

At stage 3 DeepSpeed loads only Adam's states. It also gives every parameter group the options
of the first: set weight decay again after loading. torch's Adam counts the step up once for
each group. The result says where this matters.

Refused (exit code 5): experts, pipelines, tensor parallelism, `universal_checkpoint_info` with
patterns, `round_robin_gradients`, `elastic_checkpoint`, optimizers whose states are not one
value for each element.

SIGKILL leaves `.DST.ckptsync-…` beside DST: delete it. FSDP's distributed checkpoints need no
conversion (`ckptsync help formats`).
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    add = command.add_argument
    add(
        "sources",
        metavar="SRC",
        nargs="+",
        help="a checkpoint with DeepSpeed's shards, or a DeepSpeed save directory; a path or a URL",
    )
    add(
        "destination",
        metavar="DST",
        help="a new directory, which appears whole or not at all",
    )
    add(
        "--to",
        choices=("universal",),
        required=True,
        help="universal: DeepSpeed's universal checkpoint, of ZeRO-1, 2 and 3",
    )
    add(
        "--source",
        metavar="S",
        help="which shards to convert, where there are several: zero:TAG (default: the tag that"
        " `latest` names)",
    )
    add_jobs(command, "read and digest")
    add_ignore_times(command)
    add_bandwidth(command)
    add_dry_run(command, "written")


def run(args: argparse.Namespace) -> int:
    """Plan the conversion, write it unless it is a dry run, and print the result; return 0.

    The planned objects are exempt from garbage collection for good.  Raises ConfigError, also for a
    URL as destination, Incomplete, Unsupported, Corrupt or StoreError.
    """
    destination = located(args.destination)
    if isinstance(destination, Remote):
        raise ConfigError(
            f"{args.destination}: a conversion is written to a directory of this machine",
            hint="convert into a directory, then `ckptsync push` it",
        )
    sources = [located(source) for source in args.sources]
    resources = MergeResources(thread_count(args.jobs, sources), tensor_digests=False)
    access = access_of(args).within(PARTS)
    request = MergeRequest(sources, destination, MergeOptions(source=args.source))
    tag = pure_path(without_links(sources[0])).name
    with paused():
        check_free(request, access)
        prepared = open_sources(
            request,
            access,
            use_times=not args.ignore_times,
            planner=lambda files: prepare_universal(files, args.source, tag),
        )
        gc.freeze()
    job = prepared.job
    sizes = {name: len(job.contents[name]) for name, _ in job.beside}
    files = [{"path": p.name, "bytes": p.size} for p in job.plans]
    files += [{"path": name, "bytes": size} for name, size in sizes.items()]
    notes = list(job.notes)
    if not args.dry_run:
        label = f"converting into {show_path(destination)}"
        with output.progress(args, label, "are converted") as progress:
            merged = merge(prepared, access, progress, resources)
        files = [{"path": f.path, "bytes": f.size, "blake3": f.digest} for f in merged.files]
        notes = list(merged.notes)
    result = _result(prepared, files, notes) | {"dry_run": args.dry_run}
    output.print_json(result) if args.json else _show(result)
    return 0


def _result(
    prepared: PreparedMerge, files: list[dict[str, Any]], notes: list[str]
) -> dict[str, Any]:
    """Return the result for ``--json``, without ``dry_run``."""
    names = [plan.name.rpartition("/") for plan in prepared.job.plans if plan.ending]
    states = {last.removesuffix(".pt") for _, _, last in names}
    return {
        "destination": show_path(prepared.request.destination),
        "source": prepared.job.source,
        "tag": prepared.job.contents[LATEST].decode(),
        "parameters": len({folder for folder, _, _ in names}),
        "states": sorted(states),
        "bytes": sum(file["bytes"] for file in files),
        "files": files,
        "notes": notes,
    }


def _show(result: dict[str, Any]) -> None:
    """Print a result for people."""
    say(f"source      {result['source']}")
    say(f"parameters  {result['parameters']}, each with {', '.join(result['states'])}")
    for note in result["notes"]:
        say(f"note        {note}")
    would = "would be " if result["dry_run"] else ""
    amount = f"{len(result['files'])} files, {show_size(result['bytes'])}"
    say(f"{would}written: {amount}, in {result['destination']}")
