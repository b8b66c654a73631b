"""Pickles that were made to keep their reader busy, to fill its memory, or to end its process.

``python -m tests.hostile.expensive_pickles [NAME ...]`` reads each in its own process.  It prints
the name, bytes, seconds, the memory that reading took at most in bytes, and the result.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable

from ckptsync.errors import CkptsyncError
from ckptsync.formats import torch_pickle
from ckptsync.formats.pickles import AnyClass, loads
from ckptsync.layouts import dcp_metadata
from tests.support.files_in_memory import MemoryFiles

MILLION = 1_000_000
ORDERED, SIZE, DTYPE = b"ccollections\nOrderedDict\n", b"ctorch\nSize\n", b"ctorch\nfloat32\n"
DEVICE = b"ctorch\ndevice\n"
CHUNKED, BOX, INDEX = (
    f"ctorch.distributed.checkpoint.metadata\n{name}\n".encode()
    for name in ("TensorStorageMetadata", "ChunkStorageMetadata", "MetadataIndex")
)
METADATA, ITEM = (
    b"ctorch.distributed.checkpoint.metadata\nMetadata\n",
    b"ctorch.distributed.checkpoint.filesystem\n_StorageInfo\n",
)
MODULE = b"torch.distributed.checkpoint"
START, END = b"\x80\x04", b"."
# a tuple of two that are one tuple of two that are …
BOMB = b"K\x01\x85" + b"".join(b"q%ch%c\x86" % (n, n) for n in range(60))
DEEP = b")" + b"\x85" * 3 * MILLION
P61 = 2**61 - 1
PATIENCE = 300  # seconds that none of them may take


def put(index: int) -> bytes:
    return b"r" + struct.pack("<I", index)


def get(index: int) -> bytes:
    return b"j" + struct.pack("<I", index)


def text(size: int) -> bytes:
    return b"X" + struct.pack("<I", size) + b"a" * size


def long(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def alike(count: int) -> list[int]:
    """Whole numbers of one hash."""
    return [P61 * n + 1 for n in range(1, count + 1)]


def pairs_alike(count: int) -> list[tuple[int, int]]:
    """Pairs of one hash: CPython's tuples mix their elements' hashes in a way that can be
    undone.
    """
    m, p1, p2, p5 = 2**64 - 1, 11400714785074694791, 14029467366897019727, 2870177450012600261
    back1, back2 = pow(p1, -1, 2**64), pow(p2, -1, 2**64)
    found: list[tuple[int, int]] = []
    wanted, first = 12345, 0
    while len(found) < count:
        first += 1
        lane = (p5 + first * p2) & m
        lane = (((lane << 31) | (lane >> 33)) * p1) & m
        before = (wanted * back1) & m
        before = ((before >> 31) | (before << 33)) & m
        second = ((before - lane) * back2) & m
        if second < P61:
            found.append((first, second))
    return found


def numbers(keys: list[int]) -> bytes:
    return b"}(" + b"".join(long(key) + b"N" for key in keys) + b"u"


def kept(value: bytes, index: int = 0) -> bytes:
    """The value in the memo, and no longer on the stack."""
    return value + put(index) + b"0"


def big_list(count: int) -> bytes:
    return kept(b"](" + b"N" * count + b"e")


def big_dict(count: int) -> bytes:
    items = (b"J" + struct.pack("<i", n) + b"N" for n in range(count))
    return kept(b"}(" + b"".join(items) + b"u")


def word(name: str) -> bytes:
    return b"\x8c" + bytes([len(name)]) + name.encode()


def fields(**values: bytes) -> bytes:
    """Attributes of an object, by name."""
    return b"".join(word(name) + value for name, value in values.items())


def objects(
    kind: bytes, attributes: Callable[[int], bytes], count: int, begin: bytes = b")\x81}("
) -> bytes:
    """A list of objects that have these attributes; their class is in the memo at 0."""
    made = (get(0) + begin + attributes(n) + b"ub" for n in range(count))
    return kept(kind) + b"](" + b"".join(made) + b"e"


def tensor(boxes: bytes, size: bytes = b")") -> bytes:
    """Attributes of a tensor in ``.metadata``."""
    return fields(size=size, chunks=boxes, properties=DEVICE + b")R")


def metadata(names: bytes, chunks: bytes) -> bytes:
    """``.metadata`` of these tensors, whose chunks lie there."""
    found = fields(state_dict_metadata=names, planner_data=b"N", storage_data=chunks)
    return METADATA + b")\x81}(" + found + b"ub"


def shared_boxes() -> bytes:
    boxes = kept(objects(BOX, lambda _: fields(offsets=b")", sizes=b")"), 50_000), 1)
    one = get(2) + b")\x81}(" + tensor(get(1)) + b"ub"
    return boxes + kept(CHUNKED, 2) + b"](" + one * 50_000 + b"e"


def shared_tensors() -> bytes:
    """``.metadata`` of 100,000 names of one tensor that has 50,000 empty boxes."""
    zero = b"K\x00\x85"
    boxes = kept(objects(BOX, lambda _: fields(offsets=zero, sizes=zero), 50_000), 1)
    one = kept(CHUNKED + b")\x81}(" + tensor(get(1), zero) + b"ub", 2)
    names = b"".join(word(f"w{n}") + get(2) for n in range(100_000))
    return boxes + one + metadata(b"}(" + names + b"u", b"}")


def chunks(offsets: list[tuple[int, int]]) -> bytes:
    """``.metadata`` whose chunks lie at these offsets."""
    items = (
        INDEX
        + b")\x81}("
        + fields(fqn=word("w"), offset=long(a) + long(b) + b"\x86", index=b"N")
        + b"ub"
        + ITEM
        + b")\x81}("
        + fields(relative_path=word("f"), offset=b"J" + struct.pack("<i", n), length=b"K\x01")
        + b"ub"
        for n, (a, b) in enumerate(offsets)
    )
    return metadata(b"}", b"}(" + b"".join(items) + b"u")


MAKE: dict[str, Callable[[], bytes]] = {
    # keys that hash for ever, or too deep
    "tuple bomb as key": lambda: b"}" + BOMB + b"Ns",
    "tuple bomb as key of a pair": lambda: ORDERED + b"](" + BOMB + b"N\x86e\x85R",
    "tuple bomb in a set": lambda: b"\x8f(" + BOMB + b"\x90",
    "tuple bomb in a frozenset": lambda: b"(" + BOMB + b"\x91",
    "tuple bomb as state's name": lambda: CHUNKED + b")\x81}" + BOMB + b"Nsb",
    "tuple bomb among attributes": lambda: CHUNKED + b")\x81\x94}\x94(" + BOMB + b"Nub",
    "tuple bomb as a shape": lambda: SIZE + BOMB + b"\x85R",
    "tuple bomb as persistent id": lambda: BOMB + b"Q",
    "deep tuple as key": lambda: b"}" + DEEP + b"Ns",
    "deep tuple, let go": lambda: DEEP + b"0N",
    "deep lists": lambda: b"]" * 3 * MILLION + b"a" * (3 * MILLION - 1),
    "deep calls": lambda: (
        kept(DEVICE)
        + b"N"
        + b"".join(kept(b"\x85", n) + get(0) + get(n) + b"R" for n in range(1, 400_001))
    ),
    "frozenset bomb": lambda: b"(" * 40 + b"K\x01" + b"\x91" * 40,
    "a tuple of a million as key, again and again": lambda: (
        kept(b"(" + b"N" * MILLION + b"t") + b"}" + (get(0) + b"Ns") * 200_000
    ),
    # hashes that are one
    "100,000 numbers of one hash": lambda: numbers(alike(30_000)),
    "numbers of one hash in many dictionaries": lambda: (
        b"".join(numbers(alike(30_000)[n : n + 60]) for n in range(0, 30_000, 60)) + b"0" * 499
    ),
    "tuples of one hash": lambda: (
        b"}(" + b"".join(long(a) + long(b) + b"\x86N" for a, b in pairs_alike(30_000)) + b"u"
    ),
    "chunks of one hash": lambda: chunks(pairs_alike(20_000)),
    "not a number, often": lambda: (
        b"}(" + (b"G" + struct.pack(">d", float("nan")) + b"N") * 100_000 + b"u"
    ),
    "a long text in tuples as key": lambda: (
        kept(text(MILLION) + b"\x85", 0)
        + kept(text(MILLION) + b"\x85", 1)
        + b"}"
        + get(0)
        + b"Ns"
        + (get(1) + b"Ns") * 100_000
    ),
    "a long storage key": lambda: (
        kept(text(MILLION))
        + (b"(X\x07\0\0\0storagectorch\nFloatStorage\n" + get(0) + b"NK\x01tQ0") * 30_000
    ),
    # copies
    "Size of a million, 150 times": lambda: (
        big_list(MILLION) + kept(SIZE, 1) + (get(1) + get(0) + b"\x85R") * 150
    ),
    "small sizes, by the million": lambda: (
        kept(b"(" + b"K\x01" * 64 + b"t")
        + kept(SIZE, 1)
        + b"("
        + (get(1) + get(0) + b"\x85R") * 300_000
        + b"t"
    ),
    "OrderedDict of a dictionary, 2,000 times": lambda: (
        big_dict(200_000) + kept(ORDERED, 1) + (get(1) + get(0) + b"\x85R0") * 2_000
    ),
    "a state of 100,000 names, often": lambda: (
        big_dict(100_000) + kept(BOX, 1) + (get(1) + b")\x81" + get(0) + b"b0") * 50_000
    ),
    "boxes that many tensors share": shared_boxes,
    "tensors that many names share": shared_tensors,
    # memory
    "marks and lists": lambda: b"](" + b"](e" * 5 * MILLION + b"e",
    "memo with holes": lambda: b"N" + b"".join(put(n << 12) for n in range(1, MILLION)),
    "a list doubled": lambda: b"]" + put(0) + b"Na" + (b"(" + get(0) + get(0) + b"e") * MILLION,
    "one text as many values": lambda: kept(text(MILLION)) + b"](" + get(0) * MILLION + b"e",
    "wide text": lambda: (
        (b"X" + struct.pack("<I", 4 * MILLION + 4) + b"a" * 4 * MILLION + "🙂".encode()) * 8
    ),
    "names": lambda: b"".join(b"ca%d\nb\n" % n for n in range(600_000)),
    "calls of names": lambda: kept(DTYPE) + SIZE + put(1) + (get(1) + b")R") * MILLION,
    "sizes that come again": lambda: (
        SIZE + b"\x94" + b"h\0K\x01K\x01\x86\x94\x85\x94R\x94" * 2 * MILLION
    ),
    "long numbers": lambda: b"](" + (b"\x8a\xff" + b"\x7f" * 255) * 200_000 + b"e",
    "objects that are never alike": lambda: objects(
        CHUNKED, lambda n: tensor(b"]") + word(str(n)) + b"N", 40_000, b")\x81\x94}\x94("
    ),
    "unknown objects that take items": lambda: (
        b"cown\nList\n)R" + put(0) + (b"(" + b"N" * 50 + b"e") * 100_000 + b"NNs" * 100_000
    ),
}


def outcome(name: str) -> str:
    """Read it; bytes, seconds, bytes of memory, and the error or "read"."""
    data = START + MAKE[name]() + END
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    try:
        if MODULE in data[:100] or METADATA in data:
            dcp_metadata.read_metadata(MemoryFiles({".metadata": data}), "")
        else:
            loads(data, AnyClass(torch_pickle.ALLOWED), torch_pickle.Storages().add)
        told = "read"
    except CkptsyncError as e:
        told = f"{type(e).__name__}: {e}"[:100]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return f"{name}\t{len(data)}\t{time.perf_counter() - start:.2f}\t{peak << 10}\t{told}"


def main() -> None:
    """Each in a process of its own, which is killed if it does not end.

    A line for each, also of one that died.
    """
    gc.disable()  # as where merges are planned
    for name in sys.argv[1:] or MAKE:
        sys.stdout.flush()
        child = os.fork()
        if not child:
            signal.alarm(PATIENCE)
            print(outcome(name), flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            print(f"{name}\t0\t0\t0\tdied of {status}")


if __name__ == "__main__":
    main()
