"""What doctor does: `examine` checks this node, and publishes it or waits for the others; `compare_published` compares the nodes of a store.

Asked by root, `examine` first becomes the user who trains: what root may says nothing of what the worker may.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ckptsync import parsing
from ckptsync.config.runs import output_directories
from ckptsync.config.schema import Config
from ckptsync.doctor import directories, probe, publishing, store, training
from ckptsync.doctor.checks import alone, compare
from ckptsync.doctor.directories import fixed, foreign_owner, is_directory, newest_checkpoint, user_name
from ckptsync.doctor.facts import STORAGE, Finding, fail, in_order, warn
from ckptsync.doctor.store import Target, refusal
from ckptsync.errors import CkptsyncError, ConfigError, Corrupt, StoreError
from ckptsync.mounts import mount_of
from ckptsync.stores.contract import Store
from ckptsync.stores.urls import located
from ckptsync.units import show_duration


@dataclass(frozen=True, slots=True)
class Request:
    """What to look at, by the command line and the configuration.

    ``training``: what the training's own file says.  ``environment``: this command's own, without the service's keys, for the Python that trains.
    ``wait``: seconds to wait for ``nnodes`` nodes, 0 to compare nothing.  ``fresh``: seconds after which a node's facts are not compared.
    """

    node: str
    target: Target | None = None
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
    fresh: float = publishing.FRESH


@dataclass(frozen=True, slots=True)
class Report:
    """What was found, on which nodes.  ``published``: the name of this node's facts in the store.  ``facts``: those of the Python that trains."""

    store: str
    nodes: tuple[str, ...]
    findings: tuple[Finding, ...]
    published: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


def check_answers(*paths: object) -> None:
    """Raise StoreError where a path, up to its first wildcard, is on a file system that does not answer; other things than paths are left alone."""
    if silent := directories.silent(fixed(Path(p).absolute()) for p in paths if isinstance(p, (str, Path))):
        hint = "see whether its server is up; `umount -f -l` removes a mount whose server has gone"
        raise StoreError(
            f"{', '.join(map(str, silent))}: no answer of the file system within {directories.PATIENCE:g} s", hint=hint
        )


def examine(request: Request, progress: Callable[[publishing.Arrived], object]) -> Report:
    """Check this node.  With ``publishes`` its facts are written to the store; with ``wait`` or ``compares`` it is compared with the others then."""
    request, found = _as_trainer(request)
    config, node = request.config, request.node
    if config and "worker" in config.roles:
        found += check_runs(config, node)
    found += directories.check_output_dirs(request.output_dirs, node, expected_size(request.model, request.training))
    checked = store.Checked(())
    if request.target:
        checked = store.check_store(request.target, node, request.output_dirs, creates=request.publishes)
    facts, unknown = _facts(request, checked.clock)
    found += [*checked.findings, *unknown]
    report = Report(request.target.url if request.target else "", (node,), in_order([*found, *alone(facts)]), facts=facts)
    if request.publishes and checked.store:
        own = {**facts, "findings": [asdict(finding) for finding in in_order(found)]}
        return _publish(request, report, checked.store, own, progress)
    return report


def _as_trainer(request: Request) -> tuple[Request, list[Finding]]:
    """Become the user who trains, where root asks and exactly one other user does: who owns the output directories, or else the store's directory.

    Where that cannot be, the checks say of each directory that nothing was tried there.
    """
    owners = {_trainer(path) for path in request.output_dirs if is_directory(path)}
    where = located(request.target.url) if request.target else None
    if not owners and isinstance(where, Path):
        owners = {foreign_owner(where)}
    uid = owners.pop() if len(owners) == 1 else 0
    if os.geteuid() or not uid or not _become(uid):
        return request, []
    kept = training.environment_of(uid, request.environment)
    os.environ.update({name: kept[name] for name in ("HOME", "LOGNAME") if name in kept})
    what, hint = f"asked by root: everything was tried as {user_name(uid)}", f"sudo -u {user_name(uid)} ckptsync doctor …"
    why = "root sees neither the rights nor the environment of the user who trains"
    return replace(request, environment=kept), [warn("asked-as-root", request.node, user_name(uid), what, why=why, hint=hint)]


def _become(uid: int) -> bool:
    """Become another user for good; return whether that is possible: a namespace may not know that user, who may not be able to read Python."""
    group, groups = training.groups_of(uid)
    try:
        os.seteuid(uid)
        can_read = all(os.access(path, os.R_OK, effective_ids=True) for path in (__file__, os.__file__, sys.executable))
        os.seteuid(0)
        if can_read:
            os.setgroups(groups)
            os.setgid(group)
            os.setuid(uid)
    except OSError:
        return False
    return can_read


def _trainer(path: Path) -> int:
    """Return who trains in an output directory: its owner, or, where it is root's, who wrote the newest checkpoint."""
    newest = None if path.stat().st_uid else newest_checkpoint(path)
    with contextlib.suppress(OSError):  # rotated meanwhile
        return ((newest.path / newest.files[0].path) if newest else path).lstat().st_uid
    return 0


def check_runs(config: Config, node: str) -> Iterator[Finding]:
    """Check that the worker can serve what its configuration names."""
    found = output_directories(config.worker.runs, config.store.url)
    for problem in (*found.problems, *(found.unsafe if os.geteuid() else ())):  # of each directory root is told so
        yield fail(
            "run-left-out", node, "worker.runs", problem, why="its checkpoints stay where they are", hint="change worker.runs"
        )
    for run in config.worker.runs:
        above = fixed(Path(run.path))
        above = above.parent if above == Path(run.path) else above
        if not is_directory(above):
            what = f"{above} is not there, or not to be reached by this user"
            hint = "is the file system mounted, and the path right?"
            yield warn("output-absent", node, run.path, what, why="no checkpoint is uploaded", hint=hint, code=STORAGE)


def expected_size(model: str, given: Mapping[str, str]) -> int:
    """Return the bytes of a checkpoint of the whole model with its optimizer; 0 where only a part of it is trained, or nobody says."""
    default = "full" if "model_name_or_path" not in given else "lora"  # LLaMA-Factory's default is lora
    if model and given.get("finetuning_type", default) == "full":
        with contextlib.suppress(OSError, Corrupt, AttributeError):
            text = Path(model, "config.json").read_text("utf-8", "replace")
            return directories.checkpoint_size(parsing.parse(text, model))
    return 0


def _facts(request: Request, clock: float | None) -> tuple[dict[str, Any], list[Finding]]:
    """Return this node's facts, and what keeps them from being those of the training.  Where only heads and verifiers work nobody trains."""
    if request.config and "worker" not in request.config.roles and not request.publishes:
        return {"node": request.node, "clock": clock}, []
    more = {"training": dict(request.training), "clock": clock, "job": request.job}
    pythons = [request.python] if request.python else training.candidates(request.environment)
    is_path = request.model.startswith("/") or bool(request.model and is_directory(Path(request.model)))  # else a name in a hub
    model = str(Path(request.model).absolute()) if is_path else ""
    output_dirs = [str(path) for path in request.output_dirs] if request.publishes else []
    try:
        facts = training.ask_first(pythons, request.environment, output_dirs=output_dirs, node=request.node, model=model)
    except ConfigError as e:
        unknown = {"python": "", "prefix": "", "versions": {}, "builds": {}}
        why = "nothing is known of what trains here"
        found = refusal(e, "python", request.node, request.python or "--python", why)
        return {**probe.gather(node=request.node), **unknown, **more}, [found]
    for path, about in facts["output_dirs"].items():
        mount = mount_of(path)
        about["server"] = mount.kind if mount.is_remote else ""
    if not request.publishes or facts["versions"].get("torch"):
        return {**facts, **more}, []
    why = "nodes are compared by another Python than the one that trains, or by none"
    hint = "activate the training's environment, or name its Python with --python"
    return {**facts, **more}, [warn("no-torch", request.node, facts["prefix"], "no torch is installed there", why=why, hint=hint)]


def _publish(
    request: Request, report: Report, store: Store, own: Mapping[str, Any], progress: Callable[[publishing.Arrived], object]
) -> Report:
    """Publish this node's facts, and compare them with the others' if that is asked for."""
    name = publishing.launch_name(request.node)
    try:
        if request.wait:
            arrived = publishing.meet(store, own, request.nnodes, request.wait, progress)
            return replace(report, nodes=names(arrived.nodes), findings=_compare_launch(arrived, request.wait), published=name)
        publishing.publish(store, own)
    except CkptsyncError as e:
        why = "other nodes cannot be compared with this one"
        return replace(report, findings=in_order([*report.findings, refusal(e, "not-published", request.node, report.store, why)]))
    nodes, more = _compare_all(request, store, own["clock"] or 0.0) if request.compares else (report.nodes, [])
    return replace(report, nodes=nodes, findings=in_order([*report.findings, *more]), published=name)


def _compare_launch(arrived: publishing.Arrived, wait: float) -> tuple[Finding, ...]:
    """Return what is wrong with the nodes of a launch, the same on each of them."""
    found = [*compare(arrived.nodes), *publishing.repeated(arrived.nodes)]
    if arrived.is_complete:
        return in_order(found)
    here = names(arrived.nodes)
    lacking = arrived.wanted - len(here)
    ranks = {str(one.get("variables", {}).get("NODE_RANK", "")) for one in arrived.nodes}
    missing = [str(rank) for rank in range(arrived.wanted) if str(rank) not in ranks]
    which = f" (NODE_RANK {', '.join(missing)})" if len(missing) == lacking else ""
    what = f"{lacking} of {arrived.wanted} nodes did not publish within {show_duration(wait)}{which}; {', '.join(here)} did"
    why = "the launch would wait for the missing nodes until the rendezvous times out"
    hint = "run `ckptsync doctor --publish --wait` on every node at the same time, with the same store and --job"
    if arrived.others:
        hint += f"; {', '.join(names(arrived.others))} published before, and does not wait now"
    return in_order(
        [*(f for f in found if f.kind != "nodes-missing"), fail("nodes-missing", here, "NNODES", what, why=why, hint=hint)]
    )


def compare_published(request: Request) -> Report:
    """Compare the nodes that have published in a store, and those that train now.  Raises ConfigError where there are none."""
    target = request.target
    if target is None:
        raise ConfigError("no store was named", hint="give its URL, a configuration with -c, or set CKPTSYNC_STORE")
    found = store.open_anyway(target)
    if found is None:
        raise ConfigError(f"{target.url}: there is no store", hint="is the file system mounted, and the path right?")
    clock = 0.0
    with contextlib.suppress(StoreError):  # a user who may only read cannot ask what time it is there
        clock = store.clock_ahead(found, request.node)
    nodes, findings = _compare_all(request, found, clock)
    if not nodes:
        hint = "run `ckptsync doctor --publish` on each node; a training that runs is compared by what its hook says"
        raise ConfigError(f"{found.url}: no node has published within {show_duration(request.fresh)}", hint=hint)
    return Report(found.url, nodes, in_order(findings))


def _compare_all(request: Request, store: Store, clock: float) -> tuple[tuple[str, ...], list[Finding]]:
    """Compare the nodes that published a short while ago, and those of each run that trains now.  ``clock``: seconds that this node's is ahead of the store's."""
    now = time.time() - clock
    facts, odd = publishing.published(store, now, request.fresh)
    asked = [one for one in facts if not request.job or one.get("job") == request.job]
    groups = [*publishing.jobs(asked), *publishing.trainings(publishing.living(store, now, request.fresh)).values()]
    found = [*(finding for group in groups for finding in compare(group)), *publishing.repeated(asked)]
    is_missed = any(finding.kind == "nodes-missing" for finding in found)
    if len(groups) == 1 and len(groups[0]) == 1 and not publishing.is_alone(groups[0][0]) and not is_missed:
        why = "what differs is found between nodes; a node under whose path for the store another disk lies never appears here"
        hint = "run `ckptsync doctor --publish` on each node, then compare again"
        found.append(warn("one-node", str(groups[0][0]["node"]), store.url, "no other node has published", why=why, hint=hint))
    found += [refusal(e, "unreadable-facts", "", store.url, "that node is not compared") for e in odd]
    return names(one for group in groups for one in group), found


def names(facts: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the names of nodes, in order."""
    return tuple(sorted({str(one["node"]) for one in facts}))
