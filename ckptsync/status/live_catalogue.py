"""A store's catalogue together with what its nodes do now.  Pure.

A catalogue says what is stored; heartbeats say what nodes upload, merge and verify at this moment.
`add_node_progress` changes the statuses and sizes of the catalogue's locations by the heartbeats,
so that `ls`, `status`, metrics and the page show the same.  Times are seconds on the store's clock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime, timezone
from typing import Any

from ckptsync.catalogue.location_summary import Catalogue, Summary
from ckptsync.checkpoint_dirs import series_and_step
from ckptsync.quantities import show_duration, show_size
from ckptsync.records.location_status import Status
from ckptsync.records.progress import MOVING, OF_SAVES, Progress
from ckptsync.status.nodes import Node

DATED = 15.0
"""Seconds of age from which on `describe` says when progress was observed."""
_SOON, _TODAY = 600.0, 12 * 3600.0
_LAST = 253402214400.0  # the last day of a calendar
_ORDER = (*MOVING, "queued", "waiting", "failed", "refused")
ON_ITS_WAY = (*MOVING, "queued", "waiting")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProgress(Progress):
    """One entry of progress of ``node``, observed ``at`` that time.

    ``left``: seconds from now until it is done, or until a waiting one continues; None if unknown.
    """

    node: str
    left: float | None
    at: float

    def document(self) -> dict[str, Any]:
        """Return the entry as ``--json`` has it."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class LiveCatalogue:
    """A catalogue whose statuses and sizes include the nodes' present work, and that work.

    Locations of which no manifest exists are in `Catalogue.begun`.  ``running``: moving entries
    first.
    """

    catalogue: Catalogue
    running: tuple[NodeProgress, ...] = ()


def add_node_progress(
    catalogue: Catalogue, nodes: Iterable[Node], now: float, run: str = ""
) -> LiveCatalogue:
    """Return a catalogue with the progress of its live nodes, for a ``run`` or for all ("").

    Progress of silent and stopped nodes, and work that the store shows to be done, is left out.
    Uploads to locations without a manifest are added to ``begun``. Without any it is unchanged.
    """
    works = [
        (progress, node)
        for node in nodes
        if node.state == "alive"
        for progress in node.running
        if not run or progress.run == run
    ]
    if not works:
        return LiveCatalogue(catalogue)
    names = {(progress.run, progress.checkpoint) for progress, _ in works}
    stored: dict[tuple[str, str], list[Summary]] = defaultdict(list)
    for s in (*catalogue.summaries, *catalogue.begun):
        if (s.run, s.checkpoint) in names:
            stored[s.run, s.checkpoint].append(s)
    progress_entries = (_entry(progress, node, stored, now) for progress, node in works)
    entries = [entry for entry in progress_entries if entry is not None]
    entries.sort(key=lambda e: (_ORDER.index(e.state) if e.state in _ORDER else 99, e.since))
    saves = by_location(e for e in entries if e.kind in OF_SAVES and e.state in ON_ITS_WAY)
    begun_by_location = {(s.run, s.location): s for s in catalogue.begun}
    summaries = tuple(
        _on_its_way(s, saves.get((s.run, s.location), ())) for s in catalogue.summaries
    )
    stored_locations = {(s.run, s.location) for s in summaries}
    for key, location_entries in by_location(e for e in entries if e.kind == "upload").items():
        if key not in stored_locations:
            begun_by_location[key] = _describe_begun(begun_by_location.get(key), location_entries)
    catalogue = replace(catalogue, summaries=summaries, begun=tuple(begun_by_location.values()))
    return LiveCatalogue(catalogue, tuple(entries))


def _entry(
    progress: Progress, node: Node, stored: dict[tuple[str, str], list[Summary]], now: float
) -> NodeProgress | None:
    """Return a node's progress on a location; None if the store shows that it is done.

    Sets a missing location (`_location`). ``stored``: summaries by run and checkpoint.
    """
    summaries = stored.get((progress.run, progress.checkpoint), [])
    location = progress.location or _location(progress.checkpoint, summaries)
    summary = next((s for s in summaries if s.location == location), None)
    if summary is not None and _is_over(progress, node, summary):
        return None
    seconds_left: float | None = None
    if progress.is_moving:
        if progress.rate >= 1 and progress.total:
            seconds = (progress.total - progress.done) / progress.rate
            seconds_left = max(0.0, seconds - (now - node.beat))
    elif progress.until is not None:
        seconds_left = max(0.0, progress.until - now)
    values = {f.name: getattr(progress, f.name) for f in fields(Progress)}
    values["location"] = location
    return NodeProgress(**values, node=node.node, left=seconds_left, at=node.beat)


def _location(checkpoint: str, stored: Sequence[Summary]) -> str:
    """Return the location of an upload that has not chosen one yet.

    That is the checkpoint's name if it is unfinished or no other one is, else the first unfinished.
    """
    unfinished = [s.location for s in stored if s.status in ("INCOMPLETE", "UPLOADING")]
    return unfinished[0] if unfinished and checkpoint not in unfinished else checkpoint


def _is_over(progress: Progress, node: Node, summary: Summary) -> bool:
    """Return whether the store's records show that an entry's work is done.

    An upload or verification: if its record is newer than the heartbeat. A merge: if the location
    has its model, and no manifest came later. Others: False.
    """
    if progress.kind == "upload":
        return node.node in summary.nodes and summary.arrived > node.beat
    if progress.kind == "consolidate":
        return summary.status in ("CONSOLIDATED", "VERIFIED") and not summary.late
    return progress.kind == "verify" and summary.proof.when > node.beat


def _on_its_way(summary: Summary, entries: Sequence[NodeProgress]) -> Summary:
    """Return a location that has manifests, with the status and sizes of what is still uploaded.

    Unchanged unless it is INCOMPLETE or UPLOADING and has entries.  UPLOADING if bytes move or
    another node announced it, else WAITING.
    """
    if summary.status not in ("INCOMPLETE", "UPLOADING") or not entries:
        return summary
    sending = {e.node for e in entries if e.is_moving}
    other_entries = [e for e in entries if e.node not in summary.nodes]
    whole, done = (
        summary.size + sum(getattr(e, name) for e in other_entries) for name in ("total", "done")
    )
    is_uploading = sending or summary.status == "UPLOADING"
    return replace(
        summary,
        status="UPLOADING" if is_uploading else "WAITING",
        uploading=tuple(sorted({*summary.uploading, *sending})),
        whole=whole,
        demanded=whole,
        present=min(done, whole),
    )


def _describe_begun(summary: Summary | None, entries: Sequence[NodeProgress]) -> Summary:
    """Return a location that no manifest names, from its announcements and its nodes' progress.

    ``summary``: that of its announcements, or None.  UPLOADING if bytes move or are announced,
    REFUSED if all entries are, else WAITING.  ``entries``: one or more.
    """
    first = entries[0]
    since = min(e.since for e in entries)
    sending = {e.node for e in entries if e.is_moving}
    if summary is None:
        summary = Summary(
            run=first.run,
            checkpoint=first.checkpoint,
            location=first.location,
            step=series_and_step(first.checkpoint)[1],
            status="WAITING",
            ended=since,
            first_arrival=since,
            arrived=since,
        )
    whole = max(summary.size, sum(e.total for e in entries))
    status: Status = "UPLOADING" if sending or summary.uploading else "WAITING"
    if status == "WAITING" and all(e.state == "refused" for e in entries):
        status = "REFUSED"
    return replace(
        summary,
        status=status,
        uploading=tuple(sorted({*summary.uploading, *sending})),
        evidence=tuple(dict.fromkeys(e.reason for e in entries if e.reason)) or summary.evidence,
        whole=whole,
        demanded=whole,
        present=min(whole, sum(e.done for e in entries)),
    )


def by_location(entries: Iterable[NodeProgress]) -> dict[tuple[str, str], list[NodeProgress]]:
    """Return the entries of each location, by its run and name."""
    groups: dict[tuple[str, str], list[NodeProgress]] = {}
    for e in entries:
        groups.setdefault((e.run, e.location), []).append(e)
    return groups


_JOBS = {
    "consolidate": ("consolidates", "consolidate"),
    "verify": ("verifies", "verify"),
    "retain": ("applies retention", "apply retention"),
    "event": ("runs", "run"),
}
_STATES = {
    "uploading": "uploads",
    "repairing": "uploads again",
    "queued": "will upload",
    "waiting": "waits",
    "refused": "cannot upload",
    "failed": "failed to upload",
}


def describe(entry: NodeProgress, now: float) -> str:
    """Return a sentence: what a node does, how far it is, or why it waits and until when.

    If it was observed more than `DATED` seconds ago, it says when, and shows no rate.
    """
    activity = _STATES.get(entry.state, entry.state)
    if job := _JOBS.get(entry.kind):
        activity, name = job
        if entry.state != "running":
            activity = f"{'could not' if entry.state == 'failed' else 'will'} {name}"
        activity += f" {entry.name}" if entry.name else ""
    text, age = f"{entry.node} {activity}", now - entry.at
    if entry.state in ("refused", "failed") and entry.since and now - entry.since >= 1:
        text += f" for {show_duration(round(now - entry.since))}"
    text += f" (seen {show_duration(round(age))} ago)" if age > DATED else ""
    if entry.is_moving:
        text = ", ".join([text, *_amounts(entry, is_dated=age > DATED)])
    if entry.until is not None and not entry.is_moving:
        text += f"{' until' if entry.state == 'waiting' else ', again at'} {_clock(entry, now)}"
    return f"{text}: {entry.reason}" if entry.reason else text


def _amounts(entry: NodeProgress, *, is_dated: bool) -> Iterator[str]:
    """Yield a moving entry's percentage or bytes; unless dated also its rate and time left."""
    if entry.total:
        yield f"{100 * entry.done // entry.total} % of {show_size(entry.total)}"
    elif entry.done:
        yield show_size(entry.done)
    if is_dated:
        return
    if entry.rate >= 1:
        yield f"{show_size(round(entry.rate))}/s"
    if entry.left is not None:
        yield f"{show_duration(round(entry.left))} left"


def _clock(entry: NodeProgress, now: float) -> str:
    """Return the local time at which an entry continues, with the date if that is not soon."""
    until = min(entry.until or 0.0, _LAST)
    moment = datetime.fromtimestamp(until, timezone.utc).astimezone()
    if abs(until - now) < _SOON:
        return f"{moment:%H:%M:%S}"
    return f"{moment:%H:%M}" if abs(until - now) < _TODAY else f"{moment:%Y-%m-%d %H:%M}"
