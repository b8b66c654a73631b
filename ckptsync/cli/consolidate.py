"""``ckptsync consolidate``: do now, and by hand, what a head does for checkpoints.

A complete checkpoint is merged into its model, a damaged model is made again, and configuration
that came later is added.  A head runs this command as a child for each job; both ask
`head.due_jobs` what is due, so that they never disagree.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from ckptsync.catalogue.cached import Cache, read_catalogue
from ckptsync.catalogue.uncached import not_found, read_location
from ckptsync.cli import output
from ckptsync.cli.arguments import (
    IN_STORE,
    add_dry_run,
    add_targets,
    configuration,
    only_target,
    option_value,
    store_run_location,
    store_url,
)
from ckptsync.cli.output import Progress, say
from ckptsync.cli.progress import add_progress, with_progress
from ckptsync.config.loading import limits_of, options_for
from ckptsync.config.schema import Config, HeadConfig
from ckptsync.errors import CkptsyncError, ConfigError, Incomplete, without_frames
from ckptsync.head.consolidate import HeadOptions, RayCluster, WrittenModel, consolidate_location
from ckptsync.head.due_jobs import ANY_RUN, Job, head_jobs
from ckptsync.merger.plan import DTYPES, MergeOptions, MergeResources
from ckptsync.quantities import parse_size, show_size
from ckptsync.stores.contract import Store
from ckptsync.stores.opening import Access

WINDOW = 6 << 20  # bytes in flight for each thread of a merge: small, as several run at once
DETAILS = (
    "Options that are not given are those of the configuration's head."
    " A model that is there keeps the options that it was made with."
)
NOTES = """\
A damaged model is written again, and configuration that came later is added. A head may run
meanwhile. A checkpoint that cannot be consolidated yet is an error that says why (exit code 3).
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    add = command.add_argument
    add_targets(command, IN_STORE, "what to consolidate (default: all that is due)")
    add("--dtype", choices=DTYPES, help="as of `ckptsync merge`")
    add("--max-shard-size", metavar="SIZE", help="the largest size of a file of weights")
    add(
        "--config-from",
        metavar="DIR",
        help="a directory with config and tokenizer files, where the run has none",
    )
    add("--allow-code", action="store_true", help="copy code that lies in checkpoints, too")
    add(
        "--only-configuration",
        action="store_true",
        help="only add configuration that has come later to models that are there",
    )
    add_dry_run(command, "made")
    add_progress(command)


def run(args: argparse.Namespace) -> int:
    """Consolidate what is due; print the models that were written, and why others were not.

    Return the exit code of the first error, else 0.
    """
    return with_progress(args, _run)


def _run(args: argparse.Namespace, progress: Progress) -> int:
    """Run the jobs that are due, or only print them (``--dry-run``); return the first error's code.

    A named location is tried whether or not it is due.  An error of one job does not stop the next.
    Raises ConfigError for contradicting options, Incomplete if the named location has no model and
    nothing was done; StoreError.
    """
    store, run_, location = store_run_location(args, only_target(args))
    if location and args.only_configuration:
        raise ConfigError("--only-configuration is for a whole run", hint=f"give {run_}")
    options, resources = _options(args)
    jobs = [Job("consolidate", run_, location)]  # its records decide whether it is due
    if args.dry_run or not (location or (run_ and args.only_configuration)):
        due_jobs = _list_due(args, store, run_, options)
        jobs = [job for job in due_jobs if location in ("", job.location)]
    models: list[WrittenModel] = []
    errors: list[tuple[str, CkptsyncError]] = []
    for job in () if args.dry_run else jobs:
        try:
            with output.progress(args, f"consolidating {job.subject}") as show_progress:
                models += consolidate_location(
                    store,
                    job.run,
                    job.location,
                    options,
                    progress=progress if args.progress else show_progress,
                    work=resources,
                )
        except CkptsyncError as e:  # noqa: PERF203 - reported below, once the others are done
            errors.append((job.subject, without_frames(e)))
    if location and not (models or errors or (args.dry_run and jobs)):
        _check_has_model(store, run_, location)
    code = errors[0][1].exit_code if errors else 0
    if args.json:
        output.print_json(_describe(args, jobs, models, errors), code)
        return code
    for job in jobs if args.dry_run else ():
        say(f"due: {job.subject}")
    for model in models:
        amount = f"{len(model.files)} files, {show_size(model.size)}"
        say(f"consolidated: {model.run}/{model.location}: {amount}")
        for note in model.notes:
            say(f"  note: {note}")
    for subject, error in errors:
        output.print_error(error, about=subject)
    if not (models or errors or (args.dry_run and jobs)):
        every = f"every complete checkpoint{run_ and f' of {run_}'}"
        say(f"nothing to do: {f'{run_}/{location}' if location else every} has its model")
    return code


def _options(args: argparse.Namespace) -> tuple[HeadOptions, MergeResources]:
    """Return the options of the command line, else of the configuration, else the defaults.

    With the engine ``ray``, they name the cluster of RAY_ADDRESS, else this machine's; it is not
    contacted.  Raises ConfigError.
    """
    config = configuration(args)
    head = config.head if config else HeadConfig()
    size = head.max_shard_size
    if args.max_shard_size:
        size = option_value("--max-shard-size", parse_size, args.max_shard_size)
        if size < 1:
            raise ConfigError(f"--max-shard-size: {args.max_shard_size!r} is too small")
    merge = MergeOptions(
        args.dtype or head.dtype, size, allow_code=args.allow_code or head.allow_code
    )
    config_from = {ANY_RUN: args.config_from} if args.config_from else head.config_from
    cluster = None
    if config and head.engine == "ray":
        # the cluster that Ray's variable names, else the one of this machine
        url, address = store_url(args), os.environ.get("RAY_ADDRESS", "auto")
        access = options_for(url, config.store.options)
        cluster = RayCluster(address, url, access, limits_of(config.limits))
    resources = MergeResources(head.threads, statistics=head.statistics, window=WINDOW)
    return HeadOptions(merge, config_from, cluster, head.norm_jump, **bases_of(config)), resources


def bases_of(config: Config | None) -> dict[str, Any]:
    """Return HeadOptions' ``into`` and ``access``; {} if no base of adapters is configured."""
    if not config or not config.head.adapters:
        return {}
    return {
        "into": config.head.adapters,
        "access": Access(config.store.options, limits_of(config.limits)),
    }


def _list_due(args: argparse.Namespace, store: Store, run_: str, options: HeadOptions) -> list[Job]:
    """Return the jobs of a head for all runs, or for ``run_``, as of now; the cache is only read.

    With ``--only-configuration`` only those of whole runs.  Raises ConfigError if the store has no
    such run, StoreError.
    """
    catalogue = read_catalogue(store, Cache.load(store.url), run_)
    locations = [summary for summary in catalogue.summaries if run_ in ("", summary.run)]
    if run_ and not locations:
        raise not_found(store, run_)
    config_from = options.config_from
    jobs = head_jobs(
        locations, lambda name: str(config_from.get(name) or config_from.get(ANY_RUN) or "")
    )
    return [job for job in jobs if not (args.only_configuration and job.location)]


def _check_has_model(store: Store, run_: str, location: str) -> None:
    """Raise Incomplete with the reason if a location has no model.

    Raise the error of its record if that cannot be read, ConfigError if it does not exist.
    """
    state = read_location(store, run_, location)
    if location_state := state.of(run_, location):
        if location_state.model_record is None:
            detail = "; ".join(state.summary_of(location_state).evidence)
            why = f"it is {location_state.status}{detail and ': '}{detail}"
            hint = "`ckptsync ls` says what is missing"
            raise Incomplete(f"{run_}/{location}: not consolidated, {why}", hint=hint)
        return
    for fault in state.faults_of(run_, location):
        raise fault.error
    raise not_found(store, run_, location)


def _describe(
    args: argparse.Namespace,
    jobs: list[Job],
    models: list[WrittenModel],
    errors: list[tuple[str, CkptsyncError]],
) -> dict[str, Any]:
    """Return the result for ``--json``."""
    keys = ("run", "location", "model_record", "files", "notes")
    return {
        "dry_run": args.dry_run,
        "due": [{"run": job.run, "location": job.location, "bytes": job.size} for job in jobs],
        "models": [{**{key: getattr(m, key) for key in keys}, "bytes": m.size} for m in models],
        "errors": [{"target": subject, **output.describe_error(e)} for subject, e in errors],
    }
