"""``ckptsync doctor``: find what would make a training hang or lose files, before it starts.

The package `doctor` examines; this module collects what to examine from options, configuration and
environment, and prints the findings.  Either this node is examined, or nodes that have published
are compared.
"""

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
    """Define the command's arguments."""
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
    """Examine, and print the findings; return the greatest code of failures, else 0.

    With ``--strict`` warnings alone return 1.  Raises ConfigError for wrong or contradicting
    options.
    """
    for word in args.targets[:1]:
        why = f"{word}: doctor takes no argument; --store names the store"
        raise ConfigError(why, hint=with_store(args, word))
    # a wrong value is refused even if nothing is compared
    max_age = option_value("--fresh", period, args.fresh)
    wait = 0.0 if args.wait is None else option_value("--wait", period, args.wait)
    if wait and not args.publish:
        hint = "ckptsync doctor --publish --wait 2m …, on every node"
        raise ConfigError("--wait needs --publish", hint=hint)
    result = _diagnose(args, wait, max_age)
    code = exit_code(result.findings) or int(args.strict and bool(result.findings))
    if args.json:
        output.print_json(document(result, code))
    else:
        for line in lines(result):
            output.say(line)
    return code


def examine(path: Path) -> tuple[Diagnosis, int]:
    """Return the diagnosis of `ckptsync doctor -c PATH`, and its exit code; print nothing of it.

    Sets variables as `_read_service`.  Raises ConfigError.
    """
    command = argparse.ArgumentParser()
    add_arguments(command)
    diagnosis = _diagnose(command.parse_args(["-c", str(path)]), 0.0, 0.0)
    return diagnosis, exit_code(diagnosis.findings)


def _diagnose(args: argparse.Namespace, wait: float, max_age: float) -> Diagnosis:
    """Return the diagnosis of this node, as `diagnosis.examine`, or of the published nodes.

    Unless nodes are compared, a configuration of ``-c`` or a store that cannot be read is a
    finding.  With ``--publish``, writes to the store, waits up to ``wait`` seconds, and prints for
    whom unless ``--json``.  ``max_age`` is seconds, too.  Raises ConfigError, StoreError.
    """
    is_compared = (args.nodes or args.url is not None) and not args.publish
    if args.config and args.url:
        why = f"{args.url}: a store and a configuration are given"
        raise ConfigError(why, hint="give one of them")
    training_options = training_facts.read_training(Path(args.training)) if args.training else {}
    try:
        request = _request(args, training_options, wait, max_age)
    except (ConfigError, StoreError) as e:
        if is_compared or (isinstance(e, ConfigError) and not args.config):
            raise
        kind, subject, why = "configuration", args.config, "the service does not start"
        if isinstance(e, StoreError):
            kind, subject = "no-answer", ""
            why = "every program that opens it blocks forever: trainers and the worker, too"
        finding = refusal(e, kind, subject, why).on(args.node or node_id())
        return Diagnosis("", (), (finding,))
    if is_compared:
        return diagnosis.compare_published(request)
    if args.publish:
        request.named_store()
    if wait:
        request = replace(request, nnodes=_nnodes(args, request.environment))

    def show_waiting(arrived: Arrived) -> None:
        """Print which nodes have published, if others are waited for."""
        if arrived.expected > 1 and not args.json:
            count = f"{len(arrived.nodes)} of {arrived.expected} nodes have published"
            names = ", ".join(diagnosis.names(arrived.nodes))
            output.say(f"ckptsync: {count}: {names}; waiting up to {args.wait}", to_stderr=True)

    return diagnosis.examine(request, show_waiting)


def _request(
    args: argparse.Namespace, training_options: Mapping[str, str], wait: float, max_age: float
) -> DoctorRequest:
    """Return what to examine, from options, configuration and environment.

    ``training_options``: those of the training's own file.  With ``-c``, set the variables of the
    file beside it in this process.  Raises ConfigError; StoreError if the file system of a named
    path does not answer.
    """
    output_dirs = [
        *args.output_dir,
        *filter(None, [training_facts.output_dir_of(training_options)]),
    ]
    model = args.model or training_options.get("model_name_or_path", "")
    check_answers(*output_dirs, *([model] if model.startswith("/") else []))
    config, target, environment = None, None, dict(os.environ)
    if args.config:
        config, target, served = _read_service(Path(args.config))
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
        training=training_options,
        model=model,
        python=args.python,
        environment=environment,
        job=args.job,
        publishes=args.publish,
        compares=args.nodes,
        wait=wait,
        max_age=max_age,
    )


def _read_service(path: Path) -> tuple[Config, StoreTarget, list[str]]:
    """Return the service's configuration, its store and its output directories.

    Set the variables of the file beside it in this process, as systemd does for the service.
    Raises ConfigError; StoreError if the file system of one of them does not answer.
    """
    # systemd gives the service these variables, and not this shell's
    os.environ.update(variables(path))
    config = read_configuration(path)
    runs, url = config.worker.runs if "worker" in config.roles else (), config.store.url
    check_answers(located(url), *(run.path for run in runs))
    try:
        output_dirs = [run.path for run in existing_directories(runs, url).runs]
    except OSError as e:
        why = f"worker.runs: {e.filename}: {(e.strerror or str(e)).lower()}"
        raise ConfigError(why, hint="run the worker, and doctor, as the user who trains") from e
    limits = loading.limits_of(config.limits)
    deletes = "head" in config.roles and config.retention.has_rules
    return config, StoreTarget(url, config.store.options, limits, deletes=deletes), output_dirs


def _nnodes(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Return how many nodes to wait for; of an elastic launch (``2:4``) the fewest.

    Raises ConfigError if neither option nor variable gives a number.
    """
    launcher_count = (
        environment.get("MIN_NNODES") or environment.get("NNODES", "").partition(":")[0]
    )
    text = args.nnodes or launcher_count
    if not text:
        why = "--wait: NNODES is not set, so the number of nodes is not known"
        raise ConfigError(why, hint="export NNODES, or give --nnodes")
    if not re.fullmatch(r"0*[1-9][0-9]{0,5}", text):
        why = f"--wait: {text!r} is not a number of nodes"
        raise ConfigError(why, hint="set NNODES, or give --nnodes, such as 2")
    return int(text)


def document(result: Diagnosis, code: int) -> dict[str, Any]:
    """Return a diagnosis for ``--json``; ``code`` is its exit code."""
    levels = [finding.level for finding in result.findings]
    return {
        "store": result.store,
        "nodes": list(result.nodes),
        "findings": list(result.findings),
        "failures": levels.count("fail"),
        "warnings": levels.count("warn"),
        "published": result.published or None,
        "python": result.facts.get("prefix") or None,
        "versions": result.facts.get("versions", {}),
        "checked": list(result.checked),
        "not_checked": list(result.unchecked),
        "exit_code": code,
    }


def lines(result: Diagnosis) -> Iterator[str]:
    """Yield a diagnosis as lines for people: findings, the Python, what was checked.

    The last line has the counts of failures and warnings, or says that nothing was found or
    checked.
    """
    for finding in result.findings:
        yield f"{finding.level.upper()}  {finding.where}: {finding.what}"
        yield f"      why: {finding.why}"
        yield f"      hint: {finding.hint}"
    if prefix := result.facts.get("prefix"):
        libraries = ", ".join(
            f"{name} {version}" for name, version in result.facts["versions"].items()
        )
        python = f"{prefix}, Python {result.facts['python']}"
        yield f"the Python that trains: {python}, {libraries or 'no training library'}"
    if result.published:
        node = result.nodes[0] if len(result.nodes) == 1 else "this node"
        yield f"{node}: published in {result.published}"
    counts = []
    for level, noun in (("fail", "failure"), ("warn", "warning")):
        count = sum(finding.level == level for finding in result.findings)
        counts.append(f"{count} {noun}{'' if count == 1 else 's'}")
    if result.checked:
        yield f"checked: {'; '.join(result.checked)}"
    if result.unchecked:
        yield f"not checked: {'; '.join(result.unchecked)}"
    nodes = ", ".join(result.nodes) or "no node"
    if result.findings:
        yield f"{', '.join(counts)}: {nodes}"
    elif not result.checked:
        yield f"nothing was checked: {nodes}"
    else:
        yield f"no problems found on {nodes}{' in what was checked' if result.unchecked else ''}"
