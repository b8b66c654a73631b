"""Do one event, and remember that in the store.

Two heads can have the same events.  Whoever begins one writes a claim, an exclusive file that it
writes again each `REFRESH` seconds, and looks whether a record says that the event is done; so it
is done once, but where a process dies between its command and its record, or where a store cannot
create exclusively.  A claim that nobody has written for `STALE` seconds counts for nothing, nor one
of a process of this node that has ended.
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
from ckptsync.events.definitions import Definition, filled
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
    """Another head does it."""


@dataclass(frozen=True, slots=True)
class Request:
    """``event``: that to do, else the last of the definition's that happened.

    ``is_due``: nothing is done if a record says that it was.  ``node``: who does it.  ``secrets``:
    variables for definitions that ask for them.
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
    """What was done.  ``was_done``: a record said so already, and nothing was run."""

    happened: Occurrence
    metrics: Mapping[str, float]
    note: str = ""
    was_done: bool = False
    seconds: float = 0.0


def register_events(store: Store, definitions: Iterable[Definition]) -> Since:
    """Return when heads first had each event of these definitions, and write what is new.

    What cannot be seen yet is left out.  Raises StoreError.
    """
    names = {f"{_PREFIX}{d.name}/{e}.since": (d.name, e) for d in definitions for e in d.on}
    listed = _mtimes(store) if names else {}
    if [name for name in names if listed.get(name, 0.0) > time.time()]:
        now = store_now(store)
        # the store's clock was ahead then, and is right now: else nothing would be due for long
        for name in (name for name in names if listed.get(name, 0.0) > now):
            store.write(name, [_SINCE])
        listed = _mtimes(store)
    if new := names.keys() - listed.keys():
        for name in new:
            with contextlib.suppress(Exists):
                store.create(name, [_SINCE])
        listed = _mtimes(store)
    return {event: listed[name] for name, event in names.items() if name in listed}


def _mtimes(store: Store) -> dict[str, float]:
    return {entry.name: entry.mtime for entry in store.names(_PREFIX)}


def handle(
    store: Store, request: Request, describe: Describe, beat: Callable[[], object]
) -> HandledEvent:
    """Do an event, and write its record.

    Raises CkptsyncError if it failed, of which a record was written, too; Elsewhere where another
    head does it, Incomplete where it has not happened; StoreError.
    """
    definition, run, location = request.definition, request.run, request.location
    name = request.event or _find(store, request)[1].event
    claim = f"{_PREFIX}{definition.name}/{name}/{run}/{location}"
    with _claimed(store, claim, request.node or "by hand") as refresh:
        s, event = _find(store, request)
        if request.is_due and is_over(definition, s, event):
            return HandledEvent(event, dict(s.metrics), was_done=True)

        def both() -> None:
            beat()
            refresh()

        start = time.monotonic()
        told = {"event": event.event, "name": definition.name, **describe(s)}
        end = _run(store, request, s, json.dumps(told).encode() + b"\n", both)
        seconds = time.monotonic() - start
        record = EventRecord(
            run=run,
            checkpoint=s.checkpoint,
            location=location,
            n=0,
            name=definition.name,
            definition=definition.digest,
            event=event.event,
            of=event.of,
            outcome="failed" if end.error else "done",
            error=(end.error or end.note)[:LONGEST_ERROR],
            metrics=dict(end.metrics),
        )
        there = record_names(e.name for e in store.names(records_prefix(run, location))).values()
        if any(parsed.kind == "manifest" for parsed in there):  # else it was deleted meanwhile
            append_record(store, record)
    if end.error:
        what = f"{run}/{location}: {definition.name} ({event.event}): {end.error}"
        hint = f"`ckptsync events run {run}/{location} {definition.name} -c FILE` repeats it"
        raise CkptsyncError(what, hint=hint)
    return HandledEvent(event, end.metrics, end.note, seconds=seconds)


def _find(store: Store, request: Request) -> tuple[Summary, Occurrence]:
    """Return the location, and what happened to it.  Raises Incomplete, ConfigError."""
    run, location, definition = request.run, request.location, request.definition
    state = read_location(store, run, location)
    seen = state.of(run, location)
    if seen is None:
        for fault in state.faults_of(run, location):
            raise fault.error
        raise not_found(store, run, location)
    s = state.summary_of(seen)
    wanted = [request.event] if request.event else definition.on
    events = [event for event in list_occurrences(s) if event.event in wanted]
    if not events:
        why = f"it is {s.status}, and was never {' or '.join(wanted)}"
        hint = f"`ckptsync events {run}/{location}` shows what happened to it"
        raise Incomplete(f"{run}/{location}: {definition.name} has nothing to do: {why}", hint=hint)
    return s, events[-1]


@contextlib.contextmanager
def _claimed(store: Store, name: str, node: str) -> Iterator[Callable[[], None]]:
    """Hold a claim within the block; give the function that writes it again in time.

    Raises Elsewhere where another process holds it.
    """
    mine = f"{node} {os.getpid()} {start_time(os.getpid())}\n".encode()
    try:
        store.create(name, [mine])
    except Exists:
        owner = b""
        with contextlib.suppress(NotFound):  # released meanwhile
            owner = read_all(store, name, 1 << 10)
        at = next((e.mtime for e in store.names(_PREFIX) if e.name == name), 0.0)
        who, is_over = _holder(owner, node)
        if not is_over and owner != mine and store_now(store) - at < STALE:
            hint = "wait until it has ended"
            raise Elsewhere(f"{name.removeprefix(_PREFIX)}: {who} does it", hint=hint) from None
        store.write(name, [mine])
    last = time.monotonic()

    def refresh() -> None:
        nonlocal last
        if time.monotonic() - last >= REFRESH:
            last = time.monotonic()
            with contextlib.suppress(StoreError):  # the next one is soon
                store.write(name, [mine])

    try:
        yield refresh
    finally:
        with contextlib.suppress(StoreError):  # it counts for nothing soon
            store.delete(name)


def _holder(owner: bytes, node: str) -> tuple[str, bool]:
    """Return which node wrote a claim, and whether it was a process of ``node`` that has ended."""
    words = owner.decode("utf-8", "replace").strip().rsplit(" ", 2)
    if len(words) < 3 or not words[1].isdecimal():
        return " ".join(words), words in ([""], [node])
    who, pid, since = words
    return who, who == node and start_time(int(pid)) != since


def _run(
    store: Store,
    request: Request,
    s: Summary,
    data: bytes,
    beat: Callable[[], None],
) -> ProgramEnd:
    definition = request.definition
    if definition.url:
        return post(definition, data, beat)
    values = places(store, s)
    if lacking := [
        word for word in definition.command if "{model}" in word and not values["model"]
    ]:
        return ProgramEnd(f"{lacking[0]!r}: it has no consolidated model")
    words = filled(definition.command, values)
    try:
        return run_command(definition, words, data, request.secrets, beat)
    except OSError as e:
        return ProgramEnd(f"cannot be started: {e.strerror}")


def places(store: Store, s: Summary) -> dict[str, str]:
    """Return what stands for the names in braces of an argument."""
    directory = directory_of(store)
    root = store.url.rstrip("/") if directory is None else str(directory)
    model = f"{root}/{consolidated_prefix(s.run, s.location)}".rstrip("/")
    return {
        "run": s.run,
        "checkpoint": s.checkpoint,
        "step": "" if s.step is None else str(s.step),
        "location": s.location,
        "path": f"{root}/{s.run}/{s.location}" if directory is not None else "",
        "model": model if s.consolidated else "",
        "url": f"{store.url.rstrip('/')}/{s.run}/{s.location}",
    }
