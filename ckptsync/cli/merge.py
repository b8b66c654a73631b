"""``ckptsync merge``: consolidate a sharded checkpoint, with no service running.

It turns options into a `MergeRequest`, opens the sources, and calls the merge that a head uses,
too.  With ``--into`` the sources are adapters, which are summed into their base.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from ckptsync.cli import output
from ckptsync.cli.arguments import (
    access_of,
    add_bandwidth,
    add_dry_run,
    add_ignore_times,
    add_jobs,
    option_value,
)
from ckptsync.cli.output import say
from ckptsync.errors import ConfigError
from ckptsync.gc_pause import paused
from ckptsync.merger.adapter_sums import ChangeTotals
from ckptsync.merger.destination import EngineAt, check_free, merge
from ckptsync.merger.engine import MergeResult
from ckptsync.merger.inputs import (
    MergeRequest,
    PreparedMerge,
    open_sources,
    show_path,
    usual_threads,
)
from ckptsync.merger.into_base import AS_BASE, open_into_base
from ckptsync.merger.plan import DTYPES, SHARD_SIZE, MergeOptions, MergeResources
from ckptsync.merger.tensor_statistics import Statistics
from ckptsync.quantities import parse_size, show_size
from ckptsync.records.layer_groups import LAYER_GROUPS, layer_group
from ckptsync.stores.opening import Access
from ckptsync.stores.path_or_url import PathOrUrl
from ckptsync.stores.urls import located

# bytes of parts in flight to a store: enough to keep a network busy, and all of a merge stays
# within 300 MB
PARTS = 64 << 20
KEPT = "are merged; the same command continues"
DETAILS = (
    "With several SRC, each holds the shards of the same checkpoint that one node wrote."
    " `merge ADAPTER… --into BASE DST` sums LoRA adapters into their base, one after the other."
)
NOTES = """\
Names are the model's own. Wrappers are removed: `_orig_mod`, `_fsdp_wrapped_module`,
`_checkpoint_wrapped_module`, `_forward_module`, and a `module` before every name. Two names
that would become one are refused.

Of a head and its embedding one copy is written where `config.json` (else the model type's
default) ties them and their bytes agree; else all that is stored.

`--dtype auto` gives each tensor its dtype in training; with `--base`, as in that model; with
`--into`, as in the base. Shards of mixed precision are float32, and stay so without `--base`.
Integers, bools, fp8 and complex numbers are never cast. Finite values that become infinite in a
cast are counted.

LoRA and its kin become one `adapter_model.safetensors` with peft's names. `adapter_config.json`
is looked for in the checkpoint, its run and `--config-from`. VeRA, VB-LoRA, AdaLoRA and prompt
encoders are refused in shards: save them with `save_pretrained`.

TRL's `v_head.summary` becomes `value_head.safetensors`, which LLaMA-Factory loads.
`value_head.safetensors` or `value_head.bin` beside the weights is copied.

`--source` takes `dcp:pytorch_model_fsdp_0@base` (the base, where base and adapter are in the
same shards; else the adapter is written), `…@adapter=NAME`, `policy` or `'peft:*'` (adapters in
directories of their names: one, all), `…@module=actor`, `…@module=actor@base`, `…@module=.`
(all names as they are), `dcp:.#generator` (a section of a distributed checkpoint; `dcp:.#`: the
tensors in none), `…#world=N` (the number of ranks, where a layout does not record it). With one
set of weights, leave out what stands before `@`.

A model inside another module (`policy`, `actor.model`, Lightning's `model.`) is found; the rest
is left out and named. Of two models (actor and critic) none is taken without `@module`. Names
that do not fit the class in `config.json` are refused (exit code 5); `--base` can help to find
where the model's names begin.

With `--base`, a tensor of another shape is corrupt (10), a missing one incomplete (3), an
additional one a note. All modules of an adapter must be in the base. Its configuration and
tokenizer are used where there are no others.

`--fill-from` is for frozen parameters (DeepSpeed's `exclude_frozen_parameters`), towers and
experts that were not trained. They keep that model's dtype, unless `--dtype` casts them.
Nothing is taken where the metadata does not say which tensors were saved (3): DCP in
safetensors, a rank's own `.metadata` without `#world=N`, a pipeline's layers.

`--names-of` is for vLLM and other versions of `from_pretrained`: names in memory differ for
Qwen2-VL, Gemma 3, LLaVA and others (`ckptsync help formats`). A tensor without a place in that
model is refused (5).

The models of `--fill-from` and `--names-of` must be whole and unquantised, with a `config.json`
that says their family; dtypes are not compared with them. Both are refused for an adapter.

`--into` writes `W + scale·B·A` in float32, rounded once: the values of peft's
`merge_and_unload`, or nearer to the exact sum. It takes LoRA, rsLoRA, DoRA, patterns of ranks
and alphas, embeddings and heads, `modules_to_save`, biases, Conv1D, convolutions, fused and
per-expert experts, trainable tokens. BASE may be a snapshot in Hugging Face's cache.

With `--into`, names, tensors and order of files are the base's. So are `config.json` and
`generation_config.json`, with a resized vocabulary and the written dtype. Tokenizer and chat
template are the last adapter's that has them. The result has the norm of the change relative to
the base's, by group of layers.

`--into` refuses quantised bases, IA3, VeRA, AdaLoRA, prompts and PEFT's other kinds, and PiSSA,
OLoRA, CorDA, LoRA-GA and LoftQ without `--changed-base` (5); `--engine ray`, `--base`,
`--fill-from`, `--names-of` (2); names that match nothing in the base, ranks that contradict
`adapter_config.json`, other shapes, one factor of two, a sum that is not finite or too large
for the dtype (10, 3).

`--into` warns of an adapter that changes nothing or not all its modules (B is all zero: never
trained), of a base that contains it already, and of DoRA magnitudes far from the base's norms.
Plain LoRA does not show whether its base is another one of the same shapes. A QLoRA adapter is
summed into the unquantised base, which is not the model that was evaluated: evaluate it again.

All paths may be URLs, in any mixture. A merge takes less than 300 MB of memory, and needs no
disk unless DST is on it. One that fails leaves nothing in a directory DST.

A merge into a store that was killed continues with the same command: finished files are
checked, and S3 and SFTP keep the parts that had arrived (not with `--statistics`). Until its
end `.ckptsync-merge.json` stands in DST: `from_pretrained` cannot open the model, and
`inspect`, `merge` and `verify` say so (3). Where the store refuses deletion, it stays and says
that the merge has ended. Another merge into that DST, or a foreign file in it, is refused (2):
delete the files yourself.

A source whose size or time changes during the merge makes it incomplete (3). Times in object
stores are not compared; within a store manifests count.
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    add = command.add_argument
    add(
        "sources",
        metavar="SRC",
        nargs="+",
        help="a checkpoint, its inner shard directory, or a DeepSpeed save directory; a path or"
        " a URL",
    )
    add(
        "destination",
        metavar="DST",
        help="a new directory, which appears whole or not at all; or a URL, where a merge that was"
        " killed continues",
    )
    add(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="auto: as the model has it; keep: the most precise copy stored (default: auto)",
    )
    add(
        "--max-shard-size",
        metavar="SIZE",
        help="the largest size of an output file, for example 5GB or 512MiB (default: 5GB; with"
        " --into, files as the base's)",
    )
    add(
        "--source",
        metavar="S",
        help="which weights to merge, where a checkpoint holds several (`ckptsync inspect` lists"
        " them); S@base is the model under a PEFT adapter in the same shards, S@adapter=NAME one"
        " adapter of several, S@module=PATH the model at that path of the training's module",
    )
    add(
        "--config-from",
        metavar="DIR",
        help="a directory with the config and tokenizer files, if the checkpoint and its run have"
        " none; code (*.py, auto_map) is copied from here only",
    )
    add(
        "--allow-code",
        action="store_true",
        help="copy code that lies in the checkpoint, too: from_pretrained with trust_remote_code"
        " runs it",
    )
    add(
        "--base",
        metavar="DIR",
        help="the model that was trained: names and shapes must be the same, and auto gives each"
        " tensor its dtype (only headers are read)",
    )
    add(
        "--fill-from",
        metavar="DIR",
        help="take tensors that the checkpoint does not hold, such as frozen ones, from this model;"
        " the result says which. What a lost shard held is never taken from here",
    )
    add(
        "--names-of",
        metavar="DIR",
        help="write tensors under the names that this model's files have, experts split or fused as"
        " there: names in files are often not those in memory",
    )
    add(
        "--into",
        metavar="BASE",
        help="SRC are LoRA adapters (PEFT's): sum them into this model, in this order, and write"
        " the whole model",
    )
    add(
        "--changed-base",
        action="store_true",
        help="BASE is the model that the adapter's initialisation left (PiSSA, OLoRA, CorDA,"
        " LoRA-GA, LoftQ), not the original one",
    )
    add_jobs(command, "read, cast and digest")
    add(
        "--engine",
        choices=("local", "ray"),
        default="local",
        help="ray: a task of a Ray cluster writes each file of weights, and reads its shards itself"
        " (needs ckptsync[ray])",
    )
    add(
        "--ray-address",
        metavar="ADDRESS",
        default=os.environ.get("RAY_ADDRESS", "auto"),
        help="the cluster: HOST:PORT of its head; auto: the cluster of this machine; local: this"
        " machine alone (default: $RAY_ADDRESS, or auto)",
    )
    add(
        "--statistics",
        action="store_true",
        help="print of each tensor: minimum, maximum, norm, NaNs, infinities, zeros; note those"
        " that are all zeros, or have long runs of zeros (a bias may, a projection should not)",
    )
    add_ignore_times(command)
    add_bandwidth(command)
    add_dry_run(command, "written")


def run(args: argparse.Namespace) -> int:
    """Plan the merge, write it unless it is a dry run, and print the result; return 0.

    The planned objects are exempt from garbage collection for good.  Raises ConfigError,
    Incomplete, Unsupported, Corrupt or StoreError.
    """
    size = AS_BASE if args.into else SHARD_SIZE
    if args.max_shard_size is not None:
        size = _parse_shard_size(args.max_shard_size)
    _check_options(args)
    options = MergeOptions(args.dtype, size, args.source, args.allow_code)
    places = [located(word) for word in (*args.sources, args.into) if word]
    jobs = thread_count(args.jobs, places)
    resources = MergeResources(jobs, tensor_digests=False, statistics=args.statistics)
    access = access_of(args).within(PARTS)
    request = MergeRequest(
        [located(source) for source in args.sources],
        located(args.destination),
        options,
        located(args.config_from) if args.config_from else None,
        base=located(args.base) if args.base else None,
        fill_from=located(args.fill_from) if args.fill_from else None,
        names_of=located(args.names_of) if args.names_of else None,
        into=located(args.into) if args.into else None,
        is_changed_base=args.changed_base,
    )
    with paused():
        check_free(request, access)
        open_all = open_into_base if request.into else open_sources
        prepared = open_all(request, access, use_times=not args.ignore_times)
        # the plan stays to the end: spare the cycle collector from scanning it again and again
        gc.freeze()
    if args.dry_run:
        result = describe_plan(prepared)
    else:
        engine_at = _ray_engine(args, prepared, access) if args.engine == "ray" else None
        label = f"merging into {show_path(prepared.request.destination)}"
        with output.progress(args, label, KEPT) as progress:
            result = describe_result(
                prepared, merge(prepared, access, progress, resources, engine_at)
            )
    output.print_json(result) if args.json else _show(result)
    return 0


def _ray_engine(args: argparse.Namespace, prepared: PreparedMerge, access: Access) -> EngineAt:
    """Return a function that makes the Ray engine; raise ConfigError for ``--bandwidth``."""
    from ckptsync.merger.ray_engine import RayEngine, task_access

    if args.bandwidth:
        why = "--bandwidth: the tasks of a cluster share no limit"
        raise ConfigError(why, hint="leave it out, or use --engine local")
    return lambda target: RayEngine(args.ray_address, task_access(prepared, access, target))


def _check_options(args: argparse.Namespace) -> None:
    """Raise ConfigError for options that contradict each other."""
    if args.into and args.engine == "ray":
        why = "--engine ray: adapters are summed by this process alone"
        raise ConfigError(why, hint="leave it out: a sum needs little more than a copy")
    if args.into and args.base:
        raise ConfigError("--base: with --into the base is named already", hint="leave it out")
    option = "--fill-from" if args.fill_from else "--names-of" if args.names_of else ""
    if args.into and option:
        raise ConfigError(
            f"{option}: with --into the base is taken as it is",
            hint=f"prepare the base first: `ckptsync merge BASE DST {option} DIR`",
        )
    if args.changed_base and not args.into:
        raise ConfigError("--changed-base: no base", hint="name it with --into")


def _parse_shard_size(text: str) -> int:
    """Return the bytes of ``--max-shard-size``.  Raises ConfigError."""
    count = option_value("--max-shard-size", parse_size, text)
    if count < 1:
        raise ConfigError(f"--max-shard-size: {text!r} is too small: expected at least one byte")
    return count


def thread_count(jobs: int | None, places: Iterable[PathOrUrl]) -> int:
    """Return ``--jobs``, or the usual number of threads for these places.

    Raises ConfigError for less than one.
    """
    if jobs is not None and jobs < 1:
        raise ConfigError(f"--jobs: expected at least 1, not {jobs}")
    return jobs or usual_threads(places)


def describe_plan(prepared: PreparedMerge) -> dict[str, Any]:
    """Return the result of ``--dry-run`` for ``--json``."""
    job = prepared.job
    files = [{"path": plan.name, "bytes": plan.size} for plan in job.plans]
    for name, directory in job.beside:
        content = job.contents.get(name)
        size = directory.sizes()[name] if content is None else len(content)
        files.append({"path": name, "bytes": size})
    dtypes = Counter(tensor.dtype for plan in job.plans for tensor in plan.tensors)
    result = _result(prepared, files, dtypes, job.notes) | {"dry_run": True}
    return result | ({"change": _describe_change(prepared)} if prepared.request.into else {})


def describe_result(prepared: PreparedMerge, merged: MergeResult) -> dict[str, Any]:
    """Return the result of a merge for ``--json``; a statistic that is not finite is None."""
    files = [
        {"path": file.path, "bytes": file.size, "blake3": file.digest} for file in merged.files
    ]
    dtypes = Counter(tensor.dtype for tensor in merged.tensors)
    result = _result(prepared, files, dtypes, merged.notes) | {"dry_run": False}
    if merged.statistics is not None:
        statistics = {
            name: _describe_statistics(statistic) for name, statistic in merged.statistics.items()
        }
        result["statistics"] = statistics
    if prepared.request.into:
        result["change"] = _describe_change(prepared, merged.changes)
    return result


def _describe_change(
    prepared: PreparedMerge, totals: Mapping[str, ChangeTotals] | None = None
) -> dict[str, Any]:
    """Return how many modules and tensors adapters change.

    With ``totals``, also the relative norm of the change: in all (None if it is not known), and by
    group of layers, without groups where it is not known.
    """
    counts: dict[str, Any] = {
        "adapters": len(prepared.request.sources),
        "modules": prepared.job.modules,
        "tensors": len(prepared.job.sums),
    }
    if totals is None:
        return counts
    groups: dict[str, ChangeTotals] = {}
    for name, total in totals.items():
        group = layer_group(name)
        groups[group] = groups.get(group, ChangeTotals()) + total
    norms = {group: groups[group].relative for group in LAYER_GROUPS if group in groups}
    overall = sum(groups.values(), ChangeTotals()).relative
    return counts | {
        "relative": overall,
        "groups": {g: n for g, n in norms.items() if n is not None},
    }


def _describe_statistics(statistics: Statistics) -> dict[str, Any]:
    """Return the statistics of a tensor for ``--json``; None for a number that is not finite."""
    numbers = {"min": statistics.low, "max": statistics.high, "norm": statistics.norm}
    finite = {key: n if n is not None and math.isfinite(n) else None for key, n in numbers.items()}
    counts = {"nan": statistics.nans, "infinite": statistics.infinities, "zeros": statistics.zeros}
    return {**finite, **counts, "elements": statistics.count}


def _result(
    prepared: PreparedMerge, files: list[dict[str, Any]], dtypes: Counter[str], notes: Iterable[str]
) -> dict[str, Any]:
    """Return the keys that a plan and a written merge have in common, for ``--json``."""
    return {
        "destination": show_path(prepared.request.destination),
        "source": prepared.job.source,
        "tensors": dtypes.total(),
        "bytes": sum(file["bytes"] for file in files),
        "dtypes": dict(dtypes.most_common()),
        "files": files,
        "left_out": list(prepared.job.left_out),
        "filled": list(prepared.job.filled),
        "notes": list(notes),
    }


def _show(result: dict[str, Any]) -> None:
    """Print a result of `describe_plan` or `describe_result` for people."""
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in result["dtypes"].items())
    say(f"source   {result['source']}")
    say(f"tensors  {result['tensors']} ({dtypes})")
    files = [[f"         {file['path']}", show_size(file["bytes"])] for file in result["files"]]
    print("\n".join(output.aligned(files)))
    if tensors := result.get("statistics"):
        rows = [["tensor", "min", "max", "norm", "nan", "infinite", "zero"]]
        for name, statistics in tensors.items():
            values = [statistics[key] for key in ("min", "max", "norm")]
            numbers = ["" if value is None else f"{value:.6g}" for value in values]
            zeros = f"{statistics['zeros'] / statistics['elements']:.2%}"
            rows.append(
                [name, *numbers, str(statistics["nan"]), str(statistics["infinite"]), zeros]
            )
        print("\n".join(output.aligned(rows)))
    if change := result.get("change"):
        count = change["adapters"]
        adapters = f"{count} adapters" if count > 1 else "the adapter"
        say(f"change   {change['modules']} modules, {change['tensors']} tensors, by {adapters}")
        for group, norm in change.get("groups", {}).items():
            say(f"         {group}: {norm:.3g} of the norm")
    for note in result["notes"]:
        say(f"note     {note}")
    would = "would be " if result["dry_run"] else ""
    amount = f"{len(result['files'])} files, {show_size(result['bytes'])}"
    say(f"{would}written: {amount}, in {result['destination']}")
