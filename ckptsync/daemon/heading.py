"""The roles of the head: each tick looks at the catalogue and sends child processes on errands.

Apart from the other roles, since a worker alone does without all that this imports; and without what merges and verifies, which only the children
import.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ckptsync.catalogue import kept
from ckptsync.catalogue.reading import read
from ckptsync.catalogue.summary import Catalogue
from ckptsync.config.schema import Config, RetentionConfig
from ckptsync.daemon import told_head as told
from ckptsync.daemon.children import Children
from ckptsync.daemon.errands import Errands, Task
from ckptsync.daemon.orders import Order
from ckptsync.daemon.working import Outcome, Role
from ckptsync.head.errands import ANY_RUN, errands
from ckptsync.head.rules import Rules
from ckptsync.stores.contract import Store
from ckptsync.verify.due import Schedule
from ckptsync.verify.waiting import waiting

KEEP_EVERY = 600.0  # seconds between two writings of what was read of the store: ten thousand checkpoints are 12 MB
RETAIN_EVERY = 600.0  # seconds between two looks at what is to go: a grace is a day


class Catalogues:
    """One catalogue for all roles of the head: what one has read the other need not read again; nor need the next start, but for the last minutes."""

    def __init__(self, store: Store) -> None:
        self._store, self._cache, self._lock = store, kept.load(store.url), threading.Lock()
        self._keep_at = 0.0
        self._unseen: Catalogue | None = None

    def read(self) -> Catalogue:
        """As it is now."""
        with self._lock:
            found = self._unseen = read(self._store, self._cache)
            if time.monotonic() >= self._keep_at:
                kept.save(self._store.url, self._cache)
                self._keep_at = time.monotonic() + KEEP_EVERY
            return found  # another thread may have taken what is unseen by now

    def recent(self) -> Catalogue:
        """What was read since the last call, or, if nothing was, as it is now."""
        seen, self._unseen = self._unseen or self.read(), None
        return seen


class Heading:
    """The head role: what is complete is consolidated, what is damaged of it is made again."""

    def __init__(self, config: Config, catalogues: Catalogues, children: Children) -> None:
        self._config, self._catalogues = config, catalogues
        self._errands = Errands(children, config, config.head.jobs)

    def hinted(self, hint: Callable[[], None]) -> None:
        """Whom to tell when there may be more to do."""
        self._errands.hint = hint

    def look(self) -> Outcome:
        """One tick."""
        catalogue = self._catalogues.read()
        queue = self._errands.begin(self._tasks(catalogue))
        faults = tuple(f"{fault.name}: {fault.error}" for fault in catalogue.faults)
        return Outcome((*told.catalogue(catalogue), *self._errands.lines()), queue, (*self._errands.errors(), *faults))

    def _tasks(self, catalogue: Catalogue) -> Iterable[Task]:
        for found in errands(catalogue.summaries, self._configured):
            yield Task(Order("consolidate", found.run, found.location, found.size), found.key, found.lasts)

    def _configured(self, run: str) -> str:
        given = self._config.head.config_from
        directory = given.get(run) or given.get(ANY_RUN)
        return _listed(directory) if directory else ""


class Proving:
    """The verifier role: what is due is verified, one location at a time, repairs and new ones before old ones."""

    def __init__(self, config: Config, store: Store, catalogues: Catalogues, children: Children) -> None:
        self._store, self._catalogues = store, catalogues
        self._schedule = Schedule(config.verify.level, config.verify.period)
        self._errands = Errands(children, config, 1)

    def hinted(self, hint: Callable[[], None]) -> None:
        """Whom to tell when there may be more to do."""
        self._errands.hint = hint

    def look(self) -> Outcome:
        """One tick."""
        catalogue, now = self._catalogues.read(), time.time()
        queue = self._errands.begin(self._tasks(catalogue, now))
        faults = tuple(f"{fault.name}: {fault.error}" for fault in catalogue.faults)
        return Outcome(self._errands.lines(), queue, (*self._errands.errors(), *faults))

    def _tasks(self, catalogue: Catalogue, now: float) -> Iterator[Task]:
        for one in waiting(self._store, catalogue, self._schedule, now):
            seen = one.location
            order = Order("verify", seen.run, seen.location, seen.size + seen.model_size, one.level, now)
            yield Task(order, f"{one.level} {seen.state}")


class Retaining:
    """Of the head role: now and then, what the rules of retention let go of goes."""

    def __init__(self, config: Config, children: Children) -> None:
        self._errands = Errands(children, config, 1)

    def look(self) -> Outcome:
        """One tick: whether anything is due, the child finds out."""
        queue = self._errands.begin([Task(Order("retain", now=time.monotonic()), "")])
        return Outcome(self._errands.lines(), queue, self._errands.errors())


@dataclass(frozen=True, slots=True)
class Heads:
    """The roles, the children that do their work, and what the store holds."""

    roles: tuple[Role, ...]
    children: Children
    catalogues: Catalogues


def of_head(config: Config, store: Store, fatal: Callable[[BaseException], None]) -> Heads:
    """Those of the roles of the head that a configuration names."""
    children, catalogues = Children(config), Catalogues(store)
    roles: list[Role] = []

    def hint() -> None:
        for role in roles:
            role.tick.hint()

    if "head" in config.roles:
        heading = Heading(config, catalogues, children)
        heading.hinted(hint)
        roles.append(Role("head", config.head.every, heading.look, fatal))
        if has_rules(config.retention):
            roles.append(Role("retention", RETAIN_EVERY, Retaining(config, children).look, fatal))
    if "verifier" in config.roles:
        proving = Proving(config, store, catalogues, children)
        proving.hinted(hint)
        roles.append(Role("verifier", config.verify.tick, proving.look, fatal))
    return Heads(tuple(roles), children, catalogues)


def has_rules(said: RetentionConfig) -> bool:
    """Whether anything may ever go."""
    return any(said.of(run) != Rules() for run in ("", *said.runs))


def _listed(directory: str) -> str:
    """Its files' names, sizes and times: what is added there is looked for in every model that lacks it."""
    try:
        with os.scandir(directory) as entries:
            found = sorted((e.name, (s := e.stat()).st_size, s.st_mtime_ns) for e in entries)
    except OSError as e:  # whoever merges says what is wrong with it
        return f"{directory}: {e.strerror}"
    return f"{directory}: {found}"
