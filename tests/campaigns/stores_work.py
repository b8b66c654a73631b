"""What a process does to a store when it is killed, and what must be true of the store then."""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol

import ckptsync
from ckptsync.records.store_paths import parse_record_name
from ckptsync.stores.contract import Store, read_all
from ckptsync.stores.limits import Limits
from ckptsync.stores.opening import create_store, open_any
from tests.campaigns.campaign import CKPTSYNC, flags
from tests.campaigns.stores_child import ACK, MARK, File, Job, done
from tests.campaigns.stores_locations import Location
from tests.support.files_in_memory import contents
from tests.support.worker_in_process import push_now

DEMO = Path(ckptsync.__file__).parent / "demo_data" / "fsdp2" / "node0" / "checkpoint-4"


class Work(Protocol):
    """``size``: bytes of it; ``mark``: what a system call names when it begins."""

    kind: str
    size: int
    mark: str

    def prepare(self, there: Location) -> list[str]:
        """Make ``there`` anew; the command to run."""
        ...

    def acknowledged(self, lines: Sequence[str]) -> set[str]:
        """The names of files that the process said were stored."""
        ...

    def is_over(self, lines: Sequence[str]) -> bool:
        """Whether it came to its end."""
        ...

    def violations(self, there: Location, acknowledged: set[str]) -> list[str]:
        """What must not be seen."""
        ...

    def finish(self, there: Location) -> set[str]:
        """Do it again, here and to its end; the names of all files that may be there then."""
        ...


class Writing:
    """Files, one after the other.  ``OLD`` is there before, under a name that is written anew."""

    kind, mark = "writing", MARK

    def __init__(self, home: Path, files: Sequence[File], old: File) -> None:
        self.files, self._old, self._path = files, old, home / "job"
        self.size = sum(file.size for file in files)

    def prepare(self, there: Location) -> list[str]:
        there.fresh()
        self._old.put(self._job(there).store())
        self._job(there).save(self._path)
        return [sys.executable, "-m", "tests.campaigns.stores_child", str(self._path)]

    def acknowledged(self, lines: Sequence[str]) -> set[str]:
        return {line.split()[1] for line in lines if line.startswith(ACK)}

    def is_over(self, lines: Sequence[str]) -> bool:
        return len(self.acknowledged(lines)) == len(self.files)

    def violations(self, there: Location, acknowledged: set[str]) -> list[str]:
        wanted = {
            f.name: [f.content(), *([] if f.name in acknowledged else [self._old.content()])]
            for f in self.files
        }
        must = acknowledged | {self._old.name}
        return _unlike(self._job(there).store(), wanted, must)

    def finish(self, there: Location) -> set[str]:
        return {file.name for file in done(self._job(there), self._job(there).store())}

    def _job(self, there: Location) -> Job:
        return Job(there.url, there.options, self.files)


class Pushing:
    """``ckptsync push`` of one checkpoint, of which a file is large."""

    kind = "push"

    def __init__(self, home: Path, ballast: int, seed: int) -> None:
        self._checkpoint = shutil.copytree(DEMO, home / "run" / DEMO.name)
        (self._checkpoint / "ballast_0.distcp").write_bytes(random.Random(seed).randbytes(ballast))
        self.size = sum(len(content) for content in self._contents.values())
        self.mark = str(self._checkpoint)

    @cached_property
    def _contents(self) -> Mapping[str, bytes]:
        found = contents(self._checkpoint)
        return {f"run/{self._checkpoint.name}/{path}": data for path, data in found.items()}

    def prepare(self, there: Location) -> list[str]:
        there.fresh()
        words = [str(self._checkpoint), "--store", there.url, *flags(run="run", node="n0")]
        return [*CKPTSYNC, "push", *words]

    def acknowledged(self, lines: Sequence[str]) -> set[str]:
        return set(self._contents) if self.is_over(lines) else set()

    def is_over(self, lines: Sequence[str]) -> bool:
        return any("sent" in line for line in lines)

    def violations(self, there: Location, acknowledged: set[str]) -> list[str]:
        """As `Work` says; and a manifest has all of its files."""
        store = open_any(there.url, there.options, Limits(patience=20))
        records = [entry.name for entry in store.names("") if ".ckptsync/" in entry.name]
        has_manifest = any(parse_record_name(name) for name in records)
        wanted = {name: [content] for name, content in self._contents.items()}
        return _unlike(
            store, wanted, set(wanted) if has_manifest or acknowledged else set(), records
        )

    def finish(self, there: Location) -> set[str]:
        store = create_store(there.url, there.options, Limits(patience=20, threads=2))
        push_now(self._checkpoint, store, "n0", "run")
        return set(self._contents) | {
            entry.name for entry in store.names("") if ".ckptsync/" in entry.name
        }


def _unlike(
    store: Store, wanted: Mapping[str, Sequence[bytes]], must: set[str], others: Sequence[str] = ()
) -> list[str]:
    """Files that nobody wrote, or not with these bytes, and those that must be there and are
    not.
    """
    sizes = {entry.name: entry.size for entry in store.names("")}
    wrong = [f"{name}: nobody wrote that" for name in sizes.keys() - wanted.keys() - set(others)]
    wrong += [
        f"{name}: lost, although it was acknowledged, or there before"
        for name in must - sizes.keys()
    ]
    for name in sizes.keys() & wanted.keys():
        found = read_all(store, name)
        if found not in wanted[name] or len(found) != sizes[name]:
            wrong.append(f"{name}: {len(found)} bytes that nobody wrote, {sizes[name]} are listed")
    return wrong
