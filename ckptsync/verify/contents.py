"""Level digest: every byte read and compared with its record; damage narrowed to byte ranges, and those to tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from itertools import chain

from ckptsync.errors import Corrupt, Incomplete, NotFound
from ckptsync.model import Extent, Files
from ckptsync.parsing import parse
from ckptsync.records.report import Finding
from ckptsync.verify.expected import Expected
from ckptsync.verify.naming import named
from ckptsync.verify.ranges import Ranges, Spans, differing, joined
from ckptsync.verify.reading import Counted, blocks_of, digest_of
from ckptsync.verify.sweep import is_far, suspects
from ckptsync.verify.units import units


def contents(source: Counted, files: Iterable[Expected], checkpoint: Files) -> tuple[Finding, ...]:
    """What differs in ``files``, which are there with their sizes; ``checkpoint`` is read to name the tensors of its shards.

    Raises StoreError where the store does not answer: that is not damage.
    """
    files, in_ranges = tuple(files), is_far(source)
    return narrowed(source, files, suspects(source, chain.from_iterable(units(f, in_ranges=in_ranges) for f in files)), checkpoint)


def narrowed(source: Counted, files: Iterable[Expected], names: Collection[str], checkpoint: Files) -> tuple[Finding, ...]:
    """Findings for those of ``files`` whose store names are among ``names``: each is read once more, and its damage narrowed."""
    damaged = [(file, _look_closer(source, file)) for file in files if file.name in names]
    own = {file.path: finding.ranges for file, finding in damaged if _is_shard(file)}
    tensors = named(checkpoint, own) if own else {}
    return tuple(replace(finding, tensors=tensors.get(file.path, ())) if _is_shard(file) else finding for file, finding in damaged)


def _is_shard(file: Expected) -> bool:
    return not file.is_consolidated and not file.is_copy


def _look_closer(source: Counted, file: Expected) -> Finding:
    try:
        if file.is_consolidated:
            return _consolidated(source, file)
        ranges = differing(file.wanted, blocks_of(source, file.name, file.size, file.wanted.block_size))
    except (NotFound, Incomplete):
        return Finding("missing", file.shown, f"{file.size} bytes were stored, and it went away while it was read")
    except Corrupt as e:
        return Finding("size", file.shown, f"{file.size} bytes expected: {e}")
    return Finding("digest", file.shown, _detail(ranges, file), ranges)


def _consolidated(source: Counted, file: Expected) -> Finding:
    """Each tensor's own digest tells which differ; what no tensor explains lies in the header."""
    odd = [t for t in file.tensors if digest_of(source, Extent(file.name, t.start, t.size)) != t.digest]
    ranges = joined((t.start, t.start + t.size) for t in odd if t.size)
    header = (0, min((t.start for t in file.tensors), default=file.size))
    if ranges and not _is_header(source, file.name, header[1]):
        ranges = joined((header, *ranges))
    if not ranges and digest_of(source, Extent(file.name, 0, file.size)) != file.wanted.digest:
        ranges = (header,)
    spans = Spans((t.name, Extent(file.path, t.start, t.size)) for t in file.tensors)
    return Finding("digest", file.shown, _detail(ranges, file), ranges, spans.overlapping(file.path, ranges))


def _is_header(source: Counted, name: str, size: int) -> bool:
    """Whether a header can be read there at all: it has no digest of its own, so beside damaged tensors no more is known of it."""
    head = bytearray(size)
    source.read_into(name, 0, memoryview(head))
    try:
        return isinstance(parse(head[8 : 8 + int.from_bytes(head[:8], "little")], name), dict)
    except Corrupt:
        return False


def _detail(ranges: Ranges, file: Expected) -> str:
    if not ranges:
        return "read twice with two results, the second one right: disk, memory or network are not to be trusted"
    return f"{sum(end - start for start, end in ranges)} of {file.size} bytes lie where something differs from what was stored"
