"""Write a planned merge: first the weights, then the files beside them, the index last.

The bytes written are a pure function of the files, the options and the output's format number.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace

from ckptsync.digest import digest
from ckptsync.formats.zstd_items import unpacked
from ckptsync.merge import model_files
from ckptsync.merge.container_crcs import CrcCheckedFiles
from ckptsync.merge.plan import FilePlan, MergeResources
from ckptsync.merge.prepare import MergeJob
from ckptsync.merge.statistics import Statistics, has_statistics
from ckptsync.merge.weights import WeightsFile, WrittenFile, foresee
from ckptsync.records.model_record import ModelFile, ModelTensor
from ckptsync.tensors import Files

Chunk = bytes | bytearray | memoryview
Write = Callable[[str, Iterable[Chunk]], None]
Progress = Callable[[int, int], None]
_PIECE = 4 << 20
THREADS_A_FILE = 2  # beside the one that writes: what one disk can take in


class Abandoned(Exception):
    """Another file failed, so this file is not written; the caller raises the other error."""


class Destination:
    """Where files are written.  A subclass records what is finished, so that a merge continues.

    ``finished``: files that are there already.  They are not made again, and what only they need is
    not read.
    """

    def __init__(self, write: Write) -> None:
        self.write = write
        self.finished: Mapping[str, WrittenFile] = {}

    def at_end(self, name: str, made: WrittenFile) -> None:
        """Record a file of weights when `write` has all its bytes, before it is committed."""

    def at_last_end(self) -> None:
        """Check the sources once everything was read, before the last `at_end`."""


Engine = Callable[
    [MergeJob, Files, Destination, Callable[[int], None], MergeResources], dict[str, WrittenFile]
]
"""Writes all files of weights of a job; calls the function with each number of bytes made.

The number is negative where bytes must be made again.
"""


@dataclass(frozen=True, slots=True)
class Merged:
    """What was written, with notes for the user; tensors have digests if that was asked for."""

    files: tuple[ModelFile, ...]
    tensors: tuple[ModelTensor, ...]
    notes: tuple[str, ...]
    source: str
    statistics: Mapping[str, Statistics] | None = None


def write_model(
    job: MergeJob,
    files: Files,
    destination: Destination,
    progress: Progress | None = None,
    work: MergeResources | None = None,
    *,
    engine: Engine | None = None,
) -> Merged:
    """Write the files of a planned merge, and return what was written.

    ``engine`` makes the files of weights, by default with threads of this process.

    Raises Corrupt, before the last file of weights is committed, if a source's bytes do not have
    the CRC32 of its container. If ``work.jobs`` is above 1, several threads read
    ``files``; from four on, several write, each with a file of its own. ``progress`` is called by
    one at a time.
    """
    work, there = work or MergeResources(), destination.finished
    left = replace(job, plans=tuple(plan for plan in job.plans if plan.name not in there))
    # several threads would read a stream out of its order, and begin it again and again
    if left.is_packed:
        work = replace(work, jobs=1)
    lock, done = threading.Lock(), job.size - left.size

    def count(size: int) -> None:
        nonlocal done
        with lock:
            done += size
            if progress:
                progress(done, job.size)

    made = {**there, **(engine or write_weights)(left, files, destination, count, work)}
    weights = [made[plan.name] for plan in job.plans]
    written = [ModelFile(p.name, p.size, w.digest) for p, w in zip(job.plans, weights, strict=True)]
    small = [(name, job.content(name)) for name, _ in job.beside]
    if len(job.plans) > 1:
        small.append((model_files.index_name(job.plans), model_files.index(job.plans)))
    for name, data in small:
        destination.write(name, [data[at : at + _PIECE] for at in range(0, len(data), _PIECE)])
        written.append(ModelFile(name, len(data), digest(data)))
    notes = [*job.notes, *(note for one in weights for note in one.notes)]
    if work.statistics:
        counts = Counter(
            t.dtype for plan in job.plans for t in plan.tensors if not has_statistics(t.dtype)
        )
        notes += [
            (
                f"{count} tensors of {dtype} have no statistics: ckptsync does not support this"
                " type there"
            )
            for dtype, count in sorted(counts.items())
        ]
    return Merged(
        tuple(written),
        tuple(tensor for one in weights for tensor in one.tensors),
        tuple(notes),
        job.source,
        {k: v for one in weights for k, v in one.statistics.items()} if work.statistics else None,
    )


def write_weights(
    job: MergeJob,
    files: Files,
    destination: Destination,
    progress: Callable[[int], None],
    work: MergeResources,
) -> dict[str, WrittenFile]:
    """Write all files of weights, several at once where there are enough threads.

    This is the `Engine` of this process.
    """
    foresee(files, job.plans)
    summed = CrcCheckedFiles(unpacked(files), job.checksums)
    at_once = max(1, min(len(job.plans), work.jobs // THREADS_A_FILE))
    own = replace(work, jobs=max(1, work.jobs // at_once))
    lock, has_failed = threading.Lock(), threading.Event()
    left = len(job.plans)

    def chunks(plan: FilePlan, made: WeightsFile) -> Generator[memoryview, None, None]:
        nonlocal left
        with contextlib.closing(made.chunks()) as stream:
            for chunk in stream:
                if has_failed.is_set():
                    raise Abandoned
                yield chunk
        with lock:
            left -= 1
            is_last = not left
        if is_last:
            summed.finish()
            destination.at_last_end()
        destination.at_end(plan.name, made.result())

    def write_one(plan: FilePlan) -> WrittenFile:
        made = WeightsFile(plan, summed, progress, own)
        with contextlib.closing(chunks(plan, made)) as stream:
            destination.write(plan.name, stream)
        return made.result()

    if at_once == 1:
        return {plan.name: write_one(plan) for plan in job.plans}
    pool = ThreadPoolExecutor(at_once, "ckptsync-file")
    try:
        tasks = {plan.name: pool.submit(write_one, plan) for plan in job.plans}
        for task in as_completed(tasks.values()):
            task.result()  # raises the first error
        return {name: task.result() for name, task in tasks.items()}
    finally:
        has_failed.set()
        pool.shutdown(cancel_futures=True)
