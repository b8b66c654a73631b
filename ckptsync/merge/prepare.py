"""Before the first byte is written: which tensors, under which names, in which files, with what beside them.  Pure but for small reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.formats import layouts
from ckptsync.merge import output, ties
from ckptsync.merge.plan import FilePlan, Options, plan
from ckptsync.model import Checksum, Files, read_whole

MAX_BESIDE = 256 << 20


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


def prepare(files: Files, options: Options, config: Sequence[Files] = ()) -> Job:
    """Plan a merge and check that it can be done.  Raises Incomplete, Unsupported or Corrupt; writes nothing."""
    source = layouts.choose(files, options.source)
    adapter = source.layout == "peft"
    beside = _beside([files, *config], adapter=adapter)
    found = layouts.tensors(files, source)
    tensors, notes = ties.without_tied(found, files, options, _config(beside))
    notes = (*dict.fromkeys(t.remark for t in found if t.remark), *notes)
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


def _beside(places: Sequence[Files], *, adapter: bool) -> tuple[tuple[str, Files], ...]:
    """File → the first place that has it."""
    found: dict[str, Files] = {}
    for place in places:
        for name in output.beside(place.sizes(), adapter=adapter):
            found.setdefault(name, place)
    return tuple(sorted(found.items()))


def _config(beside: Sequence[tuple[str, Files]]) -> bytes | None:
    place = dict(beside).get("config.json")
    return read_whole(place, "config.json", MAX_BESIDE) if place else None


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
