"""The engine that makes each file of weights in a task of a Ray cluster, which reads from the sources and writes to the destination by itself.

The bytes are those that the threads of one process write.  Through this process go the plan, the sums of what was read, and nothing else.  A task whose
node is lost is done again on another one; what it had written is replaced, or gone on with.  Ray hands values on as pickles between the processes of
one cluster, which trust each other: nothing of a checkpoint is among them but names, places and numbers.

Ray 2: `max_retries` counts what the system loses, not what a task raises (ray.io, "Fault tolerance", "Task fault tolerance").
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckptsync import __version__
from ckptsync.errors import CkptsyncError, ConfigError, StoreError
from ckptsync.formats.zstd_items import unpacked
from ckptsync.merge.consolidate import Ledger, Write, finished
from ckptsync.merge.copying import Copied, Copying, Work
from ckptsync.merge.plan import FilePlan
from ckptsync.merge.prepare import Job
from ckptsync.merge.remote import foresee
from ckptsync.merge.summed import Stretch, SummedFiles
from ckptsync.model import Checksum, Extent, Files

RETRIES = 20  # of one file, after as many lost nodes
MOST_JOBS = 4  # threads of a task: they mostly wait for the store
POLL = 0.5  # seconds between two looks at how far the tasks are
TOLD = 32 << 20  # bytes of which a task says at once that they are made
_NO_CLUSTER = "`ray start --head` starts one; --ray-address names another, or `local` for one of this machine alone"


@dataclass(frozen=True, slots=True)
class Reach:
    """How a task reaches what it reads and where it writes: called on its own node, so both are handed on by their names.

    ``raises``: what they raise for their caller to see, beside CkptsyncError.
    """

    files: Callable[[], Files]
    write: Callable[[], Write]
    raises: tuple[type[Exception], ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """One output file: what a task is told of it."""

    plan: FilePlan
    checksums: frozenset[Checksum]
    work: Work
    version: str = __version__


@dataclass(frozen=True, slots=True)
class Done:
    """What became of it: ``whole`` are the records that were read to their ends, ``stretches`` what was read of others; or ``error``."""

    copied: Copied | None = None
    whole: tuple[Extent, ...] = ()
    stretches: tuple[Stretch, ...] = ()
    error: Exception | None = None


class RayEngine:
    """`Engine` on the cluster at ``address`` (``auto``: the one that this machine is in; ``local``: one that is started here for it).

    Raises ConfigError where there is no Ray or no cluster, StoreError where the cluster is lost, and what a task raises.
    """

    def __init__(self, address: str, reach: Reach) -> None:
        self._address, self._reach = address, reach

    def __call__(
        self, job: Job, files: Files, _write: Write, *, progress: Callable[[int], None], work: Work, ledger: Ledger
    ) -> dict[str, Copied]:
        """As `Engine` says: a task a file."""
        summed = SummedFiles(unpacked(files), job.checksums)
        made: dict[str, Copied] = {}
        with connected(self._address) as ray:
            try:
                for plan, done in _each(ray, [part_of(plan, work) for plan in job.plans], self._reach, progress):
                    made[plan.name] = _taken(done, summed)
                    if len(made) == len(job.plans):
                        summed.finish()
                        ledger.at_last_end()
                    ledger.at_end(plan.name, finished(made[plan.name]))
            except ray.exceptions.RayError as e:
                hint = "look at its nodes, then run the same again: what is there is not made again"
                raise StoreError(f"the Ray cluster {self._address}: {type(e).__name__}: {_first_line(e)}", hint=hint) from e
        return made


def part_of(plan: FilePlan, work: Work) -> Part:
    """With the sums of the records that it reads of."""
    checksums = frozenset(p.checksum for t in plan.tensors for p in t.copy.parts if p.checksum)
    return Part(plan, checksums, replace(work, jobs=min(work.jobs, MOST_JOBS)))


def make(part: Part, reach: Reach, tell: Callable[[int], None]) -> Done:
    """One output file, on whatever node this runs; ``tell`` takes all bytes made so far."""
    if part.version != __version__:
        return Done(
            error=ConfigError(
                f"{socket.gethostname()}: ckptsync {__version__} there, {part.version} here", hint="install the same on all nodes"
            )
        )
    handed_back: tuple[type[Exception], ...] = (CkptsyncError, *reach.raises)
    try:
        files = reach.files()
        foresee(files, [part.plan])
        summed = SummedFiles(unpacked(files), part.checksums)
        copying = Copying(part.plan, summed, _counted(tell), part.work)
        with contextlib.closing(copying.chunks()) as chunks:
            reach.write()(part.plan.name, chunks)
    except handed_back as e:
        return Done(error=e)
    return Done(copying.result(), summed.whole(), summed.stretches())


@contextlib.contextmanager
def connected(address: str) -> Iterator[Any]:
    """Ray itself, in the cluster, which is left at the end if it was entered here; raises ConfigError."""
    try:
        import ray  # noqa: PLC0415 - it need not be installed
        import ray.exceptions  # noqa: PLC0415
    except ImportError as e:
        raise ConfigError("the engine ray: Ray is not installed here", hint="pip install 'ckptsync[ray]', on every node") from e
    if ray.is_initialized():
        yield ray
        return
    _check_reachable(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address=address, log_to_driver=False, logging_level="ERROR", include_dashboard=False if address == "local" else None
        )
    except (ConnectionError, RuntimeError, ValueError) as e:
        raise ConfigError(f"the Ray cluster {address}: {_first_line(e)}", hint=_NO_CLUSTER) from e
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)  # Ray puts its own there
    try:
        yield ray
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Raises ConfigError where nothing answers: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if "/" in address or not (port.isdecimal() and int(port[:6]) < 65536):
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except OSError as e:
        raise ConfigError(f"the Ray cluster {address}: {(e.strerror or str(e)).lower()}", hint=_NO_CLUSTER) from e


def _each(ray: Any, parts: Iterable[Part], reach: Reach, progress: Callable[[int], None]) -> Iterator[tuple[FilePlan, Done]]:
    """Every file's end, as they come; progress in between."""
    counts = _Counts(ray, progress)
    task = ray.remote(num_cpus=1, max_retries=RETRIES)(_task)
    shared = ray.put(reach)  # it may be large, and so goes to each node once
    running = {task.remote(part, shared, counts.actor): part.plan for part in parts}
    try:
        while running:
            ready, _ = ray.wait([*running], timeout=POLL)
            counts.tell()
            for one in ready:
                plan, done = running.pop(one), ray.get(one)
                counts.ended(plan)
                yield plan, done
    finally:
        for one in running:
            with contextlib.suppress(ray.exceptions.RayError):  # there is a first error to tell
                ray.cancel(one, force=True)


def _task(part: Part, reach: Reach, counts: Any) -> Done:
    return make(part, reach, lambda count: counts.set.remote(part.plan.name, count))


class _Counts:
    """How far each task is.  It is nobody's loss but the progress bar's if the actor is lost."""

    def __init__(self, ray: Any, progress: Callable[[int], None]) -> None:
        self._ray, self._progress = ray, progress
        self._told: dict[str, int] = {}
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        self.actor = ray.remote(num_cpus=0, max_restarts=-1, scheduling_strategy=here)(Board).remote()

    def tell(self) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._all(self._ray.get(self.actor.all.remote(), timeout=POLL))

    def ended(self, plan: FilePlan) -> None:
        self._all({plan.name: sum(t.size for t in plan.tensors)})

    def _all(self, counts: Mapping[str, int]) -> None:
        for name, count in counts.items():
            if count != self._told.get(name, 0):
                self._progress(count - self._told.get(name, 0))  # fewer where a task was begun again
                self._told[name] = count


class Board:
    """File → bytes made of it, as its task said last."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def set(self, name: str, count: int) -> None:
        """Of the task that is at it now."""
        self._counts[name] = count

    def all(self) -> Mapping[str, int]:
        """Of all that have begun."""
        return self._counts


def _counted(tell: Callable[[int], None]) -> Callable[[int], None]:
    """From bytes of each unit to all so far, now and then."""
    done = said = 0

    def passed(count: int) -> None:
        nonlocal done, said
        done += count
        if done - said >= TOLD:
            said = done
            tell(done)

    return passed


def _taken(done: Done, summed: SummedFiles) -> Copied:
    """Raises what the task has raised, and Corrupt where the sums of several tasks show that a record is damaged."""
    if done.error:
        raise done.error
    assert done.copied
    summed.take_as_read(done.whole)
    summed.join(done.stretches)
    return done.copied


def _first_line(e: BaseException) -> str:
    return next(iter(str(e).strip().splitlines()), type(e).__name__)
