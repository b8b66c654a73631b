"""What a store holds of a real training, beside what the trainer wrote and what the framework
gathered.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckptsync.catalogue.uncached import read_state
from ckptsync.errors import CkptsyncError
from ckptsync.merger.plan import MergeOptions
from ckptsync.records.location_status import LocationState
from ckptsync.stores.contract import Store, read_all
from ckptsync.stores.opening import create_store
from tests.campaigns.cluster import Life, differences, longest, nodes_of
from tests.campaigns.two_nodes import NODES, Job, TwoNodes, events
from tests.support.files_in_memory import file_paths
from tests.support.merge_on_disk import merge_local
from tests.support.vector import ROOT, bits
from tests.support.waiting import until

# seconds: without the hook what lived longer while a worker was at work must be in the store
LIVED = 5.0
WEIGHTS = (
    "model.safetensors",
)  # of the final model; where the trainer writes none, there is none to send


@dataclass(frozen=True, slots=True)
class Tally:
    """Of one training: steps saved, those that had to be in the store, those that are there whole.

    What is wrong.

    ``unseen``: parts of a node that lived long enough, but no worker lived so long with them, and
    the store has not got them.
    """

    saved: int
    wanted: int
    whole: int
    wrong: tuple[str, ...]
    unseen: int = 0

    def __str__(self) -> str:
        unseen = f", {self.unseen} that no worker could see" if self.unseen else ""
        return (
            f"{self.saved} saved, {self.wanted} wanted, {self.whole} whole in the store,"
            f" {len(self.wrong)} wrong{unseen}"
        )


class Judge:
    """Of one training, once it has ended."""

    def __init__(self, nodes: TwoNodes, job: Job, first: int = 0) -> None:
        """``first``: the node of rank 0."""
        self._nodes, self._job, self._first = nodes, job, first

    def wait(self, patience: float) -> float:
        """Until every step that must be there is, or the time is over; seconds that it took."""
        begun = time.monotonic()
        until(lambda: not self._absent(self._snapshots()), patience, 0.5)
        return time.monotonic() - begun

    def tally(self, codes: list[int | None]) -> Tally:
        """Everything compared, file by file and bit by bit."""
        seen = self._snapshots()
        saved, wanted = self._saved(), set().union(*(self._wanted(n) for n in range(NODES)))
        wrong = [*self._trainer(codes), *self._absent(seen), *self._alarmed(), *self._undisturbed()]
        whole = 0
        for location, snapshot in sorted(seen.items()):
            found = [*self._location(location, snapshot)]
            whole += not found
            wrong += found
        return Tally(
            len(saved),
            len(wanted),
            whole,
            tuple(wrong),
            sum(self._unseen(seen, n) for n in range(NODES)),
        )

    def _truth(self, n: int) -> Path:
        return self._nodes.node(n) / "truth" / self._job.run

    def _snapshots(self) -> dict[str, LocationState]:
        catalogue = read_state(self._nodes.store, self._job.run)
        return {s.location: s for s in catalogue.readable}

    def _saved(self) -> set[int]:
        return {
            e["step"]
            for e in events(self._truth(self._first)).get("events-0", [])
            if e["event"] == "saved"
        }

    def _wanted(self, n: int) -> set[int]:
        """Of a node: with the hook all.

        Without, what lived long enough beside a worker, and what was never deleted.
        """
        if self._job.hook:
            return set(range(1, self._job.steps + 1))
        lives = self._nodes.workers[n].at_work()
        return {
            step
            for step, (begin, end) in self._lived().items()
            if longest(lives, begin, end) > LIVED
        }

    def _unseen(self, seen: Mapping[str, LocationState], n: int) -> int:
        """How many of a node's parts nobody could be asked for, and nobody has."""
        lived = {
            step for step, (begin, end) in self._lived().items() if end - begin > LIVED
        } - self._wanted(n)
        return sum(f"node{n}" not in nodes_of(seen.get(f"checkpoint-{step}")) for step in lived)

    def _lived(self) -> dict[int, Life]:
        """From when to when each step's checkpoint was there, and whole."""
        said = events(self._truth(self._first)).get("events-0", [])
        gone = {e["step"]: e["at"] for e in said if e["event"] == "gone"}
        return {
            e["step"]: (e["at"], gone.get(e["step"], float("inf")))
            for e in said
            if e["event"] == "saved"
        }

    def _absent(self, seen: Mapping[str, LocationState]) -> list[str]:
        tags = {path.name for n in range(NODES) for path in self._truth(n).glob("global_step*")}
        wanted = [
            {*(f"checkpoint-{step}" for step in self._wanted(n)), *tags} for n in range(NODES)
        ]
        parts = [
            (
                name,
                {
                    f"node{n}"
                    for n in range(NODES)
                    if name in wanted[n] and (self._truth(n) / name).is_dir()
                },
            )
            for name in sorted(set().union(*wanted))
        ]
        if any((self._truth(self._first) / "root" / name).exists() for name in WEIGHTS):
            parts.append(("final", {f"node{self._first}"}))
        return [
            f"{self._job.run}/{name}: not in the store of {', '.join(sorted(w))}"
            for name, all_ in parts
            if (w := all_ - nodes_of(seen.get(name)))
        ]

    def _trainer(self, codes: list[int | None]) -> Iterator[str]:
        kept = [
            any(e["event"] == "kept" for e in said)
            for n in range(NODES)
            for said in events(self._truth(n)).values()
        ]
        is_over = len(kept) == NODES * self._job.ranks and all(kept)
        # gloo's teardown aborts one FSDP2 run in five, with or without us
        if not is_over or (any(codes) and self._job.mode != "fsdp2"):
            yield f"{self._job.run}: the trainers ended with {codes}"
        if self._saved() != set(range(1, self._job.steps + 1)):
            yield f"{self._job.run}: {len(self._saved())} steps were saved of {self._job.steps}"

    def _alarmed(self) -> Iterator[str]:
        """With the hook nothing is missed, and so nothing may be called so."""
        for worker in self._nodes.workers if self._job.hook else ():
            events = (
                json.loads(line)
                for line in worker.log.read_text("utf-8").splitlines()
                if '"phase": "missed"' in line
            )
            said = [e["checkpoint"] for e in events if e["run"] == self._job.run]
            yield from (f"{self._job.run}/{name}: called missed on {worker.name}" for name in said)

    def _undisturbed(self) -> Iterator[str]:
        """What the trainers' directories hold is what they wrote, and not touched."""
        for n in range(NODES):
            out = self._nodes.node(n) / "out" / self._job.run
            for path in sorted(out.glob("checkpoint-*")):
                theirs = self._truth(n) / path.name
                if not theirs.is_dir():
                    yield f"{path}: the trainer wrote no such directory"
                elif _listed(path) != _listed(theirs):
                    yield (
                        f"{path}: {sorted(_listed(path) ^ _listed(theirs))} is not as the trainer"
                        " left it"
                    )
            strange = {p.name for p in out.glob("*") if p.is_file()} ^ {
                p.name for p in (self._truth(n) / "root").glob("*")
            }
            if strange:
                yield f"{out}: {sorted(strange)} is not as the trainer left it"

    def _location(self, location: str, snapshot: LocationState) -> Iterator[str]:
        told = f"{self._job.run}/{location}"
        if location == "final":
            yield from self._final(told, snapshot)
            return
        if not any((self._truth(n) / location).is_dir() for n in range(NODES)):
            yield f"{told}: nobody wrote that"
            return
        for node in sorted(nodes_of(snapshot)):
            yield from self._files(told, snapshot, node, self._truth(int(node[4:])) / location)
        if len(nodes_of(snapshot)) == NODES:
            yield from self._merged(told, snapshot)

    def _files(self, told: str, snapshot: LocationState, node: str, truth: Path) -> Iterator[str]:
        """One node's part, byte for byte."""
        torn = differences(self._nodes.store, snapshot, file_paths(truth), node, adds_configs=True)
        yield from (f"{told}/{path}: TORN on {node}, {how}" for path, how in torn)

    def _merged(self, told: str, snapshot: LocationState) -> Iterator[str]:
        step = re.sub(r".*[^0-9]", "", snapshot.checkpoint)
        reference = self._truth(self._first) / f"model-{step}.safetensors"
        base = ROOT / "base" if not self._job.hook else None
        fetched = self._nodes.home / "fetched" / told
        if how := merged_otherwise(self._nodes.store, snapshot, fetched, reference, base=base):
            yield f"{told}: {how}"

    def _final(self, told: str, snapshot: LocationState) -> Iterator[str]:
        root = file_paths(self._truth(self._first) / "root")
        for name in WEIGHTS:
            if name not in snapshot.files:
                yield f"{told}: has no {name}"
        for path, how in differences(self._nodes.store, snapshot, root):
            if path in snapshot.files:
                yield f"{told}/{path}: {how}"


def locations(url: str, run: str) -> dict[str, LocationState]:
    """Return what a store in a directory holds of a run, by location; nothing if there is none."""
    if not Path(url).is_dir():
        return {}
    return {s.location: s for s in read_state(create_store(url), run).readable}


def in_store(
    url: str,
    run: str,
    truths: Mapping[str, Path],
    is_needed: Callable[[str], bool],
    **options: Any,
) -> Iterator[str]:
    """Yield what a store's run has not, or has otherwise than the trainer wrote it.

    ``truths``: a directory for each location.  ``is_needed``: whether the final model needs a file
    beside the checkpoints.  ``options``: those of `differences`.
    """
    store, seen = create_store(url), locations(url, run)
    for name in sorted(truths.keys() ^ seen.keys()):
        yield f"{name}: {'nobody wrote that' if name in seen else 'not in the store'}"
    for name in sorted(truths.keys() & seen.keys()):
        for path, how in differences(store, seen[name], file_paths(truths[name]), **options):
            if name != "final" or path in seen[name].files or is_needed(path):
                yield f"{name}/{path}: {how}"


def merged_otherwise(
    store: Store,
    seen: LocationState,
    directory: Path,
    reference: Path,
    *,
    source: str | None = None,
    base: Path | None = None,
) -> str:
    """Merge what a store holds of a location; return what is wrong with the model, if anything.

    ``base``: where the configuration comes from if the location has none.
    """
    shutil.rmtree(directory, ignore_errors=True)
    for path, where in seen.files.items():
        here = directory / "stored" / path
        here.parent.mkdir(parents=True, exist_ok=True)
        here.write_bytes(read_all(store, where[0].name))
        # a merge asks which file was written before which
        os.utime(here, ns=(where[0].entry.mtime, where[0].entry.mtime))
    base = None if "config.json" in seen.files else base
    try:
        merge_local([directory / "stored"], directory / "merged", MergeOptions(source=source), base)
    except CkptsyncError as e:
        return f"cannot be merged: {e}"
    is_same = bits(*(directory / "merged").glob("*.safetensors")) == bits(reference)
    return "" if is_same else "merged, it has not the weights that the trainer held"


def with_more(tally: Tally, *more: str) -> Tally:
    """The same with more that is wrong."""
    return replace(tally, wrong=(*tally.wrong, *more))


def _listed(directory: Path) -> set[tuple[str, int]]:
    """Names, with the times of directories: a name that comes or goes changes them."""
    inside = {directory, *directory.rglob("*")}
    return {(p.relative_to(directory).as_posix(), p.stat().st_mtime_ns) for p in inside}
