"""From the files of a checkpoint to a consolidated model: plan everything, then write it file by file, the index last.

The bytes written are a pure function of the files, the options and the output's format number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ckptsync.digest import digest
from ckptsync.merge import output
from ckptsync.merge.copying import Copied, Copying
from ckptsync.merge.plan import FilePlan, Options
from ckptsync.merge.prepare import MAX_BESIDE, Job, prepare
from ckptsync.merge.summed import SummedFiles
from ckptsync.model import Files, read_whole
from ckptsync.records.seal import SealedFile, SealedTensor

Chunk = bytes | bytearray | memoryview
Write = Callable[[str, Iterable[Chunk]], None]
Progress = Callable[[int, int], None]
_PIECE = 4 << 20


@dataclass(frozen=True, slots=True)
class Merged:
    """What was written, with a digest for every file and tensor, and what the reader should know."""

    files: tuple[SealedFile, ...]
    tensors: tuple[SealedTensor, ...]
    notes: tuple[str, ...]
    source: str


def consolidate(
    files: Files, write: Write, options: Options, config: Sequence[Files] = (), progress: Progress | None = None
) -> Merged:
    """Write the consolidated model through ``write(name, chunks)``; ``config`` are further places for configuration and tokenizer."""
    return carry_out(prepare(files, options, config), files, write, progress)


def carry_out(job: Job, files: Files, write: Write, progress: Progress | None = None) -> Merged:
    """Do what was prepared.  Raises Corrupt if a source's bytes do not have the CRC32 that its container tells."""
    summed = SummedFiles(files, job.checksums)
    sealed: list[SealedFile] = []
    tensors: list[SealedTensor] = []
    notes = list(job.notes)
    done = _Counter(job.size, progress)
    for file in job.plans:
        copying = Copying(file, summed, done.add)
        write(file.name, copying.chunks())
        copied = copying.result()
        sealed.append(SealedFile(file.name, file.size, copied.digest))
        tensors.extend(_sealed_tensors(file, copied))
        notes.extend(f"{name}: {count} finite values became infinite in the cast" for name, count in copied.overflows)
    summed.finish()
    for name, place in job.beside:
        data = read_whole(place, name, MAX_BESIDE)
        sealed.append(_write_small(name, output.with_dtype(data, job.dtype) if name == "config.json" else data, write))
    if len(job.plans) > 1:
        stem = job.plans[0].name.rpartition("-of-")[0].rpartition("-")[0]
        sealed.append(_write_small(f"{stem}.safetensors.index.json", output.index(job.plans), write))
    return Merged(tuple(sealed), tuple(tensors), tuple(notes), job.source)


class _Counter:
    """Bytes written so far, told to whoever shows progress."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total, self._done, self._progress = total, 0, progress

    def add(self, count: int) -> None:
        self._done += count
        if self._progress:
            self._progress(self._done, self._total)


def _sealed_tensors(file: FilePlan, copied: Copied) -> Iterator[SealedTensor]:
    for tensor, (_, found) in zip(file.tensors, copied.tensors, strict=True):
        yield SealedTensor(tensor.name, tensor.dtype, tensor.shape, file.name, tensor.start, tensor.size, found)


def _write_small(name: str, data: bytes, write: Write) -> SealedFile:
    pieces = [data[at : at + _PIECE] for at in range(0, len(data), _PIECE)]
    write(name, pieces)
    return SealedFile(name, len(data), digest(data))
