"""Items of a distributed checkpoint, each a whole archive of one tensor, found at the cost of a comparison.

A large model has one for every chunk, back to back, and they differ in little but their tensors' bytes.  So the first of a kind is
parsed and checked in full, and another one is of its kind if it is as long and every byte that the parse looked at is the same, but
for the CRC32 of the tensor.  Where the bytes differ, it is parsed in full as well: nothing is ever assumed.

They are read in the order of their files: small ones many at a time, of a large one its end together with the beginning of the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ckptsync.formats import torch_save, torch_zip
from ckptsync.formats.torch_pickle import Stored
from ckptsync.formats.torch_zip import Archive
from ckptsync.layouts.dcp_described import Item
from ckptsync.model import Checksum, Extent, Files, Part, Shape, expect, read

_HEAD = _TAIL = 1 << 10  # where torch puts all but the tensor; of one that has more, more is read
_GAP = 4 << 10  # bytes of a tensor that cost less than another read
_SMALL = _HEAD + _TAIL + _GAP  # bytes of an item that is read whole
_MOST = 1 << 20  # bytes of one read
_LARGEST = 1 << 16  # bytes of head or directory that are kept for comparing
_KINDS = 8  # of one length that are kept


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """What items of one kind have in common: the tensor, where in the item its bytes are, and the bytes that say so.

    ``place`` is as of an item that begins at 0.  ``head`` are its bytes before the tensor's.  ``tail`` bytes are the central
    directory and what is behind it; ``ends`` are those without the CRC32s that differ, in pieces, each from where in it.  The
    tensor's own CRC32 is at ``crc_at`` in it.
    """

    stored: Stored
    place: Part
    head: bytes
    ends: tuple[tuple[int, bytes], ...]
    tail: int
    crc_at: int


Found = tuple[Kind, int]  # and the CRC32 that the archive tells of the tensor's record


def find(files: Files, items: Sequence[Item]) -> list[Found]:
    """The kind of every item.  Raises Corrupt for one that is no archive of one tensor."""
    places = [(item.file, item.start) for item in items]
    order = sorted(range(len(items)), key=places.__getitem__)
    found: list[Found] = [None] * len(items)  # type: ignore[list-item]
    for i, one in zip(order, _find(files, [items[i] for i in order]), strict=True):
        found[i] = one
    return found


def part(item: Item, found: Found, offsets: Shape) -> Part:
    """The tensor's elements, as the box at ``offsets``."""
    kind, crc32 = found
    like, checksum = kind.place, kind.place.checksum
    extent = Extent(item.file, item.start + like.extent.start, like.extent.size)
    if checksum is None:
        return Part(offsets, like.sizes, extent, like.strides)
    record = (
        extent if checksum.extent == like.extent else Extent(item.file, item.start + checksum.extent.start, checksum.extent.size)
    )
    return Part(offsets, like.sizes, extent, like.strides, Checksum(record, crc32))


def _find(files: Files, items: list[Item]) -> Iterator[Found]:
    window = _Window(files, items)
    expect(files, _foreseen(items))
    kinds: dict[int, list[Kind]] = {}
    for number, item in enumerate(items):
        found = None
        for kind in kinds.get(item.size, ()):
            found = _is_of(kind, window, number)
            if found:
                break
        if not found:
            found = _parsed(files, item)
            if found[0].ends:
                kinds[item.size] = [found[0], *kinds.get(item.size, ())][:_KINDS]
        yield found


def _is_of(kind: Kind, window: _Window, number: int) -> Found | None:
    """The item, if it is of this kind."""
    size = window.items[number].size
    at = window.place(number, 0, size if size <= _SMALL else len(kind.head))
    if not window.data.startswith(kind.head, at):
        return None
    at = at + size - kind.tail if size <= _SMALL else window.place(number, size - kind.tail, kind.tail)
    data = window.data
    for start, piece in kind.ends:
        if not data.startswith(piece, at + start):
            return None
    at += kind.crc_at
    return kind, int.from_bytes(data[at : at + 4], "little")


def _parsed(files: Files, item: Item) -> Found:
    """An item read in full, and its kind; without ``ends``, and so like no other, if it is not laid out as torch does it."""
    where = Extent(item.file, item.start, item.size)
    stored, archive = torch_save.load_tensor(files, where)
    place = torch_save.part(files, archive, stored)
    name = f"data/{stored.storage.key}"
    record = torch_zip.extent(files, archive, name)
    head = b""
    ends: tuple[tuple[int, bytes], ...] = ()
    looked_at = [torch_zip.extent(files, archive, other) for other in ("data.pkl", torch_zip.witness(archive)) if other]
    before, behind = record.start - item.start, item.start + item.size - archive.directory.start
    is_usual = archive.directory.start >= record.start + record.size and all(e.start + e.size <= record.start for e in looked_at)
    if is_usual and max(before, behind) <= _LARGEST:
        head = read(files, Extent(item.file, item.start, before))
        ends = tuple(_ends(read(files, Extent(item.file, archive.directory.start, behind)), archive, name))
    at = archive.records[name].entry + torch_zip.CRC_AT
    return Kind(stored, _as_of_0(place, item.start), head, ends, behind, at), archive.records[name].crc


def _ends(data: bytes, archive: Archive, name: str) -> Iterator[tuple[int, bytes]]:
    """``data``, from the directory on, without the CRC32s of the tensor and of what torch makes of it, a ``serialization_id``."""
    differing = [
        archive.records[key].entry + torch_zip.CRC_AT for key in (name, ".data/serialization_id") if key in archive.records
    ]
    at = 0
    for end in (*sorted(differing), len(data)):
        yield at, data[at:end]
        at = end + 4


def _as_of_0(place: Part, start: int) -> Part:
    def moved(extent: Extent) -> Extent:
        return Extent(extent.file, extent.start - start, extent.size)

    extent = moved(place.extent)
    checksum = place.checksum
    if checksum:
        record = moved(checksum.extent)
        checksum = Checksum(extent if record == extent else record, checksum.crc32)
    return replace(place, extent=extent, checksum=checksum)


def _foreseen(items: Sequence[Item]) -> Iterator[Extent]:
    """What a window will be filled with, for files that lie far away: heads at the beginnings of files, then ends with what is near behind."""
    file, done = "", 0
    for number, item in enumerate(items):
        start, end = item.start, item.start + item.size
        is_small, is_known = item.size <= _SMALL, item.file == file and start < done
        if not is_small and not is_known:
            yield Extent(item.file, start, _HEAD)
        if is_small and is_known and end <= done:
            continue
        first = start if is_small else end - _TAIL
        file, done = item.file, _as_far(items, number, first, end)
        yield Extent(file, first, done - first)


class _Window:
    """``data``: bytes of ``items``, which follow each other, in as few reads as that takes."""

    def __init__(self, files: Files, items: list[Item]) -> None:
        self.items, self.data = items, b""
        self._files, self._file, self._start = files, "", 0

    def place(self, number: int, at: int, size: int) -> int:
        """Where in ``data``, which may be other data now, are ``size`` bytes of that item from ``at``."""
        item = self.items[number]
        start = item.start + at - self._start
        if start < 0 or start + size > len(self.data) or item.file != self._file:
            self._fill(item.start + at, size, number)
            return 0
        return start

    def _fill(self, start: int, size: int, number: int) -> None:
        """Read those bytes, and with them the ends and beginnings of items that are not far behind."""
        file, end = self.items[number].file, _as_far(self.items, number, start, start + size)
        self.data = read(self._files, Extent(file, start, end - start))
        self._file, self._start = file, start


def _as_far(items: Sequence[Item], number: int, start: int, end: int) -> int:
    """Where a read from ``start`` ends that takes in what is not far behind that item."""
    for first, last in _spans(items, number):
        if first > end + _GAP or last > start + _MOST:
            break
        end = max(end, last)
    return end


def _spans(items: Sequence[Item], number: int) -> Iterator[tuple[int, int]]:
    """Where what is compared lies: the end of that item, then of those behind it in its file beginning and end."""
    item = items[number]
    file, end = item.file, item.start + item.size
    yield max(item.start, end - _TAIL), end
    for behind in range(number + 1, len(items)):
        item = items[behind]
        start = item.start
        if start < end or item.file != file:
            return
        end = start + item.size
        if item.size <= _SMALL:
            yield start, end
        else:
            yield start, start + _HEAD
            yield end - _TAIL, end
