"""torch's Distributed Checkpoint (DCP): find the model's tensors, and where each chunk lies.

accelerate, HF Trainer, torchtitan, Lightning, Megatron-Core and torch itself write it. Its metadata
(`dcp_metadata`) says, for every tensor, the boxes (chunks) that it was cut into, and for every box
the file, offset and length of an item, which is a whole ``torch.save`` archive. Two questions are
left: which tensors are the model's, and where in an item its elements lie.

A state dict is saved with the dictionaries that its caller put around it, and ``planner_data``
keeps the path of every tensor. The first part of a longer path is a section: ``{"model": …,
"optimizer": …}`` by accelerate, Lightning's ``FSDPStrategy`` (``model``) and
``ModelParallelStrategy`` (``state_dict``), torch's own ``{"app": AppState}``. torchtitan puts the
model's tensors at the top, beside the sections of everything else
(``torchtitan/components/checkpointer/dcp.py`` 0.3: ``_flattened_model_states_sd``). Megatron-Core
has no sections at all, and names its optimizer's tensors ``optimizer.…``
(``megatron/core/optimizer/{optimizer,distrib_optimizer}.py`` 0.12 to 0.16). A section is never a
prefix of a name: a model's own names may begin with "model." too.

Tensors at the top beside sections are one nested state dict, and all of it the model, if the
checkpoint has no optimizer and no section is a model of its own: by its name (``teacher``,
``model_b``), or since it has the tensors of the top again (`_is_nested`).

A large model has an item for every chunk, and they differ in little but their tensors' bytes. So
the first of a kind is parsed and checked in full, and another one is of its kind if it is as long
and all bytes that the parse read are the same, except for the CRC32 of the tensor. An item that
differs is parsed in full as well.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
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
    """Return the directories that hold shards or metadata of a DCP, whatever states it has."""
    folders = set()
    for name in names:
        root, _, base = name.rpartition("/")
        is_shard = base.startswith("__") and base.endswith(".distcp")
        if is_shard or base == METADATA or is_of_one_rank(base):
            folders.add(root)
    return tuple(sorted(folders))


def demands(files: Files, root: str) -> dict[str, int | None]:
    """Return the metadata's own files and all that it refers to, with their exact sizes.

    Items lie back to back, so a shard ends with its last one. Raise Incomplete on a node without
    metadata, Unsupported if tensors are no items of their own, Corrupt if the metadata is damaged.
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

    Every chunk is located, and compared with its item. ``root`` may end in ``#section``, for one
    part of the state dict, or in ``#world=N``, the number of ranks. Raise Unsupported if no tensors
    are the model's or it is not clear which, Incomplete without metadata, Corrupt for damage.
    """
    folder, section, world = split_root(files, root)
    metadata = read_metadata(files, folder, world)
    everything = chunked(metadata)
    named_chunks = weights(everything, metadata.fields, section, folder or ".")
    if not named_chunks:
        listed = ", ".join(sorted({tensor.path[0] for tensor in everything}))
        raise Unsupported(
            f"{folder or '.'}: a distributed checkpoint without model tensors",
            hint=(
                f"choose a section ({listed:.500}): --source 'dcp:{folder or '.'}#SECTION'"
                if listed
                else ""
            ),
        )
    weight_tensors = tuple(_tensors(files, named_chunks))
    remarks = (metadata.remark, _remark(everything, named_chunks, folder or "."))
    if any(remarks):
        weight_tensors = (
            replace(weight_tensors[0], remark="; ".join(filter(None, remarks))),
            *weight_tensors[1:],
        )
    return without_extra_states(weight_tensors, metadata.fields["state_dict_metadata"])


def has_optimizer(files: Files, root: str) -> bool:
    """Return whether the state dict has an optimizer's: a section of that name, or param_groups.

    False without a planner that keeps paths: Megatron-Core's keeps more in ``common.pt``. Raise as
    `demands`.
    """
    folder, _, world = split_root(files, root)
    sections = (
        (above, below)
        for path in _paths(read_metadata(files, folder, world).fields)
        for above, below in pairwise(path)
        if isinstance(above, str) and isinstance(below, str)  # the text of another may be endless
    )
    return any(
        _OPTIMIZER.fullmatch(above.lower()) or _GROUPS.match(below) for above, below in sections
    )


def split_root(files: Files, root: str) -> tuple[str, str | None, int | None]:
    """Return the directory of a root, and the section or number of ranks after its ``#``, or None.

    A directory that has a ``#`` in its name is meant if it exists. ``world=`` needs 1 to 7 digits.
    """
    folder, hash_mark, suffix = root.rpartition("#")
    if not hash_mark or any(name.rpartition("/")[0] == root for name in files.sizes()):
        return root, None, None
    folder = "" if folder == "." else folder
    if (
        (number := suffix.removeprefix("world=")) != suffix
        and number.isdecimal()
        and 0 < len(number) < 8
    ):
        return folder, None, int(number)
    return folder, suffix, None


def _refuse_safetensors(files: Files, needed: Mapping[str, int | None]) -> None:
    """Raise Unsupported for shards of ``FileSystemWriter(serialization_format=SAFETENSORS)``.

    Such a file keeps items for blobs, and has all its tensors in one block at its end. Its metadata
    has items for the tensors as well, so that the size of the file is not the one they need.
    Source: ``_write_files_from_queue`` of ``torch/distributed/checkpoint/filesystem.py``, 2.13.
    """
    for name, size in needed.items():
        actual_size = files.sizes().get(name)
        if not size or actual_size is None or actual_size in (size, *range(10)):
            continue
        start = read(files, Extent(name, 0, 10))
        if start[8:] == b'{"' and int.from_bytes(start[:8], "little") <= actual_size - 8:
            raise Unsupported(
                f"{name}: its tensors are one block of safetensors, not items"
                " (SerializationFormat.SAFETENSORS)",
                hint="save with SerializationFormat.TORCH_SAVE, or with HuggingFaceStorageWriter",
            )


def _refuse_packed(name: str, tensor: ChunkedTensor) -> None:
    """Raise Unsupported if an extension wrote a tensor's items (``_extensions=[…]``).

    Source: ``torch/distributed/checkpoint/_extension.py``, 2.13, which has only ZStandard.
    """
    for item in filter(None, (chunk.item for chunk in tensor.chunks)):
        if item.transforms:
            method = (
                "packed by torch's ZStandard extension"
                if all(transform.startswith("stream.zstd/") for transform in item.transforms)
                else f"written through {brief(tuple(item.transforms))}"
            )
            raise Unsupported(
                f"{item.file}: item {name} was {method}", hint="save it again without the extension"
            )


def _tensors(files: Files, weight_tensors: Sequence[tuple[str, ChunkedTensor]]) -> Iterator[Tensor]:
    """Yield the tensors with the extents of their chunks; chunks without elements have none.

    The items are read at the first ``next``. Raise Corrupt if an item is not its chunk, Unsupported
    for an extension or dtype that cannot be read.
    """
    for name, tensor in weight_tensors:
        _refuse_packed(name, tensor)
        if tensor.dtype not in ITEMSIZE:
            with name_in_errors(name):
                from_torch(tensor.dtype)
    items = [
        chunk.item
        for _, tensor in weight_tensors
        for chunk in tensor.chunks
        if chunk.item and 0 not in chunk.sizes
    ]
    located = zip(items, find_items(files, items), strict=True)
    for name, tensor in weight_tensors:
        parts = []
        for chunk in tensor.chunks:
            if 0 in chunk.sizes:
                continue
            item, (stored, extent, strides, checksum) = next(located)
            if stored.dtype != tensor.dtype or stored.shape != chunk.sizes:
                raise Corrupt(
                    f"{item.file}: the item at {item.start} is not the {tensor.dtype} chunk of"
                    f" {name} of size {chunk.sizes}"
                )
            parts.append(Part(chunk.offsets, chunk.sizes, extent, strides, checksum))
        yield Tensor(
            name, tensor.dtype, tensor.shape, (Copy(tensor.dtype, tensor.shape, tuple(parts)),)
        )


LocatedItem = tuple[StoredTensor, Extent, Shape | None, Checksum | None]
"""A tensor in an item: the tensor, the extent of its elements, their strides if they are not
contiguous, and the CRC32 of its record.
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
_GROUPS = re.compile(r"param_groups(\.|\Z)")
_OF_OPTIMIZER = re.compile(r"(state|param_groups)(\..*)?", re.DOTALL)
_MEGATRON_OPTIMIZER = re.compile(r"(chained_[0-9]+\.)?optimizer\..*", re.DOTALL)
_EXTRA = "_extra_state"

Path = tuple[str, ...]
PathsAndTensors = tuple[tuple[Path, ChunkedTensor], ...]


def weights(
    tensors: Iterable[ChunkedTensor], fields: Mapping[str, Any], section: str | None, title: str
) -> list[tuple[str, ChunkedTensor]]:
    """Return the model's tensors under its own names; [] if there are only other states.

    ``fields`` are the metadata's. ``section`` chooses one, `TOP` the tensors in none, None the one
    that can be the model; ``title`` names the checkpoint in errors. Raise Unsupported if there is
    no such section, or if several could be meant and are not parts of one; the hint lists them.
    """
    paths_and_tensors: PathsAndTensors = tuple((tensor.path, tensor) for tensor in tensors)
    # a planner that does not flatten keeps no paths: Megatron-Core's
    if not fields.get("planner_data"):
        paths_and_tensors = _without_megatrons_optimizer(paths_and_tensors, fields, title)
    sections = _sections(paths_and_tensors)
    if section is not None:
        if section not in sections:
            listed = ", ".join(repr(s) for s in sorted(sections))
            raise Unsupported(
                f"{title}: no section {brief(section)} in the state dict",
                hint=f"there are: {listed}",
            )
        return _joined(_inner(section, sections[section]))
    candidates = _candidates(sections, _groups_of_parameters(fields))
    if len(candidates) > 1 and _is_nested(sections, candidates, fields):
        return _joined(
            tuple((path, tensor) for section in candidates for path, tensor in sections[section])
        )
    if len(candidates) > 1:
        names = ", ".join(
            repr(s) if s != TOP else "the names at the top" for s in sorted(candidates)
        )
        raise Unsupported(
            f"{title}: {len(candidates)} sets of weights in one checkpoint ({names}): choose one",
            hint=" or ".join(f"--source 'dcp:{title}#{s}'" for s in sorted(candidates)),
        )
    return _joined(_inner(candidates[0], sections[candidates[0]])) if candidates else []


def _remark(
    tensors: Iterable[ChunkedTensor], chosen: Iterable[tuple[str, ChunkedTensor]], title: str
) -> str:
    """Return a remark on an average that is left out, and on sections merged with the top.

    It is empty if there is neither.
    """
    chosen = tuple(chosen)
    chosen_ids = {id(tensor) for _, tensor in chosen}
    left_out = {
        tensor.path[0]
        for tensor in tensors
        if len(tensor.path) > 1
        and _AVERAGE.fullmatch(tensor.path[0].lower())
        and id(tensor) not in chosen_ids
    }
    remarks = [
        f"{brief(s)} beside the weights is left out: --source 'dcp:{title}#{s}' takes it"
        for s in sorted(left_out)
    ]
    sections = _sections(tuple((tensor.path, tensor) for _, tensor in chosen))
    if len(sections) > 1:
        names = ", ".join(brief(s) for s in sorted(sections) if s != TOP)
        remarks.append(
            f"{names} and the top-level tensors are merged as one model; for the top level only:"
            f" --source 'dcp:{title}#'"
        )
    return "; ".join(remarks)


def _sections(tensors: PathsAndTensors) -> dict[str, PathsAndTensors]:
    """Return the tensors of each section; a module's extra state stays at the top."""
    by_section: dict[str, list[tuple[Path, ChunkedTensor]]] = {}
    for path, tensor in tensors:
        is_top = len(path) == 1 or path[0].endswith(_EXTRA)
        by_section.setdefault(TOP if is_top else path[0], []).append((path, tensor))
    return {section: tuple(inner) for section, inner in by_section.items()}


def _candidates(sections: Mapping[str, PathsAndTensors], grouped: Collection[str]) -> list[str]:
    """Return the sections that could be the model; [] if there are only other states.

    The top is left out if it has numbers alone, beside sections. Of several, those without weights
    and those of averages are left out, unless all are such. ``grouped``: the sections that have
    ``param_groups``.
    """
    candidates = [
        s
        for s, inner in sections.items()
        if not _OTHER.fullmatch(s) and not _is_optimizer(s, inner, grouped)
    ]
    if (
        TOP in candidates
        and len(sections) > 1
        and not any(tensor.shape for _, tensor in sections[TOP])
    ):
        candidates.remove(TOP)  # numbers beside the sections: a step, a loss
    if len(candidates) > 1:
        candidates = [
            s for s in candidates if any(map(_is_weight, (tensor for _, tensor in sections[s])))
        ] or candidates
    if len(candidates) > 1:
        candidates = [s for s in candidates if not _AVERAGE.fullmatch(s.lower())] or candidates
    return candidates


def _is_nested(
    sections: Mapping[str, PathsAndTensors], candidates: Collection[str], fields: Mapping[str, Any]
) -> bool:
    """Return whether the ``candidates`` are parts of one nested state dict.

    They are not if there is an optimizer, or if one is another set of the same weights: by its
    name, or since two or more tensors, all of the smaller of both, have equal names and shapes at
    the top.
    """
    words = {str(word).lower() for path in _paths(fields) for word in path}
    if TOP not in candidates or any(map(_OPTIMIZER.fullmatch, words)):
        return False
    top = {(path, tensor.shape) for path, tensor in _joined(sections[TOP])}
    for section in candidates:
        if section == TOP:
            continue
        inner = {
            (name, tensor.shape) for name, tensor in _joined(_inner(section, sections[section]))
        }
        if (
            _OF_ITS_OWN.fullmatch(section.lower())
            or len(inner & top) == min(len(inner), len(top)) > 1
        ):
            return False
    return True


def _paths(fields: Mapping[str, Any]) -> list[Sequence[Any]]:
    """Return all paths in the state dict, also of values that are no tensors."""
    paths = fields.get("planner_data")
    values = paths.values() if isinstance(paths, dict) else ()
    return [path for path in values if isinstance(path, (tuple, list))]


def _is_weight(tensor: ChunkedTensor) -> bool:
    """Return whether a tensor is floating-point and has axes: every model has such tensors."""
    return bool(tensor.shape) and tensor.dtype.startswith(("F", "BF", "C"))


def _is_optimizer(section: str, inner: PathsAndTensors, grouped: Collection[str]) -> bool:
    """Return whether a section is a ``torch.optim`` state dict, whatever its name is."""
    return section in grouped and all(
        len(path) > 1 and _OF_OPTIMIZER.fullmatch(path[1]) for path, _ in inner
    )


def _groups_of_parameters(fields: Mapping[str, Any]) -> frozenset[str]:
    """Return the sections that have ``param_groups``."""
    return frozenset(
        str(path[0])
        for path in _paths(fields)
        if len(path) > 1 and type(path[1]) is str and path[1].startswith("param_groups")
    )


def _inner(section: str, tensors: PathsAndTensors) -> PathsAndTensors:
    """Return paths below the section, and below the model in it if it is an ``AppState``."""
    if section == TOP:
        return tensors
    inner: PathsAndTensors = tuple((path[1:], tensor) for path, tensor in tensors)
    below = _sections(inner)
    model = [s for s in _MODEL if s in below]
    if section not in _MODEL and len(model) == 1 and TOP not in below:
        return tuple((path[1:], tensor) for path, tensor in below[model[0]])
    return inner


def _joined(tensors: PathsAndTensors) -> list[tuple[str, ChunkedTensor]]:
    """Return the tensors by the names that their paths make."""
    return [(".".join(path), tensor) for path, tensor in tensors]


def _without_megatrons_optimizer(
    tensors: PathsAndTensors, fields: Mapping[str, Any], title: str
) -> PathsAndTensors:
    """Return the tensors without the optimizer's.

    Raise Unsupported if nothing shows that this is Megatron-Core's, or if a weight is stored in
    another shape than its own.
    """
    model_tensors: PathsAndTensors = tuple(
        (path, tensor) for path, tensor in tensors if not _MEGATRON_OPTIMIZER.fullmatch(path[0])
    )
    is_megatrons = "all_local_plans" in fields or "mcore_data" in fields
    if len(model_tensors) < len(tensors) and not is_megatrons:
        raise Unsupported(
            f"{title}: tensors named 'optimizer.…' beside others, without a path that would say"
            " whether they are the model's",
            hint=(
                "Megatron-Core's torch_dist is known by its plans in .metadata, which were not"
                " found"
            ),
        )
    reshaped = fields.get("mcore_data")
    for path, _ in model_tensors:
        data = reshaped.get(path[0]) if isinstance(reshaped, dict) else None
        if isinstance(data, dict) and data.get("nd_reformulated_orig_global_shape") is not None:
            raise Unsupported(
                f"{title}: {brief(path[0])} is stored flattened (flattened_range), not in its own"
                " shape",
                hint="load it with Megatron-Core and save it again as torch_dist",
            )
    return model_tensors


# Items, located at the cost of a comparison

_HEAD = _TAIL = 1 << 10  # bytes in which torch puts all but the tensor; if not, more is read
_GAP = 4 << 10  # bytes between two ranges that cost less than another read
_SMALL = _HEAD + _TAIL + _GAP  # bytes: a smaller item is read whole
_MOST = 1 << 20  # bytes of one read
_LARGEST = 1 << 16  # bytes of head or directory that are kept for comparing
_KINDS = 8  # of one length that are kept


@dataclass(frozen=True, slots=True, eq=False)
class _ItemKind:
    """What items of one kind have in common: the tensor, and the bytes that describe it.

    ``extent`` and ``record`` (of the CRC32, if it is real) are those of an item that begins at 0.
    ``head``: its bytes before the tensor's. ``tail``: how many bytes the central directory and the
    end have. ``ends``: these bytes without the CRC32s that differ, in pieces, each with its offset
    in the tail. ``crc_at``: the offset of the tensor's own CRC32 in the tail.
    """

    stored: StoredTensor
    strides: Shape | None
    extent: Extent
    record: Extent | None
    head: bytes
    ends: tuple[tuple[int, bytes], ...]
    tail: int
    crc_at: int

    def of(self, item: StorageItem, crc32: int) -> LocatedItem:
        """Return where an item's tensor lies; with ``crc32``, unless this kind has no record."""
        extent, record = self.extent, self.record
        elements = Extent(item.file, item.start + extent.start, extent.size)
        if record is None:
            return self.stored, elements, self.strides, None
        summed = (
            elements
            if record is extent
            else Extent(item.file, item.start + record.start, record.size)
        )
        return self.stored, elements, self.strides, Checksum(summed, crc32)


def find_items(files: Files, items: Sequence[StorageItem]) -> list[LocatedItem]:
    """Return where the tensor of every item lies, in the order of ``items``.

    Reads small items whole, of large ones the heads and tails, in the order of files and offsets.
    Raise Corrupt for an item that is no archive of one tensor, Unsupported if it is not plain.
    """
    places = [(item.file, item.start) for item in items]
    order = sorted(range(len(items)), key=places.__getitem__)
    results: list[LocatedItem] = [None] * len(items)  # type: ignore[list-item]
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
        results[n] = kind.of(item, crc32)
    return results


def _compare(kind: _ItemKind, item: StorageItem, window: _Window) -> int | None:
    """Return the CRC32 in the item if the item is of this kind, else None.

    Reads a small item whole, of others the head and, if that fits, the tail.
    """
    size = item.size
    position = window.find(item, 0, size if size <= _SMALL else len(kind.head))
    if not window.data.startswith(kind.head, position):
        return None
    position = (
        position + size - kind.tail
        if size <= _SMALL
        else window.find(item, size - kind.tail, kind.tail)
    )
    data = window.data
    for start, piece in kind.ends:
        if not data.startswith(piece, position + start):
            return None
    position += kind.crc_at
    return int.from_bytes(data[position : position + 4], "little")


def _parse(files: Files, item: StorageItem) -> tuple[_ItemKind, int]:
    """Return an item's kind and its CRC32; read all of the item but the tensor's bytes.

    The kind has no ``ends``, and so equals no other, if torch does not lay items out like this one.
    Raise Corrupt if it is no archive of one tensor, Unsupported if the tensor is not plain.
    """
    stored, archive = torch_save.load_tensor(files, Extent(item.file, item.start, item.size))
    part = torch_save.part(files, archive, stored)
    name = f"data/{stored.storage.key}"
    record = torch_zip.extent(files, archive, name)
    head, ends = b"", list[tuple[int, bytes]]()
    earlier_records = [
        torch_zip.extent(files, archive, record_name)
        for record_name in ("data.pkl", torch_zip.witness(archive))
        if record_name
    ]
    before, behind = record.start - item.start, item.start + item.size - archive.directory.start
    is_usual = archive.directory.start >= record.start + record.size and all(
        e.start + e.size <= record.start for e in earlier_records
    )
    if is_usual and max(before, behind) <= _LARGEST:
        head = read(files, Extent(item.file, item.start, before))
        tail = read(files, Extent(item.file, archive.directory.start, behind))
        piece_start = 0
        # torch makes a ``serialization_id`` of the tensor's CRC32, so that both differ
        for key in (key for key in archive.records if key in (name, ".data/serialization_id")):
            end = archive.records[key].entry + torch_zip.CRC_AT
            ends.append((piece_start, tail[piece_start:end]))
            piece_start = end + 4
        ends.append((piece_start, tail[piece_start:]))
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
    """Bytes of a file around the item that is being compared, in ``data``.

    The constructor announces all ``items`` to ``files`` (`expect`). Items must come in that order.
    """

    def __init__(self, files: Files, items: Sequence[StorageItem]) -> None:
        self.data = b""
        self._files, self._file, self._start = files, "", 0
        self._reads, self._next = _reads(items), 0
        expect(files, self._reads)

    def find(self, item: StorageItem, start: int, size: int) -> int:
        """Return the offset in ``data`` of the item's ``size`` bytes from its byte ``start`` on.

        Unless ``data`` has them, it is read anew, which makes earlier offsets invalid.
        """
        offset = item.start + start - self._start
        if offset < 0 or offset + size > len(self.data) or item.file != self._file:
            self._read(Extent(item.file, item.start + start, size))
            return item.start + start - self._start
        return offset

    def _read(self, needed: Extent) -> None:
        """Replace ``data`` by the planned extent that has these bytes, or by these bytes alone."""
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

    A small item is read whole, of a large one the head and the tail; near ranges are read together.
    """
    extents: list[Extent] = []
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
                extents.append(Extent(file, start, end - start))
            file, start, end = item.file, low, high
    if file:
        extents.append(Extent(file, start, end - start))
    return extents
