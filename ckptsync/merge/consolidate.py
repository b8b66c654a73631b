"""From the files of a checkpoint to a consolidated model: plan everything, then write it file by file, the index last.

The bytes written are a pure function of the files, the options and the output's format number.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ckptsync.digest import digest
from ckptsync.formats.packed import parse
from ckptsync.formats.unpacking import opened
from ckptsync.merge import output
from ckptsync.merge.copying import Copied, Copying, Work
from ckptsync.merge.pipeline import Abandoned, one_at_a_time, side_by_side
from ckptsync.merge.plan import FilePlan, Options
from ckptsync.merge.prepare import MAX_BESIDE, Job, prepare
from ckptsync.merge.statistics import Statistics, is_told, remarks
from ckptsync.merge.summed import SummedFiles
from ckptsync.merge.tally import CopiedTensor
from ckptsync.model import Files, read_whole
from ckptsync.records.seal import SealedFile, SealedTensor

Chunk = bytes | bytearray | memoryview
Write = Callable[[str, Iterable[Chunk]], None]
Progress = Callable[[int, int], None]
_PIECE = 4 << 20
THREADS_A_FILE = 2  # beside the one that writes: what one disk can take in


@dataclass(frozen=True, slots=True)
class Merged:
    """What was written, with a digest for every file, and for every tensor if asked for; and what the reader should know."""

    files: tuple[SealedFile, ...]
    tensors: tuple[SealedTensor, ...]
    notes: tuple[str, ...]
    source: str
    statistics: Mapping[str, Statistics] | None = None


def consolidate(
    files: Files,
    write: Write,
    options: Options,
    config: Sequence[Files] = (),
    progress: Progress | None = None,
    *,
    work: Work | None = None,
) -> Merged:
    """Write the consolidated model through ``write(name, chunks)``; ``config`` are further places for configuration and tokenizer."""
    return carry_out(prepare(files, options, config), files, write, progress, work)


def carry_out(job: Job, files: Files, write: Write, progress: Progress | None = None, work: Work | None = None) -> Merged:
    """Do what was prepared.  Raises Corrupt if a source's bytes do not have the CRC32 that its container tells.

    With more than one job, ``files`` are read by several threads; from four on, ``write`` is called by several threads too, each
    with a file of its own.  ``progress`` is called by one at a time.
    """
    work = work or Work()
    if job.is_packed:  # several threads would read a stream out of its order, and begin it again and again
        work = replace(work, jobs=1)
    if any(map(parse, job.reads)):
        work = replace(work, jobs=1)  # what can only be unpacked forward must be read forward, or is unpacked again and again
    summed = SummedFiles(opened(files), job.checksums)
    done = _Counter(job.size, progress)
    at_once = min(len(job.plans), max(1, work.jobs // THREADS_A_FILE))
    own = replace(work, jobs=work.jobs // max(1, at_once))
    every = side_by_side([partial(_write_weights, plan, summed, write, progress=done.add, work=own) for plan in job.plans], at_once)
    sealed = [SealedFile(plan.name, plan.size, copied.digest) for plan, copied in zip(job.plans, every, strict=True)]
    found = [(plan, tensor) for plan, copied in zip(job.plans, every, strict=True) for tensor in copied.tensors]
    notes = [*job.notes, *(note for _, tensor in found for note in _notes(tensor))]
    if work.statistics:
        notes += _without_statistics(job.plans)
    summed.finish()
    for name, place in job.beside:
        data = read_whole(place, name, MAX_BESIDE)
        sealed.append(_write_small(name, output.with_dtype(data, job.dtype) if name == "config.json" else data, write))
    if len(job.plans) > 1:
        stem = job.plans[0].name.rpartition("-of-")[0].rpartition("-")[0]
        sealed.append(_write_small(f"{stem}.safetensors.index.json", output.index(job.plans), write))
    tensors = [t for plan, copied in zip(job.plans, every, strict=True) for t in _sealed_tensors(plan, copied)]
    told = {tensor.name: tensor.statistics for _, tensor in found if tensor.statistics}
    return Merged(tuple(sealed), tuple(tensors), tuple(notes), job.source, told if work.statistics else None)


def _write_weights(
    plan: FilePlan, files: Files, write: Write, is_stopping: Callable[[], bool], *, progress: Callable[[int], None], work: Work
) -> Copied:
    copying = Copying(plan, files, progress, work)
    with contextlib.closing(_until(is_stopping, copying.chunks())) as chunks:
        write(plan.name, chunks)
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

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total, self._done, self._progress = total, 0, progress
        self._lock = one_at_a_time()

    def add(self, count: int) -> None:
        with self._lock:
            self._done += count
            if self._progress:
                self._progress(self._done, self._total)


def _sealed_tensors(file: FilePlan, copied: Copied) -> Iterator[SealedTensor]:
    for tensor, found in zip(file.tensors, copied.tensors, strict=True):
        yield SealedTensor(tensor.name, tensor.dtype, tensor.shape, file.name, tensor.start, tensor.size, found.digest)


def _write_small(name: str, data: bytes, write: Write) -> SealedFile:
    pieces = [data[at : at + _PIECE] for at in range(0, len(data), _PIECE)]
    write(name, pieces)
    return SealedFile(name, len(data), digest(data))
