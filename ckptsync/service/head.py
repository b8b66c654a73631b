"""The roles of head and verifier: each look reads the catalogue and gives child processes what is due.

Apart from the worker, which does without all that this imports; and without what merges and verifies, which only the children import.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator

from ckptsync.catalogue import kept
from ckptsync.catalogue.reading import read
from ckptsync.catalogue.summary import Catalogue
from ckptsync.config.schema import Config, RetentionConfig
from ckptsync.head.errands import ANY_RUN, errands
from ckptsync.head.rules import Rules
from ckptsync.service.alerts import monitor
from ckptsync.service.children import Children, Order, Task, Tasks
from ckptsync.service.log import Line, pairs
from ckptsync.service.overview import Overseer, patience
from ckptsync.service.periodic import Outcome, Periodic
from ckptsync.stores.contract import Store
from ckptsync.verify.due import Schedule
from ckptsync.verify.waiting import waiting

KEEP_EVERY = 600.0  # seconds between two writings of what was read of the store: ten thousand checkpoints are 12 MB
RETAIN_EVERY = 600.0  # seconds between two looks at what is to go: a grace is a day


class HeadRoles:
    """``works``: the periodic work of those of the roles that a configuration names; ``monitor``: the look at everything."""

    def __init__(self, config: Config, node: str, store: Store, fatal: Callable[[BaseException], None]) -> None:
        self.children = Children(config)
        self.catalogues = Catalogues(store)
        self.monitor = monitor(config, node, Overseer(store, self.catalogues.recent, patience(config)), fatal)
        self._config, self._store = config, store
        self._schedule = Schedule(config.verify.level, config.verify.period)
        self._merges = Tasks(self.children, config, config.head.jobs, self._hint)
        self._proofs = Tasks(self.children, config, 1, self._hint)
        self._retentions = Tasks(self.children, config, 1)
        self._hinted: list[Periodic] = []
        if "head" in config.roles:
            self._hinted.append(Periodic("head", config.head.every, self.consolidate, fatal))
        retaining = "head" in config.roles and has_rules(config.retention)
        retention = [Periodic("retention", RETAIN_EVERY, self.retain, fatal)] if retaining else []
        if "verifier" in config.roles:
            self._hinted.append(Periodic("verifier", config.verify.tick, self.verify, fatal))
        self.works = (*self._hinted, *retention, Periodic("overview", config.head.every, self.monitor.look, fatal))

    def consolidate(self) -> Outcome:
        """What is complete is consolidated, what is damaged of it is made again."""
        catalogue = self.catalogues.read()
        due = errands(catalogue.summaries, self._given_config)
        queue = self._merges.begin(Task(Order("consolidate", e.run, e.location, e.size), e.key, e.lasts) for e in due)
        lines = (*catalogue_lines(catalogue), *self._merges.lines())
        return Outcome(lines, queue, (*self._merges.errors(), *_faults(catalogue)))

    def verify(self) -> Outcome:
        """What is due is verified, one location at a time, repairs and new ones before old ones."""
        catalogue = self.catalogues.read()
        queue = self._proofs.begin(self._to_verify(catalogue, time.time()))
        return Outcome(self._proofs.lines(), queue, (*self._proofs.errors(), *_faults(catalogue)))

    def retain(self) -> Outcome:
        """Now and then, what the rules of retention let go of goes: whether anything is due, the child finds out."""
        queue = self._retentions.begin([Task(Order("retain", now=time.monotonic()), "")])
        return Outcome(self._retentions.lines(), queue, self._retentions.errors())

    def _hint(self) -> None:
        """A child has ended: there may be more to do."""
        for work in self._hinted:
            work.hint()

    def _to_verify(self, catalogue: Catalogue, now: float) -> Iterator[Task]:
        for one in waiting(self._store, catalogue, self._schedule, now):
            seen = one.location
            order = Order("verify", seen.run, seen.location, seen.size + seen.model_size, one.level, now)
            yield Task(order, f"{one.level} {seen.state}")

    def _given_config(self, run: str) -> str:
        """The files of the directory that has a run's configuration, with sizes and times: what is added there is looked for in every model that lacks it."""
        given = self._config.head.config_from
        directory = given.get(run) or given.get(ANY_RUN)
        if not directory:
            return ""
        try:
            with os.scandir(directory) as entries:
                found = sorted((e.name, (s := e.stat()).st_size, s.st_mtime_ns) for e in entries)
        except OSError as e:  # whoever merges says what is wrong with it
            return f"{directory}: {e.strerror}"
        return f"{directory}: {found}"


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


def has_rules(said: RetentionConfig) -> bool:
    """Whether anything may ever go."""
    return any(said.of(run) != Rules() for run in ("", *said.runs))


def catalogue_lines(found: Catalogue) -> Iterator[Line]:
    """Say the status of each location, and what is wrong with the records of others."""
    for seen in found.summaries:
        detail = "; ".join(seen.evidence) if seen.status in ("CONFLICT", "RETIRED") else ""
        yield Line(
            f"location {seen.run}/{seen.location}",
            pairs(phase=seen.status.lower(), run=seen.run, location=seen.location, detail=detail),
        )
    for fault in found.faults:
        yield Line(f"fault {fault.name}", pairs(phase="unreadable", record=fault.name, error=fault.error), is_error=True)


def _faults(catalogue: Catalogue) -> Iterator[str]:
    return (f"{fault.name}: {fault.error}" for fault in catalogue.faults)
