"""From the files of a checkpoint to a consolidated model: plan everything, then write it file by file, the index last.

The bytes written are a pure function of the files, the options and the output's format number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ckptsync.digest import digest
from ckptsync.errors import Corrupt, Unsupported
from ckptsync.formats import layouts
from ckptsync.merge import output, ties
from ckptsync.merge.copying import Copied, Copying
from ckptsync.merge.plan import FilePlan, Options, plan
from ckptsync.merge.summed import SummedFiles
from ckptsync.model import Checksum, Files, read_whole
from ckptsync.records.seal import SealedFile, SealedTensor

Chunk = bytes | bytearray | memoryview
Write = Callable[[str, Iterable[Chunk]], None]
Progress = Callable[[int, int], None]
_PIECE = 4 << 20
_MAX_BESIDE = 256 << 20


@dataclass(frozen=True, slots=True)
class Job:
    """Everything that is known before the first byte is written."""

    source: str
    plans: tuple[FilePlan, ...]
    beside: tuple[tuple[str, Files], ...]
    notes: tuple[str, ...]
    dtype: str | None = None  # what `config.json` is to say

    @property
    def size(self) -> int:
        """Bytes of weights to write."""
        return sum(p.size for p in self.plans)

    @property
    def checksums(self) -> frozenset[Checksum]:
        """What the containers say of the records that are read."""
        return frozenset(part.checksum for p in self.plans for t in p.tensors for part in t.copy.parts if part.checksum)

    @property
    def reads(self) -> frozenset[str]:
        """The source files whose tensor bytes are read."""
        return frozenset(part.extent.file for p in self.plans for t in p.tensors for part in t.copy.parts)


@dataclass(frozen=True, slots=True)
class Merged:
    """What was written, with a digest for every file and tensor, and what the reader should know."""

    files: tuple[SealedFile, ...]
    tensors: tuple[SealedTensor, ...]
    notes: tuple[str, ...]
    source: str


def prepare(files: Files, options: Options, config: Sequence[Files] = ()) -> Job:
    """Plan a merge and check that it can be done.  Raises Incomplete, Unsupported or Corrupt; writes nothing."""
    source = layouts.choose(files, options.source)
    adapter = source.layout == "peft"
    beside = _beside([files, *config], adapter=adapter)
    tensors, notes = ties.without_tied(layouts.tensors(files, source), files, options, _config(beside))
    stem = "adapter_model" if adapter else "model"
    plans = plan(tensors, options, stem)
    if not plans:
        raise Unsupported(f"{source}: a model without tensors", hint="is this the checkpoint's directory, and was the model saved?")
    _check_bounds(files, plans)
    if "config.json" not in dict(beside) and not adapter:
        notes = (
            *notes,
            "no config.json was found: give its directory with --config-from, so that from_pretrained can open the model",
        )
    if not adapter and any(".lora_" in t.name for t in tensors):
        notes = (
            *notes,
            "there are LoRA weights, under the names that the shards give them: from_pretrained does not look for those",
        )
    return Job(str(source), plans, beside, notes, output.dtype_to_tell(plans, options.dtype))


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
        data = read_whole(place, name, _MAX_BESIDE)
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


def _beside(places: Sequence[Files], *, adapter: bool) -> tuple[tuple[str, Files], ...]:
    """File → the first place that has it."""
    found: dict[str, Files] = {}
    for place in places:
        for name in output.beside(place.sizes(), adapter=adapter):
            found.setdefault(name, place)
    return tuple(sorted(found.items()))


def _config(beside: Sequence[tuple[str, Files]]) -> bytes | None:
    place = dict(beside).get("config.json")
    return read_whole(place, "config.json", _MAX_BESIDE) if place else None


def _check_bounds(files: Files, plans: Sequence[FilePlan]) -> None:
    """Every byte that will be read is there: found out before anything is written."""
    sizes = files.sizes()
    for extent in (part.extent for p in plans for t in p.tensors for part in t.copy.parts):
        if extent.start + extent.size > sizes.get(extent.file, 0):
            wanted = extent.start + extent.size
            raise Corrupt(
                f"{extent.file}: {sizes.get(extent.file, 0)} bytes, at least {wanted} expected",
                hint="it was cut short: fetch it again",
            )


def _sealed_tensors(file: FilePlan, copied: Copied) -> Iterator[SealedTensor]:
    for tensor, (_, found) in zip(file.tensors, copied.tensors, strict=True):
        yield SealedTensor(tensor.name, tensor.dtype, tensor.shape, file.name, tensor.start, tensor.size, found)


def _write_small(name: str, data: bytes, write: Write) -> SealedFile:
    pieces = [data[at : at + _PIECE] for at in range(0, len(data), _PIECE)]
    write(name, pieces)
    return SealedFile(name, len(data), digest(data))
