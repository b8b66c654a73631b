"""A process that is to be killed while it writes: ``python -m tests.campaigns.stores_child JOB``,
where JOB is a file made by `Job.save`.

Says ``BEGIN``, and ``ACK <name>`` for each file once the store has it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptsync.errors import Exists
from ckptsync.stores.contract import About, Store, read_all
from ckptsync.stores.limits import Limits
from ckptsync.stores.opening import open_any

MARK = "/ckptsync-campaign/begin"
"""Asked for in vain just before the first write, so that a trace shows where that is."""
PIECE = 1 << 20
BEGIN, ACK = "BEGIN", "ACK"


@dataclass(frozen=True, slots=True)
class File:
    """Something to write.  ``seed`` is its content."""

    name: str
    how: str  # write or create
    seed: int
    size: int

    def content(self) -> bytes:
        """All of it."""
        return random.Random(self.seed).randbytes(self.size)

    def put(self, store: Store) -> None:
        """Send it, as a worker does: a name that is taken by these bytes is as good as written."""
        content = memoryview(self.content())
        pieces = [content[at : at + PIECE] for at in range(0, len(content), PIECE)]
        about = About(self.size, f"campaign {self.seed} {self.size}")
        try:
            (store.create if self.how == "create" else store.write)(self.name, pieces, about)
        except Exists:
            if read_all(store, self.name) != content:
                raise


@dataclass(frozen=True, slots=True)
class Job:
    """What a process is to write, and where."""

    url: str
    options: Mapping[str, object]
    files: Sequence[File]
    threads: int = 2
    patience: float = 20.0
    stall: float = 10.0

    def save(self, path: Path) -> None:
        """For another process."""
        path.write_text(json.dumps(dataclasses.asdict(self)))

    def limits(self) -> Limits:
        """Patience, as in the configuration."""
        return Limits(threads=self.threads, patience=self.patience, stall=self.stall)

    def store(self) -> Store:
        """A new object, as another process has it."""
        return open_any(self.url, self.options, self.limits())


def load(path: Path) -> Job:
    """What `Job.save` has written."""
    found = json.loads(path.read_text())
    return Job(**found | {"files": [File(**one) for one in found["files"]]})


def done(job: Job, store: Store) -> Iterator[File]:
    """Each file once it is in the store."""
    for file in job.files:
        file.put(store)
        yield file


def main(path: str) -> None:
    """The whole job."""
    job = load(Path(path))
    store = job.store()
    os.write(1, f"{BEGIN}\n".encode())
    os.access(MARK, os.F_OK)
    for file in done(job, store):
        os.write(1, f"{ACK} {file.name}\n".encode())  # one system call, nothing buffered


if __name__ == "__main__":
    main(sys.argv[1])
