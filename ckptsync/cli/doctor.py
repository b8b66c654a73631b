"""``ckptsync doctor``: find what would make a training hang or lose files, before it starts."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptsync.cli import output
from ckptsync.cli.arguments import (
    access_of,
    add_targets,
    option_value,
    read_configuration,
    with_store,
)
from ckptsync.cli.service import variables
from ckptsync.config import loading
from ckptsync.config.output_dirs import existing_directories
from ckptsync.config.schema import Config
from ckptsync.config.value_parsers import period
from ckptsync.doctor import diagnosis, training_facts
from ckptsync.doctor.diagnosis import Diagnosis, DoctorRequest
from ckptsync.doctor.directory_checks import check_answers
from ckptsync.doctor.findings import exit_code, refusal
from ckptsync.doctor.published_facts import Arrived
from ckptsync.doctor.store_checks import StoreTarget
from ckptsync.errors import ConfigError, StoreError
from ckptsync.stores.urls import located
from ckptsync.worker.node_identity import node_id

DETAILS = """Without --store it looks at this node: its configuration, store, output directories, \
limits, and the Python that trains.
With --publish --wait 2m, on every node before a launch, it waits for the other nodes and compares \
all of them; every node gets the same answer.
With --store, or --nodes, it compares the nodes that have published, and those that train now.
Failures end it with 2 (a configuration, a version, a variable) or 4 (the store, a disk); warnings \
with 0, or with --strict 1."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add_targets(command, "", argparse.SUPPRESS)
    add(
        "--publish",
        action="store_true",
        help="write this node's facts and findings to the store: run it where the training is"
        " started, on each node",
    )
    add(
        "--wait",
        metavar="TIME",
        help="with --publish: wait until all nodes of the launch have published, then compare them;"
        " every node gets the same answer",
    )
    add(
        "--nnodes",
        metavar="N",
        default="",
        help="how many nodes --wait waits for (default: $MIN_NNODES, $NNODES)",
    )
    add(
        "--nodes",
        action="store_true",
        help="compare the nodes that have published in the store of -c",
    )
    add(
        "--node",
        metavar="ID",
        default="",
        help="this node's id in the store (default: the configuration's, or computed)",
    )
    add(
        "--output-dir",
        metavar="DIR",
        action="append",
        default=[],
        help="where the training will write; need not exist yet; may be repeated (default: the"
        " configuration's, --training's)",
    )
    add(
        "--training",
        metavar="FILE",
        help="the training's own YAML or JSON (LLaMA-Factory, TrainingArguments, DeepSpeed,"
        " accelerate), or the shell script that launches it",
    )
    add(
        "--model",
        metavar="DIR",
        default="",
        help="the model that is trained (default: --training's)",
    )
    add(
        "--python",
        metavar="PATH",
        default="",
        help="the Python that trains (default: $VIRTUAL_ENV's, $CONDA_PREFIX's, or the first in"
        " PATH)",
    )
    add(
        "--job",
        metavar="NAME",
        default=os.environ.get("SLURM_JOB_ID", ""),
        help="which training this is, where several share a store: only its nodes are compared"
        " (default: $SLURM_JOB_ID)",
    )
    add(
        "--fresh",
        metavar="TIME",
        default="1h",
        help="compare only nodes that published within this time (default: 1h)",
    )
    add("--strict", action="store_true", help="exit code 1 where there are warnings alone")


def run(args: argparse.Namespace) -> int:
    """Examine, print the findings, and return the exit code that docs/doctor.md gives."""
    for word in args.targets[:1]:
        why = f"{word}: doctor takes no argument; --store names the store"
        raise ConfigError(why, hint=with_store(args, word))
    # a wrong value is refused, also where nothing is compared
    fresh = option_value("--fresh", period, args.fresh)
    wait = 0.0 if args.wait is None else option_value("--wait", period, args.wait)
    if wait and not args.publish:
        hint = "ckptsync doctor --publish --wait 2m …, on every node"
        raise ConfigError("--wait needs --publish", hint=hint)
    found = _diagnose(args, wait, fresh)
    code = exit_code(found.findings) or int(args.strict and bool(found.findings))
    if args.json:
        output.print_json(document(found, code))
    else:
        for line in lines(found):
            output.say(line)
    return code


def examine(path: Path) -> tuple[Diagnosis, int]:
    """Return what `ckptsync doctor -c PATH` finds, and its exit code.  Raises ConfigError."""
    command = argparse.ArgumentParser()
    add_arguments(command)
    diagnosis = _diagnose(command.parse_args(["-c", str(path)]), 0.0, 0.0)
    return diagnosis, exit_code(diagnosis.findings)


def _diagnose(args: argparse.Namespace, wait: float, fresh: float) -> Diagnosis:
    is_compared = (args.nodes or args.url is not None) and not args.publish
    if args.config and args.url:
        why = f"{args.url}: a store and a configuration are given"
        raise ConfigError(why, hint="give one of them")
    given = training_facts.read_training(Path(args.training)) if args.training else {}
    try:
        request = _request(args, given, wait, fresh)
    except (ConfigError, StoreError) as e:
        if is_compared or (isinstance(e, ConfigError) and not args.config):
            raise
        kind, subject, why = "configuration", args.config, "the service does not start"
        if isinstance(e, StoreError):
            kind, subject = "no-answer", ""
            why = "every program that opens it blocks forever: trainers and the worker, too"
        found = refusal(e, kind, subject, why).on(args.node or node_id())
        return Diagnosis("", (), (found,))
    if is_compared:
        return diagnosis.compare_published(request)
    if args.publish:
        request.named_store()
    if wait:
        request = replace(request, nnodes=_nnodes(args, request.environment))

    def show_waiting(arrived: Arrived) -> None:
        if arrived.expected > 1 and not args.json:
            here = f"{len(arrived.nodes)} of {arrived.expected} nodes have published"
            names = ", ".join(diagnosis.names(arrived.nodes))
            output.say(f"ckptsync: {here}: {names}; waiting up to {args.wait}", to_stderr=True)

    return diagnosis.examine(request, show_waiting)


def _request(
    args: argparse.Namespace, given: Mapping[str, str], wait: float, fresh: float
) -> DoctorRequest:
    """Read the configuration; ``given``: what the training's file says.

    Raises ConfigError; StoreError where the file system of a path that is named does not answer.
    """
    output_dirs = [*args.output_dir, *filter(None, [training_facts.output_dir_of(given)])]
    model = args.model or given.get("model_name_or_path", "")
    check_answers(*output_dirs, *([model] if model.startswith("/") else []))
    config, target, environment = None, None, dict(os.environ)
    if args.config:
        config, target, served = _configured(Path(args.config))
        output_dirs = [*served, *output_dirs]
    elif url := args.url or os.environ.get("CKPTSYNC_STORE", ""):
        access = access_of(args)
        check_answers(located(url))
        target = StoreTarget(url, access.options, access.limits)
    return DoctorRequest(
        node=args.node or (config.node if config else "") or node_id(),
        target=target,
        config=config,
        output_dirs=tuple(dict.fromkeys(Path(path).absolute() for path in output_dirs)),
        training=given,
        model=model,
        python=args.python,
        environment=environment,
        job=args.job,
        publishes=args.publish,
        compares=args.nodes,
        wait=wait,
        max_age=fresh,
    )


def _configured(path: Path) -> tuple[Config, StoreTarget, list[str]]:
    """Return the service's configuration, its store and its output directories.

    Raises ConfigError; StoreError where the file system of one of them does not answer.
    """
    # as the service: systemd gives it these variables, and not this shell's
    os.environ.update(variables(path))
    config = read_configuration(path)
    runs, url = config.worker.runs if "worker" in config.roles else (), config.store.url
    check_answers(located(url), *(run.path for run in runs))
    try:
        output_dirs = [run.path for run in existing_directories(runs, url).runs]
    except OSError as e:
        what = f"worker.runs: {e.filename}: {(e.strerror or str(e)).lower()}"
        raise ConfigError(what, hint="run the worker, and doctor, as the user who trains") from e
    limits = loading.limits_of(config.limits)
    deletes = "head" in config.roles and config.retention.has_rules
    return config, StoreTarget(url, config.store.options, limits, deletes=deletes), output_dirs


def _nnodes(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Return how many nodes to wait for.

    Of an elastic launch (``2:4``) the fewest that it starts with.
    """
    of_launch = environment.get("MIN_NNODES") or environment.get("NNODES", "").partition(":")[0]
    text = args.nnodes or of_launch
    if not text:
        what = "--wait: NNODES is not set, so the number of nodes is not known"
        raise ConfigError(what, hint="export NNODES, or give --nnodes")
    if not re.fullmatch(r"0*[1-9][0-9]{0,5}", text):
        what = f"--wait: {text!r} is not a number of nodes"
        raise ConfigError(what, hint="set NNODES, or give --nnodes, such as 2")
    return int(text)


def document(found: Diagnosis, code: int) -> dict[str, Any]:
    """Return what ``--json`` prints of a diagnosis."""
    levels = [finding.level for finding in found.findings]
    return {
        "store": found.store,
        "nodes": list(found.nodes),
        "findings": list(found.findings),
        "failures": levels.count("fail"),
        "warnings": levels.count("warn"),
        "published": found.published or None,
        "python": found.facts.get("prefix") or None,
        "versions": found.facts.get("versions", {}),
        "checked": list(found.checked),
        "not_checked": list(found.unchecked),
        "exit_code": code,
    }


def lines(found: Diagnosis) -> Iterator[str]:
    """Yield what people read of a diagnosis."""
    for finding in found.findings:
        yield f"{finding.level.upper()}  {finding.where}: {finding.what}"
        yield f"      why: {finding.why}"
        yield f"      hint: {finding.hint}"
    if prefix := found.facts.get("prefix"):
        had = ", ".join(f"{name} {version}" for name, version in found.facts["versions"].items())
        python = f"{prefix}, Python {found.facts['python']}"
        yield f"the Python that trains: {python}, {had or 'no training library'}"
    if found.published:
        node = found.nodes[0] if len(found.nodes) == 1 else "this node"
        yield f"{node}: published in {found.published}"
    counts = []
    for level, what in (("fail", "failure"), ("warn", "warning")):
        count = sum(finding.level == level for finding in found.findings)
        counts.append(f"{count} {what}{'' if count == 1 else 's'}")
    if found.checked:
        yield f"checked: {'; '.join(found.checked)}"
    if found.unchecked:
        yield f"not checked: {'; '.join(found.unchecked)}"
    nodes = ", ".join(found.nodes) or "no node"
    if found.findings:
        yield f"{', '.join(counts)}: {nodes}"
    elif not found.checked:
        yield f"nothing was checked: {nodes}"
    else:
        yield f"no problems found on {nodes}{' in what was checked' if found.unchecked else ''}"
