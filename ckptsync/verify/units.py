"""What level digest reads: stretches of files, each of which has digests of its own; all of them, or a sample.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ckptsync.digest import digest
from ckptsync.verify.expected import Expected

RANGE = 32 << 20
"""Bytes of a stretch of a large file, at least: each is a request of its own, and threads read several at once."""
LARGE = 2 * RANGE
PIECE = 1 << 20  # bytes of what a sample takes or leaves, at least


@dataclass(frozen=True, slots=True)
class Unit:
    """Bytes ``start`` to ``end`` of ``file``; ``wanted``: digests (their first digits) of each ``block`` bytes of it, the last one shorter."""

    file: Expected
    start: int
    end: int
    block: int
    wanted: tuple[str, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return self.end - self.start


def units(file: Expected, *, in_ranges: bool) -> Iterator[Unit]:
    """All of a file: a single stretch, or some if it is large, has digests of its blocks, and is better read ``in_ranges``."""
    if in_ranges and file.size > LARGE and file.wanted.blocks:
        yield from _blocks(file, RANGE)
    else:
        yield whole(file)


def whole(file: Expected) -> Unit:
    """A file with the digest that it has as a whole."""
    return Unit(file, 0, file.size, max(1, file.size), (file.wanted.digest,))


def sampled(files: Iterable[Expected], share: float, seed: int) -> tuple[Unit, ...]:
    """Stretches of together at least ``share`` of all bytes, which ones depends on ``seed`` alone; in the order of the files.

    As small as the recorded digests allow: blocks of a checkpoint's files, tensors of a consolidated model.
    """
    found = [unit for file in files for unit in _pieces(file)]
    left = share * sum(unit.size for unit in found)
    chosen: list[int] = []
    for i in sorted(range(len(found)), key=lambda i: _lot(found[i], seed)):
        if left <= 0:
            break
        chosen.append(i)
        left -= found[i].size
    return tuple(found[i] for i in sorted(chosen))


def coverage(chosen: Sequence[Unit]) -> tuple[int, int]:
    """How many files, and how many bytes."""
    return len({unit.file.name for unit in chosen}), sum(unit.size for unit in chosen)


def _pieces(file: Expected) -> Iterator[Unit]:
    if file.size <= PIECE:
        yield whole(file)
    elif file.wanted.blocks:
        yield from _blocks(file, PIECE)
    elif file.tensors:
        for t in file.tensors:
            if t.size:
                yield Unit(file, t.start, t.start + t.size, t.size, (t.digest,))
    else:
        yield whole(file)


def _blocks(file: Expected, least: int) -> Iterator[Unit]:
    block = file.wanted.block_size
    count = max(1, least // block)
    for i in range(0, len(file.wanted.blocks), count):
        wanted = file.wanted.blocks[i : i + count]
        yield Unit(file, i * block, min((i + len(wanted)) * block, file.size), block, wanted)


def _lot(unit: Unit, seed: int) -> str:
    return digest(f"{seed} {unit.start} {unit.file.name}".encode())
