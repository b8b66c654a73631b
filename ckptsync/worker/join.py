"""``ckptsync join``: a person says that two locations hold parts of one save, and their files are brought together in one of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ckptsync.errors import ConfigError, Incomplete
from ckptsync.records import saves
from ckptsync.records.coding import kind_of
from ckptsync.records.join import Join
from ckptsync.records.keep import Keep, kept
from ckptsync.records.names import RecordKind
from ckptsync.records.tombstone import fate
from ckptsync.stores.contract import Store
from ckptsync.worker.snapshot import Hold, Passed, nothing
from ckptsync.worker.store_view import RunRecords, read_records
from ckptsync.worker.upload import Destination, create_record, settle


@dataclass(frozen=True, slots=True)
class Joined:
    """``location`` where the save lies now; ``moved``: node → the location its files came from.  ``is_new``: no record or proof joined them before."""

    location: str
    moved: dict[str, str]
    is_new: bool


def join(store: Store, run: str, first: str, second: str, passed: Passed = nothing) -> Joined:
    """Write that two locations of a checkpoint are one save, and copy the files of one beside those of the other.

    Called again it goes on where it was killed, and does nothing where all is done.  Raises ConfigError where they cannot be one
    save, or are not there; Incomplete while a node sends files of that checkpoint; StoreError.
    """
    checkpoint = first.partition("~")[0]
    if first == second or second.partition("~")[0] != checkpoint:
        raise ConfigError(f"{run}/{first} and {run}/{second} are not two locations of one checkpoint", hint=_LIST)
    known = read_records(store, run, RunRecords())
    if broken := known.broken_location(checkpoint):
        raise broken
    its = [k for location in (first, second) for k in _members(run, location, known.manifests(checkpoint))]
    locations = sorted({k.manifest.location for k in its} | {first})
    _check(run, locations, its, known)
    is_new = len(_groups(its, known)) > 1
    if is_new:
        _write(store, _home(its, known), its, known)
    return Joined(*_together(store, run, checkpoint, {k.name for k in its}, passed), is_new)


US = "~join"
"""Who says in the store that it sends while files are copied; no node's id holds a ``~``."""
_LIST = "`ckptsync ls` shows which locations may be parts of one save"


def _members(run: str, location: str, known: Sequence[saves.Known]) -> list[saves.Known]:
    """Return the manifests of a location that count, or those by which their nodes have replaced them: then it was joined before."""
    names = {k.name for k in known if k.manifest.location == location}
    if not names:
        raise ConfigError(f"{run}/{location}: not found in the store", hint=_LIST)
    counting = saves.live(known)
    here = [k for k in counting if k.name in names]
    return here or [k for k in counting if not names.isdisjoint(k.manifest.supersedes)]


def _groups(its: Iterable[saves.Known], known: RunRecords) -> list[saves.Group]:
    """Return the saves that some manifests belong to."""
    mine = [k.manifest for k in its]
    everyone = saves.live(known.manifests(mine[0].checkpoint)) if mine else ()
    return [g for g in saves.groups(everyone) if any(g.holds(m) for m in mine)]


def _check(run: str, locations: Sequence[str], its: Sequence[saves.Known], known: RunRecords) -> None:
    what = " and ".join(f"{run}/{location}" for location in locations)
    if not its:
        raise ConfigError(f"{what}: nothing of them counts any more", hint=_LIST)
    checkpoint = its[0].manifest.checkpoint
    if why := saves.refusals(_groups(its, known)):
        raise ConfigError(f"{what} cannot be joined: {why[0]}", hint="they are two saves of one name, and both are kept")
    for location in locations:
        names = {k.name for k in its if k.manifest.location == location}
        found = fate({n: t for n, t in known.tombstones(checkpoint).items() if t.location == location}, names)
        if reason := found.retired or found.shards:
            raise ConfigError(f"{run}/{location} is being removed: {reason}", hint=f"to keep it: ckptsync keep {run}/{location}")
    if known.is_contended(US, run, checkpoint):
        raise Incomplete(f"{what}: a node is sending files of it", hint="join them when that node is done")


def _home(its: Sequence[saves.Known], known: RunRecords) -> str:
    """Return where they belong when they are joined."""
    names = {k.name for k in its}
    everyone = known.manifests(its[0].manifest.checkpoint)
    joined = [replace(k, joins=k.joins | {"this"}) if k.name in names else k for k in everyone]
    return saves.better_location(its[0].manifest.node, its[0].manifest.location, joined)


def _write(store: Store, home: str, its: Sequence[saves.Known], known: RunRecords) -> None:
    """Write the join; and that a person keeps the save, where one of its locations was kept."""
    first = its[0].manifest
    names = tuple(sorted(k.name for k in its))
    create_record(store, Join(first.run, first.checkpoint, home, _next_n(known, home, "join"), names))
    keeps = {n: r for n, r in known.records.items() if isinstance(r, Keep) and r.checkpoint == first.checkpoint}
    reasons = {
        location: kept({n: r for n, r in keeps.items() if r.location == location})
        for location in (k.manifest.location for k in its)
    }
    if any(reasons.values()) and not kept({n: r for n, r in keeps.items() if r.location == home}):
        reason = next(r for r in reasons.values() if r)
        create_record(store, Keep(first.run, first.checkpoint, home, _next_n(known, home, "keep"), keeps=True, reason=reason))


def _next_n(known: RunRecords, location: str, kind: RecordKind) -> int:
    return max((r.n for r in known.records.values() if r.location == location and kind_of(r) == kind), default=-1) + 1


def _together(store: Store, run: str, checkpoint: str, names: set[str], passed: Passed) -> tuple[str, dict[str, str]]:
    """Move what lies elsewhere to the save's location, node by node; that location, and what was moved."""
    known = read_records(store, run, RunRecords())

    def read() -> tuple[saves.Known, ...]:
        nonlocal known
        known = read_records(store, run, known)
        return known.manifests(checkpoint)

    moved: dict[str, str] = {}
    location = ""
    for node, at in sorted({(k.manifest.node, k.manifest.location) for k in saves.live(read()) if k.name in names}):
        location = saves.better_location(node, at, read())
        if location == at:
            continue
        to = Destination(store, US, read, lambda: known.is_contended(US, run, checkpoint), passed)
        if settle(node, at, Hold(checkpoint, "trainer", {}), to) != location:
            raise Incomplete(f"{run}/{location}: a node is sending files of it", hint="join them when that node is done")
        moved[node] = at
    return location, moved
