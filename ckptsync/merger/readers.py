"""Open the sources of a merge as one stack of readers, each of which checks what it hands up.

A merge must notice damaged bytes, of a store, of a container or of a replica, without reading
anything twice.  So every reader wraps the one below it, and checks the very bytes that it returns:

    read_units.gather   puts each range where the output needs it
      ComparedFiles     the same bytes in every replica                       } `planned_reader`,
      CrcCheckedFiles   the CRC32s of torch's containers, once each           }  with the plan
      CheckedFiles      the digests of the manifests; only of a store         } `open_reader`,
      PrefetchedFiles   few requests, made early; only if sources are far     }  before the plan
    FileTree, StoreFiles, Overlay    bytes of directories and stores, by the checkpoint's names
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from ckptsync.merger import read_units
from ckptsync.merger.checked_files import CheckedFiles
from ckptsync.merger.container_crcs import CrcCheckedFiles
from ckptsync.merger.copy_consistency import ComparedFiles
from ckptsync.merger.plan import FilePlan
from ckptsync.records.manifest import FileEntry
from ckptsync.stores.prefetch import AROUND, MEMORY, PrefetchedFiles, is_near
from ckptsync.tensors import Checksum, Extent, Files, foresee


def open_reader(
    files: Files,
    sources: Iterable[object],
    entries: Mapping[str, FileEntry] | None = None,
    memory: int = MEMORY,
) -> Files:
    """Return ``files`` as planning and merging read them; read nothing yet.

    Args:
        files: the checkpoint's.
        sources: the stores or trees of ``files``, which are read ahead unless all are on disks of
            this machine.
        entries: what the manifests say, of a checkpoint in a store.  Only their files are listed,
            and a read raises Corrupt if a block has another digest.
        memory: bytes that are read ahead, at most.

    """
    is_far = not all(map(is_near, sources))
    if is_far:
        files = PrefetchedFiles(files, memory)
    return files if entries is None else CheckedFiles(files, entries, AROUND if is_far else 0)


def planned_reader(
    files: Files, plans: Sequence[FilePlan], checksums: Collection[Checksum]
) -> tuple[ComparedFiles, CrcCheckedFiles]:
    """Return the reader of a planned merge, and the layer in it that sums CRC32s.

    ``files``: of `open_reader`; they are told of all reads, so that far ones plan their requests.
    ``checksums``: of the records that are read.
    """
    crcs = CrcCheckedFiles(files, checksums)
    compared = ComparedFiles(crcs, plans)
    foresee(files, _reads(plans, compared))
    return compared, crcs


def _reads(plans: Iterable[FilePlan], compared: ComparedFiles) -> Iterator[tuple[Extent, int]]:
    """Yield every extent that a merge reads, replicas too, and how many stored bytes precede it."""
    output_position = 0
    for plan in plans:
        for unit in read_units.cut_units(plan):
            for planned in unit.reads:
                yield Extent(planned.file, planned.start, planned.size), output_position
                for replica, _ in compared.replicas(
                    planned.file, planned.start, planned.start + planned.size
                ):
                    yield from (
                        (Extent(r.file, r.start, r.size), output_position) for r in replica.reads
                    )
            output_position += unit.stored
