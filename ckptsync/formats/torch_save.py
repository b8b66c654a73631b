"""Read files that ``torch.save`` writes: a pickled value, and where the bytes of its tensors lie.

`load` returns the value and the container; `part` finds a tensor of the value in the container.
There are two containers. The zip archive of today is read by `ckptsync.formats.torch_zip`. The
legacy one (``_use_new_zipfile_serialization=False``) is read here; it has, in this order: pickles
of a magic number, the protocol's number, facts of the machine, the value, the sorted keys of the
storages; then, for each key, a count of elements (int64) and the elements. It has no checksums.
Source: ``_legacy_save`` and ``_legacy_load`` of ``torch/serialization.py``, torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from math import prod
from typing import Any

from ckptsync.errors import Corrupt, Unsupported, name_in_errors
from ckptsync.formats import torch_zip
from ckptsync.formats.dtypes import ITEMSIZE
from ckptsync.formats.pickles import MAX_BYTES, Build, Name, loads
from ckptsync.formats.torch_pickle import (
    ALLOWED,
    Storage,
    Storages,
    StoredTensor,
    is_contiguous,
    parsed,
    plain_tensor,
    span,
)
from ckptsync.tensors import Checksum, Extent, Files, Part, read

MAGIC = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001
_NUMBER = b"\x8a\x0a" + MAGIC.to_bytes(10, "little")
# after the opcode of the pickle's protocol; from protocol 4 on, a frame precedes it
_STARTS = tuple(_NUMBER if p < 4 else b"\x95\x0d" + bytes(7) + _NUMBER for p in (2, 4))
_FIRST_LOOK = 1 << 20
_DAMAGED = "the file is damaged: fetch it again"
_MOST_EXPANDED = 256 << 20  # bytes: position ids and masks are expanded, weights are not


Container = torch_zip.Archive | Mapping[str, Extent]
"""An archive; or, of a legacy file, the extent of each storage, and of each view, by its key."""


def load(
    files: Files, span: Extent, allowed: Mapping[Name, Build] = ALLOWED
) -> tuple[Any, Container]:
    """Return the value of one ``torch.save``, and its container.

    A zip archive's value is cached: do not change it. Raise Corrupt if it is damaged, Unsupported
    for a name that is not ``allowed``, a compressed record, or another version or byte order.
    """
    if is_legacy(files, span):
        return _load_legacy(files, span, allowed)
    archive = torch_zip.open_archive(files, span)
    torch_zip.check_version(files, archive)
    return _value(torch_zip.pickle_of(files, archive), _Table(allowed)), archive


class _Table:
    """A table of names that is equal only to itself, so that a cache never compares two of them."""

    __slots__ = ("names",)

    def __init__(self, names: Mapping[Name, Build]) -> None:
        self.names = names

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Table) and self.names is other.names

    def __hash__(self) -> int:
        return id(self.names)


@lru_cache(maxsize=1)  # a file is read for its demands, and again for its tensors
def _value(data: bytes, allowed: _Table) -> Any:
    """Return the value of a pickle; raises as `load`."""
    return parsed(data, allowed.names)[0]


def load_tensor(files: Files, span: Extent) -> tuple[StoredTensor, torch_zip.Archive]:
    """Return the tensor of an archive of one tensor, an item of a DCP, and the archive.

    Raise Corrupt for anything else, Unsupported for a tensor that is not plain.
    """
    archive = torch_zip.open_archive(files, span)
    data = torch_zip.pickle_of(files, archive)
    with name_in_errors(f"{span.file}: the archive at {span.start}"):
        return _tensor(data), archive


@lru_cache(maxsize=256)  # chunks of one shape have one pickle
def _tensor(data: bytes) -> StoredTensor:
    """Return the one plain tensor that a pickle is; raise Corrupt if it is none."""
    value = plain_tensor(parsed(data)[0])
    if value is None:
        raise Corrupt("no tensor in it")
    return value


def part(files: Files, container: Container, tensor: StoredTensor) -> Part:
    """Return where a tensor's elements lie, as a box of the whole tensor.

    It has strides if it is not row-major, and its record's CRC32 if the container has one. Raise
    Corrupt if its record has another size than its storage; Unsupported for a tensor of more than
    `_MOST_EXPANDED` bytes that is over 1000 times as large as its stored bytes.
    """
    item = ITEMSIZE[tensor.dtype]
    record, checksum = _record(files, container, tensor.storage.key)
    size, expected = span(tensor.shape, tensor.strides) * item, tensor.storage.size
    if record.size != expected or tensor.offset * item + size > record.size:
        raise Corrupt(
            f"{record.file}: storage {tensor.storage.key} has {record.size} bytes, {expected}"
            " expected"
        )
    whole = prod(tensor.shape) * item
    if whole > _MOST_EXPANDED and whole > 1000 * size:
        raise Unsupported(
            f"{record.file}: a tensor of {whole} bytes whose elements are {size} bytes, repeated",
            hint="save the tensor with .contiguous()",
        )
    strides = None if is_contiguous(tensor) else tensor.strides
    extent = Extent(record.file, record.start + tensor.offset * item, size)
    return Part((0,) * len(tensor.shape), tensor.shape, extent, strides, checksum)


def _record(files: Files, container: Container, key: str) -> tuple[Extent, Checksum | None]:
    """Return where a storage lies, and its CRC32 if there is one; raise as `torch_zip.extent`."""
    if not isinstance(container, torch_zip.Archive):
        return container[key], None
    name = f"data/{key}"
    record = torch_zip.extent(files, container, name)
    return record, torch_zip.checksum(container, name, record)


def has_end(files: Files, span: Extent, allowed: Mapping[Name, Build] = ALLOWED) -> bool:
    """Return whether the file ends as its container ends; a file that is being written does not.

    Of a zip archive only the end record is read. A legacy file is loaded: False if that raises
    Corrupt; its Unsupported is raised, for example for a name that is not ``allowed``.
    """
    if not is_legacy(files, span):
        return torch_zip.has_end(files, span)
    try:
        load(files, span, allowed)
    except Corrupt:
        return False
    return True


def is_legacy(files: Files, span: Extent) -> bool:
    """Return whether the bytes begin as the legacy container does; a shorter start is enough."""
    start = read(files, Extent(span.file, span.start, min(2 + len(_STARTS[-1]), span.size)))
    return (
        len(start) > 1
        and start[:1] == b"\x80"
        and any(beginning.startswith(start[2 : 2 + len(beginning)]) for beginning in _STARTS)
    )


def _load_legacy(
    files: Files, span: Extent, allowed: Mapping[Name, Build]
) -> tuple[Any, Mapping[str, Extent]]:
    """Return the value of a legacy file, and where its storages and views lie, by key.

    Reads 8 bytes before each storage.  Raise Corrupt unless the storages have their recorded sizes
    and end where the container does, or if a view reaches out of its storage; else as
    `_LegacyPickles`.
    """
    pickles = _legacy_pickles(files, span, allowed)
    storages, position = {}, pickles.end
    for key in pickles.keys:
        numel = pickles.storages[key].numel
        size = pickles.storages[key].size
        if position + 8 + size > span.size:
            raise Corrupt(
                f"{span.file}: {span.size} bytes, storage {key} ends at byte {position + 8 + size}",
                hint=_DAMAGED,
            )
        count = int.from_bytes(read(files, Extent(span.file, span.start + position, 8)), "little")
        if count != numel:
            raise Corrupt(
                f"{span.file}: storage {key} has {count} elements, {numel} expected", hint=_DAMAGED
            )
        storages[key] = Extent(span.file, span.start + position + 8, size)
        position += 8 + size
    if position != span.size:
        raise Corrupt(
            f"{span.file}: {span.size} bytes, its storages end at byte {position}", hint=_DAMAGED
        )
    for view, (root, offset) in pickles.views.items():
        item, whole = view.item, storages[root]
        if (offset + view.numel) * item > whole.size:
            raise Corrupt(
                f"{span.file}: a view of {view.numel} elements reaches out of storage {root}"
            )
        storages[view.key] = Extent(span.file, whole.start + offset * item, view.numel * item)
    return pickles.value, storages


def _legacy_pickles(files: Files, span: Extent, allowed: Mapping[Name, Build]) -> _LegacyPickles:
    """Return the pickles of a legacy file; raise as `_LegacyPickles`.

    Their length is known only when they end. So `_FIRST_LOOK` bytes are read first, then after each
    Corrupt eight times as many, up to `MAX_BYTES`.
    """
    most = min(span.size, MAX_BYTES)
    size = min(_FIRST_LOOK, most)
    while True:
        try:
            return _LegacyPickles(read(files, Extent(span.file, span.start, size)), allowed)
        except Corrupt as e:
            if size == most:
                raise Corrupt(f"{span.file}: {e}", hint=_DAMAGED) from e
        size = min(8 * size, most)


class _LegacyPickles:
    """The pickles at the start of ``data``: the value, the keys of its storages, and their end.

    ``views``: parts of storages, which versions before 1.0 saved as storages of their own, by
    storage and first element. Raises Corrupt or Unsupported.
    """

    def __init__(self, data: bytes, allowed: Mapping[Name, Build]) -> None:
        self._registry = Storages()
        self.storages, self.views = self._registry.by_key, dict[Storage, tuple[str, int]]()
        self._data, self.end = memoryview(data), 0
        magic, protocol, machine = self._next(), self._next(), self._next()
        if magic != MAGIC or protocol != _PROTOCOL or not isinstance(machine, dict):
            raise Corrupt("not what torch.save writes")
        if machine.get("little_endian") is not True:
            raise Unsupported("written on a big-endian machine, only little-endian files are read")
        self.value, self.keys = self._next(allowed, self._storage), self._next()
        if not isinstance(self.keys, list) or not all(type(key) is str for key in self.keys):
            raise Corrupt("no list of storages behind the value")
        if any(view.key in self.storages for view in self.views):
            raise Corrupt("a view of a storage that has the name of another storage")
        if self.keys != sorted(self.storages):
            raise Corrupt("the list of storages is not that of the value's")

    def _next(
        self,
        allowed: Mapping[Name, Build] | None = None,
        persistent: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Return the next pickle's value, and move ``end`` behind it. Raise as `loads`."""
        value, size = loads(bytes(self._data[self.end :]), allowed or {}, persistent)
        self.end += size
        return value

    def _storage(self, value: Any) -> Storage:
        """Return the storage that a persistent id names, or its view, as a storage of its own.

        It is recorded in ``storages``, and a view in ``views``. The sixth field of the id is None,
        or ``(key, offset, numel)`` of a view. Raise Corrupt if it is no such id, Unsupported for a
        whole module.
        """
        if isinstance(value, tuple) and value[:1] == ("module",):
            raise Unsupported("a whole module in a pickle", hint="save its state_dict()")
        if not isinstance(value, tuple) or len(value) != 6:
            raise Corrupt("a persistent id that is no storage")
        storage, view = self._registry.add(value[:5]), value[5]
        if view is None:
            return storage
        if not isinstance(view, tuple) or len(view) != 3 or type(view[1]) is not int or view[1] < 0:
            raise Corrupt("a view of a storage without key, offset and size")
        key, offset, numel = view
        part_of = Storages().add((*value[:2], key, None, numel))
        self.views[part_of] = storage.key, offset
        return part_of
