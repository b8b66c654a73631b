"""torch's older container, ``torch.save(..., _use_new_zipfile_serialization=False)``: pickles, then storages end to end, no checksums.

In this order: a magic number, the protocol's number, facts of the machine, the value, the sorted keys of the storages; then, for each key,
a count of elements (int64) and the elements.  Source: ``_legacy_save`` and ``_legacy_load`` of ``torch/serialization.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.formats.dtypes import ITEMSIZE, STORAGES
from ckptsync.formats.pickles import MAX_BYTES, Build, Name, brief, loads
from ckptsync.model import Extent, Files, read

MAGIC = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001
_NUMBER = b"\x8a\x0a" + MAGIC.to_bytes(10, "little")
_STARTS = tuple(
    _NUMBER if p < 4 else b"\x95\x0d" + bytes(7) + _NUMBER for p in (2, 4)
)  # behind the pickle's own protocol, framed from 4
_FIRST_LOOK = 1 << 20
_MOST = 1 << 60
LONGEST_KEY = 100  # letters of a storage's name, which is a number: each mention of it is compared with others
_DAMAGED = "the file is damaged: fetch it again"

Make = Callable[[str, str, int], Any]


@dataclass(frozen=True, slots=True)
class Legacy:
    """Where the elements of each storage lie; a part of a storage has a key of its own."""

    storages: Mapping[str, Extent]


def is_legacy(files: Files, where: Extent) -> bool:
    """Whether the bytes begin as this container does, as far as they go."""
    start = read(files, Extent(where.file, where.start, min(2 + len(_STARTS[-1]), where.size)))
    return len(start) > 1 and start[:1] == b"\x80" and any(known.startswith(start[2 : 2 + len(known)]) for known in _STARTS)


def load(files: Files, where: Extent, allowed: Mapping[Name, Build], storage: Make) -> tuple[Any, Legacy]:
    """The value, and where its storages lie; ``storage(dtype, key, numel)`` stands for one in the value.

    Raises Corrupt unless the storages end where ``where`` does.
    """
    found = _pickles(files, where, allowed, storage)
    if found.keys != sorted(found.roots):
        raise Corrupt(f"{where.file}: the list of storages is not that of the value's", hint=_DAMAGED)
    roots, at = {}, found.end
    for key in found.keys:
        dtype, numel = found.roots[key]
        size = numel * ITEMSIZE[dtype]
        if at + 8 + size > where.size:
            raise Corrupt(f"{where.file}: {where.size} bytes, storage {key} ends at byte {at + 8 + size}", hint=_DAMAGED)
        told = int.from_bytes(read(files, Extent(where.file, where.start + at, 8)), "little")
        if told != numel:
            raise Corrupt(f"{where.file}: storage {key} has {told} elements, {numel} expected", hint=_DAMAGED)
        roots[key] = Extent(where.file, where.start + at + 8, size)
        at += 8 + size
    if at != where.size:
        raise Corrupt(f"{where.file}: {where.size} bytes, its storages end at byte {at}", hint=_DAMAGED)
    views = {key: _view(roots[view.root], view) for key, view in found.views.items()}
    return found.value, Legacy({**roots, **views})


@dataclass(frozen=True, slots=True)
class _View:
    """Elements of a storage, which versions before 1.0 saved as a storage of its own."""

    root: str
    dtype: str
    offset: int
    numel: int


@dataclass(frozen=True, slots=True)
class _Pickles:
    value: Any
    keys: list[str]
    end: int
    roots: dict[str, tuple[str, int]]
    views: dict[str, _View]


def _view(root: Extent, view: _View) -> Extent:
    item = ITEMSIZE[view.dtype]
    if (view.offset + view.numel) * item > root.size:
        raise Corrupt(f"{root.file}: a view of {view.numel} elements reaches out of storage {view.root}")
    return Extent(root.file, root.start + view.offset * item, view.numel * item)


def _pickles(files: Files, where: Extent, allowed: Mapping[Name, Build], storage: Make) -> _Pickles:
    """How long they are is known when they end: a little is read, and more if it was too little."""
    size = min(_FIRST_LOOK, where.size)
    while size < min(where.size, MAX_BYTES):
        found = _tried(files, where, size, allowed, storage)
        if found:
            return found
        size = min(8 * size, where.size, MAX_BYTES)
    try:
        return _parsed(read(files, Extent(where.file, where.start, size)), allowed, storage)
    except Corrupt as e:
        raise Corrupt(f"{where.file}: {e}", hint=_DAMAGED) from e


def _tried(files: Files, where: Extent, size: int, allowed: Mapping[Name, Build], storage: Make) -> _Pickles | None:
    try:
        return _parsed(read(files, Extent(where.file, where.start, size)), allowed, storage)
    except Corrupt:
        return None  # cut short, or damaged: what comes with more of it decides


def _parsed(data: bytes, allowed: Mapping[Name, Build], storage: Make) -> _Pickles:
    roots: dict[str, tuple[str, int]] = {}
    views: dict[str, _View] = {}

    def persistent(value: Any) -> Any:
        dtype, key, numel, view = _storage(value)
        if roots.setdefault(key, (dtype, numel)) != (dtype, numel):
            raise Corrupt(f"storage {brief(key)} has two sizes or element types")
        if view is None:
            return storage(dtype, key, numel)
        own, offset, count = _checked_view(view)
        views[own] = _View(key, dtype, offset, count)
        return storage(dtype, own, count)

    magic, at = loads(data, {})
    protocol, at = _next(data, at)
    machine, at = _next(data, at)
    if magic != MAGIC or protocol != _PROTOCOL or not isinstance(machine, dict):
        raise Corrupt("not what torch.save writes")
    if machine.get("little_endian") is not True:
        raise Unsupported("written on a big-endian machine, only little-endian files are read")
    value, size = loads(data[at:], allowed, persistent)
    keys, at = _next(data, at + size)
    if not isinstance(keys, list) or not all(type(key) is str for key in keys):
        raise Corrupt("no list of storages behind the value")
    if views.keys() & roots.keys():
        raise Corrupt("a view of a storage that has the name of another storage")
    return _Pickles(value, keys, at, roots, views)


def _next(data: bytes, at: int) -> tuple[Any, int]:
    value, size = loads(data[at:], {})
    return value, at + size


def _storage(value: Any) -> tuple[str, str, int, Any]:
    """``("storage", type, key, location, numel, view)``: dtype, key, elements, and which part is meant if not all."""
    if not isinstance(value, tuple) or len(value) != 6 or value[0] != "storage" or not isinstance(value[1], Name):
        raise Unsupported("a persistent id that is no storage", hint="whole modules are not read: save their state_dict()")
    _, kind, key, _, numel, view = value
    if not isinstance(key, str) or len(key) > LONGEST_KEY or type(numel) is not int or not 0 <= numel < _MOST:
        raise Corrupt("a storage without key and size")
    return STORAGES.get(kind.name, "U8"), key, numel, view


def _checked_view(view: Any) -> tuple[str, int, int]:
    """``(key, offset, numel)``."""
    if not isinstance(view, tuple) or len(view) != 3 or type(view[0]) is not str or len(view[0]) > LONGEST_KEY:
        raise Corrupt("a view of a storage without key, offset and size")
    if any(type(n) is not int or not 0 <= n < _MOST for n in view[1:]):
        raise Corrupt("a view of a storage whose offset or size is no natural number")
    return view
