"""A checkpoint's files in a store: every byte is checked against its manifest when it is read."""

from __future__ import annotations

from collections.abc import Mapping

from blake3 import blake3

from ckptsync.digest import BLOCK_HEX
from ckptsync.errors import Corrupt, Incomplete
from ckptsync.records.location_status import LocationState
from ckptsync.records.manifest import FileEntry
from ckptsync.stores.checkpoint_files import StoreFiles
from ckptsync.stores.contract import Store
from ckptsync.stores.prefetch import fetched
from ckptsync.tensors import Files, FilesWrapper

_PIECE = 1 << 20
PREFETCH = 8 << 20
"""Bytes that a merge of a head fetches ahead: few, since several work beside each other."""


def source_files(store: Store, seen: LocationState, prefetch: int = PREFETCH) -> CheckedFiles:
    """Return a checkpoint's own files, as far as they are there."""
    there = seen.present()
    files = fetched(StoreFiles(store, there), store, prefetch)
    return CheckedFiles(files, {path: seen.files[path][0].entry for path in there})


class CheckedFiles(FilesWrapper):
    """Files of which each block is digested when it is first read.

    A block of which only a part was asked for costs a second read, which must give the same bytes.
    Further parts of a checked block are not checked again.

    Whole files are not digested: block digests of 128 bits say the same of the blocks that were
    read.
    """

    def __init__(self, files: Files, entries: Mapping[str, FileEntry]) -> None:
        super().__init__(files)
        self._entries = entries
        self._checked = {name: bytearray(len(entry.blocks)) for name, entry in entries.items()}

    def sizes(self) -> Mapping[str, int]:
        """Of the files that a manifest names."""
        return {name: size for name, size in super().sizes().items() if name in self._entries}

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """See `Files`; raises Corrupt where a block is not what the manifest says."""
        entry = self._entries.get(name)
        if entry is None:
            raise Incomplete(f"{name}: not named by any manifest")
        super().read_into(name, start, out)
        if not out.nbytes:
            return
        bytes_read, is_checked = out.cast("B"), self._checked[name]
        last = (start + out.nbytes - 1) // entry.block_size
        for block in range(start // entry.block_size, last + 1):
            if not is_checked[block]:
                self._check(entry, block, start, bytes_read)
                is_checked[block] = True

    def _check(self, entry: FileEntry, block: int, start: int, bytes_read: memoryview) -> None:
        first = block * entry.block_size
        end = min(first + entry.block_size, entry.size)
        digester = blake3()
        if start <= first and end <= start + len(bytes_read):
            digester.update(bytes_read[first - start : end - start])
        else:
            buffer = memoryview(bytearray(min(_PIECE, end - first)))
            for at in range(first, end, _PIECE):
                piece = buffer[: min(_PIECE, end - at)]
                super().read_into(entry.path, at, piece)
                digester.update(piece)
                low, high = max(at, start), min(at + len(piece), start + len(bytes_read))
                part = bytes_read[low - start : high - start]
                # two memoryviews would be compared item by item, forty times as slowly
                if low < high and bytearray(piece[low - at : high - at]) != part:
                    raise Corrupt(
                        f"{entry.path}: two reads of bytes {low} to {high} gave different bytes",
                        hint="check the store's disk and network, then try again",
                    )
        if digester.hexdigest()[:BLOCK_HEX] != entry.blocks[block]:
            raise Corrupt(
                f"{entry.path}: bytes {first} to {end} in the store are not those that its node"
                " sent",
                hint="verify the checkpoint: a node that still has the bytes then sends them again",
            )
