"""The state of a whole store as one value, and the alarms that hold.

`ckptsync status`, its JSON, the page, metrics and alerts must agree, so all of them show this one
value.  `overview` computes it from the catalogue and the nodes' files, and then finds the alarms
in it; `document` is its JSON.  Pure.  Times are seconds on the store's clock.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ckptsync.catalogue.location_summary import SKEW, Catalogue, DamagedFile, Summary, by_age
from ckptsync.errors import Unsupported
from ckptsync.quantities import show_duration, show_size
from ckptsync.records.io import Fault
from ckptsync.records.save_order import contradictions
from ckptsync.status.alarms import SEVERITIES, Alarm, Patience, Severity
from ckptsync.status.heartbeat import Disk
from ckptsync.status.live_catalogue import NodeProgress, add_node_progress, describe
from ckptsync.status.nodes import Node, NodeFiles, list_nodes
from ckptsync.status.run_status import RunStatus, count_statuses, list_runs

BEHIND = 1.25  # times the period
SEE_LOG = "see the node's log: `journalctl -u 'ckptsync-worker@*'`"
FULL = ("no space left", "disk is full", "quota exceeded", "storagefull", "insufficient storage")
"""Parts of the error messages of systems and servers with a full disk, in lower case."""


@dataclass(frozen=True, slots=True)
class Room:
    """Free and all bytes of the store's file system, if it is one."""

    free: int
    total: int


@dataclass(frozen=True, slots=True)
class Overview:
    """The state of a store.

    ``at``: when it was read.  ``checkpoints``: status → number of locations, of all runs.
    ``alarms``: those that hold, critical ones first, then the oldest.  ``catalogue`` and
    ``running``: see `LiveCatalogue`.
    """

    store: str
    at: float
    alarms: tuple[Alarm, ...]
    nodes: tuple[Node, ...]
    runs: tuple[RunStatus, ...]
    checkpoints: dict[str, int]
    size: int
    model_size: int
    room: Room | None
    catalogue: Catalogue
    running: tuple[NodeProgress, ...] = ()

    @property
    def alive(self) -> tuple[Node, ...]:
        """Return the nodes that are alive."""
        return tuple(n for n in self.nodes if n.state == "alive")


def overview(
    store: str,
    catalogue: Catalogue,
    files: NodeFiles,
    now: float,
    *,
    room: Room | None,
    patience: Patience,
    run: str = "",
) -> Overview:
    """Return the overview of a store, with the alarms that hold.  Pure.

    Args:
        store: its URL.
        catalogue: its locations.
        files: its nodes' files.
        now: the time on the store's clock.
        room: its free space, None if unknown.
        patience: the times after which alarms are raised.
        run: the only run of which work and its alarms are shown, or "" for all; ``catalogue`` must
            be of it already.  Nodes are all shown.

    """
    nodes = list_nodes(files, now)
    live = add_node_progress(catalogue, nodes, now, run)
    catalogue = live.catalogue
    runs = list_runs(catalogue.shown, nodes)
    result = Overview(
        store=store,
        at=now,
        alarms=(),
        nodes=nodes,
        runs=runs,
        checkpoints=count_statuses(catalogue.shown),
        size=sum(run.size for run in runs),
        model_size=sum(run.model_size for run in runs),
        room=room,
        catalogue=catalogue,
        running=live.running,
    )
    # what a node does for another run is no alarm of this one
    nodes_of_run = tuple(
        replace(n, running=tuple(p for p in n.running if not run or p.run in ("", run)))
        for n in nodes
    )
    alarms = sorted(
        _find_alarms(replace(result, nodes=nodes_of_run), patience),
        key=lambda a: (SEVERITIES.index(a.severity), a.since or now, a.key),
    )
    return replace(result, alarms=tuple(alarms))


def document(overview: Overview) -> dict[str, Any]:
    """Return an overview as plain values (docs/monitoring.md), without its locations.

    ``repairs`` has the DAMAGED locations, ``retired`` what is or will be deleted, ``kept`` what
    users protect, ``unreadable`` the texts of faults.
    """
    summaries = overview.catalogue.summaries
    return {
        "store": overview.store,
        "at": overview.at,
        "alarms": [{"kind": a.kind, **asdict(a)} for a in overview.alarms],
        "nodes": [_node_document(n) for n in overview.nodes],
        "running": [entry.document() for entry in overview.running],
        "runs": [_sized(asdict(r)) for r in overview.runs],
        "checkpoints": overview.checkpoints,
        "bytes": overview.size,
        "model_bytes": overview.model_size,
        "room": asdict(overview.room) if overview.room else None,
        "repairs": [_repair(s, overview.nodes) for s in summaries if s.status == "DAMAGED"],
        "retired": [
            {
                "run": s.run,
                "location": s.location,
                "scope": "location" if s.retired else "shards",
                "reason": s.retired or s.shards_retired,
                "since": s.marked_at or None,
                "begun": s.begun,
                "bytes": s.size + (s.model_size if s.retired else 0),
            }
            for s in summaries
            if s.status == "RETIRED" or (s.shards_retired and not s.shards_deleted)
        ],
        "kept": [
            {"run": s.run, "location": s.location, "reason": s.kept} for s in summaries if s.kept
        ],
        "unreadable": [fault.text for fault in overview.catalogue.faults],
    }


def _node_document(node: Node) -> dict[str, Any]:
    """Return a node as plain values, without ``running``, which the overview has in full."""
    values = asdict(node)
    del values["running"]
    jobs = [
        {
            "kind": p.kind,
            "subject": p.subject,
            "done": p.done,
            "total": p.total,
            "seconds": max(0.0, node.beat - p.since),
        }
        for p in node.jobs
    ]
    return values | {
        "queue": list(node.queue),
        "oldest": node.oldest,
        "blocked": node.blocked,
        "jobs": jobs,
    }


def _sized(run: dict[str, Any]) -> dict[str, Any]:
    """Return a run's values with the documented names of its sizes."""
    names = {"size": "bytes", "model_size": "model_bytes"}
    return {names.get(key, key): value for key, value in run.items()}


def _repair(summary: Summary, nodes: Sequence[Node]) -> dict[str, Any]:
    """Return a location's damage, its last repair, and the nodes that cannot repair it."""
    return {
        "run": summary.run,
        "location": summary.location,
        "reports": len(summary.proof.damage),
        "reported": summary.proof.damaged_at,
        "changed": summary.proof.rewritten_at or None,
        "findings": list(summary.evidence),
        "nodes": list(summary.nodes),
        "lacking": list(_list_lacking(summary, nodes)),
    }


# --- which alarms hold


def _find_alarms(overview: Overview, patience: Patience) -> Iterator[Alarm]:
    """Yield all alarms that hold in an overview whose own ``alarms`` are still empty.

    Node problems, full disks and failed events are those of live nodes only.
    """
    yield from _find_damage(overview, patience)
    yield from _find_stalled_runs(overview, patience)
    yield from _find_full_store(overview)
    yield from _find_incomplete(overview, patience)
    yield from _find_late_heads(overview, patience)
    recent = _recent(overview, patience)
    yield from _find_missing_configs(recent)
    yield from _find_doubtful_models(recent)
    yield from _find_odd_weights(recent)
    yield from _find_wrong_dates(overview, patience)
    yield from _find_silent_nodes(overview, patience)
    yield from _find_missing_head(overview, patience)
    for node in overview.nodes:
        if node.state == "unreadable":
            text = f"heartbeat of {node.name}: {_first(node.errors)}"
            todo = "delete that file if the node no longer exists; a running node writes it again"
            yield Alarm("unreadable", node.name, "warning", node.beat, text, todo)
    saves = _save_sizes(overview.catalogue.summaries)
    for node in overview.alive:
        for disk in node.disk:
            yield from _find_full_disk(disk, f"{node.node}:{disk.path}", saves.get(node.node, 0))
        yield from _find_node_problems(node, patience)
    events = (p for n in overview.alive for p in n.running if p.kind == "event" and p.until is None)
    for subject, p in {f"{p.subject} {p.name}": p for p in events if p.state == "failed"}.items():
        yield Alarm("event-failed", subject, "warning", None, f"{subject}: {p.reason}", p.hint)


def _list_lacking(s: Summary, nodes: Sequence[Node]) -> tuple[str, ...]:
    """Return a damaged location's nodes that lack bytes of a reported file, or their manifest."""
    requests = {*s.proof.damage, *s.manifests}
    return tuple(n.node for n in nodes if n.node in s.nodes and not requests.isdisjoint(n.lacks))


def _find_silent_nodes(overview: Overview, patience: Patience) -> Iterator[Alarm]:
    """Yield an alarm for each silent node; critical if it has work, or a save waits for its part.

    Only nodes that are silent for more than ``patience.node`` and less than ``over``.
    """
    for node in overview.nodes:
        if node.state != "silent" or not patience.node < node.age < patience.over:
            continue
        awaited = [
            f"{r.run}/{p.location}"
            for r in overview.runs
            for p in r.incomplete
            if node.node in p.awaited
        ]
        work = tuple(dict.fromkeys((*node.queue, *awaited)))
        pending_text = f"; still to upload: {_first(work)}" if work else ""
        text = f"{node.name}: no heartbeat for {show_duration(node.age)}{pending_text}"
        todo = (
            "restart its service: it uploads what is pinned there; if the machine no longer"
            " exists, delete its file in .ckptsync/nodes"
        )
        severity: Severity = "critical" if work else "warning"
        yield Alarm("node-lost", node.name, severity, node.beat, text, todo)


def _find_missing_head(overview: Overview, patience: Patience) -> Iterator[Alarm]:
    """Yield an alarm if there were heads or verifiers, none is alive, and all are silent for long.

    That is for more than ``patience.node``.
    """
    heads = [n for n in overview.nodes if {"head", "verifier"} & {*n.roles}]
    if not heads or any(n.state == "alive" for n in heads):
        return
    last = max(heads, key=lambda n: n.beat)
    if last.age > patience.node:
        text = (
            "no head is running, so no checkpoint is consolidated or verified; the last one was"
            f" {last.name}, {show_duration(last.age)} ago"
        )
        todo = f"start ckptsync-head on {last.host or last.node}"
        yield Alarm("no-head", "store", "critical", last.beat, text, todo)


def _find_full_disk(disk: Disk, title: str, save: int) -> Iterator[Alarm]:
    """Yield the alarms of an output directory's file system, named ``title``.

    One, critical, if less than one save (``save`` bytes) or 2 % are free.  One if the spool uses 90
    % of its budget; critical at 100 %.
    """
    if disk.free < max(save, disk.total // 50):
        takes = f"; a save needs {show_size(save)}" if save else ""
        text = f"{title}: {_free_of(disk.free, disk.total)}{takes}"
        todo = "the next save will fail: make room there"
        yield Alarm("disk-full", title, "critical", None, text, todo)
    if disk.budget and disk.spool >= 0.9 * disk.budget:
        severity: Severity = "critical" if disk.spool >= disk.budget else "warning"
        text = (
            f"{title}: the spool uses {show_size(disk.spool)} of its budget of"
            f" {show_size(disk.budget)} for files that the trainer has deleted"
        )
        todo = (
            "worker.spool_full decides which checkpoints are lost: find out why uploads are slow,"
            " or raise worker.spool_budget"
        )
        yield Alarm("spool-full", title, severity, None, text, todo)


def _find_node_problems(node: Node, patience: Patience) -> Iterator[Alarm]:
    """Yield alarms of a live node: no space, blocked saves, a long queue, a wrong clock.

    A queue is long if its oldest upload has waited for more than ``patience.slow``; a clock is
    wrong if it differs from the store's by more than `SKEW`.
    """
    full = [error for error in node.errors if any(words in error.lower() for words in FULL)]
    if full:
        text = f"{node.name}: {_first(full)}"
        todo = "free space on the disk or store that the error names"
        yield Alarm("no-space", node.name, "critical", None, text, todo)
    for name, (why, todo) in node.blocked.items():
        text = f"{name} on {node.name}: {why}"
        yield Alarm("blocked", f"{name} on {node.name}", "critical", None, text, todo or SEE_LOG)
    if node.queue and node.oldest > patience.slow:
        error = f"; {_first(node.errors)}" if node.errors else ""
        oldest = show_duration(node.oldest)
        text = f"{node.name}: {len(node.queue)} in the upload queue, the oldest for {oldest}{error}"
        todo = (
            "see the node's errors, notes and upload rate in `ckptsync status`, and"
            " limits.bandwidth"
        )
        yield Alarm("waiting", node.name, "warning", node.beat - node.oldest, text, todo)
    if node.clock_offset is not None and abs(node.clock_offset) > SKEW:
        side = "ahead of" if node.clock_offset > 0 else "behind"
        text = (
            f"{node.name}: its clock is {show_duration(abs(node.clock_offset))} {side} the store's"
        )
        todo = "synchronize it with NTP: without the hook, ckptsync tells saves apart by file times"
        yield Alarm("clock", node.name, "warning", None, text, todo)


def _save_sizes(summaries: Sequence[Summary]) -> dict[str, int]:
    """Return, by node, about how many bytes it writes at a save.

    That is the size of its newest location, divided by the number of that location's nodes.
    """
    newest: dict[str, Summary] = {}
    for s in summaries:
        for node in s.nodes:
            if node not in newest or s.ended > newest[node].ended:
                newest[node] = s
    return {node: s.size // len(s.nodes) for node, s in newest.items()}


def _find_damage(overview: Overview, patience: Patience) -> Iterator[Alarm]:
    """Yield alarms of damaged and conflicting locations, unnamed files and unreadable records.

    A conflict is left out from the age ``patience.over`` on.
    """
    for s in overview.catalogue.summaries:
        target = f"{s.run}/{s.location}"
        if s.status == "DAMAGED":
            yield _damaged(s, overview)
        elif s.status == "CONFLICT" and overview.at - s.arrived < patience.over:
            todo = (
                "ckptsync does not merge it: give each job its own output directory, or use the"
                " hook"
            )
            text = f"{target}: {_first(s.evidence)}"
            yield Alarm("conflict", target, "warning", s.arrived, text, todo)
    yield from _find_unnamed_files(overview)
    for fault in overview.catalogue.faults:
        text = fault.text
        yield Alarm(
            "unreadable", fault.name, "critical", None, text, _record_sentence(fault, overview)
        )


def _damaged(s: Summary, overview: Overview) -> Alarm:
    """Return the alarm of a damaged location, which says who repairs it.

    It is a warning once all damaged files were written again, and await verification; else
    critical, and if no node has a file's bytes, it says that instead.
    """
    target, nodes = f"{s.run}/{s.location}", overview.nodes
    text, since = f"{target}: {_first(s.evidence)}", s.proof.damaged_at
    files = s.damaged or (DamagedFile("", "file", s.nodes),)
    waiting = [file for file in files if not file.is_rewritten]
    if not waiting:
        has_verifier = any("verifier" in node.roles for node in overview.alive)
        command = shlex.join(["ckptsync", "verify", target, "--store", overview.store])
        todo = f"{'wait for the verifier, or ' if has_verifier else ''}run `{command}`"
        return Alarm("damaged", target, "warning", since, text, todo)
    if lost := [file for file in waiting if _is_lost(file, s, nodes)]:
        owners = sorted({node for file in lost for node in file.nodes})
        verb = "has" if len(owners) == 1 else "have"
        text += f"; {_names(owners)} no longer {verb} its bytes" if owners else ""
        todo = (
            f"{_repair_command(overview, target)} copies what other checkpoints of the run hold,"
            " and shows what is lost; else use an earlier checkpoint"
        )
        return Alarm("damaged", target, "critical", since, text, todo)
    repair = _repair_command(overview, target)
    steps = [
        _owners_sentence(owners, action, overview)
        for part, action in _NODE_DOES.items()
        if (owners := sorted({n for f in waiting if f.of == part for n in _owners(f, s, nodes)}))
    ]
    if any(file.of == "model" for file in waiting):
        steps.append(_merge_sentence(overview, repair))
    todo = "; ".join(steps)
    todo += "" if repair in todo else f"; {repair} shows the details"
    return Alarm("damaged", target, "critical", since, text, todo)


_NODE_DOES = {"file": "uploads again what it still has", "record": "writes its record again"}


def _is_lost(file: DamagedFile, summary: Summary, nodes: Sequence[Node]) -> bool:
    """Return whether a damaged file cannot be repaired.

    That is if all its nodes say that they lack its bytes; of a model, if its shards are deleted or
    will be.  False for a file that no node is known to have had.
    """
    if file.of == "model":
        return bool(summary.shards_retired)
    return bool(file.nodes) and not _owners(file, summary, nodes)


def _owners(file: DamagedFile, summary: Summary, nodes: Sequence[Node]) -> list[str]:
    """Return the nodes of a damaged file whose heartbeats do not say that they lack its bytes."""
    lacking = {
        node.node
        for node in nodes
        if f"{summary.run}/{file.name}" in node.lacks
        or any(file.name in node.lacks.get(report, ()) for report in summary.proof.damage)
    }
    return [name for name in file.nodes if name not in lacking]


def _owners_sentence(owners: Sequence[str], does: str, overview: Overview) -> str:
    """Return a sentence: which nodes repair their part, or whose service must be started first."""
    alive = {node.node for node in overview.alive if "worker" in node.roles}
    stopped = [name for name in owners if name not in alive]
    start = f"start the service on {_names(stopped)}: it" if stopped else _names(owners)
    return f"{start} {does}"


def _merge_sentence(overview: Overview, repair: str) -> str:
    """Return a sentence: who merges a damaged model again."""
    makes = "makes the consolidated model again from the shards"
    if any("head" in node.roles for node in overview.alive):
        return f"a head {makes}"
    return f"{repair}, or a head that you start, {makes}"


def _repair_command(overview: Overview, target: str) -> str:
    """Return the command, in backquotes, that repairs a location."""
    return f"`{shlex.join(['ckptsync', 'repair', target, '--store', overview.store])}`"


def _record_sentence(fault: Fault, overview: Overview) -> str:
    """Return a sentence: what to do about a record that cannot be read, by its kind and error."""
    kind, node = fault.record.kind, fault.record.node
    if isinstance(fault.error, Unsupported):
        return "a newer ckptsync wrote it: upgrade this one"
    if kind == "report":
        return "the next verification of that checkpoint replaces it"
    repair = _repair_command(overview, f"{fault.run}/{fault.location}")
    if kind == "manifest":
        if any(fault.name in each.lacks for each in overview.nodes if each.node == node):
            return f"{node} cannot write it again: {repair} shows what is lost"
        sentence = _owners_sentence([node], _NODE_DOES["record"], overview)
        return f"{sentence}; {repair} shows the details"
    if kind == "model":
        return _merge_sentence(overview, repair)
    return f"{repair} keeps the checkpoint, and deletes this record"


def _find_unnamed_files(overview: Overview) -> Iterator[Alarm]:
    """Yield an alarm for each run with files that no record names and that may be executed.

    Only locations that are VERIFIED or CONSOLIDATED count; the last one is named.
    """
    proven = (s for s in overview.catalogue.summaries if s.status in ("VERIFIED", "CONSOLIDATED"))
    for run, locations in _by_run(s for s in proven if s.unnamed_runs).items():
        more = (
            f"; {len(locations) - 1} more of its checkpoints have some"
            if len(locations) > 1
            else ""
        )
        text = f"{run}/{locations[-1].location}: {locations[-1].unnamed_line}{more}"
        todo = (
            "look at them, and delete what nobody put there on purpose: a report vouches for the"
            " files that records name, and for no others"
        )
        yield Alarm("unnamed", run, "warning", None, text, todo)


def _find_stalled_runs(overview: Overview, patience: Patience) -> Iterator[Alarm]:
    """Yield an alarm for each run whose next checkpoint is late by its own usual interval.

    Late: ``steps`` intervals, at least ``least`` seconds.  It is critical if the training's process
    died.  Left out are runs that ended, have queued uploads or no live worker, or whose last
    checkpoint is older than ``over``; without a hook, older than ``ended`` or 10 intervals,
    whichever is longer, is enough.
    """
    workers = [n for n in overview.alive if "worker" in n.roles]
    alive = {n.node for n in workers}
    queued = {item.partition("/")[0] for n in workers for item in n.queue}
    for run in overview.runs:
        if run.newest is None or run.every is None or run.training == "ended":
            continue
        if run.run in queued or alive.isdisjoint(run.nodes):
            continue
        quiet = overview.at - run.newest.ended
        over = patience.over
        if not run.training:
            over = min(over, max(patience.ended, 10 * run.every))
        if max(patience.steps * run.every, patience.least) < quiet < over:
            ending = "; the training process died" if run.training == "gone" else ""
            text = (
                f"{run.run}: no checkpoint for {show_duration(quiet)}; before that, one every"
                f" {show_duration(run.every)}{ending}"
            )
            todo = (
                f"look at the training on {_names(run.nodes)}, then at `journalctl -u"
                " 'ckptsync-worker@*'` there"
            )
            severity: Severity = "critical" if ending else "warning"
            yield Alarm("stalled", run.run, severity, run.newest.ended + run.every, text, todo)


def _find_full_store(overview: Overview) -> Iterator[Alarm]:
    """Yield an alarm if less than two of its largest checkpoints, or 2 % of the store, are free.

    It is critical below one checkpoint, or 1 %.  None for a remote store.
    """
    room = overview.room
    if room is None:
        return
    largest = max((s.size + s.model_size for s in overview.catalogue.summaries), default=0)
    if room.free < max(2 * largest, room.total // 50):
        text = (
            f"the store: {_free_of(room.free, room.total)}; a checkpoint with its model needs up"
            f" to {show_size(largest)}"
        )
        is_urgent = room.free < max(largest, room.total // 100)
        gc = shlex.join(
            ["ckptsync", "gc", "--store", overview.store, "--keep-last", "3", "--dry-run"]
        )
        todo = f"free space, or set retention rules: `{gc}` shows what this one deletes"
        yield Alarm("store-full", "store", "critical" if is_urgent else "warning", None, text, todo)


def _find_incomplete(overview: Overview, patience: Patience) -> Iterator[Alarm]:
    """Yield an alarm for each location that is incomplete for ``slow`` to ``over`` seconds."""
    summaries = {(s.run, s.location): s for s in overview.catalogue.summaries}
    for run in overview.runs:
        for save in run.incomplete:
            waited = overview.at - save.since
            if not patience.slow < waited < patience.over:
                continue
            s = summaries[run.run, save.location]
            target = f"{run.run}/{save.location}"
            late = f"still incomplete {show_duration(waited)} after its last part arrived: "
            text = f"{target}: {'' if s.unknown else late}{_first(save.lost)}"
            todo = _completion_sentence(s, overview)
            alive = {n.node for n in overview.alive}
            if dead := [n for n in save.awaited if n not in alive]:
                text += f"; not running: {_names(dead)}"
            yield Alarm("incomplete", target, "warning", save.since, text, todo)


def _completion_sentence(s: Summary, overview: Overview) -> str:
    """Return a sentence: what a user can do for an incomplete location.

    In this order: its uploads wait, nothing is known to be missing, join its siblings, have lost
    files uploaded again, start the nodes that it awaits, push it.
    """
    target = f"{s.run}/{s.location}"
    if s.status == "WAITING":
        entries = [e for e in overview.running if (e.run, e.location) == (s.run, s.location)]
        waits = "; ".join(describe(e, overview.at) for e in entries)
        return f"see the notes and errors in `ckptsync status`: {waits}"
    if s.unknown:
        pull = shlex.join(["ckptsync", "pull", target, "DIR", "--store", overview.store])
        return f"nothing is missing that ckptsync knows of: `{pull}` gives it back as it is"
    if s.siblings:
        joins = "; ".join(
            sibling.command(overview.store, s.run, s.location) for sibling in s.siblings
        )
        return f"if they are one save: {joins}"
    if any(gap.node for gap in s.gaps):
        return f"{_repair_command(overview, target)} has it uploaded again, and shows what is lost"
    if s.awaited_nodes:
        alive = {n.node for n in overview.alive}
        stopped = [name for name in s.awaited_nodes if name not in alive]
        if not stopped:
            return (
                f"see the errors and notes of {_names(s.awaited_nodes)} in `ckptsync status`: the"
                " service uploads the rest there, if the node still has it"
            )
        return (
            f"start the service on {_names(stopped)}: it uploads the rest; if that node is lost,"
            " use an earlier checkpoint"
        )
    return (
        "`ckptsync push` it from the node that has the rest; if no node has it, use an earlier"
        " checkpoint"
    )


def _find_late_heads(overview: Overview, patience: Patience) -> Iterator[Alarm]:
    """Yield alarms for runs in which the live heads or verifiers are behind.

    There is at most one of a kind for a run, about its oldest location: not consolidated, not
    verified, or last read more than `BEHIND` periods ago.  Only roles of live nodes count.
    """
    roles = {role for n in overview.alive for role in n.roles}
    summaries = overview.catalogue.summaries
    if "head" in roles:
        waiting = [s for s in summaries if s.status == "COMPLETE"]
        yield from _find_waiting(overview, patience, "unconsolidated", waiting)
    if "verifier" not in roles:
        return
    whole = [s for s in summaries if s.status in ("COMPLETE", "CONSOLIDATED")]
    yield from _find_waiting(
        overview, patience, "unverified", [s for s in whole if not s.proof.holds]
    )
    period = min((n.verifies for n in overview.alive if n.verifies), default=patience.period)
    for run in overview.runs:
        if run.proven is not None and overview.at - run.proven > BEHIND * period:
            text = (
                f"{run.run}: one checkpoint was last verified"
                f" {show_duration(overview.at - run.proven)} ago; verify.period is"
                f" {show_duration(period)}"
            )
            todo = (
                "the verifier is too slow: raise head.jobs, add a verifier, or raise verify.period"
            )
            yield Alarm("unread", run.run, "warning", run.proven + period, text, todo)


def _find_waiting(
    overview: Overview, patience: Patience, code: str, waiting: Sequence[Summary]
) -> Iterator[Alarm]:
    """Yield an alarm for each run with a location that has waited for ``slow`` to ``over`` seconds.

    It is about the oldest of these.  ``code``: the alarm's.
    """
    slow = [s for s in waiting if patience.slow < overview.at - s.arrived < patience.over]
    oldest: dict[str, Summary] = {}
    for s in sorted(slow, key=lambda s: (s.arrived, s.location)):
        oldest.setdefault(s.run, s)
    for run, s in oldest.items():
        text = (
            f"{run}/{s.location}: still {code} {show_duration(overview.at - s.arrived)} after it"
            " was complete"
        )
        todo = "see the heads' errors and jobs in `ckptsync status`"
        yield Alarm(code, run, "warning", s.arrived, text, todo)


def _find_missing_configs(recent: Sequence[Summary]) -> Iterator[Alarm]:
    """Yield an alarm for each run with models without their configuration; it names the newest.

    It holds since the oldest one arrived.  ``recent``: newest first.
    """
    for run, locations in _by_run(s for s in recent if s.consolidated and s.unopenable).items():
        more = f" (and {len(locations) - 1} more models of this run)" if len(locations) > 1 else ""
        text = f"{run}/{locations[0].location}{more}: {locations[0].unopenable}"
        yield Alarm(
            "no-config", run, "warning", locations[-1].arrived, text, locations[0].supply_hint
        )


def _find_doubtful_models(recent: Sequence[Summary]) -> Iterator[Alarm]:
    """Yield an alarm for each run that has models that may lack tensors; it names the newest.

    It holds since the oldest one arrived.  ``recent``: newest first.
    """
    for run, locations in _by_run(s for s in recent if s.model and s.doubts).items():
        more = f" (and {len(locations) - 1} more of this run)" if len(locations) > 1 else ""
        text = f"{run}/{locations[0].location}{more}: {_first(locations[0].doubts)}"
        todo = (
            "load its model once; if it lacks tensors, save again from the training, with all ranks"
        )
        yield Alarm("doubtful", run, "warning", locations[-1].arrived, text, todo)


def _find_odd_weights(recent: Sequence[Summary]) -> Iterator[Alarm]:
    """Yield alarms for each run in whose newest model with statistics something looks wrong.

    One for values that are not finite, one for all other findings.  Each names the newest older
    checkpoint without findings, if there is one.
    """
    for run, locations in _by_run(s for s in recent if s.weights is not None).items():
        newest, *older = reversed(by_age(locations))
        target, lines = f"{run}/{newest.location}", dict[str, list[str]]()
        for finding in newest.weights_findings:
            code = "nonfinite" if finding.kind == "nonfinite" else "weights"
            lines.setdefault(code, []).append(finding.line)
        sound = next((s.location for s in older if not s.weights_findings), "")
        todo = {
            "nonfinite": "look at the loss: if the training has diverged, resume it from "
            + (f"{sound}, the newest without findings" if sound else "an earlier checkpoint"),
            "weights": "look at the training's log and configuration; `ckptsync help head` says"
            " what each finding means"
            + (f"; the newest checkpoint without findings is {sound}" if sound else ""),
        }
        for code, finding_lines in lines.items():
            text = f"{target}: {'; '.join(finding_lines)}"
            yield Alarm(code, run, "warning", newest.arrived, text, todo[code])


def _find_wrong_dates(overview: Overview, patience: Patience) -> Iterator[Alarm]:
    """Yield an alarm for each way in which a save's times contradict its arrival or another save.

    They differ by more than `SKEW`. Retired saves, and those older than ``over``, are left out.
    """
    summaries = overview.catalogue.summaries
    recent = (
        s for s in summaries if not s.retired and overview.at - s.first_arrival < patience.over
    )
    for locations in _by_run(recent).values():
        wrong = [
            (s, f"its files are dated {show_duration(s.ahead)} after their arrival in the store")
            for s in locations
            if s.ahead > SKEW
        ]
        for s, contradicted, apart in contradictions(locations, lambda s: s.dates, SKEW):
            side, step = ("after", "greater") if apart > 0 else ("before", "smaller")
            text = f"its files are dated {show_duration(abs(apart))} {side} those of"
            wrong.append((s, f"{text} {contradicted.location}, which has the {step} step"))
        for s, text in wrong:
            todo = (
                f"set the clock of {_names(s.nodes)}, or of its file server, by NTP; until then"
                " steps, and not times, say which checkpoint is newer"
            )
            target = f"{s.run}/{s.location}"
            yield Alarm("clock", target, "warning", s.first_arrival, f"{target}: {text}", todo)


def _recent(overview: Overview, patience: Patience) -> list[Summary]:
    """Return the locations that are not retired and arrived within ``over``, newest first."""
    present = (s for s in overview.catalogue.summaries if not s.retired)
    recent = (s for s in present if overview.at - s.arrived < patience.over)
    return sorted(recent, key=lambda s: (-s.arrived, s.location))


def _by_run(summaries: Iterable[Summary]) -> dict[str, list[Summary]]:
    """Return the locations of each run, in the given order."""
    runs: dict[str, list[Summary]] = {}
    for s in summaries:
        runs.setdefault(s.run, []).append(s)
    return runs


def _first(lines: Sequence[str]) -> str:
    """Return the first line, and how many more there are; "unknown reason" for none."""
    more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
    return f"{lines[0]}{more}" if lines else "unknown reason"


def _names(nodes: Sequence[str]) -> str:
    """Return the names of up to three nodes, with commas; "its node" for none."""
    return f"{', '.join(nodes[:3])}{' and others' if len(nodes) > 3 else ''}" or "its node"


def _free_of(free: int, total: int) -> str:
    """Return a text such as "1.2 GB of 10 GB are free"."""
    return f"{show_size(free)} of {show_size(total)} are free"
