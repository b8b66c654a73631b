"""``ckptsync doctor``: what would make a training hang or lose files, named before it starts."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptsync.cli import output
from ckptsync.cli.locations import reached, read_configuration
from ckptsync.cli.service import variables
from ckptsync.config import loading
from ckptsync.config.readers import period
from ckptsync.config.runs import existing_directories
from ckptsync.config.schema import Config
from ckptsync.doctor import report, training
from ckptsync.doctor.facts import exit_code
from ckptsync.doctor.publishing import Arrived
from ckptsync.doctor.report import Report, Request, check_answers
from ckptsync.doctor.store import Target, refusal
from ckptsync.errors import ConfigError, StoreError
from ckptsync.head.rules import Rules
from ckptsync.stores.urls import located
from ckptsync.worker.node import node_id

WARNED = 1


DETAILS = """Without a URL it looks at this node: its configuration, store, output directories, limits, and the Python that trains.
With --publish --wait 2m, on every node before a launch, it waits for the other nodes and compares all of them; every node gets the same answer.
With a URL, or --nodes, it compares the nodes that have published, and those that train now.
Failures end it with 2 (a configuration, a version, a variable) or 4 (the store, a disk); warnings with 0, or with --strict 1."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Define the arguments."""
    command.add_argument(
        "url", metavar="STORE_URL", nargs="?", help="compare the nodes that this store knows of (default: $CKPTSYNC_STORE)"
    )
    command.add_argument("-c", "--config", metavar="CONFIG", help="the service's configuration: what it would do here is tried")
    command.add_argument(
        "--publish",
        action="store_true",
        help="write this node's facts and findings to the store: run it where the training is started, on each node",
    )
    command.add_argument(
        "--wait",
        metavar="TIME",
        help="with --publish: wait until all nodes of the launch have published, then compare them; every node gets the same answer",
    )
    command.add_argument(
        "--nnodes", metavar="N", default="", help="how many nodes --wait waits for (default: $MIN_NNODES, $NNODES)"
    )
    command.add_argument("--nodes", action="store_true", help="compare the nodes that have published in the store of -c")
    command.add_argument(
        "--node", metavar="ID", default="", help="this node's id in the store (default: the configuration's, or computed)"
    )
    command.add_argument(
        "--output-dir",
        metavar="DIR",
        action="append",
        default=[],
        help="where the training will write, there or not; may be repeated (default: the configuration's, --training's)",
    )
    command.add_argument(
        "--training",
        metavar="FILE",
        help="the training's own YAML or JSON (LLaMA-Factory, TrainingArguments, DeepSpeed, accelerate)",
    )
    command.add_argument("--model", metavar="DIR", default="", help="the model that is trained (default: --training's)")
    command.add_argument(
        "--python",
        metavar="PATH",
        default="",
        help="the Python that trains (default: $VIRTUAL_ENV's, $CONDA_PREFIX's, or the first in PATH)",
    )
    command.add_argument(
        "--job",
        metavar="NAME",
        default=os.environ.get("SLURM_JOB_ID", ""),
        help="which training this is, where several share a store: only its nodes are compared (default: $SLURM_JOB_ID)",
    )
    command.add_argument(
        "--fresh", metavar="TIME", default="1h", help="how old what a node said may be to be compared (default: 1h)"
    )
    command.add_argument("--strict", action="store_true", help="exit code 1 where there are warnings alone")


def run(args: argparse.Namespace) -> int:
    """Look, say what was found; the exit code of docs/doctor.md."""
    fresh = _period(args.fresh, "--fresh")  # a wrong value is refused, also where nothing is compared
    wait = 0.0 if args.wait is None else _period(args.wait, "--wait")
    if wait and not args.publish:
        raise ConfigError("--wait needs --publish", hint="ckptsync doctor --publish --wait 2m …, on every node")
    found = _look(args, wait, fresh)
    code = exit_code(found.findings) or (WARNED if args.strict and found.findings else 0)
    if args.json:
        output.print_json(_document(found, code))
    else:
        print("\n".join(map(output.clean, _lines(found))))
    return code


def _look(args: argparse.Namespace, wait: float, fresh: float) -> Report:
    is_compared = (args.nodes or args.url is not None) and not args.publish
    try:
        request = _request(args, wait, fresh)
    except (ConfigError, StoreError) as e:
        if is_compared or (isinstance(e, ConfigError) and not args.config):
            raise
        is_refused = isinstance(e, ConfigError)
        kind, subject = ("configuration", args.config) if is_refused else ("no-answer", "")
        why = (
            "the service does not start"
            if is_refused
            else "every program that opens it waits for ever, trainers and the worker, too"
        )
        return Report("", (), (refusal(e, kind, args.node or node_id(), subject, why),))
    if is_compared:
        return report.compare_published(request)
    if args.publish and not request.target:
        raise ConfigError("no store was named", hint="give its URL, a configuration with -c, or set CKPTSYNC_STORE")
    if wait:
        request = replace(request, nnodes=_nnodes(args, request.environment))
    return report.examine(request, lambda arrived: _show_waiting(args, arrived))


def _request(args: argparse.Namespace, wait: float, fresh: float) -> Request:
    """Read the configuration and the training's file.  Raises ConfigError; StoreError where the file system of a path that is named does not answer."""
    if args.config and args.url:
        raise ConfigError(f"{args.url}: a store and a configuration are given", hint="give one of them")
    given = training.read(Path(args.training)) if args.training else {}
    output_dirs = [*args.output_dir, *([given["output_dir"]] if given.get("output_dir") else [])]
    model = args.model or given.get("model_name_or_path", "")
    check_answers(*output_dirs, *([model] if model.startswith("/") else []))
    config, environment = None, dict(os.environ)
    if args.config:
        os.environ.update(variables(Path(args.config)))  # as the service: systemd gives it these, and not this shell's
        config = read_configuration(Path(args.config))
        is_worker = "worker" in config.roles
        check_answers(located(config.store.url), *(run.path for run in config.worker.runs if is_worker))
        output_dirs = [*(_served(config) if is_worker else []), *output_dirs]
        target: Target | None = Target(
            config.store.url, config.store.options, loading.limits_of(config.limits), deletes=_deletes(config)
        )
    else:
        url, access = args.url or os.environ.get("CKPTSYNC_STORE", ""), reached(args)
        check_answers(located(url) if url else None)
        target = Target(url, access.options, access.limits) if url else None
    return Request(
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
        fresh=fresh,
    )


def _nnodes(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """How many nodes to wait for: of an elastic launch (``2:4``) the fewest that it starts with."""
    text = args.nnodes or environment.get("MIN_NNODES") or environment.get("NNODES", "").partition(":")[0]
    if not text:
        raise ConfigError("--wait: NNODES is not set: for how many nodes?", hint="export NNODES, or give --nnodes")
    if not re.fullmatch(r"0*[1-9][0-9]{0,5}", text):
        raise ConfigError(f"--wait: {text!r} is no number of nodes", hint="set NNODES, or give --nnodes, such as 2")
    return int(text)


def _show_waiting(args: argparse.Namespace, arrived: Arrived) -> None:
    if arrived.wanted > 1 and not args.json:
        here = f"{len(arrived.nodes)} of {arrived.wanted} nodes have published: {', '.join(report.names(arrived.nodes))}"
        print(output.clean(f"ckptsync: {here}; waiting up to {args.wait}"), file=sys.stderr)


def _period(text: str, option: str) -> float:
    try:
        return period(text)
    except ValueError as e:
        raise ConfigError(f"{option}: {e}") from e


def _served(config: Config) -> list[str]:
    try:
        return [run.path for run in existing_directories(config.worker.runs, config.store.url).runs]
    except OSError as e:
        hint = "run the worker, and doctor, as the user who trains"
        raise ConfigError(f"worker.runs: {e.filename}: {(e.strerror or str(e)).lower()}", hint=hint) from e


def _deletes(config: Config) -> bool:
    """Return whether a head here has rules by which it deletes checkpoints."""
    return "head" in config.roles and (config.retention.of("") != Rules() or bool(config.retention.runs))


def _document(found: Report, code: int) -> dict[str, Any]:
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
        "exit_code": code,
    }


def _lines(found: Report) -> Iterator[str]:
    for finding in found.findings:
        yield f"{finding.level.upper()}  {finding.where}: {finding.what}"
        yield f"      why: {finding.why}"
        yield f"      do:  {finding.hint}"
    if found.facts.get("prefix"):
        had = ", ".join(f"{name} {version}" for name, version in found.facts["versions"].items())
        yield f"asked {found.facts['prefix']}: Python {found.facts['python']}, {had or 'no library of a training'}"
    if found.published:
        yield f"{found.nodes[0] if len(found.nodes) == 1 else 'this node'}: published in {found.published}"
    levels = [finding.level for finding in found.findings]
    counts = (
        f"{_several(levels.count('fail'), 'failure')}, {_several(levels.count('warn'), 'warning')}" if levels else "nothing found"
    )
    yield f"{counts}: {', '.join(found.nodes) or 'no node'}"


def _several(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
