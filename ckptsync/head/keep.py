"""Keep a location by hand, so that no rule deletes it; and release it again."""

from __future__ import annotations

from ckptsync.catalogue.uncached import not_found, read_location
from ckptsync.errors import Incomplete
from ckptsync.head.removal import Removal
from ckptsync.records.io import append_record, is_made_anew
from ckptsync.records.locations import LocationState
from ckptsync.records.tombstone_keep_join import Keep, Scope, fate, kept
from ckptsync.stores.clock import wait_until_visible
from ckptsync.stores.contract import Store


def keep(store: Store, run: str, location: str, reason: str = "") -> bool:
    """Keep a location, and withdraw its mark; return whether it was not kept before.

    Raises ConfigError if there is no such location; Incomplete if its removal has begun, or one has
    deleted files before.
    """
    before = _read(store, run, location)
    is_new = not kept(before.records.keeps)
    if is_new:
        append_record(store, Keep(run, before.checkpoint, location, 0, keeps=True, reason=reason))
        wait_until_visible(store)
    # after the record: a remover has seen that, or this sees its ``begun``
    seen = _read(store, run, location)
    scopes: list[Scope] = ["location"] if seen.conditions.retired else []
    if seen.conditions.shards and not any(
        t.stage == "done" for t in seen.records.tombstones.values() if t.scope == "shards"
    ):
        scopes.append("shards")  # shards that are deleted are gone: what is kept is the model
    for scope in scopes:
        outcome = Removal(store).withdraw(
            run, location, scope, f"kept by hand{f': {reason}' if reason else ''}"
        )
        why = "" if outcome.result == "withdrawn" else outcome.reason or "it is gone"
        if not why:
            again = _read(store, run, location)
            end = fate(again.records.tombstones, {k.name for k in again.manifests})
            why = "its removal has begun" if end.is_begun and not end.is_done else ""
        if why:
            raise Incomplete(
                f"{run}/{location}: the keep came too late, it may still be deleted: {why}",
                hint="run `ckptsync ls` in 15 minutes to see whether it still exists",
            )
    return is_new


def release(store: Store, run: str, location: str) -> bool:
    """Let the rules decide about a location again; return whether it was kept.

    Raises ConfigError if there is none.
    """
    seen = _read(store, run, location)
    if not kept(seen.records.keeps):
        return False
    append_record(store, Keep(run, seen.checkpoint, location, 0, keeps=False))
    return True


def _read(store: Store, run: str, location: str) -> LocationState:
    found = read_location(store, run, location)
    for fault in found.faults:
        if fault.record.kind != "keep" and not is_made_anew(fault.record, fault.error):
            raise fault.error
    seen = found.of(run, location)
    if seen is None:
        raise not_found(store, run, location)
    return seen
