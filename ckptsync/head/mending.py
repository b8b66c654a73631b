"""Doing what a plan of repair can do here: consolidated files made again, shards copied from elsewhere in the store, damaged words removed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from blake3 import blake3

from ckptsync.catalogue.fresh import Fresh, fresh_location
from ckptsync.errors import Corrupt, Incomplete
from ckptsync.head import tombs
from ckptsync.head.clearing import check_alone
from ckptsync.head.consolidate import HeadOptions, one
from ckptsync.head.removing import is_whole
from ckptsync.head.repairing import Ground, NodeWord, Part, Plan
from ckptsync.head.tombs import Grave
from ckptsync.records.keep import Keep
from ckptsync.records.names import RecordName, consolidated_prefix, parse_record_name
from ckptsync.records.saves import Located
from ckptsync.records.state import Snapshot
from ckptsync.records.tombstone import Scope, in_force
from ckptsync.stores.contract import About, Store

PIECE = 4 << 20


def ground(found: Fresh, location: str, nodes: Mapping[str, NodeWord]) -> Ground:
    """What is known beside a location, from all of its run."""
    others = [s for s in found.readable if s.location != location and s.status == "VERIFIED" and not s.conditions.shards]
    elsewhere = {at.entry.digest: at.name for s in others for where in s.files.values() for at in where}
    own = {at.entry.digest: at.name for s in found.readable if s.location == location for at in _sound(s)}
    faults = tuple(f for f in found.faults if f.location == location)
    return Ground(nodes, elsewhere | own, faults)


def _sound(seen: Snapshot) -> Iterator[Located]:
    """Files of the location itself of which no report complains."""
    bad = {f"{seen.run}/{f.name}" for name in seen.conditions.proof.damage for f in seen.records.reports[name].findings}
    for where in seen.files.values():
        yield from (at for at in where if at.name not in bad and seen.sizes.get(at.name) == at.entry.size)


def mend(store: Store, plan: Plan, seen: Snapshot | None, options: HeadOptions) -> tuple[str, ...]:
    """Do it; the names of what was written, or removed.  Raises the first error after all was tried that does not depend on it."""
    words = [parsed for part in plan.parts if part.how == "rebuild" and (parsed := _word(plan, part))]
    done = [name.removeprefix(f"{plan.run}/") for word in words for name in _remove(store, word)]
    if seen is not None:
        done += [_copy(store, seen, part) for part in plan.parts if part.how == "copy"]
    if any(part.how == "rebuild" and not _word(plan, part) for part in plan.parts):
        prefix = consolidated_prefix(plan.run, plan.location).removeprefix(f"{plan.run}/")
        made = one(store, plan.run, plan.location, options)
        done += [f"{prefix}{name}" for each in made for name in each.files]
    return tuple(done)


def _word(plan: Plan, part: Part) -> RecordName | None:
    parsed = parse_record_name(f"{plan.run}/{part.name}")
    return parsed if parsed is not None and parsed.kind in ("keep", "tombstone", "report", "join") else None


def _remove(store: Store, word: RecordName) -> Iterator[str]:
    """A record that is not what its name says says nothing: without it others can be said again.

    While it is there nobody removes the location; so what it may have protected is protected by a new word before it goes.
    """
    check_alone(store, word.run, word.location)
    found = fresh_location(store, word.run, word.location)
    seen = found.of(word.run, word.location)
    if word.kind == "keep":
        yield from _kept(store, word, seen)
    if word.kind == "tombstone":
        if seen is None and any(fault.record.kind == "manifest" for fault in found.faults):
            raise Incomplete(
                f"{word.run}/{word.location}: its manifest cannot be read", hint="its node has to write that again before"
            )
        yield from _taken_back(store, seen)
    store.delete(str(word))
    yield str(word)


def _kept(store: Store, word: RecordName, seen: Snapshot | None) -> Iterator[str]:
    """Unless a later word says whether it is kept."""
    if seen is None or not any(k.n > word.n for k in seen.records.keeps.values()):
        reason = "its record was damaged: release it if it should go"
        yield tombs.keep(store, Keep(word.run, word.location.partition("~")[0], word.location, 0, keeps=True, reason=reason))


def _taken_back(store: Store, seen: Snapshot | None) -> Iterator[str]:
    """What is said yet of a location that counts, but for what a head has removed in part: that can only be finished."""
    if seen is None:
        return
    manifests = {known.name: known.manifest for known in seen.manifests}
    force = [t for t in in_force(seen.records.tombstones).values() if not manifests.keys().isdisjoint(t.manifests)]
    scopes: tuple[Scope, ...] = ("location", "shards")
    for scope in scopes:
        stages = {t.stage for t in force if t.scope == scope}
        if stages and (stages == {"said"} or is_whole(seen, scope)):
            yield tombs.write(store, Grave(manifests, scope, "a damaged word may have taken it back"), "back")


def _copy(store: Store, seen: Snapshot, part: Part) -> str:
    at = next(at for where in seen.files.values() for at in where if at.name == f"{seen.run}/{part.name}")
    store.write(at.name, Copied(store, part.source, at.entry.size, at.entry.digest), About(at.entry.size))
    return part.name


class Copied:
    """What the store has under another name; raises Corrupt at its end, so that nothing appears, unless it is what is wanted."""

    def __init__(self, store: Store, name: str, size: int, wanted: str) -> None:
        self._store, self._name, self._size, self._wanted = store, name, size, wanted

    def __iter__(self) -> Iterator[memoryview]:
        return self._proven(self._chunks())

    def _chunks(self) -> Iterator[memoryview]:
        buffer = memoryview(bytearray(min(PIECE, max(1, self._size))))
        for start in range(0, self._size, PIECE):
            piece = buffer[: min(PIECE, self._size - start)]
            self._store.read_into(self._name, start, piece)
            yield piece

    def _proven(self, chunks: Iterable[memoryview]) -> Iterator[memoryview]:
        digester = blake3()
        for chunk in chunks:
            digester.update(chunk)
            yield chunk
        if digester.hexdigest() != self._wanted:
            raise Corrupt(f"{self._name}: not the bytes that are wanted, either", hint="verify that checkpoint, too")
