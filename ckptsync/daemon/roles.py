"""What each role's tick is: from a configuration to the roles at work, and from their results to log lines."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

from ckptsync.config.runs import OutputDirectories, output_directories
from ckptsync.config.values import Config, WorkerConfig
from ckptsync.daemon import told
from ckptsync.daemon.lock import Locks
from ckptsync.daemon.phases import Line, pairs
from ckptsync.daemon.served import remember
from ckptsync.daemon.working import Outcome, Role, Working
from ckptsync.errors import ConfigError, StoreError
from ckptsync.head import consolidate
from ckptsync.head.consolidate import HeadOptions
from ckptsync.merge.plan import Options
from ckptsync.stores.contract import Store
from ckptsync.verify import tick as verifying
from ckptsync.verify.due import Schedule
from ckptsync.walk import OURS
from ckptsync.watch import Watch, watch
from ckptsync.worker.options import RunDir, WorkerOptions
from ckptsync.worker.tick import Worker

log = logging.getLogger(__name__)


@contextlib.contextmanager
def roles(config: Config, node: str, store: Store, fatal: Callable[[BaseException], None]) -> Iterator[Working]:
    """The roles that a configuration names; raises ConfigError where one cannot begin."""
    with contextlib.ExitStack() as stack:
        found: list[Role] = []
        if "worker" in config.roles:
            working = Watching(config, node, store)
            stack.callback(working.close)
            worker = Role("worker", config.worker.scan_every, working.look, fatal)
            working.begin(worker.tick.hint)
            found.append(worker)
        if "head" in config.roles:
            found.append(Role("head", config.head.every, head(config, store), fatal))
        if "verifier" in config.roles:
            proving = Proving(config, store)
            verifier = Role("verifier", config.verify.tick, proving.look, fatal)
            proving.hint = verifier.tick.hint
            found.append(verifier)
        yield Working(found)


class Watching:
    """The worker role: a `Worker` for the output directories that are there now, and hints from them."""

    def __init__(self, config: Config, node: str, store: Store) -> None:
        self._config, self._node, self._store = config, node, store
        self._locks = Locks(node)
        self._watch: Watch | None = None
        self._runs: tuple[RunDir, ...] = ()
        self._problems: tuple[str, ...] = ()
        self._worker: Worker | None = None
        self._hint: Callable[[], None] = lambda: None

    def begin(self, hint: Callable[[], None]) -> None:
        """Look which directories there are; raises ConfigError if one of them is another worker's, or none of them may be used."""
        self._hint = hint
        for run in self._found().runs:
            with contextlib.suppress(StoreError):  # one that cannot be written to is a problem of its own, which every tick tells
                self._locks.hold(Path(run.path) / OURS)
        self._renew()
        if self._problems and not self._runs:
            raise ConfigError("; ".join(self._problems), hint="see worker.runs in the configuration")

    def look(self) -> Outcome:
        """One tick."""
        self._renew()
        problems = [Line(f"problem {text}", pairs(phase="left-out", error=text), is_error=True) for text in self._problems]
        if self._worker is None:
            return Outcome(tuple(problems), errors=self._problems)
        result = self._worker.tick(time.monotonic())
        return Outcome((*problems, *told.worker(result)), result.queue, (*self._problems, *result.errors))

    def close(self) -> None:
        """Give back watches and locks."""
        if self._watch:
            self._watch.close()
        self._locks.close()

    def _found(self) -> OutputDirectories:
        return output_directories(self._config.worker.runs, self._store.url)

    def _renew(self) -> None:
        """Take in directories that have appeared; one that cannot be had holds up no other."""
        found = self._found()
        runs, problems = [], list(found.problems)
        for run in found.runs:
            try:
                self._locks.hold(Path(run.path) / OURS)
                remember(Path(run.path) / OURS, self._store.url)
                runs.append(RunDir(run.name, Path(run.path)))
            except (ConfigError, StoreError) as e:  # noqa: PERF203 - a few directories
                problems.append(str(e))
        self._problems = tuple(problems)
        if tuple(runs) != self._runs:
            self._work_on(tuple(runs))
        elif self._watch:
            self._watch.refresh()

    def _work_on(self, runs: tuple[RunDir, ...]) -> None:
        options = worker_options(self._config, self._node, runs)
        self._worker = Worker(options, self._store) if runs else None
        if self._watch:
            self._watch.close()
        self._watch = watch([str(run.path) for run in runs], self._hint)
        self._runs = runs


def worker_options(config: Config, node: str, runs: tuple[RunDir, ...]) -> WorkerOptions:
    """What a worker is told of a configuration: every key of ``worker`` that is not about finding runs, and how many threads."""
    keys = {f.name for f in fields(WorkerOptions)} & {f.name for f in fields(WorkerConfig)} - {"runs"}
    return WorkerOptions(node, runs, threads=config.limits.threads, **{key: getattr(config.worker, key) for key in keys})


def head(config: Config, store: Store) -> Callable[[], Outcome]:
    """The head's tick."""
    options = HeadOptions(Options(config.head.dtype, config.head.max_shard_size), config.head.config_from)
    memory = consolidate.Memory()

    def look() -> Outcome:
        result = consolidate.tick(store, options, time.monotonic(), memory)
        return Outcome(tuple(told.head(result)), errors=told.head_errors(result))

    return look


class Proving:
    """The verifier role: a tick proves one place; while others wait, the next tick comes at once."""

    def __init__(self, config: Config, store: Store) -> None:
        self._store, self._schedule = store, Schedule(config.verify.level, config.verify.every)
        self.hint: Callable[[], None] = lambda: None

    def look(self) -> Outcome:
        """One tick."""
        result = verifying.tick(self._store, self._schedule, time.time())
        if result.report and result.waiting:
            self.hint()
        return Outcome(tuple(told.verifier(result)), errors=told.verifier_errors(result))
