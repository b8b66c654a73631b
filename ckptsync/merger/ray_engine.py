"""Write the weights of a merge on a Ray cluster, one task for each file.

A model of terabytes is merged faster by several machines.  Each task reads from the sources and
writes to the destination by itself, the same bytes as the threads of one process would.  Only the
plan, and the CRC32s of what was read, go through this process.  If a node is lost, its tasks run
again on another one.  Ray sends values as pickles between the processes of one cluster, which trust
each other: they hold nothing of a checkpoint but names, paths and numbers.

Ray 2: `max_retries` counts what the system loses, not what a task raises (ray.io, "Fault
tolerance", "Task fault tolerance").
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ckptsync import __version__
from ckptsync.errors import CkptsyncError, ConfigError, Incomplete, StoreError
from ckptsync.install_commands import install_extra
from ckptsync.merger.container_crcs import CrcCheckedFiles, RecordStretch
from ckptsync.merger.destination import abouts
from ckptsync.merger.engine import (
    Destination,
    WeightsFile,
    Write,
    WrittenFile,
)
from ckptsync.merger.inputs import PreparedMerge
from ckptsync.merger.joined_files import FILL, JoinedFiles
from ckptsync.merger.plan import FilePlan, MergeResources
from ckptsync.merger.prepare import MergeJob
from ckptsync.merger.readers import open_reader, planned_reader
from ckptsync.stores import path_or_url
from ckptsync.stores.checkpoint_files import Overlay
from ckptsync.stores.contract import UNKNOWN, About, Chunk, Store
from ckptsync.stores.limits import Limits
from ckptsync.stores.opening import Access
from ckptsync.stores.path_or_url import PathOrUrl
from ckptsync.stores.posix.store import PosixStore
from ckptsync.stores.urls import Remote
from ckptsync.tensors import Files

RETRIES = 20  # of one file, after as many lost nodes
MOST_JOBS = 4  # threads of a task: they mostly wait for the store
POLL = 0.5  # seconds between two looks at the progress
REPORTED = 32 << 20  # bytes that a task makes between two reports of its progress
_NO_CLUSTER = (
    "`ray start --head` starts one; --ray-address names another, or `local` for one of this machine"
    " alone"
)


@dataclass(frozen=True, slots=True)
class TaskAccess:
    """How a task opens its sources and its destination: functions that run on the task's node.

    ``raises``: what they raise for their caller to see, beside CkptsyncError.
    """

    files: Callable[[], Files]
    write: Callable[[], Write]
    raises: tuple[type[Exception], ...] = ()


TaskResult = tuple[WrittenFile, tuple[RecordStretch, ...]] | Exception
"""What a task has made, and the sums of what it has read; or its error."""


class RayEngine:
    """An `Engine` on the Ray cluster at ``address``.

    ``auto`` is this machine's cluster; ``local`` starts one here for the merge.

    Raises ConfigError where there is no Ray or no cluster, StoreError where the cluster is lost,
    and what a task raises.
    """

    def __init__(self, address: str, reach: TaskAccess) -> None:
        self._address, self._reach = address, reach

    def __call__(
        self,
        job: MergeJob,
        files: Files,
        destination: Destination,
        progress: Callable[[int], None],
        work: MergeResources,
    ) -> dict[str, WrittenFile]:
        """Write each file in a task of at most `MOST_JOBS` threads; return them by name.

        Tasks write by themselves: of ``destination`` only what `collect` calls is used.  Raises
        ConfigError, StoreError, and what a task raises.
        """
        task_resources = replace(work, jobs=min(work.jobs, MOST_JOBS))
        with connect(self._address) as ray:
            try:
                results = _run_all(ray, job.plans, task_resources, self._reach, progress)
                return collect(results, job, files, destination)
            except ray.exceptions.RayError as e:
                raise StoreError(
                    f"the Ray cluster {self._address}: {type(e).__name__}: {_first_line(e)}",
                    hint=(
                        "look at its nodes, then run the same again: what is finished is not made"
                        " again"
                    ),
                ) from e


def run_task(
    plan: FilePlan,
    work: MergeResources,
    version: str,
    reach: TaskAccess,
    report: Callable[[int], None],
) -> TaskResult:
    """Write one output file on the node that this runs on; return its result.

    CkptsyncError, and errors of ``reach.raises``, are returned; any other is raised.

    Args:
        plan: The file.
        work: Threads and memory of this task.
        version: Of the ckptsync that planned it; another one is a ConfigError.
        reach: How the sources and the destination are opened here.
        report: Called after every `REPORTED` bytes with the number of all bytes so far.

    """
    if version != __version__:
        versions = f"{socket.gethostname()}: ckptsync {__version__} there, {version} here"
        return ConfigError(versions, hint="install the same on all nodes")
    done = reported = 0

    def progress(size: int) -> None:
        """Add ``size`` bytes, and report all if `REPORTED` or more are not reported yet."""
        nonlocal done, reported
        done += size
        if done - reported >= REPORTED:
            reported = done
            report(done)

    returned_errors: tuple[type[Exception], ...] = (CkptsyncError, *reach.raises)
    try:
        reader, crcs = planned_reader(reach.files(), [plan], plan.checksums)
        file = WeightsFile(plan, reader, progress, work)
        with contextlib.closing(file.chunks()) as chunks:
            reach.write()(plan.name, chunks)
    except returned_errors as e:
        return e
    return file.result(), crcs.stretches()


def collect(
    results: Iterable[tuple[str, TaskResult]], job: MergeJob, files: Files, destination: Destination
) -> dict[str, WrittenFile]:
    """Record the files that tasks have written, as ``results`` yields them; return all by name.

    Before the last file is recorded, records that no task summed whole are read from ``files``, and
    sources are checked (`Destination.check_sources`).  Raises the first error of a task, and
    Corrupt if the sums of several tasks show a damaged record.
    """
    summed = CrcCheckedFiles(files, job.checksums)
    written: dict[str, WrittenFile] = {}
    for name, result in results:
        if isinstance(result, Exception):
            raise result
        written[name], stretches = result
        summed.join(stretches)
        if len(written) == len(job.plans):
            summed.finish()
            destination.check_sources()
        destination.record_file(name, written[name])
    return written


@contextlib.contextmanager
def connect(address: str) -> Iterator[Any]:
    """Give the module `ray`, connected to the cluster at ``address``; disconnect at the end.

    A connection that the process has already is used, and left as it is.  Otherwise the variable
    RAY_USAGE_STATS_ENABLED is set to 0 if it is unset; the main thread keeps its SIGTERM handler.
    Raises ConfigError if Ray is not installed, or no cluster answers (a host and port: in 10 s).
    """
    try:
        import ray  # noqa: PLC0415 - it need not be installed
        import ray.exceptions  # noqa: PLC0415
    except ImportError as e:
        hint = f"{install_extra('ray')}, on every node"
        raise ConfigError("the engine ray: Ray is not installed here", hint=hint) from e
    if ray.is_initialized():
        yield ray
        return
    host, _, port = address.rpartition(":")
    if "/" not in address and port.isdecimal() and int(port[:6]) < 65536:
        try:  # where nothing answers, Ray itself would try for minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        except OSError as e:
            why = (e.strerror or str(e)).lower()
            raise ConfigError(f"the Ray cluster {address}: {why}", hint=_NO_CLUSTER) from e
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    handler = signal.getsignal(signal.SIGTERM)
    dashboard = False if address == "local" else None
    try:
        ray.init(
            address=address, log_to_driver=False, logging_level="ERROR", include_dashboard=dashboard
        )
    except (ConnectionError, RuntimeError, ValueError) as e:
        raise ConfigError(f"the Ray cluster {address}: {_first_line(e)}", hint=_NO_CLUSTER) from e
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)  # Ray puts its own there
    try:
        yield ray
    finally:
        ray.shutdown()


class ProgressBoard:
    """An actor that holds the bytes made of each file.

    If it is lost, only the progress shown suffers.
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def set(self, name: str, count: int) -> None:
        """Replace the count of a file: of a task that was begun again it is smaller."""
        self._counts[name] = count

    def all(self) -> Mapping[str, int]:
        """Return the counts of all files that have begun."""
        return self._counts


def _run_all(
    ray: Any,
    plans: Iterable[FilePlan],
    work: MergeResources,
    reach: TaskAccess,
    progress: Callable[[int], None],
) -> Iterator[tuple[str, TaskResult]]:
    """Yield each file's name and its task's result, in the order in which tasks end.

    All tasks start when the first result is requested.  Calls ``progress`` about every `POLL`
    seconds, with a negative number after a task began again.  When the caller stops or closes this
    generator, or a task fails, all others are cancelled.  Raises RayError.
    """
    this_node = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=True
    )
    board = ray.remote(num_cpus=0, max_restarts=-1, scheduling_strategy=this_node)(
        ProgressBoard
    ).remote()
    reported_counts: dict[str, int] = {}

    def show(counts: Mapping[str, int]) -> None:
        """Report what a file's count exceeds that of the last report by."""
        for name, count in counts.items():
            if count != reported_counts.get(name, 0):
                progress(count - reported_counts.get(name, 0))
                reported_counts[name] = count

    run = ray.remote(num_cpus=1, max_retries=RETRIES)(_run_remote)
    shared = ray.put(reach)  # it may be large, and so goes to each node once
    running = {run.remote(plan, work, __version__, shared, board): plan for plan in plans}
    try:
        while running:
            ready, _ = ray.wait([*running], timeout=POLL)
            with contextlib.suppress(ray.exceptions.RayError):
                show(ray.get(board.all.remote(), timeout=POLL))
            for task in ready:
                plan, result = running.pop(task), ray.get(task)
                show({plan.name: sum(t.size for t in plan.tensors)})
                yield plan.name, result
    finally:
        for task in running:
            # the first error is the one that is raised
            with contextlib.suppress(ray.exceptions.RayError):
                ray.cancel(task, force=True)


def _run_remote(
    plan: FilePlan, work: MergeResources, version: str, reach: TaskAccess, board: Any
) -> TaskResult:
    """Run `run_task`, which reports its bytes to ``board``."""
    return run_task(plan, work, version, reach, lambda n: board.set.remote(plan.name, n))


def _first_line(e: BaseException) -> str:
    """Return the first line of an error's message, or its type's name if it is empty."""
    return next(iter(str(e).strip().splitlines()), type(e).__name__)


def task_access(prepared: PreparedMerge, access: Access, target: PathOrUrl) -> TaskAccess:
    """Return how tasks open the sources of a merge, and write below ``target``.

    Tasks do not share this process's bandwidth limit.  ``target`` is the destination, or the
    directory in which a local one is written until it is renamed.
    """
    limits = replace(access.limits, pace=Limits().pace)  # a pace is one process's own
    plain = replace(access, limits=limits, _opened={})
    states = tuple(tree.state() for tree in prepared.trees)
    sources = tuple(prepared.request.sources)
    return TaskAccess(
        partial(_open_files, sources, plain, states, prepared.request.fill_from),
        partial(_open_write, target, plain, abouts(prepared)),
    )


def _open_files(
    sources: Sequence[PathOrUrl],
    access: Access,
    states: Sequence[str],
    fill_from: PathOrUrl | None,
) -> Files:
    """Return the files of the sources, and of the model that fills them, as this node sees them.

    ``states``: of the sources when the merge was planned.  Raises Incomplete if they differ here,
    ConfigError or StoreError if a source cannot be opened or read.
    """
    trees = [path_or_url.list_tree(source, access) for source in sources]
    for tree, state in zip(trees, states, strict=True):
        if tree.state() != state:
            raise Incomplete(
                f"{tree.root}: not the files that the merge was planned for",
                hint=(
                    "a path must show the same files on every node of the cluster: check the"
                    " mounts, and that nothing writes there"
                ),
            )
    files = open_reader(Overlay(trees), trees)
    if fill_from is None:
        return files
    return JoinedFiles(files, {FILL: path_or_url.top_files(fill_from, access)})


def _open_write(target: PathOrUrl, access: Access, identities: Mapping[str, About]) -> Write:
    """Return a function that writes files below ``target``.

    ``identities``: sizes and identities of files of weights.  Raises ConfigError if ``target`` is
    not a directory on this node.
    """
    store: Store
    if isinstance(target, Remote):
        store = access.store(target)
    elif target.is_dir():
        store = PosixStore(str(target))
    else:
        hint = "a cluster of several nodes writes to a URL, or to a disk that they share"
        raise ConfigError(f"{target}: not on this node", hint=hint)

    def write(name: str, chunks: Iterable[Chunk]) -> None:
        """Write a file of the model."""
        store.write(name, chunks, identities.get(name, UNKNOWN))

    return write
