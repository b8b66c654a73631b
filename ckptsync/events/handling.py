"""Handle one event of a location: claim it, run its program, and write its record.

Two heads can have the same events. So whoever begins one writes a claim, an exclusive file that is
written again each `REFRESH` seconds, and then reads whether a record says that the event is done.
An event is thus done once, unless a process dies between its program and its record, or a store
cannot create exclusively. A claim does not count if nobody has written it for `STALE` seconds, or
if a process of this node wrote it and has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptsync.catalogue.location_summary import Summary
from ckptsync.catalogue.uncached import not_found, read_location
from ckptsync.errors import CkptsyncError, Exists, Incomplete, NotFound, StoreError
from ckptsync.events.definitions import Definition, fill_places
from ckptsync.events.due import Occurrence, Since, is_over, list_occurrences
from ckptsync.events.programs import ProgramEnd, post, run_command
from ckptsync.records.event_record import LONGEST_ERROR, EventRecord
from ckptsync.records.io import append_record
from ckptsync.records.location_status import record_names
from ckptsync.records.store_paths import consolidated_prefix, records_prefix
from ckptsync.safe_names import RECORDS
from ckptsync.spool.markers import start_time
from ckptsync.stores.clock import store_now
from ckptsync.stores.contract import Store, read_all
from ckptsync.stores.opening import directory_of

REFRESH, STALE = 20.0, 120.0
_PREFIX = f"{RECORDS}/events/"
_SINCE = b"a head has this event since the time of this file\n"
Describe = Callable[[Summary], Mapping[str, Any]]
"""Returns the JSON of a location."""


class Elsewhere(Incomplete):
    """Raised if another process runs the event."""


@dataclass(frozen=True, slots=True)
class Request:
    """Which definition to run, for which location.

    ``event``: the event to handle, else the last of the definition's that happened. ``is_due``:
    nothing is run if a record says that it is done. ``node``: who runs it. ``secrets``: variables
    for definitions that ask for them.
    """

    definition: Definition
    run: str
    location: str
    event: str = ""
    is_due: bool = False
    node: str = ""
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class HandledEvent:
    """What was done about an event, in how many seconds.

    ``was_done``: a record said so already, and nothing was run.
    """

    happened: Occurrence
    metrics: Mapping[str, float]
    note: str = ""
    was_done: bool = False
    seconds: float = 0.0


def register_events(store: Store, definitions: Iterable[Definition]) -> Since:
    """Return when heads first had each event of these definitions; write that for new ones.

    One whose time lies in the future, since a clock was set, is written again. An event whose file
    is not visible yet is left out. Raises StoreError.
    """
    names = {f"{_PREFIX}{d.name}/{e}.since": (d.name, e) for d in definitions for e in d.on}
    listed = _claim_mtimes(store) if names else {}
    if [name for name in names if listed.get(name, 0.0) > time.time()]:
        now = store_now(store)
        # the store's clock was ahead then, and is right now: else nothing would be due for long
        for name in (name for name in names if listed.get(name, 0.0) > now):
            store.write(name, [_SINCE])
        listed = _claim_mtimes(store)
    if new := names.keys() - listed.keys():
        for name in new:
            with contextlib.suppress(Exists):
                store.create(name, [_SINCE])
        listed = _claim_mtimes(store)
    return {event: listed[name] for name, event in names.items() if name in listed}


def _claim_mtimes(store: Store) -> dict[str, float]:
    """Return the mtimes of all files about events, by name.  Raises StoreError."""
    return {entry.name: entry.mtime for entry in store.names(_PREFIX)}


def handle(
    store: Store, request: Request, describe: Describe, beat: Callable[[], object]
) -> HandledEvent:
    """Run an event's program, and write its record; return its metrics and duration.

    Nothing is run if ``request.is_due`` and a record says that it is done, or was given up.
    ``describe`` returns the program's document; ``beat`` is called while it runs, some times a
    second. A claim in the store keeps other heads away meanwhile. No record is written of a deleted
    location.

    Raises:
        CkptsyncError: the program failed; its record is written.
        Elsewhere: another head runs it.
        Incomplete: the event has not happened.
        ConfigError: there is no such location.
        StoreError: the store failed, or a record cannot be read (Corrupt, Unsupported).

    """
    definition, run, location = request.definition, request.run, request.location
    name = request.event or _find_occurrence(store, request)[1].event
    claim = f"{_PREFIX}{definition.name}/{name}/{run}/{location}"
    with _claimed(store, claim, request.node or "by hand") as refresh:
        summary, event = _find_occurrence(store, request)
        if request.is_due and is_over(definition, summary, event):
            return HandledEvent(event, dict(summary.metrics), was_done=True)

        def beat_and_refresh() -> None:
            """Report progress, and keep the claim fresh."""
            beat()
            refresh()

        start = time.monotonic()
        document = {"event": event.event, "name": definition.name, **describe(summary)}
        program_end = _run_program(
            store, request, summary, json.dumps(document).encode() + b"\n", beat_and_refresh
        )
        seconds = time.monotonic() - start
        record = EventRecord(
            run=run,
            checkpoint=summary.checkpoint,
            location=location,
            n=0,
            name=definition.name,
            definition=definition.digest,
            event=event.event,
            of=event.of,
            outcome="failed" if program_end.error else "done",
            error=(program_end.error or program_end.note)[:LONGEST_ERROR],
            metrics=dict(program_end.metrics),
        )
        record_names_now = record_names(
            e.name for e in store.names(records_prefix(run, location))
        ).values()
        if any(
            parsed.kind == "manifest" for parsed in record_names_now
        ):  # else it was deleted meanwhile
            append_record(store, record)
    if program_end.error:
        text = f"{run}/{location}: {definition.name} ({event.event}): {program_end.error}"
        hint = f"`ckptsync events run {run}/{location} {definition.name} -c FILE` repeats it"
        raise CkptsyncError(text, hint=hint)
    return HandledEvent(event, program_end.metrics, program_end.note, seconds=seconds)


def _find_occurrence(store: Store, request: Request) -> tuple[Summary, Occurrence]:
    """Read the location's records; return its summary, and the requested occurrence.

    Without a request it is the last one of the definition's events. Raises Incomplete if it has not
    happened, ConfigError without such a location, StoreError, and the error of an unreadable
    record.
    """
    run, location, definition = request.run, request.location, request.definition
    state = read_location(store, run, location)
    location_state = state.of(run, location)
    if location_state is None:
        for fault in state.faults_of(run, location):
            raise fault.error
        raise not_found(store, run, location)
    summary = state.summary_of(location_state)
    event_names = [request.event] if request.event else definition.on
    events = [event for event in list_occurrences(summary) if event.event in event_names]
    if not events:
        reason = f"it is {summary.status}, and was never {' or '.join(event_names)}"
        hint = f"`ckptsync events {run}/{location}` shows what happened to it"
        raise Incomplete(
            f"{run}/{location}: {definition.name} has nothing to do: {reason}", hint=hint
        )
    return summary, events[-1]


@contextlib.contextmanager
def _claimed(store: Store, name: str, node: str) -> Iterator[Callable[[], None]]:
    """Hold a claim within the block; yield a function that writes it again if that is needed.

    A claim that is `STALE`, or of a process of this node that has ended, is overwritten. Raises
    Elsewhere if another process holds it, or StoreError. At the end the claim is deleted.
    """
    content = f"{node} {os.getpid()} {start_time(os.getpid())}\n".encode()
    try:
        store.create(name, [content])
    except Exists:
        owner = b""
        with contextlib.suppress(NotFound):  # released meanwhile
            owner = read_all(store, name, 1 << 10)
        written_at = next((e.mtime for e in store.names(_PREFIX) if e.name == name), 0.0)
        holder, is_over = _holder(owner, node)
        if not is_over and owner != content and store_now(store) - written_at < STALE:
            hint = "wait until it has ended"
            raise Elsewhere(f"{name.removeprefix(_PREFIX)}: {holder} does it", hint=hint) from None
        store.write(name, [content])
    last_write = time.monotonic()

    def refresh() -> None:
        """Write the claim again if `REFRESH` seconds have passed."""
        nonlocal last_write
        if time.monotonic() - last_write >= REFRESH:
            last_write = time.monotonic()
            with contextlib.suppress(StoreError):  # the next one is soon
                store.write(name, [content])

    try:
        yield refresh
    finally:
        with contextlib.suppress(StoreError):  # it counts for nothing soon
            store.delete(name)


def _holder(owner: bytes, node: str) -> tuple[str, bool]:
    """Return which node wrote a claim, and whether it was a process of ``node`` that has ended.

    A claim without a process counts as ended if it is empty or names ``node``.
    """
    words = owner.decode("utf-8", "replace").strip().rsplit(" ", 2)
    if len(words) < 3 or not words[1].isdecimal():
        return " ".join(words), words in ([""], [node])
    node_name, pid, start = words
    return node_name, node_name == node and start_time(int(pid)) != start


def _run_program(
    store: Store,
    request: Request,
    summary: Summary,
    document: bytes,
    beat: Callable[[], None],
) -> ProgramEnd:
    """Run the command of a definition, or POST to its URL; return how it ended.

    A command that needs the model of a location without one is not run; that, and one that cannot
    be started, is an error in the result.
    """
    definition = request.definition
    if definition.url:
        return post(definition, document, beat)
    values = place_values(store, summary)
    if unusable := [
        word for word in definition.command if "{model}" in word and not values["model"]
    ]:
        return ProgramEnd(f"{unusable[0]!r}: it has no consolidated model")
    words = fill_places(definition.command, values)
    try:
        return run_command(definition, words, document, request.secrets, beat)
    except OSError as e:
        return ProgramEnd(f"cannot be started: {e.strerror}")


def place_values(store: Store, summary: Summary) -> dict[str, str]:
    """Return the value of each of `PLACES` for a location; empty if it has none."""
    directory = directory_of(store)
    root = store.url.rstrip("/") if directory is None else str(directory)
    model = f"{root}/{consolidated_prefix(summary.run, summary.location)}".rstrip("/")
    return {
        "run": summary.run,
        "checkpoint": summary.checkpoint,
        "step": "" if summary.step is None else str(summary.step),
        "location": summary.location,
        "path": f"{root}/{summary.run}/{summary.location}" if directory is not None else "",
        "model": model if summary.consolidated else "",
        "url": f"{store.url.rstrip('/')}/{summary.run}/{summary.location}",
    }
