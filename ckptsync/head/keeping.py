"""Keeping a location by hand, and releasing it again: no rule lets go of what a person keeps."""

from __future__ import annotations

import time

from ckptsync.catalogue.fresh import fresh_location
from ckptsync.catalogue.reading import Cache
from ckptsync.errors import ConfigError, Incomplete
from ckptsync.head import tombs
from ckptsync.head.marking import Step
from ckptsync.head.removing import Road, take_back
from ckptsync.records.coding import is_made_anew
from ckptsync.records.keep import Keep, kept
from ckptsync.records.state import Snapshot
from ckptsync.records.tombstone import Scope, fate
from ckptsync.stores.contract import Store


def keep(store: Store, run: str, location: str, reason: str = "") -> bool:
    """Whether it was not kept yet.  What was marked to go is taken back.

    Raises ConfigError if there is no such location, Incomplete if it is too late: its removal has begun, or one that was taken back has taken files.
    """
    before = _seen(store, run, location)
    is_new = not kept(before.records.keeps)
    if is_new:
        tombs.keep(store, Keep(run, before.checkpoint, location, 0, keeps=True, reason=reason))
        if store.late:
            time.sleep(store.late)  # only then what others have written before must be seen here
    seen = _seen(store, run, location)  # after our word: so whoever removes has seen it, or we see that he has begun
    for scope in _marked(seen):
        step = Step(run, location, "take-back", scope, f"kept by hand{f': {reason}' if reason else ''}")
        found = take_back(store, step, Road(Cache()))
        if found.outcome != "taken back":
            raise _too_late(seen, found.reason)
        _check_in_time(_seen(store, run, location))
    return is_new


def release(store: Store, run: str, location: str) -> bool:
    """Whether it was kept.  Raises ConfigError if there is no such location."""
    seen = _seen(store, run, location)
    if not kept(seen.records.keeps):
        return False
    tombs.keep(store, Keep(run, seen.checkpoint, location, 0, keeps=False))
    return True


def _seen(store: Store, run: str, location: str) -> Snapshot:
    found = fresh_location(store, run, location)
    for fault in found.faults:
        if fault.record.kind != "keep" and not is_made_anew(fault.record, fault.error):
            raise fault.error
    seen = found.of(run, location)
    if seen is None:
        raise ConfigError(f"{run}/{location}: no node has told this store of it", hint="`ckptsync ls` shows what is there")
    return seen


def _marked(seen: Snapshot) -> tuple[Scope, ...]:
    scopes: tuple[tuple[Scope, str], ...] = (("location", seen.conditions.retired), ("shards", seen.conditions.shards))
    return tuple(scope for scope, why in scopes if why and not _is_done(seen, scope))


def _is_done(seen: Snapshot, scope: Scope) -> bool:
    """Shards that are gone are gone: what is kept is the model."""
    stones = seen.records.tombstones.values()
    return scope == "shards" and any(t.scope == "shards" and t.stage == "done" for t in stones)


def _check_in_time(seen: Snapshot) -> None:
    found = fate(seen.records.tombstones, {k.name for k in seen.manifests})
    if found.is_begun and not found.is_done:
        raise _too_late(seen, "its removal has begun")


def _too_late(seen: Snapshot, why: str) -> Incomplete:
    return Incomplete(
        f"{seen.run}/{seen.location}: too late to be sure of keeping it: {why}", hint="look again in a quarter of an hour"
    )
