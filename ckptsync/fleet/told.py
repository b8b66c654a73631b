"""What the nodes of a store say of themselves: their heartbeats and facts, read again where they have changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from ckptsync.errors import Corrupt, NotFound
from ckptsync.fleet import facts, heartbeat
from ckptsync.fleet.facts import Facts
from ckptsync.fleet.heartbeat import FACTS, LIMIT, Heartbeat
from ckptsync.records.names import OURS
from ckptsync.stores.contract import Entry, Store, read_all


@dataclass(frozen=True, slots=True)
class Known:
    """A file beside others in ``.ckptsync/nodes``, and what it says."""

    entry: Entry
    said: Heartbeat | Facts | Corrupt

    @property
    def name(self) -> str:
        """The node's id, and ``~head`` where a head without a worker speaks."""
        return self.entry.name.rpartition("/")[2].removesuffix(FACTS).removesuffix(".json")


@dataclass(frozen=True, slots=True)
class Told:
    """By the names of their files in the store: what `told` takes again."""

    files: Mapping[str, Known] = field(default_factory=dict)

    @property
    def hearts(self) -> tuple[Known, ...]:
        """All heartbeats, by name; those that cannot be read are their errors."""
        return tuple(known for name, known in sorted(self.files.items()) if not name.endswith(FACTS))

    @property
    def facts(self) -> dict[str, Facts]:
        """Those that can be read, by `Known.name`."""
        return {known.name: known.said for known in self.files.values() if isinstance(known.said, Facts)}

    @property
    def unreadable_facts(self) -> dict[str, Corrupt]:
        """Why those that cannot be read cannot, by `Known.name`."""
        return {
            known.name: known.said for name, known in self.files.items() if name.endswith(FACTS) and isinstance(known.said, Corrupt)
        }

    def now(self, machine: str, clock: float) -> float:
        """The time on the store's clock, from this machine's ``clock``; never before the newest heartbeat."""
        known = [(k.entry, k.said) for k in self.hearts if isinstance(k.said, Heartbeat)]
        return max(heartbeat.store_now(known, machine, clock), max((entry.mtime for entry, _ in known), default=0.0))


Each = Callable[[Callable[[Entry], Known | None], Iterable[Entry]], Iterable[Known | None]]
"""As `map`; a caller with threads gives its pool's, since a distant store is waited for."""


def told(store: Store, before: Told | None = None, each: Each = map) -> Told:
    """Now; raises StoreError.  A file of the same size and time is not read again."""
    last = before.files if before else {}
    entries = [entry for entry in store.names(f"{OURS}/nodes/") if entry.name.endswith(".json")]
    same = {e.name: last[e.name] for e in entries if e.name in last and last[e.name].entry == e}
    read = each(lambda entry: _read(store, entry), [e for e in entries if e.name not in same])
    return Told(same | {known.entry.name: known for known in read if known})


def _read(store: Store, entry: Entry) -> Known | None:
    decode = facts.decode if entry.name.endswith(FACTS) else heartbeat.decode
    try:
        return Known(entry, decode(entry.name, read_all(store, entry.name, LIMIT)))
    except Corrupt as e:
        return Known(entry, e)
    except NotFound:
        return None  # gone since it was listed
