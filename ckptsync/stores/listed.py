"""The files of a checkpoint in a store of any kind: what is below one place there, as it was listed once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol, runtime_checkable

from ckptsync.errors import ConfigError, Incomplete, NotFound
from ckptsync.stores.beneath import Passed
from ckptsync.stores.contract import Entry, Store, read_all
from ckptsync.stores.opening import has_root
from ckptsync.stores.tree import MERGING, MERGING_LIMIT, PassedOver, check_ended, is_no_content, state


@runtime_checkable
class Telling(Protocol):
    """A store that meets what is no file as it lists."""

    def telling(self, passed: Passed) -> Iterator[Entry]:
        """All `names`; ``passed`` is told of what is left out."""
        ...


class ListedFiles:
    """The files of ``store`` as they were at construction, all of them; ``root`` is the store's URL.

    ``is_dated``: the store keeps the times that files had where they were written; else nothing is concluded from them.  Raises ConfigError if
    there is nothing, StoreError.
    """

    def __init__(self, store: Store, *, is_dated: bool = False) -> None:
        self._store, self._is_dated = store, is_dated
        self.root = store.url
        if not has_root(store):
            raise ConfigError(f"{self.root}: no such directory, a checkpoint's directory wanted", hint="is the path right?")
        self._odd = PassedOver()
        listed = store.telling(self._odd.add) if isinstance(store, Telling) else store.names("")
        self._all = {entry.name: entry for entry in listed}
        self._seen = {name: entry for name, entry in self._all.items() if not any(map(is_no_content, name.split("/")))}
        if MERGING in self._all:
            check_ended(self.root, lambda: read_all(store, MERGING, MERGING_LIMIT))
        if not self._seen:
            self._odd.check_not_links(self.root)
        if not self._all:
            raise ConfigError(f"{self.root}: nothing is there, a checkpoint's directory wanted", hint="is the URL right?")
        self._sizes = {name: entry.size for name, entry in self._seen.items()}

    def sizes(self) -> Mapping[str, int]:
        """As they were at construction."""
        return self._sizes

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """As `Files` says; raises StoreError where the store does not answer."""
        if name not in self._sizes:
            raise Incomplete(f"{name}: not in {self.root}")
        try:
            self._store.read_into(name, start, out)
        except NotFound as e:
            raise Incomplete(f"{name}: no longer in {self.root}") from e

    def written(self) -> Mapping[str, float]:
        """As `Tree` says."""
        return {name: entry.mtime for name, entry in self._seen.items()} if self._is_dated else {}

    def changed(self) -> tuple[str, ...]:
        """As `Tree` says: what the store lists now with another size or time, or no longer."""
        now = {entry.name: entry for entry in self._store.names("")}
        return tuple(name for name, entry in self._seen.items() if now.get(name) != entry)

    def state(self) -> str:
        """As `Tree` says."""
        return state((name, entry.size, entry.mtime) for name, entry in self._seen.items())

    def holds(self, name: str) -> bool:
        """As `Tree` says."""
        return name in self._all

    def passed_over(self) -> tuple[str, ...]:
        """As `Tree` says: an object store has files alone."""
        return self._odd.lines()
