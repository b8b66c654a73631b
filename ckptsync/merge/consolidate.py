"""From the files of a checkpoint to a consolidated model: plan everything, then write it file by file, the index last.

The bytes written are a pure function of the files, the options and the output's format number.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat
from typing import Protocol

from ckptsync.digest import digest
from ckptsync.formats.zstd_items import unpacked
from ckptsync.merge import output
from ckptsync.merge.copying import Copied, Copying, Work
from ckptsync.merge.pipeline import Abandoned, one_at_a_time, side_by_side
from ckptsync.merge.plan import FilePlan
from ckptsync.merge.prepare import Job
from ckptsync.merge.statistics import Statistics, is_told, remarks
from ckptsync.merge.summed import SummedFiles
from ckptsync.merge.tally import CopiedTensor
from ckptsync.model import Files
from ckptsync.records.model_record import ModelFile, ModelTensor

Chunk = bytes | bytearray | memoryview
Write = Callable[[str, Iterable[Chunk]], None]
Progress = Callable[[int, int], None]
_PIECE = 4 << 20
THREADS_A_FILE = 2  # beside the one that writes: what one disk can take in


@dataclass(frozen=True, slots=True)
class Finished:
    """An output file of weights whose bytes are known: its BLAKE3, and what its reader should know."""

    digest: str
    notes: tuple[str, ...] = ()


class Ledger(Protocol):
    """What is kept of a merge while it is done, so that another one can go on where it ends."""

    @property
    def finished(self) -> Mapping[str, Finished]:
        """Files that are there already: they are not made again, and what only they need is not read."""
        ...

    def at_end(self, name: str, finished: Finished) -> None:
        """All bytes of a file of weights have been given to `Write`, which commits it next."""
        ...

    def at_last_end(self) -> None:
        """The same, of the last of them, and before: everything was read, and is what its containers say."""
        ...


@dataclass(frozen=True, slots=True)
class Unkept:
    """Nothing is kept."""

    finished: Mapping[str, Finished] = field(default_factory=dict)

    def at_end(self, name: str, finished: Finished) -> None:
        """Nothing."""

    def at_last_end(self) -> None:
        """Nothing."""


UNKEPT = Unkept()


class Engine(Protocol):
    """Makes the files of weights: here, or elsewhere."""

    def __call__(
        self, job: Job, files: Files, write: Write, /, *, progress: Callable[[int], None], work: Work, ledger: Ledger
    ) -> dict[str, Copied]:
        """All of ``job.plans``, each written; what was written, by the file's name.  ``progress`` takes bytes, also fewer than none."""
        ...


@dataclass(frozen=True, slots=True)
class Merged:
    """What was written, with a digest for every file, and for every tensor if asked for; and what the reader should know."""

    files: tuple[ModelFile, ...]
    tensors: tuple[ModelTensor, ...]
    notes: tuple[str, ...]
    source: str
    statistics: Mapping[str, Statistics] | None = None


def carry_out(
    job: Job,
    files: Files,
    write: Write,
    progress: Progress | None = None,
    work: Work | None = None,
    *,
    ledger: Ledger = UNKEPT,
    engine: Engine | None = None,
) -> Merged:
    """Do what was prepared; ``engine`` makes the files of weights, by default threads of this process do.

    Raises Corrupt, before the last file of weights is committed, if a source's bytes do not have the CRC32 that its container tells.

    With more than one job, ``files`` are read by several threads; from four on, ``write`` is called by several threads too, each
    with a file of its own.  ``progress`` is called by one at a time.
    """
    work = work or Work()
    left = replace(job, plans=tuple(plan for plan in job.plans if plan.name not in ledger.finished))
    if left.is_packed:  # several threads would read a stream out of its order, and begin it again and again
        work = replace(work, jobs=1)
    done = _Counter(job.size, job.size - left.size, progress)
    made = (engine or _weights)(left, files, write, progress=done.add, work=work, ledger=ledger)
    ends = {plan.name: ledger.finished.get(plan.name) or finished(made[plan.name]) for plan in job.plans}
    sealed = [ModelFile(plan.name, plan.size, ends[plan.name].digest) for plan in job.plans]
    notes = [*job.notes, *(note for plan in job.plans for note in ends[plan.name].notes)]
    if work.statistics:
        notes += _without_statistics(job.plans)
    sealed += [_write_small(name, job.content(name), write) for name, _ in job.beside]
    if len(job.plans) > 1:
        stem = job.plans[0].name.rpartition("-of-")[0].rpartition("-")[0]
        sealed.append(_write_small(f"{stem}.safetensors.index.json", output.index(job.plans), write))
    tensors = [t for plan in job.plans for t in _sealed_tensors(plan, made.get(plan.name))]
    told = {t.name: t.statistics for copied in made.values() for t in copied.tensors if t.statistics}
    return Merged(tuple(sealed), tuple(tensors), tuple(notes), job.source, told if work.statistics else None)


def _weights(
    job: Job, files: Files, write: Write, *, progress: Callable[[int], None], work: Work, ledger: Ledger
) -> dict[str, Copied]:
    """Write them all, side by side where there are threads enough."""
    summed = SummedFiles(unpacked(files), job.checksums)
    ending = _Ending(len(job.plans), summed, ledger)
    at_once = min(len(job.plans), max(1, work.jobs // THREADS_A_FILE))
    own = replace(work, jobs=work.jobs // max(1, at_once))
    tasks = [partial(_write_weights, plan, summed, write, progress=progress, work=own, ending=ending) for plan in job.plans]
    return {plan.name: copied for plan, copied in zip(job.plans, side_by_side(tasks, at_once), strict=True)}


class _Ending:
    """What happens when a file's bytes have all been made, and of the last one when nothing is left to read."""

    def __init__(self, count: int, summed: SummedFiles, ledger: Ledger) -> None:
        self._left, self._summed, self._ledger = count, summed, ledger
        self._lock = one_at_a_time()

    def of(self, plan: FilePlan, copied: Copied) -> None:
        with self._lock:
            self._left -= 1
            is_last = not self._left
        if is_last:
            self._summed.finish()
            self._ledger.at_last_end()
        self._ledger.at_end(plan.name, finished(copied))


def finished(copied: Copied) -> Finished:
    """What a ledger keeps of a file."""
    return Finished(copied.digest, tuple(note for tensor in copied.tensors for note in _notes(tensor)))


def _write_weights(
    plan: FilePlan,
    files: Files,
    write: Write,
    is_stopping: Callable[[], bool],
    *,
    progress: Callable[[int], None],
    work: Work,
    ending: _Ending,
) -> Copied:
    copying = Copying(plan, files, progress, work)

    def chunks() -> Generator[memoryview, None, None]:
        yield from copying.chunks()
        ending.of(plan, copying.result())

    with contextlib.closing(_until(is_stopping, chunks())) as made:
        write(plan.name, made)
    return copying.result()


def _until(is_stopping: Callable[[], bool], chunks: Generator[memoryview, None, None]) -> Generator[memoryview, None, None]:
    with contextlib.closing(chunks):
        for chunk in chunks:
            if is_stopping():
                raise Abandoned
            yield chunk


def _without_statistics(plans: Sequence[FilePlan]) -> Iterator[str]:
    counts = Counter(tensor.dtype for plan in plans for tensor in plan.tensors if not is_told(tensor.dtype))
    for dtype, count in sorted(counts.items()):
        yield f"{count} tensors of {dtype} have no statistics: their elements are not numbers that can be compared here"


def _notes(tensor: CopiedTensor) -> Iterator[str]:
    if tensor.overflows:
        yield f"{tensor.name}: {tensor.overflows} finite values became infinite in the cast"
    if tensor.statistics:
        yield from remarks(tensor.name, tensor.statistics)


class _Counter:
    """Bytes written so far, told to whoever shows progress."""

    def __init__(self, total: int, done: int, progress: Progress | None) -> None:
        self._total, self._done, self._progress = total, done, progress
        self._lock = one_at_a_time()

    def add(self, count: int) -> None:
        with self._lock:
            self._done += count
            if self._progress:
                self._progress(self._done, self._total)


def _sealed_tensors(file: FilePlan, copied: Copied | None) -> Iterator[ModelTensor]:
    """Without digests where an earlier merge made the file."""
    digests = (found.digest for found in copied.tensors) if copied else repeat("", len(file.tensors))
    for tensor, own in zip(file.tensors, digests, strict=True):
        yield ModelTensor(tensor.name, tensor.dtype, tensor.shape, file.name, tensor.start, tensor.size, own)


def _write_small(name: str, data: bytes, write: Write) -> ModelFile:
    pieces = [data[at : at + _PIECE] for at in range(0, len(data), _PIECE)]
    write(name, pieces)
    return ModelFile(name, len(data), digest(data))
