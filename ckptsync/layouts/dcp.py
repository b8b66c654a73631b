"""torch Distributed Checkpoint (DCP).

accelerate, HF Trainer, torchtitan, Lightning, Megatron-Core and torch itself write it.

Its metadata (`dcp_metadata`) says, for every tensor, the boxes (chunks) that it was cut into, and
for every box the file, offset and length of an item, which is a whole ``torch.save`` archive.

A state dict is saved with whatever its caller put around it, and ``planner_data`` keeps the path of
every tensor in it.  The first of a path of several is a section: ``{"model": …, "optimizer": …}``
by accelerate, Lightning's ``FSDPStrategy`` (``model``) and ``ModelParallelStrategy``
(``state_dict``), torch's own ``{"app": AppState}``.  torchtitan puts the model's tensors at the
top, beside the sections of everything else (``torchtitan/components/checkpointer/dcp.py`` 0.3:
``_flattened_model_states_sd``).  Megatron-Core has no sections at all, and names its optimizer's
tensors ``optimizer.…`` (``megatron/core/optimizer/{optimizer,distrib_optimizer}.py`` 0.12 to 0.16).
A section is never a prefix of a name: a model's own names may begin with "model." too.

Tensors at the top beside sections are one nested state dict, and all of it the model, if the
checkpoint has no optimizer and no section is a model of its own: by its name (``teacher``,
``model_b``), or since it has the very tensors of the top again (`_is_nested`).

A large model has an item for every chunk, back to back, and they differ in little but their
tensors' bytes. So the first of a kind is parsed and checked in full, and another one is of its kind
if it is as long and every byte that the parse looked at is the same, but for the CRC32 of the
tensor. Where the bytes differ, it is parsed in full as well: nothing is ever assumed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptsync.errors import Corrupt, Unsupported, name_in_errors
from ckptsync.formats import torch_save, torch_zip
from ckptsync.formats.dtypes import ITEMSIZE, from_torch
from ckptsync.formats.pickles import brief
from ckptsync.formats.torch_pickle import StoredTensor
from ckptsync.layouts.dcp_metadata import (
    ChunkedTensor,
    StorageItem,
    chunked,
    read_metadata,
)
from ckptsync.layouts.file_names import METADATA, is_of_one_rank, metadata_files
from ckptsync.layouts.state_dict import without_extra_states
from ckptsync.tensors import Checksum, Copy, Extent, Files, Part, Shape, Tensor, expect, read


def roots(names: Collection[str]) -> tuple[str, ...]:
    """Return the directories that hold shards of a DCP, of whatever states, or its metadata."""
    found = set()
    for name in names:
        root, _, base = name.rpartition("/")
        is_shard = base.startswith("__") and base.endswith(".distcp")
        if is_shard or base == METADATA or is_of_one_rank(base):
            found.add(root)
    return tuple(sorted(found))


def demands(files: Files, root: str) -> dict[str, int | None]:
    """Return every file that the metadata refers to, with its exact size.

    torch writes items back to back.

    Raises Incomplete on a node without metadata, Unsupported if tensors are no items of their own.
    """
    folder, _, world = split_root(files, root)
    needed: dict[str, int | None] = {
        name: files.sizes().get(name) for name in metadata_files(files.sizes(), folder)
    }
    for item in read_metadata(files, folder, world).stored:
        needed[item.file] = max(needed.get(item.file) or 0, item.start + item.size)
    _refuse_safetensors(files, needed)
    return needed


def tensors(files: Files, root: str) -> tuple[Tensor, ...]:
    """Return the weights, under the names that the model itself has.

    Every chunk is located and checked against its item.

    ``root`` may end in ``#section``, which takes one part of the state dict, or ``#world=N``, the
    number of ranks.
    """
    folder, section, world = split_root(files, root)
    metadata = read_metadata(files, folder, world)
    everything = chunked(metadata)
    named = weights(everything, metadata.fields, section, folder or ".")
    if not named:
        there = ", ".join(sorted({one.path[0] for one in everything}))
        raise Unsupported(
            f"{folder or '.'}: a distributed checkpoint without model tensors",
            hint=(
                f"choose a section ({there:.500}): --source 'dcp:{folder or '.'}#SECTION'"
                if there
                else ""
            ),
        )
    found = tuple(_tensors(files, named))
    remarks = (metadata.remark, _remark(everything, named, folder or "."))
    if any(remarks):
        found = (replace(found[0], remark="; ".join(filter(None, remarks))), *found[1:])
    return without_extra_states(found, metadata.fields["state_dict_metadata"])


def split_root(files: Files, root: str) -> tuple[str, str | None, int | None]:
    """Return the directory of a root, and the section or the number of ranks after its ``#``."""
    folder, mark, rest = root.rpartition("#")
    if not mark or any(name.rpartition("/")[0] == root for name in files.sizes()):
        return root, None, None
    folder = "" if folder == "." else folder
    if (
        (number := rest.removeprefix("world=")) != rest
        and number.isdecimal()
        and 0 < len(number) < 8
    ):
        return folder, None, int(number)
    return folder, rest, None


def _refuse_safetensors(files: Files, needed: Mapping[str, int | None]) -> None:
    """Raise Unsupported for shards of ``FileSystemWriter(serialization_format=SAFETENSORS)``.

    Such a file keeps items for blobs, and has all its tensors in one block at its end. The items
    say where a tensor would have been, so that the file has another size than they need. Source:
    ``_write_files_from_queue``.
    """
    for name, size in needed.items():
        there = files.sizes().get(name)
        if not size or there is None or there in (size, *range(10)):
            continue
        start = read(files, Extent(name, 0, 10))
        if start[8:] == b'{"' and int.from_bytes(start[:8], "little") <= there - 8:
            raise Unsupported(
                f"{name}: its tensors are one block of safetensors, not items"
                " (SerializationFormat.SAFETENSORS)",
                hint="save with SerializationFormat.TORCH_SAVE, or with HuggingFaceStorageWriter",
            )


def _refuse_packed(name: str, tensor: ChunkedTensor) -> None:
    """Raise Unsupported if a tensor's items went through an extension (``_extensions=[…]``).

    Source: ``torch/distributed/checkpoint/_extension.py``, 2.13, which has ZStandard alone.
    """
    for item in filter(None, (chunk.item for chunk in tensor.chunks)):
        if item.transforms:
            by = (
                "packed by torch's ZStandard extension"
                if all(one.startswith("stream.zstd/") for one in item.transforms)
                else f"written through {brief(tuple(item.transforms))}"
            )
            raise Unsupported(
                f"{item.file}: item {name} was {by}", hint="save it again without the extension"
            )


def _tensors(files: Files, named: Sequence[tuple[str, ChunkedTensor]]) -> Iterator[Tensor]:
    for name, tensor in named:
        _refuse_packed(name, tensor)
        if tensor.dtype not in ITEMSIZE:
            with name_in_errors(name):
                from_torch(tensor.dtype)
    items = [
        chunk.item
        for _, tensor in named
        for chunk in tensor.chunks
        if chunk.item and 0 not in chunk.sizes
    ]
    found = zip(items, find_items(files, items), strict=True)
    for name, tensor in named:
        parts = []
        for chunk in tensor.chunks:
            if 0 in chunk.sizes:
                continue
            item, (stored, extent, strides, checksum) = next(found)
            if stored.dtype != tensor.dtype or stored.shape != chunk.sizes:
                raise Corrupt(
                    f"{item.file}: the item at {item.start} is not the {tensor.dtype} chunk of"
                    f" {name} of size {chunk.sizes}"
                )
            parts.append(Part(chunk.offsets, chunk.sizes, extent, strides, checksum))
        yield Tensor(
            name, tensor.dtype, tensor.shape, (Copy(tensor.dtype, tensor.shape, tuple(parts)),)
        )


FoundItem = tuple[StoredTensor, Extent, Shape | None, Checksum | None]
"""A tensor in an item: where its elements lie, their strides if they are not contiguous, and the
CRC32 of its record.
"""


# Which tensors are the model's, and what the model itself calls them

TOP = ""  # the section of tensors that are in none
_MODEL = frozenset({"model", "module", "state_dict", "model_state_dict"})
_OTHER = re.compile(
    r"optim(izer)?s?(_states?)?(_dict)?(_[0-9]+)?|(lr_)?schedulers?(_[0-9]+)?|lr_scheduler_states?|(train_|val_)?data_?loaders?|samplers?"
    r"|train(er|ing)?(_states?)?|rng(_states?)?|(grad_|loss_)?scalers?|callbacks|loops|metrics|progress|steps?|global_step|epoch"
)
_AVERAGE = re.compile(r"(.+_)?ema(_.+)?")
_OF_ITS_OWN = re.compile(  # names of a whole model, or of a copy of one
    r"(.+_)?(model|module|state_dict|teacher|student|generator|discriminator|critic)s?[0-9]*(_.+)?"
    r"|(.+_)?(swa|avg|average|averaged|shadow|backup|copy)[0-9]*"
    r"|actor|policy|reward|target|ref|reference|best|last|old|previous|initial"
)
_OPTIMIZER = re.compile(
    r"(.+_)?optim(izer)?s?(_.+)?|param_groups(\..*)?|(.*\.)?(exp_avg|exp_avg_sq|momentum_buffer)",
    re.DOTALL,
)
_OF_OPTIMIZER = re.compile(r"(state|param_groups)(\..*)?", re.DOTALL)
_MEGATRON_OPTIMIZER = re.compile(r"(chained_[0-9]+\.)?optimizer\..*", re.DOTALL)
_EXTRA = "_extra_state"

Path = tuple[str, ...]
Named = tuple[tuple[Path, ChunkedTensor], ...]


def weights(
    found: Iterable[ChunkedTensor], fields: Mapping[str, Any], section: str | None, where: str
) -> list[tuple[str, ChunkedTensor]]:
    """Return the model's tensors under its own names; none if there is nothing but other states.

    ``fields`` are the metadata's.  ``section`` chooses one, `TOP` those in none; raises
    Unsupported, with the list, where there are several that could be meant.  ``where`` names the
    checkpoint.
    """
    named: Named = tuple((one.path, one) for one in found)
    # a planner that does not flatten keeps no paths: Megatron-Core's
    if not fields.get("planner_data"):
        named = _without_megatrons_optimizer(named, fields, where)
    sections = _sections(named)
    if section is not None:
        if section not in sections:
            there = ", ".join(repr(s) for s in sorted(sections))
            raise Unsupported(
                f"{where}: no section {brief(section)} in the state dict",
                hint=f"there are: {there}",
            )
        return _joined(_inner(section, sections[section]))
    known = _known(sections, _groups_of_parameters(fields))
    if len(known) > 1 and _is_nested(sections, known, fields):
        return _joined(tuple((path, one) for section in known for path, one in sections[section]))
    if len(known) > 1:
        names = ", ".join(repr(s) if s != TOP else "the names at the top" for s in sorted(known))
        raise Unsupported(
            f"{where}: {len(known)} sets of weights in one checkpoint ({names}): choose one",
            hint=" or ".join(f"--source 'dcp:{where}#{s}'" for s in sorted(known)),
        )
    return _joined(_inner(known[0], sections[known[0]])) if known else []


def _remark(
    found: Iterable[ChunkedTensor], chosen: Iterable[tuple[str, ChunkedTensor]], where: str
) -> str:
    """Return a remark on an average that is left out, and on sections merged with the top."""
    chosen = tuple(chosen)
    taken = {id(one) for _, one in chosen}
    left = {
        one.path[0]
        for one in found
        if len(one.path) > 1 and _AVERAGE.fullmatch(one.path[0].lower()) and id(one) not in taken
    }
    remarks = [
        f"{brief(s)} beside the weights is left out: --source 'dcp:{where}#{s}' takes it"
        for s in sorted(left)
    ]
    sections = _sections(tuple((one.path, one) for _, one in chosen))
    if len(sections) > 1:
        names = ", ".join(brief(s) for s in sorted(sections) if s != TOP)
        remarks.append(
            f"{names} and the top-level tensors are merged as one model; for the top level only:"
            f" --source 'dcp:{where}#'"
        )
    return "; ".join(remarks)


def _sections(named: Named) -> dict[str, Named]:
    """Return the tensors of each section; a module's extra state stays with the module."""
    found: dict[str, list[tuple[Path, ChunkedTensor]]] = {}
    for path, one in named:
        is_top = len(path) == 1 or path[0].endswith(_EXTRA)
        found.setdefault(TOP if is_top else path[0], []).append((path, one))
    return {section: tuple(inner) for section, inner in found.items()}


def _known(sections: Mapping[str, Named], grouped: Collection[str]) -> list[str]:
    """Return the sections that could be the model; none if there are only other states."""
    known = [
        s
        for s, inner in sections.items()
        if not _OTHER.fullmatch(s) and not _is_optimizer(s, inner, grouped)
    ]
    if TOP in known and len(sections) > 1 and not any(one.shape for _, one in sections[TOP]):
        known.remove(TOP)  # numbers beside the sections: a step, a loss
    if len(known) > 1:
        known = [s for s in known if any(map(_is_weight, (one for _, one in sections[s])))] or known
    if len(known) > 1:
        known = [s for s in known if not _AVERAGE.fullmatch(s.lower())] or known
    return known


def _is_nested(
    sections: Mapping[str, Named], known: Collection[str], fields: Mapping[str, Any]
) -> bool:
    """Return whether the known sections are parts of one nested state dict.

    One shape under one name in both proves no copy; two or more, and nothing else in one of them,
    may be another set of the same weights.
    """
    words = {str(word).lower() for path in _paths(fields) for word in path}
    if TOP not in known or any(map(_OPTIMIZER.fullmatch, words)):
        return False
    top = {(path, one.shape) for path, one in _joined(sections[TOP])}
    for section in known:
        if section == TOP:
            continue
        inner = {(name, one.shape) for name, one in _joined(_inner(section, sections[section]))}
        if (
            _OF_ITS_OWN.fullmatch(section.lower())
            or len(inner & top) == min(len(inner), len(top)) > 1
        ):
            return False
    return True


def _paths(fields: Mapping[str, Any]) -> list[Sequence[Any]]:
    """Return all paths in the state dict, also of what is no tensor."""
    paths = fields.get("planner_data")
    found = paths.values() if isinstance(paths, dict) else ()
    return [path for path in found if isinstance(path, (tuple, list))]


def _is_weight(one: ChunkedTensor) -> bool:
    """Return whether this is a floating-point tensor with axes: every model has some."""
    return bool(one.shape) and one.dtype.startswith(("F", "BF", "C"))


def _is_optimizer(section: str, inner: Named, grouped: Collection[str]) -> bool:
    """Return whether a section is a ``torch.optim`` state dict, whatever its name is."""
    return section in grouped and all(
        len(path) > 1 and _OF_OPTIMIZER.fullmatch(path[1]) for path, _ in inner
    )


def _groups_of_parameters(fields: Mapping[str, Any]) -> frozenset[str]:
    """Return the sections that have ``param_groups``, whose values are mostly no tensors."""
    return frozenset(
        str(path[0])
        for path in _paths(fields)
        if len(path) > 1 and type(path[1]) is str and path[1].startswith("param_groups")
    )


def _inner(section: str, named: Named) -> Named:
    """Return paths below the section, and below the model that an ``AppState`` in it may be."""
    if section == TOP:
        return named
    inner: Named = tuple((path[1:], one) for path, one in named)
    below = _sections(inner)
    model = [s for s in _MODEL if s in below]
    if section not in _MODEL and len(model) == 1 and TOP not in below:
        return tuple((path[1:], one) for path, one in below[model[0]])
    return inner


def _joined(named: Named) -> list[tuple[str, ChunkedTensor]]:
    return [(".".join(path), one) for path, one in named]


def _without_megatrons_optimizer(named: Named, fields: Mapping[str, Any], where: str) -> Named:
    """Return the tensors without the optimizer's.

    Raises Unsupported where nothing says that this is Megatron-Core's, or where a weight has not
    got its own shape.
    """
    kept: Named = tuple(
        (path, one) for path, one in named if not _MEGATRON_OPTIMIZER.fullmatch(path[0])
    )
    is_megatrons = "all_local_plans" in fields or "mcore_data" in fields
    if len(kept) < len(named) and not is_megatrons:
        raise Unsupported(
            f"{where}: tensors named 'optimizer.…' beside others, without a path that would say"
            " whether they are the model's",
            hint=(
                "Megatron-Core's torch_dist is known by its plans in .metadata, which were not"
                " found"
            ),
        )
    reshaped = fields.get("mcore_data")
    for path, _ in kept:
        data = reshaped.get(path[0]) if isinstance(reshaped, dict) else None
        if isinstance(data, dict) and data.get("nd_reformulated_orig_global_shape") is not None:
            raise Unsupported(
                f"{where}: {brief(path[0])} is stored flattened (flattened_range), not in its own"
                " shape",
                hint="load it with Megatron-Core and save it again as torch_dist",
            )
    return kept


# Items, found at the cost of a comparison

_HEAD = _TAIL = 1 << 10  # where torch puts all but the tensor; of one that has more, more is read
_GAP = 4 << 10  # bytes of a tensor that cost less than another read
_SMALL = _HEAD + _TAIL + _GAP  # bytes of an item that is read whole
_MOST = 1 << 20  # bytes of one read
_LARGEST = 1 << 16  # bytes of head or directory that are kept for comparing
_KINDS = 8  # of one length that are kept


@dataclass(frozen=True, slots=True, eq=False)
class _ItemKind:
    """What items of one kind have in common: the tensor, and the bytes that describe it.

    ``extent`` and ``record`` (of the CRC32, if it is real) are those of an item that begins at 0.
    ``head`` are its bytes before the tensor's. ``tail`` bytes are the central directory and what is
    behind it; ``ends`` are those without the CRC32s that differ, in pieces, each from where in it.
    The tensor's own CRC32 is at ``crc_at`` in it.
    """

    stored: StoredTensor
    strides: Shape | None
    extent: Extent
    record: Extent | None
    head: bytes
    ends: tuple[tuple[int, bytes], ...]
    tail: int
    crc_at: int

    def of(self, item: StorageItem, crc32: int) -> FoundItem:
        """Return the tensor of an item of this kind."""
        extent, record = self.extent, self.record
        found = Extent(item.file, item.start + extent.start, extent.size)
        if record is None:
            return self.stored, found, self.strides, None
        summed = (
            found if record is extent else Extent(item.file, item.start + record.start, record.size)
        )
        return self.stored, found, self.strides, Checksum(summed, crc32)


def find_items(files: Files, items: Sequence[StorageItem]) -> list[FoundItem]:
    """Return the tensor of every item; raises Corrupt for one that is no archive of one."""
    places = [(item.file, item.start) for item in items]
    order = sorted(range(len(items)), key=places.__getitem__)
    found: list[FoundItem] = [None] * len(items)  # type: ignore[list-item]
    window = _Window(files, [items[n] for n in order])
    kinds: dict[int, list[_ItemKind]] = {}
    for n in order:
        item = items[n]
        for kind in kinds.get(item.size, ()):
            crc32 = _compare(kind, item, window)
            if crc32 is not None:
                break
        else:
            kind, crc32 = _parse(files, item)
            if kind.ends:
                kinds[item.size] = [kind, *kinds.get(item.size, ())][:_KINDS]
        found[n] = kind.of(item, crc32)
    return found


def _compare(kind: _ItemKind, item: StorageItem, window: _Window) -> int | None:
    """Return the CRC32 that the archive gives for the tensor, if the item is of this kind."""
    size = item.size
    at = window.find(item, 0, size if size <= _SMALL else len(kind.head))
    if not window.data.startswith(kind.head, at):
        return None
    at = at + size - kind.tail if size <= _SMALL else window.find(item, size - kind.tail, kind.tail)
    data = window.data
    for start, piece in kind.ends:
        if not data.startswith(piece, at + start):
            return None
    at += kind.crc_at
    return int.from_bytes(data[at : at + 4], "little")


def _parse(files: Files, item: StorageItem) -> tuple[_ItemKind, int]:
    """Read an item in full and return its kind and its CRC32.

    The kind has no ``ends``, and so is like no other, if torch does not lay items out like this
    one.
    """
    stored, archive = torch_save.load_tensor(files, Extent(item.file, item.start, item.size))
    part = torch_save.part(files, archive, stored)
    name = f"data/{stored.storage.key}"
    record = torch_zip.extent(files, archive, name)
    head, ends = b"", list[tuple[int, bytes]]()
    looked_at = [
        torch_zip.extent(files, archive, other)
        for other in ("data.pkl", torch_zip.witness(archive))
        if other
    ]
    before, behind = record.start - item.start, item.start + item.size - archive.directory.start
    is_usual = archive.directory.start >= record.start + record.size and all(
        e.start + e.size <= record.start for e in looked_at
    )
    if is_usual and max(before, behind) <= _LARGEST:
        head = read(files, Extent(item.file, item.start, before))
        tail = read(files, Extent(item.file, archive.directory.start, behind))
        at = 0
        # torch makes a ``serialization_id`` of the tensor's CRC32, so that both differ
        for key in (key for key in archive.records if key in (name, ".data/serialization_id")):
            end = archive.records[key].entry + torch_zip.CRC_AT
            ends.append((at, tail[at:end]))
            at = end + 4
        ends.append((at, tail[at:]))
    extent = Extent(item.file, part.extent.start - item.start, part.extent.size)
    own_record = extent if part.extent == record else Extent(item.file, before, record.size)
    crc_at = archive.records[name].entry + torch_zip.CRC_AT
    kind = _ItemKind(
        stored,
        part.strides,
        extent,
        own_record if part.checksum else None,
        head,
        tuple(ends),
        behind,
        crc_at,
    )
    return kind, archive.records[name].crc


class _Window:
    """``data`` are bytes around the item that is being compared; items come in file order."""

    def __init__(self, files: Files, items: Sequence[StorageItem]) -> None:
        self.data = b""
        self._files, self._file, self._start = files, "", 0
        self._reads, self._next = _reads(items), 0
        expect(files, self._reads)

    def find(self, item: StorageItem, at: int, size: int) -> int:
        """Return where in ``data`` these bytes of the item are, after reading them if need be."""
        start = item.start + at - self._start
        if start < 0 or start + size > len(self.data) or item.file != self._file:
            self._read(Extent(item.file, item.start + at, size))
            return item.start + at - self._start
        return start

    def _read(self, needed: Extent) -> None:
        """Read the planned extent that has these bytes, else them alone."""
        while self._next < len(self._reads):
            planned = self._reads[self._next]
            if (planned.file, planned.start) > (needed.file, needed.start):
                break
            self._next += 1
            if (
                planned.file == needed.file
                and planned.start + planned.size >= needed.start + needed.size
            ):
                needed = planned
                break
        self.data, self._file, self._start = read(self._files, needed), needed.file, needed.start


def _reads(items: Sequence[StorageItem]) -> list[Extent]:
    """Return the ranges to read of items, in the order of their files.

    A small item is read whole, of a large one the head and the tail.

    What lies near each other is read together.
    """
    found: list[Extent] = []
    file, start, end = "", 0, 0
    for item in items:
        first, last = item.start, item.start + item.size
        spans = (
            ((first, last),)
            if item.size <= _SMALL
            else ((first, first + _HEAD), (last - _TAIL, last))
        )
        for low, high in spans:
            is_near = item.file == file and start <= low <= end + _GAP
            if is_near and (high <= end or high - start <= _MOST):
                end = max(end, high)
                continue
            if file:
                found.append(Extent(file, start, end - start))
            file, start, end = item.file, low, high
    if file:
        found.append(Extent(file, start, end - start))
    return found
