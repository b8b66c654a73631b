"""Level digest: read every byte, or a sample, and compare it with its recorded digest.

How fast a store is read depends on where it lies. From a disk of this machine one thread reads file
after file while another digests: two streams at once took a virtual disk twice as long. Files that
are in memory already are digested by several threads. From elsewhere each thread has its own
request, and large files are read in ranges. Memory: one buffer a thread. A damaged file is read
again, to find where its damage lies.

Files without a recorded digest may have CRC32s: torch's archives do (`check_crc32s`).
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest

from ckptsync import safe_open
from ckptsync.digest import (
    Checker,
    Digests,
    FileDigest,
    RangeDigests,
    compared_ranges,
    digest,
    digest_stream,
)
from ckptsync.errors import CkptsyncError, Corrupt, Incomplete, NotFound, StoreError, Unsupported
from ckptsync.formats import torch_zip
from ckptsync.layouts import dcp, dcp_metadata, registry
from ckptsync.layouts.file_names import DCP_SHARD, TORCH
from ckptsync.merger.container_crcs import CrcCheckedFiles
from ckptsync.plain_json import parse
from ckptsync.records.report import FindingKind, VerifyFinding
from ckptsync.stores.stream import RangeSource, digest_of, read_ahead, stream
from ckptsync.tensors import Extent, Files
from ckptsync.threads import ThreadPool
from ckptsync.verifier.expected_files import ExpectedFile
from ckptsync.verifier.tracked_files import CountedSource, TrackedFiles, local_root, pieces

FAR = 8  # requests at once
LOCAL_THREADS = 4  # threads where files are in memory, or on a mounted server; more are no faster
RANGE = 32 << 20  # bytes of a range of a large file: a request of its own
LARGE = 2 * RANGE
PIECE = 1 << 20  # least bytes that a sample takes or leaves
_BUFFER = 1 << 20
_FAR_AHEAD = 4 << 20, 8  # bytes of a piece, and how many are read before they are digested
_NEAR_AHEAD = 2 << 20, 1  # the disk reads on while a piece is digested
_PROBES = 16  # files that are checked for being in memory
_SHOWN = 3, 10  # ranges and tensors in a finding's text
Item = tuple[int, int, str]
"""Start, size, name."""
Compared = tuple[list[VerifyFinding], int, int]
"""Findings, and how many files and bytes were compared."""
Ranges = tuple[tuple[int, int], ...]
"""``(start, end)`` in bytes, ascending, apart from each other."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A share of all bytes, above 0 and at most 1; another ``seed`` chooses other bytes."""

    share: float
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Stretch:
    """Bytes ``start`` to ``end`` of a file; ``digests`` has a digest for each of its ranges."""

    file: ExpectedFile
    start: int
    end: int
    digests: Digests

    @property
    def size(self) -> int:
        """Return how many bytes the stretch has."""
        return self.end - self.start

    @property
    def has_one_digest(self) -> bool:
        """Return whether no part of the stretch has a digest of its own."""
        return sum(1 for _ in compared_ranges(self.digests, self.start, self.end)) == 1


def check_digests(
    source: CountedSource,
    files: Sequence[ExpectedFile],
    checkpoint: Files,
    sample: Sample | None = None,
) -> Compared:
    """Return findings, and how many files and bytes were compared.

    ``files`` are stored with their sizes; ``checkpoint`` is read to name the tensors in damage.
    With ``sample`` only chosen stretches are read. Raise StoreError if the store does not answer,
    which is no damage.
    """
    if sample:
        stretches = choose_sample(files, sample)
    else:
        in_ranges = local_root(source) is None
        stretches = [stretch for file in files for stretch in split(file, in_ranges=in_ranges)]
    compared = len({stretch.file.name for stretch in stretches})
    names = find_damaged(source, stretches)
    findings = locate_damage(source, [f for f in files if f.name in names], checkpoint)
    return findings, compared, sum(stretch.size for stretch in stretches)


def split(file: ExpectedFile, *, in_ranges: bool) -> list[Stretch]:
    """Return a file as stretches: about `RANGE` bytes each if it is read in ranges, else one.

    One, too, for a file of at most `LARGE` bytes, or without blocks.
    """
    is_cut = in_ranges and file.size > LARGE and file.recorded.blocks
    return list(_stretches(file, RANGE if is_cut else file.size))


def choose_sample(files: Iterable[ExpectedFile], sample: Sample) -> list[Stretch]:
    """Return stretches of at least the sample's share of all bytes, in the order of the files.

    They are about `PIECE` bytes, or as small as digests allow: a tensor of a model above `PIECE`
    bytes, whose header is never chosen; a whole file without blocks. The seed decides, not chance.
    """
    stretches: list[Stretch] = []
    for file in files:
        if file.size > PIECE and file.tensors:
            for tensor in (tensor for tensor in file.tensors if tensor.size):
                ends = tensor.start, tensor.start + tensor.size
                digests = RangeDigests(file.size, file.recorded.digest, ends, ("", tensor.digest))
                stretches.append(Stretch(file, *ends, digests))
        else:
            stretches += _stretches(file, PIECE if file.recorded.blocks else file.size)
    draws = [digest(f"{sample.seed} {s.start} {s.file.name}".encode()) for s in stretches]
    remaining = sample.share * sum(stretch.size for stretch in stretches)
    chosen_indexes = []
    for i in sorted(range(len(stretches)), key=draws.__getitem__):
        if remaining <= 0:
            break
        chosen_indexes.append(i)
        remaining -= stretches[i].size
    return [stretches[i] for i in sorted(chosen_indexes)]


def _stretches(file: ExpectedFile, least: int) -> Iterator[Stretch]:
    """Yield all of a file, in stretches of whole blocks that have at most ``least`` bytes.

    A block that is larger is one stretch, and so is a file of at most ``least`` bytes.
    """
    if file.size <= least:
        yield Stretch(file, 0, file.size, file.recorded)
        return
    block = file.recorded.block_size
    step = max(1, least // block) * block
    for start in range(0, file.size, step):
        yield Stretch(file, start, min(start + step, file.size), file.recorded)


def find_damaged(source: CountedSource, stretches: Sequence[Stretch]) -> frozenset[str]:
    """Read the stretches; return the names of files with one that differs or is missing.

    Several threads read, but one reads a local disk. Raise StoreError.
    """
    root = local_root(source)
    threads = FAR if root is None else _count_local_threads(source.source, root, stretches)
    ahead = _FAR_AHEAD if root is None else _NEAR_AHEAD
    # Read one after the other, each ahead of its digest: all from a disk; from elsewhere what is
    # large and has one digest alone.  Threads that read ahead would need many buffers.
    in_sequence, in_parallel = list[Stretch](), list[Stretch]()
    for stretch in stretches:
        is_large = root is None and stretch.size > LARGE and stretch.has_one_digest
        (in_sequence if threads == 1 or is_large else in_parallel).append(stretch)
    workers = min(threads, len(in_parallel))
    if workers < 2:
        intact = [_matches(source, each, threads) for each in in_parallel]
    else:
        with ThreadPool(workers, thread_name_prefix="ckptsync-verify") as pool:
            intact = list(pool.map(partial(_matches, source), in_parallel))
    intact += [_matches(source, each, ahead=ahead) for each in in_sequence]
    pairs = zip([*in_parallel, *in_sequence], intact, strict=True)
    return frozenset(each.file.name for each, is_intact in pairs if not is_intact)


def _count_local_threads(source: RangeSource, root: str, stretches: Sequence[Stretch]) -> int:
    """Return 1 for files that a local disk must read; several if they are in memory or mounted.

    A probe reads a byte of up to about `_PROBES` stretches. At most `LOCAL_THREADS`, or the cores.
    """
    probed = [s for s in stretches if s.size][:: max(1, len(stretches) // _PROBES)]
    is_mounted = bool(getattr(source, "late", 0.0))
    if not is_mounted and not all(_is_in_memory(root, stretch) for stretch in probed):
        return 1
    has_affinity = hasattr(os, "sched_getaffinity")
    return min(LOCAL_THREADS, len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1)


def _is_in_memory(root: str, stretch: Stretch) -> bool:
    """Return whether its middle byte can be read without waiting for a disk (preadv2(2)).

    False also if the file cannot be opened, or if the system cannot tell.
    """
    try:
        fd = safe_open.open_file(root, stretch.file.name)
    except OSError:
        return False  # the thread that reads it says what is wrong
    try:
        middle = stretch.start + stretch.size // 2
        return os.preadv(fd, [bytearray(1)], middle, getattr(os, "RWF_NOWAIT", 0)) == 1
    except OSError:
        return False  # EAGAIN: it would have waited; or the system cannot say
    finally:
        safe_open.close_quietly(fd)


def _matches(
    source: CountedSource, stretch: Stretch, threads: int = 1, ahead: tuple[int, int] | None = None
) -> bool:
    """Read a stretch; return whether it has its digests, False if it is missing or too short.

    ``threads`` digest a stretch of at least `LARGE` bytes; ``ahead``: bytes of a piece, and how
    many are read ahead. Raise StoreError but NotFound.
    """
    name, size = stretch.file.name, stretch.size
    digesters = threads if size >= LARGE else 1
    checker = Checker(name, stretch.digests, stretch.start, stretch.end, digesters)
    try:
        if ahead:
            with closing(read_ahead(source, name, size, *ahead, first=stretch.start)) as views:
                for view in views:
                    checker.add(view)
        else:
            buffer = memoryview(bytearray(min(_BUFFER, max(1, size))))
            stream(source, Extent(name, stretch.start, size), buffer, checker.add)
        checker.end()
    except (NotFound, Incomplete, Corrupt):
        return False  # it differs, is gone, or shorter than it was: `locate_damage` says which
    return True


def locate_damage(
    source: CountedSource, damaged: Sequence[ExpectedFile], checkpoint: Files
) -> list[VerifyFinding]:
    """Read damaged files once more; return a finding for each, with byte ranges and tensors.

    A file whose second read is right has a finding, too, without ranges; so has one that is now
    missing or short. ``checkpoint`` is read to name tensors of its own files. Raise StoreError.
    """
    findings = [_locate_damage(source, file) for file in damaged]
    own_ranges = {
        f.path: each.ranges for f, each in zip(damaged, findings, strict=True) if f.is_own
    }
    names = name_tensors(checkpoint, own_ranges) if own_ranges else {}
    for i, (file, finding) in enumerate(zip(damaged, findings, strict=True)):
        if finding.kind == "digest":
            tensors = names.get(file.path, ()) if file.is_own else finding.tensors
            detail = _describe(finding.ranges, tensors)
            findings[i] = replace(finding, tensors=tensors, detail=detail)
    return findings


def _locate_damage(source: CountedSource, file: ExpectedFile) -> VerifyFinding:
    """Read a damaged file; return the finding: where it differs, or that it is missing or short.

    One that does not differ any more has a finding without ranges. Raise StoreError.
    """
    try:
        if file.is_consolidated:
            ranges = _differing_tensors(source, file)
            tensors = (t.name for t in file.tensors if overlaps(ranges, t.start, t.size))
            return VerifyFinding("digest", file.shown, "", ranges, tuple(sorted(tensors)))
        digests = digest_file(source, file.name, file.size, file.recorded.block_size)
        return VerifyFinding("digest", file.shown, "", find_differing(file.recorded, digests))
    except (NotFound, Incomplete):
        detail = f"{file.size} bytes expected; it was deleted while it was read"
        return VerifyFinding("missing", file.shown, detail)
    except Corrupt as e:
        return VerifyFinding("size", file.shown, f"{file.size} bytes expected: {e}")


def _differing_tensors(source: CountedSource, file: ExpectedFile) -> Ranges:
    """Return the ranges of a model's file that differ, if any: whole tensors, and the header.

    Reads every tensor, and the whole file if all of them match: then a difference lies in the
    header. If tensors differ, the header is named only if it does not parse. Raise NotFound,
    Corrupt if the file is shorter, StoreError.
    """
    spans = [(t, Extent(file.name, t.start, t.size)) for t in file.tensors]
    differing = [e for t, e in spans if digest_of(pieces(source, e)) != t.digest]
    ranges = join_ranges((e.start, e.start + e.size) for e in differing if e.size)
    header = (0, min((t.start for t in file.tensors), default=file.size))
    if ranges and not _is_header(source, file.name, header[1]):
        return join_ranges((header, *ranges))
    whole = Extent(file.name, 0, file.size)
    if not ranges and digest_of(pieces(source, whole)) != file.recorded.digest:
        return (header,)
    return ranges


def _is_header(source: CountedSource, name: str, size: int) -> bool:
    """Read a header of ``size`` bytes; return whether it parses: it has no digest of its own.

    Raise NotFound, Corrupt if the file is shorter, StoreError.
    """
    head = bytearray(size)
    source.read_into(name, 0, memoryview(head))
    try:
        return isinstance(parse(head[8 : 8 + int.from_bytes(head[:8], "little")], name), dict)
    except Corrupt:
        return False


def digest_file(source: RangeSource, name: str, size: int, block: int = 0) -> FileDigest:
    """Read a file; return the digests of it and of its blocks, as a manifest records them.

    ``block``: bytes of a block; 0: by the size. Raise Corrupt if it is shorter, StoreError.
    """
    return digest_stream(pieces(source, Extent(name, 0, size)), size, block)


def _describe(ranges: Ranges, tensors: Collection[str]) -> str:
    """Return the text of a finding: the first ranges and tensors, and how many more.

    Without ranges it says that a second read was right.
    """
    if not ranges:
        return "two reads differ, and the second one is right: check disk, memory and network"
    range_texts = [f"{start} to {end}" for start, end in ranges[: _SHOWN[0]]]
    names = list(tensors)[: _SHOWN[1]]
    if len(ranges) > len(range_texts):
        range_texts.append(f"{len(ranges) - len(range_texts)} more ranges")
    if len(tensors) > len(names):
        names.append(f"{len(tensors) - len(names)} more")
    mismatch = f"checksum mismatch in bytes {', '.join(range_texts)}"
    return f"{mismatch} ({', '.join(names)})" if names else mismatch


def find_differing(recorded: FileDigest, digests: FileDigest) -> Ranges:
    """Return the ranges that differ, by blocks if both have blocks of one size; empty if equal.

    It is the whole file without such blocks, or if all blocks match and the files' digests do not.
    """
    if (recorded.size, recorded.digest) == (digests.size, digests.digest):
        return ()
    size, block = max(recorded.size, digests.size), recorded.block_size
    if block != digests.block_size or block < 1:
        return ((0, size),)
    pairs = enumerate(zip_longest(recorded.blocks, digests.blocks))
    differing = [(i * block, min((i + 1) * block, size)) for i, (a, b) in pairs if a != b]
    return join_ranges(differing) or ((0, size),)


def join_ranges(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return the ranges sorted; those that touch or overlap are joined."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return tuple(joined)


def overlaps(ranges: Ranges, start: int, size: int) -> bool:
    """Return whether some of ``size`` bytes from ``start`` lie in one of the ranges."""
    index = bisect_right(ranges, start, key=lambda r: r[1])
    return size > 0 and index < len(ranges) and ranges[index][0] < start + size


def name_tensors(files: Files, damage: Mapping[str, Ranges]) -> dict[str, tuple[str, ...]]:
    """Return the tensors in the damaged ranges of each file of a sharded checkpoint, by path.

    A path without any is absent. Tensors are left out where the metadata that names them is damaged
    itself, or cannot be read. ``damage``: ranges by path. Reads metadata. Raise StoreError.
    """
    names_by_path: dict[str, set[str]] = {}
    try:
        sources = registry.sources(files)
    except StoreError:
        raise
    except CkptsyncError:
        return {}  # damaged metadata names nothing; a finding names the file all the same
    for source in sources:
        tracked = TrackedFiles(files)
        try:
            tensors = registry.tensors(tracked, source)
        except StoreError:
            raise
        except CkptsyncError:
            continue  # as above, or incomplete, or a layout that this program does not know
        # Only these files say which tensor is where.  Headers of the others say only where it lies
        # in them, and must agree with these.
        layout = registry.LAYOUTS[source.layout]
        naming = (e for e in tracked.reads if e.file.endswith(layout.naming))
        doubtful = {e.file for e in naming if overlaps(damage.get(e.file, ()), e.start, e.size)}
        if doubtful and not layout.is_whole:
            continue
        for tensor in tensors:
            for part in (part for copy in tensor.copies for part in copy.stored()):
                extent = part.extent
                if extent.file not in doubtful and overlaps(
                    damage.get(extent.file, ()), extent.start, extent.size
                ):
                    names_by_path.setdefault(extent.file, set()).add(tensor.name)
    return {path: tuple(sorted(names)) for path, names in names_by_path.items()}


def find_archives(files: Files) -> dict[str, list[Item] | None]:
    """Return where torch's archives lie in the shards of distributed checkpoints, by path.

    None for a shard whose archives are compressed. Shards without readable metadata are left out.
    Raise StoreError.
    """
    archives: dict[str, list[Item] | None] = {}
    for root in dcp.roots(files.sizes()):
        try:
            metadata = dcp_metadata.read_metadata(files, root)
        except StoreError:
            raise
        except CkptsyncError:
            continue  # level parse has a finding for it
        for (name, _), item in metadata.items.items():
            in_file = archives.setdefault(item.file, [])
            if item.transforms or in_file is None:
                archives[item.file] = None
            else:
                in_file.append((item.start, item.size, name))
    return {path: sorted(items) if items is not None else None for path, items in archives.items()}


def check_crc32s(files: TrackedFiles, kind: FindingKind) -> Compared:
    """Compare every CRC32 in torch's archives; return findings of ``kind``, files and bytes.

    A file has one finding, at its first difference; the rest of it is not read. Archives that are
    compressed, or in no format that is known, are left out. Raise StoreError, Incomplete.
    """
    sizes = files.sizes()
    items_by_path = find_archives(files) if any(path.endswith(DCP_SHARD) for path in sizes) else {}
    findings: list[VerifyFinding] = []
    count = total = 0
    for path, size in sizes.items():
        archives: list[Extent] = []
        if path.endswith(TORCH) and torch_zip.has_end(files, Extent(path, 0, size)):
            archives = [Extent(path, 0, size)]
        elif items := items_by_path.get(path):
            archives = [Extent(path, start, n) for start, n, _ in items if start + n <= size]
        compared = 0
        try:
            for archive in archives:
                compared += _compare_crc32s(files, archive)
        except Corrupt as e:
            findings.append(VerifyFinding(kind, files.show(path), str(e)))
        except Unsupported:
            pass  # compressed, or of a kind that level parse has a note for: nothing is claimed
        count, total = count + (compared > 0), total + compared
    return findings, count, total


def _compare_crc32s(files: Files, extent: Extent) -> int:
    """Read an archive; return how many bytes of it were compared with a CRC32.

    Raise Corrupt if one differs, Unsupported for a kind of archive that is not read, StoreError.
    """
    archive = torch_zip.open_archive(files, extent)
    torch_zip.check_version(files, archive)
    compared = 0
    for name in archive.records:  # one by one: each is read behind its header
        record = torch_zip.extent(files, archive, name)
        if recorded := torch_zip.checksum(archive, name, record):
            CrcCheckedFiles(files, [recorded]).finish()
            compared += record.size
    return compared
