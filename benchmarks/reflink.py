"""What a store on the trainer's own file system gains by sharing its bytes (FICLONE) rather than
writing them again.

    python -m benchmarks.reflink DIRECTORY --gib 1 --rounds 5

``DIRECTORY`` must be on XFS, btrfs or another file system whose files can share.  Each round stores
a file as a worker does (read and digested in the pass that stores it), once written and once
shared, with nothing of it in memory before.  Medians of wall seconds and CPU seconds.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import time
from pathlib import Path

from ckptsync.stores.contract import About
from ckptsync.stores.posix.store import PosixStore
from ckptsync.walk import walk
from ckptsync.worker.local_save import LocalFile
from ckptsync.worker.upload_sources import UploadSource

CHUNK = 4 << 20


def main() -> None:
    """Print a line for each way."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    output, root = args.directory / "output", args.directory / "store"
    output.mkdir()
    root.mkdir()
    with (output / "file").open("wb") as out:
        for _ in range(int(args.gib * 2**30) // CHUNK):
            out.write(os.urandom(CHUNK))
        os.fsync(out.fileno())
    rounds = [
        (stored(output, root, is_shared=False), stored(output, root, is_shared=True))
        for _ in range(args.rounds)
    ]
    for name, times in zip(("written", "shared"), zip(*rounds, strict=True), strict=True):
        wall, cpu = (statistics.median(column) for column in zip(*times, strict=True))
        print(f"{name}: {wall:.2f} s, {cpu:.2f} CPU s")


def stored(output: Path, root: Path, *, is_shared: bool) -> tuple[float, float]:
    """Wall and CPU seconds."""
    source = UploadSource(LocalFile(walk(output).files[0], output, is_pinned=False), "node")
    store = PosixStore(str(root))
    store.delete("run/file")
    forget(output / "file")
    begun, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
    store.create(
        "run/file",
        source,
        source.about if is_shared else About(source.about.size, source.about.origin),
    )
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.monotonic() - begun, cpu


def forget(path: Path) -> None:
    """Let the page cache go of a file."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


if __name__ == "__main__":
    main()
