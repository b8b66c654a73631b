"""Before the first byte is written: which tensors, under which names, in which files, with what beside them.  Pure but for small reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckptsync.collector import paused
from ckptsync.errors import Corrupt, Incomplete, Unsupported
from ckptsync.formats import zstd_items
from ckptsync.formats.zstd_items import unpacked
from ckptsync.layouts import table
from ckptsync.layouts.shapes_proof import CONFIG, Outside
from ckptsync.layouts.table import Source
from ckptsync.merge import adapter, copies, output, rename, ties
from ckptsync.merge import base as reference
from ckptsync.merge.adapter import Selected
from ckptsync.merge.base import Base
from ckptsync.merge.notes import NO_ADAPTER_CONFIG
from ckptsync.merge.notes import of_code as notes_of_code
from ckptsync.merge.notes import of_model as notes_of_model
from ckptsync.merge.plan import FilePlan, Options, plan
from ckptsync.model import Checksum, Extent, Files, Tensor, read_whole
from ckptsync.parsing import parse

MAX_BESIDE = 256 << 20
MAX_CONFIG = 16 << 20


@dataclass(frozen=True, slots=True)
class Job:
    """Everything that is known before the first byte is written.

    ``beside``: the files beside the weights and where they come from; ``held``: the bytes of those that were read already, as they are written:
    what was looked through for code is not read a second time, when it may be something else.
    ``left_out``: code in the checkpoint that is not written, a file's name or ``config.json: auto_map``.  ``code``: names of those of
    ``beside`` that bring code from the directory that the operator named.
    """

    source: str
    plans: tuple[FilePlan, ...]
    beside: tuple[tuple[str, Files], ...]
    notes: tuple[str, ...]
    held: Mapping[str, bytes] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    code: frozenset[str] = frozenset()

    def content(self, name: str) -> bytes:
        """Return the bytes of a file of ``beside`` as they are written.  Raises what its place raises."""
        return self.held[name] if name in self.held else read_whole(dict(self.beside)[name], name, MAX_BESIDE)

    @property
    def size(self) -> int:
        """Bytes of weights to write."""
        return sum(p.size for p in self.plans)

    @property
    def is_adapter(self) -> bool:
        """Whether it is a PEFT adapter that is written, not a model."""
        return any(plan.name == f"{adapter.STEM}.safetensors" for plan in self.plans)

    @property
    def checksums(self) -> frozenset[Checksum]:
        """What the containers say of the records that are read."""
        return frozenset(part.checksum for p in self.plans for t in p.tensors for part in t.copy.parts if part.checksum)

    @property
    def is_packed(self) -> bool:
        """Whether bytes are read that can only be unpacked in their order."""
        return any(map(zstd_items.parse_name, _names(self.plans)))

    @property
    def reads(self) -> frozenset[str]:
        """The source files whose tensor bytes are read."""
        told = {name: zstd_items.parse_name(name) for name in _names(self.plans)}
        return frozenset(one.item.file if one else name for name, one in told.items())


@paused()
def prepare(
    files: Files, options: Options, config: Sequence[Files] = (), base: Files | None = None, code_from: Files | None = None
) -> Job:
    """Plan a merge and check that it can be done.  Raises Incomplete, Unsupported or Corrupt; writes nothing.

    ``config``: further places for configuration and tokenizer, the first that has a file wins; ``base``: the model to compare with.
    ``code_from``: the one of these places from which code is taken, also without ``options.allow_code``: the operator named it.
    """
    files = unpacked(files)
    wanted, part = adapter.split_source(options.source)
    source = table.choose(files, wanted)
    config = (*table.around(files, source), *config)
    known = reference.read(base) if base else None
    stored = table.tensors(files, source, _outside([*config, *([base] if base else [])], known))
    told = _json(_first([files, *config], is_adapter=True), adapter.CONFIG)

    def select(tensors: Sequence[Tensor]) -> tuple[Selected, tuple[str, ...]]:
        clean, renamed = rename.unwrapped(tensors, known.tensors if known else ())
        return adapter.select(clean, part, told), renamed

    selected, renamed = select(stored)
    remarks = (*dict.fromkeys(t.remark for t in stored if t.remark), *renamed, *_check_copies(files, source, selected, select))
    given = _Given(files, options, [files, *config, *([base] if base else [])], known, code_from)
    written = _model(given, selected) if selected.adapter is None and source.layout != "peft" else _adapter(given, selected)
    if not written.plans:
        raise Unsupported(f"{source}: a model without tensors", hint="is this the checkpoint's directory, and was the model saved?")
    _check_bounds(files, written.plans)
    return replace(written, source=f"{source}@{part}" if part else str(source), notes=(*remarks, *selected.notes, *written.notes))


def prepare_beside(
    files: Files, options: Options, config: Sequence[Files], dtypes: Iterable[str], code_from: Files | None = None
) -> Job:
    """Return what stands beside a model that is made already: a job without weights.  Reads no shard: they may be gone.

    ``options.source``: of which it was made; ``dtypes``: of its tensors; the rest as in `prepare`.
    """
    around = table.around(files, Source.named((options.source or "").partition("@")[0]))
    written = _beside(_Given(files, options, (), None, code_from), [files, *around, *config], is_adapter=False)
    if "config.json" not in dict(written.beside):
        return written
    told = output.with_dtype(written.content("config.json"), output.told_dtype(dtypes, options.dtype))
    return replace(written, held={**written.held, "config.json": told})


def _check_copies(
    files: Files, source: Source, selected: Selected, select: Callable[[Sequence[Tensor]], tuple[Selected, tuple[str, ...]]]
) -> Iterator[str]:
    """Raise Corrupt where what is stored twice differs, in the source or in another of the same save; gives what was not compared."""
    found = {tensor.name: tensor for tensor in selected.tensors}
    for other in table.beside(files, source):
        try:
            its, _ = select(table.tensors(files, other))
        except (Corrupt, Incomplete, Unsupported) as e:
            yield f"not compared with {other}, which cannot be merged: {e}"
            continue
        for tensor in its.tensors:
            mine = found.get(tensor.name)
            if mine and (mine.shape, mine.dtype) == (tensor.shape, tensor.dtype):
                unlike = mine.unlike or tensor.unlike
                found[tensor.name] = replace(mine, copies=(*mine.copies, *tensor.copies), unlike=unlike)
    copies.check(files, found.values())


def _outside(places: Sequence[Files], known: Base | None) -> Outside:
    """What may prove the shapes of tensors that a checkpoint does not tell itself: not the packed matrices of a quantised base."""
    told = known.tensors.items() if known else ()
    shapes = {n: t.shape for n, t in told if len(t.shape) < 2 or t.dtype not in ("U8", "I8", "I32", "U32")}
    place = next((place for place in places if CONFIG in place.sizes()), None)
    return Outside(shapes, read_whole(place, CONFIG, MAX_BESIDE) if place else None)


@dataclass(frozen=True, slots=True)
class _Given:
    """``places``: where configuration and tokenizer may lie."""

    files: Files
    options: Options
    places: Sequence[Files]
    base: Base | None
    code_from: Files | None


def _model(given: _Given, selected: Selected) -> Job:
    written = _beside(given, given.places, is_adapter=False)
    config, base, options = _json(written.beside, "config.json"), given.base, given.options
    _check_packed(selected.tensors, options)
    tensors, notes = ties.without_tied(selected.tensors, given.files, options, config, base.tensors if base else None)
    if base:
        notes = (*notes, *reference.compare(tensors, base, _tied(selected.tensors, tensors, base, config)))
        tensors = reference.with_dtypes(tensors, base) if options.dtype == "auto" else tensors
    plans = plan(tensors, options)
    told = notes_of_model(tensors, config, options.dtype)
    held = dict(written.held)
    if config is not None:
        held["config.json"] = output.with_dtype(written.content("config.json"), output.dtype_to_tell(plans, options.dtype))
    return replace(written, plans=plans, notes=(*notes, *told, *written.notes), held=held)


def _check_packed(tensors: Sequence[Tensor], options: Options) -> None:
    """bitsandbytes keeps packed 4-bit weights in any dtype, floats too: no cast may touch them."""
    found = next((t.name for t in tensors if t.name.endswith((".absmax", ".SCB")) or ".quant_state." in t.name), None)
    if found and options.dtype not in ("auto", "keep"):
        raise Unsupported(
            f"{found}: weights that are quantised cannot be cast to {options.dtype}", hint="--dtype auto, or keep, copies them"
        )


def _tied(stored: Sequence[Tensor], written: Sequence[Tensor], base: Base, config: Mapping[str, Any] | None) -> set[str]:
    """Names that the written model, or the base, need not have: another of a tied pair stands for them."""
    left = {t.name for t in stored} - {t.name for t in written}
    there = base.beside({t.name: t for t in stored}).keys() | {t.name for t in written}
    pairs = ties.pairs(there) if config and ties.is_tied(config) else ()
    return left | {second for second, first in pairs if first in there}


def _adapter(given: _Given, selected: Selected) -> Job:
    """One file, whatever its size: peft knows no adapter of several."""
    written = _beside(given, [_of_adapter(given.files, selected.adapter), *given.places], is_adapter=True)
    config = _json(written.beside, adapter.CONFIG)
    adapter.check(selected, config or {})
    notes = reference.compare_adapter(selected.tensors, given.base) if given.base else ()
    plans = plan(selected.tensors, replace(given.options, max_shard_size=1 << 62), adapter.STEM)
    lacking = () if config is not None else (NO_ADAPTER_CONFIG,)
    return replace(written, plans=plans, notes=(*notes, *lacking, *written.notes))


def _of_adapter(files: Files, name: str | None) -> Files:
    """peft saves an adapter that is not called default in a directory of its name: its configuration is there."""
    own = f"{name}/{adapter.CONFIG}"
    return _Moved(files, own, adapter.CONFIG) if own in files.sizes() else files


@dataclass(frozen=True, slots=True)
class _Moved:
    """One file of ``files``, under another name."""

    files: Files
    stored: str
    name: str

    def sizes(self) -> Mapping[str, int]:
        return {self.name: self.files.sizes()[self.stored]}

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        self.files.read_into(self.stored if name == self.name else name, start, out)


def _beside(given: _Given, places: Sequence[Files], *, is_adapter: bool) -> Job:
    """Return a job that has no weights yet: what stands beside them, without code from a place that nobody named for it."""
    named, allowed = given.code_from, given.options.allow_code
    found: dict[str, Files] = {}
    withheld: list[str] = []
    for place in places:
        for name in output.beside(place.sizes(), adapter=is_adapter):
            if allowed or place is named or not output.is_code(name):
                found.setdefault(name, place)
            else:
                withheld.append(name)
    job = Job("", (), tuple((name, found[name]) for name in output.beside(found, adapter=is_adapter)), ())
    if allowed:
        return job
    left = {name for name in withheld if name not in found}
    held: dict[str, bytes] = {}
    code = {name for name in found if output.is_code(name)}
    for name, place in job.beside:
        if not output.is_configuration(name):
            continue
        held[name] = config = read_whole(place, name, MAX_CONFIG)
        keys = output.code_of(name, config)
        known = keys if place is named else _code_of(named, name)
        if place is not named:
            held[name] = output.without_code(name, config, known)
            left |= {f"{name}: {key}" for key in keys if key not in known}
        if known.keys() & keys.keys():
            code.add(name)
    left_out = tuple(sorted(left))
    return replace(job, held=held, left_out=left_out, code=frozenset(code), notes=notes_of_code(left_out))


def _code_of(named: Files | None, name: str) -> Mapping[str, Any]:
    """What the file of this name in the directory that the operator named says of code, as far as that stands at its top."""
    if named is None or name not in named.sizes():
        return {}
    return {key: value for key, value in output.code_of(name, read_whole(named, name, MAX_CONFIG)).items() if value is not None}


def _first(places: Sequence[Files], *, is_adapter: bool) -> tuple[tuple[str, Files], ...]:
    """File → the first place that has it, in the order in which they are written."""
    found: dict[str, Files] = {}
    for place in places:
        for name in output.beside(place.sizes(), adapter=is_adapter):
            found.setdefault(name, place)
    return tuple((name, found[name]) for name in output.beside(found, adapter=is_adapter))


def _json(beside: Sequence[tuple[str, Files]], name: str) -> dict[str, Any] | None:
    """What a configuration says; None where there is none, nothing where it cannot be read: it is copied as it is."""
    place = dict(beside).get(name)
    if place is None:
        return None
    data = read_whole(place, name, MAX_CONFIG)
    try:
        content = parse(data, name)
    except Corrupt:
        return {}  # what it means is for its reader to say
    return content if isinstance(content, dict) else {}


def _check_bounds(files: Files, plans: Sequence[FilePlan]) -> None:
    """Every byte that will be read is there: found out before anything is written."""
    sizes = files.sizes()
    ends: dict[str, int] = {}
    for extent in (part.extent for p in plans for t in p.tensors for part in t.copy.stored()):
        end = extent.start + extent.size
        if end > ends.get(extent.file, 0):
            ends[extent.file] = end
    for name, end in ends.items():
        extent = zstd_items.real_extent(Extent(name, 0, end))
        if extent.start + extent.size > sizes.get(extent.file, 0):
            wanted = extent.start + extent.size
            raise Corrupt(
                f"{extent.file}: {sizes.get(extent.file, 0)} bytes, at least {wanted} expected",
                hint="it was cut short: fetch it again",
            )


def _names(plans: Sequence[FilePlan]) -> set[str]:
    """Files that are read, as extents name them."""
    return {part.extent.file for p in plans for t in p.tensors for part in t.copy.stored()}
