"""Items of a distributed checkpoint whose bytes were transformed on their way to the file: what they are called here.

torch's ``_extensions=[ZStandard()]`` makes every item a zstd stream of its own (``torch/distributed/checkpoint/_extension.py`` 2.13).  Such an item
is named like a file, a virtual one, so that an extent can say where in the unpacked stream a tensor lies.  The name begins with a byte that no
file's name has (`ckptsync.paths.checked_path`); `ckptsync.formats.unpacking` reads under it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.formats.pickles import brief
from ckptsync.model import Extent

ZSTD = "stream.zstd/1"
_MARK = "\0zstd\0"


@dataclass(frozen=True, slots=True)
class Packed:
    """``item`` lies in a real file.  ``first`` and ``length`` are the record of a CRC32 in the unpacked stream; no length, no sum."""

    item: Extent
    first: int = 0
    length: int = 0


def check(descriptors: object) -> None:
    """Raise Unsupported, by name, for any transform but zstd alone."""
    if type(descriptors) not in (tuple, list) or not all(type(d) is str for d in descriptors):  # type: ignore[attr-defined]
        raise Corrupt(f"transform_descriptors: {brief(descriptors)} is no list of names")
    names = list(descriptors)  # type: ignore[call-overload]
    if [name.partition(".")[0] + "." + name.partition(".")[2].partition(".")[0] for name in names] != [ZSTD]:
        raise Unsupported(
            f"transform_descriptors: items went through {brief(tuple(names))}, only {ZSTD} is known",
            hint="save them without extensions",
        )


def name_of(packed: Packed) -> str:
    """The name under which the unpacked bytes are read."""
    item = packed.item
    return f"{_MARK}{item.start}\0{item.size}\0{packed.first}\0{packed.length}\0{item.file}"


@lru_cache(maxsize=4096)  # asked for every part of a model, whose files are few
def parse(name: str) -> Packed | None:
    """What a name stands for; None for a real file's."""
    if not name.startswith(_MARK):
        return None
    start, size, first, length, file = name.removeprefix(_MARK).split("\0", 4)
    return Packed(Extent(file, int(start), int(size)), int(first), int(length))


def real(extent: Extent) -> Extent:
    """The bytes of a real file that are needed to read ``extent``: itself, or all of a packed item."""
    packed = parse(extent.file)
    return packed.item if packed else extent
