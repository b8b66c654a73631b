"""The CRC32s that torch's archives have: all that can be known of bytes of which nobody recorded a digest."""

from __future__ import annotations

from collections.abc import Iterator

from ckptsync.digest import crc32
from ckptsync.errors import Corrupt, Unsupported
from ckptsync.formats import torch_zip
from ckptsync.model import Extent, Files
from ckptsync.records.report import Finding, Reading
from ckptsync.verify.archives import ITEMS, TORCH, items
from ckptsync.verify.reading import Told

_PIECE = 4 << 20


def checksums(files: Files, told: Told = lambda _: None) -> tuple[list[Finding], Reading]:
    """Read every record that has one, weights or not.  ``size`` of the reading counts the bytes that were compared; ``told`` has signs of life.

    Raises StoreError, Incomplete.
    """
    found: list[Finding] = []
    read = count = 0
    for path, archives in _archives(files):
        size = 0
        try:
            for where in archives:
                size += _compare(files, where, told)
        except Corrupt as e:
            found.append(Finding("digest", path, str(e)))
        except Unsupported:
            pass  # compressed, or of a kind that level parse tells of: nothing of it was compared, and nothing is claimed
        read, count = read + size, count + (size > 0)
    return found, Reading("digest", count, read, len(files.sizes()), sum(files.sizes().values()))


def _archives(files: Files) -> Iterator[tuple[str, list[Extent]]]:
    sizes = files.sizes()
    inside = items(files) if any(path.endswith(ITEMS) for path in sizes) else {}
    for path, size in sizes.items():
        if path.endswith(TORCH) and torch_zip.has_end(files, Extent(path, 0, size)):
            yield path, [Extent(path, 0, size)]
        elif path in inside and not inside[path].is_packed:
            yield path, [Extent(path, start, count) for start, count, _ in inside[path].items if start + count <= size]


def _compare(files: Files, where: Extent, told: Told) -> int:
    archive = torch_zip.open_archive(files, where)
    torch_zip.check_version(files, archive)
    total = 0
    for name in archive.records:
        extent = torch_zip.extent(files, archive, name)
        wanted = torch_zip.checksum(archive, name, extent)
        if wanted is None:
            continue
        if (found := _crc(files, extent, told)) != wanted.crc32:
            end = extent.start + extent.size
            raise Corrupt(f"{where.file}: bytes {extent.start} to {end} have CRC32 {found:08x}, {wanted.crc32:08x} recorded")
        total += extent.size
    return total


def _crc(files: Files, extent: Extent, told: Told) -> int:
    buffer = memoryview(bytearray(min(_PIECE, extent.size)))
    found = 0
    for at in range(0, extent.size, _PIECE):
        piece = buffer[: min(_PIECE, extent.size - at)]
        files.read_into(extent.file, extent.start + at, piece)
        found = crc32(piece, found)
        told(0)
    return found
