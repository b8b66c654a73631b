"""Where torch's archives lie: a file is one, or, of a distributed checkpoint, has one behind the other as its metadata says."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ckptsync.errors import CkptsyncError, StoreError
from ckptsync.layouts import dcp, dcp_metadata
from ckptsync.model import Files

TORCH = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
ITEMS = ".distcp"
Item = tuple[int, int, str]
"""Start, size, name."""


@dataclass(slots=True)
class Items:
    """Of one file; ``is_packed``: their bytes were transformed, so that they are no archives as they lie there."""

    items: list[Item] = field(default_factory=list)
    is_packed: bool = False


def items(files: Files) -> Mapping[str, Items]:
    """By path, of every distributed checkpoint there is, weights or not.  Raises StoreError; what metadata cannot tell is left out."""
    found: defaultdict[str, Items] = defaultdict(Items)
    for root in dcp.roots(files.sizes()):
        for name, item in _told(files, root):
            its = found[item.file]
            its.items.append((item.start, item.size, name))
            its.is_packed |= bool(item.transforms)
    for its in found.values():
        its.items.sort()
    return found


def _told(files: Files, root: str) -> Iterator[tuple[str, dcp_metadata.Item]]:
    try:
        told = dcp_metadata.read_metadata(files, root).items
    except StoreError:
        raise
    except CkptsyncError:
        return  # level parse says so
    yield from ((name, item) for (name, _), item in told.items())
