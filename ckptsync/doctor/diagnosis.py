"""`ckptsync doctor`: examine this node (`examine`), or compare nodes (`compare_published`).

Runs every check that the request has the information for, and says which were left out and which
option enables them.  Nodes meet through the store: each publishes its facts and findings there.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ckptsync.config.output_dirs import is_matched, output_directories
from ckptsync.config.schema import Config
from ckptsync.doctor import directory_checks, probe, published_facts, store_checks, training_facts
from ckptsync.doctor.checks import check_node, compare
from ckptsync.doctor.directory_checks import fixed_part, is_directory
from ckptsync.doctor.findings import STORAGE, Finding, fail, in_order, refusal, warn
from ckptsync.doctor.store_checks import StoreTarget
from ckptsync.errors import CkptsyncError, ConfigError, StoreError
from ckptsync.mounts import mount_of
from ckptsync.quantities import show_duration
from ckptsync.stores.contract import Store

_SHOWN = 5  # output directories that are named as checked


@dataclass(frozen=True, slots=True)
class DoctorRequest:
    """What doctor checks, from the command line and the configuration.

    ``training``: the values in the training's own file.  ``environment``: this command's own,
    without the service's keys, for the Python that trains.  ``wait``: seconds to wait for
    ``nnodes`` nodes; 0 to wait for none.  ``max_age``: seconds after which a node's facts are not
    compared.
    """

    node: str
    target: StoreTarget | None = None
    config: Config | None = None
    output_dirs: tuple[Path, ...] = ()
    training: Mapping[str, str] = field(default_factory=dict)
    model: str = ""
    python: str = ""
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    job: str = ""
    publishes: bool = False
    compares: bool = False
    wait: float = 0.0
    nnodes: int = 0
    max_age: float = published_facts.FRESH_WITHIN

    @property
    def has_worker(self) -> bool:
        """Return whether a configuration with the role worker is given."""
        return self.config is not None and "worker" in self.config.roles

    def named_store(self) -> StoreTarget:
        """Return the configured store; raise ConfigError if none is given."""
        if self.target is None:
            hint = "give its URL, a configuration with -c, or set CKPTSYNC_STORE"
            raise ConfigError("no store is named", hint=hint)
        return self.target


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The findings of doctor, and the nodes that it checked or compared.

    ``published``: the name of this node's facts in the store.  ``facts``: those of the Python that
    trains.  ``checked``: what was checked on this node; ``unchecked``: what was not, each with the
    option that would check it.
    """

    store: str
    nodes: tuple[str, ...]
    findings: tuple[Finding, ...]
    published: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    checked: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()


def examine(
    request: DoctorRequest, progress: Callable[[published_facts.Arrived], object]
) -> Diagnosis:
    """Run all checks on this node, and return the diagnosis.  May take minutes.

    It runs the Python that trains, and writes and removes small files in the output directories and
    the store.  With ``publishes``, if the store can be used, it goes on as `_publish`, and calls
    ``progress`` at arrivals; otherwise nothing is published or compared.
    """
    config, target = request.config, request.target
    local_findings = (
        list(check_runs(config, request.output_dirs)) if config and request.has_worker else []
    )
    expected = directory_checks.expected_size(request.model, request.training)
    local_findings += directory_checks.check_output_dirs(request.output_dirs, expected)
    store_check = store_checks.Checked(())
    if target:
        store_check = store_checks.check_store(
            target, request.node, request.output_dirs, creates=request.publishes
        )
    facts, python_findings = _facts(request, store_check.clock)
    own_findings = [
        finding.on(request.node)
        for finding in (*local_findings, *store_check.findings, *python_findings)
    ]
    findings = in_order([*own_findings, *check_node(facts)])
    url = target.url if target else ""
    untried_dirs = {
        finding.subject for finding in local_findings if finding.kind == "asked-as-root"
    }
    checked_here, unchecked = _coverage(request, facts, untried_dirs)
    diagnosis = Diagnosis(
        url, (request.node,), findings, facts=facts, checked=checked_here, unchecked=unchecked
    )
    if request.publishes and store_check.store:
        own_facts = {**facts, "findings": [asdict(finding) for finding in in_order(own_findings)]}
        return _publish(request, diagnosis, store_check.store, own_facts, progress)
    return diagnosis


def check_runs(config: Config, output_dirs: Sequence[Path] = ()) -> Iterator[Finding]:
    """Yield a finding for each directory that the worker cannot serve.

    Failures: those that `worker.runs` matches and that are left out, and ``output_dirs`` that it
    does not match.  Warnings: paths of `worker.runs` below a directory that does not exist, or that
    this user cannot reach.

    ``output_dirs``: directories that exist, or that trainings will make.
    """
    runs, why = config.worker.runs, "its checkpoints are not uploaded"
    is_root = os.geteuid() == 0
    outputs = output_directories(runs, config.store.url, output_dirs, as_owner=is_root)
    hints = dict.fromkeys(outputs.problems, "change worker.runs") | dict(outputs.unsafe)
    for problem, hint in hints.items():
        yield fail("run-left-out", "worker.runs", problem, why=why, hint=hint)
    for path in (path for path in output_dirs if not is_matched(runs, path)):
        what = f"nothing in worker.runs matches it: {', '.join(run.path for run in runs)}"
        if (real := os.path.realpath(path)) != str(path):
            what += f" (a wildcard matches no link, and this leads to {real})"
        hint = f'add "path: {path}" to worker.runs and reload the service, or train where it looks'
        yield fail("run-left-out", path, what, why=why, hint=hint)
    for run in config.worker.runs:
        above = fixed_part(Path(run.path))
        above = above.parent if above == Path(run.path) else above
        if not is_directory(above):
            what = f"{above} not found, or this user cannot reach it"
            why, hint = "no checkpoint is uploaded", "mount the file system, or correct the path"
            yield warn("output-absent", run.path, what, why=why, hint=hint, code=STORAGE)


def _coverage(
    request: DoctorRequest, facts: Mapping[str, Any], untried_dirs: Collection[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what was checked on this node, and what was not, with the option that would check it.

    A node without the role worker has neither Python, outputs, training nor other nodes on the
    lists.  ``untried_dirs``: output directories in which root tried nothing.
    """
    how, training = "--output-dir DIR, or --training FILE", request.training
    if untried_dirs:
        how = "sudo -u USER ckptsync doctor …"
    elif request.has_worker:
        how = f"worker.runs matches none yet; {how}"
    of_training, written = "--training FILE, or --output-dir DIR", training.get("output_dir")
    is_known = bool(training_facts.output_dir_of(training)) or not written
    if not is_known:
        of_training = f"only a shell knows {written}; --output-dir DIR"
    outputs = [str(path) for path in request.output_dirs if str(path) not in untried_dirs]
    listed = ", ".join(outputs[:_SHOWN]) + (" …" if len(outputs) > _SHOWN else "")
    parts = [
        (True, "limits, interfaces and launch variables of this node", ""),
        (request.config is not None, "the service's configuration", "-c CONFIG"),
        (request.target is not None, "the store", "-c CONFIG, or CKPTSYNC_STORE"),
    ]
    if request.config is None or request.has_worker:
        parts += [
            (bool(facts.get("prefix")), "the Python that trains", "--python PATH"),
            (bool(outputs), f"output directories {listed}".rstrip(), how),
            (
                bool(training) and is_known,
                "the training's settings and where it writes",
                of_training,
            ),
            (
                request.publishes or request.compares,
                "other nodes",
                "--publish --wait 2m on each node",
            ),
        ]
    checked = tuple(subject for is_done, subject, _ in parts if is_done)
    return checked, tuple(f"{subject} ({how})" for is_done, subject, how in parts if not is_done)


def _facts(request: DoctorRequest, clock: float | None) -> tuple[dict[str, Any], list[Finding]]:
    """Return this node's facts, and a finding if they are not those of the training's Python.

    On a machine without the role worker, which does not train, only its name and clock are
    returned, unless they are published.  The finding is a failure if the Python cannot be run,
    whose facts are then empty; a warning if it is to be published without torch. ``clock``: see
    `Checked`.
    """
    if request.config and "worker" not in request.config.roles and not request.publishes:
        return {"node": request.node, "clock": clock}, []
    request_facts = {"training": dict(request.training), "clock": clock, "job": request.job}
    pythons = (
        [request.python] if request.python else training_facts.find_pythons(request.environment)
    )
    # else it is a name in a hub
    is_path = request.model.startswith("/") or (request.model and is_directory(Path(request.model)))
    probe_arguments = {
        "output_dirs": [str(path) for path in request.output_dirs] if request.publishes else [],
        "node": request.node,
        "model": str(Path(request.model).absolute()) if is_path else "",
    }
    try:
        facts = training_facts.ask_first(pythons, request.environment, **probe_arguments)
    except ConfigError as e:
        unknown = {"python": "", "prefix": "", "versions": {}, "builds": {}}
        why = "doctor cannot check the libraries and the GPUs of the training"
        finding = refusal(e, "python", request.python or "--python", why)
        return {**probe.gather(node=request.node), **unknown, **request_facts}, [finding]
    for path, output_dir in facts["output_dirs"].items():
        mount = mount_of(path)
        output_dir["server"] = mount.kind if mount.is_remote else ""
    if not request.publishes or facts["versions"].get("torch"):
        return {**facts, **request_facts}, []
    why = "doctor compares the versions of this Python, and another one trains"
    hint = "activate the training's environment, or name its Python with --python"
    finding = warn("no-torch", facts["prefix"], "no torch is installed there", why=why, hint=hint)
    return {**facts, **request_facts}, [finding]


def _publish(
    request: DoctorRequest,
    diagnosis: Diagnosis,
    store: Store,
    own_facts: Mapping[str, Any],
    progress: Callable[[published_facts.Arrived], object],
) -> Diagnosis:
    """Publish this node's facts in the store; return the diagnosis with the findings of that.

    With ``wait``, wait up to so many seconds for the other nodes of the launch, and compare them:
    these findings replace this node's, which are among them.  Else compare with those that
    published lately, if ``compares``.  An error becomes a failure; if publishing failed, nothing is
    compared and ``published`` stays as it was.
    """
    name, nodes = "", diagnosis.nodes
    findings, why = diagnosis.findings, "other nodes cannot be compared with this one"
    try:
        name = published_facts.launch_name(request.node)
        if request.wait:
            arrived = published_facts.meet(store, own_facts, request.nnodes, request.wait, progress)
            nodes, findings = names(arrived.nodes), _compare_launch(arrived, request.wait)
        else:
            published_facts.publish(store, own_facts)
    except CkptsyncError as e:
        refused = refusal(e, "not-published", diagnosis.store, why).on(request.node)
        return replace(diagnosis, findings=in_order([*findings, refused]))
    if request.compares and not request.wait:
        try:
            nodes, comparison = _compare_all(request, store, own_facts["clock"] or 0.0)
        except StoreError as e:
            comparison = [refusal(e, "unreadable-facts", diagnosis.store, why).on(request.node)]
        findings = in_order([*findings, *comparison])
    return replace(diagnosis, nodes=nodes, findings=findings, published=name)


def _compare_launch(arrived: published_facts.Arrived, wait: float) -> tuple[Finding, ...]:
    """Return the findings about the nodes of a launch, the same on each of them.

    Nodes that did not arrive are one failure, with their ranks if these are known.
    """
    findings = [*compare(arrived.nodes), *published_facts.repeat_findings(arrived.nodes)]
    if arrived.is_complete:
        return in_order(findings)
    published, lacking = names(arrived.nodes), arrived.expected - len(arrived.nodes)
    ranks = {str(node.get("variables", {}).get("NODE_RANK", "")) for node in arrived.nodes}
    missing = [str(rank) for rank in range(arrived.expected) if str(rank) not in ranks]
    ranks_hint = f" (NODE_RANK {', '.join(missing)})" if len(missing) == lacking else ""
    what = (
        f"{lacking} of {arrived.expected} nodes did not publish within"
        f" {show_duration(wait)}{ranks_hint}; {', '.join(published)} did"
    )
    why = "the launch would wait for the missing nodes until the rendezvous times out"
    hint = "run `ckptsync doctor --publish --wait 2m` on every node at once, one store and --job"
    if arrived.earlier:
        hint += f"; {', '.join(names(arrived.earlier))} published before, and does not wait now"
    absent = fail("nodes-missing", "NNODES", what, why=why, hint=hint, nodes=published)
    return in_order([*(f for f in findings if f.kind != "nodes-missing"), absent])


def compare_published(request: DoctorRequest) -> Diagnosis:
    """Return the findings about nodes that have published in a store, or that train now.

    Writes and removes a file to measure the store's clock; without the right to write, this node's
    clock is taken for the store's.  Raises ConfigError if the store is missing, or has no facts
    younger than ``max_age``; StoreError.
    """
    target = request.named_store()
    store = store_checks.open_unchecked(target)
    if store is None:
        hint = "mount the file system, or correct the path"
        raise ConfigError(f"{target.url}: store not found", hint=hint)
    clock = 0.0
    # a user who may only read cannot ask what time it is there
    with contextlib.suppress(StoreError):
        clock = store_checks.measure_clock(store, request.node)
    nodes, findings = _compare_all(request, store, clock)
    if not nodes:
        what = f"no node has published within {show_duration(request.max_age)}"
        hint = "run `ckptsync doctor --publish` on each node, or start the training with the hook"
        raise ConfigError(f"{store.url}: {what}", hint=hint)
    return Diagnosis(store.url, nodes, in_order(findings))


def _compare_all(
    request: DoctorRequest, store: Store, clock: float
) -> tuple[tuple[str, ...], list[Finding]]:
    """Compare the nodes of each job that published lately, and those of each run that trains now.

    Return the nodes' names, () for none, and the findings: also those that nodes published about
    themselves, unread files, and a warning for one node only, unless NNODES explains that.
    ``clock``: seconds by which this node's clock is ahead of the store's.  Raises StoreError.
    """
    now = time.time() - clock
    facts, errors = published_facts.read_published(store, now, request.max_age)
    job_facts = [node for node in facts if not request.job or node.get("job") == request.job]
    running = published_facts.group_trainings(
        published_facts.read_living(store, now, request.max_age)
    )
    groups = [*published_facts.group_jobs(job_facts), *running.values()]
    findings = [finding for group in groups for finding in compare(group)]
    findings += published_facts.repeat_findings(job_facts)
    compared = [node for group in groups for node in group]
    is_missed = any(finding.kind == "nodes-missing" for finding in findings)
    if not is_missed and len(compared) == 1 and not published_facts.is_alone(compared[0]):
        what = "no other node has published"
        why = (
            "differences are found between nodes; a node with another disk at the store's path"
            " never appears here"
        )
        hint = "run `ckptsync doctor --publish` on each node, then compare again"
        findings.append(
            warn("one-node", store.url, what, why=why, hint=hint, nodes=names(compared))
        )
    why = "that node is not compared"
    findings += [refusal(e, "unreadable-facts", store.url, why) for e in errors]
    return names(compared), findings


def names(facts: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the sorted names of nodes, each once."""
    return tuple(sorted({str(node["node"]) for node in facts}))
