"""Removing a location, in such an order that a head which dies at any moment leaves either a location that is given up, and that the next one finishes, or nothing.

What opens a checkpoint goes first, so that nobody takes half of one for a whole; then the other files; when a listing shows none any more, the records
that speak of them; the manifests last of all.  The tombstones stay: by them a node knows its own save again.

Only names that lie in the location are removed, and nothing of a location in which, or around which, another run lies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from ckptsync.errors import ConfigError
from ckptsync.paths import checked_path
from ckptsync.records.manifest import Manifest
from ckptsync.records.names import CONSOLIDATED, OURS, consolidated_prefix, parse_record_name, records_prefix
from ckptsync.records.tombstone import Scope
from ckptsync.stores.contract import Entry, Store

_OPENERS = ("trainer_state.json", "config.json", "adapter_config.json", ".metadata", "latest", "generation_config.json")
_LAST_TO_SEE = 3  # listings until what somebody else keeps writing there is left to the next time

Told = Callable[[int], object]
"""Is told of the bytes of each file that is gone."""
Sure = Callable[[], object]
"""Is asked once, when all is listed and nothing has gone yet; raises Incomplete where it must not go by now."""


@dataclass(frozen=True, slots=True)
class Cleared:
    """What was removed: files of the location, without records, and their bytes."""

    files: int
    size: int


def check_alone(store: Store, run: str, location: str) -> None:
    """Raises ConfigError where the names of a location may be another run's: names come from whoever can write to the store."""
    parts = checked_path(run).split("/")
    if location in (CONSOLIDATED, OURS) or {CONSOLIDATED, OURS} & set(parts):
        raise ConfigError(f"{run}/{location}: has a name that the store itself uses", hint=_HINT)
    inside = [f"{run}/{CONSOLIDATED}/{OURS}/", *(f"{p}{OURS}/" for p in _own(run, location))]
    around = [records_prefix("/".join(parts[:i]), parts[i]) for i in range(1, len(parts))]
    for prefix in (*inside, *around):
        if other := next(iter(store.names(prefix)), None):
            raise ConfigError(f"{run}/{location}: {other.name} is of another run, whose files would go with it", hint=_HINT)


_HINT = "give runs names that do not lie in each other; this location is left alone"


def shards(store: Store, run: str, location: str) -> Iterator[Entry]:
    """The trainer's own files, copies beside them too, and whatever else was written under their names.  Raises ConfigError if there is a run among them."""
    yield from _listed(store, (f"{run}/{location}/", f"{records_prefix(run, location)}files/"))


def files(store: Store, run: str, location: str, scope: Scope) -> list[Entry]:
    """All that has to go, in the order in which it goes.  Raises ConfigError."""
    found = [*shards(store, run, location)]
    if scope == "location":
        found += _listed(store, (consolidated_prefix(run, location),))
    return sorted(found, key=lambda e: (not _opens(e.name), e.name))


def clear(store: Store, run: str, location: str, scope: Scope, told: Told, *, sure: Sure) -> Cleared:
    """Remove the files; raises StoreError, ConfigError where it may not, and what ``sure`` raises.  Calling it again goes on."""
    check_alone(store, run, location)
    count = size = 0
    for i in range(_LAST_TO_SEE):
        left = files(store, run, location, scope)
        if not i:
            sure()
        if not left:
            break
        for entry in left:
            store.delete(entry.name)
            told(entry.size)
        count, size = count + len(left), size + sum(e.size for e in left)
    return Cleared(count, size)


def tidy(store: Store, gone: Iterable[str]) -> None:
    """With the names of files that are gone already, the directories that whoever died over them has left empty go."""
    for name in {name.rpartition("/")[0]: name for name in gone}.values():
        store.delete(name)


def forget(store: Store, run: str, location: str, manifests: Mapping[str, Manifest]) -> bool:
    """Remove its records but for the tombstones; whether that was done: not while there are files.

    ``manifests``: all of its checkpoint's name, in every location.  Those that these have taken back would count again without them, so they go before.
    """
    if files(store, run, location, "location"):
        return False
    here = {name for name, m in manifests.items() if m.location == location}
    for name in _taken_back(here, manifests):
        store.delete(name)
    prefix = records_prefix(run, location)
    last: list[str] = []
    for entry in [*store.names(prefix)]:
        parsed = parse_record_name(entry.name)
        if parsed is None and entry.name.startswith(f"{prefix}sending/"):
            continue  # of the checkpoint's other locations, too
        if parsed is not None and parsed.kind == "manifest":
            last.append(entry.name)
        elif parsed is None or parsed.kind != "tombstone":
            store.delete(entry.name)
    for name in last:
        store.delete(name)
    return True


def _taken_back(here: Iterable[str], manifests: Mapping[str, Manifest]) -> list[str]:
    """Names in other locations, the earliest first."""
    found: dict[str, None] = {}
    to_do = list(here)
    while to_do:
        m = manifests[to_do.pop()]
        older = [n for n in m.supersedes if n in manifests and manifests[n].node == m.node and n not in found]
        found.update(dict.fromkeys(older))
        to_do += older
    return [name for name in reversed(found) if manifests[name].location not in {manifests[h].location for h in here}]


def _own(run: str, location: str) -> tuple[str, ...]:
    return f"{run}/{location}/", consolidated_prefix(run, location)


def _listed(store: Store, prefixes: Iterable[str]) -> Iterator[Entry]:
    for prefix in prefixes:
        for entry in store.names(prefix):
            if OURS in entry.name.removeprefix(prefix).split("/"):
                raise ConfigError(f"{entry.name}: a run lies in {prefix}, and would go with it", hint=_HINT)
            yield entry


def _opens(name: str) -> bool:
    base = name.rpartition("/")[2]
    return base in _OPENERS or base.endswith(".index.json")
