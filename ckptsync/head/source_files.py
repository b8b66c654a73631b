"""The files of a checkpoint in a store, as a head reads them: checked, and read ahead."""

from __future__ import annotations

from ckptsync.merge.readers import open_reader
from ckptsync.records.location_status import LocationState
from ckptsync.stores.checkpoint_files import StoreFiles
from ckptsync.stores.contract import Store
from ckptsync.tensors import Files

PREFETCH = 8 << 20
"""Bytes that a merge of a head fetches ahead: few, since several work beside each other."""


def source_files(store: Store, seen: LocationState, memory: int = PREFETCH) -> Files:
    """Return a checkpoint's own files, as far as they are there."""
    there = seen.present()
    entries = {path: seen.files[path][0].entry for path in there}
    return open_reader(StoreFiles(store, there), [store], entries, memory)
