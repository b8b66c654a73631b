"""Write a planned merge: first the weights, then the files beside them, the index last.

The bytes written are a pure function of the files, the options and the output's format number.

A file of weights is made as a stream: gathered, cast, digested and counted in one pass, cut into
units (`read_units.cut_units`).  Threads make several units at once.  Two consumers get every unit
in order, each in a thread of its own: the digest of the file, and the counts of each tensor's
values.  Whoever writes the file gets the same units in order.  So memory is bounded, and the bytes
are the same for any number of threads.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, as_completed
from dataclasses import dataclass, field, replace

import numpy as np
from blake3 import blake3

from ckptsync.digest import crc32, digest
from ckptsync.formats.dtypes import ITEMSIZE
from ckptsync.merger import adapter_sums, model_files, read_units
from ckptsync.merger.adapter_sums import AdapterSums, ChangeTotals, notes_on_sums
from ckptsync.merger.cast import CAST_ELEMENTS, Array, cast_bytes
from ckptsync.merger.plan import FilePlan, MergeResources, PlannedTensor
from ckptsync.merger.prepare import MergeJob
from ckptsync.merger.read_units import Share, Unit, gather
from ckptsync.merger.readers import planned_reader
from ckptsync.merger.tensor_statistics import (
    Statistics,
    count_values,
    has_statistics,
    notes_on_values,
)
from ckptsync.records.model_record import ModelFile, ModelTensor
from ckptsync.stores.contract import Chunk
from ckptsync.tensors import Files
from ckptsync.threads import ThreadPool

Write = Callable[[str, Iterable[Chunk]], None]
Progress = Callable[[int, int], None]
_PIECE = 4 << 20
# what disks address: chunks begin and end at multiples of it, in the file and in memory
ALIGN = 4 << 10
THREADS_A_FILE = 2  # beside the one that writes: what one disk can take in


class Abandoned(Exception):
    """Another file failed, so this file is not written; the caller raises the other error."""


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """What is known of a file of weights once it is written: its BLAKE3, and notes for the user.

    Its tensors have digests, and ``statistics`` by their names, if they were asked for; those that
    adapters change have totals in ``changes``.
    """

    digest: str
    notes: tuple[str, ...]
    tensors: tuple[ModelTensor, ...]
    statistics: Mapping[str, Statistics] = field(default_factory=dict)
    changes: Mapping[str, ChangeTotals] = field(default_factory=dict)


class Destination:
    """Where files are written.  A subclass records what is finished, so that a merge continues.

    ``finished``: files that are there already.  They are not made again, and what only they need is
    not read.
    """

    def __init__(self, write: Write) -> None:
        self.write = write
        self.finished: Mapping[str, WrittenFile] = {}

    def record_file(self, name: str, written: WrittenFile) -> None:
        """Record a file of weights when `write` has all its bytes.

        `write_weights` calls it in the thread that writes the file, before that is committed;
        `ray_engine.collect` afterwards.
        """

    def check_sources(self) -> None:
        """Check the sources after everything was read, before the last `record_file`."""


Engine = Callable[
    [MergeJob, Files, Destination, Callable[[int], None], MergeResources], dict[str, WrittenFile]
]
"""Writes all files of weights of a job; calls the function with each number of bytes made.

The number is negative where bytes must be made again.
"""


@dataclass(frozen=True, slots=True)
class MergeResult:
    """What was written, with notes for the user; tensors have digests if that was asked for."""

    files: tuple[ModelFile, ...]
    tensors: tuple[ModelTensor, ...]
    notes: tuple[str, ...]
    source: str
    statistics: Mapping[str, Statistics] | None = None
    changes: Mapping[str, ChangeTotals] = field(default_factory=dict)


def write_model(
    job: MergeJob,
    files: Files,
    destination: Destination,
    progress: Progress | None = None,
    work: MergeResources | None = None,
    *,
    engine: Engine | None = None,
) -> MergeResult:
    """Write all files of a planned merge, the index last, and return what was written.

    Args:
        job: The plan.
        files: What it reads; several threads read if ``work.jobs`` is above 1.
        destination: Where files are written; those that it has ``finished`` are not written again.
            Several threads write, each a file of its own, if ``work.jobs`` is 4 or more.
        progress: Called with the bytes of weights that are done, and all of them, under a lock.
            The first number falls where an engine makes bytes again.
        work: Threads and memory; one thread without it.
        engine: Writes the files of weights; by default `write_weights`, threads of this process.

    Raises:
        Corrupt: A source's bytes do not have the CRC32 of their container, which is known before
            the last file of weights is committed; or a sum of adapters is not finite.  What
            ``files``, ``destination`` and the engine raise is raised, too.

    """
    work, finished = work or MergeResources(), destination.finished
    if job.sums:
        work = replace(work, window=min(work.window, adapter_sums.WINDOW))
    remaining = replace(job, plans=tuple(plan for plan in job.plans if plan.name not in finished))
    lock, done = threading.Lock(), job.size - remaining.size

    def count(size: int) -> None:
        """Add ``size`` bytes to those that are done."""
        nonlocal done
        with lock:
            done += size
            if progress:
                progress(done, job.size)

    weights_by_name = {
        **finished,
        **(engine or write_weights)(remaining, files, destination, count, work),
    }
    weights = [weights_by_name[plan.name] for plan in job.plans]
    written = [ModelFile(p.name, p.size, w.digest) for p, w in zip(job.plans, weights, strict=True)]
    other_files = [(name, job.content(name)) for name, _ in job.beside]
    if index := model_files.index_name(job.plans):
        other_files.append((index, model_files.make_index(job.plans)))
    for name, data in other_files:
        destination.write(
            name, [data[start : start + _PIECE] for start in range(0, len(data), _PIECE)]
        )
        written.append(ModelFile(name, len(data), digest(data)))
    notes = [*job.notes, *(note for written_weights in weights for note in written_weights.notes)]
    changes = {
        name: total
        for written_weights in weights
        for name, total in written_weights.changes.items()
    }
    notes += notes_on_sums(job.sums, changes)
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
    return MergeResult(
        tuple(written),
        tuple(tensor for written_weights in weights for tensor in written_weights.tensors),
        tuple(notes),
        job.source,
        {k: v for written_weights in weights for k, v in written_weights.statistics.items()}
        if work.statistics
        else None,
        changes,
    )


def write_weights(
    job: MergeJob,
    files: Files,
    destination: Destination,
    progress: Callable[[int], None],
    work: MergeResources,
) -> dict[str, WrittenFile]:
    """Write all files of weights, ``jobs // THREADS_A_FILE`` at once; return them by name.

    This is the `Engine` of this process.  Before the last file ends, what was not read of records
    with a CRC32 is read, and the sources are checked.  Raises the first error of any file; the
    other files are then not finished, and no thread is left.
    """
    reader, crcs = planned_reader(files, job.plans, job.checksums)
    sums = AdapterSums(reader, job.sums) if job.sums else None
    at_once = max(1, min(len(job.plans), work.jobs // THREADS_A_FILE))
    file_work = replace(work, jobs=max(1, work.jobs // at_once))
    lock, has_failed = threading.Lock(), threading.Event()
    remaining = len(job.plans)

    def chunks(plan: FilePlan, file: WeightsFile) -> Generator[memoryview, None, None]:
        """Yield the bytes of a file; when the reader asks for more, record it.

        The last file to end first finishes the CRC32s and checks the sources.  Raises Abandoned
        after the failure of another file, and what these checks raise.
        """
        nonlocal remaining
        with contextlib.closing(file.chunks()) as stream:
            for chunk in stream:
                if has_failed.is_set():
                    raise Abandoned
                yield chunk
        with lock:
            remaining -= 1
            is_last = not remaining
        if is_last:
            crcs.finish()
            destination.check_sources()
        destination.record_file(plan.name, file.result())

    def write_one(plan: FilePlan) -> WrittenFile:
        """Write one file, and return what was written."""
        file = WeightsFile(plan, reader, progress, file_work, sums)
        with contextlib.closing(chunks(plan, file)) as stream:
            destination.write(plan.name, stream)
        return file.result()

    if at_once == 1:
        return {plan.name: write_one(plan) for plan in job.plans}
    pool = ThreadPool(at_once, "ckptsync-file")
    try:
        tasks = {plan.name: pool.submit(write_one, plan) for plan in job.plans}
        for task in as_completed(tasks.values()):
            task.result()  # raises the first error
        return {name: task.result() for name, task in tasks.items()}
    finally:
        has_failed.set()
        pool.shutdown(cancel_futures=True)


@dataclass(slots=True)
class _OutputUnit:
    """A unit of an output file: ``size`` bytes from ``start``.  `WeightsFile._fill` adds the rest.

    ``buffer`` has its bytes, after room for ``lead`` bytes, back to a multiple of `ALIGN`.
    ``shares``: of each tensor in the unit its number, its bytes, its overflows and its statistics.
    ``changes``: of each tensor that adapters change its number and what was changed.
    """

    planned: Unit
    start: int
    size: int
    is_last: bool
    buffer: Array = field(default_factory=lambda: np.empty(0, "u1"))
    shares: list[tuple[int, memoryview, int, Statistics | None]] = field(default_factory=list)
    changes: list[tuple[int, ChangeTotals]] = field(default_factory=list)

    @property
    def lead(self) -> int:
        """The number of bytes between the last multiple of `ALIGN` in the file and the unit."""
        return self.start % ALIGN

    @property
    def data(self) -> memoryview:
        """The unit's bytes, a view of ``buffer``."""
        return self.buffer.data[self.lead : self.lead + self.size]

    @property
    def weight(self) -> int:
        """Return the bytes of memory that it takes, written and stored.

        No buffer is smaller than a window.
        """
        return max(self.size, read_units.WINDOW) + max(self.planned.stored, read_units.WINDOW)


class WeightsFile:
    """One output file.

    `chunks` yields its bytes front to back; `result` says afterwards what they were.

    ``progress`` gets the number of bytes of each chunk of tensors.
    """

    def __init__(
        self,
        plan: FilePlan,
        files: Files,
        progress: Callable[[int], None],
        work: MergeResources,
        sums: AdapterSums | None = None,
    ) -> None:
        self._plan, self._files, self._progress, self._work = plan, files, progress, work
        self._sums = sums
        self._changes: dict[int, ChangeTotals] = {}
        self._buffers: deque[Array] = deque()  # used before
        self._digester, self._crc = blake3(), 0
        self._digests: dict[int, str] = {}
        self._open_digest = (-1, blake3())  # the tensor whose digest has begun in an earlier unit
        self._overflows: Counter[int] = Counter()
        self._statistics: dict[int, Statistics] = {}

    def chunks(self) -> Generator[memoryview, None, None]:
        """Yield the header, then every tensor, then the ending.

        A chunk is valid until the next one is requested.  All but the last begin and end at
        multiples of `ALIGN`, in the file and in memory.  Call it once, and close this generator if
        it is not read to its end: threads may be at work.  Raises what the files raise, and Corrupt
        as `AdapterSums.write`.
        """
        unaligned = b""
        with contextlib.closing(self._finished_units()) as units:
            for unit in units:
                view, end = unit.buffer.data, unit.lead + unit.size
                view[: unit.lead] = unaligned
                is_end = unit.is_last and not self._plan.ending
                chunk_end = end if is_end else end - end % ALIGN
                unaligned = bytes(view[chunk_end:end])
                if chunk_end:
                    yield view[:chunk_end]
                if unit.planned.stored:
                    self._progress(unit.size)
        if self._plan.ending:
            ending = self._plan.ending.encoded(self._crc)
            self._digester.update(ending)
            self._progress(len(ending))
            yield memoryview(unaligned + ending)

    def result(self) -> WrittenFile:
        """Return what was written; call it after the last chunk.

        Notes count values that the cast made infinite; statistics and their notes are there only if
        they were asked for, and without ``tensor_digests`` the digests of tensors are empty.
        """
        empty = blake3().hexdigest() if self._work.tensor_digests else ""
        tensors, notes = [], list[str]()
        counted: dict[str, Statistics] = {}
        for n, tensor in enumerate(self._plan.tensors):
            tensors.append(describe_tensor(self._plan, tensor, self._digests.get(n, empty)))
            if count := self._overflows[n]:
                notes.append(f"{tensor.name}: {count} finite values became infinite in the cast")
            if values := self._statistics.get(n):
                counted[tensor.name] = values
                notes += notes_on_values(tensor.name, values)
        changes = {self._plan.tensors[n].name: totals for n, totals in self._changes.items()}
        return WrittenFile(
            self._digester.hexdigest(), tuple(notes), tuple(tensors), counted, changes
        )

    def _finished_units(self) -> Generator[_OutputUnit, None, None]:
        """Yield every unit in order, made; digest and count it before the next one is yielded.

        With one job, or a file of at most `read_units.WINDOW` bytes, everything happens in the
        caller's thread.  Else ``jobs`` threads make units, of at most ``jobs * window`` bytes
        together or a single unit, and two more digest and count.  A unit's buffer is used again
        after the next one is requested.  Any error is raised here, and no thread is left.
        """
        work = self._work
        if work.jobs == 1 or self._plan.size <= read_units.WINDOW:  # threads cost more
            for unit in self._units():
                self._digest(self._update_results(self._fill(unit)))
                yield unit
                self._buffers.append(unit.buffer)
            return
        makers = ThreadPool(work.jobs, "ckptsync-merge")
        consumers = (
            ThreadPool(1, "ckptsync-digest"),
            ThreadPool(1, "ckptsync-count"),
        )
        queue: deque[tuple[_OutputUnit, list[Future[_OutputUnit]]]] = deque()
        queued_bytes = 0

        def first() -> Generator[_OutputUnit, None, None]:
            """Wait for the oldest unit, yield it, wait for its consumers, and free its buffer."""
            nonlocal queued_bytes
            unit, (made_unit, *consumed) = queue.popleft()
            yield made_unit.result()
            for task in consumed:
                task.result()
            queued_bytes -= unit.weight
            self._buffers.append(unit.buffer)

        try:
            for unit in self._units():
                while queue and queued_bytes + unit.weight > work.jobs * work.window:
                    yield from first()
                made_unit = makers.submit(self._fill, unit)
                digested = consumers[0].submit(_consume, made_unit, self._digest)
                counted = consumers[1].submit(_consume, made_unit, self._update_results)
                queue.append((unit, [made_unit, digested, counted]))
                queued_bytes += unit.weight
            while queue:
                yield from first()
        finally:
            for pool in (makers, *consumers):
                pool.shutdown(cancel_futures=True)

    def _units(self) -> Iterator[_OutputUnit]:
        """Yield the units of the file, with their place in it, without bytes."""
        start, end = 0, self._plan.size  # which adds up all tensors
        if self._plan.ending:
            end -= self._plan.ending.size
        for planned in read_units.cut_units(self._plan):
            size = len(planned.text) + sum(
                _written_size(s, self._plan.tensors[s.number]) for s in planned.shares
            )
            yield _OutputUnit(planned, start, size, start + size == end)
            start += size

    def _fill(self, unit: _OutputUnit) -> _OutputUnit:
        """Gather a unit's bytes, sum or cast them, count them if asked for, and return the unit.

        Sets its ``buffer``, ``shares`` and ``changes``.  Raises what the files raise, and Corrupt
        if a sum is not finite.
        """
        planned = unit.planned
        unit.buffer = self._buffer(unit.lead + unit.size)
        data = unit.data
        if planned.text:
            data[:] = planned.text
            return unit
        shares = [(share, self._plan.tensors[share.number]) for share in planned.shares]
        is_cast = any(tensor.dtype != tensor.copy.dtype for _, tensor in shares)
        raw, scratch = data, unit.buffer
        if is_cast:
            buffers = self._buffer(planned.stored), self._buffer(4 * CAST_ELEMENTS)
            raw, scratch = (
                buffers[0].data[: planned.stored],
                buffers[1][: 4 * CAST_ELEMENTS].view("<u4"),
            )
        gather(self._files, planned, raw)
        position = 0
        for share, tensor in shares:
            target = data[position : position + _written_size(share, tensor)]
            stored = raw[share.at : share.at + share.size]
            overflows = 0
            if self._sums and self._sums.has(tensor.name):
                element = (unit.start + position - tensor.start) // ITEMSIZE[tensor.dtype]
                totals = self._sums.write(tensor, element, stored, target)
                unit.changes.append((share.number, totals))
            elif is_cast:
                overflows = cast_bytes(stored, target, tensor.copy.dtype, tensor.dtype, scratch)
            values = count_values(target, tensor.dtype) if self._work.statistics else None
            unit.shares.append((share.number, target, overflows, values))
            position += len(target)
        if is_cast:
            self._buffers += buffers  # which the next unit takes first, while the caches have them
        return unit

    def _digest(self, unit: _OutputUnit) -> _OutputUnit:
        """Add a unit to the file's digest and an ending's CRC32, and return it; called in order."""
        self._digester.update(unit.data)
        if self._plan.ending and unit.planned.stored:
            self._crc = crc32(unit.data, self._crc)
        return unit

    def _update_results(self, unit: _OutputUnit) -> _OutputUnit:
        """Add a unit to the results of its tensors, and return it; called for units in order."""
        for number, totals in unit.changes:
            self._changes[number] = self._changes.get(number, ChangeTotals()) + totals
        for number, data, overflows, values in unit.shares:
            self._overflows[number] += overflows
            if values is not None:
                self._statistics[number] = self._statistics.get(number, Statistics()) + values
            if not self._work.tensor_digests:
                continue
            if self._open_digest[0] != number:
                self._open_digest = number, blake3()
            digester = self._open_digest[1].update(data)
            self._digests[number] = digester.hexdigest()
        return unit

    def _buffer(self, size: int) -> Array:
        """Return memory, new or used, of at least ``size`` bytes at a multiple of `ALIGN`."""
        with contextlib.suppress(IndexError):  # there is none to use again
            used = self._buffers.pop()
            if len(used) >= size:
                return used
        size = max(size, read_units.WINDOW + ALIGN)
        memory: Array = np.empty(size + ALIGN, "u1")
        offset = -memory.ctypes.data % ALIGN  # a disk can write from there
        return memory[offset : offset + size]


def describe_tensor(plan: FilePlan, tensor: PlannedTensor, digest: str = "") -> ModelTensor:
    """Return a planned tensor as a model record describes it."""
    return ModelTensor(
        tensor.name, tensor.dtype, tensor.shape, plan.name, tensor.start, tensor.size, digest
    )


def _written_size(share: Share, tensor: PlannedTensor) -> int:
    """Return how many bytes a tensor's share of a unit has after the cast."""
    return share.size // ITEMSIZE[tensor.copy.dtype] * ITEMSIZE[tensor.dtype]


def _consume(
    unit: Future[_OutputUnit], consume: Callable[[_OutputUnit], _OutputUnit]
) -> _OutputUnit:
    """Return what ``consume`` returns of a unit, after the unit is made."""
    return consume(unit.result())
