"""Remove, or keep after all, one marked location, while other heads and people act on it.

A store has no locks. So a remover writes the tombstone ``begun`` and then reads the location once
more, and whoever keeps the location, or withdraws its mark, writes that first and reads then: at
least one of the two sees the other. Only the head that wrote ``begun`` within the last minute
removes a location that is whole; a ``begun`` of another head is left to that head for `LEASE`, and
then a new one is needed. A location that is no longer whole can only be finished, by any head.

Files are deleted in such an order that a head which dies at any moment leaves either a location
that is given up, and that the next head finishes, or nothing: first what opens a checkpoint, so
that nobody takes half of one for a whole; then the other files; when a listing shows none any more,
the records; the manifests last. Tombstones stay: by them a node recognises its own save.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from ckptsync.catalogue.cached import Cache, read_catalogue
from ckptsync.catalogue.location_summary import Summary, by_age
from ckptsync.catalogue.uncached import not_found, read_location
from ckptsync.errors import ConfigError, Incomplete, without_frames
from ckptsync.head.retention import (
    RetentionDecision,
    is_resumable,
    is_verified,
    last_protection,
    protection,
    unreadable_checkpoints,
)
from ckptsync.records.io import append_record, is_made_anew, read_records
from ckptsync.records.location_status import LocationState, record_names
from ckptsync.records.manifest import Manifest
from ckptsync.records.save_decisions import Keep, Scope, Stage, Tombstone, fate, keep_reason
from ckptsync.records.store_paths import (
    checked_own,
    checkpoint_of,
    own_prefixes,
    parse_record_name,
    records_prefix,
    senders,
    sending_prefix,
)
from ckptsync.safe_names import RECORDS
from ckptsync.stores.clock import store_now, wait_until_visible
from ckptsync.stores.contract import Entry, Store

PROMPT = 60.0
"""Seconds of this process from the last look to the first deletion; later nothing is deleted."""
LEASE = 900.0
"""Seconds on the store's clock for which a removal that another head began is left to that head."""
_OPENERS = (
    "trainer_state.json",
    "config.json",
    "adapter_config.json",
    ".metadata",
    "latest",
    "generation_config.json",
)
_LISTINGS = 3  # of files that somebody else keeps writing, until they are left to the next time
_HINT = (
    "rename a run: none may lie inside another's directory (as a/checkpoint-4 in a), or use a name"
    " of the store; this location is left alone"
)

_LISTED = "`ckptsync ls` shows the checkpoints of its run"
Result = Literal["marked", "marked again", "removed", "withdrawn", "waits", "gone"]


@dataclass(frozen=True, slots=True)
class RemovalOutcome:
    """What was done about a location, why, and how many files and bytes were deleted or marked."""

    run: str
    location: str
    result: Result
    scope: Scope
    reason: str = ""
    files: int = 0
    size: int = 0


def elapsed() -> float:
    """Return seconds of a monotonic clock; on Linux it also counts while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform == "linux" else time.monotonic()


def write_tombstone(
    store: Store,
    manifests: Mapping[str, Manifest],
    scope: Scope,
    stage: Stage,
    *,
    reason: str,
    metrics: Mapping[str, float] | None = None,
) -> str:
    """Write the next tombstone of a location; return its name. Raise as `append_record` does.

    ``manifests``: by name, all that count, at least one: the tombstone is of their location.
    ``metrics`` are recorded with scope "shards" only; stage "begun" gets a random token.
    """
    first = next(iter(manifests.values()))
    ended: dict[str, int] = {}
    for m in manifests.values():
        ended[m.node] = max(m.ended, ended.get(m.node, m.ended), *(f.mtime for f in m.files))
    stone = Tombstone(
        run=first.run,
        checkpoint=first.checkpoint,
        location=first.location,
        n=0,
        manifests=tuple(sorted(manifests)),
        reason=reason,
        scope=scope,
        stage=stage,
        ended=ended,
        metrics=dict(metrics or {}) if scope == "shards" else {},
        by=secrets.token_hex(8) if stage == "begun" else "",
    )
    return append_record(store, stone)


def check_alone(store: Store, run: str, location: str) -> None:
    """Raise ConfigError if records of another run lie among the files of a location.

    Lists three prefixes. Raise Corrupt if ``run`` or ``location`` is a name that the store itself
    uses, StoreError.
    """
    own, _, model = own_prefixes(run, location)
    model_root = model.removesuffix(f"{location}/")
    for prefix in (f"{model_root}{RECORDS}/", f"{own}{RECORDS}/", f"{model}{RECORDS}/"):
        if foreign_entry := next(iter(store.names(prefix)), None):
            raise ConfigError(
                f"{run}/{location}: {foreign_entry.name} is of another run, whose files would be"
                " deleted with it",
                hint=_HINT,
            )


def files_to_delete(store: Store, run: str, location: str, scope: Scope) -> list[Entry]:
    """Return the files of a location, or its shards, in the order in which they are deleted.

    They are its own files and other nodes' copies, and with scope "location" the model. The files
    without which nothing opens a checkpoint come first, then all others by name; no record is among
    them. Raise ConfigError if another run's records lie there, Corrupt, StoreError.
    """
    own, records, model = own_prefixes(run, location)
    prefixes = [own, f"{records}files/", *([model] if scope == "location" else [])]
    ordered: list[tuple[bool, Entry]] = []
    for prefix in prefixes:
        for entry in store.names(prefix):
            parts = entry.name.removeprefix(prefix).split("/")
            if RECORDS in parts:
                raise ConfigError(
                    f"{entry.name}: a run lies in {prefix}, and would be deleted with it",
                    hint=_HINT,
                )
            ordered.append((parts[-1] in _OPENERS or parts[-1].endswith(".index.json"), entry))
    return [entry for _, entry in sorted(ordered, key=lambda pair: (not pair[0], pair[1].name))]


def delete_records(store: Store, run: str, location: str) -> bool:
    """Delete a location's records, manifests last; return whether it was done.

    Nothing is deleted, and False returned, if files of the location are left. Tombstones and
    announcements of uploads stay. Manifests in other locations that its own have superseded would
    count again, so they are deleted first. Raise as `files_to_delete` does.
    """
    if files_to_delete(store, run, location, "location"):
        return False
    listed = record_names(e.name for e in store.names(f"{run}/{RECORDS}/")).values()
    checkpoint = checkpoint_of(location)
    records, _ = read_records(
        store,
        (p for p in listed if p.kind == "manifest" and checkpoint_of(p.location) == checkpoint),
    )
    manifests = {name: r for name, r in records.items() if isinstance(r, Manifest)}
    superseded: dict[str, None] = {}
    prefixes = own_prefixes(run, location)
    pending = [name for name, m in manifests.items() if m.location == location]
    while pending:
        manifest = manifests[pending.pop()]
        for name in manifest.supersedes:
            earlier = manifests.get(name)
            if earlier and earlier.node == manifest.node and name not in superseded:
                superseded[name] = None
                pending.append(name)
    for name in reversed(superseded):  # the earliest first
        if (other_location := manifests[name].location) != location:
            store.delete(checked_own(name, own_prefixes(run, other_location)))
    prefix = records_prefix(run, location)
    manifest_names: list[str] = []
    for entry in [*store.names(prefix)]:
        parsed = parse_record_name(entry.name)
        if parsed is None and entry.name.startswith(f"{prefix}sending/"):
            continue  # of the checkpoint's other locations, too
        if parsed is not None and parsed.kind == "manifest":
            manifest_names.append(entry.name)
        elif parsed is None or parsed.kind != "tombstone":
            store.delete(checked_own(entry.name, prefixes))
    for name in manifest_names:
        store.delete(checked_own(name, prefixes))
    return True


@dataclass(frozen=True, slots=True)
class _LocationView:
    """One location as the store lists it now, and summaries of the run's other locations.

    ``scope``: what of it is to be removed. ``unreadable``: see `unreadable_checkpoints`.
    """

    state: LocationState
    summary: Summary
    scope: Scope
    others: tuple[Summary, ...]
    unreadable: frozenset[str]

    @property
    def manifests(self) -> dict[str, Manifest]:
        """Return the manifests that count, by name."""
        return {k.name: k.manifest for k in self.state.manifests}

    @property
    def stones(self) -> dict[str, Tombstone]:
        """Return the tombstones in force, by name."""
        stones = self.state.records.tombstones
        return {name: stones[name] for name in fate(stones, self.manifests).stones}

    @property
    def mark(self) -> str:
        """Return why the location is marked; empty if it is not."""
        summary = self.summary
        return summary.retired if self.scope == "location" else summary.shards_retired

    @property
    def is_whole(self) -> bool:
        """Return whether every file of this scope that records name is listed with its size.

        If the shards may be deleted already, only the model record says what should be there:
        without it this is false.
        """
        state = self.state
        if self.scope == "location" and state.conditions.shards and state.model_record is None:
            return False
        return all(
            state.sizes.get(name) == size for name, size in state.named_files(self.scope).items()
        )

    @property
    def may_come_back(self) -> bool:
        """Return whether nothing is missing, or no removal began that could have deleted it."""
        return self.is_whole or not any(
            t.stage in ("begun", "done") and (t.scope == "location" or self.scope == "shards")
            for t in self.state.records.tombstones.values()
        )

    def outcome(self, result: Result, reason: str, files: int = 0, size: int = 0) -> RemovalOutcome:
        """Return the outcome of what was done about the location."""
        summary = self.summary
        return RemovalOutcome(
            summary.run, summary.location, result, self.scope, reason, files, size
        )


class Removal:
    """Removes, or keeps, marked locations of a store.

    ``progress`` gets the bytes of each deleted file; ``clock`` and ``wait`` are in seconds.
    """

    def __init__(
        self,
        store: Store,
        cache: Cache | None = None,
        progress: Callable[[int], object] = lambda _: None,
        *,
        clock: Callable[[], float] = elapsed,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        """Keep the arguments; read nothing. Without ``cache`` it has one of its own."""
        self._store, self._cache, self._progress = store, cache or Cache(), progress
        self._clock, self._wait = clock, wait

    def remove(self, decision: RetentionDecision) -> RemovalOutcome:
        """Remove a marked location, or its shards; return what was done.

        The caller knows that the grace period is over. It writes the tombstone "begun", waits
        `Store.late` seconds, reads the location again, and then deletes ("removed"). A removal that
        has begun, and from which files are missing, is finished at once. Otherwise nothing is
        deleted if no manifest can be read ("gone"), if new manifests came ("marked again"), or if
        it is not marked, is protected, or another head has begun ("waits"). A removal that has
        begun of what is protected by now is "withdrawn". Raise StoreError, Corrupt, and ConfigError
        if another run's records lie in it.
        """
        run, location, scope = decision.run, decision.location, decision.scope
        check_alone(self._store, run, location)
        now = store_now(self._store)
        view = self._read_view(run, location, scope)
        if view is None:
            return RemovalOutcome(run, location, "gone", scope)
        if not view.mark:
            return view.outcome("waits", "it is no longer marked for deletion")
        if view.summary.begun and not view.is_whole:
            missing = view.state.named_files(scope).keys() - view.state.sizes.keys()
            for name in {name.rpartition("/")[0]: name for name in missing}.values():
                # and with it a directory that a dead head left empty
                self._store.delete(checked_own(name, own_prefixes(run, location)))
            return self._delete(view, None)
        if early_outcome := self._prepare(view, decision, now):
            return early_outcome
        own_tombstone = self._write_tombstone(view, "begun")
        wait_until_visible(self._store, self._wait)
        checked_at = self._clock()
        view = self._read_view(run, location, scope)
        if view is None:
            return RemovalOutcome(run, location, "gone", scope)
        if reason := self._protection(view, decision, now):
            # Another head that has begun may be deleting files now: then nothing can be withdrawn.
            has_rival = any(
                stone.stage == "begun" and name != own_tombstone
                for name, stone in view.stones.items()
            )
            return view.outcome("waits", reason) if has_rival else self._withdraw(view, reason)
        return self._delete(view, checked_at)

    def withdraw(self, run: str, location: str, scope: Scope, reason: str) -> RemovalOutcome:
        """Write that a marked location is kept after all; return what was done. Raise StoreError.

        Nothing is written if it is "gone", or, as result "waits", if its removal has begun or an
        earlier one has deleted a file. If files are missing it first waits `Store.late` seconds.
        """
        view = self._read_view(run, location, scope)
        if view and not view.is_whole and view.may_come_back:
            wait_until_visible(self._store, self._wait)  # ``begun`` comes before a deletion
            view = self._read_view(run, location, scope)
        if view is None:
            return RemovalOutcome(run, location, "gone", scope)
        if view.summary.begun:
            return view.outcome("waits", "its removal has begun")
        if not view.may_come_back:
            return view.outcome("waits", "some of its files are already missing")
        return self._withdraw(view, reason)

    def removable(self, run: str, location: str) -> Summary:
        """Return a location that may be removed now, or whose files are being deleted already.

        Nothing is written. Senders' announcements are judged by this machine's clock. Raise
        ConfigError if it is not in the store, or with what protects it, and StoreError.
        """
        view = self._read_view(run, location, "location")
        if view is None:
            raise not_found(self._store, run, location)
        decision = RetentionDecision(run, location, "drop", "", "remove")
        # one whose files are being deleted already can only be finished
        is_being_deleted = view.summary.begun and not view.is_whole
        reason = "" if is_being_deleted else self._protection(view, decision, time.time())
        if reason:
            name = f"{run}/{location}"
            hint = f"`ckptsync keep --release {name}` releases it" if view.summary.kept else _LISTED
            raise ConfigError(f"{name}: is not deleted: {reason}", hint=hint)
        return view.summary

    def _read_view(self, run: str, location: str, scope: Scope) -> _LocationView | None:
        """Return the location as it is now; None if no manifest counts, or one cannot be read.

        Reads the location, and through the cache the run's catalogue. Raise StoreError.
        """
        catalogue = read_catalogue(self._store, self._cache, run)
        checkpoint_state = read_location(self._store, run, location)
        state = next(iter(checkpoint_state.readable), None)
        if state is None:
            return None
        others = tuple(s for s in catalogue.summaries if s.location != location)
        unreadable = unreadable_checkpoints(catalogue.faults, run)
        return _LocationView(state, checkpoint_state.summary_of(state), scope, others, unreadable)

    def _prepare(
        self, view: _LocationView, decision: RetentionDecision, now: float
    ) -> RemovalOutcome | None:
        """Check whether a removal may begin; return None if it may, else the outcome instead.

        If it has begun, ``view`` is whole. Another head has begun within `LEASE` seconds: nothing
        is written. The location is protected: its mark is withdrawn only if its removal has begun.
        Manifests have arrived since the mark: it is marked again. ``now``: seconds on the store's
        clock. Raise StoreError.
        """
        summary = view.summary
        if summary.begun and now - summary.marked_at < LEASE:
            return view.outcome("waits", "another head has begun to remove it")
        if why := self._protection(view, decision, now):
            return self._withdraw(view, why) if summary.begun else view.outcome("waits", why)
        named_manifests = {name for stone in view.stones.values() for name in stone.manifests}
        if not named_manifests.issuperset(view.manifests):
            self._write_tombstone(view, "marked")
            return view.outcome("marked again", "new files have arrived")
        return None

    def _protection(self, view: _LocationView, decision: RetentionDecision, now: float) -> str:
        """Return why it must not be removed; empty if it may be.

        Lists who is sending files of it, and reads the locations that would remain. Shards that a
        training could resume from count as resumable unless ``decision.any_shards``. Raise
        StoreError.
        """
        summary = view.summary
        conflicts = {s.checkpoint for s in view.others if s.status == "CONFLICT"}
        if why := protection(summary, conflicts, view.unreadable):
            return why
        listed = self._store.names(sending_prefix(summary.run, summary.checkpoint))
        if sending := senders(listed, now).get((summary.run, summary.checkpoint)):
            return f"{min(sending)} is sending files of it"
        resumes = is_resumable(summary)
        if view.scope == "shards":  # could it be resumed from, also if its shards are marked?
            present, demands = view.state.present(), view.state.demands
            is_complete = all(path in present for path in (*demands.model, *demands.resume))
            resumes = bool(demands.resume) and is_complete and not decision.any_shards
        is_compared = resumes or view.scope == "location"
        whole = self._list_whole(view.others, resumes=resumes) if is_compared else ()
        return last_protection(summary, view.scope, whole, resumes=resumes)

    def _list_whole(self, others: Iterable[Summary], *, resumes: bool) -> Iterator[Summary]:
        """Yield locations that are verified and not marked, the newest first.

        Each is read again just before it is yielded, and passed over if it is not VERIFIED now.
        End after one that can be resumed from, or after the first unless ``resumes``. Raise
        StoreError.
        """
        for summary in reversed(by_age(others)):
            if summary.retired or not is_verified(summary):
                continue
            state = read_location(self._store, summary.run, summary.location)
            summary_now = next((state.summary_of(s) for s in state.readable), None)
            if summary_now is not None and summary_now.status == "VERIFIED":
                yield summary_now
                if summary_now.resume or not resumes:
                    return

    def _delete(self, view: _LocationView, checked_at: float | None) -> RemovalOutcome:
        """Delete the files of the scope, then write "done" for shards, or delete the records.

        Nothing is deleted ("waits") if ``checked_at``, when the last check began by ``clock``, is
        more than `PROMPT` seconds ago; None: a removal is only finished. Files are listed up to
        `_LISTINGS` times; if more of a location keep coming, its records stay ("waits"). Otherwise
        tombstones that one mark covers are deleted, too. Return what was deleted. Raise ConfigError
        if another run's records lie among the files, Corrupt, StoreError.
        """
        run, location, scope = view.summary.run, view.summary.location, view.scope
        check_alone(self._store, run, location)
        prefixes = own_prefixes(run, location)
        files = size = 0
        for i in range(_LISTINGS):
            entries = files_to_delete(self._store, run, location, scope)
            if i == 0 and checked_at is not None and self._clock() - checked_at > PROMPT:
                return view.outcome("waits", "the last check before deletion took too long")
            if not entries:
                break
            for entry in entries:
                self._store.delete(checked_own(entry.name, prefixes))
                self._progress(entry.size)
            files, size = files + len(entries), size + sum(e.size for e in entries)
        if scope == "shards":
            self._write_tombstone(view, "done")
        elif not delete_records(self._store, run, location):
            return view.outcome("waits", "another process is writing files to it", files, size)
        else:
            self._delete_tombstones(view.state.records.tombstones)
        reason = view.summary.retired or view.summary.shards_retired
        return view.outcome("removed", reason, files, size)

    def _delete_tombstones(self, stones: Mapping[str, Tombstone]) -> None:
        """Delete tombstones all of whose manifests the broadest mark of the whole location names.

        That mark, of the most manifests and then the highest number, stays; without one nothing is
        deleted. Raise StoreError; Corrupt for a name outside of the location.
        """
        marks = [t for t in stones.values() if t.stage == "marked" and t.scope == "location"]
        broadest_mark = max(marks, key=lambda t: (len(t.manifests), t.n), default=None)
        for name, stone in stones.items():
            if (
                broadest_mark
                and stone is not broadest_mark
                and set(stone.manifests).issubset(broadest_mark.manifests)
            ):
                self._store.delete(checked_own(name, own_prefixes(stone.run, stone.location)))

    def _write_tombstone(self, view: _LocationView, stage: Stage) -> str:
        """Write a tombstone with the mark's reason and earlier ones' metrics; return its name."""
        metrics = next((t.metrics for t in view.state.records.tombstones.values() if t.metrics), {})
        return write_tombstone(
            self._store, view.manifests, view.scope, stage, reason=view.mark, metrics=metrics
        )

    def _withdraw(self, view: _LocationView, why: str) -> RemovalOutcome:
        """Write the tombstone that withdraws; return "withdrawn".

        If a removal may have deleted files, write nothing and return "waits".
        """
        if not view.may_come_back:
            return view.outcome("waits", why)
        write_tombstone(self._store, view.manifests, view.scope, "withdrawn", reason=why)
        return view.outcome("withdrawn", why)


# --- by hand


def keep(store: Store, run: str, location: str, reason: str = "") -> bool:
    """Write a keep of a location, and withdraw its marks; return whether it was not kept before.

    After a new keep it waits `Store.late` seconds. Marks of shards that are deleted stay. Raise
    ConfigError if there is no such location; Incomplete, with the keep written, if its removal has
    begun, or an earlier one has deleted files; StoreError.
    """
    state_before = _read_readable(store, run, location)
    is_new = not keep_reason(state_before.records.keeps)
    if is_new:
        append_record(
            store, Keep(run, state_before.checkpoint, location, 0, keeps=True, reason=reason)
        )
        wait_until_visible(store)
    # after the record: a remover has seen that, or this sees its ``begun``
    state = _read_readable(store, run, location)
    scopes: list[Scope] = ["location"] if state.conditions.retired else []
    shards = [t for t in state.records.tombstones.values() if t.scope == "shards"]
    # shards that are deleted are gone: what is kept is the model
    if state.conditions.shards and all(t.stage != "done" for t in shards):
        scopes.append("shards")
    by_hand = f"kept by hand{f': {reason}' if reason else ''}"
    for scope in scopes:
        outcome = Removal(store).withdraw(run, location, scope, by_hand)
        why = "" if outcome.result == "withdrawn" else outcome.reason or "it is gone"
        if not why:
            state_after = _read_readable(store, run, location)
            decision = fate(state_after.records.tombstones, {k.name for k in state_after.manifests})
            why = "its removal has begun" if decision.is_begun and not decision.is_done else ""
        if why:
            raise Incomplete(
                f"{run}/{location}: the keep came too late, it may still be deleted: {why}",
                hint="run `ckptsync ls` in 15 minutes to see whether it still exists",
            )
    return is_new


def plan_removal(store: Store, run: str, location: str) -> Summary:
    """Return a location that may be removed by hand; nothing is written.

    Raise ConfigError if there is no such location, or with what protects it; the error of a record
    that cannot be read; StoreError.
    """
    _read_readable(store, run, location)
    check_alone(store, run, location)
    return Removal(store).removable(run, location)


def remove_by_hand(store: Store, summary: Summary, reason: str) -> RemovalOutcome:
    """Mark a location unless it is marked, and remove it without a grace period.

    Return the outcome: "removed" or "gone". `plan_removal` checks it first, and `Removal.remove`
    waits `Store.late` seconds. Raise ConfigError if it is protected; Incomplete if it was not, or
    not wholly, deleted, and has to be removed again; StoreError.
    """
    run, location = summary.run, summary.location
    if not plan_removal(store, run, location).retired:
        manifests = {
            stored.name: stored.manifest
            for stored in _read_readable(store, run, location).manifests
        }
        write_tombstone(store, manifests, "location", "marked", reason=reason)
    outcome = Removal(store).remove(RetentionDecision(run, location, "drop", reason, "remove"))
    if outcome.result not in ("removed", "gone"):
        raise Incomplete(
            f"{run}/{location}: not deleted: {outcome.reason}",
            hint="run the same command again in 15 minutes, or `ckptsync keep` it",
        )
    return outcome


def release(store: Store, run: str, location: str) -> bool:
    """Write that a location is no longer kept, so that rules decide; return whether it was kept.

    Nothing is written if it was not. Raise ConfigError if there is no such location; StoreError.
    """
    state = _read_readable(store, run, location)
    if not keep_reason(state.records.keeps):
        return False
    append_record(store, Keep(run, state.checkpoint, location, 0, keeps=False))
    return True


def _read_readable(store: Store, run: str, location: str) -> LocationState:
    """Return a location; raise ConfigError if there is none, or the error of an unreadable record.

    Unreadable keeps, and damaged records that are made anew, are ignored.
    """
    checkpoint_state = read_location(store, run, location)
    for fault in checkpoint_state.faults:
        if fault.record.kind != "keep" and not is_made_anew(fault.record, fault.error):
            raise without_frames(fault.error)
    state = checkpoint_state.of(run, location)
    if state is None:
        raise not_found(store, run, location)
    return state
