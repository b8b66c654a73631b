"""A node's manifest, which it writes last: the files that are its part of a save.

A store does not show whether an upload has ended, nor which bytes were meant. So a node names its
files with sizes and digests only when all of them are stored: what no manifest names is not a part
of a checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ckptsync.records.store_paths import FORMAT, file_name
from ckptsync.tensors import Demands
from ckptsync.typed_json import Count, FormatNumber, Nanoseconds


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A stored file: its path, size, checksums and mtime.

    The path is a POSIX path relative to the checkpoint, the size is in bytes, ``digest`` is BLAKE3
    (64 hex), ``blocks`` has a digest a block, and ``mtime`` is in ns.

    ``stored_as``: the name in the store where the file lies; empty for the plain name,
    ``<run>/<location>/<path>``.
    """

    path: str
    size: Count
    digest: str
    block_size: Count
    blocks: tuple[str, ...]
    mtime: Nanoseconds
    stored_as: str = ""


@dataclass(frozen=True, slots=True)
class Manifest:
    """One node's part of one save of a checkpoint.

    ``checkpoint`` is the trainer's name for it; ``location`` is the directory in the store that
    holds the save: the same name, or ``<checkpoint>~<save>`` if another save has that name. ``n``
    counts this node's manifests of this save from 0; manifest n + 1 names files that came later.
    ``save`` is the id that a hook agreed on, or empty. ``started`` and ``ended`` (ns since the
    epoch, on the node's clock) span the mtimes of its files; ``clock_offset`` (ns) is node clock
    minus store clock where it was measured. ``sources`` lists the weight sources
    (``zero:global_step4``). ``supersedes`` names earlier manifests of this node that this one
    replaces: the save has moved to this location, or a file lies elsewhere. ``trainer`` is what
    wrote the save (``transformers 5.2.0``; a family of `ckptsync.checkpoint_dirs` if no hook says
    more). ``times`` (ns since the epoch, the node's clock): when the save was ``finished``, and
    when its ``sending`` began; a node that sent it without a pin has neither.
    """

    run: str
    checkpoint: str
    location: str
    node: str
    n: Count
    files: tuple[FileEntry, ...]
    ranks: tuple[Count, ...]
    started: Nanoseconds
    ended: Nanoseconds
    demands: Demands
    sources: tuple[str, ...] = ()
    save: str = ""
    clock_offset: Nanoseconds = 0
    supersedes: tuple[str, ...] = ()
    version: str = ""
    trainer: str = ""
    times: dict[str, Nanoseconds] = field(default_factory=dict)
    format: FormatNumber = FORMAT

    def stored_name(self, file: FileEntry) -> str:
        """Return the name in the store of one of the manifest's files."""
        return file.stored_as or file_name(self.run, self.location, file.path)
