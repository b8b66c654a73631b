"""The roles head and verifier: they read the catalogue regularly and start the jobs that are due.

A job is a ckptsync command in a child process, so this process only decides, and imports nothing
that merges or verifies.  All tasks share one cached catalogue (`Catalogues`).
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
    """The periodic ``tasks`` of the roles head and verifier, and what they share.

    ``jobs`` runs the child processes; ``monitor`` computes the overview and raises alarms.
    """

    def __init__(self, config: Config, node: str, store: Store, fatal: Fatal) -> None:
        """Make the tasks of the configured roles; start none.

        Reads the catalogue cache and the sent alarms of this machine, and has a child process check
        the URLs of `alerts`.  Raises ConfigError if it does not accept one, StoreError if it fails.
        """
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
        """Begin merges of complete checkpoints, repairs and completions of models, and events.

        Reads the catalogue; returns its lines, the due and running jobs, and failures.  Raises
        StoreError.
        """
        catalogue = self.catalogues.read()
        queue = self.jobs.begin(
            "consolidate", head_jobs(catalogue.summaries, self._config_files_key)
        )
        lines = (*catalogue_lines(catalogue), *self.jobs.lines("consolidate"))
        errors = (*self.jobs.errors("consolidate"), *_faults(catalogue))
        if not self._config.events:
            return Outcome(lines, queue, errors)
        events = self._begin_events(catalogue)
        lines, errors = (*lines, *events.lines), (*errors, *events.errors)
        return Outcome(lines, (*queue, *events.queue), errors)

    def _begin_events(self, catalogue: Catalogue) -> Outcome:
        """Begin the events that are due; return their log lines and errors, and what waits or runs.

        First registers events that are new in the configuration, in the store.  Keeps, for
        `running`, the first `MOST_GIVEN_UP` that failed too often.  Raises StoreError.
        """
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
        """Return the progress of jobs that run, wait or failed, and of events given up."""
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
        """Begin the due verifications, repaired and new locations first; return as `consolidate`.

        Reads the catalogue.  Raises StoreError.
        """
        catalogue = self.catalogues.read()
        due_jobs = verify_jobs_in_store(self._store, catalogue, self._policy, time.time())
        queue = self.jobs.begin("verify", due_jobs)
        errors = (*self.jobs.errors("verify"), *_faults(catalogue))
        return Outcome(self.jobs.lines("verify"), queue, errors)

    def retain(self) -> Outcome:
        """Begin a retention job, if none runs or waits; return as `consolidate`.

        The child reads the store, and decides what is deleted.
        """
        queue = self.jobs.begin("retain", [Job("retain")])
        return Outcome(self.jobs.lines("retain"), queue, self.jobs.errors("retain"))

    def _ended(self, job: Job) -> None:
        """Hint the tasks after a job other than retention has ended: more may be due."""
        if job.kind != "retain":
            for work in self._hinted:
                work.hint()

    def _config_files_key(self, run: str) -> str:
        """Return a key that changes with the files of `head.config_from` for a run, or for any run.

        It is "" if none is configured.  It is the directory and an error if it cannot be listed.
        """
        directories = self._config.head.config_from
        directory = directories.get(run) or directories.get(ANY_RUN)
        if not directory:
            return ""
        try:
            with os.scandir(directory) as entries:
                files = sorted((e.name, (s := e.stat()).st_size, s.st_mtime_ns) for e in entries)
        except OSError as e:  # the merge reports what is wrong with it
            return f"{directory}: {e.strerror}"
        return f"{directory}: {files}"


class Catalogues:
    """The catalogue of a store, shared by all tasks of the head; its cache survives restarts."""

    def __init__(self, store: Store) -> None:
        """Read the cache of this machine; nothing from the store."""
        self._store, self._cache, self._lock = store, Cache.load(store.url), threading.Lock()
        self._last: tuple[float, Catalogue] | None = None
        self._save_at = 0.0

    def read(self, age: float = 0.0) -> Catalogue:
        """Return the catalogue, read again if the last one is ``age`` seconds old or more.

        Saves the cache every `SAVE_EVERY` seconds. Other threads wait meanwhile.  Raises
        StoreError.
        """
        with self._lock:
            now = time.monotonic()
            if self._last is not None and now - self._last[0] < age:
                return self._last[1]
            catalogue = read_catalogue(self._store, self._cache)
            self._last = now, catalogue
            if now >= self._save_at:
                self._cache.save(self._store.url)
                self._save_at = now + SAVE_EVERY
            return catalogue


def _event_job(due: DueEvent) -> Job:
    """Return the job that runs an event; its key identifies the event and its definition."""
    key = f"{due.happened.of} {due.definition.digest}"
    name, event, seconds = due.definition.name, due.happened.event, due.definition.timeout
    return Job("event", due.run, due.location, key=key, name=name, event=event, seconds=seconds)


def _repeat(due: DueEvent) -> str:
    """Return a hint with the command that runs an event by hand."""
    words = shlex.join([f"{due.run}/{due.location}", due.definition.name])
    return f"`ckptsync events run {words} -c FILE` runs it by hand"


def _given_up_line(due: DueEvent) -> Line:
    """Return the log line of an event that is not tried any more."""
    subject = _event_job(due).subject
    text = pairs(
        phase="given-up", subject=subject, tries=due.failures, error=due.error, hint=_repeat(due)
    )
    return Line(f"given-up {subject}", text, level="error")


@contextmanager
def repeated(tasks: Iterable[Task]) -> Iterator[None]:
    """Make each task due every ``every`` seconds within the block, by APScheduler.

    Sets the tasks' own ``every`` to `NEVER`, also for the time after the block.  APScheduler counts
    wall time, so after a jump of that clock the main loop makes all of them due (`run`).
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


def catalogue_lines(catalogue: Catalogue) -> Iterator[Line]:
    """Yield a line for the status of each location, and an error for each unreadable record."""
    for summary in catalogue.summaries:
        detail = "; ".join(summary.evidence) if summary.status in ("CONFLICT", "RETIRED") else ""
        location = {"run": summary.run, "location": summary.location}
        text = pairs(phase=summary.status.lower(), **location, detail=detail)
        yield Line(f"location {summary.run}/{summary.location}", text)
    for fault in catalogue.faults:
        text = pairs(phase="unreadable", record=fault.name, error=fault.error)
        yield Line(f"fault {fault.name}", text, level="error")


def _faults(catalogue: Catalogue) -> Iterator[str]:
    """Return the texts of the records that cannot be read."""
    return (fault.text for fault in catalogue.faults)
