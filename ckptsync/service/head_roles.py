"""The roles head and verifier: each scan reads the catalogue and starts the jobs that are due.

A job is a command in a child process.  Nothing that merges or verifies is imported here.
"""

from __future__ import annotations

import os
import shlex
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timezone
from functools import partial

from apscheduler.schedulers.background import BackgroundScheduler

from ckptsync.catalogue.cached import Cache, read_catalogue
from ckptsync.catalogue.location_summary import Catalogue
from ckptsync.config.schema import Config
from ckptsync.events.due import TRIES, DueEvent, Since, due_events
from ckptsync.events.handling import register_events
from ckptsync.head.due_jobs import (
    ANY_RUN,
    Job,
    JobKind,
    VerifyPolicy,
    head_jobs,
    verify_jobs_in_store,
)
from ckptsync.records.progress import Progress
from ckptsync.records.store_paths import checkpoint_of
from ckptsync.service.alert_channels import open_channels
from ckptsync.service.jobs import Jobs
from ckptsync.service.log import Line, pairs
from ckptsync.service.monitor import Monitor, OverviewReader, patience
from ckptsync.service.tasks import NEVER, Fatal, Outcome, Task
from ckptsync.stores.contract import Store

SAVE_EVERY = 600.0  # seconds between two saves of the cache: ten thousand checkpoints are 12 MB
EVENTS_AT_ONCE = 4  # commands; of one run, each event is run for one checkpoint at a time
MOST_GIVEN_UP = 100  # that are shown
RETAIN_EVERY = 600.0  # seconds between two runs of retention: its grace is a day


class HeadRoles:
    """``tasks``: the periodic work of the roles of a configuration.

    ``monitor``: makes the overview.
    """

    def __init__(self, config: Config, node: str, store: Store, fatal: Fatal) -> None:
        most: dict[JobKind, int] = {"consolidate": config.head.jobs, "verify": 1, "retain": 1}
        most["event"] = EVENTS_AT_ONCE
        self.jobs = Jobs(config, most, self._ended)
        self.catalogues = Catalogues(store)
        recent = partial(self.catalogues.read, config.head.every)
        overviews = OverviewReader(store, recent, patience(config))
        self.monitor = Monitor(overviews, open_channels(config, node, fatal))
        self._config, self._store = config, store
        self._policy = VerifyPolicy(config.verify.level, config.verify.period)
        self._hinted: list[Task] = []
        self._since: Since = {}
        self._given_up: tuple[DueEvent, ...] = ()
        if "head" in config.roles:
            self._hinted.append(Task("head", config.head.every, self.consolidate, fatal))
        if "verifier" in config.roles:
            self._hinted.append(Task("verifier", config.verify.tick, self.verify, fatal))
        self.tasks = list(self._hinted)
        if "head" in config.roles and config.retention.has_rules:
            self.tasks.append(Task("retention", RETAIN_EVERY, self.retain, fatal))
        self.tasks.append(Task("overview", config.head.every, self.monitor.check, fatal))

    def consolidate(self) -> Outcome:
        """Begin merges of what is complete, repairs of what is damaged of models, and events."""
        catalogue = self.catalogues.read()
        queue = self.jobs.begin("consolidate", head_jobs(catalogue.summaries, self._given_config))
        lines = (*catalogue_lines(catalogue), *self.jobs.lines("consolidate"))
        errors = (*self.jobs.errors("consolidate"), *_faults(catalogue))
        if not self._config.events:
            return Outcome(lines, queue, errors)
        events = self._begin_events(catalogue)
        lines, errors = (*lines, *events.lines), (*errors, *events.errors)
        return Outcome(lines, (*queue, *events.queue), errors)

    def _begin_events(self, catalogue: Catalogue) -> Outcome:
        """Begin the events that are due.  Raises StoreError."""
        definitions = self._config.events
        if len(self._since) < sum(len(d.on) for d in definitions):
            self._since = register_events(self._store, definitions)
        events = due_events(definitions, catalogue.summaries, self._since)
        self._given_up = events.given_up[:MOST_GIVEN_UP]
        queue = self.jobs.begin("event", map(_event_job, events.now))
        lines = [*self.jobs.lines("event"), *map(_given_up_line, self._given_up)]
        errors = [f"{_event_job(e).subject}: given up: {e.error}" for e in self._given_up]
        return Outcome(tuple(lines), queue, (*self.jobs.errors("event"), *errors))

    def running(self) -> tuple[Progress, ...]:
        """Return what jobs do now, which ones wait or failed, and which events were given up."""
        given_up = (
            Progress(
                kind="event",
                state="failed",
                run=e.run,
                checkpoint=checkpoint_of(e.location),
                location=e.location,
                reason=f"given up after {TRIES} tries: {e.error}",
                hint=_repeat(e),
                name=f"{e.definition.name} ({e.happened.event})",
            )
            for e in self._given_up
        )
        return (*self.jobs.running(), *self.jobs.waiting(), *given_up)

    def verify(self) -> Outcome:
        """Begin the verification of what is due, repairs and new locations before old ones."""
        catalogue = self.catalogues.read()
        due = verify_jobs_in_store(self._store, catalogue, self._policy, time.time())
        queue = self.jobs.begin("verify", due)
        errors = (*self.jobs.errors("verify"), *_faults(catalogue))
        return Outcome(self.jobs.lines("verify"), queue, errors)

    def retain(self) -> Outcome:
        """Begin retention: whether anything is due, the child finds out."""
        queue = self.jobs.begin("retain", [Job("retain")])
        return Outcome(self.jobs.lines("retain"), queue, self.jobs.errors("retain"))

    def _ended(self, job: Job) -> None:
        """Look again after a job has ended: there may be more to do."""
        if job.kind != "retain":
            for work in self._hinted:
                work.hint()

    def _given_config(self, run: str) -> str:
        """Return a key that changes with the files of a run's configuration.

        Those are the files that an operator gives.
        """
        given = self._config.head.config_from
        directory = given.get(run) or given.get(ANY_RUN)
        if not directory:
            return ""
        try:
            with os.scandir(directory) as entries:
                found = sorted((e.name, (s := e.stat()).st_size, s.st_mtime_ns) for e in entries)
        except OSError as e:  # the merge reports what is wrong with it
            return f"{directory}: {e.strerror}"
        return f"{directory}: {found}"


class Catalogues:
    """One catalogue for all tasks of the head; the next start reads only what has changed."""

    def __init__(self, store: Store) -> None:
        self._store, self._cache, self._lock = store, Cache.load(store.url), threading.Lock()
        self._last: tuple[float, Catalogue] | None = None
        self._save_at = 0.0

    def read(self, age: float = 0.0) -> Catalogue:
        """Return the catalogue as it was at most ``age`` seconds ago."""
        with self._lock:
            now = time.monotonic()
            if self._last is not None and now - self._last[0] < age:
                return self._last[1]
            found = read_catalogue(self._store, self._cache)
            self._last = now, found
            if now >= self._save_at:
                self._cache.save(self._store.url)
                self._save_at = now + SAVE_EVERY
            return found


def _event_job(e: DueEvent) -> Job:
    key = f"{e.happened.of} {e.definition.digest}"
    name, event, seconds = e.definition.name, e.happened.event, e.definition.timeout
    return Job("event", e.run, e.location, key=key, name=name, event=event, seconds=seconds)


def _repeat(e: DueEvent) -> str:
    where = shlex.join([f"{e.run}/{e.location}", e.definition.name])
    return f"`ckptsync events run {where} -c FILE` runs it by hand"


def _given_up_line(e: DueEvent) -> Line:
    subject = _event_job(e).subject
    text = pairs(
        phase="given-up", subject=subject, tries=e.failures, error=e.error, hint=_repeat(e)
    )
    return Line(f"given-up {subject}", text, level="error")


@contextmanager
def repeated(tasks: Iterable[Task]) -> Iterator[None]:
    """Have APScheduler ask for each of these tasks every ``every`` seconds within the block.

    It counts wall time: whoever sees that clock jump asks for all of them.
    """
    defaults = {"misfire_grace_time": None, "coalesce": True}
    scheduler = BackgroundScheduler(job_defaults=defaults, timezone=timezone.utc, daemon=True)
    for task in tasks:
        scheduler.add_job(task.at, "interval", [0.0], seconds=task.every)
        task.every = NEVER
    scheduler.start()
    try:
        yield
    finally:
        scheduler.shutdown(wait=False)


def catalogue_lines(found: Catalogue) -> Iterator[Line]:
    """Yield a line for the status of each location, and for each record that cannot be read."""
    for seen in found.summaries:
        detail = "; ".join(seen.evidence) if seen.status in ("CONFLICT", "RETIRED") else ""
        where = {"run": seen.run, "location": seen.location}
        text = pairs(phase=seen.status.lower(), **where, detail=detail)
        yield Line(f"location {seen.run}/{seen.location}", text)
    for fault in found.faults:
        text = pairs(phase="unreadable", record=fault.name, error=fault.error)
        yield Line(f"fault {fault.name}", text, level="error")


def _faults(catalogue: Catalogue) -> Iterator[str]:
    return (fault.text for fault in catalogue.faults)
