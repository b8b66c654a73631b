"""``ckptsync doctor``: what would make a training hang or lose files, named before it starts."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ckptsync.cli import output
from ckptsync.cli.locations import reached, read_configuration
from ckptsync.cli.service import variables
from ckptsync.config import reach
from ckptsync.config.readers import period
from ckptsync.config.runs import existing_directories
from ckptsync.config.values import Config
from ckptsync.doctor import examining, interpreters, mounting, output_dirs, probe, publishing, training
from ckptsync.doctor.asking import Asked, is_directory
from ckptsync.doctor.compare import alone, compare
from ckptsync.doctor.examining import Place, refusal
from ckptsync.doctor.findings import Finding, exit_code, in_order
from ckptsync.errors import CkptsyncError, ConfigError, StoreError
from ckptsync.head.rules import Rules
from ckptsync.stores.contract import Store
from ckptsync.stores.mounts import mount_of
from ckptsync.stores.urls import located
from ckptsync.worker.node import node_id

WARNED = 1
_NO_STORE = "no store was named"
_WHICH_STORE = "give its URL, a configuration with -c, or set CKPTSYNC_STORE"


@dataclass(frozen=True, slots=True)
class Report:
    """What was found, of which nodes; ``published``: where this node said what it is; ``asked``: what its training's Python said."""

    store: str
    nodes: tuple[str, ...]
    findings: tuple[Finding, ...]
    published: str = ""
    asked: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Here:
    """What this node is, as the command line and the configuration name it.

    ``environment``: this command's own, without the service's keys, for the Python that trains.
    """

    node: str
    place: Place | None
    config: Config | None
    outputs: tuple[Path, ...]
    training: Mapping[str, str] = field(default_factory=dict)
    model: str = ""
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)


def run(args: argparse.Namespace) -> int:
    """Look, say what was found; the exit code of docs/doctor.md."""
    _period(args.fresh, "--fresh")  # a wrong value is refused, also where nothing is compared
    if args.wait is not None:
        _period(args.wait, "--wait")
        if not args.publish:
            raise ConfigError("--wait needs --publish", hint="ckptsync doctor --publish --wait 2m …, on every node")
    report = _compared(args) if (args.nodes or args.url is not None) and not args.publish else _examined(args)
    code = exit_code(report.findings) or (WARNED if args.strict and report.findings else 0)
    if args.json:
        output.print_json(_document(report, code))
    else:
        print("\n".join(map(output.clean, _lines(report))))
    return code


def _examined(args: argparse.Namespace) -> Report:
    """What this node shows; with --publish it says in the store what it is, with --wait or --nodes it is compared with the others then."""
    try:
        here = _here(args)
    except ConfigError as e:
        if not args.config:
            raise
        return Report("", (), (refusal(e, "configuration", args.node or node_id(), args.config, "the service does not start"),))
    except StoreError as e:
        why = "whoever touches it waits for ever: trainers, the worker, and this command, which has looked at nothing else"
        return Report("", (), (refusal(e, "no-answer", args.node or node_id(), "", why),))
    if args.publish and not here.place:
        raise ConfigError(_NO_STORE, hint=_WHICH_STORE)
    wanted = _wanted(args, here.environment) if args.wait else 0
    found = list(examining.runs(here.config, here.node)) if here.config else []
    rate = output_dirs.mean_rate(here.config.limits.bandwidth) if here.config else None
    asked = Asked(here.node, os.geteuid(), examining.expected(here.model, here.training), rate)
    found += examining.outputs(here.outputs, asked)
    answer = examining.Answer(())
    if here.place:
        answer = examining.store(here.place, here.node, here.outputs, creates=args.publish)
    told, more = _asked(args, here, answer.clock)
    found += [*answer.findings, *more]
    report = Report(here.place.url if here.place else "", (here.node,), (), asked=told)
    facts = {**told, "findings": [asdict(finding) for finding in in_order(found)]}
    found += alone(told)
    if args.publish and answer.store:
        return _published(args, replace(report, findings=tuple(found)), answer.store, facts, wanted)
    return replace(report, findings=in_order(found))


def _asked(args: argparse.Namespace, here: _Here, clock: float | None) -> tuple[Mapping[str, Any], tuple[Finding, ...]]:
    """What this node is, and whether it could be asked.  No training is looked for where only heads and verifiers work."""
    if here.config and "worker" not in here.config.roles and not args.publish:
        return {"node": here.node, "clock": clock}, ()
    try:
        facts = _facts(args, here, clock)
    except ConfigError as e:
        unknown = {"python": "", "prefix": "", "versions": {}, "builds": {}, "clock": clock, "job": args.job}
        why = "nothing is known of what trains here"
        return {**probe.gather(node=here.node), **unknown}, (refusal(e, "python", here.node, args.python or "--python", why),)
    if not args.publish or facts["versions"].get("torch"):
        return facts, ()
    why = "nodes are compared by another Python than the one that trains, or by none"
    hint = "activate the training's environment, or name its Python with --python"
    return facts, (Finding("warn", "no-torch", (here.node,), facts["prefix"], "no torch is installed there", why, hint),)


def _published(args: argparse.Namespace, report: Report, store: Store, facts: Mapping[str, Any], wanted: int) -> Report:
    """Publish this node's facts; with --wait or --nodes, compare them with the others'."""
    (node,), found = report.nodes, report.findings
    name, write = publishing.launch_name(node), partial(examining.written, store.url)
    try:
        if args.wait:
            seconds, progress = _period(args.wait, "--wait"), partial(_waiting, args)
            arrived = publishing.meet(store, facts, wanted, seconds, write=write, progress=progress)
            return replace(report, nodes=_names(arrived.nodes), findings=_of_launch(arrived, args.wait), published=name)
        write(lambda: publishing.publish(store, facts))
    except CkptsyncError as e:
        why = "other nodes cannot be compared with this one"
        return replace(report, findings=in_order([*found, refusal(e, "not-published", node, report.store, why)]))
    nodes, more = _nodes(store, args, facts["clock"] or 0.0) if args.nodes else (report.nodes, [])
    return replace(report, nodes=nodes, findings=in_order([*found, *more]), published=name)


def _wanted(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """How many nodes to wait for: of an elastic launch (``2:4``) the fewest that it starts with."""
    text = args.nnodes or environment.get("MIN_NNODES") or environment.get("NNODES", "").partition(":")[0]
    if not text:
        raise ConfigError("--wait: NNODES is not set: for how many nodes?", hint="export NNODES, or give --nnodes")
    if not re.fullmatch(r"0*[1-9][0-9]{0,5}", text):
        raise ConfigError(f"--wait: {text!r} is no number of nodes", hint="set NNODES, or give --nnodes, such as 2")
    return int(text)


def _waiting(args: argparse.Namespace, arrived: publishing.Arrived) -> None:
    if arrived.wanted > 1 and not args.json:
        here = f"{len(arrived.nodes)} of {arrived.wanted} nodes have published: {', '.join(_names(arrived.nodes))}"
        print(output.clean(f"ckptsync: {here}; waiting up to {args.wait}"), file=sys.stderr)


def _names(facts: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    return tuple(sorted({str(one["node"]) for one in facts}))


def _of_launch(arrived: publishing.Arrived, time: str) -> tuple[Finding, ...]:
    """What is wrong with the nodes of a launch, the same on each of them."""
    found = [*compare(arrived.nodes), *publishing.repeated(arrived.nodes)]
    if arrived.is_complete:
        return in_order(found)
    ranks = {str(one.get("variables", {}).get("NODE_RANK", "")) for one in arrived.nodes}
    missing = [str(rank) for rank in range(arrived.wanted) if str(rank) not in ranks]
    names = _names(arrived.nodes)
    lacking = arrived.wanted - len(names)
    which = f" (NODE_RANK {', '.join(missing)})" if len(missing) == lacking else ""
    what = f"{lacking} of {arrived.wanted} nodes did not publish within {time}{which}; {', '.join(names)} did"
    why = "the launch would wait for the missing nodes until the rendezvous times out"
    hint = "run `ckptsync doctor --publish --wait` on every node at the same time, with the same store and --job"
    if arrived.others:
        hint += f"; {', '.join(_names(arrived.others))} published before, and does not wait now"
    last = Finding("fail", "nodes-missing", names, "NNODES", what, why, hint)
    return in_order([*(finding for finding in found if finding.kind != "nodes-missing"), last])


def _compared(args: argparse.Namespace) -> Report:
    here = _here(args)
    place = here.place
    if place is None:
        raise ConfigError(_NO_STORE, hint=_WHICH_STORE)
    store = examining.there(place)
    if store is None:
        raise ConfigError(f"{place.url}: there is no store", hint="is the file system mounted, and the path right?")
    clock = 0.0
    with contextlib.suppress(StoreError):  # who may only read cannot ask what time it is there
        clock = examining.clock(store, here.node)
    nodes, found = _nodes(store, args, clock)
    if not nodes:
        hint = "run `ckptsync doctor --publish` on each node; a training that runs is compared by what its hook says"
        raise ConfigError(f"{store.url}: no node has said what it is within {args.fresh}", hint=hint)
    return Report(store.url, nodes, in_order(found))


def _nodes(store: Store, args: argparse.Namespace, clock: float) -> tuple[tuple[str, ...], list[Finding]]:
    """Those that said what they are a short while ago, and those of each run that trains now.  ``clock``: how far this node's is ahead of the store's."""
    now, fresh = time.time() - clock, _period(args.fresh, "--fresh")
    said, odd = publishing.published(store, now, fresh)
    asked = [one for one in said if not args.job or one.get("job") == args.job]
    groups = [*publishing.jobs(asked), *publishing.trainings(publishing.living(store, now, fresh)).values()]
    found = [*(finding for group in groups for finding in compare(group)), *publishing.repeated(asked)]
    if len(groups) == 1 and len(groups[0]) == 1 and not _is_known_to_be_one(groups[0][0], found):
        (one,) = groups[0]
        why = "what differs is found between nodes; one under whose path for the store another disk lies is never seen here"
        hint = "run `ckptsync doctor --publish` on each node, then compare again"
        found.append(Finding("warn", "one-node", (str(one["node"]),), store.url, "no other node has said what it is", why, hint))
    found += [refusal(e, "unreadable-facts", "", store.url, "that node is not compared") for e in odd]
    return _names(facts for group in groups for facts in group), found


def _is_known_to_be_one(facts: Mapping[str, Any], found: list[Finding]) -> bool:
    """Whether it was said that there is no other, or already that one is missing."""
    return publishing.is_alone(facts) or any(finding.kind == "nodes-missing" for finding in found)


def _period(text: str, option: str) -> float:
    try:
        return period(text)
    except ValueError as e:
        raise ConfigError(f"{option}: {e}") from e


def _here(args: argparse.Namespace) -> _Here:
    """Raises ConfigError; StoreError where the file system of a path that is named does not answer."""
    if args.config and args.url:
        raise ConfigError(f"{args.url}: a store and a configuration are given", hint="give one of them")
    said = training.read(Path(args.training)) if args.training else {}
    given = [*args.output_dir, *([said["output_dir"]] if said.get("output_dir") else [])]
    model = args.model or said.get("model_name_or_path", "")
    _answer(*given, *([model] if model.startswith("/") else []))
    if not args.config:
        url = args.url or os.environ.get("CKPTSYNC_STORE", "")
        access = reached(args)
        _answer(located(url) if url else None)
        place = Place(url, access.options, access.limits) if url else None
        return _Here(args.node or node_id(), place, None, tuple(dict.fromkeys(Path(p).absolute() for p in given)), said, model)
    source = Path(args.config)
    own = dict(os.environ)
    os.environ.update(variables(source))  # as the service: systemd gives it these, and not this shell's
    config = read_configuration(source)
    _answer(located(config.store.url), *(run.path for run in config.worker.runs if "worker" in config.roles))
    served = _served(config) if "worker" in config.roles else []
    place = Place(config.store.url, config.store.options, reach.limits(config.limits), deletes=_lets_go(config))
    outputs = tuple(dict.fromkeys(Path(p).absolute() for p in (*served, *given)))
    return _Here(args.node or config.node or node_id(), place, config, outputs, said, model, own)


def _answer(*paths: object) -> None:
    """Raises StoreError where one of them, up to its first wildcard, is on a file system that does not answer; what is no path is somebody else's question."""
    if silent := mounting.silent(mounting.fixed(Path(p).absolute()) for p in paths if isinstance(p, (str, Path))):
        hint = "see whether its server is up; `umount -f -l` lets go of a mount whose server has gone"
        raise StoreError(f"{', '.join(map(str, silent))}: no answer of the file system within {mounting.PATIENCE:g} s", hint=hint)


def _served(config: Config) -> list[str]:
    try:
        return [run.path for run in existing_directories(config.worker.runs, config.store.url).runs]
    except OSError as e:
        hint = "run the worker, and doctor, as the user who trains"
        raise ConfigError(f"worker.runs: {e.filename}: {(e.strerror or str(e)).lower()}", hint=hint) from e


def _lets_go(config: Config) -> bool:
    """Whether a head here has rules by which something is deleted."""
    return "head" in config.roles and (config.retention.of("") != Rules() or bool(config.retention.runs))


def _facts(args: argparse.Namespace, here: _Here, clock: float | None) -> dict[str, Any]:
    pythons = [args.python] if args.python else interpreters.candidates()
    is_path = here.model.startswith("/") or bool(here.model and is_directory(Path(here.model)))  # else a name in a hub
    model = str(Path(here.model).absolute()) if is_path else ""
    shared = [str(path) for path in here.outputs] if args.publish else []
    told = interpreters.ask_one(pythons, here.environment, places=shared, node=here.node, model=model)
    for path, about in told.get("places", {}).items():
        mount = mount_of(path)
        about["server"] = mount.kind if mount.is_remote else ""
    return {**told, "training": dict(here.training), "clock": clock, "job": args.job}


def _document(report: Report, code: int) -> dict[str, Any]:
    levels = [finding.level for finding in report.findings]
    return {
        "store": report.store,
        "nodes": list(report.nodes),
        "findings": list(report.findings),
        "failures": levels.count("fail"),
        "warnings": levels.count("warn"),
        "published": report.published or None,
        "python": report.asked.get("prefix") or None,
        "versions": report.asked.get("versions", {}),
        "exit_code": code,
    }


def _lines(report: Report) -> Iterator[str]:
    for finding in report.findings:
        yield f"{finding.level.upper()}  {finding.where}: {finding.what}"
        yield f"      why: {finding.why}"
        yield f"      do:  {finding.hint}"
    if report.asked.get("prefix"):
        had = ", ".join(f"{name} {version}" for name, version in report.asked["versions"].items())
        yield f"asked {report.asked['prefix']}: Python {report.asked['python']}, {had or 'no library of a training'}"
    if report.published:
        yield f"{report.nodes[0] if len(report.nodes) == 1 else 'this node'}: published in {report.published}"
    levels = [finding.level for finding in report.findings]
    counts = (
        f"{_several(levels.count('fail'), 'failure')}, {_several(levels.count('warn'), 'warning')}" if levels else "nothing found"
    )
    yield f"{counts}: {', '.join(report.nodes) or 'no node'}"


def _several(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
